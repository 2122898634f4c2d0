"""The store that fails by seeded dice."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.errors import InvalidInput, ObjectNotFound, TransientStorageError
from opendata_buffer.stores.base import ABSENT, Blob, IfVersion
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.faults import HarshPlan, HarshStore


def faulty(runtime: ManualRuntime, seed: int = 0, **plan: Any) -> FaultyStore:
    return FaultyStore(MemoryStore(), runtime, FaultPlan(**plan), seed=seed)


def harsh(runtime: ManualRuntime, seed: int = 0, **plan: Any) -> HarshStore:
    return HarshStore(MemoryStore(now_ms=runtime.now_ms), runtime, HarshPlan(**plan), seed=seed)


def test_without_a_plan_nothing_fails_and_nothing_takes_time(runtime: ManualRuntime) -> None:
    store = FaultyStore(MemoryStore("x"), runtime)
    outcome = store.put_if("m", b"1", ABSENT)
    assert isinstance(outcome, outcomes.Applied)
    assert store.put_if("m", b"2", ABSENT) == outcomes.Conflict()
    store.put("a", b"1")
    assert len(store.list("").objects) == 2
    assert store.delete_many(["m", "a"]) == ()
    assert store.put_if("m", b"2", IfVersion(outcome.value)) == outcomes.Vanished()
    assert (store.url, store.faults, runtime.slept) == ("memory://x", {}, [])
    assert store.operations == {"put_if": 3, "put": 1, "list": 1, "delete_many": 1}


def bytes_in(store: MemoryStore | FaultyStore, key: str) -> bytes | None:
    try:
        blob = store.get(key)
    except ObjectNotFound:
        return None
    assert isinstance(blob, Blob)
    return blob.data


def test_f2_a_lost_answer_is_unknown_and_the_condition_was_checked(runtime: ManualRuntime) -> None:
    store = faulty(runtime, cas_lost_after=1)
    assert isinstance(store.put_if("m", b"1", ABSENT), outcomes.Unknown)
    assert bytes_in(store, "m") == b"1"
    for condition in (ABSENT, IfVersion("0")):
        assert isinstance(store.put_if("m", b"2", condition), outcomes.Unknown)
    assert bytes_in(store, "m") == b"1"
    assert store.faults == {"cas_lost_after": 3}


def test_a_lost_request_is_unknown_and_never_applied(runtime: ManualRuntime) -> None:
    store = faulty(runtime, cas_lost_before=1)
    assert isinstance(store.put_if("m", b"1", ABSENT), outcomes.Unknown)
    assert bytes_in(store, "m") is None


def test_a_late_put_lands_within_some_operations(runtime: ManualRuntime) -> None:
    landed_after = set()
    for seed in range(50):
        store = harsh(runtime, seed, cas_late=1, late_operations=3)
        assert isinstance(store.put_if("m", b"1", ABSENT), outcomes.Unknown)
        assert store.late_puts == 1
        assert store.inner.list("").objects == ()
        for operation in range(1, 10):
            if store.list("").objects:
                landed_after.add(operation)
                break
        assert store.late_puts == 0
    assert landed_after == {1, 2, 3, 4}


def test_a_late_put_finds_its_condition_broken(runtime: ManualRuntime) -> None:
    store = harsh(runtime, cas_late=1)
    store.put_if("m", b"late", ABSENT)
    store.inner.put("m", b"other")
    store.land_late_puts()
    assert (store.late_puts, bytes_in(store, "m")) == (0, b"other")


def test_operations_that_fail_do_so_transiently_and_half_of_the_puts_are_done(
    runtime: ManualRuntime,
) -> None:
    store = faulty(runtime, get_errors=1, list_errors=1, put_errors=1)
    for number in range(200):
        with pytest.raises(TransientStorageError, match="injected"):
            store.put(f"a/{number}", b"")
    for read in (lambda: store.get("a/0"), lambda: store.list("")):
        with pytest.raises(TransientStorageError, match="injected"):
            read()
    assert 70 < len(store.inner.list("a/").objects) < 130


def test_a_partial_list_lacks_some_of_the_newest(runtime: ManualRuntime) -> None:
    store = harsh(runtime, partial_lists=1)
    for number in range(20):
        runtime.advance(1)
        store.put(f"a/{99 - number}", b"")  # the newest have the smallest names
    oldest_first = [f"a/{99 - number}" for number in range(20)]
    kept = {info.key for info in store.list("a/").objects}
    assert 15 <= len(kept) < 20
    assert kept == set(oldest_first[: len(kept)])


def test_failing_deletes_are_returned_and_half_of_them_done(runtime: ManualRuntime) -> None:
    store = faulty(runtime, delete_errors=0.5)
    keys = [f"a/{number}" for number in range(200)]
    for key in keys:
        store.put(key, b"")
    failed = {failure.key for failure in store.delete_many(keys)}
    left = {info.key for info in store.list("").objects}
    assert left < failed
    assert 70 < len(failed) < 130
    assert 30 < len(left) < 70


def test_latency_is_spent_half_before_and_half_after_the_effect_with_jitter(
    runtime: ManualRuntime,
) -> None:
    store = faulty(runtime, put_ms=100, jitter=0.5)
    for _ in range(200):
        store.put("a", b"")
    assert 0.025 <= min(runtime.slept) < 0.03
    assert 0.07 < max(runtime.slept) <= 0.075
    runtime.slept.clear()
    store = faulty(runtime, put_ms=100, get_ms=60, cas_ms=80, list_ms=40, delete_ms=20)
    store.put("a", b"")
    store.get("a")
    store.put_if("m", b"", ABSENT)
    store.list("")
    store.delete_many(["a"])
    assert runtime.slept == pytest.approx(
        [0.05, 0.05, 0.03, 0.03, 0.04, 0.04, 0.02, 0.02, 0.01, 0.01]
    )


def test_stalls_hit_their_share_of_operations(runtime: ManualRuntime) -> None:
    store = harsh(runtime, stalls=0.2, stall_ms=5_000)
    for _ in range(500):
        store.put("a", b"")
    assert 60 < store.faults["stalls"] < 140
    assert set(runtime.slept) == {5.0}


def test_equal_seeds_fail_equally(runtime: ManualRuntime) -> None:
    def history(seed: int) -> list[object]:
        store = faulty(runtime, seed, cas_lost_after=0.3, cas_lost_before=0.3)
        return [
            (type(store.put_if("m", b"", ABSENT)), bytes_in(store, "m") is None) for _ in range(100)
        ]

    assert history(1) == history(1)
    assert history(1) != history(2)


@pytest.mark.parametrize(
    "plan", [{"get_errors": 1.1}, {"stalls": -0.1}, {"put_ms": -1}, {"hangs": 2}]
)
def test_impossible_plans_are_refused(plan: dict[str, Any]) -> None:
    (name,) = plan
    with pytest.raises(InvalidInput, match=name):
        HarshPlan(**plan)


def test_a_store_that_hangs_takes_its_time_and_then_gives_no_answer(
    runtime: ManualRuntime,
) -> None:
    store = harsh(runtime, hangs=1, hang_ms=90_000)
    store.inner.put("a", b"")
    for call in (
        lambda: store.get("a"),
        lambda: store.put("b", b""),
        lambda: store.list(""),
        lambda: store.delete_many(["a"]),
    ):
        with pytest.raises(TransientStorageError, match="no answer"):
            call()
    assert isinstance(store.put_if("m", b"", ABSENT), outcomes.Unknown)
    assert runtime.slept == [90.0] * 5
    assert store.faults == {"hangs": 5}


def test_of_writes_without_an_answer_some_are_carried_out_and_some_are_not(
    runtime: ManualRuntime,
) -> None:
    found: set[str] = set()
    missing: set[str] = set()
    for seed in range(20):
        store = harsh(runtime, seed, hangs=1)
        store.inner.put("old", b"")
        with pytest.raises(TransientStorageError):
            store.put("a", b"")
        store.put_if("m", b"", ABSENT)
        with pytest.raises(TransientStorageError):
            store.delete_many(["old"])
        keys = {info.key for info in store.inner.list("").objects}
        found |= keys
        missing |= {"a", "m", "old"} - keys
    assert found == missing == {"a", "m", "old"}


@pytest.mark.parametrize("error_ms", [660_000, -660_000])
def test_wrong_dates_move_the_clock_of_a_listing_and_no_object(
    runtime: ManualRuntime, error_ms: int
) -> None:
    store = harsh(runtime, wrong_dates=1, date_error_ms=error_ms)
    store.put("a", b"")
    listing = store.list("")
    assert listing.objects[0].last_modified_ms == runtime.now_ms()
    assert listing.now_ms == runtime.now_ms() + error_ms
