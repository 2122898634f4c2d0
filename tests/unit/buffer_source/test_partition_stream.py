"""One queue of a source: polls, ends and plans, and the rule of isolation."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_source.offsets import Position
from buffer_source.options import SourceOptions
from buffer_source.partition_stream import (
    IsolationFilter,
    PartitionStream,
    check_remembered,
    rule_behind,
    writer_will_retry,
)
from buffer_source.planner import ReadLimits
from opendata_buffer.consumer.cursors import BatchDescriptor
from opendata_buffer.errors import InvalidInput, QueueReset
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.world import TopicWorld

P = "p-00000-04pn"
A, B = b"writerA", b"writerB"


@pytest.fixture
def world(runtime: ManualRuntime) -> TopicWorld:
    return TopicWorld(runtime, 1)


def stream(world: TopicWorld, **given: str) -> PartitionStream:
    def once(call: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    options = SourceOptions.from_spark({"path": "/world", "gcEnabled": "false", **given})
    return PartitionStream(P, options.of_partition(P), world.store, world.runtime, once)


def write(world: TopicWorld, producer: bytes, clock: int, *values: bytes) -> None:
    """Undecided messages, clocks rising from ``clock``; without values the acknowledgement."""
    if not values:
        world.append(P, message=build_uuid(producer[-6:], clock, ACK_TXN))
    for number, value in enumerate(values, clock):
        world.append(P, value, message=build_uuid(producer[-6:], number, CONTINUE_TXN))


def step(
    reader: PartitionStream,
    start: Position | None,
    limits: ReadLimits = ReadLimits(),  # noqa: B008
) -> tuple[Position, list[bytes]]:
    """One micro-batch: where it ends and what it reads."""
    look = reader.poll(start, limits)
    end = reader.end_offset(look, len(look.waiting))
    if end == start:
        return end, []
    return end, [each.metadata[0].payload for each in reader.plan(start, end).batches]


def test_undecided_batches_make_no_micro_batch(world: TopicWorld) -> None:
    reader = stream(world)
    world.append(P, b"before")
    start, read = step(reader, None)
    assert read == [b"before"]
    write(world, A, 2, b"one", b"two")
    assert step(reader, start) == (start, [])
    write(world, A, 4)
    end, read = step(reader, start)
    assert (end.next, read) == (4, [b"one", b"two"])


def test_a_new_query_that_finds_only_undecided_batches_begins_in_front_of_them(
    world: TopicWorld,
) -> None:
    write(world, A, 2, b"one")
    reader = stream(world)
    start, read = step(reader, None)
    assert (start.next, read) == (0, [])
    write(world, A, 3)
    assert step(reader, start)[1] == [b"one"]


def test_a_transaction_larger_than_the_limits_is_read_whole(world: TopicWorld) -> None:
    write(world, A, 2, *(b"%d" % number for number in range(7)))
    world.append(P, b"between")
    write(world, A, 9)
    world.append(P, b"after")
    reader = stream(world)
    limits = ReadLimits(batches=2)
    end, read = step(reader, None, limits)
    assert (end.next, read) == (8, [b"between"])
    end, read = step(reader, end, limits)
    assert read == [*(b"%d" % number for number in range(7)), b"after"]
    assert end.next == 10


def test_nothing_that_is_undecided_leaves_the_queue(world: TopicWorld) -> None:
    world.append(P, b"0")
    write(world, A, 2, b"1")
    world.append(P, b"2")
    reader = stream(world)
    end, read = step(reader, None)
    assert read == [b"0", b"2"]
    reader.acknowledge(end)
    assert world.queued_in(P) == [1, 2]
    assert reader.has_acknowledged(end)
    # A restart claims there, and reads it when it is decided.
    write(world, A, 3)
    again = stream(world)
    after, read = step(again, end)
    assert read == [b"1"]
    again.acknowledge(after)
    assert world.queued_in(P) == []
    assert again.empty


def test_an_abandoned_transaction_does_not_hold_up_the_others(world: TopicWorld) -> None:
    write(world, A, 2, b"abandoned")
    write(world, B, 2, b"one")
    write(world, B, 3)
    world.append(P, b"two")
    reader = stream(world)
    end, read = step(reader, None)
    assert read == [b"one", b"two"]
    world.append(P, message=build_uuid(A[-6:], 1, ACK_TXN))  # rolled back
    end, read = step(reader, end)
    assert read == []
    reader.acknowledge(end)
    assert world.queued_in(P) == []


@pytest.mark.parametrize("cuts", [(), (2,), (2, 4)])
def test_f5_the_repeat_of_a_message_that_was_gone_is_read_wherever_micro_batches_end(
    world: TopicWorld, cuts: tuple[int, ...]
) -> None:
    # The writer's object was collected before its append landed. It knows, and repeats it.
    reader = stream(world, failOnDataLoss="false")
    position: Position | None = None
    read: list[bytes] = []
    for clock, value in ((2, b"one"), (3, b"gone"), (3, b"again")):
        write(world, A, clock, value)
        if value == b"gone":
            manifest = world.queue(P).read()
            assert manifest is not None
            world.store.delete_many([manifest.entries()[-1].location])
        world.append(P, b"between")
        if len(world.queued_in(P)) in cuts:
            position, part = step(reader, position)
            read += part
    write(world, A, 4)
    end, part = step(stream(world, failOnDataLoss="false"), position)
    assert [each for each in read + part if each != b"between"] == [b"one", b"again"]
    replayed = stream(world, failOnDataLoss="false").plan(position, end)
    assert [each.metadata[0].payload for each in replayed.batches] == part
    assert replayed.missing == (0 if 4 in cuts else 1)


def test_plans_are_the_same_in_every_run(world: TopicWorld) -> None:
    write(world, A, 2, b"one")
    world.append(P, b"x")
    reader = stream(world)
    first, _ = step(reader, None)
    write(world, B, 2, b"other")
    write(world, A, 3)
    second, read = step(reader, first)
    assert read == [b"one"]
    write(world, B, 3)  # later, and not in these positions
    for _ in range(2):
        part = stream(world).plan(first, second)
        assert [each.metadata[0].payload for each in part.batches] == read
    assert step(stream(world), second)[1] == [b"other"]


def test_a_queue_that_ends_before_the_position_and_behind_an_open_transaction_went_backwards(
    world: TopicWorld,
) -> None:
    write(world, A, 2, b"1")
    world.append(P, b"2")
    end, _ = step(stream(world), None)
    # An older copy of the manifest, and no marker that knows better.
    world.store.delete_many([f"{P}/_owner.json", f"{P}/manifest"])
    write(world, A, 2, b"1")
    with pytest.raises(QueueReset, match=r"cannot resume after sequence 1: .* ends at 0"):
        stream(world).poll(Position(end.next, end.base, end.transactions), ReadLimits())


def test_a_loss_behind_an_undecided_batch_does_not_stop_the_query(world: TopicWorld) -> None:
    reader = stream(world, failOnDataLoss="false")
    start, _ = step(reader, None)
    write(world, A, 2, b"0")
    assert step(reader, start) == (start, [])
    world.append(P, b"1", b"2", b"3")
    manifest = world.queue(P).read()
    assert manifest is not None
    world.store.put(f"{P}/manifest", manifest.drop_through(2).raw)
    read: list[bytes] = []
    for _ in range(3):
        start, part = step(reader, start)
        read += part
    assert read == [b"3"]
    assert start.next == 4


def test_a_closed_partition_is_looked_at_without_being_claimed(world: TopicWorld) -> None:
    world.topic.expand(2)
    world.append(P, b"1")
    reader = stream(world)
    end, _ = step(reader, None)
    reader.acknowledge(end)
    world.topic.drain(P)
    assert world.topic.remove_drained(after_s=0) == [P]
    assert step(reader, end) == (end, [])
    assert step(stream(world), end) == (end, [])


def test_available_now_waits_for_no_decision(world: TopicWorld) -> None:
    write(world, A, 2, b"1")
    reader = stream(world)
    reader.freeze_end()
    write(world, A, 3)
    end, read = step(reader, None)
    assert (end.next, read) == (0, [])
    assert step(reader, end) == (end, [])
    assert step(stream(world), end)[1] == [b"1"]


PRODUCER = b"writer"


def options(**given: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": "/unused", **given})


class Entries:
    """A queue's entries, as they are appended."""

    def __init__(self, runtime: ManualRuntime) -> None:
        self._runtime = runtime
        self.all: list[BatchDescriptor] = []

    def add(self, clock: int = 0, flags: int = 0, txn: Transaction | None = None) -> None:
        message = build_uuid(PRODUCER, clock, flags) if clock else None
        location = batch_key("ingest", self._runtime.ulid(), txn, message)
        self.all.append(BatchDescriptor(len(self.all), location))

    def between(self, begin: int, end: int) -> list[BatchDescriptor]:
        return [each for each in self.all if begin <= each.sequence < end]


