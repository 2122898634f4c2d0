"""Writes to several queues that become visible all together, or not at all."""
