"""The contract of stores (``opendata_buffer.stores``), checked for every store."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import CorruptData, InvalidInput, ObjectNotFound
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob, Store
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.testing.faults import FaultyStore
from tests.contract.servers import REAL, store_at
from tests.races import ROUNDS, increment, race
from tests.support.s3_server import S3Server

BACKENDS = ["memory", "faulty", "local", "moto", "s3-server", *REAL]
SHARED = ["local", "moto", "s3-server", *REAL]  # other processes can reach them

WEIRD_KEYS = [
    "plain",
    "with space/and + plus",
    "tenant%231/100%",
    "tenant#1/a?b=c&d",
    "star*/[x]{y}~|z",
    "back\\slash^caret",
    "<lt>/\"quote\"/'apos'",
    "äöü/日本/😀",
    "..dots/...",
    "a=b/app=x/batch=1",
    "ends.",
    "-",
    "%2F/%2e%2e",
]


@dataclass(frozen=True)
class Backend:
    """A store and its peculiarities."""

    store: Store
    content_versions: bool = False
    """S3's versions are hashes of the content: equal bytes, equal version (failure F11)."""
    has_backslashes: bool = True
    """Azurite turns backslashes into slashes, but the real service does not."""


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    with S3Server(page_size=7) as server:
        yield server


@pytest.fixture(scope="module")
def real_backends(real_server: Callable[[str], str]) -> Callable[[str, str], Backend]:
    """Return a function that makes a backend on a real server, or skips if it is missing."""

    def make(name: str, root: str) -> Backend:
        return Backend(
            store_at(name, real_server(name), f"root%20 of/{root}"),
            content_versions=name == "versitygw",
            has_backslashes=name != "azurite",
        )

    return make


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    match request.param:
        case "memory":
            yield Backend(MemoryStore())
        case "faulty":
            yield Backend(FaultyStore(MemoryStore(), SystemRuntime()))
        case "local":
            yield Backend(LocalStore(tmp_path / "not" / "yet"))
        case "moto":
            bucket = request.getfixturevalue("moto_bucket")
            options = StoreOptions(endpoint_url=request.getfixturevalue("moto_endpoint"))
            yield Backend(S3Store(bucket, options=options), content_versions=True)
        case "versitygw" | "fake-gcs-server" | "azurite":
            yield request.getfixturevalue("real_backends")(request.param, tmp_path.name)
        case _:
            server: S3Server = request.getfixturevalue("shared_server")
            options = StoreOptions(endpoint_url=server.endpoint)
            root = f"root%20 of/{tmp_path.name}"
            yield Backend(S3Store(server.bucket, root, options), content_versions=True)


@pytest.fixture
def store(backend: Backend) -> Store:
    return backend.store


def read(store: Store, key: str) -> Blob:
    found = store.get(key)
    assert isinstance(found, Blob)
    return found


def create(store: Store, key: str, data: bytes) -> str:
    outcome = store.put_if(key, data, None)
    assert isinstance(outcome, outcomes.Applied)
    return outcome.value


# ---- reading


def test_a_missing_object_is_not_found(store: Store) -> None:
    with pytest.raises(ObjectNotFound, match="'no/such'"):
        store.get("no/such")
    with pytest.raises(ObjectNotFound):
        store.get("no/such", if_changed="x")
    with pytest.raises(ObjectNotFound):
        store.get("no/such", byte_range=(0, 5))


def test_a_put_object_is_read_back(store: Store) -> None:
    store.put("a/b", b"bytes")
    assert read(store, "a/b").data == b"bytes"
    store.put("a/b", memoryview(b"0123456789")[2:5])
    assert read(store, "a/b").data == b"234"


def test_an_empty_object_is_an_object(store: Store) -> None:
    store.put("empty", b"")
    assert read(store, "empty").data == b""
    assert [(info.key, info.size) for info in store.list("").objects] == [("empty", 0)]


