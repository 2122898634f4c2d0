"""The simulation itself: one history per seed, virtual time, kills and pauses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.simulation import SimRuntime, Simulation, SimulationFailed
from tests.unit.testing.simulated import simulate


def race(seed: int) -> tuple[list[str], str]:
    """Three threads over one lock; who comes when is up to the seed."""
    simulation = Simulation(seed)
    runtime = simulation.process("p")
    seen: list[str] = []

    def main() -> None:
        condition = runtime.condition()

        def work(name: str) -> Callable[[], None]:
            def body() -> None:
                for step in range(5):
                    with condition:
                        seen.append(f"{name}{step}")
                    runtime.sleep(0.001 * int(runtime.random() * 3))
                    simulation.log(f"{name} {runtime.ulid()}")

            return body

        for task in [runtime.spawn(work(name), name) for name in "abc"]:
            task.join()

    simulation.run(main)
    return seen, simulation.digest


def test_same_seed_gives_same_history() -> None:
    assert race(7) == race(7)


def test_killed_process_does_nothing_any_more() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
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

    simulate(main)


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


def test_paused_process_stands_still_while_clocks_go_on() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        frozen = simulation.process("frozen")
        woke: list[float] = []

        def body() -> None:
            frozen.sleep(1)
            woke.append(frozen.monotonic())

        task = frozen.spawn(body, "t")
        runtime.sleep(0.5)
        simulation.pause(frozen, 3600)
        runtime.sleep(2)
        assert woke == []
        task.join()
        assert woke == [3600.5]

    simulate(main)


def test_suspended_process_loses_monotonic_time_and_no_wall_time() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
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

    simulate(main)


def test_deadlock_is_reported_with_who_waits_for_what() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        condition = runtime.condition()
        with condition:
            condition.wait()

    with pytest.raises(
        SimulationFailed, match="everybody waits for ever: main waits for a notification"
    ):
        simulate(lambda simulation, runtime: main(simulation, runtime))


def test_endless_run_is_reported() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        while True:
            runtime.sleep(0)

    with pytest.raises(SimulationFailed, match="no end after 20000 steps"):
        simulate(main)


def test_thread_that_dies_of_an_error_fails_the_run() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        def body() -> None:
            raise ValueError("boom")

        runtime.spawn(body, "t").join()
        runtime.sleep(1)

    with pytest.raises(SimulationFailed, match=r"seed 1, after 0\.000 virtual seconds: boom"):
        simulate(main)


def test_broken_rule_ends_the_run_whatever_is_caught() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        try:
            simulation.fail("rule 1 broken")
        except Exception:
            pytest.fail("swallowed")

    with pytest.raises(SimulationFailed, match="rule 1 broken"):
        simulate(main)
