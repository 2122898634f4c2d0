from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

from buffer_sink.messages import SmallBatch, TaskUploads, TopicWrite, UploadedBatch, WriteTask
from buffer_sink.options import SinkOptions
from buffer_sink.rows import Columns
from buffer_sink.task_writer import OPEN_BLOCKS, TaskWriter
from buffer_sink.uploads import UploadWindow
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, PermanentStorageError, TransientStorageError
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.keys import Transaction, location_timestamp_ms, parse_location
from opendata_buffer.messages import CONTINUE_TXN, parse_uuid
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

QUEUE = QueueConfig(store="memory://x", data_path_prefix="p")
TXN = Transaction("q", 4)
MOMENT = Moment(1, 2.0)


def batch(*values: bytes) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.binary())], names=["value"])


def write(store, *batches, transaction=TXN, **options):  # type: ignore[no-untyped-def]
    writer = TaskWriter(
        SinkOptions(queue=QUEUE, **options),
        Columns(0, None),
        WriteTask(2, MOMENT, transaction),
        store=store,
        runtime=ManualRuntime(),
    )
    return writer.write(iter(batches))


def test_uploads_lie_below_the_transaction_and_are_told_in_order() -> None:
    store = MemoryStore()
    values = [bytes([number]) * 10 for number in range(50)]
    commit = write(store, *(batch(value) for value in values), target_batch_bytes=30)
    assert (commit.task.number, commit.task.transaction, commit.task.planned) == (2, TXN, MOMENT)
    read: list[bytes] = []
    for upload in commit.uploads:
        parsed = parse_location(upload.location, "p")
        assert parsed is not None
        assert parsed.txn == TXN
        data = store.get(upload.location).data
        assert len(data) == upload.bytes
        assert upload.records == 2
        read += decode_batch(data)
    assert read == values
    assert len(store.list("").objects) == 25


def test_f5_names_are_ahead_of_time_by_the_longest_time_a_write_may_take() -> None:
    for hours in (0, 6, 24):
        commit = write(MemoryStore(), batch(b"a"), max_write_duration_ms=hours * 3_600_000)
        named_ms = location_timestamp_ms(commit.uploads[0].location)
        assert named_ms == ManualRuntime().now_ms() + hours * 3_600_000


def test_without_identity_batches_lie_below_the_prefix() -> None:
    commit = write(MemoryStore(), batch(b"a"), transaction=None)
    parsed = parse_location(commit.uploads[0].location, "p")
    assert parsed is not None
    assert parsed.txn is None


def test_a_partition_without_rows_uploads_nothing() -> None:
    store = MemoryStore()
    assert write(store).uploads == ()
    assert write(store, batch()).uploads == ()
    assert store.list("").objects == ()


def test_few_rows_are_not_stored_where_the_driver_shall_gather_them() -> None:
    store = MemoryStore()
    commit = write(store, batch(b"a", b"b"), batch(b"c"), gather_bytes=15)
    assert store.list("").objects == ()
    (small,) = commit.uploads
    assert isinstance(small, SmallBatch)
    assert (small.records, len(small.data), small.partition) == (3, 15, None)
    assert [each.start_index for each in small.metadata] == [0]
    commit = write(store, batch(b"a", b"b"), batch(b"c"), gather_bytes=14)
    assert [type(each) for each in commit.uploads] == [UploadedBatch], "a byte too much"
    assert len(store.list("").objects) == 1


def test_of_a_task_that_stored_a_batch_nothing_is_gathered() -> None:
    commit = write(
        MemoryStore(), batch(b"a" * 20), batch(b"b"), gather_bytes=25, target_batch_bytes=25
    )
    assert [type(each) for each in commit.uploads] == [UploadedBatch, UploadedBatch]


def test_f14_an_upload_outlasts_a_store_that_is_busy() -> None:
    class Busy(MemoryStore):
        answers = 7

        def put(self, key: str, data: bytes | memoryview) -> None:
            self.answers -= 1
            if self.answers >= 0:
                raise TransientStorageError("SlowDown")
            super().put(key, data)

    store = Busy()
    (upload,) = write(store, batch(b"a")).uploads
    assert decode_batch(store.get(upload.location).data) == [b"a"]
    assert store.answers == -1