def test_a_large_object_comes_back_whole(store: Store) -> None:
    data = random.Random(0).randbytes(3_000_000)
    store.put("large", data)
    assert read(store, "large").data == data


def test_a_second_put_replaces_the_object(store: Store) -> None:
    store.put("a", b"one, longer")
    before = read(store, "a").version
    store.put("a", b"two")
    assert read(store, "a").data == b"two"
    assert read(store, "a").version != before


def test_a_get_is_not_modified_only_for_the_current_version(store: Store) -> None:
    first = create(store, "m", b"1")
    assert store.get("m", if_changed=first) is None
    second = store.put_if("m", b"2", first)
    assert isinstance(second, outcomes.Applied)
    blob = store.get("m", if_changed=first)
    assert isinstance(blob, Blob)
    assert (blob.data, blob.version) == (b"2", second.value)
    assert store.get("m", if_changed=second.value) is None


@pytest.mark.parametrize(
    ("byte_range", "expected"),
    [
        ((0, 1), b"0"),
        ((0, 10), b"0123456789"),
        ((3, 7), b"3456"),
        ((8, 99), b"89"),
        ((9, 10), b"9"),
        ((10, 11), b""),
        ((50, 60), b""),
    ],
)
def test_ranges_are_cut_at_the_end(
    store: Store, byte_range: tuple[int, int], expected: bytes
) -> None:
    version = create(store, "r", b"0123456789")
    blob = store.get("r", byte_range=byte_range)
    assert isinstance(blob, Blob)
    assert (blob.data, blob.version) == (expected, version)


@pytest.mark.parametrize("byte_range", [(0, 0), (5, 5), (5, 4), (-1, 3), (-3, -1)])
def test_an_empty_or_negative_range_is_refused(store: Store, byte_range: tuple[int, int]) -> None:
    store.put("r", b"0123456789")
    with pytest.raises(InvalidInput, match="byte_range"):
        store.get("r", byte_range=byte_range)


def test_max_bytes_limits_the_bytes_read_of_an_object_or_a_range(store: Store) -> None:
    store.put("b", b"0123456789")
    for byte_range, size in ((None, 10), ((2, 5), 3)):
        with pytest.raises(CorruptData, match=f"'b' has {size} bytes.*limit of {size - 1}"):
            store.get("b", byte_range=byte_range, max_bytes=size - 1)
        blob = store.get("b", byte_range=byte_range, max_bytes=size)
        assert isinstance(blob, Blob)
        assert len(blob.data) == size


# ---- compare-and-swap


def test_a_put_that_requires_absence_creates_once(store: Store) -> None:
    version = create(store, "m", b"1")
    assert store.put_if("m", b"2", None) == outcomes.LostRace()
    assert (read(store, "m").data, read(store, "m").version) == (b"1", version)


def test_if_version_replaces_only_that_version(store: Store) -> None:
    first = create(store, "m", b"1")
    second = store.put_if("m", b"2", first)
    assert isinstance(second, outcomes.Applied)
    assert store.put_if("m", b"3", first) == outcomes.LostRace()
    assert (read(store, "m").data, read(store, "m").version) == (b"2", second.value)


def test_f4_a_conditional_put_to_a_missing_object_reports_vanished_and_creates_nothing(
    store: Store,
) -> None:
    assert store.put_if("m", b"1", '"x"') == outcomes.Vanished()
    version = create(store, "m", b"1")
    assert store.delete_many(["m"]) == ()
    assert store.put_if("m", b"2", version) == outcomes.Vanished()
    with pytest.raises(ObjectNotFound):
        store.get("m")


def test_put_changes_the_version_that_put_if_compares(store: Store) -> None:
    version = create(store, "m", b"1")
    store.put("m", b"2")
    assert store.put_if("m", b"3", version) == outcomes.LostRace()


