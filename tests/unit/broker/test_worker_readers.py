"""Workers of the readers of a log. Workers of one reader share its batches; two readers do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from opendata_buffer.broker.worker import Worker
from opendata_buffer.config import ConsumerConfig, QueueConfig, WorkerConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import reset_reader
from opendata_buffer.queue.reader_positions import position_object
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic
from tests.support.logs import become_log, open_view
from tests.unit.broker.local import CONFIG, RUNTIME, eventually, hosting

Make = Callable[[str], Worker]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """Return the store of a log of 60 batches in small segments."""
    monkeypatch.setattr(Log, "most_entries", 16)
    monkeypatch.setattr(Log, "left_entries", 4)
    store = MemoryStore()
    become_log(store, CONFIG, RUNTIME)
    claim = claim_for_writing(store, CONFIG, runtime=RUNTIME)
    queue = Queue(store, CONFIG, runtime=RUNTIME, role="test", claim=claim)
    for number in range(60):
        location = f"ingest/{RUNTIME.ulid()}.batch"
        store.put(location, encode_batch([b"%d" % number]))
        queue.append([NewEntry(location)])
    return store


@pytest.fixture
def make(store: MemoryStore) -> Iterator[Make]:
    with ExitStack() as opened:

        def made(reader: str) -> Worker:
            worker = Worker("memory://unused", store=store, broker="auto", reader=reader)
            return opened.enter_context(worker)

        yield made


def at(store: MemoryStore, reader: str) -> int:
    found = position_object(Log(store, CONFIG, RUNTIME), reader).read()
    return found.next  # type: ignore[union-attr]


def work(worker: Worker, count: int) -> list[int]:
    """Claim and finish this number of batches, and return their sequences."""
    found: list[int] = []
    while len(found) < count:
        batches = worker.claim(min(8, count - len(found)), timeout=150)
        assert batches
        for each in batches:
            found += [int(bytes(value)) for value in each.entries]
            each.done()
    return found


def test_workers_of_two_readers_share_nothing(store: MemoryStore, make: Make) -> None:
    before = Manifest.parse(read_bytes(store, "ingest/manifest"))
    with hosting(store):
        first, second, other = make("billing"), make("billing"), make("audit")
        held = first.claim(5, timeout=60)
        assert [each.sequence for each in held] == [0, 1, 2, 3, 4]
        assert sorted(work(second, 55)) == list(range(5, 60))
        assert sorted(work(other, 60)) == list(range(60)), (
            "also the batches that a worker of the other reader holds"
        )
        eventually(lambda: at(store, "audit") == 60)
        assert at(store, "billing") == 0, "the reader waits for its first batch"
        for each in held:
            each.done()
        eventually(lambda: at(store, "billing") == 60)
    manifest = Manifest.parse(read_bytes(store, "ingest/manifest"))
    assert (manifest.epoch, manifest.next_sequence) == (before.epoch, 60), (
        "the batch was not claimed before"
    )


def test_workers_get_batches_again_after_their_reader_was_reset(
    store: MemoryStore, make: Make
) -> None:
    with hosting(store):
        assert len(work(make("billing"), 60)) == 60
    manifest = Manifest.parse(read_bytes(store, "ingest/manifest"))
    view = open_view(store, CONFIG, RUNTIME, manifest)
    assert view is not None
    reset_reader(view, "billing", 10)
    with hosting(store):
        assert sorted(work(make("billing"), 50)) == list(range(10, 60))


def test_workers_of_a_log_need_a_reader_and_workers_of_a_queue_have_none(make: Make) -> None:
    with pytest.raises(InvalidInput, match=r"is a log with named readers\. Add reader=NAME"):
        make("")
    with pytest.raises(InvalidInput, match="reader is 'a/b': use 1 to 100 letters"):
        make("a/b")
    queue, config = MemoryStore(), QueueConfig(store="memory://unused")
    Queue(queue, config, runtime=RUNTIME, role="test").append([NewEntry("ingest/a.batch")])
    with pytest.raises(InvalidInput, match="is not a log, and has no named readers"):
        Worker("memory://unused", store=queue, broker="auto", reader="billing")


def test_f47_workers_of_a_reader_miss_nothing_in_an_added_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, settings = MemoryStore(), QueueConfig(store="memory://unused")
    topic = Topic.create(settings, 1, store=store, runtime=RUNTIME)
    (first,) = topic.description.names

    def config(partition: str) -> ConsumerConfig:
        return ConsumerConfig(store="memory://unused", data_path_prefix=partition)

    def append(partition: str) -> None:
        claim = claim_for_writing(store, config(partition), runtime=RUNTIME)
        location = f"{partition}/{RUNTIME.ulid()}.batch"
        store.put(location, encode_batch([b"0"]))
        queue = Queue(store, config(partition), runtime=RUNTIME, role="test", claim=claim)
        queue.append([NewEntry(location)])

    def work_on(partition: str, reader: str) -> list[int]:
        settings = WorkerConfig(
            store="memory://unused", data_path_prefix=partition, broker="host", reader=reader
        )
        position = position_object(Log(store, config(partition), RUNTIME), reader)
        with Worker(settings, store=store) as worker:
            found = work(worker, 1)
            eventually(lambda: position.read().next == 1)  # type: ignore[union-attr]
        return found

    become_log(store, config(first), RUNTIME)
    append(first)
    for reader in ("billing", "search"):
        assert work_on(first, reader) == [0]
    (added,) = {*topic.expand(2).names} - {first}
    append(added)
    assert work_on(added, "search") == [0]
    GarbageCollector(store, config(added), runtime=RUNTIME).run_once()
    assert work_on(added, "billing") == [0]
