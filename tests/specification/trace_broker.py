"""Traces of brokers: clients append through them or alone, with takeovers and lost answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opendata_buffer.broker import protocol
from opendata_buffer.broker.broker import Broker, SharedQueue
from opendata_buffer.broker.client import Connection, Lost
from opendata_buffer.broker.committer import BrokeredCommitter, open_brokered_committer
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import (
    CommitStateUnknown,
    Conflict,
    OpenDataBufferError,
    TransientStorageError,
)
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue, _Append
from opendata_buffer.stores.memory import MemoryStore
from tests.specification.traces import (
    Call,
    Converter,
    Event,
    Mutation,
    Note,
    Recorder,
    Trace,
    patched,
    run_noted,
)
from tests.support.faults import HarshPlan, HarshStore
from tests.support.network import SimNetwork
from tests.support.simulation import SeededChoices, SimRuntime, Simulation

MANIFEST = "ingest/manifest"
STORE = "memory://simulation"
KINDS = {
    "ask",
    "lose",
    "end wait",
    "begin alone",
    "look alone",
    "write alone",
    "durable",
    "dequeue",
}
KINDS |= {
    "take over",
    "take group",
    "look of broker",
    "begin write",
    "write of broker",
    "end of append",
    "arrive",
}
"""The kinds of events in traces."""


class TracedBrokers(SeededChoices):
    """Two processes that host brokers, some clients, and a consumer, all recorded."""

    def __init__(self, seed: int, appends: int = 5) -> None:
        self.simulation = Simulation(seed, max_steps=3_000_000)
        self.recorder = Recorder(self.simulation)
        self.network = SimNetwork(self.simulation)
        self.memory = MemoryStore("simulation", now_ms=self.simulation.now_ms)
        self.appends = appends
        self.plan = HarshPlan(
            get_ms=20,
            put_ms=20,
            cas_ms=self.uniform(20, 200),
            cas_lost_after=self.uniform(0, 0.15),
            cas_lost_before=self.uniform(0, 0.15),
            cas_late=self.uniform(0, 0.1),
            jitter=0.5,
        )
        self.director = self.simulation.process("director")
        self.processes: list[SimRuntime] = []
        self.ended = False

    def process(self, name: str) -> tuple[SimRuntime, HarshStore]:
        runtime = self.simulation.process(f"{name}#{len(self.processes)}")
        self.processes.append(runtime)
        store = HarshStore(self.memory, runtime, self.plan, seed=self.draw(1 << 30))
        self.recorder.watch(store, runtime.name)
        return runtime, store

    def config(self) -> ProducerConfig:
        return ProducerConfig(store=STORE, broker="auto").with_timeout(10_000)

    def host(self) -> None:
        runtime, store = self.process("host")

        def live() -> None:
            host = LeaderElection(store, self.config(), runtime, self.network.of(runtime))
            while not self.ended:
                runtime.sleep(2)
            host.stop(5)

        runtime.spawn(live, "host")

    def client(self) -> Any:
        runtime, store = self.process("client")

        def live() -> None:
            claim = None
            while claim is None:
                try:
                    claim = claim_for_writing(store, self.config(), runtime=runtime)
                except (TransientStorageError, Conflict):
                    runtime.sleep(1)
            network = self.network.of(runtime)
            opened = open_brokered_committer(store, self.config(), runtime, claim, network=network)
            for _ in range(self.appends):
                location = f"ingest/{runtime.ulid()}.batch"
                try:
                    opened.append([NewEntry(location, ())], begin_by=runtime.monotonic() + 60)
                except OpenDataBufferError as error:
                    self.simulation.log(f"{runtime.name}: {error}")
                runtime.sleep(self.uniform(0, 2))
            opened.close()

        return runtime.spawn(live, "client")

    def consume(self) -> None:
        runtime, store = self.process("consumer")
        queue = Queue(store, self.config(), runtime=runtime, role="consumer")

        def live() -> None:
            while not self.ended:
                runtime.sleep(self.uniform(1, 6))
                try:
                    manifest = queue.read()
                    if manifest is not None and manifest.entry_count > 2:
                        queue.dequeue(manifest.first_sequence, manifest.epoch)
                except OpenDataBufferError as error:
                    self.simulation.log(f"{runtime.name}: {error}")

        runtime.spawn(live, "consumer")

    def scenario(self) -> None:
        """Run until all clients have ended."""
        for _ in range(2):
            self.host()
        self.director.sleep(3)
        tasks = [self.client() for _ in range(3)]
        self.consume()
        while any(task.is_alive() for task in tasks):
            self.director.sleep(self.uniform(0.3, 1.5))
            victim = self.processes[self.draw(len(self.processes))]
            hosts = [process for process in self.processes if process.name.startswith("host")]
            host = hosts[self.draw(len(hosts))]
            match self.draw(5):
                case 0:
                    self.simulation.pause(victim, self.uniform(0.5, 4))
                case 1:
                    self.simulation.pause(host, self.uniform(1, 8))
                case 2 if len(hosts) < 5 and host.alive:
                    self.simulation.kill(host)
                    self.network.kill(host)
                    self.host()
                case 3 if victim is not host:
                    self.network.cut(victim, host)
                    self.director.sleep(self.uniform(0.5, 4))
                    self.network.heal(victim, host)
        self.ended = True


def notes_calls(recorder: Recorder) -> list[Mutation]:
    """Return the patches that note calls, in addition to requests to the store."""
    connection_of: dict[str, Connection] = {}  # by task

    def around(kind: str) -> Callable[[Any], Any]:
        def change(call: Callable[..., Any]) -> Callable[..., Any]:
            def noted(owner: Any, *arguments: Any, **options: Any) -> Any:
                recorder.note(f"{kind} begins", (owner, *arguments[:1]))
                if kind == "request":
                    connection_of[recorder.simulation.current.name] = owner
                found: Any = None
                try:
                    found = call(owner, *arguments, **options)
                    return found
                except OpenDataBufferError as error:
                    found = error
                    raise
                finally:
                    recorder.note(f"{kind} ends", (owner, *arguments[:1], found))

            return noted

        return change

    def append_body(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(number: int, entries: Any, clock: Any, valid_ms: int, since: Any) -> Any:
            connection = connection_of[recorder.simulation.current.name]
            recorder.note("body", (connection, number, entries, clock, connection._next, since))
            return call(number, entries, clock, valid_ms, since)

        return noted

    def renew(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(connection: Connection) -> Any:
            numbers = call(connection)
            for number in numbers:
                recorder.note("renewed", (connection, number, connection._clock))
            return numbers

        return noted

    return [
        (BrokeredCommitter, "append", around("append")),
        (Connection, "append", around("request")),
        (protocol, "append_body", append_body),
        (Connection, "_renew", renew),
        (Queue, "append", around("write")),
        (Broker, "start", around("start")),
    ]


def record(seed: int, *mutations: Mutation, appends: int = 5) -> Trace:
    """Run the code, with mutations if there are any, and return its trace."""
    with patched(*mutations):
        cluster = TracedBrokers(seed, appends)
        calls = notes_calls(cluster.recorder)
        run_noted(cluster.simulation, cluster.scenario, calls, is_mutated=bool(mutations))
    return BrokerConverter(cluster.recorder).trace()


class BrokerConverter(Converter):
    """Converts the notes of brokers."""

    key = MANIFEST

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.clients: dict[str, str] = {}  # by location
        self.brokers: dict[int, str] = {}  # by queue
        self.ports: dict[str, str] = {}  # by process, its last broker
        self.asked: dict[tuple[int, int], tuple[str, int]] = {}  # by (connection, number)
        self.tries: dict[str, int] = {}
        self.lost: dict[str, int] = {}  # by client, its last lost attempt
        self.writing: dict[str, tuple[str, str, list[str]]] = {}  # by task: role, process, group
        self.alone: set[str] = set()
        self.answers: dict[tuple[str, int], Any] = {}
        self.looked: set[str] = set()  # tasks that have read in this append
        self.begun: dict[str, int] = {}
        self.asks: dict[str, str] = {}  # by client, the broker that it waits for

    def trace(self) -> Trace:
        """Return all events, with the constants of the specification."""
        self._find_answers()
        for number, note in enumerate(self.notes):
            self.convert(number, note)
        events = [
            {**{k: v for k, v in event.items() if k != "ms"}, "us": us}
            for event, us in zip(self.timeline.events(), self.timeline.times_us(), strict=True)
        ]
        constants = {
            "TraceClients": set(self.clients.values()),
            "TraceBrokers": set(self.brokers.values()),
            "TraceValid": protocol.VALID_MS * 1000,
        }
        return Trace("Broker", events, constants)

    def _find_answers(self) -> None:
        """Find the answer to each attempt of each client, from the notes in order."""
        tries: dict[str, int] = {}
        open_: dict[str, tuple[str, int]] = {}
        for note in self.notes:
            if note.kind == "body":
                location = note.what[2][0].location
                tries[location] = tries.get(location, 0) + 1
                open_[note.task] = (location, tries[location])
            elif note.kind == "request ends" and note.task in open_:
                self.answers[open_.pop(note.task)] = note.what[2]

    def add(self, number: int, kind: str, by: str, **rest: Any) -> None:
        self.timeline.add(number, {"is": kind, "by": by, **rest})

    def client(self, location: str) -> str:
        return self.clients.setdefault(location, f"c{len(self.clients)}")

    def manifest(self, version: str | None) -> Event:
        if version is None:
            return {"first": 0, "end": 0}
        return self.shown(Manifest.parse(self.recorder.data[MANIFEST, version]))

    def shown(self, manifest: Manifest) -> Event:
        return {"first": manifest.first_sequence, "end": manifest.next_sequence}

    # Clients.

    def _append_begins(self, number: int, note: Note) -> None:
        self.client(note.what[1][0].location)

    def _append_ends(self, number: int, note: Note) -> None:
        _, entries, found = note.what
        by = self.client(entries[0].location)
        if isinstance(found, int):
            self.add(number, "durable", by, sequence=found)
        elif isinstance(found, OpenDataBufferError):
            kind = "unknown" if isinstance(found, CommitStateUnknown) else "failed"
            self.add(number, kind, by)

    def _body(self, number: int, note: Note) -> None:
        connection, key, entries, clock, seen, since = note.what
        location = entries[0].location
        by = self.client(location)
        self._end_wait(number, by)
        self.tries[location] = self.tries.get(location, 0) + 1
        self.asked[id(connection), key] = (location, self.tries[location])
        address = connection.broker_record.address.partition(":")[0]
        self.asks[by] = self.ports[address]
        self.add(
            number,
            "ask",
            by,
            broker=self.ports[address],
            heard=int(clock[0] * 1e6),
            seen=seen,
            since=-1 if since is None else since,
        )

    def _renewed(self, number: int, note: Note) -> None:
        connection, key, clock = note.what
        location, attempt = self.asked[id(connection), key]
        by = self.client(location)
        if self.lost.get(by) != attempt:
            self.add(number, "renew", by, heard=int(clock[0] * 1e6), seen=0)

    def _request_ends(self, number: int, note: Note) -> None:
        _, entries, found = note.what
        location = entries[0].location
        if isinstance(found, Lost):
            self.lose(number, location, found.since)
        self.asks.pop(self.client(location), None)

    def lose(self, number: int, location: str, since: int) -> None:
        by = self.client(location)
        if self.asks.pop(by, None) is not None:
            self.lost[by] = self.tries[location]
            self.add(number, "lose", by, since=since)

    def _end_wait(self, number: int, by: str) -> None:
        if by in self.lost and self.lost[by] > 0:
            self.lost[by] = -self.lost[by]
            self.add(number, "end wait", by)

    # Appends of brokers, and of clients alone.

    def _start_ends(self, number: int, note: Note) -> None:
        broker = note.what[0]
        by = self.brokers.setdefault(id(broker._queue), f"b{len(self.brokers)}")
        self.ports[note.process] = by
        read = next(
            n
            for n in range(number, -1, -1)
            if self.notes[n].process == note.process
            and self.notes[n].kind == "get"
            and self.notes[n].what == MANIFEST
        )
        self.add(read, "take over", by)

    def _write_begins(self, number: int, note: Note) -> None:
        queue, entries = note.what
        group = [self.client(entry.location) for entry in entries]
        self.looked.discard(note.task)
        self.begun[note.task] = number
        if isinstance(queue, SharedQueue):
            by = self.brokers[id(queue)]
            self.writing[note.task] = ("broker", by, group)
            first = next(
                n
                for n in self.notes[number + 1 :]
                if n.task == note.task
                and (
                    n.kind == "write ends"
                    or (n.what == MANIFEST and n.kind in ("get", "effect", "answer"))
                )
            )
            begins = "look" if first.kind == "get" or first.kind == "write ends" else "write"
            self.add(number, "take group", by, order=group, begins=begins)
        else:
            by = group[0]
            self._end_wait(number, by)
            self.writing[note.task] = ("alone", by, group)
            self.add(number, "begin alone", by)

    def _get(self, number: int, note: Note) -> None:
        if note.what != MANIFEST or note.task not in self.writing:
            return
        role, by, group = self.writing[note.task]
        seen = self.manifest(note.version)
        self.looked.add(note.task)
        if role == "alone":
            self.add(number, "look alone", by, order=group, **seen)
            return
        if self.is_last(number, note.task):
            self.lose_of_group(number, by, group)
        self.add(number, "look of broker", by, order=group, **seen)

    def is_last(self, number: int, task: str) -> bool:
        """Return whether an append ends with this request."""
        for note in self.notes[number + 1 :]:
            if note.task == task and note.kind == "write ends":
                return True
            if (
                note.task == task
                and note.what == MANIFEST
                and note.kind in ("get", "effect", "answer")
            ):
                return False
        return False

    def lose_of_group(self, number: int, broker: str, group: list[str]) -> None:
        """Note the clients that will not get the answer that their broker now has."""
        of = {name: location for location, name in self.clients.items()}
        for name in group:
            location = of[name]
            answer = self.answers.get((location, self.tries.get(location, 0)), Lost(0, 0))
            if isinstance(answer, Lost) and self.asks.get(name) == broker:
                self.lose(number, location, answer.since)

    def arrived(self, number: int, note: Note, call: Call) -> None:
        # The specification does not cover the answer to the consumer.
        event = "dequeue" if call.process.startswith("consumer") else "arrive"
        self.timeline.add(number, {"is": event, **self.shown(Manifest.parse(call.data))})

    def write(self, number: int, note: Note, call: Call, answer: str) -> None:
        new = self.shown(Manifest.parse(call.data))
        if call.process.startswith("consumer"):
            if answer == "applied":
                self.timeline.add(number, {"is": "dequeue", **new})
            return
        role, by, group = self.writing[call.task]
        event = {"answer": answer, "order": group, **new}
        if role == "broker":
            self.add(call.sent - 1, "begin write", by, order=group)
            if answer == "applied":
                self.lose_of_group(number, by, group)
            self.add(number, "write of broker", by, **event)
            return
        if call.task not in self.looked:
            # From memory, with a manifest that another append of this process has left.
            if answer == "conflict" or (answer == "unknown" and not self.is_current(call, number)):
                return  # that version is gone, so it does nothing
            self.add(
                self.begun[call.task], "look alone", by, order=group, **self.manifest(call.bound_to)
            )
        self.looked.add(call.task)
        self.add(number, "write alone", by, **event)

    def _write_ends(self, number: int, note: Note) -> None:
        if note.task not in self.writing:
            return
        role, by, group = self.writing.pop(note.task)
        found = note.what[2]
        if role == "alone" or found is None:  # or the process was killed
            return
        if isinstance(found, int):
            result = "late" if found == -1 else "found"
        else:
            result = "unknown" if isinstance(found, CommitStateUnknown) else "failed"
        if result != "late":
            self.lose_of_group(number, by, group)
        self.add(number, "end of append", by, order=group, result=result)


# ---- faults of the code that traces must show


def _answers_first(append: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(broker: Broker, group: Any, read_first: bool) -> Any:
        first = broker.next_sequence
        for request in group:
            request.respond("done", sequence=first, next=first)
            first += len(request.entries)
        return append(broker, group, read_first)

    return mutated


MUTATIONS: dict[str, tuple[int, Mutation, set[str]]] = {
    "the broker answers before the write": (0, (Broker, "_append", _answers_first), {"durable"}),
    "a broker writes late requests": (
        0,
        (protocol.AppendRequest, "is_late", lambda _: lambda *_: False),
        {"take group", "begin write"},
    ),
    "a lost append is not looked for": (
        0,
        (_Append, "find", lambda _: lambda *_: False),
        {"begin write", "write alone"},
    ),
}
"""Mutations of the code by their effect: a seed that shows it, the change, and the kinds of events
at which its trace is rejected."""
