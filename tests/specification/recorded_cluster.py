"""A simulated cluster that is recorded, for the traces of a collector and of a log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from tests.simulation.cluster import Cluster, Node
from tests.specification.traces import Recorder

LOST = ("cas_lost_before", "cas_lost_after", "cas_late")


class RecordedCluster(Cluster):
    """A cluster that records its processes. TLC checks its promises, so the model only logs."""

    def __init__(self, seed: int, *arguments: Any) -> None:
        super().__init__(seed, *arguments)
        self.recorder = Recorder(self.simulation)
        self.fail = self.model._fail = self._log_failure  # type: ignore[assignment]
        self.grace_s = 60.0

    def _log_failure(self, reason: object) -> None:
        self.log(f"the model says: {reason}")

    def _clock_error_ms(self) -> int:
        return 0

    def node(self, name: str) -> Node:
        node = super().node(name)
        self.recorder.watch(node.store, node.name)
        return node

    def consumer_config(self) -> ConsumerConfig:
        # The specification has one collector, so it runs in its own process.
        off = GarbageCollectorConfig(enabled=False, grace_period_ms=int(self.grace_s * 1000))
        return replace(super().consumer_config(), gc=off)
