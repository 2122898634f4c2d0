"""Exactly-once messages: identities in v1 UUIDs, and the sequencer that reads by them."""

from __future__ import annotations

from opendata_buffer.messages.sequencer import Message, Outcome, ProducerState, Sequencer
from opendata_buffer.messages.undecided import Undecided, undecided
from opendata_buffer.messages.uuids import (
    ACK_TXN,
    CONTINUE_TXN,
    FINAL,
    OUTSIDE_TXN,
    Clock,
    MessageId,
    build_uuid,
    new_producer_id,
    parse_uuid,
)

__all__ = [
    "ACK_TXN",
    "CONTINUE_TXN",
    "FINAL",
    "OUTSIDE_TXN",
    "Clock",
    "Message",
    "MessageId",
    "Outcome",
    "ProducerState",
    "Sequencer",
    "Undecided",
    "build_uuid",
    "new_producer_id",
    "parse_uuid",
    "undecided",
]
