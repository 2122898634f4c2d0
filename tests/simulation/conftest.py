"""Choose the seeds that a simulation runs.

* ``OPENDATA_BUFFER_SEEDS=5000`` runs the seeds below 5,000, and ``=5000-9000`` those from there.
* ``OPENDATA_BUFFER_SEED=123`` runs one seed again.
* By default the delivery scenario runs 24 seeds. Each other scenario runs a share of them:
  ``SHARE`` of its module, or the argument of ``pytest.mark.seeds``, which can also set the default
  number. ``./run test`` runs a quarter of them, and ``./run test --full`` the others.
* ``./run test --nightly`` runs 2,000.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

SEEDS = "OPENDATA_BUFFER_SEEDS"
SEED = "OPENDATA_BUFFER_SEED"
DEFAULT = 24


def seeds(share: float, default: int | None = None) -> range:
    """Return the seeds of a scenario: its share of them, or ``default`` if no variable is set."""
    if one := os.environ.get(SEED):
        return range(int(one), int(one) + 1)
    named = os.environ.get(SEEDS)
    if named is None:
        return range(max(1, round(DEFAULT * share)) if default is None else default)
    first, _, end = named.rpartition("-")
    start = int(first or 0)
    return range(start, start + max(1, round((int(end) - start) * share)))


def divided(parameters: Sequence[Any]) -> list[Any]:
    """Mark three of every four parameters ``full``."""
    return [
        pytest.param(value, marks=pytest.mark.full) if index % 4 else value
        for index, value in enumerate(parameters)
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("seeds")
        given = mark.args if mark else (getattr(metafunc.module, "SHARE", 1.0),)
        metafunc.parametrize("seed", divided(seeds(*given)))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disable logging: the simulation's history replaces the log, and formatting takes time."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
