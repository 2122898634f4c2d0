"""A store that fails at random, by a seed."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.errors import InvalidInput, ObjectNotFound, TransientStorageError
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from opendata_buffer.testing.runtime import ManualRuntime


def faulty(runtime: ManualRuntime, seed: int = 0, **plan: Any) -> FaultyStore:
    return FaultyStore(MemoryStore(), runtime, FaultPlan(**plan), seed=seed)


def test_a_store_without_a_plan_neither_fails_nor_takes_time(runtime: ManualRuntime) -> None:
    store = FaultyStore(MemoryStore("x"), runtime)
    outcome = store.put_if("m", b"1", None)
    assert isinstance(outcome, outcomes.Applied)
    assert store.put_if("m", b"2", None) == outcomes.LostRace()
    store.put("a", b"1")
    assert len(store.list("").objects) == 2
    assert store.delete_many(["m", "a"]) == ()
    assert store.put_if("m", b"2", outcome.value) == outcomes.Vanished()
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
    assert isinstance(store.put_if("m", b"1", None), outcomes.Unknown)
    assert bytes_in(store, "m") == b"1"
    for condition in (None, "0"):
        assert isinstance(store.put_if("m", b"2", condition), outcomes.Unknown)
    assert bytes_in(store, "m") == b"1"
    assert store.faults == {"cas_lost_after": 3}


def test_a_lost_request_is_unknown_and_never_applied(runtime: ManualRuntime) -> None:
    store = faulty(runtime, cas_lost_before=1)
    assert isinstance(store.put_if("m", b"1", None), outcomes.Unknown)
    assert bytes_in(store, "m") is None


def test_failures_are_transient_and_half_of_the_failing_puts_are_applied(
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


def test_failing_deletes_are_returned_and_half_of_them_are_applied(runtime: ManualRuntime) -> None:
    store = faulty(runtime, delete_errors=0.5)
    keys = [f"a/{number}" for number in range(200)]
    for key in keys:
        store.put(key, b"")
    failed = {failure.key for failure in store.delete_many(keys)}
    left = {info.key for info in store.list("").objects}
    assert left < failed
    assert 70 < len(failed) < 130
    assert 30 < len(left) < 70


def test_half_of_the_latency_is_before_and_half_after_the_effect_with_jitter(
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
    store.put_if("m", b"", None)
    store.list("")
    store.delete_many(["a"])
    assert runtime.slept == pytest.approx(
        [0.05, 0.05, 0.03, 0.03, 0.04, 0.04, 0.02, 0.02, 0.01, 0.01]
    )


def test_equal_seeds_cause_equal_failures(runtime: ManualRuntime) -> None:
    def history(seed: int) -> list[object]:
        store = faulty(runtime, seed, cas_lost_after=0.3, cas_lost_before=0.3)
        return [
            (type(store.put_if("m", b"", None)), bytes_in(store, "m") is None) for _ in range(100)
        ]

    assert history(1) == history(1)
    assert history(1) != history(2)


@pytest.mark.parametrize("plan", [{"get_errors": 1.1}, {"put_errors": -0.1}, {"put_ms": -1}])
def test_invalid_plans_are_refused(plan: dict[str, Any]) -> None:
    (name,) = plan
    with pytest.raises(InvalidInput, match=name):
        FaultPlan(**plan)
