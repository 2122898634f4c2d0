"""A topic in a store."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.config import ConsumerConfig, ProducerConfig, QueueConfig
from opendata_buffer.errors import (
    CorruptData,
    Drained,
    InvalidInput,
    PermanentStorageError,
    QueueReset,
)
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.neighbours import TOPIC_KEY
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.description import DRAIN_S, is_topic
from opendata_buffer.topic.topic import Topic, partition_config, seal_partition
from tests.unit.scripted import (
    ScriptedStore,
    applied_answer_lost,
    applied_then_412,
    before,
    not_applied_answer_lost,
)
from tests.unit.topic.in_memory import NAMES

CONFIG = QueueConfig(store="memory://unused")
NAME = NAMES[1]


def create(store: MemoryStore, partitions: int = 3) -> Topic:
    return Topic.create(CONFIG, partitions, store=store, runtime=ManualRuntime())


def opened(store: MemoryStore) -> Topic:
    return Topic.open(CONFIG, store=store, runtime=ManualRuntime(seed=1))


def queue_of(store: MemoryStore, name: str) -> Queue:
    config = partition_config(name, CONFIG)
    return Queue(store, config, runtime=ManualRuntime(), role="test")


def append(store: MemoryStore, name: str) -> int:
    return queue_of(store, name).append([NewEntry(f"{name}/x.batch", ())], read_first=True)


def test_a_created_topic_is_found_and_opened() -> None:
    Topic.create("memory://by-url", 2)
    assert Topic.open("memory://by-url").url == "memory://by-url"
    store = MemoryStore()
    assert not is_topic(store)
    made = create(store)
    assert is_topic(store)
    assert opened(store).description == made.description
    assert made.description.names == NAMES[:3]


def test_a_store_may_have_no_topic_or_deny_the_read() -> None:
    class Refusing(MemoryStore):
        def get(self, key: str, **how: Any) -> Any:
            raise PermanentStorageError("403")

    store, refusing, runtime = MemoryStore(), Refusing(), ManualRuntime()
    assert Topic.find(CONFIG, store=refusing, runtime=runtime) is None
    assert Topic.find(CONFIG, store=store, runtime=runtime) is None
    made = create(store)
    found = Topic.find(CONFIG, store=store, runtime=runtime)
    assert found is not None
    assert found.description == made.description
    store.put(TOPIC_KEY, b"{}")
    with pytest.raises(CorruptData, match=r"'_topic\.json'"):
        Topic.find(CONFIG, store=store, runtime=runtime)


def test_the_error_about_a_missing_topic_says_how_to_create_it() -> None:
    with pytest.raises(InvalidInput, match="topic create memory:// --partitions 4"):
        opened(MemoryStore())
    with pytest.raises(InvalidInput, match=r"no topic at memory://.* and no queue below 'ingest'"):
        Topic.of(CONFIG, store=MemoryStore(), runtime=ManualRuntime())


def test_a_second_topic_at_one_root_is_refused() -> None:
    store = MemoryStore()
    first = create(store).description
    with pytest.raises(InvalidInput, match=r"already, with 3 partitions.*topic expand"):
        create(store, 5)
    assert opened(store).description == first


def test_the_second_of_two_concurrent_creations_of_a_topic_is_refused() -> None:
    store = ScriptedStore()
    other = Topic.create(CONFIG, 2, store=MemoryStore(), runtime=ManualRuntime(seed=7)).description
    store.script = [before(applied_then_412, lambda s: s.put(TOPIC_KEY, other.to_json()))]
    with pytest.raises(InvalidInput, match="already, with 2 partitions"):
        create(store)
    assert opened(store).description == other


@pytest.mark.parametrize("step", [applied_answer_lost, applied_then_412, not_applied_answer_lost])
def test_f1_f2_a_lost_answer_does_not_create_a_second_topic(step: object) -> None:
    store = ScriptedStore(step)  # type: ignore[arg-type]
    made = create(store)
    assert opened(store).description == made.description


def test_a_root_with_a_queue_below_it_cannot_become_a_topic() -> None:
    store = MemoryStore()
    store.put("a file", b"")
    claim_for_writing(store, QueueConfig(store="memory://unused"))
    with pytest.raises(InvalidInput, match="a queue at 'ingest'"):
        create(store)
    assert not is_topic(store)


def test_concurrent_changes_of_two_processes_are_both_kept() -> None:
    store = MemoryStore()
    one, two = create(store), opened(store)
    one.expand(5)
    two.drain(NAME)
    assert one.read() == two.description
    assert one.description.names == NAMES
    assert one.description.draining == [NAME]


@pytest.mark.parametrize("step", [applied_answer_lost, applied_then_412, not_applied_answer_lost])
def test_f1_f2_a_lost_answer_does_not_add_a_partition_twice(step: object) -> None:
    store = ScriptedStore()
    topic = create(store)
    store.script = [step]  # type: ignore[list-item]
    assert len(topic.expand(4).names) == 4
    assert len(opened(store).description.names) == 4


def test_a_partition_has_the_settings_of_its_topic_with_its_own_data_prefix() -> None:
    given = ProducerConfig(store="s3://bucket", flush_interval_ms=7)
    config = partition_config(NAME, given)
    assert (config.data_path_prefix, config.manifest_path) == (NAME, f"{NAME}/manifest")
    assert config.flush_interval_ms == 7
    for wrong in ({"data_path_prefix": "mine"}, {"manifest_path": "mine"}):
        with pytest.raises(InvalidInput, match="is 'mine', but the partitions"):
            partition_config(NAME, ConsumerConfig(store="s3://bucket", **wrong))


def test_an_empty_partition_drains_for_a_while_so_that_its_producers_can_finish() -> None:
    runtime = ManualRuntime()
    topic = Topic.create(CONFIG, 2, store=MemoryStore(), runtime=runtime)
    topic.drain(NAME)
    runtime.advance(DRAIN_S - 1)
    topic.drain(NAME)  # a repeated call does not restart the time
    assert topic.remove_drained() == []
    runtime.advance(1)
    assert topic.remove_drained() == [NAME]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_partition_that_was_never_written_is_removed_even_if_it_was_sealed(sealed: bool) -> None:
    """A process may crash after it sealed the partition."""
    topic = create(MemoryStore())
    topic.drain(NAME)
    assert not sealed or seal_partition(topic, NAME)
    assert topic.remove_drained(0) == [NAME]


def test_an_append_to_a_removed_partition_is_refused_and_not_lost() -> None:
    store = MemoryStore()
    topic = create(store)
    append(store, NAME)
    slow, queue = queue_of(store, NAME), queue_of(store, NAME)
    slow.read()
    epoch = queue.claim_epoch(None).epoch
    topic.drain(NAME)
    assert topic.remove_drained(0) == [], "the partition still has a batch to read"
    queue.dequeue(0, epoch)
    assert topic.remove_drained(0) == [NAME]
    assert topic.remove_drained(0) == []
    assert opened(store).description.names == [NAMES[0], NAMES[2]]
    with pytest.raises(Drained, match=rf"{NAME}/manifest.*Nothing was written"):
        slow.append([NewEntry(f"{NAME}/y.batch", ())])
    for call in (lambda: queue.dequeue(0, epoch), lambda: queue.claim_epoch(None)):
        with pytest.raises(Drained):
            call()


@pytest.mark.parametrize("old", [None, Manifest.empty().raw])
def test_f4_a_draining_partition_whose_manifest_was_lost_or_restored_is_not_removed(
    old: bytes | None,
) -> None:
    store = MemoryStore()
    topic = create(store)
    claim = claim_for_writing(store, partition_config(NAME, CONFIG), runtime=ManualRuntime())
    append(store, NAME)
    claim.note(queue_of(store, NAME).read(), now=True)
    store.delete_many([f"{NAME}/manifest"])
    if old is not None:
        store.put(f"{NAME}/manifest", old)
    topic.drain(NAME)
    with pytest.raises(QueueReset, match=f"fsck .*{NAME} --repair"):
        topic.remove_drained(0)
    assert NAME in opened(store).description.names
    assert old is None or store.get(f"{NAME}/manifest").data == old


def test_f4_a_topic_that_vanishes_while_in_use_is_not_created_again() -> None:
    store = MemoryStore()
    topic = create(store)
    store.delete_many([TOPIC_KEY])
    for call in (topic.read, lambda: topic.expand(9)):
        with pytest.raises(QueueReset, match="vanished"):
            call()
    assert not is_topic(store)


def test_f4_another_topic_at_the_same_root_is_detected() -> None:
    store = MemoryStore()
    topic = create(store)
    store.delete_many([TOPIC_KEY])
    Topic.create(CONFIG, 3, store=store, runtime=ManualRuntime(seed=5))
    with pytest.raises(QueueReset, match="another one than before"):
        topic.read()


def test_an_unreadable_description_is_corrupt_data_of_a_topic() -> None:
    store = MemoryStore()
    store.put(TOPIC_KEY, b"nonsense")
    assert is_topic(store)
    with pytest.raises(CorruptData, match=r"_topic\.json"):
        opened(store)
    store.put(TOPIC_KEY, b" " * 2_000_000)
    assert is_topic(store)
