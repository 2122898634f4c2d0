"""A simulated cluster: processes that share one store, faults, and a model of the promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from opendata_buffer import Producer
from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    ProducerConfig,
    StoreOptions,
)
from opendata_buffer.errors import Conflict, TransientStorageError
from opendata_buffer.formats.batch import Compression, parse_location
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.stores.memory import MemoryStore
from tests.support.faults import HarshPlan, HarshStore
from tests.support.model import DeliveryModel, WatchedStore
from tests.support.simulation import SeededChoices, SimRuntime, SimTask, Simulation
from tests.support.tuned import tuned

T = TypeVar("T")

PASSING = (TransientStorageError, Conflict)
"""Errors after which a caller tries again."""

PREFIX = "ingest"
MANIFEST = "ingest/manifest"
MAX_SKEW_MS = 15 * 60 * 1000
DISTURBANCES = ("kill", "short pause", "long pause", "clock", "outage", "outage", "zombie")
DRAIN_S = 6 * 3600.0


@dataclass(frozen=True)
class Node:
    """One process of the cluster and its connection to the store.

    A machine that ``sleeps`` stops the monotonic clock when it is paused. Its wall clock does not
    jump: with both clocks wrong the process cannot find out how much time passed.
    """

    name: str
    runtime: SimRuntime
    store: HarshStore
    sleeps: bool


class Cluster(SeededChoices):
    """A cluster whose every choice comes from the seed.

    Processes suffer ``disturbances`` at random times. ``request_faults`` is the chance that a
    process is paused or killed just when one of its ``faulty_requests`` arrives at the store. Once
    the cluster is ``calm``, faults are healed and no process is killed or paused.
    """

    def __init__(self, seed: int, model: type[DeliveryModel] = DeliveryModel) -> None:
        self.disturbances = DISTURBANCES
        self.request_faults = 0.01
        self.faulty_requests: tuple[str, ...] = ("put", "put_if", "list", "delete")
        self.fault_pause_s: tuple[float, float] | None = None
        """Shortest and longest pause at a request, seconds; default 0 to 2.5 grace periods."""
        self.idle_s = 0.3
        """Longest usual time between two calls of an actor, seconds."""
        self.write_s = 0.0
        """How far in the future a sink dates the names of its batches, seconds."""
        self.simulation = Simulation(seed)
        self.model = model(self.simulation.fail, PREFIX, MANIFEST)
        self.store_skew_ms = 0
        """Error of the store's own clock, milliseconds."""
        self.memory = MemoryStore(
            "simulation", now_ms=lambda: self.simulation.now_ms() + self.store_skew_ms
        )
        self.fail = self.simulation.fail
        self.log = self.simulation.log
        self.calm = False
        self.grace_s = self.uniform(60, 600)
        self.plan = HarshPlan(
            cas_lost_after=self.uniform(0.01, 0.30),
            cas_lost_before=self.uniform(0.01, 0.30),
            cas_late=self.uniform(0.01, 0.30),
            get_errors=self.uniform(0, 0.1),
            put_errors=self.uniform(0, 0.2),
            list_errors=self.uniform(0, 0.2),
            partial_lists=self.uniform(0, 0.3),
            delete_errors=self.uniform(0, 0.3),
            stalls=self.uniform(0, 0.01),
            stall_ms=self.uniform(1_000, 60_000),
            hangs=self.uniform(0, 0.003) if self.chance(0.5) else 0,
            hang_ms=self.uniform(60_000, 600_000),
            wrong_dates=self.uniform(0, 0.5) if self.chance(0.5) else 0,
            date_error_ms=self.draw(2 * MAX_SKEW_MS) - MAX_SKEW_MS,
            get_ms=self.uniform(5, 100),
            put_ms=self.uniform(5, 200),
            cas_ms=self.uniform(5, 100),
            list_ms=self.uniform(5, 100),
            delete_ms=self.uniform(5, 100),
            jitter=0.5,
        )
        self.director = self.simulation.process("director")
        self.happened: Counter[str] = Counter()
        """How often each kind of fault hit a process."""
        self.listed: dict[str, float] = {}
        """When each process last listed the store."""
        self._nodes: list[Node] = []

    # Processes.

    def node(self, name: str) -> Node:
        """Start a process. Half of them have a clock that is up to 15 minutes wrong."""
        skew_ms = self._clock_error_ms() if self.chance(0.5) else 0
        runtime = self.simulation.process(
            f"{name}#{len(self._nodes)}", clock_skew_ms=0 if self.calm else skew_ms
        )
        watched = WatchedStore(
            self.memory,
            self.simulation,
            self.model,
            runtime.name,
            on_access=lambda operation, key: self._disturb_request(node, operation, key),
        )
        store = HarshStore(watched, runtime, self.plan, seed=self.draw(2**32))
        node = Node(runtime.name, runtime, store, self.chance(0.5))
        self._nodes.append(node)
        return node

    def patiently(
        self, node: Node, call: Callable[[], T], failures: tuple[type[Exception], ...] = PASSING
    ) -> T:
        """Repeat a call until it raises none of ``failures``."""
        while True:
            try:
                return call()
            except failures as error:
                self.log(f"{node.name}: {error}")
                node.runtime.sleep(1)

    def work(self, node: Node) -> None:
        """Wait as an actor does between two calls; now and then for a long time."""
        longest = self.idle_s if self.chance(0.95) else self.grace_s / 2
        node.runtime.sleep(self.uniform(0, longest))

    def supervise(
        self,
        name: str,
        live: Callable[[Node], None],
        finished: Callable[[], bool],
        *,
        zombies: bool = False,
    ) -> SimTask:
        """Restart a process of this name until its work is done, and disturb it meanwhile."""

        def body() -> None:
            while not finished():
                node = self.node(name)
                task = node.runtime.spawn(lambda node=node: live(node), "main")
                while task.is_alive():
                    task.join(self.uniform(0.1, 10))
                    if not task.is_alive() or self.calm:
                        task.join()
                    elif node.runtime.resume_at > self.simulation.now and self.chance(0.95):
                        # It is paused. Wait, because the interesting part is how it continues.
                        self.director.sleep(node.runtime.resume_at - self.simulation.now)
                    elif self._disturb(node, zombies):
                        break
                self.director.sleep(self.uniform(0, 1))

        return self.director.spawn(body, f"supervisor of {name}")

    def _clock_error_ms(self) -> int:
        """Return a clock error for a process, up to 15 minutes either way, in milliseconds."""
        skew_ms = self.draw(2 * MAX_SKEW_MS) - MAX_SKEW_MS
        return -skew_ms if self._agrees_with_wrong_dates(skew_ms) else skew_ms

    def _agrees_with_wrong_dates(self, skew_ms: int) -> bool:
        """Return whether the store's wrong dates would confirm a process's wrong clock.

        If both are ahead by about the same time, a collector takes young objects for old ones and
        cannot notice it; failure F6 promises nothing in that case. A clock that is further ahead
        than the dates can also come to agree with them, if the process is paused between reading
        one and the other. A clock that is less far ahead only moves further away from them.
        """
        error_ms = self.plan.date_error_ms if self.plan.wrong_dates else 0
        tolerated_ms = max(self.grace_s * 1000 / 4, 5_000)
        return error_ms > 0 and skew_ms > 0 and skew_ms >= error_ms - tolerated_ms

    def _disturb(self, node: Node, zombies: bool) -> bool:
        """Disturb a process. Return whether another process takes its place."""
        fault = self.disturbances[self.draw(len(self.disturbances))]
        self.happened[fault] += 1
        match fault:
            case "kill":
                self.simulation.kill(node.runtime)
                # Requests that it has sent may still arrive.
                if self.chance(0.5):
                    self.director.sleep(self.uniform(0, 2))
                    node.store.land_late_puts()
                return True
            case "short pause":
                self._pause(node, self.uniform(0, 10))
            case "long pause":
                self._pause(node, self.uniform(0, 2.5 * self.grace_s))
                return zombies and self.chance(0.7)
            case "clock" if not node.sleeps:
                node.runtime.clock_skew_ms = self._clock_error_ms()
            case "outage":
                self._outage(node)
            case "zombie":
                return zombies
        return False

    def _outage(self, node: Node) -> None:
        """Cut a process off from storage for a while, completely or in one direction."""
        kinds = (
            {"get_errors": 1.0},
            {"get_errors": 1.0, "put_errors": 1.0, "cas_lost_before": 1.0},
            {"get_errors": 1.0, "put_errors": 1.0, "cas_lost_after": 1.0},
            {"cas_late": 1.0, "late_operations": self.draw(20)},
        )
        kind = self.draw(len(kinds))
        seconds = self.uniform(0, 120) if self.chance(0.8) else self.uniform(0, self.grace_s)
        self.log(f"outage {kind} of {node.name} for {seconds:.1f} s")
        node.store.plan = replace(self.plan, **kinds[kind])

        def end() -> None:
            self.director.sleep(seconds)
            node.store.plan = self.plan

        self.director.spawn(end, f"end of outage of {node.name}")

    def _disturb_request(self, node: Node, operation: str, key: str) -> None:
        """Pause or kill a process at the moment when its request arrives."""
        if operation == "list":
            self.listed[node.name] = self.simulation.now
        if (
            self.calm
            or operation not in self.faulty_requests
            or not self.chance(self.request_faults)
        ):
            return
        if self.chance(0.3):
            self.happened["kill at a request"] += 1
            self.simulation.kill(node.runtime)
        else:
            self.happened["pause at a request"] += 1
            low, high = self.fault_pause_s or (0, 2.5 * self.grace_s)
            self._pause(node, self.uniform(low, high))

    def _pause(self, node: Node, seconds: float) -> None:
        self.simulation.pause(node.runtime, seconds, suspend=node.sleeps)

    def heal(self) -> None:
        """Heal all faults; from now on nothing is disturbed."""
        self.calm = True
        self.log("all faults are healed")
        self.plan = HarshPlan(get_ms=20, put_ms=20, cas_ms=20, list_ms=20, delete_ms=20)
        for node in self._nodes:
            node.runtime.clock_skew_ms = 0  # a collector with a wrong clock deletes nothing
            node.store.plan = self.plan
            node.store.land_late_puts()

    # The end.

    def finish(self) -> None:
        """Heal all faults and check every promise."""
        self.heal()
        self.await_drained()
        self.model.check_delivered()
        self.check_no_leaks()

    @property
    def grace_ms(self) -> int:
        """The grace period of the queue, in milliseconds."""
        return int(self.grace_s * 1000)

    def await_drained(self) -> None:
        """Wait until the consumer has taken everything from the queue."""
        until = self.simulation.now + DRAIN_S
        while not self.model.is_drained:
            if self.simulation.now > until:
                self.fail(f"not drained after {DRAIN_S} s: {self.model.manifest}")
            self.director.sleep(10)

    def check_no_leaks(self) -> None:
        """Wait until the collector must have run, and check that it left nothing."""
        self.director.sleep(self.write_s + 4 * self.grace_s + 2 * MAX_SKEW_MS / 1000 + 3 * 120)
        left = [
            info.key
            for info in self.memory.list("").objects
            if parse_location(info.key, PREFIX) is not None
        ]
        # A repeat at the end stays until a later batch is acknowledged, and the collector deletes
        # nothing that is newer than the queued batches.
        if left and not self.model.manifest.entry_count:
            self.fail(f"the collector left {left}")

    def producer(self, node: Node, config: ProducerConfig) -> Producer:
        """Open a producer. If there is no queue yet, create it with this cluster's grace period."""
        claim_for_writing(node.store, config, runtime=node.runtime, grace_ms=self.grace_ms)
        return Producer(config, store=node.store, runtime=node.runtime)

    # Settings.

    def producer_config(self) -> ProducerConfig:
        grace_ms = int(self.grace_s * 1000)
        return tuned(
            ProducerConfig,
            store="memory://simulation",
            data_path_prefix=PREFIX,
            flush_interval_ms=50 + self.draw(200),
            compression=Compression(self.draw(2)),
            upload_concurrency=1 + self.draw(4),
            max_buffered_bytes=400 * (2 + self.draw(20)),
            delivery_timeout_ms=5_000 + self.draw(120_000 if self.chance(0.5) else 4 * grace_ms),
            timeout_ms=1_000 + self.draw(min(60_000, grace_ms // 2 - 1_000)),
            # Now and then so small that the queue is full (failure F35).
            max_manifest_bytes=1_500 + self.draw(3_000) if self.chance(0.2) else 64 * 2**20,
        )

    def consumer_config(self) -> ConsumerConfig:
        return ConsumerConfig(
            create_if_missing=True,
            store="memory://simulation",
            data_path_prefix=PREFIX,
            ack_interval=1 + self.draw(10),
            store_options=StoreOptions(timeout_ms=1_000 + self.draw(60_000)),
            gc=GarbageCollectorConfig(
                interval_ms=int(1000 * self.uniform(15, 120)),
                grace_period_ms=int(self.grace_s * 1000),
            ),
        )
