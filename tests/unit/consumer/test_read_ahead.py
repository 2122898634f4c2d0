"""Many fetches at once: the order of results, the budget, errors, and whose thread it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.read_ahead import Pace, fetch_many
from opendata_buffer.errors import BatchMissing, InvalidInput
from opendata_buffer.runtime import SystemRuntime, Task


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


class Far(Pace):
    """A store that is far, however quick the fetches of a test are."""

    def __init__(self) -> None:
        super().__init__()
        self.near = False

    def saw(self, size: int, waited: float, worked: float = 0.0) -> None:
        pass


def _fetch_threads() -> int:
    return sum(thread.name == "opendata-buffer-fetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_leak() -> Iterator[None]:
    yield
    assert _fetch_threads() == 0


def test_results_come_in_order_whatever_ends_first() -> None:
    fetches = Fetches()
    results = fetch_many(
        lambda each: (each.sequence, fetches(each)), _descriptors(4), concurrency=4, pace=Far()
    )
    taken: list[bytes] = []

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
    results = fetch_many(fetches, _descriptors(5), concurrency=2, pace=Far())
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
    results = fetch_many(
        fetches, _descriptors(6, size=10), concurrency=6, max_in_flight_bytes=30, pace=Far()
    )
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
    results = fetch_many(
        fetches, _descriptors(3, size=100), concurrency=3, max_in_flight_bytes=30, pace=Far()
    )
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
        pace=Far(),
    )
    fetches.allow(0)
    next(results)
    fetches.await_begun(4)
    assert sorted(fetches.begun) == [0, 1, 2, 3], "three of ten bytes fit beside each other"
    fetches.allow(*range(9))
    assert len(list(results)) == 8


def test_an_earlier_read_tells_how_large_results_are() -> None:
    pace = Far()
    pace.largest = 10
    fetches = Fetches()
    results = fetch_many(
        fetches,
        [*_descriptors(1, None), *_descriptors(9, None)[1:]],
        concurrency=9,
        max_in_flight_bytes=30,
        size_of=lambda _: 10,
        pace=pace,
    )
    taken: list[bytes] = []
    reader = threading.Thread(target=lambda: taken.extend(results))
    reader.start()
    fetches.await_begun(3)
    assert sorted(fetches.begun) == [0, 1, 2], "three of ten bytes, although none has ended"
    fetches.allow(*range(9))
    reader.join()
    assert len(taken) == 9


def test_what_a_read_has_seen_is_known_to_the_next_one() -> None:
    pace = Pace()
    for size in (7, 10, 3):
        pace.saw(size, 0.1)
    assert pace.largest == 10


class Clock(SystemRuntime):
    """Time that passes in fetches only."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("size", "waited", "worked", "near"),
    [
        (0, 0.001, 0.0, True),
        (0, 0.0011, 0.0, None),
        (8_000_000, 0.009, 0.0, True),
        (8_000_000, 0.010, 0.0, None),
        (0, 0.030, 0.030, True),
        (0, 0.031, 0.030, None),
    ],
)
def test_a_fetch_that_hardly_waits_shows_that_the_store_is_near(
    size: int, waited: float, worked: float, near: bool | None
) -> None:
    pace = Pace()
    pace.saw(size, waited, worked)
    assert pace.near is near


@pytest.mark.parametrize("known", [None, True])
def test_two_long_waits_in_a_row_show_that_it_is_far(known: bool | None) -> None:
    pace = Pace()
    pace.near = known
    for waited, near in ((0.0041, known), (0.002, known), (0.0041, known), (0.06, False)):
        pace.saw(0, waited)
        assert pace.near is near
    pace.saw(0, 0.002)
    assert pace.near is False
    pace.saw(0, 0.001)
    assert pace.near is True


@pytest.mark.parametrize(
    ("waited", "worked", "threads"),
    [
        (0.060, 0.001, 61),
        (0.060, 0.0, 128),  # also where nothing tells the processor's time
        (0.060, 0.0002, 128),
        (0.060, 0.010, 16),
        (0.0, 0.0, 128),
        (0.0, 0.001, 16),
    ],
)
def test_as_many_threads_as_a_fetch_waits_longer_than_it_works(
    waited: float, worked: float, threads: int
) -> None:
    pace = Pace()
    assert pace.threads == 16
    for _ in range(5):
        pace.saw(0, waited, worked)
    assert pace.threads == threads


