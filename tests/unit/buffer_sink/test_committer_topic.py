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
from opendata_buffer.topic.topic import Topic, partition_config
from opendata_buffer.transactions import record_key

CONFIG = QueueConfig(store="memory://x")
OPTIONS = SinkOptions(queue=CONFIG)


NAMES = ("p-00000-04pn", "p-00001-05mv", "p-00002-0bvb")
MANIFESTS = {f"{name}/manifest" for name in NAMES}


class Store(MemoryStore):
    """Fails conditional writes of chosen keys, runs hooks before them, and records reads."""

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
            return outcomes.LostRace()
        self.before.pop(key, lambda: None)()
        return super().put_if(key, data, condition)


class TargetTopic:
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
        """Upload one batch per value, round robin over the partitions, as two tasks."""
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
        config = partition_config(name, CONFIG)
        queue = Queue(self.store, config, runtime=self.runtime, role="test")
        return queue.read() or Manifest.empty()

    def read(self) -> list[str]:
        """Return the records that a read-committed reader delivers, sorted."""
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
        # The first write of the record claims it, and the second one decides.
        self.store.before[key] = lambda: self.store.before.update({key: die})
        with pytest.raises(KeyboardInterrupt):
            self.driver().append(group)


def test_a_group_is_visible_in_all_partitions() -> None:
    target = TargetTopic()
    driver = target.driver()
    assert driver.append(target.group(0, "a", "b", "c", "d"))
    assert driver.append(target.group(1, "e"))
    assert target.read() == ["a", "b", "c", "d", "e"]
    assert target.undecided() == 0
    assert [target.manifest(name).next_sequence for name in target.topic.read().names] == [5, 2, 2]


@pytest.mark.parametrize(
    ("batch", "advice"),
    [(0, "Start the query again: that completes it"), (None, "Run 'opendata-buffer abort ")],
)
def test_the_error_of_a_commit_that_cannot_be_applied_names_the_command_that_completes_it(
    batch: int | None, advice: str
) -> None:
    target = TargetTopic()
    group = target.group(batch, "a", "b", "c")
    assert group.topic is not None
    key = record_key("_topic", group.topic.transaction(group.transaction).app)

    def fail() -> None:
        target.store.silent = set(MANIFESTS)

    target.store.before[key] = lambda: target.store.before.update({key: fail})
    with pytest.raises(OpenDataBufferError) as raised:
        target.driver().append(group)
    assert "is committed, and not visible" in "".join(raised.value.__notes__)
    assert advice in "".join(raised.value.__notes__)
    target.store.silent = set()
    if batch is not None:
        assert not target.driver().append(target.group(batch, "a", "b", "c"))
        assert target.read() == ["a", "b", "c"]


def test_a_batch_without_rows_after_a_kill_ends_the_open_transaction() -> None:
    target = TargetTopic()
    target.append_killed_at_decision(target.group(0, "a", "b", "c"))
    assert target.undecided() == 3
    assert not target.driver().append(target.group(0))
    assert target.undecided() == 0
    assert target.read() == []


def test_an_empty_write_without_an_app_sends_no_request() -> None:
    target = TargetTopic()
    assert not target.driver().append(target.group(None))
    assert not target.driver().append(None)
    assert [each.key for each in target.store.list("").objects] == ["_topic.json"]


def test_a_partition_that_cannot_be_written_leaves_nothing_visible() -> None:
    target = TargetTopic()
    driver = target.driver()
    assert driver.append(target.group(0, "a", "b", "c"))
    target.store.silent = {"p-00001-05mv/manifest"}
    with pytest.raises(TransientStorageError, match="Nothing of it is visible"):
        driver.append(target.group(1, "d", "e", "f"))
    assert target.read() == ["a", "b", "c"]
    assert target.undecided() == 0, "it is rolled back in the other partitions"
    target.store.silent = set()
    assert driver.append(target.group(1, "d", "e", "f"))
    assert target.read() == ["a", "b", "c", "d", "e", "f"]


def test_batches_for_a_partition_that_was_removed_meanwhile_go_to_the_others() -> None:
    target = TargetTopic()
    driver, group = target.driver(), target.group(0, "a", "b", "c")
    target.topic.drain("p-00001-05mv")
    target.runtime.advance(3_600)
    assert target.topic.remove_drained() == ["p-00001-05mv"]
    with pytest.raises(Drained) as refused:
        driver.append(group)
    assert "Start the query again" in "".join(refused.value.__notes__)
    assert target.undecided() == 0
    assert driver.append(target.group(0, "a", "b", "c")), "the batch goes to the other partitions"
    assert target.read() == ["a", "b", "c"]


def test_a_partition_that_started_to_drain_meanwhile_still_accepts_planned_batches() -> None:
    target = TargetTopic()
    driver, group = target.driver(), target.group(0, "a", "b", "c")
    target.topic.drain("p-00001-05mv")
    assert driver.append(group)
    assert target.topic.remove_drained() == []
    assert target.read() == ["a", "b", "c"]


def test_a_write_without_an_app_leaves_no_record() -> None:
    target = TargetTopic()
    assert target.driver().append(target.group(None, "a", "b", "c", query=None))
    assert target.driver().append(target.group(None, "a", query=None)), (
        "it cannot be distinguished from a new write"
    )
    assert target.read() == ["a", "a", "b", "c"]
    assert not [each.key for each in target.store.list("_topic/").objects]


def test_f5_uploads_that_may_have_been_collected_are_refused_before_any_append() -> None:
    target = TargetTopic()
    group = target.group(0, "a", "b", "c", ahead_s=0)
    target.runtime.advance(500)
    with pytest.raises(TransientStorageError, match="it may take 21600 s"):
        target.driver().append(group)
    assert target.undecided() == 0
    assert target.read() == []


@pytest.mark.parametrize("gone", [False, True])
def test_f5_a_part_that_landed_late_counts_only_if_its_objects_exist(gone: bool) -> None:
    target = TargetTopic()
    driver = target.driver()
    assert driver.append(target.group(0, "a", "b", "c"))
    group = target.group(1, "d", ahead_s=0)

    def freeze() -> None:
        target.runtime.advance(3_600)
        if gone:
            target.store.delete_many([group.uploads[0].location])

    target.store.before["p-00000-04pn/manifest"] = freeze
    if gone:
        with pytest.raises(TransientStorageError, match="it may take 21600 s"):
            driver.append(group)
        assert target.read() == ["a", "b", "c"]
    else:
        assert driver.append(group)
        assert target.read() == ["a", "b", "c", "d"]
    assert target.undecided() == 0


def test_batches_of_a_query_are_committed_by_several_processes_in_turn() -> None:
    target = TargetTopic()
    # Spark takes the Python worker that has been idle the longest.
    workers = [target.driver() for _ in range(3)]
    for batch in range(12):
        assert workers[batch % 3].append(target.group(batch, f"{batch:02} a", f"{batch:02} b"))
        assert not workers[batch % 2].append(target.group(batch, f"{batch:02} a", f"{batch:02} b"))
    assert target.read() == [f"{batch:02} {row}" for batch in range(12) for row in "ab"]
    assert target.undecided() == 0
