"""Between a byte stream and a queue: what ``produce`` and ``consume`` do."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Protocol

import pyarrow.compute as pc

from opendata_buffer.cli.described import Described, Same
from opendata_buffer.cli.rendering import Render
from opendata_buffer.commit.durability import WriteHandle
from opendata_buffer.config import ProducerConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.descriptors import ArrowBatch, BatchDescriptor
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.errors import DataLoss, OpenDataBufferError, QueueReset
from opendata_buffer.formats import MIB
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.framing import FRAMINGS, Framing
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import Runtime

__all__ = [
    "Consumed",
    "Intake",
    "ObservingReader",
    "OwningReader",
    "Produced",
    "Reader",
    "RecordWriter",
    "copy_out",
    "framed",
]

READ_BYTES = MIB
READ_AHEAD_BYTES = 64 * MIB
"""Decoded batches that are held while one is written out."""
GROUP_BATCHES = 100
"""Batches per acknowledgement: one manifest write for all (OpenData RFC 0001, Consumer)."""


@dataclass
class Produced:
    """What is durable so far, always a prefix of the input; ``bytes`` are those of the records."""

    records: int = 0
    batches: int = 0
    bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class Intake:
    """Produces the records of a stream.

    Memory is bounded by the producer's buffers: a ``produce()`` call per piece that was read,
    so that slow input is flushed by age and fast input by size.

    Args:
        producer: Where records go.
        config: Its settings.
        metadata: Payload of every call, or what knows that of each record.
        advance: Told the bytes and records read.
        framing: How records are told apart.
        longest: Bytes that a record may have in the stream, where it is written in another way
            there; by default what fits into a batch.
    """

    def __init__(
        self,
        producer: Producer,
        config: ProducerConfig,
        metadata: bytes | Described,
        advance: Callable[[int, int], None] = lambda size, records: None,
        framing: Framing = FRAMINGS["lines"],
        longest: int | None = None,
    ) -> None:
        self._producer = producer
        self._framing = framing
        self._flush_size = config.flush_size_bytes
        self._max_call = config.max_batch_bytes
        self._longest = config.max_batch_bytes - 4 if longest is None else longest
        self._described: Described = Same(metadata) if isinstance(metadata, bytes) else metadata
        self._advance = advance
        self._pending: deque[tuple[WriteHandle, int, int]] = deque()
        self._last_sequence: int | None = None
        self._settling = threading.Lock()
        self.durable = Produced()

    def run(self, read: Callable[[int], bytes]) -> None:
        """Produce until the stream ends. Not all is durable then: close the producer, then settle.

        Args:
            read: Returns what is there, up to a number of bytes; blocks for the first.

        Raises:
            InvalidInput: A record that fits into no batch, or is none in this framing. Those
                before it are produced.
            OpenDataBufferError: A batch was given up; the rest of the input was not read.
        """
        splitter = self._framing.splitter(self._longest)
        while chunk := read(READ_BYTES):
            self._produce(splitter.feed(chunk))
            self.settle()
        self._produce(splitter.finish())
        self._described.finish()

    def take(self, records: Iterable[bytes]) -> None:
        """Produce records that are whole already; as :meth:`run` for what comes of them.

        Raises:
            InvalidInput: One of them fits into no batch. Those before it are produced.
            OpenDataBufferError: A batch was given up.
        """
        for record in records:
            self._produce([record])
            self.settle()
        self._described.finish()

    def settle(self) -> None:
        """Count what has become durable; from any thread.

        Raises:
            OpenDataBufferError: A batch was given up.
        """
        with self._settling:
            self._settle()

    def last_words(self) -> str:
        """What became of the input when a signal ends the command."""
        # With a timeout: the thread that was interrupted may hold the lock for ever.
        if self._settling.acquire(timeout=0.5):
            with suppress(OpenDataBufferError):
                self._settle()
            self._settling.release()
        return f"ended by a signal: of the input, {self.durable_part()}"

    def _settle(self) -> None:
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

    def durable_part(self) -> str:
        """Which records of the input are durable, in words."""
        done, unit = self.durable.records, self._framing.unit
        if done:
            return f"{unit} 1 to {done} are durable"
        return f"not one {unit.removesuffix('s')} is known to be durable"

    def _produce(self, records: Sequence[bytes]) -> None:
        for run, metadata in self._described.runs(records):
            for group in _groups(run, self._flush_size, self._max_call):
                handle = self._producer.produce(group, metadata)
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
    """What was written out; ``bytes`` are those of the records, however they were written."""

    records: int = 0
    batches: int = 0
    bytes: int = 0
    last_sequence: int | None = None

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


class Reader(Protocol):
    """Where :func:`copy_out` takes batches from."""

    def take(self, limit: int) -> Sequence[BatchDescriptor]:
        """The next entries, at most ``limit``; empty when there are none yet."""
        ...

    def fetch(self, group: Sequence[BatchDescriptor]) -> Iterable[ArrowBatch]:
        """The batches of some entries, in order."""
        ...

    def acknowledge(self, sequence: int) -> None:
        """Everything up to this sequence was written out."""
        ...


class OwningReader:
    """Reads as the queue's consumer: what was written out leaves the queue."""

    def __init__(self, consumer: Consumer, runtime: Runtime) -> None:
        self._consumer = consumer
        self._handle = consumer.fetch_handle()
        self._runtime = runtime

    def take(self, limit: int) -> Sequence[BatchDescriptor]:
        """The consumer's next entries; raises as ``Consumer.next_descriptors``."""
        return self._consumer.next_descriptors(limit)

    def fetch(self, group: Sequence[BatchDescriptor]) -> Iterable[ArrowBatch]:
        """As :func:`.fetch_many`."""
        return _fetch(self._handle, group, self._runtime)

    def acknowledge(self, sequence: int) -> None:
        """Raises as ``Consumer.ack_through``."""
        self._consumer.ack_through(sequence)


