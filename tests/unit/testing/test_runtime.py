"""The manual clock: nothing moves unless told to."""

from __future__ import annotations

import pytest

from opendata_buffer.formats.keys import ulid_timestamp_ms
from opendata_buffer.testing.runtime import ManualRuntime


def test_sleep_moves_both_clocks_and_returns() -> None:
    runtime = ManualRuntime(now_ms=1_000)
    runtime.sleep(2.5)
    assert (runtime.now_ms(), runtime.monotonic(), runtime.slept) == (3_500, 2.5, [2.5])


def test_a_wall_clock_jump_leaves_the_monotonic_clock() -> None:
    runtime = ManualRuntime(now_ms=1_000)
    runtime.advance(1)
    runtime.set_wall_clock(500)
    assert (runtime.now_ms(), runtime.monotonic()) == (500, 1.0)


def test_a_seed_repeats_ulids_and_jitter() -> None:
    one, two = ManualRuntime(seed=7), ManualRuntime(seed=7)
    assert [one.ulid(), one.random()] == [two.ulid(), two.random()]
    assert ulid_timestamp_ms(one.ulid()) == one.now_ms()
    assert ManualRuntime(seed=8).ulid() != ManualRuntime(seed=9).ulid()


@pytest.mark.parametrize("notified", [True, False])
def test_a_timed_wait_ends_when_notified_or_when_the_clock_says_so(notified: bool) -> None:
    runtime = ManualRuntime()
    condition = runtime.condition()
    outcome: list[bool] = []

    def wait() -> None:
        with condition:
            outcome.append(condition.wait(10))

    task = runtime.spawn(wait, "waiter")
    runtime.await_waits(1)
    runtime.advance(9.9)
    assert task.is_alive()
    if notified:
        with condition:
            condition.notify_all()
    else:
        runtime.advance(0.1)
    task.join(30)
    assert outcome == [notified]


def test_waits_that_do_not_come_are_an_error() -> None:
    with pytest.raises(TimeoutError, match="0 of 1 waits"):
        ManualRuntime().await_waits(1, timeout=0.01)
