"""The store in memory, apart from the contract of all stores."""

from __future__ import annotations

import pickle

import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.stores import memory
from opendata_buffer.stores.memory import MemoryStore


def test_one_name_is_one_store_in_the_whole_process() -> None:
    assert MemoryStore.named("one") is MemoryStore.named("one")
    assert MemoryStore.named("one") is not MemoryStore.named("two")
    assert MemoryStore.named("one").url == "memory://one"


def test_a_named_store_pickles_to_itself() -> None:
    store = MemoryStore.named("pickled")
    assert pickle.loads(pickle.dumps(store)) is store


def test_the_error_about_pickling_a_nameless_store_has_the_reason() -> None:
    with pytest.raises(InvalidInput, match=r"memory of one process.*directory or an s3:// URL"):
        pickle.dumps(MemoryStore())


def test_the_error_in_another_process_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(MemoryStore.named("elsewhere"))
    monkeypatch.delitem(memory._registry, "elsewhere")
    with pytest.raises(InvalidInput, match="'memory://elsewhere' was made in another process"):
        pickle.loads(pickled)
