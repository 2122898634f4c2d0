"""Between a byte stream and a queue: what ``produce`` and ``consume`` do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from opendata_buffer.cli.lines import LineSplitter, join_lines
from opendata_buffer.commit.durability import WriteHandle
from opendata_buffer.config import ProducerConfig
from opendata_buffer.consumer.descriptors import ArrowBatch, BatchDescriptor
from opendata_buffer.errors import DataLoss, QueueReset
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.producer.producer import Producer

__all__ = ["Consumed", "Intake", "Peek", "Produced", "copy_out"]

READ_BYTES = 1024 * 1024
GROUP_BATCHES = 100
"""Batches per acknowledgement: one manifest write for all (OpenData RFC 0001, Consumer)."""


@dataclass
class Produced:
    """What is durable so far, always a prefix of the input."""

    records: int = 0
    batches: int = 0
    bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class Intake:
    """Produces the lines of a stream.

    Memory is bounded by the producer's buffers: a ``produce()`` call per piece that was read,
    so that slow input is flushed by age and fast input by size.

    Args:
        producer: Where lines go.
        config: Its settings.
        metadata: Payload of every call.
        advance: Told the bytes and records read.
    """

    def __init__(
        self,
        producer: Producer,
        config: ProducerConfig,
        metadata: bytes,
        advance: Callable[[int, int], None] = lambda size, records: None,
    ) -> None:
        self._producer = producer
        self._flush_size = config.flush_size_bytes
        self._max_call = config.max_batch_bytes
        self._metadata = metadata
        self._advance = advance
        self._pending: deque[tuple[WriteHandle, int, int]] = deque()
        self._last_sequence: int | None = None
        self.durable = Produced()

    def run(self, read: Callable[[int], bytes]) -> None:
        """Produce until the stream ends. Not all is durable then: close the producer, then settle.

        Args:
            read: Returns what is there, up to a number of bytes; blocks for the first.

        Raises:
            InvalidInput: A line that fits into no batch.
            OpenDataBufferError: A batch was given up; the rest of the input was not read.
        """
        splitter = LineSplitter(self._max_call - 4)
        while chunk := read(READ_BYTES):
            self._produce(splitter.feed(chunk))
            self.settle()
        self._produce(splitter.finish())

    def settle(self) -> None:
        """Count what has become durable.

        Raises:
            OpenDataBufferError: A batch was given up.
        """
        while self._pending:
            handle, records, size = self._pending[0]
            done = handle.watcher.result()
            if done is None:
                return
            self._pending.popleft()
            self.durable.records += records
            self.durable.bytes += size
            # Calls that share a batch are neighbours, because batches keep produce order.
            self.durable.batches += done.sequence != self._last_sequence
            self._last_sequence = done.sequence

    def _produce(self, lines: Sequence[bytes]) -> None:
        for group in _groups(lines, self._flush_size, self._max_call):
            handle = self._producer.produce(group, self._metadata)
            size = sum(map(len, group))
            self._pending.append((handle, len(group), size))
            self._advance(size, len(group))


def _groups(lines: Sequence[bytes], full: int, limit: int) -> Iterator[list[bytes]]:
    """Cut into calls: one that exceeds ``full`` bytes is complete, none exceeds ``limit``."""
    group: list[bytes] = []
    size = 0
    for line in lines:
        # Each record takes four more bytes in a batch, its length.
        if group and (size > full or size + len(line) + 4 > limit):
            yield group
            group, size = [], 0
        group.append(line)
        size += len(line) + 4
    if group:
        yield group


@dataclass
class Consumed:
    """What was written out."""

    records: int = 0
    batches: int = 0
    bytes: int = 0
    last_sequence: int | None = None

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class Peek:
    """Hands out queue entries without owning the queue: no epoch, nothing dequeued.

    Args:
        read: The manifest as it is now.
        key: Its name, for messages.
        last_acked_sequence: Start after it; None starts at the oldest entry.
    """

    def __init__(
        self, read: Callable[[], Manifest], key: str, last_acked_sequence: int | None
    ) -> None:
        self._read = read
        self._key = key
        self._next = None if last_acked_sequence is None else last_acked_sequence + 1

    def take(self, limit: int) -> list[BatchDescriptor]:
        """The next entries, at most ``limit``; empty when there are none yet.

        Raises:
            DataLoss: The next one was dequeued by the queue's consumer meanwhile.
            QueueReset: The queue ends before the start.
        """
        manifest = self._read()
        start = manifest.first_sequence if self._next is None else self._next
        if start < manifest.first_sequence:
            raise DataLoss(
                self._key,
                start,
                manifest.first_sequence,
                "The queue's consumer took them. Start without --last-acked-sequence to look at "
                "what is left.",
            )
        if start > manifest.next_sequence:
            raise QueueReset(
                f"cannot start after sequence {start - 1}: manifest {self._key!r} ends at "
                f"{manifest.next_sequence - 1}. The position belongs to another queue; start "
                "without --last-acked-sequence."
            )
        entries = manifest.entries(start=start, limit=limit)
        self._next = start + len(entries)
        return [BatchDescriptor.of(entry) for entry in entries]


def copy_out(
    take: Callable[[int], Sequence[BatchDescriptor]],
    fetch: Callable[[Sequence[BatchDescriptor]], Iterable[ArrowBatch]],
    acknowledge: Callable[[int], object],
    out: BinaryIO,
    total: Consumed,
    *,
    max_batches: int | None,
    wait: Callable[[], None] | None,
    persist: Callable[[], None] = lambda: None,
    advance: Callable[[int, int], None] = lambda size, records: None,
) -> None:
    """Write records as lines, then acknowledge them, group by group.

    A group is acknowledged in one manifest write after its last byte was written out. When
    something fails in the middle of one, its complete batches are acknowledged and the rest is
    delivered again. When the reader of ``out`` is gone (BrokenPipeError), the group is not
    acknowledged: what the reader got of it is not known.

    Args:
        take: Hands out up to a number of entries.
        fetch: Fetches them, in order.
        acknowledge: Called with the last sequence written out.
        out: Where the lines go.
        total: Counts what was written out.
        max_batches: Stop after so many; None for no limit.
        wait: Called when the queue is empty; None ends then.
        persist: Makes what was written survive, before it is acknowledged.
        advance: Told the bytes and records written.
    """
    while max_batches is None or total.batches < max_batches:
        left = GROUP_BATCHES if max_batches is None else max_batches - total.batches
        group = take(min(GROUP_BATCHES, left))
        if not group:
            if wait is None:
                return
            wait()
            continue
        written: int | None = None
        try:
            for batch in fetch(group):
                lines = join_lines(batch.values)
                out.write(lines)
                out.flush()
                written = batch.sequence
                total.batches += 1
                total.records += len(batch.values)
                total.bytes += len(lines)
                total.last_sequence = written
                advance(len(lines), len(batch.values))
        except BrokenPipeError:
            written = None
            raise
        finally:
            if written is not None:
                persist()
                acknowledge(written)
