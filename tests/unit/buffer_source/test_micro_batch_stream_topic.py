"""The driver's side over a topic: added and removed partitions, limits, and restarts."""

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
    SourceQueue,
    SourceTopic,
    committed_before,
    report_of,
    values_of,
)

P0, P1, P2 = "p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"


@pytest.fixture
def source(runtime: ManualRuntime) -> SourceTopic:
    return SourceTopic(runtime, 3)


def batch(driver: MicroBatchStream, start: SourceOffset | None) -> tuple[SourceOffset, list[bytes]]:
    """Run one micro-batch like a normal query."""
    end = committed_before(driver, start)
    return end, [] if end == start else values_of(driver, start, end)


def numbered(name: str, count: int) -> list[bytes]:
    return [b"%s-%d" % (name.encode(), number) for number in range(count)]


def drain(source: SourceTopic, name: str) -> None:
    """Drain a partition, and wait until all producers know."""
    source.topic.drain(name)
    source.runtime.advance(DRAIN_S + 1)


def nexts(offset: SourceOffset) -> dict[str, int]:
    return {name: position.next for name, position in offset.partitions.items()}


def test_a_new_query_on_consumed_partitions_gets_one_warning_about_the_gap(
    source: SourceTopic, caplog: pytest.LogCaptureFixture
) -> None:
    source.append(P0, b"a", b"b")
    source.append(P1, b"c")
    end, _ = batch(source.run(), None)
    source.run().commit(end)
    batch(source.run(), None)
    (message,) = caplog.messages
    assert "3 batches were read and removed before this query" in message
    assert "readers enable" in message
    assert "--data-path-prefix" not in message, "the command applies to the whole topic"


@pytest.mark.parametrize("limit", ["maxBatchesPerTrigger", "maxOffsetsPerTrigger"])
def test_a_limit_below_the_number_of_partitions_starves_no_partition(
    source: SourceTopic, limit: str
) -> None:
    driver = source.run(**{limit: "1"})
    position: SourceOffset | None = None
    read: list[bytes] = []
    for trigger in range(30):
        if trigger < 20:  # the first partition gets more batches than a trigger may read
            source.append(P0, b"busy", b"busy")
        if trigger == 5:
            source.append(P1, b"one")
            source.append(P2, b"two")
        source.runtime.advance(1)
        position, part = batch(driver, position)
        read += part
    assert b"one" in read
    assert b"two" in read
    assert len(read) == 30


def test_a_new_partition_is_read_from_its_beginning_at_the_next_trigger(
    source: SourceTopic,
) -> None:
    driver = source.run(startingOffsets="latest")
    position, read = batch(driver, None)
    assert read == []
    source.topic.expand(4)
    source.append("p-00003-04vf", b"new")
    position, read = batch(driver, position)
    assert read == [b"new"]
    # A run that finds it at its start also reads it from its beginning.
    source.topic.expand(5)
    source.append("p-00004-00jx", b"newer")
    again = source.run(startingOffsets="latest")
    end, read = batch(again, position)
    assert read == [b"newer"]
    assert values_of(source.run(), position, end) == [b"newer"]


def test_a_drained_partition_is_removed_from_the_topic_and_the_offsets(source: SourceTopic) -> None:
    source.append(P1, *numbered(P1, 3))
    driver = source.run()
    read_all, _ = batch(driver, None)
    drain(source, P1)
    source.append(P0, b"1")
    with_it, _ = batch(driver, read_all)  # acknowledges the batches that were read before
    driver.latest_offset(with_it)
    assert source.topic.read().names == [P0, P2]
    source.append(P0, b"2")
    without, read = batch(driver, with_it)  # Spark commits the offset that had it
    assert read == [b"2"]
    assert set(nexts(without)) == {P0, P2}
    # It is neither opened again nor counted as a backlog.
    assert driver.latest_offset(without) is without
    report = report_of(driver)
    assert set(report["next"]) == {P0, P2}
    assert (report["backlogBatches"], report["partitionBacklogs"]) == (0, {})
    source.append(P2, b"3")
    assert batch(source.run(), without)[1] == [b"3"]


@pytest.mark.parametrize("loss", ["true", "false"])
def test_a_partition_that_was_removed_with_unread_batches_is_a_loss(
    source: SourceTopic, loss: str
) -> None:
    reader = source.run(acknowledge="false", failOnDataLoss=loss)
    source.append(P1, b"seen")
    position, _ = batch(reader, None)
    source.append(P1, b"unseen")
    end, _ = batch(source.run(), None)
    drain(source, P1)
    source.run().latest_offset(end)
    assert P1 not in source.topic.read().names
    if loss == "true":
        with pytest.raises(DataLoss, match=r"manifest 'p-00001-05mv/manifest'"):
            reader.latest_offset(position)
        return
    source.append(P0, b"more")
    end, read = batch(reader, position)
    assert read == [b"more"]
    assert set(nexts(end)) >= {P0, P2}


