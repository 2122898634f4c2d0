from __future__ import annotations

import pickle

import pytest

from buffer_sink.messages import Group, SmallBatch, TaskUploads, UploadedBatch, WriteTask
from buffer_sink.messages import collect as collect_and_store
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.runtime import Moment

TXN = Transaction("q", 4)
EARLY, LATE = Moment(1_000, 10.0), Moment(2_000, 11.0)


def upload(name: str, records: int = 2) -> UploadedBatch:
    return UploadedBatch(name, records, 100, (Metadata(0, 5, b"m"),))


def message(task: int, *uploads: UploadedBatch, txn: Transaction | None = TXN) -> TaskUploads:
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
    assert [each.location for each in group.uploads] == ["a", "b", "c"]
    assert group.transaction == TXN
    assert group.records == 6
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
    early = TaskUploads(WriteTask(1, EARLY, TXN), (upload("b"),))
    group = collect([late, early])
    assert isinstance(group, Group)
    assert group.planned == EARLY


def test_small_batches_are_stored_with_all_others_in_order_and_the_writes_identity() -> None:
    small = SmallBatch(b"x", 1, ())
    asked: list[object] = []

    def store(*given: object) -> tuple[UploadedBatch, ...]:
        asked.extend(given)
        return (upload("stored"),)

    sent = [TaskUploads(WriteTask(n, EARLY, TXN), (each,)) for n, each in ((1, small),)]
    group = collect_and_store([*sent, message(0, upload("a"))], store)
    assert group is not None
    assert [each.location for each in group.uploads] == ["stored"]
    assert asked == [[upload("a"), small], message(0).task]


def test_a_message_survives_pickling() -> None:
    small = TaskUploads(WriteTask(3, EARLY, TXN), (SmallBatch(b"x", 1, (Metadata(0, 5),)),))
    assert pickle.loads(pickle.dumps(small)) == small
    sent = message(3, upload("a"))
    assert pickle.loads(pickle.dumps(sent)) == sent
