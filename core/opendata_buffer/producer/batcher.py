"""Which entries go into which batch: a pure accumulator (OpenData RFC 0001, Producer).

Knows no thread, clock or store: times are passed in, as seconds on a monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from opendata_buffer.commit.durability import Completion
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.batch import Compression, encode_block, seal_block
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata

__all__ = ["Batch", "Batcher", "Call", "encode_entries"]

MAX_RECORDS = 2**32 - 1

METADATA_FLUSH_BYTES = 4 * 1024 * 1024
"""Metadata beyond which a batch is full: it is one entry of the manifest (failure F35)."""


def encode_entries(entries: Any) -> tuple[bytes | memoryview, int]:
    """The record block of one ``produce()`` call, and the number of entries in it.

    Raises:
        InvalidInput: See :func:`.encode_block` and :func:`.encode_arrow_block`.
    """
    if isinstance(entries, pa.Array | pa.ChunkedArray):
        return encode_arrow_block(entries)
    if isinstance(entries, bytes | bytearray | memoryview | str):
        raise InvalidInput(
            f"entries is one {type(entries).__name__}: give a list of entries, [entry]"
        )
    taken = list(entries)
    return encode_block(taken), len(taken)


@dataclass(frozen=True, slots=True)
class Call:
    """One ``produce()`` call, encoded.

    Attributes:
        block: Its entries as a piece of a record block.
        count: How many entries.
        metadata: The caller's metadata payload.
        ingestion_time_ms: When the call was made.
        transaction: Identity of the call; it then has a batch of its own.
    """

    block: bytes | memoryview
    count: int
    metadata: bytes
    ingestion_time_ms: int
    transaction: Transaction | None = None


@dataclass(slots=True)
class Batch:
    """Entries on their way into one object."""

    completion: Completion
    due_at: float
    calls: list[Call] = field(default_factory=list)
    size: int = 0
    metadata_size: int = 0
    count: int = 0

    @property
    def transaction(self) -> Transaction | None:
        """Identity of the call that has this batch to itself."""
        return self.calls[0].transaction if self.calls else None

    def metadata(self) -> tuple[Metadata, ...]:
        """One range per call, in produce order (OpenData RFC 0001, Manifest Format)."""
        ranges = []
        start = 0
        for call in self.calls:
            ranges.append(Metadata(start, call.ingestion_time_ms, call.metadata))
            start += call.count
        return tuple(ranges)

    def encode(self, compression: Compression, level: int) -> bytes:
        """The object's bytes."""
        return seal_block([call.block for call in self.calls], self.count, compression, level)


class Batcher:
    """Accumulates calls until size or age says that a batch is full.

    Args:
        flush_interval: Seconds in which the open batch becomes due, at the latest.
        flush_size: Bytes beyond which it is full; a loose limit.
        max_size: Bytes no batch exceeds.
    """

    def __init__(self, *, flush_interval: float, flush_size: int, max_size: int) -> None:
        self._flush_interval = flush_interval
        self._flush_size = flush_size
        self._max_size = max_size
        self._open: Batch | None = None
        self._last_due_at: float | None = None

    @property
    def due_at(self) -> float | None:
        """When the open batch must be taken; None when there is none."""
        return None if self._open is None else self._open.due_at

    def is_due(self, now: float) -> bool:
        """Whether the open batch has reached its age."""
        due_at = self.due_at
        return due_at is not None and now >= due_at

    def add(self, call: Call, completion: Completion, now: float) -> tuple[Completion, list[Batch]]:
        """Put a call into the open batch.

        Args:
            call: The call.
            completion: Used if the call opens a batch.
            now: Seconds.

        Returns:
            The completion of the batch the call went into, and the batches that are full now.
        """
        full = []
        batch = self._open
        if batch is not None and (
            call.transaction is not None
            or batch.size + len(call.block) > self._max_size
            or batch.count + call.count > MAX_RECORDS
        ):
            full.append(batch)
            batch = None
        if batch is None:
            batch = Batch(completion, self._next_due_at(now))
            self._last_due_at = batch.due_at
        batch.calls.append(call)
        batch.size += len(call.block)
        batch.metadata_size += len(call.metadata)
        batch.count += call.count
        self._open = batch
        # Also by age: callers keep coming while the flush thread waits for the lock (failure F32).
        if (
            call.transaction is not None
            or batch.size > self._flush_size
            or batch.metadata_size > METADATA_FLUSH_BYTES
            or self.is_due(now)
        ):
            full.append(batch)
            self._open = None
        return batch.completion, full

    def _next_due_at(self, now: float) -> float:
        """At most an interval from now, and under a steady load one interval after the last.

        Counted from the first call alone, the wait for that call would add to every interval.
        """
        last = self._last_due_at
        if last is not None and last <= now < last + self._flush_interval:
            return last + self._flush_interval
        return now + self._flush_interval

    def take(self) -> Batch | None:
        """Take the open batch, however small."""
        batch, self._open = self._open, None
        return batch
