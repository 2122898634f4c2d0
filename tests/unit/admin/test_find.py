"""Which queues and topics there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.admin import find as find_module
from opendata_buffer.admin.find import find, find_folders
from opendata_buffer.config import ConsumerConfig, ProducerConfig, QueueConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Listing
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic

RUNTIME = SystemRuntime()


def produce(store: str, batches: int, **settings: str) -> None:
    with Producer(ProducerConfig(store=store, **settings)) as producer:
        for n in range(batches):
            producer.produce([b"%d" % n])
            producer.flush()


def test_each_queue_and_topic_is_found_and_named_as_commands_name_it(tmp_path: Path) -> None:
    root = str(tmp_path)
    produce(f"{root}/orders", 3)
    produce(f"{root}/a/b", 1, data_path_prefix="x/y")
    produce(f"{root}/c", 1, data_path_prefix="data", manifest_path="elsewhere/m")
    topic = Topic.create(f"{root}/topic", 4)
    produce(f"{root}/topic", 2, data_path_prefix=topic.description.names[2])
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest").write_bytes(b"not ours")
    found = find(open_store(root), QueueConfig(store=root), RUNTIME)
    base = f"file://{root}"
    assert [(each.kind, each.words, each.batches) for each in found] == [
        ("topic", [f"{base}/topic"], 2),
        ("queue", [f"{base}/a/b", "--data-path-prefix", "x/y"], 1),
        (
            "queue",
            [f"{base}/c", "--data-path-prefix", "data", "--manifest-path", "elsewhere/m"],
            1,
        ),
        ("queue", [f"{base}/orders"], 3),
    ]
    assert found[0].partitions == 4
    for each in found[1:]:
        # What is printed opens the queue.
        prefix, path = each.data_path_prefix, each.manifest_path
        assert prefix is not None
        assert path is not None
        own = ConsumerConfig(store=each.store, data_path_prefix=prefix, manifest_path=path)
        with Consumer(own) as consumer:
            assert consumer.next_batch() is not None


def test_an_emptied_queue_is_still_named_by_its_store(tmp_path: Path) -> None:
    url = f"{tmp_path}/deep/store"
    produce(url, 1, data_path_prefix="p/q")
    with Consumer(ConsumerConfig(store=url, data_path_prefix="p/q")) as consumer:
        assert consumer.next_batch() is not None
        consumer.ack_through(0)
    (found,) = find(open_store(str(tmp_path)), QueueConfig(store=str(tmp_path)), RUNTIME)
    assert (found.store, found.data_path_prefix, found.batches) == (f"file://{url}", "p/q", 0)


def test_what_cannot_be_read_is_in_the_list_with_its_error() -> None:
    store = MemoryStore()
    produce_into = Producer(ProducerConfig(store="memory://x"), store=store)
    with produce_into as producer:
        producer.produce([b"a"])
    store.put("ingest/manifest", b"damage")
    store.put("t/_topic.json", b"damage")
    store.put("lost/_owner.json", b'{"version": 1, "manifest": "manifest", "id": "x"}')
    store.put("vast/_owner.json", bytes(2_000_000))
    found = find(store, QueueConfig(store="memory://x"), RUNTIME)
    assert [(each.kind, each.error is not None, each.batches) for each in found] == [
        ("topic", True, None), *[("queue", True, None)] * 3,
    ]  # fmt: skip
    assert found[2].error == "its manifest is gone"
    assert "owner marker is not readable: object 'vast/_owner.json' has" in (found[3].error or "")


def test_a_queue_that_may_not_be_read_does_not_hide_the_others() -> None:
    class Guarded(MemoryStore):
        def get(self, key: str, **options: Any) -> Any:
            if key.startswith(("secret/", "closed/")):
                raise PermanentStorageError(f"403: {key}")
            return super().get(key, **options)

    store = Guarded()
    with Producer(ProducerConfig(store="memory://x"), store=store) as producer:
        producer.produce([b"a"])
    store.put("secret/manifest", b"")
    store.put("closed/_topic.json", b"")
    found = find(store, QueueConfig(store="memory://x"), RUNTIME)
    assert [(each.kind, each.batches, each.error) for each in found] == [
        ("topic", None, "403: closed/_topic.json"),
        ("queue", 1, None),
        ("queue", None, "403: secret/_owner.json"),
    ]


def test_a_queue_of_a_client_without_markers_is_found() -> None:
    store = MemoryStore()
    store.put("go/in/x.batch", encode_batch([b"a"]))
    store.put("go/in/manifest", Manifest.empty().append([NewEntry("in/x.batch")]).raw)
    (found,) = find(store, QueueConfig(store="memory://x"), RUNTIME)
    assert (found.store.endswith("/go"), found.data_path_prefix) == (True, "in")


class Counting(MemoryStore):
    """Counts requests of the listing."""

    pages = 0

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        self.pages += 1
        return super().list(prefix, start_after=start_after, limit=limit)


@pytest.mark.parametrize("root", ["", "deep/"])
def test_a_large_queue_or_topic_is_passed_over_and_what_lies_behind_is_found(
    monkeypatch: pytest.MonkeyPatch, root: str
) -> None:
    monkeypatch.setattr(find_module, "PAGE", 10)
    store = Counting()
    for n in range(500):
        store.put(f"{root}a/01{n:04d}.batch", b"")
        store.put(f"{root}t/p-00000/01{n:04d}.batch", b"")
    store.put(f"{root}a/_owner.json", b"")
    store.put(f"{root}a0/_owner.json", b"")
    store.put(f"{root}t/_topic.json", b"")
    store.put(f"{root}t/p-00000/_owner.json", b"")
    store.put(f"{root}z/_owner.json", b"")
    assert find_folders(store) == ([f"{root}t"], [f"{root}a", f"{root}a0", f"{root}z"])
    assert store.pages <= 5


def test_a_topic_at_the_root_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_module, "PAGE", 10)
    store = Counting()
    store.put("_topic.json", b"")
    for n in range(50):
        store.put(f"p-{n:05d}/_owner.json", b"")
    assert find_folders(store) == ([""], [])
    assert store.pages == 1
