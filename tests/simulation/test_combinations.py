"""Simulate or refuse every pair of features.

A pair that the code refuses must raise a clear error. Every other pair must keep all promises in a
simulated history. A normal run plays one seed for each pair. ``OPENDATA_BUFFER_SEEDS=2000``, as at
night, plays ten, and all triples. A failure prints the command that plays its history again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.simulation.combinations import refuse, replay, simulate
from tests.simulation.conftest import SEED, SEEDS, divided, seeds
from tests.simulation.coverage import PATH, is_current
from tests.simulation.features import pairs, refusal_of, triples
from tests.support.simulation import SimulationFailed

SHARE = 0.005
"""Share of the seeds that each pair plays."""

SIMULATED = [pair for pair in pairs() if refusal_of(pair) is None]
REFUSED = [pair for pair in pairs() if refusal_of(pair) is not None]
TRIPLES = [triple for triple in triples() if refusal_of(triple) is None]

# A killed consumer leaves a prefetch generator that the interpreter cannot end in the usual way.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def check_history(seed: int, names: tuple[str, ...]) -> None:
    """Play one history. A failure shows its end and the command that plays it again."""
    try:
        simulate(seed, names)
    except SimulationFailed as error:
        pytest.fail(f"{error}\n\n{replay(seed, names)}", pytrace=False)


def seeds_of(pair: tuple[str, ...]) -> list[int]:
    """Return the seeds of a pair.

    A normal run has one, which differs from pair to pair: it chooses between a queue and a topic.
    """
    if os.environ.get(SEED) or os.environ.get(SEEDS):
        return [*seeds(SHARE)]
    return [SIMULATED.index(pair)]


@pytest.mark.parametrize("pair", divided(SIMULATED), ids=" + ".join)
def test_a_pair_of_features_keeps_every_promise(pair: tuple[str, str]) -> None:
    for seed in seeds_of(pair):
        check_history(seed, pair)


@pytest.mark.parametrize("pair", REFUSED, ids=" + ".join)
def test_a_pair_of_features_that_exclude_each_other_is_refused_with_a_reason(
    pair: tuple[str, str],
) -> None:
    assert refuse(pair)


@pytest.mark.seeds(1.2, 1)
def test_three_features_keep_every_promise(seed: int) -> None:
    """Spread the triples over the seeds. A nightly run plays as many triples as it has seeds."""
    check_history(seed, TRIPLES[seed * 997 % len(TRIPLES)])


def test_workers_take_a_queue_back_from_a_v1_consumer_when_their_broker_restarts() -> None:
    """The broker outlives its workers, and stays fenced until its operator restarts it.

    In the histories of these seeds no fault does that.
    """
    restarts = 0
    for seed in (2, 11, 18):
        deployment = simulate(seed, ("workers", "broker", "v1 consumers"))
        restarts += deployment.faults["broker restart"]
    assert restarts > 0


def test_the_table_of_pairs_matches_the_code() -> None:
    assert is_current(Path(PATH).read_text()), "run: python -m tests.simulation.coverage"
