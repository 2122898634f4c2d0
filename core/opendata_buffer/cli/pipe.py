"""From a queue or a topic to a byte stream: what ``consume`` does."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NamedTuple, Protocol

import pyarrow.compute as pc

from opendata_buffer.cli.rendering import Render
from opendata_buffer.consumer.fetch import ArrowBatch
from opendata_buffer.framing import FRAMINGS, Framing
from opendata_buffer.topic.consumer import TopicArrowBatch

__all__ = ["Consumed", "Reader", "RecordWriter", "Written", "copy_out", "framed"]

GROUP_BATCHES = 100
"""Batches per acknowledgement: one manifest write for all (OpenData RFC 0001, Consumer)."""


@dataclass
class Consumed:
    """What was written out; ``bytes`` are those of the records, however they were written.

    Attributes:
        last_sequence: Of the last batch of a queue.
        last_sequences: Of a topic, by partition; None for a queue.
    """

    records: int = 0
    batches: int = 0
    bytes: int = 0
    last_sequence: int | None = None
    last_sequences: dict[str, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """All fields that a queue, or a topic, has."""
        fields = asdict(self)
        del fields["last_sequence" if self.last_sequences is not None else "last_sequences"]
        return fields


class Written(NamedTuple):
    """A batch that was written out; its records need not be kept."""

    partition: str
    sequence: int


class Reader(Protocol):
    """Where :func:`copy_out` takes batches from."""

    def read(self, limit: int) -> Iterable[ArrowBatch]:
        """The next batches, at most ``limit``; none when there are none yet."""
        ...

    def acknowledge(self, written: Sequence[Written]) -> None:
        """These were written out, in the order in which they were read."""
        ...


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
        topic: Batches are those of a topic.
    """

    def __init__(
        self,
        stream: BinaryIO,
        advance: Callable[[int, int], None] = lambda size, records: None,
        render: Render | None = None,
        *,
        topic: bool = False,
    ) -> None:
        self._stream = stream
        self._render = framed(FRAMINGS["lines"]) if render is None else render
        self.advance = advance
        self.total = Consumed(last_sequences={} if topic else None)

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
        if total.last_sequences is not None and isinstance(batch, TopicArrowBatch):
            total.last_sequences[batch.partition] = batch.sequence
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
        if _copy_group(reader, writer, min(GROUP_BATCHES, left)):
            continue
        if wait is None:
            return
        wait()


def _copy_group(reader: Reader, writer: RecordWriter, limit: int) -> int:
    """Write out and acknowledge some batches; how many."""
    written: list[Written] = []
    try:
        for batch in reader.read(limit):
            writer.write(batch)
            partition = batch.partition if isinstance(batch, TopicArrowBatch) else ""
            written.append(Written(partition, batch.sequence))
    except BrokenPipeError:
        written.clear()
        raise
    finally:
        if written:
            writer.persist()
            reader.acknowledge(written)
    return len(written)
