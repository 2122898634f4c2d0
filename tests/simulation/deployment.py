"""Play one history of a whole deployment: a store, the processes that use it, and faults.

A :class:`Deployment` simulates a production system. Writers, readers, collectors, and
brokers are separate processes that share one store. An operator runs commands. Time is virtual, and
every choice comes from a seed, so one seed always gives the same history
(:mod:`tests.support.simulation`). The clock, threads, network, and store are simulated; all other
code is the real library.

A history has four parts:

1. The *features* of the combination prepare the store. They create a topic, a log, or another
   client's layout.
2. All programs run at the same time. Processes crash, freeze, lose answers, and are replaced while
   they still run. Meanwhile the operator follows a script, such as "expand the topic" or "reset a
   reader".
3. All faults heal. Every acknowledged record must now arrive within :data:`WAIT_S`.
4. All programs stop, the grace period passes, and the collector runs. Then
   :mod:`tests.simulation.orphans` checks the objects that are left.

For example, a seed may kill a consumer between its read and its acknowledgement while a broker is
paused. The :class:`.Oracle` sees every write to the store, every confirmation, and every delivery.
It fails the history at the first broken promise.

Two limits stop a history that cannot end. One limits the virtual time until all records arrive; the
other limits the number of steps. An operator's part of the recovery belongs to the history too: the
operator restarts fenced brokers, for example. Without that, a correct product would seem to hang.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import opendata_buffer.gc
from buffer_source import micro_batch_stream
from opendata_buffer import outcomes
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.trimming import collect
from opendata_buffer.broker import committer as broker_committer
from opendata_buffer.broker import worker as broker_worker
from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    ProducerConfig,
    QueueConfig,
    StoreOptions,
)
from opendata_buffer.errors import (
    Closed,
    CommitStateUnknown,
    Conflict,
    Drained,
    Fenced,
    FlushFailed,
    QueueFull,
    StorageError,
    Superseded,
)
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue import log_index, reader_queue, v1_feed
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_segments import Segments
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.stores import listed
from opendata_buffer.stores.base import Blob, DeleteFailure, Listing, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.probed import Probed
from opendata_buffer.topic import consumer as topic_consumer
from opendata_buffer.topic.topic import Topic, partition_config
from tests.simulation.oracle import Oracle
from tests.support.faults import HarshPlan, HarshStore
from tests.support.network import SimNetwork
from tests.support.simulation import SeededChoices, SimRuntime, SimTask, Simulation

T = TypeVar("T")

URL = "memory://simulation"
GRACE_S = 60.0
MAX_SKEW_MS = 15 * 60 * 1000
WAIT_S = 900.0
"""Virtual seconds in which every record must arrive after all faults have healed. Histories of
pairs need up to 72."""

MAX_STEPS = 200_000
"""Scheduling decisions after which a history counts as endless. Histories of pairs need up to
35,000, and those of three features up to 64,000. A history that waits in vain for records reaches
:data:`WAIT_S` earlier, after about 70,000 steps and 4 s of one processor."""

TROUBLE = (StorageError, Conflict, CommitStateUnknown, FlushFailed, QueueFull)
"""Errors after which a caller tries again."""

REPLACED = (Fenced, Superseded, Drained, Closed)
"""Errors that end a process: another process took its place, or its partition left the topic."""

ONE = ""
"""The partition name of a queue that is not a topic."""


@contextmanager
def small_logs() -> Iterator[None]:
    """Make limits small, to reach them soon: segments of a few entries, few remembered entries, and
    a listing for each look at a topic."""
    with (
        mock.patch.object(Log, "most_entries", 8),
        mock.patch.object(Log, "left_entries", 3),
        mock.patch.object(Segments, "most_entries", 20),
        mock.patch.object(log_index, "FAN", 3),
        mock.patch.object(log_index, "REMEMBERED", 6),
        mock.patch.object(reader_queue, "REMEMBERED", 6),
        mock.patch.object(opendata_buffer.gc, "REMEMBERED", 6),
        mock.patch.object(v1_feed, "MOST_ENTRIES", 6),
        # A killed process's generator would take its lock when it is collected as garbage.
        mock.patch.object(topic_consumer, "MAX_PREFETCH", 1),
        mock.patch.object(topic_consumer, "QUIET_S", -1.0),
        mock.patch.object(micro_batch_stream, "QUIET_S", -1.0),
        mock.patch.object(listed, "LEAST_FOLDERS", 1),
    ):
        yield


@dataclass(eq=False)
class Node:
    """One simulated process and its connection to the store."""

    name: str
    runtime: SimRuntime
    store: HarshStore
    writes_left: int | None = None
    """The process is killed when it attempts its next write after this many. None means never."""

    @property
    def alive(self) -> bool:
        return self.runtime.alive


class NodeStore:
    """Connect one process to the shared store.

    Other processes may run before and after each access. The oracle sees each change at the moment
    it takes effect.
    """

    def __init__(self, deployment: Deployment, node_name: str) -> None:
        self._deployment = deployment
        self._inner = deployment.memory
        self._name = node_name
        self.node: Node | None = None

    @property
    def url(self) -> str:
        return URL

    def get(self, key: str, **options: Any) -> Blob | None:
        self._begin("get", key)
        found = self._inner.get(key, **options)
        self._deployment.simulation.checkpoint()
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._begin("put", key)
        self._inner.put(key, data)
        self._deployment.oracle.object_written(self._name, key, bytes(data))
        self._deployment.simulation.checkpoint()

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        self._begin("put_if", key)
        outcome = self._inner.put_if(key, data, condition)
        if isinstance(outcome, outcomes.Applied):
            self._deployment.oracle.object_written(self._name, key, data)
        self._deployment.simulation.log(f"  {type(outcome).__name__}")
        self._deployment.simulation.checkpoint()
        return outcome

    def check_conditional_writes(
        self, near: str, known: Iterable[Probed] = (), *, trust: bool = True
    ) -> Probed | None:
        return self._inner.check_conditional_writes(near, known, trust=trust)

    def check_refusal(self, near: str) -> None:
        self._inner.check_refusal(near)

    def list(self, prefix: str, **options: Any) -> Listing:
        self._begin("list", prefix)
        listing = self._inner.list(prefix, **options)
        self._deployment.simulation.checkpoint()
        return listing

    def list_versions(self, prefix: str, most: int) -> Mapping[str, str] | None:
        """List each object at an instant of its own, as a service may."""
        self._begin("list_versions", prefix)
        found: dict[str, str] = {}
        for key in sorted(self._inner.list_versions(prefix, sys.maxsize) or ()):
            found |= self._inner.list_versions(key, sys.maxsize) or {}
            if not key.endswith(".batch"):
                self._deployment.simulation.checkpoint()
        return found if len(found) <= most else None

    def delete_many(self, keys: Any) -> tuple[DeleteFailure, ...]:
        failed: list[DeleteFailure] = []
        for key in keys:
            self._begin("delete", key)
            failed += self._inner.delete_many([key])
            self._deployment.oracle.object_deleted(self._name, key)
        self._deployment.simulation.checkpoint()
        return tuple(failed)

    def _begin(self, operation: str, key: str) -> None:
        self._deployment.on_access(self.node, operation)
        self._deployment.simulation.checkpoint()
        self._deployment.simulation.log(f"{self._name} {operation} {key}")


class Deployment(SeededChoices):
    """Hold everything that one history consists of. Every choice comes from the seed.

    Attributes:
        happened: How often each feature took part, by its name. A history fails if a feature of its
            combination is missing here, because it tested nothing of that feature.
        faults: How often each fault hit a process.
        calm: Whether all faults have healed.
        over: Whether all programs must end.
        stopped: Whether an operator has stopped all programs.
    """

    def __init__(self, seed: int, *, shown: int | None = 80) -> None:
        self.simulation = Simulation(seed, max_steps=MAX_STEPS, shown=shown)
        self.seed = seed
        self.log = self.simulation.log
        self.fail = self.simulation.fail
        self.memory = MemoryStore("simulation", now_ms=self.simulation.now_ms)
        self.network = SimNetwork(self.simulation)
        self.oracle = Oracle(self.fail, self._now, self.partition_of_manifest)
        self.happened: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.calm = self.over = self.stopped = self.held = self.slowly = False
        self.is_topic = self.is_log = False
        self.prefix, self.manifest_path = "ingest", ""
        self.partitions = 2
        self.broker = "off"
        self.wrong_clocks = False
        self.quiet_s = 0.0
        """Seconds to wait at the end in addition to the grace period."""
        self.expiry_ms = 7 * 24 * 60 * 60 * 1000
        self.retention_ms: int | None = None
        self.isolation = "read_uncommitted"
        self.director = self.simulation.process("director")
        self.nodes: list[Node] = []
        self.writers: list[SimTask] = []
        self.script: list[tuple[str, Callable[[], bool]]] = []
        """The operator's steps, in any order: names, and functions that return whether they acted.
        """
        self.script_done = False
        self.left: Counter[str] = Counter()
        """How many objects of each kind the history left in the store."""
        self.programs: list[Any] = []
        """The readers."""
        self.down: set[str] = set()
        """Readers that must not run at the moment."""
        self.backups: dict[str, Any] = {}
        """Copies of some objects that an operator keeps."""
        self.turns: list[str] = []
        """Programs that read the same queue, one after the other."""
        self.turn = 0
        self.plan = self._draw_faults()

    def _draw_faults(self) -> HarshPlan:
        return HarshPlan(
            cas_lost_after=self.uniform(0, 0.1),
            cas_lost_before=self.uniform(0, 0.1),
            cas_late=self.uniform(0, 0.05),
            get_errors=self.uniform(0, 0.03),
            put_errors=self.uniform(0, 0.05),
            list_errors=self.uniform(0, 0.05),
            delete_errors=self.uniform(0, 0.1),
            get_ms=30,
            put_ms=60,
            cas_ms=60,
            list_ms=60,
            delete_ms=60,
            jitter=0.5,
        )

    def _now(self) -> float:
        return self.simulation.now

    # Where things are.

    def partition_of_manifest(self, key: str) -> str | None:
        """Return the partition of a manifest's key, or None for another object."""
        if self.is_topic:
            name, _, rest = key.partition("/")
            return name if rest == "manifest" else None
        return ONE if key == self.config(QueueConfig).manifest_path else None

    def partition_of(self, key: str) -> str:
        """Return the partition to which an object belongs."""
        return key.partition("/")[0] if self.is_topic else ONE

    def config(self, kind: type[Any], partition: str = ONE, **settings: Any) -> Any:
        """Return a configuration of the queue, the topic, or one partition of the topic."""
        settings.setdefault("store_options", StoreOptions(timeout_ms=20_000))
        if not self.is_topic:
            settings |= {"data_path_prefix": self.prefix, "manifest_path": self.manifest_path}
        made = kind(store=URL, **settings)
        return partition_config(partition, made) if partition else made

    def producer_config(self, partition: str = ONE) -> ProducerConfig:
        """Return the settings of a producer."""
        found: ProducerConfig = self.config(
            ProducerConfig,
            partition,
            broker=self.broker,
            flush_interval_ms=100,
            delivery_timeout_ms=30_000,
        )
        return found

    def consumer_config(self, partition: str = ONE, **settings: Any) -> ConsumerConfig:
        """Return the settings of a consumer whose collector runs often."""
        settings.setdefault("create_if_missing", True)
        found: ConsumerConfig = self.config(
            ConsumerConfig, partition, ack_interval=1 + self.draw(4), gc=self.gc(), **settings
        )
        return found

    def gc(self) -> GarbageCollectorConfig:
        """Return the settings of a collector."""
        return GarbageCollectorConfig(interval_ms=15_000, grace_period_ms=int(GRACE_S * 1000))

    def names(self) -> list[str]:
        """Return the current partitions of a topic, or the only partition of a queue."""
        if not self.is_topic:
            return [ONE]
        topic = Topic.open(URL, store=self.memory, runtime=self.director)
        return topic.description.names

    def target(self, node: Node) -> Target:
        """Return the target of an operator's command."""
        config = self.consumer_config()
        topic = None
        if self.is_topic:
            topic = Topic.open(URL, store=node.store, runtime=node.runtime)
        return Target(node.store, config, node.runtime, topic)

    # Processes.

    def node(self, role: str) -> Node:
        """Start a process. With wrong clocks, half of them are wrong by up to 15 minutes."""
        name = f"{role}#{len(self.nodes)}"
        skew_ms = 0
        if self.wrong_clocks and not self.calm and self.chance(0.5):
            skew_ms = self.draw(2 * MAX_SKEW_MS) - MAX_SKEW_MS
        runtime = self.simulation.process(name, clock_skew_ms=skew_ms)
        inner = NodeStore(self, name)
        store = HarshStore(inner, runtime, self.plan, seed=self.draw(2**32))
        node = Node(name, runtime, store)
        inner.node = node
        self.nodes.append(node)
        return node

    def on_access(self, node: Node | None, operation: str) -> None:
        """Kill a process at the write that the history has chosen."""
        if node is None or node.writes_left is None or operation not in ("put", "put_if", "delete"):
            return
        node.writes_left -= 1
        if node.writes_left < 0:
            node.writes_left = None
            self.crash(node)

    def crash(self, node: Node) -> None:
        """End a process as ``kill -9`` does."""
        if not node.alive:
            return
        self.network.kill(node.runtime)
        self.simulation.kill(node.runtime)

    def restart_brokers(self) -> None:
        """Kill every process that only serves as a broker; its supervisor starts another one."""
        for node in self.nodes:
            if node.alive and node.name.startswith("host"):
                self.log(f"the operator restarts {node.name}")
                self.faults["broker restart"] += 1
                self.crash(node)

    def patiently(self, node: Node, call: Callable[[], T]) -> T:
        """Repeat a call until the store answers."""
        while True:
            try:
                return call()
            except TROUBLE as error:
                self.log(f"{node.name}: {error}")
                node.runtime.sleep(1)

    def keep_alive(
        self,
        role: str,
        live: Callable[[Node], None],
        *,
        finished: Callable[[], bool] = lambda: False,
        may_run: Callable[[], bool] = lambda: True,
        takeovers: bool = True,
    ) -> SimTask:
        """Run a program again whenever it ends, and let faults hit its processes.

        Args:
            role: Name of the program; the names of its processes start with it.
            live: Runs one process.
            finished: Returns whether the program needs no further process.
            may_run: Returns whether the program may run now. If not, its process is killed.
            takeovers: Whether the next process may start while the previous one still runs.
        """

        def supervise() -> None:
            while not self.over and not finished():
                if self.stopped or not may_run():
                    self.director.sleep(0.5)
                    continue
                node = self.node(role)
                task = node.runtime.spawn(partial(live, node), "main")
                self._watch(node, task, may_run, takeovers)
                self.director.sleep(self.uniform(0.1, 2))

        return self.director.spawn(supervise, f"supervisor of {role}")

    def _watch(
        self, node: Node, task: SimTask, may_run: Callable[[], bool], takeovers: bool
    ) -> None:
        while task.is_alive():
            task.join(1.0 if not self.calm else 10.0)
            if not task.is_alive() or self.over:
                task.join()
            elif self.stopped or not may_run():
                self.crash(node)
                return
            elif (
                not self.calm
                and self.chance(0.02 if self.slowly else 0.12)
                and self._fault(node, takeovers)
            ):
                return

    def _fault(self, node: Node, takeovers: bool) -> bool:
        """Let one fault hit a process. Return True if the next process must start."""
        fault = ("crash", "pause", "outage", "takeover", "late answers")[self.draw(5)]
        if fault == "takeover" and not takeovers:
            fault = "crash"
        self.faults[fault] += 1
        self.log(f"{fault} of {node.name}")
        if fault == "crash":
            self.crash(node)
            if self.chance(0.5):
                self.director.sleep(self.uniform(0, 1))
                node.store.land_late_puts()
            return True
        if fault == "pause":
            self.simulation.pause(node.runtime, self.uniform(0.5, 25))
        elif fault == "takeover":
            if self.chance(0.5):
                self.simulation.pause(node.runtime, self.uniform(1, 20))
            return True
        else:
            changes = {"get_errors": 1.0, "put_errors": 1.0, "cas_lost_after": 1.0}
            if fault == "late answers":
                changes = {"cas_late": 0.7, "late_operations": self.draw(10)}
            node.store.plan = replace(self.plan, **changes)
            self.director.spawn(partial(self._end_outage, node), f"outage of {node.name}")
        return False

    def _end_outage(self, node: Node) -> None:
        self.director.sleep(self.uniform(1, 15))
        node.store.plan = self.plan

    # Commands and actions of an operator.

    def operate(self, action: Callable[[Node], T], *, crashes: bool = True) -> T:
        """Run an operator's command and return its result.

        The command may be killed between two writes. The operator then runs it again.
        """
        results: list[T] = []
        for attempt in range(20):
            node = self.node("operator")
            if crashes and attempt == 0 and not self.calm and self.chance(0.4):
                node.writes_left = self.draw(6)

            def run(node: Node = node) -> None:
                results.append(self.patiently(node, lambda: action(node)))

            task = node.runtime.spawn(run, "main")
            task.join()
            if results:
                return results[0]
            self.faults["operator crash"] += 1
            node.store.land_late_puts()
        self.fail("the operator's command was killed again and again")
        raise AssertionError

    @contextmanager
    def maintenance(self) -> Iterator[None]:
        """Stop all programs, as the docs demand before a repair, and start them afterwards."""
        self.stopped = True
        self.log("all programs are stopped")
        for node in self.nodes:
            if not node.name.startswith(("operator", "director")):
                self.crash(node)
        self.director.sleep(3)
        for node in self.nodes:
            node.store.land_late_puts()
        yield
        self.log("all programs are started again")
        self.stopped = False

    @contextmanager
    def readers_held(self) -> Iterator[None]:
        """Stop all readers for a while, so that records wait in the queue."""
        self.held = True
        self.director.sleep(self.uniform(6, 10))
        yield
        self.held = False

    @contextmanager
    def without(self, program: str) -> Iterator[None]:
        """Keep one reader down for a while, during which writers write little."""
        self.slowly = True
        self.down.add(program)
        for node in self.nodes:
            if node.name.startswith(f"{program}#"):
                self.crash(node)
        yield
        self.down.discard(program)
        self.slowly = False

    def idle(self, node: Node) -> None:
        """Wait until a reader should look for new batches again."""
        node.runtime.sleep(self.uniform(0.5, 20 if self.calm else 10 if self.slowly else 3))

    def may_read(self, program: str) -> bool:
        """Return whether a reader may run."""
        return not self.held and program not in self.down

    # The history.

    def run(self) -> None:
        """Play the whole history. The features have already added their programs."""
        operator = self.director.spawn(self._follow_script, "script")
        rotation = self.director.spawn(self._take_turns, "turns")
        rotation.join()
        operator.join()
        self.script_done = True
        self._heal()
        self._await_arrival()
        self.director.sleep(60)  # for what carries no records: markers of transactions
        self.over = True
        self.director.sleep(90)
        for node in self.nodes:
            self.crash(node)
        self._collect()

    def _follow_script(self) -> None:
        self._await(lambda: len(self.oracle.acknowledged) >= 4, "nothing was written")
        steps = self.script
        self.simulation.random.shuffle(steps)
        for name, step in steps:
            for _ in range(25):
                self.director.sleep(self.uniform(2, 8))
                if step():
                    self.happened[name] += 1
                    break
        self.director.sleep(self.uniform(5, 15))

    def _take_turns(self) -> None:
        """Let the programs that read the same queue take it over from each other."""
        if len(self.turns) < 2:
            return
        for rounds in range(25):
            had_a_turn = all(self.happened[reader.feature] for reader in self.programs)
            if had_a_turn and rounds > len(self.turns):
                return
            self.director.sleep(self.uniform(8, 15))
            self.turn += 1

    def has_turn(self, role: str) -> bool:
        """Return whether a program may read the queue now."""
        return self.may_read(role) and self.turns[self.turn % len(self.turns)] == role

    def _await(self, condition: Callable[[], bool], failure: str, limit_s: float = WAIT_S) -> None:
        until = self.simulation.now + limit_s
        while not condition():
            if self.simulation.now > until:
                self.fail(failure)
            self.director.sleep(1)

    def _heal(self) -> None:
        self.log("all faults are healed")
        self.calm = True
        self.plan = HarshPlan(get_ms=20, put_ms=20, cas_ms=20, list_ms=20, delete_ms=20)
        for node in self.nodes:
            node.runtime.clock_skew_ms = 0
            node.store.plan = self.plan
            node.store.land_late_puts()

    def _await_arrival(self) -> None:
        self._await(
            lambda: not any(task.is_alive() for task in self.writers), "a writer never ended"
        )
        until = self.simulation.now + WAIT_S
        while missing := self.oracle.missing():
            if self.simulation.now > until:
                name, records = next(iter(missing.items()))
                self.fail(
                    f"{name} never got {len(records)} acknowledged records: "
                    f"{self.oracle.where(records[0])}"
                )
            self.director.sleep(5)

    def _collect(self) -> None:
        """Let the grace period pass, and delete everything that no program needs.

        The sink makes names 15 minutes ahead of its clock, which may be fast itself.
        """
        ahead_s = 900 + (MAX_SKEW_MS / 1000 if self.wrong_clocks else 0)
        self.director.sleep(self.quiet_s + 2 * GRACE_S + ahead_s)

        def run(node: Node) -> None:
            target = self.target(node)
            if target.topic is not None:
                target.topic.remove_drained(0)
            collect(target)
            for queue in target.queues():
                if queue.reader().find() is not None:
                    GarbageCollector(node.store, queue.config, runtime=node.runtime).run_once()

        for _ in range(3):
            self.operate(run)
            self.director.sleep(2 * GRACE_S)

    def create(self) -> None:
        """Create the topic or the queue with this deployment's grace period."""
        node = self.node("operator")
        if self.is_topic:
            config = self.config(QueueConfig)
            Topic.create(config, self.partitions, store=self.memory, runtime=self.director)
        for name in self.names():
            config = self.config(QueueConfig, name)
            claim = partial(claim_for_writing, node.store, config, runtime=node.runtime)
            self.patiently(node, partial(claim, grace_ms=int(GRACE_S * 1000)))

    @contextmanager
    def simulated_network(self) -> Iterator[None]:
        """Connect brokers and clients through the simulated network."""

        def network(runtime: SimRuntime, *_: object) -> object:
            return self.network.of(runtime)

        with (
            mock.patch.object(broker_committer, "WebSocketNetwork", network),
            mock.patch.object(broker_worker, "WebSocketNetwork", network),
        ):
            yield
