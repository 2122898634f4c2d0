"""The collector's cursor: saved, shared, and never a reason to fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.gc import GcCursor
from opendata_buffer.stores.base import Absent, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

CONFIG = QueueConfig(store="memory://x", data_path_prefix="p")
KEY = "p/_gc.json"


def saved(store: Any) -> GcCursor:
    return GcCursor(store, CONFIG, ManualRuntime())


def test_the_last_to_save_wins() -> None:
    store = MemoryStore()
    one, two = saved(store), saved(store)
    assert one.load() == ""
    one.save("p/b")
    assert two.load() == "p/b"
    two.save("p/c")
    one.save("p/d")
    assert saved(store).load() == "p/d"
    assert json.loads(store.get(KEY).data) == {"version": 1, "after": "p/d"}


def test_a_small_queue_never_writes_one() -> None:
    store = MemoryStore()
    cursor = saved(store)
    cursor.load()
    cursor.save("")
    assert store.list("").objects == ()


@pytest.mark.parametrize("after", ["q/z", "p/\udc80", "p/" + "k" * 1024])
def test_a_cursor_that_is_no_key_of_the_prefix_is_the_beginning(after: str) -> None:
    store = MemoryStore()
    store.put(KEY, json.dumps({"version": 1, "after": after}).encode())
    assert saved(store).load() == ""


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"\xff", b'{"version": 2, "after": "p/b"}', b"[" * 50_000, b"x" * 70_000]
)
def test_an_unreadable_cursor_is_the_beginning_and_the_next_one_is_saved(
    raw: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.put(KEY, raw)
    cursor = saved(store)
    assert cursor.load() == ""
    cursor.save("p/a")
    assert saved(store).load() == "p/a"
    said = (
        "first object: 'p/_gc.json' in memory://: the garbage collector's cursor is not readable: "
    )
    assert said in caplog.text


def test_a_cursor_that_is_deleted_under_a_collector_is_saved_again() -> None:
    store = MemoryStore()
    cursor = saved(store)
    cursor.save("p/a")
    store.delete_many([KEY])
    cursor.save("p/b")  # finds it gone
    cursor.save("p/c")
    assert saved(store).load() == "p/c"
    store.delete_many([KEY])
    assert cursor.load() == ""
    cursor.save("p/c")
    assert saved(store).load() == "p/c"


def test_a_cursor_that_cannot_be_saved_ends_no_cycle(caplog: pytest.LogCaptureFixture) -> None:
    class ReadOnly(MemoryStore):
        def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
            raise PermanentStorageError("403")

    saved(ReadOnly()).save("p/a")
    assert "the collector's cursor was not saved: 403" in caplog.text
