"""Small JSON objects, the same for every store; ranges and limits are in the contract suite."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import CorruptData, ObjectNotFound
from opendata_buffer.formats.sidecar import Sidecar
from opendata_buffer.stores.base import read_sidecar
from opendata_buffer.stores.memory import MemoryStore

NOTE = Sidecar("the note", "Delete it.", max_bytes=30)


def decode(data: bytes) -> int:
    return NOTE.decode(data).number("a")


def test_an_object_is_read_as_its_value() -> None:
    store = MemoryStore()
    store.put("in/_note.json", NOTE.encode({"a": 7}))
    assert read_sidecar(store, "in/_note.json", NOTE, decode) == 7


def test_a_missing_one_is_not_found() -> None:
    with pytest.raises(ObjectNotFound):
        read_sidecar(MemoryStore(), "in/_note.json", NOTE, decode)


@pytest.mark.parametrize("data", [b"{}", b"x" * 31])
def test_one_that_cannot_be_read_is_named_by_its_key(data: bytes) -> None:
    store = MemoryStore()
    store.put("in/_note.json", data)
    with pytest.raises(CorruptData, match=r"'in/_note\.json': the note is not .* Delete it\."):
        read_sidecar(store, "in/_note.json", NOTE, decode)
