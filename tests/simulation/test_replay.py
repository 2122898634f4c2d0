"""One seed is one history: in this process, and in another one with other string hashes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.simulation.scenario import simulate
from tests.simulation.test_delivery import deliver

DIGEST = """
from tests.simulation.scenario import simulate
from tests.simulation.test_delivery import deliver
print(simulate({seed}, deliver).simulation.digest)
"""


def test_same_seed_gives_same_history() -> None:
    digests = []
    for seed in (0, 1, 2):
        first, second = (simulate(seed, deliver).simulation for _ in range(2))
        assert first.history == second.history
        assert first.digest == second.digest
        digests.append(first.digest)
    assert len(set(digests)) == 3, "another seed, another history"


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
