"""Where a new queue may be, next to other queues and topics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from opendata_buffer import Consumer, Producer, Topic
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.queue.neighbours import TOPIC_KEY
from opendata_buffer.queue.ownership import (
    claim_for_writing,
)
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.stores.memory import MemoryStore


def claim(store: MemoryStore, prefix: str) -> None:
    claim_for_writing(store, QueueConfig(store="memory://unused", data_path_prefix=prefix))


@pytest.mark.parametrize(
    ("there", "prefix", "says"),
    [
        ("lake/orders/_owner.json", "lake/orders/eu", "lies inside .* 'lake/orders'"),
        ("lake/orders/_owner.json", "lake/orders/eu/west", "lies inside .* 'lake/orders'"),
        ("lake/orders/eu/_owner.json", "lake", "'lake' lies around .* 'lake/orders/eu'"),
        (f"lake/orders/{TOPIC_KEY}", "lake/orders", "a topic at 'lake/orders'"),
        (f"lake/orders/{TOPIC_KEY}", "lake", "'lake' lies around the topic at 'lake/orders'"),
        *(
            (TOPIC_KEY, prefix, rf"topic at the root .* '{prefix}' is not one of its")
            for prefix in ("ingest", "p-0", "p-00000/a", "a/p-00000")
        ),
    ],
)
def test_f7_a_queue_inside_or_around_another_queue_or_topic_is_not_created(
    there: str, prefix: str, says: str
) -> None:
    store = MemoryStore()
    store.put(there, b"{}")
    with pytest.raises(InvalidInput, match=says):
        claim(store, prefix)
    assert [each.key for each in store.list("").objects] == [there]


def test_f7_a_queue_in_the_data_prefix_of_another_one_is_not_created(tmp_path: Path) -> None:
    with Producer(str(tmp_path), broker="off") as producer:
        producer.produce([b"record"]).result()
    inside = f"{tmp_path}/ingest"
    makers: list[Callable[[], object]] = [
        lambda: Producer(inside, broker="off"),
        lambda: Producer(inside, data_path_prefix="other", broker="off"),
        lambda: Consumer(inside, create_if_missing=True),
        lambda: Topic.create(inside, 2),
    ]
    for make in makers:
        with pytest.raises(InvalidInput, match="is the data prefix of a queue") as caught:
            make()
        assert f"Use store='file://{tmp_path}' with data_path_prefix='ingest'." in str(caught.value)
    names = [path.name for path in tmp_path.rglob("*")]
    assert (names.count("_owner.json"), names.count("manifest"), names.count(TOPIC_KEY)) == (
        1,
        1,
        0,
    )
    Producer(str(tmp_path), data_path_prefix="other", broker="off").close()


def test_f7_a_queue_of_another_client_has_no_marker_and_is_found_by_its_manifest(
    tmp_path: Path,
) -> None:
    (tmp_path / "ingest").mkdir()
    (tmp_path / "ingest" / "manifest").write_bytes(Manifest.empty().raw)
    with pytest.raises(InvalidInput, match="is the data prefix of a queue"):
        Producer(tmp_path / "ingest", broker="off")
    # A queue may keep its own manifest at the root of its store.
    Producer(tmp_path / "ingest", data_path_prefix="x", manifest_path="manifest").close()


def test_queues_and_partitions_next_to_each_other_are_created_and_reopened() -> None:
    store = MemoryStore()
    for folder in ("p-0", "p-00000"):  # these names are not partitions of a topic
        store.put(f"{folder}/x", b"")
    store.put(f"lake/{TOPIC_KEY}", b"{}")
    prefixes = ("a", "ab", "b/a", "b/ab", "lake/p-00000", "lake/p-00001")
    markers = []
    for _ in range(2):
        for prefix in prefixes:
            claim(store, prefix)
        markers.append([read_bytes(store, owner_key(prefix)) for prefix in prefixes])
    assert len(set(markers[0])) == len(prefixes)
    assert markers[1] == markers[0]


def test_a_shortened_partition_name_does_not_create_a_queue_next_to_the_partition() -> None:
    store = MemoryStore()
    store.put(TOPIC_KEY, b'{"partitions": [{"name": "p-00000-04pn"}, {"name": "p-00001"}]}')
    claim(store, "p-00000-04pn")
    claim(store, "p-00001")
    for prefix in ("p-00000", "p-00002", "p-00000-04pn/a"):
        with pytest.raises(InvalidInput, match=rf"'{prefix}' is not one of its partitions"):
            claim(store, prefix)


@pytest.mark.parametrize("root", ["", "lake/"])
def test_f4_no_queue_is_created_next_to_partitions_whose_topic_description_is_gone(
    root: str,
) -> None:
    store = MemoryStore()
    store.put(f"{root}{TOPIC_KEY}", b'{"partitions": [{"name": "p-00000-04pn"}]}')
    claim(store, f"{root}p-00000-04pn")
    store.delete_many([f"{root}{TOPIC_KEY}"])
    before = {each.key for each in store.list("").objects}
    with pytest.raises(InvalidInput, match=r"'p-00000-04pn' of a topic at .*'_topic.json' is gone"):
        claim(store, f"{root}ingest")
    assert {each.key for each in store.list("").objects} == before
    claim(store, f"{root}p-00001-05mv")  # this one is a partition of the topic


def test_a_process_that_may_read_only_its_prefix_can_create_a_queue() -> None:
    class Walled(MemoryStore):
        def get(self, key: str, **options: object) -> object:  # type: ignore[override]
            if not key.startswith("ingest/"):
                raise PermanentStorageError("403")
            return super().get(key, **options)  # type: ignore[arg-type]

        def list(self, prefix: str, **options: object) -> object:  # type: ignore[override]
            if not prefix.startswith("ingest/"):
                raise PermanentStorageError("403")
            return super().list(prefix, **options)  # type: ignore[arg-type]

    store = Walled()
    claim(store, "ingest")
    assert store.get("ingest/_owner.json")


def test_opening_an_existing_queue_lists_no_others() -> None:
    class NoListing(MemoryStore):
        def list(self, prefix: str, **options: object) -> object:  # type: ignore[override]
            raise AssertionError("listed")

    store = MemoryStore()
    claim(store, "a/b")
    again = NoListing.__new__(NoListing)
    again.__dict__ = store.__dict__
    before = read_bytes(store, owner_key("a/b"))
    claim(again, "a/b")
    assert read_bytes(store, owner_key("a/b")) == before
    with pytest.raises(AssertionError, match="listed"):
        claim(again, "new")