def test_f11_equal_versions_mean_equal_bytes(backend: Backend) -> None:
    store = backend.store
    seen: dict[str, bytes] = {}
    version = create(store, "m", b"A")
    seen[version] = b"A"
    writes = 1
    for data in [b"B", b"A", b"B", b"C", b"A", b"C"] * 5:
        outcome = store.put_if("m", data, version)
        assert isinstance(outcome, outcomes.Applied)
        version = outcome.value
        assert seen.setdefault(version, data) == data
        writes += 1
    for _ in range(5):
        assert store.delete_many(["m"]) == ()
        version = create(store, "m", b"D")
        assert seen.setdefault(version, b"D") == b"D"
        writes += 1
    if not backend.content_versions:
        assert len(seen) == writes  # a version never returns, not even for the same bytes


def test_conditional_writes_are_honoured_and_leave_no_probe(store: Store) -> None:
    store.check_conditional_writes("ingest/manifest")
    store.check_conditional_writes("ingest/manifest")
    assert store.list("").objects == ()


# ---- listing


def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert store.list("").objects == ()
    assert store.list("ingest/").objects == ()


def test_list_finds_keys_by_prefix_below_and_inside_names(store: Store) -> None:
    for key in ["in/a", "in/b/c", "in/b/d", "inner/e", "out"]:
        store.put(key, key.encode())
    found = {
        prefix: sorted(info.key for info in store.list(prefix).objects)
        for prefix in ["", "in", "in/", "in/b", "in/b/", "inn", "out", "x", "in/b/c/", "out/"]
    }
    assert found == {
        "": ["in/a", "in/b/c", "in/b/d", "inner/e", "out"],
        "in": ["in/a", "in/b/c", "in/b/d", "inner/e"],
        "in/": ["in/a", "in/b/c", "in/b/d"],
        "in/b": ["in/b/c", "in/b/d"],
        "in/b/": ["in/b/c", "in/b/d"],
        "inn": ["inner/e"],
        "out": ["out"],
        "x": [],
        "in/b/c/": [],
        "out/": [],
    }


def test_f6_a_listing_has_sizes_and_both_times_of_one_clock(store: Store) -> None:
    store.put("in/a", b"12345")
    listing = store.list("in/")
    (info,) = listing.objects
    assert info.size == 5
    assert info.last_modified_ms == read(store, "in/a").last_modified_ms
    # HTTP dates have seconds, so an object may look up to two seconds older or younger.
    assert -2_000 <= listing.now_ms - info.last_modified_ms <= 60_000


@pytest.mark.parametrize("prefix", ["../", "a/../", "/", "//", "./", "a//b"])
def test_a_prefix_without_keys_lists_nothing(store: Store, prefix: str) -> None:
    store.put("a/b", b"")
    assert store.list(prefix).objects == ()


ORDERED = ["in/a", "in/b-c", "in/b/c", "in/b/d", "in/ba", "in/é", "in/\U0001f600", "inner"]
"""Keys in the order of a listing: a directory is at the position of the keys below it."""


def test_a_listing_is_in_the_order_of_the_keys(store: Store) -> None:
    for key in random.Random(5).sample(ORDERED, len(ORDERED)):
        store.put(key, b"")
    assert [info.key for info in store.list("").objects] == ORDERED


@pytest.mark.parametrize("start_after", ["", "a", "in/a", "in/b", "in/b/", "in/b/cc", "in/é", "x"])
@pytest.mark.parametrize("prefix", ["", "in/", "in/b"])
def test_a_listing_begins_after_a_key_that_need_not_exist(
    store: Store, prefix: str, start_after: str
) -> None:
    for key in ORDERED:
        store.put(key, b"")
    listing = store.list(prefix, start_after=start_after)
    expected = [key for key in ORDERED if key.startswith(prefix) and key > start_after]
    assert [info.key for info in listing.objects] == expected
    assert not listing.truncated


