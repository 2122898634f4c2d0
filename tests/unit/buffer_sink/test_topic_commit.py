from __future__ import annotations

from typing import Any

import pytest

from buffer_sink.messages import Group, TopicWrite, UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_sink.topic_commit import TopicCommitter
from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import Drained, InvalidInput, Superseded, TransientStorageError
from opendata_buffer.formats.batch import decode_batch, encode_batch
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import Transaction, later_ulid
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.messages import undecided
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.base import Absent, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic
from opendata_buffer.transactions.commit_record import CommitRecord, record_key

CONFIG = QueueConfig(store="memory://x")
OPTIONS = SinkOptions(queue=CONFIG)


class Store(MemoryStore):
    """Fails conditional writes of chosen keys; does something before one."""

    def __init__(self, runtime: ManualRuntime) -> None:
        super().__init__("topic", now_ms=runtime.now_ms)
        self.silent: set[str] = set()
        self.before: dict[str, Any] = {}
        self.keys: list[str] = []

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        self.keys.append(key)
        if key in self.silent:
            return outcomes.Unknown("no answer")
        self.before.pop(key, lambda: None)()
        return super().put_if(key, data, condition)


class Contested(Store):
    """Of each partition's manifest the first write loses its race; remembers what was read."""

    def __init__(self, runtime: ManualRuntime) -> None:
        super().__init__(runtime)
        self.lost: set[str] = set()
        self.read: list[str] = []

    def get(self, key: str, **options: Any) -> Any:
        self.read.append(key)
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        if key.endswith("/manifest") and key not in self.lost:
            self.lost.add(key)
            return outcomes.Conflict()
        return super().put_if(key, data, condition)


