"""The driver's side over a topic: partitions that come and go, limits, restarts."""

from __future__ import annotations

import pytest

from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import PartitionOffset, SourceOffset, SourcePartitions
from opendata_buffer.errors import DataLoss, InvalidInput, PermanentStorageError, QueueReset
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import DRAIN_S
from tests.unit.buffer_source.source_queue import (
    TopicWorld,
    World,
    committed_before,
    report_of,
    values_of,
)

P0, P1, P2 = "p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"


@pytest.fixture
def world(runtime: ManualRuntime) -> TopicWorld:
    return TopicWorld(runtime, 3)


def batch(driver: MicroBatchStream, start: SourceOffset | None) -> tuple[SourceOffset, list[bytes]]:
    """One micro-batch as a normal query runs it."""
    end = committed_before(driver, start)
    return end, [] if end == start else values_of(driver, start, end)


def numbered(name: str, count: int) -> list[bytes]:
    return [b"%s-%d" % (name.encode(), number) for number in range(count)]


def drain(world: TopicWorld, name: str) -> None:
    """Nothing is written any more, and for so long that all producers know."""
    world.topic.drain(name)
    world.runtime.advance(DRAIN_S + 1)


def nexts(offset: SourceOffset) -> dict[str, int]:
    return {name: position.next for name, position in offset.partitions.items()}