class ObservingReader:
    """Reads without owning the queue: takes no epoch over and acknowledges nothing.

    Args:
        read: The manifest as it is now.
        key: Its name, for messages.
        handle: Fetches batches.
        runtime: Threads of the read-ahead.
        last_acked_sequence: Start after it; None starts at the oldest entry.
        start: Start at this sequence instead.
    """

    def __init__(
        self,
        read: Callable[[], Manifest],
        key: str,
        handle: FetchHandle,
        runtime: Runtime,
        last_acked_sequence: int | None,
        *,
        start: int | None = None,
    ) -> None:
        self._read = read
        self._key = key
        self._handle = handle
        self._runtime = runtime
        self._next = start if last_acked_sequence is None else last_acked_sequence + 1

    def take(self, limit: int) -> Sequence[BatchDescriptor]:
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
                "The queue's consumer took them. Start with --from earliest to look at what is "
                "left.",
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

    def fetch(self, group: Sequence[BatchDescriptor]) -> Iterable[ArrowBatch]:
        """As :func:`.fetch_many`."""
        return _fetch(self._handle, group, self._runtime)

    def acknowledge(self, sequence: int) -> None:
        """Does nothing: the batches stay in the queue."""


def _fetch(
    handle: FetchHandle, group: Sequence[BatchDescriptor], runtime: Runtime
) -> Iterable[ArrowBatch]:
    return fetch_many(
        handle.fetch_arrow, group, max_in_flight_bytes=READ_AHEAD_BYTES, runtime=runtime
    )


def framed(framing: Framing) -> Render:
    """Records as a framing has them.

    The function raises InvalidInput for a batch with a record that is none in this framing.
    """
    return lambda batch: framing.framed(batch.values, batch.sequence)


class RecordWriter:
    """Writes the records of batches to a stream, and counts them.

    Args:
        stream: Where they go.
        advance: Told the bytes and records of each batch.
        render: What is written of a batch; by default its records as lines.
    """

    def __init__(
        self,
        stream: BinaryIO,
        advance: Callable[[int, int], None] = lambda size, records: None,
        render: Render | None = None,
    ) -> None:
        self._stream = stream
        self._render = framed(FRAMINGS["lines"]) if render is None else render
        self.advance = advance
        self.total = Consumed()

    def write(self, batch: ArrowBatch) -> None:
        """Hand all records of a batch to the stream's reader.

        Raises:
            InvalidInput: One of them is none in this framing; nothing of the batch is written.
            BrokenPipeError: The reader is gone.
            OSError: They were not, or not all, written.
        """
        self._stream.write(self._render(batch))
        self._stream.flush()
        size = pc.sum(pc.binary_length(batch.values)).as_py() or 0
        total = self.total
        total.batches += 1
        total.records += len(batch.values)
        total.bytes += size
        total.last_sequence = batch.sequence
        self.advance(size, len(batch.values))

    def report(self) -> str:
        """The line of JSON that says what was written out."""
        return json.dumps(self.total.as_json())

    def persist(self) -> None:
        """Make what was written survive a power cut, if it is a file; a pipe needs nothing."""
        try:
            fd = self._stream.fileno()
        except OSError:
            return
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.fsync(fd)


def copy_out(
    reader: Reader,
    writer: RecordWriter,
    *,
    max_batches: int | None = None,
    wait: Callable[[], None] | None = None,
) -> None:
    """Write records out, then acknowledge them, group by group.

    A group is acknowledged in one manifest write after its last byte was written out. When
    something fails in the middle of one, its complete batches are acknowledged and the rest is
    delivered again. When the reader of the stream is gone (BrokenPipeError), the group is not
    acknowledged: what that reader got of it is not known.

    Args:
        reader: Where batches come from.
        writer: Where their lines go; it counts them.
        max_batches: Stop after so many; None for no limit.
        wait: Called when the queue is empty; None ends then.
    """
    while max_batches is None or writer.total.batches < max_batches:
        left = GROUP_BATCHES if max_batches is None else max_batches - writer.total.batches
        group = reader.take(min(GROUP_BATCHES, left))
        if group:
            _copy_group(reader, writer, group)
        elif wait is None:
            return
        else:
            wait()


def _copy_group(reader: Reader, writer: RecordWriter, group: Sequence[BatchDescriptor]) -> None:
    written: int | None = None
    try:
        for batch in reader.fetch(group):
            writer.write(batch)
            written = batch.sequence
    except BrokenPipeError:
        written = None
        raise
    finally:
        if written is not None:
            writer.persist()
            reader.acknowledge(written)
