"""One seed is one history: in this process, and in another one with other string hashes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.scenario import simulate
from tests.simulation.test_delivery import deliver

DIGEST = """
from tests.simulation.scenario import simulate
from tests.simulation.test_delivery import deliver
print(simulate({seed}, deliver).simulation.digest)
"""


@pytest.mark.parametrize("number", [0, 1, 2])
def test_same_seed_gives_same_history(number: int) -> None:
    first, second = (simulate(number, deliver) for _ in range(2))
    assert first.simulation.history == second.simulation.history
    assert first.simulation.digest == second.simulation.digest


def test_seeds_give_different_histories() -> None:
    digests = {simulate(number, deliver).simulation.digest for number in (3, 4)}
    assert len(digests) == 2


def test_history_does_not_depend_on_string_hashes() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST.format(seed=5)],
            env={**os.environ, "PYTHONHASHSEED": salt},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(digests) == 1
