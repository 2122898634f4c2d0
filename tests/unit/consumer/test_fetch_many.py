"""Concurrent fetches: the order of results, the byte budget, errors, and threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.consumer.fetch import (
    AdaptiveConcurrency,
    ArrowBatch,
    ConsumedBatch,
    ContiguousRun,
    FetchHandle,
    PooledBatch,
    fetch_many,
)
from opendata_buffer.errors import BatchMissing, InvalidInput
from opendata_buffer.formats.batch import Compression, encode_batch
from opendata_buffer.formats.manifest import BatchDescriptor
from opendata_buffer.runtime import Condition, SystemRuntime, Task
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore


def _descriptors(count: int, size: int | None = 1) -> list[BatchDescriptor]:
    return [BatchDescriptor(sequence, f"x{sequence}", (), size) for sequence in range(count)]


class Fetches:
    """A fetch function that records its calls and returns when the test allows it."""

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


class Far(AdaptiveConcurrency):
    """A store that counts as far, however fast the fetches of a test are."""

    def __init__(self) -> None:
        super().__init__()
        self.near = False

    def fetched(self, size: int, waited: float, worked: float = 0.0) -> None:
        pass


def _taking(results: Iterator[Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a thread that takes the results, and return it with the list of taken results."""
    taken: list[Any] = []
    reader = threading.Thread(target=lambda: taken.extend(results))
    reader.start()
    return reader, taken


