"""Conditional reads that a listing answers."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from opendata_buffer.errors import TransientStorageError
from opendata_buffer.runtime import in_parallel
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.listed import (
    LEAST_FOLDERS,
    MOST_LISTED,
    REREAD_S,
    RETRY_S,
    ListedStore,
    with_looks,
)
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

FOLDERS = [f"p-{number:05}" for number in range(16)]


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__("listed")
        self.read: list[str] = []
        self.lists = 0

    def get(self, key: str, **options: Any) -> Blob | None:
        self.read.append(key)
        return super().get(key, **options)

    def list_versions(self, prefix: str, most: int) -> Mapping[str, str] | None:
        self.lists += 1
        return super().list_versions(prefix, most)


class Reader:
    """Reads the manifest and the index of each folder when they have changed."""

    def __init__(self, inner: MemoryStore, runtime: ManualRuntime) -> None:
        self.store = ListedStore(inner, runtime)
        self._runtime = runtime
        self.known: dict[str, Blob] = {}

    def look(self, *, idle: bool = True, folders: int = len(FOLDERS)) -> set[str]:
        """Return the keys that have changed."""
        changed = set()

        def read(folder: str) -> None:
            for name in ("manifest", "_log.json"):
                key = f"{folder}/{name}"
                known = self.known.get(key)
                found = self.store.get(key, if_changed=known and known.version)
                if found is not None:
                    self.known[key] = found
                    changed.add(key)

        with self.store.look(folders, idle=idle):
            in_parallel(self._runtime, read, FOLDERS)
        return changed


@pytest.fixture
def inner() -> Counting:
    store = Counting()
    for folder in FOLDERS:
        store.put(f"{folder}/manifest", b"1")
        store.put(f"{folder}/_log.json", b"1")
    return store


@pytest.fixture
def reader(inner: Counting, runtime: ManualRuntime) -> Reader:
    """A reader that has looked twice, and knows everything."""
    reader = Reader(inner, runtime)
    reader.look(idle=False)
    assert reader.look() == set()
    inner.read.clear()
    inner.lists = 0
    return reader


def test_a_look_at_unchanged_folders_takes_one_request(inner: Counting, reader: Reader) -> None:
    assert reader.look() == set()
    assert (inner.lists, inner.read) == (1, [])


def test_all_reads_of_a_folder_are_sent_if_anything_in_it_has_changed(
    inner: Counting, reader: Reader
) -> None:
    """A listing may show an old index with a new manifest, so it does not answer for one alone."""
    inner.put(f"{FOLDERS[3]}/manifest", b"2")
    assert reader.look() == {f"{FOLDERS[3]}/manifest"}
    assert sorted(inner.read) == [f"{FOLDERS[3]}/_log.json", f"{FOLDERS[3]}/manifest"]
    inner.put(f"{FOLDERS[5]}/batch", b"uploaded, not yet appended")
    assert reader.look() == set()
    assert {key.partition("/")[0] for key in inner.read[2:]} == {FOLDERS[5]}


def test_a_change_between_the_listing_and_the_read_is_not_missed(
    inner: Counting, runtime: ManualRuntime
) -> None:
    class Changing(Counting):
        changes = 0

        def list_versions(self, prefix: str, most: int) -> Mapping[str, str] | None:
            found = super().list_versions(prefix, most)
            if self.changes:
                self.changes -= 1
                self.put(f"{FOLDERS[0]}/manifest", b"%d" % self.changes)
            return found

    changing = Changing()
    changing._objects = inner._objects
    reader = Reader(changing, runtime)
    reader.look(idle=False)
    reader.look()
    changing.changes = 1
    reader.look()  # The listing is older than the change, so it may say that nothing changed.
    assert reader.look() == {f"{FOLDERS[0]}/manifest"}
    assert reader.known[f"{FOLDERS[0]}/manifest"].data == b"0"


def test_an_object_that_was_not_read_since_the_earlier_listing_is_read(
    inner: Counting, reader: Reader
) -> None:
    key = f"{FOLDERS[2]}/_log.json"
    stale = reader.known[key].version
    inner.put(key, b"2")
    reader.look()
    with reader.store.look(len(FOLDERS), idle=True):
        found = reader.store.get(key, if_changed=stale)
    assert found is not None
    assert found.data == b"2"


def test_another_thread_is_not_answered_by_the_listing(inner: Counting, reader: Reader) -> None:
    """The collector lists first and reads the manifest afterwards (failure F5)."""
    key = f"{FOLDERS[0]}/manifest"
    version = reader.known[key].version
    with reader.store.look(len(FOLDERS), idle=True):
        inner.put(key, b"2")
        found: list[Blob | None] = []
        other = threading.Thread(
            target=lambda: found.append(reader.store.get(key, if_changed=version))
        )
        other.start()
        other.join()
        assert reader.store.get(key, if_changed=version) is None
    assert found[0] is not None
    after = reader.store.get(key, if_changed=version)
    assert after is not None
    assert after.data == b"2"


def test_a_busy_topic_and_one_with_few_partitions_are_not_listed(
    inner: Counting, reader: Reader
) -> None:
    reader.look(idle=False)
    reader.look(folders=LEAST_FOLDERS - 1)
    assert (inner.lists, len(inner.read)) == (0, 4 * len(FOLDERS))


def test_listings_that_lag_behind_are_checked_from_time_to_time(
    inner: Counting, reader: Reader, runtime: ManualRuntime
) -> None:
    old = inner.list_versions("", MOST_LISTED)
    inner.list_versions = lambda prefix, most: old  # type: ignore[method-assign]
    inner.put(f"{FOLDERS[0]}/manifest", b"2")
    assert reader.look() == set()
    runtime.advance(REREAD_S)
    assert reader.look() == {f"{FOLDERS[0]}/manifest"}


def test_a_listing_that_does_not_fit_into_a_page_is_not_tried_again_soon(
    inner: Counting, reader: Reader, runtime: ManualRuntime
) -> None:
    for number in range(MOST_LISTED):
        inner.put(f"{FOLDERS[0]}/{number}.batch", b"")
    for _ in range(3):
        reader.look()
    assert inner.lists == 1
    assert len(inner.read) == 3 * 2 * len(FOLDERS)
    runtime.advance(RETRY_S)
    reader.look()
    assert inner.lists == 2


def test_a_store_that_does_not_list_is_read(inner: Counting, reader: Reader) -> None:
    def fails(prefix: str, most: int) -> Mapping[str, str] | None:
        raise TransientStorageError("503 SlowDown")

    inner.list_versions = fails  # type: ignore[method-assign]
    inner.put(f"{FOLDERS[0]}/manifest", b"2")
    assert reader.look() == {f"{FOLDERS[0]}/manifest"}


def test_only_stores_with_versions_in_their_listings_are_wrapped(
    inner: Counting, runtime: ManualRuntime, tmp_path: Any
) -> None:
    local = LocalStore(tmp_path)
    store, look = with_looks(local, runtime)
    assert store is local
    with look(100, idle=True):
        pass
    assert isinstance(with_looks(inner, runtime)[0], ListedStore)


def test_another_process_gets_the_inner_store(runtime: ManualRuntime) -> None:
    inner = MemoryStore.named("listed-elsewhere")
    assert pickle.loads(pickle.dumps(ListedStore(inner, runtime))) is inner
