from __future__ import annotations

from typing import Any

import pytest

from buffer_sink.committer import Group, TopicCommitter, TopicWrite, UploadedBatch
from buffer_sink.options import SinkOptions
from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import Drained, OpenDataBufferError, TransientStorageError
from opendata_buffer.formats.batch import Transaction, decode_batch, encode_batch, later_ulid
from opendata_buffer.formats.manifest import Manifest, Metadata
from opendata_buffer.messages import undecided
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.base import PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic
from opendata_buffer.transactions import record_key

CONFIG = QueueConfig(store="memory://x")
OPTIONS = SinkOptions(queue=CONFIG)


NAMES = ("p-00000-04pn", "p-00001-05mv", "p-00002-0bvb")
MANIFESTS = {f"{name}/manifest" for name in NAMES}


class Store(MemoryStore):
    """Fails conditional writes of chosen keys; does something before one; remembers reads."""

    def __init__(self, runtime: ManualRuntime) -> None:
        super().__init__("topic", now_ms=runtime.now_ms)
        self.silent: set[str] = set()
        self.contested: set[str] = set()
        self.before: dict[str, Any] = {}
        self.read: list[str] = []

    def get(self, key: str, **options: Any) -> Any:
        self.read.append(key)
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        if key in self.silent:
            return outcomes.Unknown("no answer")
        if key in self.contested:
            self.contested.remove(key)
            return outcomes.Conflict()
        self.before.pop(key, lambda: None)()
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
            uploads.append(UploadedBatch(key, 1, (Metadata(0, 7, b""),), name, clock))
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

    def append_killed_at_decision(self, group: Group) -> None:
        def die() -> None:
            raise KeyboardInterrupt

        key = record_key("_topic", "q")
        # The first write of the record claims it, the second one decides.
        self.store.before[key] = lambda: self.store.before.update({key: die})
        with pytest.raises(KeyboardInterrupt):
            self.driver().append(group)


def test_a_group_is_visible_in_all_partitions() -> None:
    world = World()
    driver = world.driver()
    assert driver.append(world.group(0, "a", "b", "c", "d"))
    assert driver.append(world.group(1, "e"))
    assert world.read() == ["a", "b", "c", "d", "e"]
    assert world.undecided() == 0
    assert [world.manifest(name).next_sequence for name in world.topic.read().names] == [5, 2, 2]


@pytest.mark.parametrize(
    ("batch", "advice"),
    [(0, "Start the query again: that completes it"), (None, "Run 'opendata-buffer abort ")],
)
def test_a_commit_that_cannot_be_carried_out_names_what_completes_it(
    batch: int | None, advice: str
) -> None:
    world = World()
    group = world.group(batch, "a", "b", "c")
    assert group.topic is not None
    key = record_key("_topic", group.topic.transaction(group.transaction).app)

    def fail() -> None:
        world.store.silent = set(MANIFESTS)

    world.store.before[key] = lambda: world.store.before.update({key: fail})
    with pytest.raises(OpenDataBufferError) as raised:
        world.driver().append(group)
    assert "is committed, and not visible" in "".join(raised.value.__notes__)
    assert advice in "".join(raised.value.__notes__)
    world.store.silent = set()
    if batch is not None:
        assert not world.driver().append(world.group(batch, "a", "b", "c"))
        assert world.read() == ["a", "b", "c"]


def test_a_query_without_rows_after_a_kill_ends_what_was_left() -> None:
    world = World()
    world.append_killed_at_decision(world.group(0, "a", "b", "c"))
    assert world.undecided() == 3
    assert not world.driver().append(world.group(0))
    assert world.undecided() == 0
    assert world.read() == []


def test_a_write_of_nothing_without_an_app_touches_nothing() -> None:
    world = World()
    assert not world.driver().append(world.group(None))
    assert not world.driver().append(None)
    assert [each.key for each in world.store.list("").objects] == ["_topic.json"]


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
    with pytest.raises(TransientStorageError, match="it may take 21600 s"):
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
        with pytest.raises(TransientStorageError, match="it may take 21600 s"):
            driver.append(group)
        assert world.read() == ["a", "b", "c"]
    else:
        assert driver.append(group)
        assert world.read() == ["a", "b", "c", "d"]
    assert world.undecided() == 0


def test_batches_of_a_query_are_committed_by_several_processes_in_turn() -> None:
    world = World()
    # Spark takes the Python worker that has been idle the longest.
    workers = [world.driver() for _ in range(3)]
    for batch in range(12):
        assert workers[batch % 3].append(world.group(batch, f"{batch:02} a", f"{batch:02} b"))
        assert not workers[batch % 2].append(world.group(batch, f"{batch:02} a", f"{batch:02} b"))
    assert world.read() == [f"{batch:02} {row}" for batch in range(12) for row in "ab"]
    assert world.undecided() == 0
