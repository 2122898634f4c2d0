"""What code sees of a simulation: virtual clocks, threads and locks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.support.simulation import SimRuntime, Simulation
from tests.unit.testing.simulated import simulate


@pytest.mark.parametrize("how", ["sleep", "wait"])
def test_waiting_for_the_last_moment_ends(how: str) -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        condition = runtime.condition()
        runtime.sleep(340.7)
        due = math.nextafter(runtime.monotonic(), math.inf)
        while (left := due - runtime.monotonic()) > 0:
            if how == "sleep":
                runtime.sleep(left)
            else:
                with condition:
                    condition.wait(left)

    simulate(main)


def test_wait_ends_by_notification_or_by_time() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        condition = runtime.condition()
        results: list[tuple[bool, float]] = []

        def wait(timeout: float | None) -> Callable[[], None]:
            def body() -> None:
                with condition:
                    results.append((condition.wait(timeout), runtime.monotonic()))

            return body

        tasks = [runtime.spawn(wait(timeout), "w") for timeout in (None, 5.0, 1.0)]
        runtime.sleep(2.0)
        with condition:
            condition.notify_all()
        for task in tasks:
            task.join()
        assert sorted(results) == [(False, 1.0), (True, 2.0), (True, 2.0)]

    simulate(main)


def test_lock_is_exclusive_and_reentrant() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        condition = runtime.condition()
        inside: list[int] = []

        def body() -> None:
            with condition, condition:
                inside.append(1)
                assert len(inside) == 1
                runtime.sleep(0.1)
                inside.pop()

        for task in [runtime.spawn(body, "t") for _ in range(5)]:
            task.join()
        assert runtime.monotonic() == pytest.approx(0.5, abs=1e-3)

    simulate(main)


def test_an_interrupted_wait_has_its_lock_back_first() -> None:
    def main(simulation: Simulation, runtime: SimRuntime) -> None:
        condition = runtime.condition()
        freed: list[float] = []

        def waits() -> None:
            with condition:
                try:
                    condition.wait()
                except KeyboardInterrupt:
                    freed.append(runtime.monotonic())
                    condition.notify_all()  # refused to whoever does not hold it

        task = runtime.spawn(waits, "waits")
        runtime.sleep(1)
        with condition:
            simulation.interrupt(task)
            runtime.sleep(5)
        task.join()
        assert freed == [6]

    simulate(main)
