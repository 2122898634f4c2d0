"""Which queues a source reads."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_source.micro_batch_stream import Partitions, reads_topic
from buffer_source.offsets import Position, SourceOffset
from buffer_source.options import SourceOptions
from opendata_buffer.errors import InvalidInput, PermanentStorageError, QueueReset
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.world import TopicWorld, World


def once(call: Any, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)


def options(**given: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": "/world", "gcEnabled": "false", **given})


def partitions(world: World, **given: str) -> Partitions:
    return Partitions(options(**given), world.store, world.runtime, once)


@pytest.fixture
def topic(runtime: ManualRuntime) -> TopicWorld:
    return TopicWorld(runtime, 3)


def test_a_queue_is_the_one_partition_of_its_source(runtime: ManualRuntime) -> None:
    assert partitions(World(runtime)).names() == ["0"]


def test_a_topic_is_found_by_itself_and_seen_to_grow(topic: TopicWorld) -> None:
    found = partitions(topic)
    assert found.names() == ["p-00000-04pn", "p-00001-05mv", "p-00002-0bvb"]
    topic.topic.expand(4)
    assert found.names()[-1] == "p-00003-04vf"


@pytest.mark.parametrize("option", ["dataPathPrefix", "manifestPath"])
def test_naming_a_queue_leads_to_that_queue_also_in_a_topic(topic: TopicWorld, option: str) -> None:
    assert not reads_topic(options(**{option: "p-00001-05mv"}), topic.store, topic.runtime)
    assert partitions(topic, **{option: "p-00001-05mv"}).names() == ["0"]


class Locked(MemoryStore):
    """Only what lies below a queue's prefix may be read."""

    def get(self, key: str, **how: Any) -> Any:
        if "/" not in key:
            raise PermanentStorageError("403 AccessDenied")
        return super().get(key, **how)


def test_who_may_only_read_below_a_prefix_has_a_queue(runtime: ManualRuntime) -> None:
    assert not reads_topic(options(), Locked(), runtime)


@pytest.mark.parametrize("option", ["startingOffsets", "endingOffsets"])
def test_a_sequence_means_nothing_in_a_topic(topic: TopicWorld, option: str) -> None:
    with pytest.raises(InvalidInput, match=f"option {option} is 7, and .* is a topic"):
        partitions(topic, **{option: "7"}).names()


def test_a_checkpoint_is_of_a_topic_or_of_a_queue(
    topic: TopicWorld, runtime: ManualRuntime
) -> None:
    queue, many = SourceOffset.of(Position(1, 0)), SourceOffset({"p-00001-05mv": Position(1, 0)})
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
    many = SourceOffset({"p-00001-05mv": Position(1, 0)})
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


def test_a_partition_that_nobody_wrote_to_is_made_when_it_is_read(topic: TopicWorld) -> None:
    assert partitions(topic).options_of("p-00002-0bvb").create_if_missing
    assert not options().create_if_missing


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
