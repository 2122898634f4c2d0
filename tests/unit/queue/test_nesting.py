"""Queues inside each other's data prefix."""

from __future__ import annotations

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.queue.nesting import refuse_nesting
from opendata_buffer.queue.owner import MARKER_NAME, claim_for_use
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
