"""Run the history of one combination of features, and try the combinations that are refused.

::

    python -m tests.simulation.combinations 7 log expand        # seed 7, with the whole history
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
    """Play one history; ``SimulationFailed`` where a promise was broken, where a feature did not
    take part, or where an object is left that nothing needs."""
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
    """Try a combination that is refused, in a deployment with all the rest of it; returns what the
    error says."""
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
        raise AssertionError(f"the error says {found[0]!r}, and not {refusal.says!r}")
    return found[0]


def replay(seed: int, names: Sequence[str]) -> str:
    """The command that plays a history again."""
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
