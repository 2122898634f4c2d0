"""Retries with full jitter within a deadline, on a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.runtime import Retries, deadline
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.tuned import tuned


class Failing:
    """Raises ``error`` for the first ``times`` calls, then returns the number of calls."""

    def __init__(self, times: int, error: type[Exception] = OSError) -> None:
        self.times = times
        self.error = error
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error(f"call {self.calls}")
        return self.calls


def policy(runtime: ManualRuntime, **settings: Any) -> Retries:
    given = {"base_ms": 10, "max_ms": 100, "deadline_ms": 1_000, "retry_on": (OSError,)}
    return Retries(runtime, **{**given, **settings})


class Always(ManualRuntime):
    """Draws the same number each time."""

    def __init__(self, drawn: float) -> None:
        super().__init__()
        self.drawn = drawn

    def random(self) -> float:
        return self.drawn


def test_success_is_not_retried(runtime: ManualRuntime) -> None:
    assert policy(runtime)(sorted, [2, 1, 3], reverse=True) == [3, 2, 1]
    assert runtime.slept == []


def test_f14_steps_double_up_to_the_maximum() -> None:
    runtime = Always(0.5)
    assert policy(runtime)(Failing(6)) == 7
    assert runtime.slept == pytest.approx([0.005, 0.010, 0.020, 0.040, 0.050, 0.050])


def test_sleeps_are_drawn_from_zero_to_the_step(runtime: ManualRuntime) -> None:
    policy(runtime, base_ms=100, max_ms=100, deadline_ms=100_000)(Failing(200))
    assert len(runtime.slept) == 200
    assert 0 <= min(runtime.slept) < 0.01
    assert 0.09 < max(runtime.slept) < 0.1


def test_the_last_attempt_is_made_at_the_deadline_and_its_error_raised() -> None:
    runtime = Always(0.999)
    failing = Failing(10**6)
    with pytest.raises(OSError, match=r"^call 18$"):
        policy(runtime, base_ms=100, max_ms=100, deadline_ms=1_650)(failing)
    assert failing.calls == 18
    assert runtime.monotonic() == pytest.approx(1.65)


def test_neither_a_slow_call_nor_another_error_is_retried(runtime: ManualRuntime) -> None:
    failing = Failing(10**6)

    def slow() -> int:
        runtime.advance(5)
        return failing()

    with pytest.raises(OSError, match=r"^call 1$"):
        policy(runtime)(slow)
    with pytest.raises(KeyError, match="call 1"):
        policy(runtime)(Failing(5, KeyError))
    assert runtime.slept == []


def test_thousands_of_attempts_do_not_overflow() -> None:
    runtime = Always(0.0)
    assert policy(runtime)(Failing(3_000)) == 3_001


def test_a_function_is_called_before_each_pause() -> None:
    runtime = Always(0.5)
    pauses: list[int] = []
    retrying = policy(runtime, before_pause=lambda: pauses.append(len(runtime.slept)))
    assert retrying(Failing(2)) == 3
    assert runtime.slept == pytest.approx([0.005, 0.010])
    with pytest.raises(KeyError):
        retrying(Failing(1, KeyError))
    assert pauses == [0, 1]


def test_the_retry_policy_comes_from_the_settings_of_a_queue() -> None:
    runtime = Always(0.5)
    config = tuned(
        QueueConfig, store="memory://q", backoff_base_ms=100, backoff_max_ms=300, timeout_ms=1_000
    )
    assert config.retries(runtime)(Failing(3, TransientStorageError)) == 4
    assert runtime.slept == pytest.approx([0.05, 0.1, 0.15])
    with pytest.raises(TransientStorageError):
        config.retries(runtime)(Failing(1_000, TransientStorageError))
    began = runtime.monotonic()
    with pytest.raises(OSError, match="call"):
        config.retries(runtime, deadline_ms=200, retry_on=(OSError,))(Failing(1_000))
    assert runtime.monotonic() - began == pytest.approx(0.2)


def test_no_pause_lasts_until_the_callers_deadline() -> None:
    runtime = Always(0.5)
    with deadline(runtime, 0.050), pytest.raises(OSError, match="call 4"):
        policy(runtime)(Failing(1_000))
    # The fourth pause would be 40 ms, but only 15 ms are left.
    assert runtime.slept == pytest.approx([0.005, 0.010, 0.020])


def test_a_requested_pause_replaces_the_backoff() -> None:
    runtime = Always(0.5)
    pauses = iter([0.3, None, 0.2])
    seen: list[BaseException] = []

    def pause(error: BaseException) -> float | None:
        seen.append(error)
        return next(pauses)

    assert policy(runtime, pause=pause)(Failing(3)) == 4
    # The second pause has the second step, whatever came before.
    assert runtime.slept == pytest.approx([0.3, 0.010, 0.2])
    assert [str(error) for error in seen] == ["call 1", "call 2", "call 3"]


def test_a_requested_pause_also_ends_at_the_deadline() -> None:
    runtime = Always(0.5)
    with pytest.raises(OSError, match="call 2"):
        policy(runtime, pause=lambda error: 60.0)(Failing(9))
    assert runtime.slept == pytest.approx([1.0])
