"""Queues inside each other's data prefix."""

from __future__ import annotations

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.queue.ownership import MARKER_NAME, TOPIC_KEY, claim_for_use, refuse_nesting
from opendata_buffer.stores.memory import MemoryStore


def claim(store: MemoryStore, prefix: str) -> None:
    claim_for_use(store, QueueConfig(store="memory://unused", data_path_prefix=prefix))


def test_f7_a_queue_inside_another_ones_prefix_is_not_made() -> None:
    store = MemoryStore()
    claim(store, "lake/orders")
    before = {each.key for each in store.list("").objects}
    for inner in ("lake/orders/eu", "lake/orders/eu/west"):
        with pytest.raises(InvalidInput, match=rf"'{inner}' lies inside .* 'lake/orders'"):
            claim(store, inner)
    assert {each.key for each in store.list("").objects} == before


def test_f7_a_queue_around_another_ones_prefix_is_not_made() -> None:
    store = MemoryStore()
    claim(store, "lake/orders/eu")
    with pytest.raises(InvalidInput, match=r"'lake' lies around .* 'lake/orders/eu'"):
        claim(store, "lake")


def test_queues_beside_each_other_are_made_and_used_again() -> None:
    store = MemoryStore()
    for _ in range(2):
        for prefix in ("a", "ab", "b/a", "b/ab"):
            claim(store, prefix)


def test_partitions_of_a_topic_are_queues_also_as_seen_from_further_up() -> None:
    for root in ("", "lake/"):
        store = MemoryStore()
        store.put(f"{root}{TOPIC_KEY}", b"{}")
        for prefix in ("p-00000", "p-00001"):
            claim(store, f"{root}{prefix}")
        assert store.get(f"{root}p-00001/_owner.json")


@pytest.mark.parametrize("prefix", ["ingest", "p-0", "p-00000/a", "a/p-00000"])
def test_a_queue_beside_the_partitions_of_a_topic_is_not_made(prefix: str) -> None:
    store = MemoryStore()
    store.put(TOPIC_KEY, b"{}")
    with pytest.raises(InvalidInput, match=rf"topic at the root .* '{prefix}' is none of its"):
        claim(store, prefix)


def test_an_abbreviation_of_a_partition_s_name_makes_no_queue_beside_it() -> None:
    store = MemoryStore()
    store.put(TOPIC_KEY, b'{"partitions": [{"name": "p-00000-04pn"}, {"name": "p-00001"}]}')
    claim(store, "p-00000-04pn")
    claim(store, "p-00001")
    for prefix in ("p-00000", "p-00002", "p-00000-04pn/a"):
        with pytest.raises(InvalidInput, match=rf"'{prefix}' is none of its partitions"):
            claim(store, prefix)


@pytest.mark.parametrize("root", ["", "lake/"])
def test_f4_beside_the_partitions_of_a_topic_whose_description_is_gone_no_queue_is_made(
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
    claim(store, f"{root}p-00001-05mv")  # that one belongs there


def test_a_folder_that_only_begins_like_a_partition_keeps_no_queue_away() -> None:
    store = MemoryStore()
    store.put("p-0/x", b"")
    store.put("p-00000/x", b"")
    claim(store, "ingest")


def test_a_queue_at_or_around_a_topic_is_not_made() -> None:
    store = MemoryStore()
    store.put(f"lake/orders/{TOPIC_KEY}", b"{}")
    with pytest.raises(InvalidInput, match="a topic at 'lake/orders'"):
        claim(store, "lake/orders")
    with pytest.raises(InvalidInput, match="'lake' lies around the topic at 'lake/orders'"):
        claim(store, "lake")


def test_who_may_not_read_outside_of_the_prefix_still_gets_a_queue() -> None:
    class Walled(MemoryStore):
        def get(self, key: str, **options: object) -> object:  # type: ignore[override]
            if not key.startswith("ingest/"):
                raise PermanentStorageError("403")
            return super().get(key, **options)  # type: ignore[arg-type]

    store = Walled()
    claim(store, "ingest")
    assert store.get("ingest/_owner.json")


def test_who_uses_a_queue_that_is_there_looks_for_no_others() -> None:
    class NoListing(MemoryStore):
        def list(self, prefix: str, **options: object) -> object:  # type: ignore[override]
            raise AssertionError("listed")

    store = MemoryStore()
    claim(store, "a/b")
    again = NoListing.__new__(NoListing)
    again.__dict__ = store.__dict__
    claim(again, "a/b")


def test_one_page_below_is_looked_at() -> None:
    store = MemoryStore()
    for number in range(3):
        store.put(f"a/{number}", b"")
    refuse_nesting(store, "a", MARKER_NAME)
    store.put("a/z/_owner.json", b"{}")
    with pytest.raises(InvalidInput, match="Use a prefix beside 'a/z'"):
        refuse_nesting(store, "a", MARKER_NAME)
