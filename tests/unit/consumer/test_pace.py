"""How far a store is: what it says of itself, and what is measured where it says nothing."""

from __future__ import annotations

import pytest

from opendata_buffer.consumer.fetch import AdaptiveConcurrency
from opendata_buffer.stores.memory import MemoryStore


def test_what_a_read_has_seen_is_known_to_the_next_one() -> None:
    pace = AdaptiveConcurrency()
    for size in (7, 10, 3):
        pace.saw(size, 0.1)
    assert pace.largest == 10


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
    pace = AdaptiveConcurrency()
    pace.saw(size, waited, worked)
    assert pace.near is near


@pytest.mark.parametrize("known", [None, True])
def test_two_long_waits_in_a_row_show_that_it_is_far(known: bool | None) -> None:
    pace = AdaptiveConcurrency()
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
    pace = AdaptiveConcurrency()
    assert pace.threads == 16
    for _ in range(5):
        pace.saw(0, waited, worked)
    assert pace.threads == threads


def test_waits_that_grow_with_the_threads_ask_for_no_more_of_them() -> None:
    pace = AdaptiveConcurrency()
    pace.saw(0, 0.020, 0.001)
    for _ in range(50):
        pace.saw(0, 0.200, 0.001)  # for the processor, or for bandwidth
        pace.saw(0, 0.020, 0.001)
    assert pace.threads == 21
    for _ in range(200):
        pace.saw(0, 0.060, 0.001)  # the store has become slower
    assert pace.threads == 61


def test_a_store_that_says_that_it_is_near_stays_near_however_long_a_busy_machine_takes() -> None:
    pace = AdaptiveConcurrency(declared=True)
    for _ in range(10):
        pace.saw(8_000_000, waited=5.0, worked=0.010)
    assert pace.near is True
    assert pace.largest == 8_000_000


@pytest.mark.parametrize(("said", "near"), [(True, True), (False, None)])
def test_the_pace_of_a_store_begins_with_what_it_says(said: bool, near: bool | None) -> None:
    class Declares(MemoryStore):
        is_near = said

    assert AdaptiveConcurrency.of(Declares()).near is near
    assert AdaptiveConcurrency.of(object()).near is None, "most say nothing"


def test_decoding_is_work_that_fetches_need_not_hide() -> None:
    pace = AdaptiveConcurrency()
    pace.saw(0, 0.060, 0.001)
    assert pace.threads == 61
    pace.saw_decoding(0.002)
    assert pace.threads == 21
