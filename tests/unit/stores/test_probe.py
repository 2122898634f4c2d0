"""The probe of conditional writes, on stores that break one rule each (failure F12)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.errors import PermanentStorageError, TransientStorageError, UnsafeStore
from opendata_buffer.stores.base import Blob, DeleteFailure, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.probe import check_refusal, probe_conditional_writes
from opendata_buffer.testing.runtime import ManualRuntime
from tests.races import ChecksThenWrites

RACING = 3 * 2 * 6
"""The writes of the races: six writers create and replace each of three objects."""


class Breaking(MemoryStore):
    """Ignores the conditions that ``rule`` names."""

    def __init__(self, rule: str = "") -> None:
        super().__init__()
        self.rule = rule
        self.lost = 0
        self.probed: list[str] = []

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        self.probed.append(key)
        if self.lost:
            self.lost -= 1
            return outcomes.Unknown("no answer")
        exists = bool(self.list(key).objects)
        ignored = {
            "": False,
            "creates on If-Match": condition is not None and not exists,
            "replaces on If-None-Match": condition is None and exists,
            "replaces on another ETag": condition is not None and exists,
            "has weak ETags": False,
        }[self.rule]
        if self.rule == "has weak ETags" and condition is not None and exists:
            return outcomes.LostRace()
        if ignored:
            self.delete_many([key])
            condition = None
        return super().put_if(key, data, condition)


def probe(store: MemoryStore, runtime: ManualRuntime, near: str = "in/m", room: int = 0) -> None:
    probe_conditional_writes(store, near, runtime, name="'x'", room=room, deadline_ms=10_000)


@pytest.mark.parametrize("what", ["created", "replaced"])
def test_a_store_that_checks_and_then_writes_loses_the_race(
    runtime: ManualRuntime, what: str
) -> None:
    store = ChecksThenWrites(6, creating=what == "created")
    with pytest.raises(
        UnsafeStore, match=rf"6 of 6 concurrent writers that they {what} one object"
    ):
        probe(store, runtime)
    assert store.list("").objects == ()


def test_a_race_whose_answers_are_lost_proves_nothing(runtime: ManualRuntime) -> None:
    class Losing(Breaking):
        def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            outcome = super().put_if(key, data, condition)
            return outcome if data == b"probe" else outcomes.Unknown("no answer")

    store = Losing()
    probe(store, runtime)
    assert store.list("").objects == ()


def refusal(store: MemoryStore, runtime: ManualRuntime) -> None:
    check_refusal(store, "in/m", runtime, name="'x'", room=0, deadline_ms=10_000)


def test_one_wrong_write_finds_a_store_that_ignores_conditions(runtime: ManualRuntime) -> None:
    store = Breaking("creates on If-Match")
    with pytest.raises(UnsafeStore, match="If-Match on a missing object with success"):
        refusal(store, runtime)
    assert store.list("").objects == ()


def test_a_sound_store_refuses_the_wrong_write_and_keeps_nothing(runtime: ManualRuntime) -> None:
    class NoDeletes(Breaking):
        def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
            raise AssertionError("there is nothing to delete")

    store = NoDeletes()
    refusal(store, runtime)
    store.lost = 2
    refusal(store, runtime)
    assert len(store.probed) == 1 + 3
    assert store.list("").objects == ()


@pytest.mark.parametrize(
    ("rule", "step"),
    [
        ("creates on If-Match", "answered If-Match on a missing object with success"),
        ("replaces on If-None-Match", r"answered If-None-Match: \* on an existing object with"),
        ("replaces on another ETag", "answered If-Match with another ETag with success"),
        ("has weak ETags", "answered If-Match with the object's ETag with 'precondition failed'"),
    ],
)
def test_the_error_names_each_broken_rule(runtime: ManualRuntime, rule: str, step: str) -> None:
    store = Breaking(rule)
    with pytest.raises(
        UnsafeStore, match=f"store 'x' does not honor conditional writes: it {step}"
    ):
        probe(store, runtime)
    assert store.list("").objects == ()


def test_a_store_whose_reads_have_another_etag_than_its_writes_is_refused(
    runtime: ManualRuntime,
) -> None:
    class Proxied(Breaking):
        def get(self, key: str, **options: Any) -> Blob | None:
            found = super().get(key, **options)
            assert isinstance(found, Blob)
            return replace(found, version=f"{found.version}-gzip")

    store = Proxied()
    told = r"the ETag \d+-gzip when an object is read and \d+ when it was"
    with pytest.raises(UnsafeStore, match=told):
        probe(store, runtime)
    assert store.list("").objects == ()


def test_a_lost_answer_starts_another_round_with_a_new_name(runtime: ManualRuntime) -> None:
    store = Breaking()
    store.lost = 2
    probe(store, runtime)
    assert len(store.probed) == 2 + 5 + RACING
    assert len(set(store.probed)) == 3 + 3


def test_answers_lost_until_the_deadline_are_transient(runtime: ManualRuntime) -> None:
    store = Breaking()
    store.lost = 10**9
    with pytest.raises(TransientStorageError, match="no answer"):
        probe(store, runtime)
    # The longest pause between two rounds is 2 s, and no pause is made right before the deadline.
    assert 8 <= runtime.monotonic() <= 10


def test_the_longest_path_leaves_room_for_the_name_of_a_probe(runtime: ManualRuntime) -> None:
    store = Breaking()
    probe(store, runtime, near="é" * 512, room=24)
    assert {len(key.encode()) + 24 for key in store.probed} <= {1_023, 1_024}


class Keeping(Breaking):
    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        return tuple(DeleteFailure(key, "AccessDenied") for key in keys)


def test_an_unreachable_store_is_reported_once(
    runtime: ManualRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Keeping):
        def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            raise PermanentStorageError("no credentials")

    with pytest.raises(PermanentStorageError):
        probe(Refusing(), runtime)
    silent = Keeping()
    silent.lost = 10**9
    with pytest.raises(TransientStorageError):
        probe(silent, runtime)
    assert caplog.text == ""


def test_a_probe_that_cannot_be_deleted_is_logged(
    runtime: ManualRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        probe(Keeping(), runtime)
    assert "in/m.probe-" in caplog.text
    assert "AccessDenied" in caplog.text
    assert len(caplog.records) == 1
