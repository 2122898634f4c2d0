"""Traces of a log with a v1 consumer as a reader: its queue is fed, read, and taken over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import opendata_buffer.gc
from opendata_buffer.errors import ObjectNotFound, StorageError
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue import v1_feed
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.reader_positions import ReaderPosition
from opendata_buffer.queue.stored_manifest import read_manifest
from opendata_buffer.queue.v1_admin import add_v1_reader
from tests.simulation.cluster import MANIFEST, Node
from tests.simulation.test_log import INDEX, READERS
from tests.specification.trace_log import TracedLogCluster, notes_floor, small
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
from tests.support.logs import open_view
from tests.support.v1_consumer import V1Consumer

READER, OTHER = "other", "clickhouse"
QUEUE = f"{OTHER}/manifest"
POSITION = f"{READERS}{READER}.json"
KINDS = {
    *("append", "begin add", "write queue", "write position", "look before name", "write name"),
    *("look at queue", "feed", "note", "claim", "look", "fetch", "dequeue", "arrive"),
    *("look before collection", "read position", "write floor", "delete", "change index"),
}
"""The kinds of events in traces."""


class TracedV1Cluster(TracedLogCluster):
    """A log with a Python reader and a v1 consumer, whose processes are recorded."""

    def __init__(self, seed: int, records: int = 24) -> None:
        super().__init__(seed, records)
        self.names = self.names[:1]
        self.seek_share = 0.0
        self.added = False

    def add_reader(self) -> None:
        """Make the v1 consumer a reader, from the oldest batch on."""
        node = self.node("operator")
        config = self.consumer_config()

        def place(view: LogView) -> int:
            begin = view.available_from(view.first_sequence)
            self.recorder.note("begin add", begin)
            return begin

        def read_view() -> LogView:
            manifest = read_manifest(node.store, config, node.runtime)
            return open_view(node.store, config, node.runtime, manifest or Manifest.empty())

        def add() -> None:
            add_v1_reader(node.store, read_view, READER, OTHER, place)

        self.patiently(node, add)
        self.added = True

    def consume(self, node: Node) -> None:
        """Be a v1 consumer, which ends with the first error."""
        try:
            self._consume(node)
        except StorageError as error:
            self.log(f"{node.name}: {error}")

    def _consume(self, node: Node) -> None:
        """Take the queue over, and read and dequeue until another consumer does."""
        consumer = V1Consumer(node.store, OTHER)
        while not self.added or not consumer.claim():
            node.runtime.sleep(1)
        while True:
            node.runtime.sleep(self.uniform(0, 4))
            found = consumer.next_entries(3)
            for entry in found:
                try:
                    node.store.get(entry.location)
                except ObjectNotFound:
                    self.log(f"{node.name}: {entry} is gone")
                self.recorder.note("fetch", entry.sequence)
            if found and consumer.dequeue(found[-1].sequence) is None:
                return
            if not found and consumer.read()[0].epoch != consumer.epoch:
                return

    def scenario(self) -> None:
        """Append, feed, consume, and collect until everything is produced."""
        _, tasks = self.begin()
        self.director.sleep(self.uniform(0, 5))
        self.add_reader()
        self.supervise("v1", self.consume, lambda: False, zombies=True)
        self.finish_when(tasks)


def record(seed: int, *mutations: Mutation, records: int = 24) -> Trace:
    """Run the code, with mutations if there are any, and return its trace."""
    with small(), patched((v1_feed, "MOST_ENTRIES", lambda _: 6), *mutations):
        cluster = TracedV1Cluster(seed, records)
        calls = [notes_floor(cluster.recorder)]
        run_noted(cluster.simulation, cluster.scenario, calls, is_mutated=bool(mutations))
    return V1Converter(cluster.recorder).trace()


class V1Converter(Converter):
    """Converts the notes of a log with a v1 consumer."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.begin = next(n for n, note in enumerate(self.notes) if note.kind == "begin")
        self.feeders: list[str] = []
        self.consumers: list[str] = []
        self.consumer_of: dict[str, str] = {}  # by process
        self.epochs: dict[str, int] = {}  # by consumer
        self.seen: dict[str, str | None] = {}  # by consumer, the version of its last look
        self.floors: set[str] = set()  # processes that raise the floor
        self.end = 0
        self.sequences: dict[str, int] = {}  # by location
        self.queues = self._parsed(QUEUE, Manifest.parse)
        self.indexes = self._parsed(INDEX, LogIndex.from_json)
        self.positions = self._parsed(POSITION, ReaderPosition.from_json)
        made = [n.version for n in self.notes[: self.begin] if n.what == INDEX and n.call]
        versions = recorder.versions[INDEX]
        base = versions.index(max(filter(None, made), key=int))
        self.changes = {version: n - base for n, version in enumerate(versions)}
        self.floor = self.indexes[versions[base]].floor

    def _parsed(self, wanted: str, parse: Callable[[bytes], Any]) -> dict[str, Any]:
        return {
            version: parse(data)
            for (key, version), data in self.recorder.data.items()
            if key == wanted
        }

    def trace(self) -> Trace:
        """Return all events, with the constants of the specification."""
        for number, note in enumerate(self.notes):
            if number > self.begin:
                self.convert(number, note)
            elif note.what == MANIFEST and note.version is not None and note.call is not None:
                self._append(note, self.begin)
        constants = {"TraceFeeders": {*self.feeders}, "TraceConsumers": {*self.consumers}}
        return Trace("V1Reader", self.timeline.events(), constants)

    def look(self, process: str, key: str, version: str | None, before: int, event: Event) -> None:
        """Add a look, at the time when the process learned the version."""
        at = self.knowledge.of_version(process, key, version, before)
        self.timeline.add(max(self.begin, at or 0), event)

    # Calls.

    def _begin_add(self, number: int, note: Note) -> None:
        self.timeline.add(number, {"is": "begin add", "begin": note.what})

    def _fetch(self, number: int, note: Note) -> None:
        by = self.consumer_of[note.process]
        self.timeline.add(number, {"is": "fetch", "by": by, "sequence": note.what})

    def _floor(self, number: int, note: Note) -> None:
        self.floors.add(note.process)
        (version,) = [v for v, found in self.indexes.items() if found == note.what]
        event = {"is": "look before collection", "changes": self.changes[version]}
        self.look(note.process, INDEX, version, number, event)

    def _floor_ended(self, number: int, note: Note) -> None:
        self.floors.discard(note.process)

    # Requests.

    def _get(self, number: int, note: Note) -> None:
        if note.what == POSITION and note.process in self.floors and note.version:
            at = self.positions[note.version].next
            self.timeline.add(number, {"is": "read position", "at": at})
        by = self.consumer_of.get(note.process)
        if note.what == QUEUE and by is not None and self.seen[by] != note.version:
            self.seen[by] = note.version
            assert note.version is not None
            event = {"is": "look", "by": by, **self._queue_event(self.queues[note.version])}
            self.timeline.add(number, event)
            if self.queues[note.version].epoch != self.epochs[by]:
                del self.consumer_of[note.process]  # It was fenced.

    def _delete(self, number: int, note: Note) -> None:
        if (sequence := self.sequences.get(note.what)) is not None:
            self.timeline.add(number, {"is": "delete", "sequence": sequence})

    def write(self, number: int, note: Note, call: Call, answer: str) -> None:
        if call.key == MANIFEST:
            if answer == "applied":
                self._append(note, number)
        elif answer == "conflict" or not self.is_current(call, number):
            return  # A write that was certainly not applied is not a step.
        elif call.key == QUEUE:
            self._write_queue(number, note, call, answer)
        elif call.key == INDEX:
            self._write_index(number, call, answer)
        elif call.key == POSITION:
            self._write_position(number, call, answer)

    def arrived(self, number: int, note: Note, call: Call) -> None:
        version = note.version
        assert version is not None
        if call.key == MANIFEST:
            self._append(note, number)
        elif call.key == QUEUE:
            event = self._queue_event(self.queues[version])
            self.timeline.add(number, {"is": "arrive", "at": "queue", **event})
        elif call.key == INDEX:
            event = self._index_event(self.indexes[version], self.changes[version])
            is_step = self._index_step(call) is not None
            what = {"is": "arrive", "at": "index"} if is_step else {"is": "change index"}
            self.timeline.add(number, {**what, **event})
        elif call.key == POSITION and self._moves(call):
            at = self.positions[version].next
            self.timeline.add(number, {"is": "arrive", "at": "position", "next": at})

    def _append(self, note: Note, number: int) -> None:
        assert note.call is not None
        manifest = Manifest.parse(note.call.data)
        self.sequences |= {entry.location: entry.sequence for entry in manifest.entries()}
        if manifest.next_sequence > self.end:
            self.end = manifest.next_sequence
            self.timeline.add(number, {"is": "append", "to": self.end})

    def _queue_event(self, queue: Manifest) -> Event:
        return {"first": queue.first_sequence, "end": queue.next_sequence, "epoch": queue.epoch}

    def _write_queue(self, number: int, note: Note, call: Call, answer: str) -> None:
        new = Manifest.parse(call.data)
        event = {"answer": answer, **self._queue_event(new)}
        if call.process.startswith("operator"):
            self.timeline.add(number, {"is": "write queue", **event})
            return
        assert call.bound_to is not None
        old = self.queues[call.bound_to]
        if new.epoch > old.epoch:
            by = f"c{len(self.consumers)}"
            self.consumers.append(by)
            self.timeline.add(number, {"is": "claim", "by": by, **event})
            if answer == "applied":
                self.consumer_of[call.process] = by
                self.epochs[by], self.seen[by] = new.epoch, None
        elif new.first_sequence > old.first_sequence:
            by = self.consumer_of[call.process]
            self.timeline.add(number, {"is": "dequeue", "by": by, **event})
            self.seen[by] = note.version if answer == "applied" else None
        else:
            by = self._feeder(call.process, call.bound_to, number)
            self.timeline.add(number, {"is": "feed", "by": by, **event})

    def _feeder(self, process: str, version: str, number: int) -> str:
        """Return a new feeder that has seen a version of the queue."""
        by = f"f{len(self.feeders)}"
        self.feeders.append(by)
        event = {"is": "look at queue", "by": by, **self._queue_event(self.queues[version])}
        self.look(process, QUEUE, version, number, event)
        return by

    def _index_event(self, index: LogIndex, changes: int) -> Event:
        return {"changes": changes, "floor": index.floor, "named": READER in index.v1}

    def _index_step(self, call: Call) -> str | None:
        """Return the step of the specification that a write of the index is, if it is one."""
        assert call.bound_to is not None
        old, new = self.indexes[call.bound_to], LogIndex.from_json(call.data)
        if READER in new.v1 and READER not in old.v1:
            return "write name"
        return "write floor" if new.floor > old.floor else None

    def _write_index(self, number: int, call: Call, answer: str) -> None:
        assert call.bound_to is not None
        index, bound = LogIndex.from_json(call.data), self.changes[call.bound_to]
        event = self._index_event(index, bound + 1)
        step = self._index_step(call)
        if step == "write name":
            look = {"is": "look before name", "changes": bound}
            self.look(call.process, INDEX, call.bound_to, number, look)
        if step is not None:
            self.timeline.add(number, {"is": step, "answer": answer, **event})
        elif answer == "applied":
            self.timeline.add(number, {"is": "change index", **event})

    def _moves(self, call: Call) -> bool:
        """Return whether a write of the position changes more than times."""
        new = ReaderPosition.from_json(call.data)
        return call.bound_to is None or self.positions[call.bound_to].next != new.next

    def _write_position(self, number: int, call: Call, answer: str) -> None:
        if not self._moves(call):
            return
        at = ReaderPosition.from_json(call.data).next
        event = {"answer": answer, "at": at}
        if call.process.startswith("operator"):
            self.timeline.add(number, {"is": "write position", **event})
            return
        # The version of the queue with this front that the process has seen last.
        known = [
            note.version
            for note in self.notes[:number]
            if note.process == call.process
            and note.what == QUEUE
            and note.version is not None
            and self.queues[note.version].first_sequence <= at
        ]
        by = self._feeder(call.process, known[-1], number)
        self.timeline.add(number, {"is": "note", "by": by, **event})