@pytest.mark.parametrize("limit", [1, 3, len(ORDERED) - 1, len(ORDERED), 1_500])
def test_a_listing_can_be_read_piece_by_piece(store: Store, limit: int) -> None:
    for key in ORDERED:
        store.put(key, b"")
    found: list[str] = []
    truncated = True
    while truncated:
        listing = store.list("", start_after=found[-1] if found else "", limit=limit)
        assert 0 < len(listing.objects) <= limit
        assert listing.now_ms >= store.list("in/a").objects[0].last_modified_ms - 2_000
        found += [info.key for info in listing.objects]
        truncated = listing.truncated
    assert found == ORDERED


@pytest.mark.parametrize("limit", [0, -1])
def test_a_listing_of_no_objects_is_refused(store: Store, limit: int) -> None:
    with pytest.raises(InvalidInput, match=f"limit is {limit}"):
        store.list("", limit=limit)


# ---- deleting


def test_delete_counts_missing_objects_as_deleted(store: Store) -> None:
    store.put("in/a", b"")
    store.put("in/b", b"")
    assert store.delete_many(["in/a", "in/zzz", "no/such/path", "in"]) == ()
    assert [info.key for info in store.list("").objects] == ["in/b"]


def test_delete_takes_any_iterable_of_more_than_one_bulk_request(store: Store) -> None:
    keys = [f"in/{number:04}" for number in range(1_001)]
    for key in keys[::100]:  # including the first and the last; the others count as deleted
        store.put(key, b"")
    store.put("out", b"")
    assert store.delete_many([]) == ()
    assert store.delete_many(iter(keys)) == ()
    assert [info.key for info in store.list("").objects] == ["out"]


def test_a_key_can_be_written_again_after_its_directory_emptied(store: Store) -> None:
    store.put("a/b/c", b"1")
    store.delete_many(["a/b/c"])
    store.put("a/b", b"2")
    store.delete_many(["a/b"])
    store.put("a/b/c", b"3")
    assert [info.key for info in store.list("").objects] == ["a/b/c"]


# ---- names


@pytest.mark.parametrize("key", WEIRD_KEYS)
def test_f24_a_name_is_stored_raw(backend: Backend, key: str) -> None:
    if "\\" in key and not backend.has_backslashes:
        pytest.skip("this server has no backslashes in names")
    store = backend.store
    store.put(key, key.encode())
    assert read(store, key).data == key.encode()
    assert [info.key for info in store.list(key).objects if info.key == key] == [key]
    assert store.delete_many([key]) == ()
    with pytest.raises(ObjectNotFound):
        store.get(key)


def test_f24_names_that_differ_in_escapes_are_different_objects(store: Store) -> None:
    keys = ["a#1", "a%231", "a%25231", "a+b", "a b", "a%20b"]
    for key in keys:
        store.put(key, key.encode())
    assert sorted(info.key for info in store.list("a").objects) == sorted(keys)
    for key in keys:
        assert read(store, key).data == key.encode()


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "..", "a/../b", "./a", "a\0b", "a\nb"])
def test_f23_a_name_no_store_can_hold_is_refused(store: Store, key: str) -> None:
    with pytest.raises(InvalidInput):
        store.get(key)
    with pytest.raises(InvalidInput):
        store.put(key, b"")
    with pytest.raises(InvalidInput):
        store.put_if(key, b"", None)
    assert store.list("").objects == ()


# ---- many at once


def test_one_of_eight_writers_wins_each_race_however_often_threads_are_switched(
    store: Store,
) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        # Fewer races are decided only if an answer was lost.
        assert race(store, "raced") == 2 * ROUNDS
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("backend", [test for test in SHARED if test not in REAL], indirect=True)
def test_cas_race_between_processes_loses_no_increment(backend: Backend) -> None:
    create(backend.store, "counter", b"0")
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=increment, args=(backend.store, "counter", 25, seed))
        for seed in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert read(backend.store, "counter").data == b"100"


@pytest.mark.parametrize("backend", SHARED, indirect=True)
def test_a_store_that_others_can_reach_pickles(backend: Backend) -> None:
    backend.store.put("a", b"1")
    copy = pickle.loads(pickle.dumps(backend.store))
    assert copy.url == backend.store.url
    assert read(copy, "a").data == b"1"
