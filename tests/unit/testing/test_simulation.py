"""The simulation: one history per seed, virtual clocks, threads and locks, kills and pauses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.simulation import SimRuntime, Simulation, SimulationFailed

Main = Callable[[Simulation, SimRuntime], None]


def simulate(main: Main) -> None:
    simulation = Simulation(seed=1, max_steps=20_000)
    runtime = simulation.process("p")
    simulation.run(lambda: main(simulation, runtime))


def run(main: Main) -> Callable[[], None]:
    """A test whose body runs in a simulated process."""
    return lambda: simulate(main)


@run
def test_killed_process_does_nothing_any_more(simulation: Simulation, runtime: SimRuntime) -> None:
    victim = simulation.process("victim")
    done: list[str] = []

    def body() -> None:
        try:
            victim.sleep(1)
            done.append("slept")
        except Exception:
            done.append("caught")
        finally:
            victim.sleep(1)
            done.append("cleaned up")

    task = victim.spawn(body, "t")
    runtime.sleep(0.5)
    simulation.kill(victim)
    task.join()
    assert done == []
    assert not victim.alive


@pytest.mark.parametrize("how", ["sleep", "wait", "lock", "join"])
def test_an_interrupted_thread_leaves_what_it_waits_for_at_once(how: str) -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        condition = runtime.condition()
        seen: list[object] = []

        def hold() -> None:
            with condition:
                runtime.sleep(100)

        def waits() -> None:
            try:
                if how == "sleep":
                    runtime.sleep(1000)
                elif how == "join":
                    holder.join()
                else:
                    with condition:
                        condition.wait()
            except KeyboardInterrupt:
                seen.append(runtime.monotonic())
            # Nothing that it waited for wakes it any more.
            runtime.sleep(500)
            seen.append(runtime.monotonic())

        holder = runtime.spawn(hold if how in ("lock", "join") else lambda: None, "holder")
        runtime.sleep(1)
        task = runtime.spawn(waits, "waits")
        runtime.sleep(1)
        simulation.interrupt(task)
        task.join()
        assert seen == [2, 502]

    simulate(main)


@run
def test_suspended_process_loses_monotonic_time_and_no_wall_time(
    simulation: Simulation, runtime: SimRuntime
) -> None:
    frozen = simulation.process("frozen")
    times: list[tuple[float, int]] = []

    def body() -> None:
        times.append((frozen.monotonic(), frozen.now_ms()))
        simulation.pause(frozen, 100, suspend=True)
        times.append((frozen.monotonic(), frozen.now_ms()))
        simulation.pause(frozen, 10)
        times.append((frozen.monotonic(), frozen.now_ms()))

    frozen.spawn(body, "t").join()
    start_ms = times[0][1]
    assert times == [(0, start_ms), (0, start_ms + 100_000), (10, start_ms + 110_000)]


def deadlocks(simulation: Simulation, runtime: SimRuntime) -> None:
    condition = runtime.condition()
    with condition:
        condition.wait()


def never_ends(simulation: Simulation, runtime: SimRuntime) -> None:
    while True:
        runtime.sleep(0)


def dies_in_a_thread(simulation: Simulation, runtime: SimRuntime) -> None:
    def body() -> None:
        raise ValueError("boom")

    runtime.spawn(body, "t").join()
    runtime.sleep(1)


def breaks_a_rule(simulation: Simulation, runtime: SimRuntime) -> None:
    try:
        simulation.fail("rule 1 broken")
    except Exception:
        pytest.fail("swallowed")


@pytest.mark.parametrize(
    ("main", "says"),
    [
        (deadlocks, "everybody waits for ever: main waits for a notification"),
        (never_ends, "no end after 20000 steps"),
        (dies_in_a_thread, r"seed 1, after 0\.000 virtual seconds: boom"),
        (breaks_a_rule, "rule 1 broken"),
    ],
)
def test_a_run_that_fails_says_why(main: Main, says: str) -> None:
    with pytest.raises(SimulationFailed, match=says):
        simulate(main)
