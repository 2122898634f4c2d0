"""The system runtime, deadlines, moments, and the manual clock."""

from __future__ import annotations

import os
import time

import pytest

from opendata_buffer.formats.batch import ulid_timestamp_ms
from opendata_buffer.runtime import Moment, SystemRuntime, deadline, remaining
from opendata_buffer.testing.runtime import ManualRuntime


def test_the_clocks_are_those_of_the_system_and_a_ulid_has_the_time() -> None:
    runtime = SystemRuntime()
    before = runtime.now_ms()
    assert abs(before - time.time() * 1000) < 60_000
    earlier = runtime.monotonic()
    runtime.sleep(0.001)
    assert runtime.monotonic() > earlier
    assert 0 <= runtime.random() < 1
    ulids = {runtime.ulid() for _ in range(10_000)}
    assert len(ulids) == 10_000
    assert all(before <= ulid_timestamp_ms(ulid) <= runtime.now_ms() for ulid in ulids)


def test_forked_processes_draw_different_ulids() -> None:
    """Equal names would overwrite each other's batch, and forks share the state of `random`."""
    runtime = SystemRuntime()
    read, write = os.pipe()
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            os.write(write, "".join(runtime.ulid()[10:] for _ in range(50)).encode())
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    os.close(write)
    text = b""
    while chunk := os.read(read, 65_536):
        text += chunk
    tails = [text[i : i + 16] for i in range(0, len(text), 16)]
    assert len(set(tails)) == len(tails) == 200


def test_moments_are_compared_by_both_clocks() -> None:
    runtime = ManualRuntime(now_ms=1_000_000)
    since = Moment.now(runtime)
    assert since.precedes(Moment.now(runtime))
    assert since.age_ms(Moment.now(runtime)) == 0
    runtime.advance(2.5)
    assert since.age_ms(Moment.now(runtime)) == 2_500
    runtime.set_wall_clock(1_060_000)
    assert since.age_ms(Moment.now(runtime)) == 60_000
    runtime.set_wall_clock(900_000)
    assert not since.precedes(Moment.now(runtime))
    assert not Moment(0, 10.0).precedes(Moment(1_000, 2.0))


def test_the_nearest_deadline_applies(runtime: ManualRuntime) -> None:
    assert remaining() is None
    with deadline(runtime, 10):
        runtime.advance(2)
        assert remaining() == 8
        with deadline(runtime, 3):
            assert remaining() == 3
        with deadline(runtime, 300):
            runtime.advance(9)
            assert remaining() == -1
        assert remaining() == -1
    assert remaining() is None


def test_a_thread_begins_without_a_deadline(runtime: ManualRuntime) -> None:
    seen: list[float | None] = []
    with deadline(runtime, 10):
        SystemRuntime().spawn(lambda: seen.append(remaining()), "test").join(30)
    assert seen == [None]


def test_sleep_moves_both_clocks_and_returns() -> None:
    runtime = ManualRuntime(now_ms=1_000)
    runtime.sleep(2.5)
    assert (runtime.now_ms(), runtime.monotonic(), runtime.slept) == (3_500, 2.5, [2.5])


def test_a_wall_clock_jump_does_not_move_the_monotonic_clock() -> None:
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
def test_a_timed_wait_ends_when_notified_or_at_its_time(notified: bool) -> None:
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


def test_waits_that_do_not_happen_are_an_error() -> None:
    with pytest.raises(TimeoutError, match="0 of 1 waits"):
        ManualRuntime().await_waits(1, timeout=0.01)
