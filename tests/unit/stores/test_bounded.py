"""Calls that end in time, and calls that do not."""

from __future__ import annotations

import threading
import time
from http.client import BadStatusLine

import pytest

from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.runtime import SystemRuntime, deadline, remaining
from opendata_buffer.stores.http import DeadlinePassed, bounded, in_time
from opendata_buffer.testing.runtime import ManualRuntime

SYSTEM = SystemRuntime()


def test_without_a_deadline_a_call_runs_in_the_callers_thread() -> None:
    assert bounded(SYSTEM, threading.get_ident) == threading.get_ident()


def test_what_a_call_returns_or_raises_reaches_its_caller() -> None:
    def fail() -> None:
        raise KeyError("x")

    with deadline(SYSTEM, 30):
        assert bounded(SYSTEM, lambda: [1, 2]) == [1, 2]
        assert bounded(SYSTEM, lambda: None) is None
        with pytest.raises(KeyError):
            bounded(SYSTEM, fail)


def test_a_call_that_never_ends_is_left_behind_at_the_deadline() -> None:
    never = threading.Event()
    seen: list[float | None] = []

    def hang() -> None:
        never.wait(300)
        seen.append(remaining())

    started = time.monotonic()
    with deadline(SYSTEM, 0.2), pytest.raises(DeadlinePassed):
        bounded(SYSTEM, hang)
    assert time.monotonic() - started >= 0.2
    assert seen == [], "it goes on"
    never.set()
    while not seen:
        time.sleep(0.01)
    (left,) = seen
    assert left is not None
    assert left <= 0, "the call that was left behind sees that it was"


def test_a_call_is_not_begun_when_no_time_is_left(runtime: ManualRuntime) -> None:
    called: list[int] = []
    with deadline(runtime, 1):
        runtime.advance(1)
        with pytest.raises(DeadlinePassed):
            bounded(runtime, lambda: called.append(1))
    assert called == []


def test_what_does_not_end_in_time_is_an_error_that_says_what_was_asked() -> None:
    runtime = ManualRuntime()
    with (
        deadline(runtime, 0),
        pytest.raises(TransientStorageError, match=r"cannot read 'k' in bucket 'b': no answer"),
    ):
        in_time(runtime, lambda: 1, verb="read", key="k", where=lambda: "bucket 'b'")
    assert in_time(runtime, lambda: 1, verb="read", key="k", where=lambda: "") == 1


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'NoneType' object has no attribute 'items'"),
        BadStatusLine("garbage"),
        KeyError("Size"),
        TypeError("'int' object is not iterable"),
        ValueError("Invalid timestamp at http://me:hunter2@host"),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error_that_says_what_was_asked(
    runtime: ManualRuntime, error: Exception
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(TransientStorageError) as caught:
        in_time(runtime, fail, verb="list", key="k", where=lambda: "bucket 'b'")
    text = str(caught.value)
    assert text.startswith("cannot list 'k' in bucket 'b': the answer makes no sense")
    assert type(error).__name__ in text
    assert "hunter2" not in text
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [InvalidInput("a key"), OSError("a socket"), ZeroDivisionError()])
def test_other_errors_are_passed_on(runtime: ManualRuntime, error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        in_time(runtime, fail, verb="list", key="k", where=lambda: "")
    assert caught.value is error
