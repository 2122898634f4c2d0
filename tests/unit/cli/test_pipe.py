"""Batches out of a queue, to a byte stream."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer.cli.pipe import Consumed, RecordWriter, Written, copy_out
from opendata_buffer.consumer.fetch import ArrowBatch
from opendata_buffer.errors import BatchMissing, Fenced
from opendata_buffer.topic.consumer import TopicArrowBatch


class Queue:
    """Entries that were handed out, fetched and acknowledged, in a log."""

    def __init__(self, *batches: list[bytes] | Exception) -> None:
        self.batches = batches
        self.next = 0
        self.log: list[Any] = []

    def read(self, limit: int) -> Iterator[ArrowBatch]:
        start, self.next = self.next, min(len(self.batches), self.next + limit)
        self.log.append(("take", limit))
        for sequence in range(start, self.next):
            batch = self.batches[sequence]
            if isinstance(batch, Exception):
                raise batch
            values = pa.array(batch, pa.binary())
            yield ArrowBatch(values, sequence, f"ingest/{sequence}.batch", ())

    def acknowledge(self, written: Sequence[Written]) -> None:
        sequences = [each.sequence for each in written]
        assert sequences == list(range(sequences[0], sequences[-1] + 1))
        self.log.append(("ack", sequences[-1]))


class Lines(RecordWriter):
    """Notes the moment at which it was told to persist."""

    def __init__(self, stream: Any, log: list[Any]) -> None:
        super().__init__(stream)
        self.log = log

    def persist(self) -> None:
        self.log.append("persist")


def copy(
    queue: Queue,
    out: Any,
    *,
    max_batches: int | None = None,
    wait: Callable[[], None] | None = None,
) -> Consumed:
    writer = Lines(out, queue.log)
    copy_out(queue, writer, max_batches=max_batches, wait=wait)
    return writer.total


class Out(io.BytesIO):
    """Remembers when it was written and flushed, next to the queue's own log."""

    def __init__(self, log: list[Any], broken_after: int | None = None) -> None:
        super().__init__()
        self.log = log
        self.left = broken_after

    def write(self, data: Any) -> int:
        if self.left == 0:
            raise BrokenPipeError
        if self.left is not None:
            self.left -= 1
        self.log.append(("write", bytes(data)))
        return super().write(data)

    def flush(self) -> None:
        self.log.append("flush")


def test_records_are_written_and_flushed_before_they_are_acknowledged() -> None:
    queue = Queue([b"a", b""], [b"\x00\xff"])
    out = Out(queue.log)
    total = copy(queue, out)
    assert out.getvalue() == b"a\n\n\x00\xff\n"
    assert total == Consumed(records=3, batches=2, bytes=3, last_sequence=1)
    assert queue.log == [
        ("take", 100),
        ("write", b"a\n\n"),
        "flush",
        ("write", b"\x00\xff\n"),
        "flush",
        "persist",
        ("ack", 1),
        ("take", 100),
    ]


def test_an_empty_queue_ends_at_once() -> None:
    queue = Queue()
    assert copy(queue, Out(queue.log)) == Consumed()
    assert queue.log == [("take", 100)]


def test_max_batches_takes_no_more_than_that() -> None:
    queue = Queue(*[[b"x"]] * 300)
    total = copy(queue, Out([]), max_batches=150)
    assert total.batches == 150
    assert queue.log == [
        ("take", 100),
        "persist",
        ("ack", 99),
        ("take", 50),
        "persist",
        ("ack", 149),
    ]


def test_no_batches_at_all_takes_nothing() -> None:
    queue = Queue([b"x"])
    assert copy(queue, Out([]), max_batches=0) == Consumed()
    assert queue.log == []


def test_follow_waits_when_the_queue_is_empty() -> None:
    queue = Queue([b"x"])

    def wait() -> None:
        queue.log.append("wait")
        queue.batches = (*queue.batches, [b"y"])

    assert copy(queue, Out([]), max_batches=2, wait=wait).records == 2
    assert queue.log == [
        ("take", 2), "persist", ("ack", 0), ("take", 1), "wait", ("take", 1), "persist", ("ack", 1)
    ]  # fmt: skip


def test_f25_what_came_before_a_poison_batch_is_acknowledged() -> None:
    poison = BatchMissing(2, "ingest/2.batch", "gone")
    queue = Queue([b"a"], [b"b"], poison, [b"d"])
    out = Out([])
    with pytest.raises(BatchMissing):
        copy(queue, out)
    assert out.getvalue() == b"a\nb\n"
    assert queue.log[-2:] == ["persist", ("ack", 1)]


def test_a_poison_batch_at_the_head_acknowledges_nothing() -> None:
    queue = Queue(BatchMissing(0, "ingest/0.batch", "gone"))
    with pytest.raises(BatchMissing):
        copy(queue, Out([]))
    assert queue.log == [("take", 100)]


def test_an_interrupt_acknowledges_what_was_written_out() -> None:
    queue = Queue([b"a"], [b"b"])

    class Interrupted(Out):
        def flush(self) -> None:
            if self.getvalue().endswith(b"b\n"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(queue, Interrupted(queue.log))
    assert queue.log[-1] == ("ack", 0)


def test_a_reader_that_went_away_gets_the_whole_group_again() -> None:
    queue = Queue([b"a"], [b"b"], [b"c"])
    with pytest.raises(BrokenPipeError):
        copy(queue, Out([], broken_after=2))
    assert queue.log == [("take", 100)]


def test_f8_a_fenced_consumer_says_so() -> None:
    class Zombie(Queue):
        def acknowledge(self, written: Sequence[Written]) -> None:
            raise Fenced("ingest/manifest", 1, 2)

    with pytest.raises(Fenced):
        copy(Zombie([b"a"]), Out([]))


def test_of_a_topic_the_last_sequence_of_each_partition_is_told() -> None:
    writer = RecordWriter(io.BytesIO(), topic=True)
    assert writer.total.as_json()["last_sequences"] == {}
    for partition, sequence in [("p-0", 3), ("p-1", 7), ("p-0", 4)]:
        values = pa.array([b"x"], pa.binary())
        writer.write(TopicArrowBatch(values, sequence, "l", (), partition=partition))
    assert writer.total.as_json() == {
        "records": 3, "batches": 3, "bytes": 3, "last_sequences": {"p-0": 4, "p-1": 7},
    }  # fmt: skip
