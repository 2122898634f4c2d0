"""One queue of a source: polls, ends and plans."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_source.options import SourceOptions
from buffer_source.partition_stream import PartitionStream
from buffer_source.partitions import PartitionOffset
from buffer_source.queue_session import EVERYTHING
from opendata_buffer.errors import InvalidInput, QueueReset
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.source_queue import TopicWorld

P = "p-00000-04pn"
A, B = b"writerA", b"writerB"


@pytest.fixture
def world(runtime: ManualRuntime) -> TopicWorld:
    return TopicWorld(runtime, 1)


def once(call: Any, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def stream(world: TopicWorld, **given: str) -> PartitionStream:
    options = SourceOptions.from_spark({"path": "/world", "gcEnabled": "false", **given})
    return PartitionStream(P, options.of_partition(P), world.store, world.runtime, once)


def write(world: TopicWorld, producer: bytes, clock: int, *values: bytes) -> None:
    """Undecided messages, clocks rising from ``clock``; without values the acknowledgement."""
    if not values:
        world.append(P, message=build_uuid(producer[-6:], clock, ACK_TXN))
    for number, value in enumerate(values, clock):
        world.append(P, value, message=build_uuid(producer[-6:], number, CONTINUE_TXN))


def step(
    reader: PartitionStream, start: PartitionOffset | None, most: int = EVERYTHING
) -> tuple[PartitionOffset, list[bytes]]:
    """One micro-batch: where it ends and what it reads."""
    poll = reader.poll(start, most)
    end = reader.end_offset(poll, len(poll.waiting))
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
    end, read = step(reader, None, 2)
    assert (end.next, read) == (8, [b"between"])
    end, read = step(reader, end, 2)
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
    assert reader.acknowledged == end
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
    assert not read
    reader.acknowledge(end)
    assert world.queued_in(P) == []


@pytest.mark.parametrize("cuts", [(), (2,), (2, 4)])
def test_f5_the_repeat_of_a_message_that_was_gone_is_read_wherever_micro_batches_end(
    world: TopicWorld, cuts: tuple[int, ...]
) -> None:
    # The writer's object was collected before its append landed. It knows, and repeats it.
    reader = stream(world, failOnDataLoss="false")
    position: PartitionOffset | None = None
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
        stream(world).poll(PartitionOffset(end.next, end.base, end.transactions))


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


def test_a_closed_partition_is_read_without_being_claimed(world: TopicWorld) -> None:
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


def test_a_query_that_holds_nothing_back_goes_on_when_all_is_decided(world: TopicWorld) -> None:
    write(world, A, 2, b"held")
    world.append(P, b"free")
    end, _ = step(stream(world), None)
    with pytest.raises(InvalidInput, match=r"undecided at sequence 0 .* would never be read"):
        stream(world, isolationLevel="read_uncommitted").poll(end)
    write(world, A, 3)
    end, read = step(stream(world), end)
    assert read == [b"held"]
    stream(world, isolationLevel="read_uncommitted").poll(end)
