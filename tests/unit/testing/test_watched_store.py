"""One process's way to a simulation's store."""

from __future__ import annotations

import pytest

from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.stores.base import ABSENT
from opendata_buffer.stores.memory import MemoryStore
from tests.support.model import DeliveryModel, WatchedStore
from tests.support.simulation import Simulation, SimulationFailed

A = "ingest/01JMTRJ8G00000000000000000.batch"
B = "ingest/01JMTRJ8G00000000000000001.batch"


def watched(model_of: dict[str, DeliveryModel], simulation: Simulation) -> WatchedStore:
    model = model_of["model"] = DeliveryModel(simulation.fail, "ingest", "ingest/manifest")
    return WatchedStore(MemoryStore(now_ms=simulation.now_ms), simulation, model, "p")


def test_the_model_is_told_every_change() -> None:
    simulation = Simulation(1)
    models: dict[str, DeliveryModel] = {}

    def main() -> None:
        store = watched(models, simulation)
        store.put(A, encode_batch([b"p:0"]))
        manifest = Manifest.empty().append([NewEntry(A)])
        store.put_if("ingest/manifest", manifest.raw, ABSENT)
        assert models["model"].sequences == {A: 0}
        assert [info.key for info in store.list("").objects] == [A, "ingest/manifest"]
        assert store.delete_many([B]) == ()
        assert models["model"].lost == {B}

    simulation.run(main)


def test_a_killed_process_changes_nothing() -> None:
    simulation = Simulation(1)
    models: dict[str, DeliveryModel] = {}

    def main() -> None:
        victim = simulation.process("victim")
        store = watched(models, simulation)

        def body() -> None:
            simulation.kill(victim)
            store.put(A, encode_batch([b"p:0"]))

        victim.spawn(body, "t").join()
        assert store.list("").objects == ()

    simulation.run(main)


def test_broken_rule_ends_the_simulation() -> None:
    simulation = Simulation(1)
    models: dict[str, DeliveryModel] = {}

    def main() -> None:
        watched(models, simulation).put_if("ingest/manifest", b"nonsense", ABSENT)

    with pytest.raises(SimulationFailed, match="illegal manifest"):
        simulation.run(main)