def _fetch_threads() -> int:
    return sum(thread.name == "opendata-buffer-fetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_leak() -> Iterator[None]:
    yield
    assert _fetch_threads() == 0


def test_results_come_in_order_whichever_fetch_ends_first() -> None:
    fetches = Fetches()
    reader, taken = _taking(
        fetch_many(
            lambda each: (each.sequence, fetches(each)),
            _descriptors(4),
            concurrency=4,
            adaptive=Far(),
        )
    )
    fetches.await_begun(4)
    for count, sequence in enumerate((3, 1, 2), start=1):
        fetches.allow(sequence)
        fetches.await_ended(count)
    assert taken == []
    fetches.allow(0)
    reader.join(30)
    assert [sequence for sequence, _ in taken] == [0, 1, 2, 3]


def test_a_batch_above_the_limit_is_fetched_alone() -> None:
    fetches = Fetches()
    fetches.allow(0)
    results = fetch_many(
        fetches, _descriptors(3, size=100), concurrency=3, max_in_flight_bytes=30, adaptive=Far()
    )
    next(results)
    fetches.await_begun(2)
    assert fetches.begun == [0, 1]
    fetches.allow(1, 2)
    assert [len(each) for each in results] == [100, 100]


@pytest.mark.parametrize("known", [None, 10], ids=["none has ended", "an earlier read tells"])
def test_unknown_sizes_count_as_the_largest_size_so_far_starting_with_one_fetch(
    known: int | None,
) -> None:
    fetches, adaptive = Fetches(), Far()
    adaptive.largest = known
    reader, taken = _taking(
        fetch_many(
            fetches,
            _descriptors(9, None),
            concurrency=9,
            max_in_flight_bytes=30,
            size_of=lambda _: 10,
            adaptive=adaptive,
        )
    )
    fetches.await_begun(3 if known else 1)
    assert sorted(fetches.begun) == list(range(3 if known else 1)), "three of ten bytes fit"
    fetches.allow(0)
    fetches.await_begun(4)
    assert sorted(fetches.begun) == [0, 1, 2, 3]
    fetches.allow(*range(9))
    reader.join()
    assert len(taken) == 9


class Clock(SystemRuntime):
    """A clock that moves only during fetches."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_on_a_slow_store_more_than_sixteen_fetches_run_at_once_by_default() -> None:
    fetches, adaptive = Fetches(), Far()
    AdaptiveConcurrency.fetched(adaptive, 0, 0.060, 0.001)
    reader, _ = _taking(fetch_many(fetches, _descriptors(100), adaptive=adaptive))
    fetches.await_begun(61)
    assert sorted(fetches.begun) == list(range(61))
    fetches.allow(*range(100))
    reader.join(30)
    assert len(fetches.begun) == 100


@pytest.mark.parametrize("declared", [False, True])
def test_on_a_near_store_the_caller_fetches_one_batch_at_a_time(
    declared: bool, tmp_path: Path
) -> None:
    """Time spent on decoding or on a busy machine does not count as waiting for the store."""

    class Decoding(Clock):
        worked = 0.0

        def cpu_time(self) -> float:
            return self.worked

    clock, handle = Decoding(), Handle(LocalStore(tmp_path) if declared else MemoryStore())
    held: list[int] = []

    def fetch(descriptor: BatchDescriptor) -> PooledBatch:
        assert threading.current_thread() is threading.main_thread()
        held.append(descriptor.sequence)
        clock.now += 5.0 if declared else 0.055
        clock.worked += 0.050  # a large batch: 50 ms of decoding, 5 ms of reading
        return PooledBatch(encode_batch([b"a"]), descriptor.sequence, descriptor.location, ())

    handle._fetch_pooled = fetch  # type: ignore[method-assign]
    results = fetch_many(handle.fetch, _descriptors(50, None), runtime=clock)
    for number, _ in enumerate(results, start=1):
        assert len(held) == number, "no batch is fetched ahead"
    assert len(held) == 50


def test_threads_are_used_only_while_a_near_store_is_slow() -> None:
    clock, adaptive = Clock(), AdaptiveConcurrency()
    adaptive.near = True
    slow = {2, 3, 4, 5}
    by_caller: list[int] = []
    turn = threading.Lock()

    def fetch(descriptor: BatchDescriptor) -> int:
        sequence = descriptor.sequence
        with turn:
            if threading.current_thread() is threading.main_thread():
                by_caller.append(sequence)
            clock.now += 1.0 if sequence in slow else 0.0
        return sequence

    # Fetch one batch ahead, so that the test knows which thread fetches which batch.
    results = fetch_many(fetch, _descriptors(12), concurrency=1, runtime=clock, adaptive=adaptive)
    assert list(results) == list(range(12))
    assert by_caller[:4] == [0, 1, 2, 3]
    assert not slow - {2, 3} & set(by_caller)
    assert by_caller[-1] == 11
    assert adaptive.near


def test_an_error_is_raised_in_order_and_starts_no_further_fetch() -> None:
    fetches = Fetches()
    fetches.allow(*range(10))
    begun: list[int] = []

    def fetch(descriptor: BatchDescriptor) -> int:
        begun.append(descriptor.sequence)
        if descriptor.sequence == 2:
            raise BatchMissing(2, "x2", "gone")
        return descriptor.sequence

    results = fetch_many(fetch, _descriptors(100), concurrency=1, adaptive=Far())
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(BatchMissing, match="batch 2"):
        next(results)
    assert begun == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(results)


def test_started_threads_end_if_another_one_cannot_start() -> None:
    class FewThreads(SystemRuntime):
        left = 1

        def spawn(self, target: Callable[[], None], name: str) -> Task:
            if not self.left:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            return super().spawn(target, name)

    # Two bytes fit, so the threads would wait for room that is never made.
    descriptors = [BatchDescriptor(n, "x", size=1) for n in range(10)]
    results = fetch_many(
        lambda each: each.sequence,
        descriptors,
        max_in_flight_bytes=2,
        runtime=FewThreads(),
        adaptive=Far(),
    )
    with pytest.raises(RuntimeError, match="new thread"):
        next(results)
    assert _fetch_threads() == 0


class Collecting(SystemRuntime):
    """Collects garbage while a lock is held, as any allocation may."""

    armed = False

    def condition(self) -> Condition:
        made = super().condition()
        notify_all = made.notify_all

        def collect() -> None:
            notify_all()
            if self.armed and threading.current_thread().name == "opendata-buffer-fetch":
                gc.collect()

        made.notify_all = collect  # type: ignore[method-assign]
        return made


class Dropped:
    """Holds results in a reference cycle, which only the garbage collector frees."""

    def __init__(self, results: Iterator[bytes]) -> None:
        self.results = results
        self.itself = self


@pytest.fixture
def _quick_collections() -> Iterator[None]:
    """Freeze older objects, so that collections look only at objects of this test."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("where", ["in a fetch", "with the lock held"])
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_quick_collections")
def test_threads_end_when_one_of_them_garbage_collects_their_results(
    where: str,
) -> None:
    runtime, fetches = Collecting(), Fetches()
    collected_by: list[str] = []

    def fetch(descriptor: BatchDescriptor) -> bytes:
        found = fetches(descriptor)
        if descriptor.sequence == 1 and where == "in a fetch":
            gc.collect()
        return found

    fetches.allow(0)
    results = fetch_many(fetch, _descriptors(3), concurrency=3, runtime=runtime, adaptive=Far())
    assert next(results) == b"\0"
    fetches.await_begun(3)
    dropped = Dropped(results)
    weakref.finalize(dropped, lambda: collected_by.append(threading.current_thread().name))
    gc.disable()
    try:
        del results, dropped
        runtime.armed = where == "with the lock held"
        fetches.allow(1, 2)
        for thread in threading.enumerate():
            if thread.name == "opendata-buffer-fetch":
                thread.join(30)
        assert _fetch_threads() == 0
    finally:
        gc.enable()
    assert collected_by == ["opendata-buffer-fetch"]


def test_no_fetch_starts_before_the_first_result_is_requested() -> None:
    fetches = Fetches()
    fetch_many(fetches, _descriptors(3)).close()
    assert fetches.begun == []


def test_one_descriptor_needs_no_thread() -> None:
    threads: list[str] = []
    results = fetch_many(lambda _: threads.append(threading.current_thread().name), _descriptors(1))
    assert list(results) == [None]
    assert threads == [threading.current_thread().name]
    assert list(fetch_many(lambda each: each, [])) == []


class Handle(FetchHandle):
    """A handle of batches with small objects. It records which thread decodes a batch, and when."""

    RECORDS = 2_000

    def __init__(self, store: LocalStore | MemoryStore | None = None) -> None:
        super().__init__(store or MemoryStore(), data_path_prefix="x")
        self.fetches = Fetches()
        self.decoded: list[tuple[int, threading.Thread]] = []
        self._stored = encode_batch([bytes(100)] * self.RECORDS, Compression.ZSTD)

    @property
    def stored_bytes(self) -> int:
        return len(self._stored)

    def _fetch_pooled(self, descriptor: BatchDescriptor) -> PooledBatch:
        self.fetches(descriptor)
        return PooledBatch(self._stored, descriptor.sequence, descriptor.location, ())

    def _decode(self, raw: PooledBatch) -> ConsumedBatch:
        self.decoded.append((raw.sequence, threading.current_thread()))
        return super()._decode(raw)

    def _decode_arrow(self, raw: PooledBatch) -> ArrowBatch:
        self.decoded.append((raw.sequence, threading.current_thread()))
        return super()._decode_arrow(raw)


@pytest.mark.parametrize("arrow", [False, True])
def test_fetched_batches_stay_encoded_until_they_are_taken(arrow: bool) -> None:
    handle = Handle()
    handle.fetches.allow(*range(6))
    results = fetch_many(
        handle.fetch_arrow if arrow else handle.fetch,
        _descriptors(6, handle.stored_bytes),
        concurrency=6,
        # Three encoded batches fit. Decoded, the first one alone would exceed the limit.
        max_in_flight_bytes=3 * handle.stored_bytes,
        adaptive=Far(),
    )
    assert handle.stored_bytes * 3 < handle.RECORDS * 100
    for taken in range(6):
        batch = next(results)
        assert batch.sequence == taken
        assert batch.nbytes >= handle.RECORDS * 100
        handle.fetches.await_ended(min(6, taken + 4))
        assert len(handle.fetches.begun) == min(6, taken + 4), "exactly three wait"
        assert handle.decoded == [(n, threading.main_thread()) for n in range(taken + 1)]
    assert list(results) == []


@pytest.mark.parametrize("settings", [{"concurrency": 0}, {"max_in_flight_bytes": 0}])
def test_limits_must_be_positive(settings: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=f"{next(iter(settings))} is 0"):
        fetch_many(lambda each: each, _descriptors(2), **settings)  # type: ignore[arg-type]


def test_a_contiguous_run_passes_finished_batches_and_stops_at_a_pending_one() -> None:
    run = ContiguousRun(BatchDescriptor(each, "") for each in (3, 4, 6, 7))  # 5 was a repeat
    assert [run.done(each) for each in (4, 7, 3, 6)] == [None, None, 4, 7]
    for each in (5, 7):
        with pytest.raises(InvalidInput, match=f"sequence {each} is not awaited"):
            run.done(each)
