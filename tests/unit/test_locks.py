from __future__ import annotations

import threading

import pytest

from opendata_buffer.concurrency import locked
from opendata_buffer.runtime import SystemRuntime
from tests.support.simulation import Simulation
from tests.unit.interrupts import interrupted

WAIT_S = 60.0


class Counter:
    def __init__(self) -> None:
        self._condition = SystemRuntime().condition()
        self.value = 0

    @locked
    def add(self, amount: int = 1) -> int:
        assert self._condition.held()
        self.value += amount
        self._condition.wait(0.001)
        return self.value

    @locked
    def add_twice(self) -> None:
        self.add()

    def is_free(self) -> bool:
        """Whether another thread gets the lock."""
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(self.add(0)), daemon=True)
        thread.start()
        thread.join(WAIT_S)
        return bool(found)


@pytest.mark.parametrize("opcodes", [False, True], ids=["lines", "opcodes"])
def test_an_interrupt_at_any_step_leaves_the_lock_free(opcodes: bool) -> None:
    counter = Counter()
    step = 1
    while interrupted(counter.add, step, opcodes=opcodes):
        assert not counter._condition.held(), f"step {step}"
        step += 1
    assert counter.is_free()
    assert step > 20


def test_an_error_of_the_method_is_raised_and_the_lock_is_free() -> None:
    counter = Counter()
    with pytest.raises(TypeError):
        counter.add("one")  # type: ignore[arg-type]
    assert counter.is_free()


def test_a_call_in_the_middle_of_another_one_is_refused_and_does_no_harm() -> None:
    counter = Counter()
    with pytest.raises(RuntimeError, match=r"Counter.add was called in the middle of another"):
        counter.add_twice()
    assert counter.value == 0
    assert counter.is_free()


def test_simulated_locks_are_given_back_too() -> None:
    simulation = Simulation(seed=1)
    runtime = simulation.process("one")
    counter = Counter()
    counter._condition = runtime.condition()
    free: list[bool] = []

    def main() -> None:
        counter.add()
        free.append(not counter._condition.held())

    simulation.run(main)
    assert free == [True]
