"""What became of a write that was answered without a version."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.errors import (
    OpenDataBufferError,
    PermanentStorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.stores.base import (
    Blob,
    looked_up,
)
from opendata_buffer.stores.memory import MemoryStore


def test_what_holds_the_written_bytes_has_their_version() -> None:
    store = MemoryStore()
    store.put("k", b"bytes")
    found = store.get("k")
    assert isinstance(found, Blob)
    assert looked_up(store, "k", b"bytes") == outcomes.Applied(found.version)


@pytest.mark.parametrize("others", [b"other", b"longer than it", None])
def test_other_bytes_or_none_tell_nothing(others: bytes | None) -> None:
    store = MemoryStore()
    if others is not None:
        store.put("k", others)
    outcome = looked_up(store, "k", b"bytes")
    assert isinstance(outcome, outcomes.Unknown)
    assert "'k'" in outcome.reason
    assert "has changed since" in outcome.reason


@pytest.mark.parametrize("kind", [PermanentStorageError, TransientStorageError, UnsafeStore])
def test_a_look_that_fails_tells_nothing_and_says_why(kind: type[OpenDataBufferError]) -> None:
    class Failing(MemoryStore):
        def get(self, *_: Any, **__: Any) -> Blob:
            raise kind("403 denied")

    outcome = looked_up(Failing(), "k", b"bytes")
    assert isinstance(outcome, outcomes.Unknown)
    assert "403 denied" in outcome.reason