# ---- faults of the code that traces must show


def _as_fed(noted: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(before: Any, prefix: str, queue: Manifest, *others: Any) -> Any:
        after = noted(before, prefix, queue, *others)
        if after is None or after == before:
            return after
        return replace(after, next=max(after.next, queue.next_sequence))

    return mutated


def _from_memory(fed: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(entries: Any, queue: Manifest | None) -> Manifest | None:
        if queue is None or not entries:
            return fed(entries, queue)
        new = [v1_feed.NewEntry(entry.location, entry.metadata) for entry in entries]
        return queue.append(new)

    return mutated


def _without_v1(floor_of: Callable[..., int]) -> Callable[..., int]:
    def mutated(index: LogIndex, positions: dict[str, int], *others: Any) -> int:
        return floor_of(index, {n: at for n, at in positions.items() if n != READER}, *others)

    return mutated


MUTATIONS: dict[str, tuple[int, Mutation, set[str]]] = {
    "the position is what was fed": (1, (v1_feed, "noted", _as_fed), {"note"}),
    "a feeder appends without a look at the end of the queue": (
        1,
        (v1_feed, "fed", _from_memory),
        {"feed"},
    ),
    "the floor ignores the v1 consumer": (
        1,
        (opendata_buffer.gc, "floor_of", _without_v1),
        {"write floor"},
    ),
}
"""Mutations of the code by their effect: a seed that shows it, the change, and the kinds of events
at which its trace is rejected."""
