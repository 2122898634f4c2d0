"""Batch objects: named, sealed and stored; small ones joined; several at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

from buffer_sink.messages import SmallBatch, TopicWrite, UploadedBatch, WriteTask
from buffer_sink.options import SinkOptions
from buffer_sink.rows import Block
from buffer_sink.uploads import BatchObjects, UploadWindow, join_blocks, store_small
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.batch import Compression, decode_batch, parse_footer
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import Transaction, location_timestamp_ms, parse_location
from opendata_buffer.messages import parse_uuid
from opendata_buffer.runtime import Moment, SystemRuntime
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime


def window(concurrency: int) -> UploadWindow:
    return UploadWindow(concurrency, SystemRuntime())


def upload_threads() -> int:
    """Other threads of this process, of tests before, may end at any time."""
    return sum(each.name == "buffer-sink-upload" for each in threading.enumerate())


class Gate:
    """Jobs that say when they begin, and end when they are let go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.done: list[int] = []

    def job(self, number: int) -> Callable[[], None]:
        def run() -> None:
            self.begun.release()
            assert self.go.acquire(timeout=30)
            self.done.append(number)

        return run


def test_all_jobs_are_done_when_the_window_is_left() -> None:
    done: list[int] = []
    with window(3) as made:
        for number in range(20):
            made.submit(lambda number=number: done.append(number))  # type: ignore[misc]
    assert sorted(done) == list(range(20))


def test_submit_blocks_while_all_threads_are_busy_and_one_job_waits() -> None:
    gate = Gate()
    fourth = threading.Event()
    with window(2) as made:
        for number in range(2):
            made.submit(gate.job(number))
        assert gate.begun.acquire(timeout=30)
        assert gate.begun.acquire(timeout=30)
        made.submit(gate.job(2))  # waits for a thread

        def more() -> None:
            made.submit(gate.job(3))
            fourth.set()

        submitter = threading.Thread(target=more)
        submitter.start()
        # Nothing may free the window but the end of a job.
        assert not fourth.wait(0.05)
        gate.go.release()
        assert fourth.wait(30)
        for _ in range(3):
            gate.go.release()
        submitter.join()
    assert sorted(gate.done) == [0, 1, 2, 3]


def test_the_first_failure_reaches_the_next_submit() -> None:
    def fail() -> None:
        raise OSError("disk full")

    submitted: list[int] = []

    def use() -> None:
        with window(1) as made:
            for number in range(100):
                made.submit(fail)
                submitted.append(number)

    with pytest.raises(OSError, match="disk full"):
        use()
    assert len(submitted) <= 2


def test_the_failure_of_the_last_job_is_not_lost() -> None:
    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"), window(4) as made:
        made.submit(fail)


def test_an_error_of_the_caller_drops_what_waits_and_ends_the_threads() -> None:
    gate = Gate()

    def use() -> None:
        with window(1) as made:
            made.submit(gate.job(0))
            assert gate.begun.acquire(timeout=30)
            made.submit(gate.job(1))
            gate.go.release()
            raise KeyError("caller")

    with pytest.raises(KeyError, match="caller"):
        use()
    assert 1 not in gate.done or gate.done == [0, 1]
    assert upload_threads() == 0


OPTIONS = SinkOptions(
    queue=QueueConfig(store="memory://x"),
    compression=Compression.ZSTD,
    max_write_duration_ms=3_600_000,
)
TXN = Transaction("q", 4)


def batch_objects(store: MemoryStore, topic: TopicWrite | None = None) -> BatchObjects:
    return BatchObjects(
        OPTIONS,
        WriteTask(0, Moment(0, 0.0), TXN, topic=topic),
        store=store,
        runtime=ManualRuntime(),
    )


def test_f5_a_name_is_ahead_of_time_and_says_whose_the_batch_is() -> None:
    name = batch_objects(MemoryStore()).name(None, 0)
    assert location_timestamp_ms(name) == ManualRuntime().now_ms() + 3_600_000
    parsed = parse_location(name, "ingest")
    assert parsed is not None
    assert (parsed.txn, parsed.message) == (TXN, None)


