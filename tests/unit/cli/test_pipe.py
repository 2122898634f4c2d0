"""Byte streams into a queue and out of it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer.cli.pipe import (
    Consumed,
    Intake,
    ObservingReader,
    Produced,
    RecordWriter,
    copy_out,
)
from opendata_buffer.config import ProducerConfig
from opendata_buffer.consumer.descriptors import ArrowBatch, BatchDescriptor
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.errors import BatchMissing, DataLoss, Fenced, InvalidInput, QueueReset
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry, QueueEntry
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores import Blob
from opendata_buffer.stores.memory import MemoryStore

# ---- in


def data_of(store: MemoryStore, key: str) -> bytes:
    got = store.get(key)
    assert isinstance(got, Blob)
    return got.data


def entries_of(store: MemoryStore) -> tuple[QueueEntry, ...]:
    return Manifest.parse(data_of(store, "ingest/manifest")).entries()


def records_of(store: MemoryStore) -> list[bytes]:
    return [
        record
        for entry in entries_of(store)
        for record in decode_batch(data_of(store, entry.location))
    ]


def run(
    store: MemoryStore, *chunks: bytes, metadata: bytes = b"", **settings: Any
) -> tuple[Produced, list[tuple[int, int]]]:
    config = ProducerConfig(store="memory://unused", **settings)
    told: list[tuple[int, int]] = []
    pieces = iter([*chunks, b""])
    with Producer(config, store=store) as producer:
        intake = Intake(producer, config, metadata, lambda *each: told.append(each))
        intake.run(lambda limit: next(pieces))
    intake.settle()
    return intake.durable, told


def test_lines_become_records_in_order() -> None:
    store = MemoryStore()
    durable, _ = run(store, b"one\ntw", b"o\n\nthree")
    assert records_of(store) == [b"one", b"two", b"", b"three"]
    assert durable == Produced(records=4, batches=1, bytes=11)


def test_no_input_is_no_batch() -> None:
    store = MemoryStore()
    durable, told = run(store)
    assert (durable, told) == (Produced(), [])


def test_every_call_carries_the_metadata() -> None:
    store = MemoryStore()
    run(store, b"1\n2\n", b"3\n", metadata=b"topic")
    (entry,) = entries_of(store)
    # One range for both calls when they were made in one millisecond.
    ranges = [(each.start_index, each.payload) for each in entry.metadata]
    assert ranges in ([(0, b"topic")], [(0, b"topic"), (2, b"topic")])


def test_the_flush_size_cuts_one_large_read_into_batches() -> None:
    store = MemoryStore()
    lines = [b"%04d" % n for n in range(100)]
    durable, _ = run(store, b"\n".join(lines), flush_size_bytes=79, flush_interval_ms=60_000)
    assert records_of(store) == lines
    # 8 bytes a record: the tenth takes a batch past 79 bytes.
    assert [len(decode_batch(data_of(store, e.location))) for e in entries_of(store)] == [10] * 10
    assert durable == Produced(records=100, batches=10, bytes=400)


def test_no_call_exceeds_the_largest_batch() -> None:
    store = MemoryStore()
    durable, _ = run(store, b"12345\n12345\n12345678\n1\n", max_batch_bytes=12)
    assert records_of(store) == [b"12345", b"12345", b"12345678", b"1"]
    assert durable.batches == 4


def test_a_line_that_fits_into_no_batch_is_refused_after_what_came_before() -> None:
    store = MemoryStore()
    with pytest.raises(InvalidInput, match="line 2 has more than 8 bytes"):
        run(store, b"1\n", b"123456789\n", max_batch_bytes=12)
    assert records_of(store) == [b"1"]


def test_progress_is_told_per_call() -> None:
    _, told = run(MemoryStore(), b"a\nbb\n", b"c")
    assert told == [(3, 2), (1, 1)]


# ---- out


class Queue:
    """Entries that were handed out, fetched and acknowledged, in a log."""

    def __init__(self, *batches: list[bytes] | Exception) -> None:
        self.batches = batches
        self.next = 0
        self.log: list[Any] = []

    def take(self, limit: int) -> list[BatchDescriptor]:
        start, self.next = self.next, min(len(self.batches), self.next + limit)
        self.log.append(("take", limit))
        return [BatchDescriptor(n, f"ingest/{n}.batch") for n in range(start, self.next)]

    def fetch(self, group: Sequence[BatchDescriptor]) -> Iterator[ArrowBatch]:
        for each in group:
            batch = self.batches[each.sequence]
            if isinstance(batch, Exception):
                raise batch
            yield ArrowBatch(pa.array(batch, pa.binary()), each.sequence, each.location, ())

    def acknowledge(self, sequence: int) -> None:
        self.log.append(("ack", sequence))


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
        def acknowledge(self, sequence: int) -> None:
            raise Fenced("ingest/manifest", 1, 2)

    with pytest.raises(Fenced):
        copy(Zombie([b"a"]), Out([]))


# ---- looking without owning


def manifest(first: int, last: int) -> Manifest:
    made = Manifest.empty().append([NewEntry(f"ingest/{n}.batch") for n in range(last + 1)])
    return made.drop_through(first - 1) if first else made


def observing(read: Callable[[], Manifest], after: int | None = None) -> ObservingReader:
    handle = FetchHandle(MemoryStore(), data_path_prefix="ingest")
    return ObservingReader(read, "m", handle, SystemRuntime(), after)


def sequences(peek: ObservingReader, limit: int = 100) -> list[int]:
    return [each.sequence for each in peek.take(limit)]


def test_peek_walks_the_queue_once() -> None:
    peek = observing(lambda: manifest(2, 5))
    assert sequences(peek, 3) == [2, 3, 4]
    assert sequences(peek, 3) == [5]
    assert sequences(peek, 3) == []


def test_peek_starts_after_a_sequence() -> None:
    assert sequences(observing(lambda: manifest(2, 5), 3)) == [4, 5]
    assert sequences(observing(lambda: manifest(2, 5), 1)) == [2, 3, 4, 5]
    assert sequences(observing(lambda: manifest(2, 5), 5)) == []


def test_peek_sees_what_is_appended_later() -> None:
    now = manifest(0, 1)
    peek = observing(lambda: now)
    assert sequences(peek) == [0, 1]
    now = manifest(0, 3)
    assert sequences(peek) == [2, 3]


def test_peek_at_an_empty_queue_that_had_entries() -> None:
    now = manifest(3, 2)
    peek = observing(lambda: now)
    assert sequences(peek) == []
    now = manifest(3, 4)
    assert sequences(peek) == [3, 4]


def test_f28_entries_that_were_dequeued_under_a_peek_are_not_skipped_silently() -> None:
    now = manifest(0, 5)
    peek = observing(lambda: now)
    assert sequences(peek, 2) == [0, 1]
    now = manifest(4, 5)
    with pytest.raises(DataLoss, match="sequence 2 is needed but manifest 'm' starts at 4"):
        peek.take(1)


def test_f27_peek_after_a_sequence_the_queue_never_had() -> None:
    with pytest.raises(QueueReset, match="ends at 5"):
        observing(lambda: manifest(2, 5), 6).take(1)
