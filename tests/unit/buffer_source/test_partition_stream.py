"""One queue of a source: polls, ends, and plans."""

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
from tests.unit.buffer_source.source_queue import SourceTopic

P = "p-00000-04pn"
A, B = b"writerA", b"writerB"


@pytest.fixture
def source(runtime: ManualRuntime) -> SourceTopic:
    return SourceTopic(runtime, 1)


def once(call: Any, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def stream(source: SourceTopic, **given: str) -> PartitionStream:
    options = SourceOptions.from_spark({"path": "/queue", "gcEnabled": "false", **given})
    return PartitionStream(P, options.of_partition(P), source.store, source.runtime, once)


def write(source: SourceTopic, producer: bytes, clock: int, *values: bytes) -> None:
    """Append undecided messages from ``clock`` on, or without values the acknowledgement."""
    if not values:
        source.append(P, message=build_uuid(producer[-6:], clock, ACK_TXN))
    for number, value in enumerate(values, clock):
        source.append(P, value, message=build_uuid(producer[-6:], number, CONTINUE_TXN))


def step(
    reader: PartitionStream, start: PartitionOffset | None, most: int = EVERYTHING
) -> tuple[PartitionOffset, list[bytes]]:
    """Run one micro-batch, and return its end and the values that it reads."""
    poll = reader.poll(start, most)
    end = reader.end_offset(poll, len(poll.waiting))
    if end == start:
        return end, []
    return end, [each.metadata[0].payload for each in reader.plan(start, end).batches]


def test_undecided_batches_do_not_start_a_micro_batch(source: SourceTopic) -> None:
    reader = stream(source)
    source.append(P, b"before")
    start, read = step(reader, None)
    assert read == [b"before"]
    write(source, A, 2, b"one", b"two")
    assert step(reader, start) == (start, [])
    write(source, A, 4)
    end, read = step(reader, start)
    assert (end.next, read) == (4, [b"one", b"two"])


def test_a_new_query_that_finds_only_undecided_batches_starts_before_them(
    source: SourceTopic,
) -> None:
    write(source, A, 2, b"one")
    reader = stream(source)
    start, read = step(reader, None)
    assert (start.next, read) == (0, [])
    write(source, A, 3)
    assert step(reader, start)[1] == [b"one"]


def test_a_transaction_larger_than_the_limits_is_read_in_one_micro_batch(
    source: SourceTopic,
) -> None:
    write(source, A, 2, *(b"%d" % number for number in range(7)))
    source.append(P, b"between")
    write(source, A, 9)
    source.append(P, b"after")
    reader = stream(source)
    end, read = step(reader, None, 2)
    assert (end.next, read) == (8, [b"between"])
    end, read = step(reader, end, 2)
    assert read == [*(b"%d" % number for number in range(7)), b"after"]
    assert end.next == 10


def test_undecided_batches_are_not_dequeued(source: SourceTopic) -> None:
    source.append(P, b"0")
    write(source, A, 2, b"1")
    source.append(P, b"2")
    reader = stream(source)
    end, read = step(reader, None)
    assert read == [b"0", b"2"]
    reader.acknowledge(end)
    assert source.queued_in(P) == [1, 2]
    assert reader.acknowledged == end
    # A restart claims at this position, and reads the batch once it is decided.
    write(source, A, 3)
    again = stream(source)
    after, read = step(again, end)
    assert read == [b"1"]
    again.acknowledge(after)
    assert source.queued_in(P) == []
    assert again.empty


def test_an_abandoned_transaction_does_not_hold_up_the_others(source: SourceTopic) -> None:
    write(source, A, 2, b"abandoned")
    write(source, B, 2, b"one")
    write(source, B, 3)
    source.append(P, b"two")
    reader = stream(source)
    end, read = step(reader, None)
    assert read == [b"one", b"two"]
    source.append(P, message=build_uuid(A[-6:], 1, ACK_TXN))  # rolled back
    end, read = step(reader, end)
    assert not read
    reader.acknowledge(end)
    assert source.queued_in(P) == []


@pytest.mark.parametrize("cuts", [(), (2,), (2, 4)])
def test_f5_the_repeat_of_a_missing_message_is_read_wherever_micro_batches_end(
    source: SourceTopic, cuts: tuple[int, ...]
) -> None:
    # The writer's object was collected before its append landed. The writer knows, and repeats it.
    reader = stream(source, failOnDataLoss="false")
    position: PartitionOffset | None = None
    read: list[bytes] = []
    for clock, value in ((2, b"one"), (3, b"gone"), (3, b"again")):
        write(source, A, clock, value)
        if value == b"gone":
            manifest = source.queue(P).read()
            assert manifest is not None
            source.store.delete_many([manifest.entries()[-1].location])
        source.append(P, b"between")
        if len(source.queued_in(P)) in cuts:
            position, part = step(reader, position)
            read += part
    write(source, A, 4)
    end, part = step(stream(source, failOnDataLoss="false"), position)
    assert [each for each in read + part if each != b"between"] == [b"one", b"again"]
    replayed = stream(source, failOnDataLoss="false").plan(position, end)
    assert [each.metadata[0].payload for each in replayed.batches] == part
    assert replayed.missing == (0 if 4 in cuts else 1)


def test_a_queue_that_ends_between_an_open_transaction_and_the_position_went_backwards(
    source: SourceTopic,
) -> None:
    write(source, A, 2, b"1")
    source.append(P, b"2")
    end, _ = step(stream(source), None)
    # An older copy of the manifest is restored, and no marker has a later watermark.
    source.store.delete_many([f"{P}/_owner.json", f"{P}/manifest"])
    write(source, A, 2, b"1")
    with pytest.raises(QueueReset, match=r"cannot resume after sequence 1: .* ends at 0"):
        stream(source).poll(PartitionOffset(end.next, end.base, end.transactions))


def test_a_loss_after_an_undecided_batch_does_not_stop_the_query(source: SourceTopic) -> None:
    reader = stream(source, failOnDataLoss="false")
    start, _ = step(reader, None)
    write(source, A, 2, b"0")
    assert step(reader, start) == (start, [])
    source.append(P, b"1", b"2", b"3")
    manifest = source.queue(P).read()
    assert manifest is not None
    source.store.put(f"{P}/manifest", manifest.drop_through(2).raw)
    read: list[bytes] = []
    for _ in range(3):
        start, part = step(reader, start)
        read += part
    assert read == [b"3"]
    assert start.next == 4


def test_a_closed_partition_is_read_without_a_claim(source: SourceTopic) -> None:
    source.topic.expand(2)
    source.append(P, b"1")
    reader = stream(source)
    end, _ = step(reader, None)
    reader.acknowledge(end)
    source.topic.drain(P)
    assert source.topic.remove_drained(after_s=0) == [P]
    assert step(reader, end) == (end, [])
    assert step(stream(source), end) == (end, [])


def test_available_now_does_not_wait_for_undecided_transactions(source: SourceTopic) -> None:
    write(source, A, 2, b"1")
    reader = stream(source)
    reader.freeze_end()
    write(source, A, 3)
    end, read = step(reader, None)
    assert (end.next, read) == (0, [])
    assert step(reader, end) == (end, [])
    assert step(stream(source), end)[1] == [b"1"]


def test_a_read_uncommitted_query_continues_once_everything_is_decided(source: SourceTopic) -> None:
    write(source, A, 2, b"held")
    source.append(P, b"free")
    end, _ = step(stream(source), None)
    with pytest.raises(InvalidInput, match=r"undecided at sequence 0 .* would never be read"):
        stream(source, isolationLevel="read_uncommitted").poll(end)
    write(source, A, 3)
    end, read = step(stream(source), end)
    assert read == [b"held"]
    stream(source, isolationLevel="read_uncommitted").poll(end)
