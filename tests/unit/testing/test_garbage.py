"""Collections of garbage are put off, and come back."""

from __future__ import annotations

import gc

import pytest

from tests.support.simulation import Simulation, no_collections


def test_nothing_is_collected_meanwhile_and_it_goes_on_afterwards_also_after_an_error() -> None:
    assert gc.isenabled()

    def fail() -> None:
        with no_collections():
            assert not gc.isenabled()
            with no_collections():
                pass
            assert not gc.isenabled(), "the inner one does not end the outer one"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert gc.isenabled()


def test_no_finalizer_runs_inside_a_simulation_where_a_cycle_of_garbage_is_left() -> None:
    finalized: list[str] = []
    where = ["before"]

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            finalized.append(where[0])

    def main() -> None:
        where[0] = "inside"
        for _ in range(5_000):
            Cycle()
        where[0] = "after"

    Simulation(1).run(main)
    gc.collect()
    assert finalized == ["after"] * 5_000
