"""A task's rows become uploads: split, named, stored in bounded memory, and joined if small."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pyarrow as pa
import pytest

from buffer_sink import writer
from buffer_sink.committer import FIRST_CLOCK, Group, TopicWrite, UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_sink.rows import Columns
from buffer_sink.writer import (
    OPEN_BLOCKS,
    SMALL_UPLOADS,
    Batch,
    BatchUploads,
    SmallBatch,
    TaskUploads,
    TaskWriter,
    WritePlan,
    WriteTask,
    join_blocks,
    store_small,
)
from buffer_sink.writer import collect as collect_and_store
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, PermanentStorageError, TransientStorageError
from opendata_buffer.formats.arrow import encode_arrow_block
from opendata_buffer.formats.batch import (
    Compression,
    Transaction,
    decode_batch,
    location_timestamp_ms,
    parse_footer,
    parse_location,
)
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.messages import CONTINUE_TXN, parse_uuid
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.transactions import ROLL_BACK

QUEUE = QueueConfig(store="memory://x", data_path_prefix="p")
TXN = Transaction("q", 4)
MOMENT = Moment(1, 2.0)
TOPIC = TopicWrite(("p-00000", "p-00001", "p-00002"), (), b"\x01" * 6, "write-x")


def batch(*values: bytes) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.binary())], names=["value"])


def to(name: str, *values: bytes) -> pa.RecordBatch:
    names = pa.array([name] * len(values))
    return pa.record_batch([pa.array(values, pa.binary()), names], names=["value", "partition"])


def task_writer(
    store: MemoryStore,
    *,
    transaction: Transaction | None = TXN,
    topic: TopicWrite | None = None,
    **options: Any,
) -> TaskWriter:
    return TaskWriter(
        SinkOptions(queue=QUEUE, **{"gather_bytes": 0, **options}),
        Columns(0, None, partition=None if topic is None else 1),
        WriteTask(2, MOMENT, transaction, topic=topic),
        store=store,
        runtime=ManualRuntime(),
    )


def write(store: MemoryStore, *batches: pa.RecordBatch, **options: Any) -> TaskUploads:
    return task_writer(store, **options).write(iter(batches))


def name_of(location: str) -> Any:
    return parse_location(location, location.split("/")[0])


def stored_data(store: MemoryStore, upload: Batch) -> bytes:
    assert isinstance(upload, UploadedBatch)
    blob: Any = store.get(upload.location)
    return bytes(blob.data)


def test_uploads_are_stored_below_the_transaction_and_reported_in_order() -> None:
    store = MemoryStore()
    values = [bytes([number]) * 10 for number in range(50)]
    commit = write(
        store,
        *(batch(value) for value in values),
        target_batch_bytes=30,
        compression=Compression.ZSTD,
    )
    assert (commit.task.number, commit.task.transaction, commit.task.planned) == (2, TXN, MOMENT)
    read: list[bytes] = []
    for upload in commit.uploads:
        data = stored_data(store, upload)
        assert (name_of(upload.location).txn, name_of(upload.location).message) == (TXN, None)
        assert parse_footer(data).compression is Compression.ZSTD
        assert (upload.records, upload.metadata[0].start_index) == (2, 0)
        read += decode_batch(data)
    assert read == values
    assert len(store.list("").objects) == 25


@pytest.mark.parametrize("hours", [0, 6, 24])
def test_f5_names_are_ahead_by_the_longest_time_that_a_write_may_take(hours: int) -> None:
    options = {"transaction": None, "max_write_duration_ms": hours * 3_600_000}
    (upload,) = write(MemoryStore(), batch(b"a"), **options).uploads
    assert name_of(upload.location).txn is None
    assert location_timestamp_ms(upload.location) == ManualRuntime().now_ms() + hours * 3_600_000


def test_a_task_without_rows_uploads_nothing() -> None:
    store = MemoryStore()
    assert write(store).uploads == ()
    assert write(store, batch()).uploads == ()
    assert store.list("").objects == ()


def test_a_task_that_stored_a_batch_returns_no_small_batches() -> None:
    commit = write(
        MemoryStore(), batch(b"a" * 20), batch(b"b"), gather_bytes=25, target_batch_bytes=25
    )
    assert [type(each) for each in commit.uploads] == [UploadedBatch, UploadedBatch]


class Failing(MemoryStore):
    """Fails the first uploads with an error."""

    def __init__(self, error: Exception, times: int = 1_000) -> None:
        super().__init__()
        self.error = error
        self.times = times

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.times -= 1
        if self.times >= 0:
            raise self.error
        super().put(key, data)


def test_f14_an_upload_is_retried_while_the_store_is_busy() -> None:
    store = Failing(TransientStorageError("SlowDown"), times=7)
    (upload,) = write(store, batch(b"a")).uploads
    assert decode_batch(stored_data(store, upload)) == [b"a"]
    assert store.times == -1


@pytest.mark.parametrize(
    "error", [TransientStorageError("no answer"), PermanentStorageError("no space left")]
)
def test_an_upload_that_fails_permanently_or_until_the_deadline_fails_the_task(
    error: Exception,
) -> None:
    with pytest.raises(type(error), match=str(error)):
        write(Failing(error), batch(b"a"))


def test_after_a_failed_upload_no_more_rows_are_read() -> None:
    read: list[int] = []

    def rows() -> Any:
        for number in range(100):
            read.append(number)
            yield batch(b"x" * 10)

    store = Failing(PermanentStorageError("no space left"))
    with pytest.raises(PermanentStorageError, match="no space left"):
        task_writer(store, target_batch_bytes=14, upload_concurrency=1).write(rows())
    assert len(read) <= 5


def test_a_bad_row_fails_the_task_and_leaves_no_thread() -> None:
    bad = pa.record_batch([pa.array([b"a", None], pa.binary())], names=["value"])
    with pytest.raises(InvalidInput, match="row 2 of task 2"):
        write(MemoryStore(), batch(b"a"), bad, target_batch_bytes=5)
    # Other threads of this process may end meanwhile.
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

    def endless() -> Any:
        nonlocal taken
        for _ in range(30):
            taken += 1
            # Spark has been asked only for the batch that is written and for those that are in
            # upload, waiting, blocked in submit, or being filled.
            assert taken <= len(store.list("").objects) + 3 + 1 + 1 + 1
            yield batch(b"x" * 10)

    writer = task_writer(store, target_batch_bytes=14, upload_concurrency=3)
    assert len(writer.write(endless()).uploads) == 30
    assert store.most == 3


# A topic.


def test_the_batches_of_each_partition_are_messages_with_increasing_clocks() -> None:
    store = MemoryStore()
    given = [to(f"p-0000{number % 3}", bytes([number]) * 10) for number in range(30)]
    read: dict[str | None, list[bytes]] = {}
    clocks: dict[str | None, list[int]] = {}
    for upload in write(store, *given, topic=TOPIC, target_batch_bytes=30).uploads:
        message = parse_uuid(name_of(upload.location).message)
        assert name_of(upload.location).txn == TXN
        assert (message.producer, message.flags) == (TOPIC.producer, CONTINUE_TXN)
        assert message.clock == upload.clock
        clocks.setdefault(upload.partition, []).append(message.clock)
        read.setdefault(upload.partition, []).extend(decode_batch(stored_data(store, upload)))
    assert set(clocks) == set(TOPIC.active)
    for partition, name in enumerate(TOPIC.active):
        assert clocks[name] == [TOPIC.clock(2, index) for index in range(5)]
        assert read[name] == [bytes([number]) * 10 for number in range(partition, 30, 3)]


def test_memory_does_not_grow_with_the_number_of_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = tuple(f"p-{number:05}" for number in range(100))
    open_bytes = []
    flush_largest = TaskWriter._flush_largest

    def watched(writer: TaskWriter) -> None:
        flush_largest(writer)
        open_bytes.append(writer._open_bytes())

    monkeypatch.setattr(TaskWriter, "_flush_largest", watched)
    topic = TopicWrite(names, (), b"\x01" * 6, "write-x")
    writer = task_writer(MemoryStore(), topic=topic, target_batch_bytes=1_000)
    commit = writer.write(to(names[row % 100], b"x" * 96) for row in range(900))
    assert sum(upload.records for upload in commit.uploads) == 900
    assert 0 < max(open_bytes) <= OPEN_BLOCKS * 1_000


def test_the_error_about_a_value_that_cannot_be_written_names_it() -> None:
    large = to("p-00001", b"x" * 100)
    with pytest.raises(InvalidInput, match="of the rows of task 2 for partition p-00001"):
        write(MemoryStore(), large, topic=TOPIC, target_batch_bytes=20, max_batch_bytes=50)


# Small batches, which the driver stores.


def small(
    *values: bytes, partition: str | None = None, clock: int = 0, metadata: bytes = b"", at: int = 5
) -> SmallBatch:
    block, _ = encode_arrow_block(pa.array(values, pa.binary()))
    return SmallBatch(bytes(block), len(values), (Metadata(0, at, metadata),), partition, clock)


def uploaded(name: str, partition: str | None = None) -> UploadedBatch:
    return UploadedBatch(f"before/{name}", 1, (Metadata(0, 5),), partition)


def stored(
    *batches: Batch, topic: TopicWrite | None = None, target: int = 1_000
) -> list[tuple[str, list[bytes]]]:
    """Return location and records of each batch, without records if a task uploaded it."""
    store = MemoryStore()
    uploads = BatchUploads(
        SinkOptions(queue=QUEUE),
        WriteTask(0, MOMENT, TXN, topic=topic),
        store=store,
        runtime=ManualRuntime(),
    )
    found = []
    for each in store_small(batches, uploads, target):
        before = each.location.startswith("before")
        records = [] if before else decode_batch(stored_data(store, each))
        assert before or each.records == len(records)
        found.append((each.location, records))
    return found


def test_neighbours_are_joined_but_not_across_the_upload_of_a_task() -> None:
    found = stored(small(b"a"), small(b"b", b"c"), uploaded("x"), small(b"d"))
    assert [records for _, records in found] == [[b"a", b"b", b"c"], [], [b"d"]]
    assert name_of(found[0][0]).txn == TXN


def test_a_joined_batch_respects_the_size_limit() -> None:
    found = stored(*(small(bytes([n]) * 6) for n in range(5)), target=20)
    assert [len(records) for _, records in found] == [2, 2, 1]


def test_small_batches_are_joined_per_partition_with_increasing_clocks() -> None:
    found = stored(
        small(b"a", partition="p-00000", clock=10),
        small(b"b", partition="p-00001", clock=11),
        small(b"c", partition="p-00000", clock=20),
        uploaded("x", "p-00000"),
        small(b"d", partition="p-00000", clock=40),
        small(b"e", partition="p-00001", clock=41),
        topic=TOPIC,
    )
    assert [records for _, records in found] == [[b"a", b"c"], [b"b", b"e"], [], [b"d"]]
    clocks = {
        records[0]: parse_uuid(name_of(location).message).clock
        for location, records in found
        if records
    }
    assert clocks == {b"a": 10, b"b": 11, b"d": 40}


def test_the_small_batches_of_a_topic_are_stored_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A micro-batch waits for one upload then, and not for one after the other."""
    together = threading.Barrier(SMALL_UPLOADS)

    class Gathering(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            together.wait(60)
            super().put(key, data)

    store = Gathering()
    monkeypatch.setattr(writer, "_store_of", lambda options: store)
    names = tuple(f"p-{number:05d}" for number in range(SMALL_UPLOADS))
    task = WriteTask(0, MOMENT, TXN, topic=TopicWrite(names, (), b"\x01" * 6, "write-x"))
    plan = WritePlan(SinkOptions(queue=QUEUE), Columns(0, None), MOMENT)
    found = plan._store_small([small(b"a", partition=name, clock=2) for name in names], task)
    assert sorted(each.partition or "" for each in found) == list(names)


def test_metadata_starts_at_its_first_record_and_times_never_decrease() -> None:
    block = join_blocks(
        [
            small(b"a", b"b", metadata=b"x", at=9),
            small(b"c", metadata=b"x", at=7),
            small(b"d", metadata=b"y", at=6),
        ]
    )
    assert block.records == 4
    assert block.metadata == (Metadata(0, 9, b"x"), Metadata(3, 9, b"y"))


# The messages of tasks, and the group that the driver builds from them.


EARLY, LATE = Moment(1_000, 10.0), Moment(2_000, 11.0)


def upload(name: str, records: int = 2) -> UploadedBatch:
    return UploadedBatch(name, records, (Metadata(0, 5, b"m"),))


def message(task: int, *uploads: Batch, txn: Transaction | None = TXN) -> TaskUploads:
    return TaskUploads(WriteTask(task, EARLY, txn), uploads)


def collect(messages: list[TaskUploads | None]) -> Group | None:
    def never(*_: object) -> tuple[UploadedBatch, ...]:
        raise AssertionError("nothing is small")

    return collect_and_store(messages, never)


def test_uploads_are_ordered_by_task_and_then_by_write_order() -> None:
    group = collect(
        [message(2, upload("c")), None, message(0, upload("a"), upload("b")), message(1)]
    )
    assert group is not None
    assert group.transaction == TXN
    assert group.locations == ("a", "b", "c")
    assert group.entries[0] == NewEntry("a", (Metadata(0, 5, b"m"),))


def test_tasks_without_rows_make_no_group() -> None:
    assert collect([]) is None
    assert collect([None, message(0), message(1)]) is None


def test_messages_of_two_writes_are_refused() -> None:
    other = message(1, upload("b"), txn=Transaction("q", 5))
    with pytest.raises(InvalidInput, match="different identities"):
        collect([message(0, upload("a")), other])


def test_the_oldest_plan_of_the_tasks_applies() -> None:
    late = TaskUploads(WriteTask(0, LATE, TXN), (upload("a"),))
    group = collect([late, message(1, upload("b"))])
    assert group is not None
    assert group.planned == EARLY


ULID = "01JD0000000000000000000001"


def planned_write() -> TopicWrite:
    description = TopicDescription.new(ULID, 3).drained("p-00001-05mv", 0)
    return TopicWrite.planned(description, ManualRuntime())


def test_a_write_is_planned_for_the_active_partitions_and_lists_the_others() -> None:
    made = pickle.loads(pickle.dumps(planned_write()))
    assert made.active == ("p-00000-04pn", "p-00002-0bvb")
    assert set(made.names) == {"p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"}


def test_two_tasks_with_the_same_number_cannot_write_to_a_topic() -> None:
    task = WriteTask(0, EARLY, TXN, topic=planned_write())
    with pytest.raises(InvalidInput, match="several tasks of one write carry the number 0"):
        collect([TaskUploads(task, (upload("a"),)), TaskUploads(task, (upload("b"),))])


def test_each_attempt_has_its_own_producer_and_app() -> None:
    runtime = ManualRuntime()
    description = TopicDescription.new(ULID, 1)
    made = [TopicWrite.planned(description, runtime) for _ in range(50)]
    assert len({each.producer for each in made}) == 50
    assert len({each.app for each in made}) == 50
    assert all(len(each.producer) == 6 for each in made)
    assert made[0].transaction(None) == Transaction(made[0].app, 0)
    assert made[0].transaction(Transaction("q", 7)) == Transaction("q", 7)


def test_clocks_increase_in_the_order_in_which_a_partition_gets_the_batches() -> None:
    made = planned_write()
    clocks = [made.clock(task, index) for task in (0, 1, 2**31 - 1) for index in (0, 1, 5_000)]
    assert clocks == sorted(set(clocks))
    assert clocks[0] == FIRST_CLOCK
    assert ROLL_BACK < FIRST_CLOCK
    assert clocks[-1] < 2**64 - 1
