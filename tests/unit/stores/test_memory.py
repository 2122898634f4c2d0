"""What is particular about the store in memory; the rest is in the contract suite."""

from __future__ import annotations

import pickle

import pytest

from opendata_buffer import outcomes
from opendata_buffer.errors import InvalidInput
from opendata_buffer.stores import memory
from opendata_buffer.stores.base import ABSENT, Blob, read_bytes
from opendata_buffer.stores.memory import MemoryStore


def test_a_name_is_one_store_for_the_whole_process() -> None:
    assert MemoryStore.named("one") is MemoryStore.named("one")
    assert MemoryStore.named("one") is not MemoryStore.named("two")
    assert MemoryStore.named("one").url == "memory://one"


def test_the_clock_stamps_objects_and_listings() -> None:
    now = [1_000]
    store = MemoryStore(now_ms=lambda: now[0])
    store.put("a", b"")
    now[0] = 61_000
    listing = store.list("")
    assert (listing.now_ms, listing.objects[0].last_modified_ms) == (61_000, 1_000)
    blob = store.get("a")
    assert isinstance(blob, Blob)
    assert blob.last_modified_ms == 1_000


def test_versions_are_not_shared_between_stores() -> None:
    results = [MemoryStore().put_if("m", data, ABSENT) for data in (b"A", b"B")]
    versions = {outcome.value for outcome in results if isinstance(outcome, outcomes.Applied)}
    assert len(versions) == 2


def test_bytes_are_copied_in() -> None:
    store = MemoryStore()
    data = bytearray(b"abc")
    store.put("a", memoryview(data))
    data[0] = 0
    assert read_bytes(store, "a") == b"abc"


def test_a_named_store_pickles_to_itself() -> None:
    store = MemoryStore.named("pickled")
    assert pickle.loads(pickle.dumps(store)) is store


def test_a_nameless_store_does_not_pickle_and_says_why() -> None:
    with pytest.raises(InvalidInput, match=r"memory of one process.*directory or an s3:// URL"):
        pickle.dumps(MemoryStore())


def test_another_process_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(MemoryStore.named("elsewhere"))
    monkeypatch.delitem(memory._registry, "elsewhere")
    with pytest.raises(InvalidInput, match="'memory://elsewhere' was made in another process"):
        pickle.loads(pickled)