def test_an_upload_gives_up_at_the_deadline() -> None:
    class Down(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise TransientStorageError("no answer")

    with pytest.raises(TransientStorageError, match="no answer"):
        write(Down(), batch(b"a"))


def test_a_failed_upload_fails_the_task() -> None:
    class Broken(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise PermanentStorageError("no space left")

    with pytest.raises(PermanentStorageError, match="no space left"):
        write(Broken(), batch(b"a"))


def test_a_bad_row_fails_the_task_and_leaves_no_thread() -> None:
    bad = pa.record_batch([pa.array([b"a", None], pa.binary())], names=["value"])
    with pytest.raises(InvalidInput, match="row 2 of task 2"):
        write(MemoryStore(), batch(b"a"), bad, target_batch_bytes=5)
    # Of other threads of this process any may end meanwhile.
    assert "buffer-sink-upload" not in {each.name for each in threading.enumerate()}


def test_memory_is_bounded_by_the_uploads_in_flight() -> None:
    class Slow(MemoryStore):
        """Holds each upload until all threads are in one, and counts them."""

        def __init__(self) -> None:
            super().__init__()
            self.full = threading.Barrier(3)
            self.now = self.most = 0
            self.guard = threading.Lock()

        def put(self, key: str, data: bytes | memoryview) -> None:
            with self.guard:
                self.now += 1
                self.most = max(self.most, self.now)
            self.full.wait(30)
            super().put(key, data)
            with self.guard:
                self.now -= 1

    taken = 0
    store = Slow()

    def endless():  # type: ignore[no-untyped-def]
        nonlocal taken
        for _ in range(30):
            taken += 1
            # Written, in upload, waiting, blocked in submit and being filled: no more batches
            # than these have been asked of Spark.
            assert taken <= len(store.list("").objects) + 3 + 1 + 1 + 1
            yield batch(b"x" * 10)

    writer = TaskWriter(
        SinkOptions(queue=QUEUE, target_batch_bytes=14, upload_concurrency=3),
        Columns(0, None),
        WriteTask(0, MOMENT, TXN),
        store=store,
        runtime=ManualRuntime(),
    )
    commit = writer.write(endless())
    assert len(commit.uploads) == 30
    assert store.most == 3


# A topic.

TOPIC = TopicWrite(("p-00000", "p-00001", "p-00002"), (), b"\x01" * 6, "write-x")


def write_topic(*batches: pa.RecordBatch, task: int = 2, **options: Any) -> TaskUploads:
    store = options.pop("store", None) or MemoryStore()
    writer = TaskWriter(
        SinkOptions(queue=QueueConfig(store="memory://x"), **options),
        Columns(0, None, partition=1),
        WriteTask(task, MOMENT, TXN, topic=TOPIC),
        store=store,
        runtime=ManualRuntime(),
    )
    return writer.write(iter(batches))


def to(name: str, *values: bytes) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(values, pa.binary()), pa.array([name] * len(values))],
        names=["value", "partition"],
    )


def test_the_batches_of_each_partition_are_messages_with_rising_clocks() -> None:
    store = MemoryStore()
    given = [to(f"p-0000{number % 3}", bytes([number]) * 10) for number in range(30)]
    commit = write_topic(*given, store=store, target_batch_bytes=30)
    read: dict[str, list[bytes]] = {}
    clocks: dict[str, list[int]] = {}
    for upload in commit.uploads:
        assert upload.partition is not None
        named = parse_location(upload.location, upload.partition)
        assert named is not None
        assert named.message is not None
        assert named.txn == TXN
        said = parse_uuid(named.message)
        assert (said.producer, said.flags) == (TOPIC.producer, CONTINUE_TXN)
        assert said.clock == upload.clock
        clocks.setdefault(upload.partition, []).append(said.clock)
        read.setdefault(upload.partition, []).extend(decode_batch(store.get(upload.location).data))
    assert set(clocks) == set(TOPIC.active)
    for partition, name in enumerate(TOPIC.active):
        assert clocks[name] == [TOPIC.clock(2, index) for index in range(5)]
        assert read[name] == [bytes([number]) * 10 for number in range(partition, 30, 3)]


def test_rows_for_many_partitions_do_not_add_up_in_memory() -> None:
    names = tuple(f"p-{number:05}" for number in range(100))
    topic = TopicWrite(names, (), b"\x01" * 6, "write-x")
    store = MemoryStore()
    open_bytes = []

    class Watched(TaskWriter):
        def _flush_largest(self, window: UploadWindow) -> None:
            super()._flush_largest(window)
            open_bytes.append(sum(each.size for each in self._builders.values()))

    writer = Watched(
        SinkOptions(queue=QueueConfig(store="memory://x"), target_batch_bytes=1_000),
        Columns(0, None, partition=1),
        WriteTask(0, MOMENT, TXN, topic=topic),
        store=store,
        runtime=ManualRuntime(),
    )
    commit = writer.write(to(names[row % 100], b"x" * 96) for row in range(900))
    assert sum(upload.records for upload in commit.uploads) == 900
    assert 0 < max(open_bytes) <= OPEN_BLOCKS * 1_000


def test_a_value_that_cannot_be_written_to_a_partition_is_named() -> None:
    with pytest.raises(InvalidInput, match="of the rows of task 2 for partition p-00001"):
        write_topic(to("p-00001", b"x" * 100), target_batch_bytes=20, max_batch_bytes=50)
