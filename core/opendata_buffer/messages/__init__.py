"""Exactly-once messages: identities in v1 UUIDs, and the sequencer that reads by them."""
