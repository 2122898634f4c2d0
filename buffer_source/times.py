"""When the records of a batch were taken in, as far as its queue entry tells. Pure.

The producer writes a time for each range of records. A batch without any is as old as its name
says, which is a ULID; that of a Spark sink's batch may lie in the future, so it is asked last.
"""

from __future__ import annotations

from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.formats.keys import location_timestamp_ms

__all__ = ["newest_ms", "oldest_ms"]


def oldest_ms(batch: BatchDescriptor) -> int | None:
    """Of the batch's first record, milliseconds since the Unix epoch; None if nobody wrote one."""
    times = [each.ingestion_time_ms for each in batch.metadata]
    return min(times) if times else location_timestamp_ms(batch.location)


def newest_ms(batch: BatchDescriptor) -> int | None:
    """Of the batch's last record, milliseconds since the Unix epoch; None if nobody wrote one."""
    times = [each.ingestion_time_ms for each in batch.metadata]
    return max(times) if times else location_timestamp_ms(batch.location)
