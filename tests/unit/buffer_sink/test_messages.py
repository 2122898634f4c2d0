"""The messages between the driver and the tasks of a write."""

from __future__ import annotations

import pickle

import pytest

from buffer_sink.committer import FIRST_CLOCK, Group, TopicWrite, UploadedBatch
from buffer_sink.writer import Batch, SmallBatch, TaskUploads, WriteTask
from buffer_sink.writer import collect as collect_and_store
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.runtime import Moment
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.transactions.markers import ROLL_BACK

TXN = Transaction("q", 4)
EARLY, LATE = Moment(1_000, 10.0), Moment(2_000, 11.0)


def upload(name: str, records: int = 2) -> UploadedBatch:
    return UploadedBatch(name, records, 100, (Metadata(0, 5, b"m"),))


def message(task: int, *uploads: Batch, txn: Transaction | None = TXN) -> TaskUploads:
    return TaskUploads(WriteTask(task, EARLY, txn), uploads)


def collect(messages: list[TaskUploads | None]) -> Group | None:
    def never(*_: object) -> tuple[UploadedBatch, ...]:
        raise AssertionError("nothing is small")

    return collect_and_store(messages, never)


def test_uploads_are_ordered_by_task_and_then_as_written() -> None:
    group = collect(
        [message(2, upload("c")), None, message(0, upload("a"), upload("b")), message(1)]
    )
    assert group is not None
    assert (group.transaction, group.records) == (TXN, 6)
    assert group.locations == ("a", "b", "c")
    assert group.entries[0] == NewEntry("a", (Metadata(0, 5, b"m"),))


def test_tasks_without_rows_make_no_group() -> None:
    assert collect([]) is None
    assert collect([None, message(0), message(1)]) is None


def test_messages_of_two_writes_are_refused() -> None:
    other = message(1, upload("b"), txn=Transaction("q", 5))
    with pytest.raises(InvalidInput, match="different identities"):
        collect([message(0, upload("a")), other])


def test_the_oldest_plan_counts() -> None:
    late = TaskUploads(WriteTask(0, LATE, TXN), (upload("a"),))
    group = collect([late, message(1, upload("b"))])
    assert group is not None
    assert group.planned == EARLY


def test_small_batches_are_stored_with_all_others_in_order_and_the_writes_identity() -> None:
    small = SmallBatch(b"x", 1, ())
    asked: list[object] = []

    def store(*given: object) -> tuple[UploadedBatch, ...]:
        asked.extend(given)
        return (upload("stored"),)

    group = collect_and_store([message(1, small), message(0, upload("a"))], store)
    assert group is not None
    assert group.locations == ("stored",)
    assert asked == [[upload("a"), small], message(0).task]


ULID = "01JD0000000000000000000001"


def planned_write() -> TopicWrite:
    description = TopicDescription.new(ULID, 3).drained("p-00001-05mv", 0)
    return TopicWrite.planned(description, ManualRuntime())


def test_a_write_goes_to_the_active_partitions_and_knows_the_others() -> None:
    made = pickle.loads(pickle.dumps(planned_write()))
    assert made.active == ("p-00000-04pn", "p-00002-0bvb")
    assert set(made.names) == {"p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"}


def test_tasks_of_one_number_cannot_write_to_a_topic() -> None:
    task = WriteTask(0, EARLY, TXN, topic=planned_write())
    with pytest.raises(InvalidInput, match="several tasks of one write carry the number 0"):
        collect([TaskUploads(task, (upload("a"),)), TaskUploads(task, (upload("b"),))])


def test_each_attempt_has_a_producer_and_an_app_of_its_own() -> None:
    runtime = ManualRuntime()
    description = TopicDescription.new(ULID, 1)
    made = [TopicWrite.planned(description, runtime) for _ in range(50)]
    assert len({each.producer for each in made}) == 50
    assert len({each.app for each in made}) == 50
    assert all(len(each.producer) == 6 for each in made)
    assert made[0].transaction(None) == Transaction(made[0].app, 0)
    assert made[0].transaction(Transaction("q", 7)) == Transaction("q", 7)


def test_clocks_rise_in_the_order_in_which_a_partition_gets_the_batches() -> None:
    made = planned_write()
    clocks = [made.clock(task, index) for task in (0, 1, 2**31 - 1) for index in (0, 1, 5_000)]
    assert clocks == sorted(set(clocks))
    assert clocks[0] == FIRST_CLOCK
    assert ROLL_BACK < FIRST_CLOCK
    assert clocks[-1] < 2**64 - 1
