"""How often something is tried."""

from __future__ import annotations

import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import PermanentStorageError, TransientStorageError
from opendata_buffer.runtime import deadline
from opendata_buffer.stores.http import repeated, with_pause
from opendata_buffer.testing.runtime import ManualRuntime


def test_what_succeeds_is_done_once(runtime: ManualRuntime) -> None:
    calls: list[int] = []
    assert repeated(runtime, StoreOptions(), lambda: calls.append(1) or 5) == 5
    assert calls == [1]
    assert runtime.monotonic() == 0


def test_the_last_attempts_error_is_raised(runtime: ManualRuntime) -> None:
    errors = [TransientStorageError(str(number)) for number in range(9)]

    def fail() -> None:
        raise errors.pop(0)

    with pytest.raises(TransientStorageError, match=r"^3$"):
        repeated(runtime, StoreOptions(max_attempts=4), fail)
    assert len(errors) == 5
    assert runtime.monotonic() > 0, "it backs off"


def test_what_is_not_transient_is_raised_at_once(runtime: ManualRuntime) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise PermanentStorageError("no")

    with pytest.raises(PermanentStorageError):
        repeated(runtime, StoreOptions(), fail)
    assert calls == [1]


def test_no_attempt_begins_after_the_callers_deadline(runtime: ManualRuntime) -> None:
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        runtime.advance(1)
        raise TransientStorageError("slow")

    with deadline(runtime, 0.5), pytest.raises(TransientStorageError, match="slow"):
        repeated(runtime, StoreOptions(), fail)
    assert calls == [1]


def told(seconds: str) -> TransientStorageError:
    error = with_pause(TransientStorageError("503"), {"retry-after": seconds})
    assert isinstance(error, TransientStorageError)
    return error


def test_an_answer_may_ask_for_a_pause_in_seconds() -> None:
    assert told("17").retry_after_s == 17
    for other in ("", "-1", "1e9", "soon", "9" * 5_000, "Thu, 01 Jan 2026 00:00:10 GMT"):
        assert told(other).retry_after_s is None
    assert not hasattr(
        with_pause(PermanentStorageError("403"), {"retry-after": "1"}), "retry_after_s"
    )


@pytest.mark.parametrize(("asked", "waits"), [("7", 7), ("999999999", 30)])
def test_it_waits_as_long_as_it_is_asked_to_but_no_longer_than_an_attempt_may_take(
    runtime: ManualRuntime, asked: str, waits: int
) -> None:
    failures = [told(asked)] * 3

    def busy() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert repeated(runtime, StoreOptions(), busy) == "done"
    assert [waits <= each <= waits + 1 for each in runtime.slept] == [True] * 3


def test_no_pause_outlives_the_callers_deadline(runtime: ManualRuntime) -> None:
    def busy() -> None:
        raise told("5")

    with deadline(runtime, 3), pytest.raises(TransientStorageError, match="503"):
        repeated(runtime, StoreOptions(), busy)
    assert runtime.monotonic() < 3
