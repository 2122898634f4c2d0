"""Simulate one combination of features, or check that the code refuses it.

A pair of features can fail although each of them works alone. :func:`simulate` builds a deployment
with all features of a combination, plays one history with faults, and lets the oracle check every
promise. It also fails if a feature never acted, because the history then proves nothing about it,
or if an object is left that no program needs. :func:`refuse` tries a pair that the code must
refuse, and checks the error.

The command line plays one history again, and prints all of it if it fails::

    python -m tests.simulation.combinations 7 log expand        # seed 7
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from opendata_buffer.errors import InvalidInput
from tests.simulation.deployment import Deployment, Node, small_logs
from tests.simulation.features import FEATURES, build, prepare, refusal_of, with_needs
from tests.simulation.orphans import look
from tests.support.simulation import SimulationFailed


def simulate(seed: int, names: Sequence[str], deployment: Deployment | None = None) -> Deployment:
    """Play one history.

    Returns:
        The deployment after its history.

    Raises:
        SimulationFailed: A promise was broken, a feature did not act, or an orphan is left.
    """
    deployment = deployment or Deployment(seed)

    def main() -> None:
        build(deployment, names)
        deployment.run()
        for name in with_needs(names):
            instances = [*names].count(name) if FEATURES[name].twice else 1
            if deployment.happened[name] < max(1, instances):
                deployment.fail(f"{name!r} did not happen: the history tests nothing of it")
        deployment.left, orphans = look(deployment)
        if orphans:
            deployment.fail(f"nothing needs {orphans}, and nothing deletes it")

    with small_logs(), deployment.simulated_network():
        deployment.simulation.run(main)
    return deployment


def refuse(names: Sequence[str]) -> str:
    """Try a refused combination in an otherwise complete deployment.

    Returns:
        The text of the error.
    """
    refusal = refusal_of(names)
    assert refusal is not None
    deployment = Deployment(0)
    found: list[str] = []

    def attempt(node: Node) -> None:
        try:
            refusal.attempt(deployment, node)
        except InvalidInput as error:
            found.append(str(error))

    def main() -> None:
        rest = with_needs([refusal.present])
        prepare(deployment, rest)
        deployment.create()
        deployment.operate(attempt, crashes=False)

    with small_logs(), deployment.simulated_network():
        deployment.simulation.run(main)
    if not found:
        raise AssertionError(f"{refusal.tried!r} is possible with {refusal.present!r}")
    if refusal.says not in found[0]:
        raise AssertionError(f"the error says {found[0]!r} instead of {refusal.says!r}")
    return found[0]


def replay(seed: int, names: Sequence[str]) -> str:
    """Return the command that plays a history again."""
    words = " ".join(f"'{name}'" if " " in name else name for name in names)
    return f"python -m tests.simulation.combinations {seed} {words}"


def main() -> int:
    """Play one history, and print all of it if it fails."""
    logging.disable(logging.CRITICAL)
    seed, names = int(sys.argv[1]), sys.argv[2:]
    began = time.process_time()
    deployment = Deployment(seed, shown=None)
    try:
        simulate(seed, names, deployment)
    except SimulationFailed as error:
        print(*deployment.simulation.history, sep="\n")
        print(error)
        return 1
    print(dict(deployment.happened), dict(deployment.faults), dict(deployment.left))
    print(f"{deployment.simulation.now:.0f} virtual s, {time.process_time() - began:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
