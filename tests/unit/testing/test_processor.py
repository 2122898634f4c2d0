"""One processor for threads that take turns."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from tests.support.simulation import Simulation, on_one_processor

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")


@linux
def test_the_thread_and_those_it_starts_stay_on_one_processor_until_the_block_ends() -> None:
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []
    with on_one_processor():
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert seen == [os.sched_getaffinity(0)]
        assert len(seen[0]) == 1
        assert seen[0] <= before
    assert os.sched_getaffinity(0) == before


@linux
def test_all_threads_of_a_simulation_share_a_processor() -> None:
    simulation = Simulation(seed=1)
    runtime = simulation.process("one")
    seen: list[frozenset[int]] = []

    def look() -> None:
        seen.append(frozenset(os.sched_getaffinity(0)))

    def main() -> None:
        look()
        tasks = [runtime.spawn(look, f"thread {number}") for number in range(3)]
        for task in tasks:
            task.join()

    before = os.sched_getaffinity(0)
    simulation.run(main)
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert len(seen[0]) == 1
    assert os.sched_getaffinity(0) == before


def test_a_system_that_cannot_do_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    ran = False
    with on_one_processor():
        ran = True
    assert ran