class World:
    def __init__(self, partitions: int = 3) -> None:
        self.runtime = ManualRuntime()
        self.store = Store(self.runtime)
        self.topic = Topic.create("memory://x", partitions, store=self.store, runtime=self.runtime)

    def driver(self, options: SinkOptions = OPTIONS) -> TopicCommitter:
        return TopicCommitter(self.store, options, self.runtime)

    def group(
        self,
        batch: int | None,
        *values: str,
        app: str = "q",
        ahead_s: int = 3_600,
        query: str | None = "q",
    ) -> Group:
        """One batch per value, round the partitions; two tasks."""
        txn = None if batch is None else Transaction(app, batch)
        write = TopicWrite.planned(self.topic.read(), self.runtime)
        uploads = []
        for index, value in enumerate(values):
            name = write.active[index % len(write.active)]
            clock = write.clock(index // 2, index)
            ulid = later_ulid(self.runtime.ulid(), ahead_s * 1000)
            key = write.location(name, ulid, write.transaction(txn), clock)
            data = encode_batch([value.encode()])
            self.store.put(key, data)
            uploads.append(UploadedBatch(key, 1, len(data), (Metadata(0, 7, b""),), name, clock))
        return Group(Moment.now(self.runtime), tuple(uploads), txn, query, write)

    def manifest(self, name: str) -> Manifest:
        config = Topic.config_of(name, CONFIG)
        queue = Queue(self.store, config, runtime=self.runtime, role="test")
        return queue.read() or Manifest.empty()

    def read(self) -> list[str]:
        """What a reader of everything delivers, sorted."""
        found = []
        for name in self.topic.read().names:
            manifest = self.manifest(name)
            reader = ReadCommitted(name)
            where = dict(enumerate(manifest.locations(), manifest.first_sequence))
            for sequence, location in where.items():
                for each in reader.offer(sequence, location, lambda *_: ()):
                    blob: Any = self.store.get(where[each])
                    found += [record.decode() for record in decode_batch(blob.data)]
        return sorted(found)

    def undecided(self) -> int:
        return sum(
            len(undecided(enumerate(self.manifest(name).locations()), name))
            for name in self.topic.read().names
        )

    @property
    def record(self) -> CommitRecord:
        blob: Any = self.store.get(record_key("_topic", "q"))
        return CommitRecord.from_json(blob.data)


def test_a_group_is_visible_in_all_partitions() -> None:
    world = World()
    driver = world.driver()
    assert driver.append(world.group(0, "a", "b", "c", "d"))
    assert driver.append(world.group(1, "e"))
    assert world.read() == ["a", "b", "c", "d", "e"]
    assert world.undecided() == 0
    assert [world.manifest(name).next_sequence for name in world.topic.read().names] == [5, 2, 2]


def test_the_entries_of_a_partition_are_in_the_order_of_tasks_and_rows() -> None:
    world = World(1)
    group = world.group(0, "a", "b", "c", "d", "e")
    assert world.driver().append(group)
    locations = world.manifest("p-00000-04pn").locations()
    assert locations[:5] == [each.location for each in group.uploads]


def test_a_repeat_after_a_restart_is_dropped() -> None:
    world = World()
    assert world.driver().append(world.group(0, "a", "b"))
    assert not world.driver().append(world.group(0, "a", "b"))
    assert world.read() == ["a", "b"]


def test_a_restart_after_a_kill_before_the_decision_repeats_the_batch() -> None:
    world = World()
    killed = world.driver()
    group = world.group(0, "a", "b", "c")
    with pytest.raises(KeyboardInterrupt):
        _append_killed_at_decision(world, killed, group)
    assert world.read() == []
    assert world.undecided() == 3
    assert world.driver().append(world.group(0, "a", "b", "c"))
    assert world.read() == ["a", "b", "c"]
    assert world.undecided() == 0


def _append_killed_at_decision(world: World, driver: TopicCommitter, group: Group) -> None:
    def die() -> None:
        raise KeyboardInterrupt

    key = record_key("_topic", "q")
    # The first write of the record claims it, the second one decides.
    world.store.before[key] = lambda: world.store.before.update({key: die})
    driver.append(group)


def test_a_query_without_rows_after_a_kill_ends_what_was_left() -> None:
    world = World()
    with pytest.raises(KeyboardInterrupt):
        _append_killed_at_decision(world, world.driver(), world.group(0, "a", "b", "c"))
    assert world.undecided() == 3
    assert not world.driver().append(world.group(0))
    assert world.undecided() == 0
    assert world.read() == []


def test_a_write_of_nothing_without_an_app_touches_nothing() -> None:
    world = World()
    assert not world.driver().append(world.group(None))
    assert not world.driver().append(None)
    assert [each.key for each in world.store.list("").objects] == ["_topic.json"]


def test_another_run_takes_over_between_the_append_and_the_decision() -> None:
    world = World()
    zombie, group = world.driver(), world.group(1, "a", "b", "c")
    assert zombie.append(world.group(0, "0"))
    successor = world.driver()
    world.store.before["p-00001-05mv/manifest"] = lambda: successor.append(
        world.group(1, "a", "b", "c")
    )
    assert not zombie.append(group), "the other run has committed it"
    assert world.read() == ["0", "a", "b", "c"]
    assert world.undecided() == 0


def test_a_run_that_was_overtaken_says_so_and_leaves_nothing_behind() -> None:
    world = World()
    old = world.driver()
    assert old.append(world.group(0, "0"))
    world.store.silent = {"p-00001-05mv/manifest"}
    with pytest.raises(TransientStorageError, match="Nothing of it is visible"):
        world.driver().append(world.group(1, "a", "b", "c"))  # it has begun, and does not end
    world.store.silent = set()
    with pytest.raises(Superseded):
        old.append(world.group(1, "x", "y", "z"))
    assert world.read() == ["0"]
    assert world.undecided() == 0
    assert old.append(world.group(1, "x", "y", "z")), "started again, it is a run of its own"
    assert world.read() == ["0", "x", "y", "z"]


def test_a_partition_that_cannot_be_written_leaves_nothing_visible() -> None:
    world = World()
    driver = world.driver()
    assert driver.append(world.group(0, "a", "b", "c"))
    world.store.silent = {"p-00001-05mv/manifest"}
    with pytest.raises(TransientStorageError, match="Nothing of it is visible"):
        driver.append(world.group(1, "d", "e", "f"))
    assert world.read() == ["a", "b", "c"]
    assert world.undecided() == 0, "rolled back in the others"
    world.store.silent = set()
    assert driver.append(world.group(1, "d", "e", "f"))
    assert world.read() == ["a", "b", "c", "d", "e", "f"]


def test_a_partition_that_left_the_topic_meanwhile() -> None:
    world = World()
    driver, group = world.driver(), world.group(0, "a", "b", "c")
    world.topic.drain("p-00001-05mv")
    world.runtime.advance(3_600)
    assert world.topic.remove_drained() == ["p-00001-05mv"]
    with pytest.raises(Drained) as refused:
        driver.append(group)
    assert "Start the query again" in "".join(refused.value.__notes__)
    assert world.undecided() == 0
    assert driver.append(world.group(0, "a", "b", "c")), "it goes to the others"
    assert world.read() == ["a", "b", "c"]


def test_a_partition_that_began_to_drain_meanwhile_still_takes_what_was_planned() -> None:
    world = World()
    driver, group = world.driver(), world.group(0, "a", "b", "c")
    world.topic.drain("p-00001-05mv")
    assert driver.append(group)
    assert world.topic.remove_drained() == []
    assert world.read() == ["a", "b", "c"]


def test_a_partition_is_not_removed_while_it_holds_an_undecided_batch() -> None:
    world = World()
    with pytest.raises(KeyboardInterrupt):
        _append_killed_at_decision(world, world.driver(), world.group(0, "a", "b", "c"))
    world.topic.drain("p-00001-05mv")
    world.runtime.advance(3_600)
    assert world.topic.remove_drained() == []


def test_partitions_that_were_added_are_written_by_the_next_group() -> None:
    world = World(1)
    driver = world.driver()
    assert driver.append(world.group(0, "a", "b"))
    world.topic.expand(2)
    assert driver.append(world.group(1, "c", "d"))
    assert world.manifest("p-00001-05mv").next_sequence == 2
    assert world.read() == ["a", "b", "c", "d"]


def test_a_write_without_an_app_leaves_no_record_behind() -> None:
    world = World()
    assert world.driver().append(world.group(None, "a", "b", "c", query=None))
    assert world.driver().append(world.group(None, "a", query=None)), "nothing tells it from new"
    assert world.read() == ["a", "a", "b", "c"]
    assert not [each.key for each in world.store.list("_topic/").objects]


def test_f5_uploads_that_may_be_collected_are_refused_before_anything_is_appended() -> None:
    world = World()
    group = world.group(0, "a", "b", "c", ahead_s=0)
    world.runtime.advance(500)
    with pytest.raises(TransientStorageError, match="maxWriteDurationMs"):
        world.driver().append(group)
    assert world.undecided() == 0
    assert world.read() == []


@pytest.mark.parametrize("gone", [False, True])
def test_f5_a_part_that_landed_late_counts_only_if_its_objects_are_there(gone: bool) -> None:
    world = World()
    driver = world.driver()
    assert driver.append(world.group(0, "a", "b", "c"))
    group = world.group(1, "d", ahead_s=0)

    def freeze() -> None:
        world.runtime.advance(3_600)
        if gone:
            world.store.delete_many([group.uploads[0].location])

    world.store.before["p-00000-04pn/manifest"] = freeze
    if gone:
        with pytest.raises(TransientStorageError, match="maxWriteDurationMs"):
            driver.append(group)
        assert world.read() == ["a", "b", "c"]
    else:
        assert driver.append(group)
        assert world.read() == ["a", "b", "c", "d"]
    assert world.undecided() == 0


@pytest.mark.parametrize("broker", ["auto", "off"])
def test_each_partition_has_a_broker_of_its_own_or_none(broker: str) -> None:
    world = World()
    world.store = Contested(world.runtime)
    world.topic = Topic.create("memory://x", 3, store=world.store, runtime=world.runtime)
    driver = world.driver(SinkOptions(queue=CONFIG, broker=broker))
    assert driver.append(world.group(0, "a", "b", "c"))
    names = world.topic.read().names
    assert world.store.lost == {f"{name}/manifest" for name in names}
    looks = [key for key in world.store.read if key.endswith("_broker.json")]
    wanted = [f"{name}/_broker.json" for name in names] if broker == "auto" else []
    assert sorted(looks) == sorted(wanted)
    driver.disconnect()


def test_a_deleted_checkpoint_with_the_same_app_id_is_refused_in_the_same_process() -> None:
    world = World()
    driver = world.driver()
    for batch in range(2):
        assert driver.append(world.group(batch, f"old {batch}", query="one"))
    # Spark keeps its Python workers, and the new query commits in the one of the old.
    with pytest.raises(InvalidInput, match=r"belongs to query one.*this is query two"):
        driver.append(world.group(0, "new", query="two"))
    assert driver.append(world.group(0, "new", app="q2", query="two"))
    assert world.read() == ["new", "old 0", "old 1"]


def test_batches_of_a_query_are_committed_by_several_processes_in_turn() -> None:
    world = World()
    # Spark takes the Python worker that has been idle the longest.
    workers = [world.driver() for _ in range(3)]
    for batch in range(12):
        assert workers[batch % 3].append(world.group(batch, f"{batch:02} a", f"{batch:02} b"))
        assert not workers[batch % 2].append(world.group(batch, f"{batch:02} a", f"{batch:02} b"))
    assert world.read() == [f"{batch:02} {row}" for batch in range(12) for row in "ab"]
    assert world.undecided() == 0