@pytest.fixture
def entries(runtime: ManualRuntime) -> Entries:
    return Entries(runtime)


def walk(
    entries: Entries, start: Position | None, end: int, **given: str
) -> tuple[list[int], Position]:
    """The sequences delivered, and the position behind them."""
    walking = IsolationFilter(start, options(**given), entries.between)
    begin = 0 if start is None else start.next
    for each in entries.between(begin, end):
        walking.step(each)
    delivered = [each.sequence for each in walking.delivered]
    return delivered, Position(end, 0, walking.rule.to_dict())


def test_what_is_held_back_would_be_lost_to_a_query_that_holds_nothing_back(
    entries: Entries,
) -> None:
    entries.add(2, CONTINUE_TXN)
    _, position = walk(entries, None, 1)
    with pytest.raises(InvalidInput, match=r"undecided at sequence 0 .* would never be read"):
        rule_behind(position, options(isolationLevel="read_uncommitted"))
    entries.add(3, ACK_TXN)
    _, position = walk(entries, position, 2)
    rule_behind(position, options(isolationLevel="read_uncommitted"))


def test_only_what_repeats_a_transaction_counts_as_a_repeat(entries: Entries) -> None:
    for _ in range(2):
        entries.add(txn=Transaction("app", 1))
        entries.add()
    entries.add(2, CONTINUE_TXN)
    entries.add(3, ACK_TXN)
    walking = IsolationFilter(None, options(), entries.between)
    for each in entries.all:
        walking.step(each)
    assert [each.sequence for each in walking.repeats] == [2]
    assert [each.sequence for each in walking.delivered] == [0, 1, 3, 4]


def test_writers_vouch_for_transactions_and_messages_and_acknowledgements_need_no_object(
    entries: Entries,
) -> None:
    entries.add()
    entries.add(txn=Transaction("app", 1))
    entries.add(2, CONTINUE_TXN)
    entries.add(3, ACK_TXN)
    assert [writer_will_retry(each, "ingest") for each in entries.all] == [False, True, True, False]


def test_what_a_position_does_not_remember_is_not_held_back_in_front_of_it(
    entries: Entries,
) -> None:
    entries.add(2, CONTINUE_TXN)
    end = walk(entries, None, 1, isolationLevel="read_uncommitted")[1]
    again = IsolationFilter(None, options(), entries.between)
    again.step(entries.all[0])
    with pytest.raises(InvalidInput, match="planned with read_uncommitted, up to sequence 0"):
        check_remembered(again.rule, end, options())
    check_remembered(again.rule, walk(entries, None, 1)[1], options())
