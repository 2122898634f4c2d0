"""One caller at a time."""

from __future__ import annotations

import pytest

from opendata_buffer.topic.publisher import FairLock
from tests.support.simulation import SimRuntime, SimTask, Simulation


class Calls:
    """Three that want the turn at once, each for a second."""

    def __init__(self, runtime: SimRuntime) -> None:
        self.turns = FairLock(runtime)
        self.runtime = runtime
        self.inside = 0
        self.done: list[int] = []
        self.broken: list[int] = []
        self.tasks: list[SimTask] = []

    def call(self, number: int) -> None:
        try:
            with self.turns.taken():
                self.inside += 1
                assert self.inside == 1
                self.runtime.sleep(1)
                self.inside -= 1
                self.done.append(number)
        except KeyboardInterrupt:
            self.broken.append(number)

    def start(self) -> None:
        self.tasks = [self.runtime.spawn(lambda n=n: self.call(n), "call") for n in range(3)]  # type: ignore[misc]

    def finish(self) -> None:
        for task in self.tasks:
            task.join()


@pytest.mark.parametrize("seed", range(5))
def test_calls_follow_each_other(seed: int) -> None:
    simulation = Simulation(seed)

    def main() -> None:
        calls = Calls(simulation.process("one"))
        calls.start()
        calls.finish()
        assert sorted(calls.done) == [0, 1, 2]
        assert simulation.now == pytest.approx(3, abs=0.01)

    simulation.run(main)


@pytest.mark.parametrize("seed", range(5))
def test_who_is_interrupted_while_it_waits_leaves_the_turn_to_the_others(seed: int) -> None:
    simulation = Simulation(seed)

    def main() -> None:
        process = simulation.process("one")
        calls = Calls(process)
        calls.start()
        process.sleep(0.5)
        waiting = [task for task in calls.tasks if "notification" in task.waits_for]
        assert len(waiting) == 2
        simulation.interrupt(waiting[0])
        calls.finish()
        assert len(calls.done) == 2
        assert len(calls.broken) == 1

    simulation.run(main)


def test_a_call_that_fails_gives_its_turn_back() -> None:
    simulation = Simulation(1)

    def main() -> None:
        turns = FairLock(simulation.process("one"))
        with pytest.raises(ValueError, match="wrong"), turns.taken():
            raise ValueError("wrong")
        with turns.taken():
            pass

    simulation.run(main)