def test_a_new_query_on_consumed_partitions_is_told_once_what_is_gone(
    world: TopicWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(P0, b"a", b"b")
    world.append(P1, b"c")
    end, _ = batch(world.run(), None)
    world.run().commit(end)
    batch(world.run(), None)
    (message,) = caplog.messages
    assert "3 batches were read and removed before this query" in message
    assert "readers enable" in message
    assert "--data-path-prefix" not in message, "the command is about the whole topic"


@pytest.mark.parametrize("limit", ["maxBatchesPerTrigger", "maxOffsetsPerTrigger"])
def test_a_limit_below_the_number_of_partitions_starves_none(world: TopicWorld, limit: str) -> None:
    driver = world.run(**{limit: "1"})
    position: SourceOffset | None = None
    read: list[bytes] = []
    for trigger in range(30):
        if trigger < 20:  # the first partition gets more than a trigger may read
            world.append(P0, b"busy", b"busy")
        if trigger == 5:
            world.append(P1, b"one")
            world.append(P2, b"two")
        world.runtime.advance(1)
        position, part = batch(driver, position)
        read += part
    assert b"one" in read
    assert b"two" in read
    assert len(read) == 30


def test_a_new_partition_is_read_from_its_beginning_at_the_next_trigger(world: TopicWorld) -> None:
    driver = world.run(startingOffsets="latest")
    position, read = batch(driver, None)
    assert read == []
    world.topic.expand(4)
    world.append("p-00003-04vf", b"new")
    position, read = batch(driver, position)
    assert read == [b"new"]
    # And so it is by a run that finds it at its start.
    world.topic.expand(5)
    world.append("p-00004-00jx", b"newer")
    again = world.run(startingOffsets="latest")
    end, read = batch(again, position)
    assert read == [b"newer"]
    assert values_of(world.run(), position, end) == [b"newer"]


def test_a_drained_partition_leaves_topic_and_offsets(world: TopicWorld) -> None:
    world.append(P1, *numbered(P1, 3))
    driver = world.run()
    read_all, _ = batch(driver, None)
    drain(world, P1)
    world.append(P0, b"1")
    with_it, _ = batch(driver, read_all)  # acknowledges what was read before
    driver.latest_offset(with_it)
    assert world.topic.read().names == [P0, P2]
    world.append(P0, b"2")
    without, read = batch(driver, with_it)  # Spark commits the offset that had it
    assert read == [b"2"]
    assert set(nexts(without)) == {P0, P2}
    # It is neither opened again nor shown as a backlog.
    assert driver.latest_offset(without) is without
    report = report_of(driver)
    assert set(report["next"]) == {P0, P2}
    assert (report["backlogBatches"], report["partitionBacklogs"]) == (0, {})
    world.append(P2, b"3")
    assert batch(world.run(), without)[1] == [b"3"]


@pytest.mark.parametrize("loss", ["true", "false"])
def test_a_partition_that_left_with_unread_batches_is_a_loss(world: TopicWorld, loss: str) -> None:
    reader = world.run(acknowledge="false", failOnDataLoss=loss)
    world.append(P1, b"seen")
    position, _ = batch(reader, None)
    world.append(P1, b"unseen")
    end, _ = batch(world.run(), None)
    drain(world, P1)
    world.run().latest_offset(end)
    assert P1 not in world.topic.read().names
    if loss == "true":
        with pytest.raises(DataLoss, match=r"manifest 'p-00001-05mv/manifest'"):
            reader.latest_offset(position)
        return
    world.append(P0, b"more")
    end, read = batch(reader, position)
    assert read == [b"more"]
    assert set(nexts(end)) >= {P0, P2}


def test_available_now_reads_what_was_there_in_the_partitions_that_were_there(
    world: TopicWorld,
) -> None:
    world.append(P0, *numbered(P0, 2))
    world.append(P1, *numbered(P1, 2))
    driver = world.run(maxBatchesPerTrigger="2")
    driver.prepare_available_now()
    world.append(P0, b"late")
    world.topic.expand(4)
    world.append("p-00003-04vf", b"late")
    position: SourceOffset | None = None
    read: list[bytes] = []
    while True:
        end, part = batch(driver, position)
        if end == position:
            break
        read += part
        position = end
    assert sorted(read) == numbered(P0, 2) + numbered(P1, 2)
    assert world.queued_in(P0) == [2]


@pytest.mark.parametrize("undecided", [0, 3])
@pytest.mark.parametrize("options", [{}, {"maxBatchesPerTrigger": "2"}])
def test_an_idle_trigger_reads_the_topic_and_each_manifest_once(
    world: TopicWorld, undecided: int, options: dict[str, str]
) -> None:
    world.append(P0, b"x")
    driver = world.run(**options)
    position, _ = batch(driver, None)
    for number in range(undecided):
        world.append(P0, b"held", message=build_uuid(b"writer", 2 + number, CONTINUE_TXN))
    driver.latest_offset(position)
    world.store.gets.clear()
    assert driver.latest_offset(position) is position
    keys = sorted(key for key, _ in world.store.gets)
    assert keys == ["_topic.json", *(f"{name}/manifest" for name in (P0, P1, P2))]
    assert all(answer is None for _, answer in world.store.gets)


def test_a_micro_batch_that_failed_is_not_repeated_with_another_isolation_that_loses_batches(
    world: TopicWorld,
) -> None:
    held = build_uuid(b"writer", 2, CONTINUE_TXN)
    world.append(P0, b"held", message=held)
    world.append(P0, b"free")
    end, read = batch(world.run(isolationLevel="read_uncommitted"), None)
    assert read == [b"held", b"free"]
    with pytest.raises(InvalidInput, match="planned with read_uncommitted, up to sequence 1"):
        world.run().plan_input_partitions(None, end)
    assert values_of(world.run(isolationLevel="read_uncommitted"), None, end) == read

    end, read = batch(world.run(), None)
    assert read == [b"free"]
    with pytest.raises(InvalidInput, match="holds back transactions"):
        world.run(isolationLevel="read_uncommitted").plan_input_partitions(None, end)
    assert values_of(world.run(), None, end) == read


def options(**given: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": "/world", "gcEnabled": "false", **given})


def partitions(world: World, **given: str) -> SourcePartitions:
    return SourcePartitions(options(**given), world.store, world.runtime)


@pytest.fixture
def topic(runtime: ManualRuntime) -> TopicWorld:
    return TopicWorld(runtime, 3)


def test_a_reader_that_may_only_read_below_a_prefix_has_a_queue(topic: TopicWorld) -> None:
    topic.store.fail("get", 1, PermanentStorageError("403 AccessDenied"), "_topic.json")
    assert partitions(topic).topic is None


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_a_sequence_means_nothing_in_a_topic(topic: TopicWorld, option: str) -> None:
    with pytest.raises(InvalidInput, match=f"option {option} is 7, and .* is a topic"):
        partitions(topic, **{option: "7"}).names()


def test_a_checkpoint_is_of_a_topic_or_of_a_queue(
    topic: TopicWorld, runtime: ManualRuntime
) -> None:
    queue, many = (SourceOffset({name: PartitionOffset(1, 0)}) for name in ("0", "p-00001-05mv"))
    partitions(topic).check(many)
    partitions(World(runtime)).check(queue)
    with pytest.raises(InvalidInput, match=r"about one queue, and .* is a topic with 3 partitions"):
        partitions(topic).check(queue)
    with pytest.raises(InvalidInput, match="this source reads one queue"):
        partitions(World(runtime)).check(many)


def test_a_checkpoint_of_a_topic_is_not_to_be_given_up_because_the_description_is_lost(
    topic: TopicWorld,
) -> None:
    topic.append("p-00001-05mv", b"waits")
    many = SourceOffset({"p-00001-05mv": PartitionOffset(1, 0)})
    partitions(topic).check(many)
    topic.store.delete_many(["_topic.json"])
    with pytest.raises(InvalidInput, match=r"_topic\.json' is gone.*Put its latest version back"):
        partitions(topic).check(many)


def test_a_topic_that_vanishes_is_not_taken_for_a_queue(topic: TopicWorld) -> None:
    found = partitions(topic)
    found.names()
    topic.store.delete_many(["_topic.json"])
    with pytest.raises(QueueReset, match="vanished"):
        found.names()


def test_sequences_by_partition_are_for_a_topic_and_its_partitions(
    topic: TopicWorld, runtime: ManualRuntime
) -> None:
    given = {"startingOffsets": '{"p-00001-05mv": 3}'}
    with pytest.raises(
        InvalidInput, match=r"sequences by partition \(p-00001-05mv\), and .* one queue"
    ):
        partitions(World(runtime), **given).names()
    with pytest.raises(InvalidInput, match="partition is 'p-00003-04vf': the topic has"):
        partitions(topic, startingOffsets='{"p-00003-04vf": 3}').names()
    partitions(topic, **given).names()
    # A query goes on with the options it was begun with.
    topic.topic.drain("p-00001-05mv")
    topic.topic.remove_drained(after_s=0)
    assert "p-00001-05mv" not in partitions(topic, **given).names()
