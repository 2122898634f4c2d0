"""Which seeds run, and how to run one again.

``OPENDATA_BUFFER_SEEDS=5000`` runs the seeds below 5,000, ``=5000-9000`` those from 5,000 on;
``OPENDATA_BUFFER_SEED=123`` runs that one. The default is 24 for the delivery scenario, and a
share of that for each of the others (``SHARE`` of its module, or ``pytest.mark.seeds``, which may
say how many, too): what takes two minutes. ``./run test --nightly`` runs 2,000.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

SEEDS = "OPENDATA_BUFFER_SEEDS"
SEED = "OPENDATA_BUFFER_SEED"
DEFAULT = 24


def seeds(share: float, default: int | None = None) -> range:
    """The seeds of a scenario that takes this share of them, or so many where none are named."""
    if one := os.environ.get(SEED):
        return range(int(one), int(one) + 1)
    named = os.environ.get(SEEDS)
    if named is None:
        return range(max(1, round(DEFAULT * share)) if default is None else default)
    first, _, end = named.rpartition("-")
    start = int(first or 0)
    return range(start, start + max(1, round((int(end) - start) * share)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("seeds")
        given = mark.args if mark else (getattr(metafunc.module, "SHARE", 1.0),)
        metafunc.parametrize("seed", seeds(*given))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A run's own history tells it; a log of thousands of faults is formatted for nobody."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