def test_what_is_stored_is_told_as_it_is_on_storage() -> None:
    store = MemoryStore()
    block = Block((b"\x01\x00\x00\x00", b"a" * 1), 1, (Metadata(0, 5),))
    made = batch_objects(store)
    upload = made.put(made.name(None, 0), None, 0, block)
    got = store.get(upload.location)
    assert isinstance(got, Blob)
    assert (upload.bytes, upload.records, upload.metadata) == (len(got.data), 1, block.metadata)
    assert parse_footer(got.data).compression is Compression.ZSTD


TOPIC = TopicWrite(("p-0", "p-1"), (), b"\1AAAAA", "write-x")


def small(
    *values: bytes, partition: str | None = None, clock: int = 0, metadata: bytes = b"", at: int = 5
) -> SmallBatch:
    block, _ = encode_arrow_block(pa.array(values, pa.binary()))
    return SmallBatch(bytes(block), len(values), (Metadata(0, at, metadata),), partition, clock)


def stored(
    *batches: UploadedBatch | SmallBatch,
    topic: TopicWrite | None = None,
    target: int = 1_000,
    store: MemoryStore | None = None,
) -> list[tuple[str, list[bytes]]]:
    """Location and records of what comes out; of what was uploaded before, no records."""
    store = store or MemoryStore()
    runtime = ManualRuntime()
    options = SinkOptions(queue=QueueConfig(store="memory://x"), target_batch_bytes=target)
    objects = BatchObjects(
        options, WriteTask(0, Moment(0, 0.0), TXN, topic=topic), store=store, runtime=runtime
    )
    found = []
    for each in store_small(batches, objects, options, runtime):
        if each.location.startswith("before"):
            found.append((each.location, []))
            continue
        got = store.get(each.location)
        assert isinstance(got, Blob)
        assert (each.bytes, each.records) == (len(got.data), len(decode_batch(got.data)))
        found.append((each.location, decode_batch(got.data)))
    return found


def uploaded(name: str, partition: str | None = None) -> UploadedBatch:
    return UploadedBatch(f"before/{name}", 1, 10, (Metadata(0, 5),), partition)


def test_neighbours_are_joined_and_what_a_task_uploaded_stays_between_them() -> None:
    found = stored(small(b"a"), small(b"b", b"c"), uploaded("x"), small(b"d"))
    assert [records for _, records in found] == [[b"a", b"b", b"c"], [], [b"d"]]
    parsed = parse_location(found[0][0], "ingest")
    assert parsed is not None
    assert parsed.txn == TXN


def test_a_joined_batch_is_no_larger_than_any_other() -> None:
    found = stored(*(small(bytes([n]) * 6) for n in range(5)), target=20)
    assert [len(records) for _, records in found] == [2, 2, 1]


def test_each_partition_of_a_topic_has_its_own_and_clocks_rise_in_each() -> None:
    found = stored(
        small(b"a", partition="p-0", clock=10),
        small(b"b", partition="p-1", clock=11),
        small(b"c", partition="p-0", clock=20),
        uploaded("x", "p-0"),
        small(b"d", partition="p-0", clock=40),
        small(b"e", partition="p-1", clock=41),
        topic=TOPIC,
    )
    assert [records for _, records in found] == [[b"a", b"c"], [b"b", b"e"], [], [b"d"]]
    clocks = {}
    for location, records in found:
        if records:
            parsed = parse_location(location, location.split("/")[0])
            assert parsed is not None
            assert parsed.message is not None
            clocks[records[0]] = parse_uuid(parsed.message).clock
    assert clocks == {b"a": 10, b"b": 11, b"d": 40}


def test_metadata_begins_where_its_records_begin_and_times_never_fall() -> None:
    block = join_blocks(
        [
            small(b"a", b"b", metadata=b"x", at=9),
            small(b"c", metadata=b"x", at=7),
            small(b"d", metadata=b"y", at=6),
        ]
    )
    assert block.records == 4
    assert block.metadata == (Metadata(0, 9, b"x"), Metadata(3, 9, b"y"))


def test_a_store_that_refuses_fails_the_write() -> None:
    class Refusing(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise PermanentStorageError("403")

    with pytest.raises(PermanentStorageError):
        stored(small(b"a"), store=Refusing())