def test_waits_that_grow_with_the_threads_ask_for_no_more_of_them() -> None:
    pace = Pace()
    pace.saw(0, 0.020, 0.001)
    for _ in range(50):
        pace.saw(0, 0.200, 0.001)  # for the processor, or for bandwidth
        pace.saw(0, 0.020, 0.001)
    assert pace.threads == 21
    for _ in range(200):
        pace.saw(0, 0.060, 0.001)  # the store has become slower
    assert pace.threads == 61


def test_on_a_slow_store_more_than_sixteen_fetches_are_under_way_without_an_option() -> None:
    fetches = Fetches()
    pace = Far()
    Pace.saw(pace, 0, 0.060, 0.001)
    results = fetch_many(fetches, _descriptors(100), pace=pace)
    reader = threading.Thread(target=lambda: list(results))
    reader.start()
    fetches.await_begun(61)
    assert sorted(fetches.begun) == list(range(61))
    fetches.allow(*range(100))
    reader.join(30)
    assert len(fetches.begun) == 100


def test_without_latency_a_read_ahead_is_no_slower_and_holds_no_more_than_one_batch() -> None:
    """By default, too: decoding used to count as waiting, and sixteen threads decoded at once."""

    class Decoding(Clock):
        worked = 0.0

        def cpu_time(self) -> float:
            return self.worked

    clock = Decoding()
    threads: set[int] = set()
    held: list[int] = []

    def fetch(descriptor: BatchDescriptor) -> bytes:
        threads.add(threading.get_ident())
        held.append(descriptor.sequence)
        clock.now += 0.055
        clock.worked += 0.050  # a large batch: 50 ms of decoding, 5 ms of reading
        return b""

    for number, _ in enumerate(fetch_many(fetch, _descriptors(50, None), runtime=clock), start=1):
        assert len(held) == number, "nothing is fetched ahead"
    assert threads == {threading.get_ident()}
    assert len(held) == 50


def test_with_latency_threads_read_ahead_from_the_third_batch_on() -> None:
    clock = Clock()
    callers: list[int] = []
    turn = threading.Lock()

    def fetch(descriptor: BatchDescriptor) -> int:
        with turn:
            if threading.current_thread() is threading.main_thread():
                callers.append(descriptor.sequence)
            clock.now += 0.060
        return descriptor.sequence

    results = fetch_many(fetch, _descriptors(20, None), runtime=clock)
    assert list(results) == list(range(20))
    assert callers == [0, 1]


def test_where_the_store_is_near_the_caller_fetches() -> None:
    pace = Pace()
    pace.near = True
    threads: list[threading.Thread] = []

    def fetch(descriptor: BatchDescriptor) -> int:
        threads.append(threading.current_thread())
        return descriptor.sequence

    results = fetch_many(fetch, _descriptors(5), runtime=Clock(), pace=pace)
    assert next(results) == 0
    assert len(threads) == 1  # nothing ahead
    assert list(results) == [1, 2, 3, 4]
    assert set(threads) == {threading.main_thread()}


def test_threads_take_over_when_a_near_store_gets_slow_and_leave_again() -> None:
    clock, pace = Clock(), Pace()
    pace.near = True
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

    # One at a time ahead, so that it is certain who fetches what.
    results = fetch_many(fetch, _descriptors(12), concurrency=1, runtime=clock, pace=pace)
    assert list(results) == list(range(12))
    assert by_caller[:4] == [0, 1, 2, 3]
    assert not slow - {2, 3} & set(by_caller)
    assert by_caller[-1] == 11
    assert pace.near


def test_an_error_of_a_near_store_comes_at_its_place() -> None:
    pace = Pace()
    pace.near = True

    def fetch(descriptor: BatchDescriptor) -> int:
        if descriptor.sequence == 2:
            raise BatchMissing(2, "x2", "gone")
        return descriptor.sequence

    results = fetch_many(fetch, _descriptors(5), runtime=Clock(), pace=pace)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(BatchMissing):
        next(results)


def test_an_error_comes_at_its_place_and_begins_nothing_more() -> None:
    fetches = Fetches()
    fetches.allow(*range(10))
    begun: list[int] = []

    def fetch(descriptor: BatchDescriptor) -> int:
        begun.append(descriptor.sequence)
        if descriptor.sequence == 2:
            raise BatchMissing(2, "x2", "gone")
        return descriptor.sequence

    results = fetch_many(fetch, _descriptors(100), concurrency=1, pace=Far())
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(BatchMissing, match="batch 2"):
        next(results)
    assert begun == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(results)


def test_closing_early_ends_the_threads() -> None:
    results = fetch_many(lambda each: each.sequence, _descriptors(100), concurrency=4, pace=Far())
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
        lambda each: each.sequence,
        descriptors,
        max_in_flight_bytes=2,
        runtime=FewThreads(),
        pace=Far(),
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
