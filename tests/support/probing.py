"""A store in memory that behaves like one in a cloud: it takes time and has to be probed."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.probe import RACES, check_refusal, probe_conditional_writes
from opendata_buffer.stores.probed import CheckedPlaces, Probed
from opendata_buffer.testing.faults import FaultPlan, FaultyStore

S3_STANDARD = FaultPlan(get_ms=60, put_ms=100, cas_ms=100, list_ms=100, delete_ms=100)
"""Durations of requests to S3 Standard."""

PLACE = "https://s3.us-east-1.amazonaws.com/bucket"


class ProbingStore(FaultyStore):
    """One process's client of a place.

    Args:
        inner: The objects.
        runtime: The process.
        plan: How long each request takes.
        place: The endpoint and the bucket.
    """

    def __init__(
        self,
        inner: Store,
        runtime: Runtime,
        plan: FaultPlan = S3_STANDARD,
        *,
        place: str = PLACE,
    ) -> None:
        super().__init__(inner, runtime, plan)
        self.place = place
        self.probes = 0
        """How often this process has made the whole probe."""
        self.refusals = 0
        """How often this process has sent a single wrong write."""
        self._process = runtime
        self._checked = CheckedPlaces()

    @property
    def requests(self) -> int:
        """Number of requests so far."""
        return self.operations.total()

    def check_conditional_writes(
        self, near: str, known: Iterable[Probed] = (), *, trust: bool = True
    ) -> Probed | None:
        return self._checked.check(
            self.place,
            known,
            self._process.now_ms(),
            trust=trust,
            refusal=partial(self._send_wrong_write, near),
            probe=partial(self._probe, near),
        )

    def check_refusal(self, near: str) -> None:
        self._checked.check_refusal(self.place, partial(self._send_wrong_write, near))

    def _send_wrong_write(self, near: str) -> None:
        self.refusals += 1
        check_refusal(self, near, self._process, **self._settings())

    def _probe(self, near: str) -> None:
        self.probes += 1
        probe_conditional_writes(self, near, self._process, races=RACES, **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {"name": repr(self.place), "room": 0, "deadline_ms": 10_000}