def test_available_now_reads_only_the_batches_and_partitions_of_its_start(
    source: SourceTopic,
) -> None:
    source.append(P0, *numbered(P0, 2))
    source.append(P1, *numbered(P1, 2))
    driver = source.run(maxBatchesPerTrigger="2")
    driver.prepare_available_now()
    source.append(P0, b"late")
    source.topic.expand(4)
    source.append("p-00003-04vf", b"late")
    position: SourceOffset | None = None
    read: list[bytes] = []
    while True:
        end, part = batch(driver, position)
        if end == position:
            break
        read += part
        position = end
    assert sorted(read) == numbered(P0, 2) + numbered(P1, 2)
    assert source.queued_in(P0) == [2]


@pytest.mark.parametrize("undecided", [0, 3])
@pytest.mark.parametrize("options", [{}, {"maxBatchesPerTrigger": "2"}])
def test_an_idle_trigger_reads_the_topic_and_each_manifest_once(
    source: SourceTopic, undecided: int, options: dict[str, str]
) -> None:
    source.append(P0, b"x")
    driver = source.run(**options)
    position, _ = batch(driver, None)
    for number in range(undecided):
        source.append(P0, b"held", message=build_uuid(b"writer", 2 + number, CONTINUE_TXN))
    driver.latest_offset(position)
    source.store.gets.clear()
    assert driver.latest_offset(position) is position
    keys = sorted(key for key, _ in source.store.gets)
    assert keys == ["_topic.json", *(f"{name}/manifest" for name in (P0, P1, P2))]
    assert all(answer is None for _, answer in source.store.gets)


def test_a_failed_micro_batch_cannot_be_repeated_with_an_isolation_that_loses_batches(
    source: SourceTopic,
) -> None:
    held = build_uuid(b"writer", 2, CONTINUE_TXN)
    source.append(P0, b"held", message=held)
    source.append(P0, b"free")
    end, read = batch(source.run(isolationLevel="read_uncommitted"), None)
    assert read == [b"held", b"free"]
    with pytest.raises(InvalidInput, match="planned with read_uncommitted, up to sequence 1"):
        source.run().plan_input_partitions(None, end)
    assert values_of(source.run(isolationLevel="read_uncommitted"), None, end) == read

    end, read = batch(source.run(), None)
    assert read == [b"free"]
    with pytest.raises(InvalidInput, match="holds back transactions"):
        source.run(isolationLevel="read_uncommitted").plan_input_partitions(None, end)
    assert values_of(source.run(), None, end) == read


def options(**given: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": "/queue", "gcEnabled": "false", **given})


def partitions(source: SourceQueue, **given: str) -> SourcePartitions:
    return SourcePartitions(options(**given), source.store, source.runtime)


@pytest.fixture
def topic(runtime: ManualRuntime) -> SourceTopic:
    return SourceTopic(runtime, 3)


def test_a_reader_with_access_to_one_prefix_treats_it_as_a_queue(topic: SourceTopic) -> None:
    topic.store.fail("get", 1, PermanentStorageError("403 AccessDenied"), "_topic.json")
    assert partitions(topic).topic is None


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_a_sequence_is_refused_as_a_start_in_a_topic(topic: SourceTopic, option: str) -> None:
    with pytest.raises(InvalidInput, match=f"option {option} is 7, and .* is a topic"):
        partitions(topic, **{option: "7"}).names()


def test_checkpoints_of_topics_and_queues_cannot_be_mixed(
    topic: SourceTopic, runtime: ManualRuntime
) -> None:
    queue, many = (SourceOffset({name: PartitionOffset(1, 0)}) for name in ("0", "p-00001-05mv"))
    partitions(topic).check(many)
    partitions(SourceQueue(runtime)).check(queue)
    with pytest.raises(InvalidInput, match=r"about one queue, and .* is a topic with 3 partitions"):
        partitions(topic).check(queue)
    with pytest.raises(InvalidInput, match="this source reads one queue"):
        partitions(SourceQueue(runtime)).check(many)


def test_the_error_about_a_lost_description_does_not_advise_to_delete_the_checkpoint(
    topic: SourceTopic,
) -> None:
    topic.append("p-00001-05mv", b"waits")
    many = SourceOffset({"p-00001-05mv": PartitionOffset(1, 0)})
    partitions(topic).check(many)
    topic.store.delete_many(["_topic.json"])
    with pytest.raises(InvalidInput, match=r"_topic\.json' is gone.*Put its latest version back"):
        partitions(topic).check(many)


def test_a_topic_that_vanishes_is_not_mistaken_for_a_queue(topic: SourceTopic) -> None:
    found = partitions(topic)
    found.names()
    topic.store.delete_many(["_topic.json"])
    with pytest.raises(QueueReset, match="vanished"):
        found.names()


def test_sequences_by_partition_are_accepted_only_for_partitions_of_a_topic(
    topic: SourceTopic, runtime: ManualRuntime
) -> None:
    given = {"startingOffsets": '{"p-00001-05mv": 3}'}
    with pytest.raises(
        InvalidInput, match=r"sequences by partition \(p-00001-05mv\), and .* one queue"
    ):
        partitions(SourceQueue(runtime), **given).names()
    with pytest.raises(InvalidInput, match="partition is 'p-00003-04vf': the topic has"):
        partitions(topic, startingOffsets='{"p-00003-04vf": 3}').names()
    partitions(topic, **given).names()
    # A query continues with the options that it was started with.
    topic.topic.drain("p-00001-05mv")
    topic.topic.remove_drained(after_s=0)
    assert "p-00001-05mv" not in partitions(topic, **given).names()
