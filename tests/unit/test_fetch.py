"""One batch by its descriptor, and many in order."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.descriptors import BatchDescriptor
from opendata_buffer.errors import (
    BatchMissing,
    BatchUnreadable,
    ForeignLocation,
    InvalidInput,
    PoisonBatch,
    TransientStorageError,
)
from opendata_buffer.fetch import FetchHandle, fetch_many
from opendata_buffer.formats.batch import Compression, encode_batch
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.runtime import SystemRuntime, Task
from opendata_buffer.stores.factory import open_store
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

LOCATION = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch"
META = (Metadata(0, 1_767_225_600_000, b"host=a"),)


def _handle(store: MemoryStore, max_batch_bytes: int = 1024, foreign: bool = False) -> FetchHandle:
    return FetchHandle(
        store,
        data_path_prefix="ingest",
        max_batch_bytes=max_batch_bytes,
        allow_foreign_locations=foreign,
        runtime=ManualRuntime(),
    )


def _store(data: bytes = b"\x03\0\0\0abc\0\0\0\0\0\x02\0\0\0\x01\0") -> MemoryStore:
    store = MemoryStore()
    store.put(LOCATION, data)
    return store


def test_a_batch_carries_its_records_and_its_descriptor() -> None:
    handle, descriptor = _handle(_store()), BatchDescriptor(7, LOCATION, META)
    batch = handle.fetch(descriptor)
    assert batch.entries == [b"abc", b""]
    assert (batch.sequence, batch.location, batch.metadata) == (7, LOCATION, META)
    assert batch.nbytes == 3
    arrow = handle.fetch_arrow(descriptor)
    assert arrow.values.equals(pa.array([b"abc", b""], pa.binary()))
    assert (arrow.sequence, arrow.location, arrow.metadata) == (7, LOCATION, META)
    raw = handle.fetch_raw(descriptor)
    assert raw.nbytes == 18
    assert handle.decode(raw) == batch
    assert handle.decode_arrow(raw).values.equals(arrow.values)


def _ways(handle: FetchHandle) -> list[Callable[[BatchDescriptor], object]]:
    return [handle.fetch, handle.fetch_arrow]


def test_f25_a_missing_batch_names_sequence_and_location() -> None:
    handle = _handle(MemoryStore())
    for way in (*_ways(handle), handle.fetch_raw):
        with pytest.raises(BatchMissing, match=rf"batch 7 at '{LOCATION}'.*skip\(7\)") as caught:
            way(BatchDescriptor(7, LOCATION))
        assert (caught.value.sequence, caught.value.location) == (7, LOCATION)


def test_f25_an_unreadable_batch_names_sequence_and_location() -> None:
    for way in _ways(_handle(_store(b"no batch at all"))):
        with pytest.raises(BatchUnreadable, match=f"batch 7 at '{LOCATION}'") as caught:
            way(BatchDescriptor(7, LOCATION))
        assert pickle.loads(pickle.dumps(caught.value)).sequence == 7


@pytest.mark.parametrize("compression", list(Compression))
def test_f21_a_batch_beyond_the_cap_is_refused(compression: Compression) -> None:
    for way in _ways(_handle(_store(encode_batch([b"x" * 100_000], compression)))):
        with pytest.raises(BatchUnreadable):
            way(BatchDescriptor(7, LOCATION))


def test_a_batch_at_the_cap_passes_also_when_compression_makes_it_larger() -> None:
    noise = bytes(range(256)) * 3 + bytes(252)
    for compression in Compression:
        handle = _handle(_store(encode_batch([noise], compression)))
        assert handle.fetch(BatchDescriptor(0, LOCATION)).entries == [noise]


@pytest.mark.parametrize(
    "location",
    [
        "secrets/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/../secrets/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "/ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest2/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/manifest",
        "ingest/\n01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "",
    ],
)
def test_f23_a_location_outside_the_prefix_is_not_fetched(location: str) -> None:
    class Untouched(MemoryStore):
        def get(self, *_: object, **__: object) -> object:  # type: ignore[override]
            raise AssertionError("the store was asked")

    for way in _ways(_handle(Untouched())):
        with pytest.raises(ForeignLocation, match=r"'ingest'; set allow_foreign_locations"):
            way(BatchDescriptor(7, location))


def test_f23_foreign_locations_can_be_allowed_and_stay_in_the_store() -> None:
    store = _store()
    store.put("elsewhere/events", b"\0\0\0\0\0\x01\0")
    handle = _handle(store, foreign=True)
    assert handle.fetch(BatchDescriptor(7, "elsewhere/events")).entries == []
    with pytest.raises(ForeignLocation):
        handle.fetch(BatchDescriptor(7, "../events"))


def test_a_store_that_does_not_answer_says_nothing_about_the_batch() -> None:
    class Down(MemoryStore):
        def get(self, *_: object, **__: object) -> object:  # type: ignore[override]
            raise TransientStorageError("503")

    with pytest.raises(TransientStorageError):
        _handle(Down()).fetch(BatchDescriptor(7, LOCATION))


def test_a_clone_shares_the_store() -> None:
    handle = _handle(_store())
    clone = handle.clone()
    assert clone is not handle
    assert clone.fetch(BatchDescriptor(7, LOCATION)).entries == [b"abc", b""]


def test_a_handle_travels_by_the_url_of_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(str(tmp_path / "queue")).put(LOCATION, b"\0\0\0\0\0\x01\0")
    monkeypatch.chdir(tmp_path)
    sent = pickle.dumps(FetchHandle.of(ConsumerConfig(store="queue")))
    monkeypatch.chdir("/")
    received = pickle.loads(sent)
    assert received.fetch(BatchDescriptor(7, LOCATION)).entries == []
    assert len(sent) < 2_000


def test_a_handle_on_a_named_memory_store_travels_within_the_process() -> None:
    store = MemoryStore.named("test_fetch")
    store.put(LOCATION, b"\0\0\0\0\0\x01\0")
    received = pickle.loads(pickle.dumps(_handle(store)))
    assert received.fetch(BatchDescriptor(7, LOCATION)).entries == []


def test_a_handle_on_a_private_store_says_why_it_cannot_travel() -> None:
    with pytest.raises(InvalidInput, match="cannot be pickled"):
        pickle.dumps(_handle(MemoryStore()))


def test_a_descriptor_pickles_small() -> None:
    descriptor = BatchDescriptor(7, LOCATION, META, 4096)
    sent = pickle.dumps(descriptor)
    assert pickle.loads(sent) == descriptor
    assert len(sent) < 400


# fetch_many


def _descriptors(count: int, size: int | None = 1) -> list[BatchDescriptor]:
    return [BatchDescriptor(sequence, f"x{sequence}", (), size) for sequence in range(count)]


class Fetches:
    """A fetch that ends when the test lets it, and counts what is under way."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.begun: list[int] = []
        self.allowed: set[int] = set()
        self.ended = 0

    def __call__(self, descriptor: BatchDescriptor) -> bytes:
        with self.changed:
            self.begun.append(descriptor.sequence)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: descriptor.sequence in self.allowed, 30)
            self.ended += 1
            self.changed.notify_all()
        return bytes(descriptor.size or 0)

    def allow(self, *sequences: int) -> None:
        with self.changed:
            self.allowed |= set(sequences)
            self.changed.notify_all()

    def await_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, 30)

    def await_ended(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.ended >= count, 30)


