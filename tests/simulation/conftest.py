"""Which seeds run, and how to run one again."""

from __future__ import annotations

import os

import pytest

SEEDS = "OPENDATA_BUFFER_SEEDS"
SEED = "OPENDATA_BUFFER_SEED"


def seeds() -> list[int]:
    """``OPENDATA_BUFFER_SEED=n`` is that one; ``OPENDATA_BUFFER_SEEDS=n`` the first n (200)."""
    if one := os.environ.get(SEED):
        return [int(one)]
    first, _, end = os.environ.get(SEEDS, "200").rpartition("-")
    return list(range(int(first or 0), int(end)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", seeds())