def _fetch_threads() -> int:
    return sum(thread.name == "opendata-buffer-fetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_leak() -> Iterator[None]:
    yield
    assert _fetch_threads() == 0


def test_results_come_in_order_whatever_ends_first() -> None:
    fetches = Fetches()
    results = fetch_many(
        lambda each: (each.sequence, fetches(each)), _descriptors(4), concurrency=4
    )
    taken: list[int] = []

    def take() -> None:
        taken.extend(sequence for sequence, _ in results)

    reader = threading.Thread(target=take)
    reader.start()
    fetches.await_begun(4)
    for count, sequence in enumerate((3, 1, 2), start=1):
        fetches.allow(sequence)
        fetches.await_ended(count)
    assert taken == []
    fetches.allow(0)
    reader.join(30)
    assert taken == [0, 1, 2, 3]


def test_no_more_than_so_many_at_once() -> None:
    fetches = Fetches()
    results = fetch_many(fetches, _descriptors(5), concurrency=2)
    reader = threading.Thread(target=lambda: list(results))
    reader.start()
    fetches.await_begun(2)
    assert sorted(fetches.begun) == [0, 1]
    fetches.allow(0)
    fetches.await_begun(3)
    assert sorted(fetches.begun) == [0, 1, 2]
    fetches.allow(*range(5))
    reader.join(30)
    assert sorted(fetches.begun) == list(range(5))


def test_bytes_in_flight_count_what_nobody_took_yet() -> None:
    fetches = Fetches()
    fetches.allow(*range(6))
    results = fetch_many(fetches, _descriptors(6, size=10), concurrency=6, max_in_flight_bytes=30)
    assert len(next(results)) == 10
    # One was taken, three may be open: the first four were begun, the fifth is not.
    fetches.await_ended(4)
    assert sorted(fetches.begun) == [0, 1, 2, 3]
    next(results)
    fetches.await_ended(5)
    assert sorted(fetches.begun) == [0, 1, 2, 3, 4]
    results.close()


def test_a_batch_beyond_the_limit_is_fetched_alone() -> None:
    fetches = Fetches()
    fetches.allow(0)
    results = fetch_many(fetches, _descriptors(3, size=100), concurrency=3, max_in_flight_bytes=30)
    next(results)
    fetches.await_begun(2)
    assert fetches.begun == [0, 1]
    fetches.allow(1, 2)
    assert [len(each) for each in results] == [100, 100]


def test_unknown_sizes_begin_with_one_and_then_count_as_the_largest_so_far() -> None:
    fetches = Fetches()
    results = fetch_many(
        fetches,
        [*_descriptors(1, None), *_descriptors(9, None)[1:]],
        concurrency=9,
        max_in_flight_bytes=30,
        size_of=lambda _: 10,
    )
    fetches.allow(0)
    next(results)
    fetches.await_begun(4)
    assert sorted(fetches.begun) == [0, 1, 2, 3], "three of ten bytes fit beside each other"
    fetches.allow(*range(9))
    assert len(list(results)) == 8


@pytest.mark.parametrize(("takes_s", "ahead"), [(0.008, 1), (0.060, 5)])
def test_a_near_store_is_read_a_little_ahead_and_a_far_one_as_far_as_allowed(
    takes_s: float, ahead: int
) -> None:
    class Clock(SystemRuntime):
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock, fetches = Clock(), Fetches()

    def fetch(descriptor: BatchDescriptor) -> None:
        fetches(descriptor)
        clock.now += takes_s if descriptor.sequence == 0 else 0.0

    results = fetch_many(
        fetch,
        _descriptors(9, None),
        max_in_flight_bytes=40_000_000,
        runtime=clock,
        size_of=lambda _: 8_000_000,
    )
    fetches.allow(0)
    next(results)
    fetches.await_begun(1 + ahead)
    assert sorted(fetches.begun) == list(range(1 + ahead))
    fetches.allow(*range(9))
    assert len(list(results)) == 8


def test_an_error_comes_at_its_place_and_begins_nothing_more() -> None:
    fetches = Fetches()
    fetches.allow(*range(10))
    begun: list[int] = []

    def fetch(descriptor: BatchDescriptor) -> int:
        begun.append(descriptor.sequence)
        if descriptor.sequence == 2:
            raise BatchMissing(2, "x2", "gone")
        return descriptor.sequence

    results = fetch_many(fetch, _descriptors(100), concurrency=1)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(BatchMissing, match="batch 2"):
        next(results)
    assert begun == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(results)


def test_closing_early_ends_the_threads() -> None:
    results = fetch_many(lambda each: each.sequence, _descriptors(100), concurrency=4)
    assert next(results) == 0
    results.close()
    assert _fetch_threads() == 0


def test_threads_that_started_end_when_one_does_not_start() -> None:
    class FewThreads(SystemRuntime):
        left = 1

        def spawn(self, target: Callable[[], None], name: str) -> Task:
            if not self.left:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            return super().spawn(target, name)

    # Two bytes fit: the threads would wait for room that nobody makes.
    descriptors = [BatchDescriptor(n, "x", size=1) for n in range(10)]
    results = fetch_many(
        lambda each: each.sequence, descriptors, max_in_flight_bytes=2, runtime=FewThreads()
    )
    with pytest.raises(RuntimeError, match="new thread"):
        next(results)
    assert _fetch_threads() == 0


def test_nothing_begins_before_the_first_result_is_asked_for() -> None:
    fetches = Fetches()
    fetch_many(fetches, _descriptors(3)).close()
    assert fetches.begun == []


def test_one_descriptor_needs_no_thread() -> None:
    threads: list[str] = []
    results = fetch_many(lambda _: threads.append(threading.current_thread().name), _descriptors(1))
    assert list(results) == [None]
    assert threads == [threading.current_thread().name]
    assert list(fetch_many(lambda each: each, [])) == []


@pytest.mark.parametrize("settings", [{"concurrency": 0}, {"max_in_flight_bytes": 0}])
def test_limits_are_positive(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=f"{next(iter(settings))} is 0"):
        fetch_many(lambda each: each, _descriptors(2), **settings)  # type: ignore[arg-type]


def test_a_handle_fetches_many() -> None:
    store = MemoryStore()
    descriptors = []
    runtime = ManualRuntime()
    for sequence in range(50):
        location = f"ingest/{runtime.ulid()}.batch"
        store.put(location, encode_batch([b"%d" % sequence]))
        descriptors.append(BatchDescriptor(sequence, location))
    results = fetch_many(_handle(store).fetch, descriptors, concurrency=8)
    assert [batch.entries for batch in results] == [[b"%d" % each] for each in range(50)]
    store.delete_many([descriptors[10].location])
    with pytest.raises(PoisonBatch, match="batch 10"):
        list(fetch_many(_handle(store).fetch, descriptors, concurrency=8))
