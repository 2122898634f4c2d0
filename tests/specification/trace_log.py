"""Traces of a log: producers, movers, named readers, resets, and a collector on a faulty store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import opendata_buffer.gc
from opendata_buffer import Consumer
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue import log_index, reader_queue
from opendata_buffer.queue import queue as queue_module
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import Part, page_from_json, span_of_segment
from opendata_buffer.queue.log_segments import Segments
from opendata_buffer.queue.queue import Queue, _Append, left_to_log
from opendata_buffer.queue.reader_positions import ReaderPosition
from opendata_buffer.queue.reader_queue import ReaderQueue
from tests.simulation.actors import PlainProducer, collect_garbage, run_services
from tests.simulation.cluster import MANIFEST, PREFIX, Node
from tests.simulation.test_log import INDEX, READERS, Follower, LogCluster
from tests.specification.recorded_cluster import LOST, RecordedCluster
from tests.specification.traces import (
    Call,
    Converter,
    Event,
    Mutation,
    Note,
    Recorder,
    SetOf,
    Trace,
    patched,
    run_noted,
)
from tests.support.logs import become_log
from tests.support.simulation import SimTask

T = TypeVar("T")
KINDS = {
    *("look before append", "append", "told", "arrive", "look before move"),
    *("read index before move", "store segment", "write index", "look before take"),
    *("read index before take", "take position", "look before registration", "register"),
    *("read manifest", "read index", "hand out", "acknowledge", "seek"),
    *("set back", "confirm reset"),
    *("look before confirmation", "look before collection", "read position", "write floor"),
    *("delete", "delete segment"),
}
"""The kinds of events in traces."""
SEGMENTS = f"{PREFIX}/_log/"
OPERATOR = "operator"


class TracedLogCluster(RecordedCluster, LogCluster):
    """A log whose processes are recorded. TLC checks its promises."""

    def __init__(self, seed: int, records: int = 24) -> None:
        super().__init__(seed)
        self.records = records
        self.names = self.names[:2]
        self.idle_s = 1.0
        self.request_faults = 0.003
        self.seek_share = 0.05
        # With wrong clocks a collector would delete nothing, and the trace would show little.
        self.disturbances = ("kill", "short pause", "outage", "zombie")
        lost = {name: getattr(self.plan, name) / 2 for name in LOST}
        self.plan = replace(
            self.plan, wrong_dates=0, partial_lists=0, hangs=0, stalls=0, delete_errors=0, **lost
        )

    def _disturb(self, node: Node, zombies: bool) -> bool:
        # A trace has few events, so most processes must run long enough to act.
        return self.chance(0.3) and super()._disturb(node, zombies)

    def enable(self) -> None:
        node = self.node(OPERATOR)
        config = self.consumer_config()
        grace_ms = int(self.grace_s * 1000)

        def enable() -> None:
            become_log(node.store, config, node.runtime, grace_ms=grace_ms)

        self.patiently(node, enable)
        self.recorder.note("begin")

    def begin(self) -> tuple[list[Follower], list[SimTask]]:
        """Make the log, and start readers, a collector, and producers.

        Returns:
            The readers, and the tasks that end when everything is produced.
        """
        self.enable()
        followers = [Follower(self, name) for name in self.names]
        for follower in followers:
            self.supervise(follower.name, follower.live, lambda: False, zombies=True)
        self.supervise("cron", lambda node: collect_garbage(self, node), lambda: False)
        producers = [PlainProducer(self, f"plain{n}", self.records // 2) for n in range(2)]
        tasks = [
            self.director.spawn(
                lambda producer=producer: run_services(self, [producer]), producer.name
            )
            for producer in producers
        ]
        return followers, tasks

    def finish_when(self, tasks: list[SimTask]) -> None:
        """Wait for the tasks, and for the collector to do the rest."""
        for task in tasks:
            task.join()
        self.director.sleep(2.5 * self.grace_s)

    def scenario(self) -> None:
        """Read, reset, and collect until everything is produced."""
        followers, tasks = self.begin()
        for _ in range(self.draw(3)):
            self.director.sleep(self.uniform(0, 20))
            view = self.model.manifest
            follower = followers[self.draw(len(followers))]
            node = self.node(OPERATOR)
            floor = 0 if self.model.index is None else self.model.index.floor
            follower.set_to(node, floor + self.draw(view.next_sequence - floor + 1))
        self.finish_when(tasks)


def noted_around(
    recorder: Recorder, begins: str, what: Callable[..., Any], ends: str = ""
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a change of a call that notes where it begins and ends."""

    def change(call: Callable[..., T]) -> Callable[..., T]:
        def noted(*arguments: Any, **options: Any) -> T:
            if begins:
                recorder.note(begins, what(*arguments))
            found = None
            try:
                found = call(*arguments, **options)
                return found
            finally:
                if ends:
                    recorder.note(ends, (arguments[0], found))

        return noted

    return change


def notes_floor(recorder: Recorder) -> Mutation:
    """Return the patch that notes where a collector raises the floor."""
    around = noted_around(recorder, "floor", lambda collector, view, *_: view.index, "floor ended")
    return GarbageCollector, "_raise_floor", around


def notes_calls(recorder: Recorder) -> list[Mutation]:
    """Return the patches that note calls, which show the call that a request belongs to."""
    around = partial(noted_around, recorder)

    def moved(log: Log, manifest: Manifest) -> Any:
        return manifest.raw

    return [
        (Queue, "append", around("append", lambda queue, entries: entries, "appended")),
        (queue_module, "move_entries", around("move", moved)),
        (
            ReaderQueue,
            "_take",
            around("take", lambda queue, index, *_: (queue, index, queue._queue.last_seen)),
        ),
        (ReaderQueue, "_seen", around("view", lambda queue, *seen: (queue, *seen))),
        (ReaderQueue, "_moved_to", around("seek", lambda *_: None, "sought")),
        (Consumer, "next_batch", around("", lambda *_: None, "handed")),
        (Consumer, "skip", around("", lambda *_: None, "skipped")),
        notes_floor(recorder),
    ]


@contextmanager
def small() -> Any:
    """Use segments of few entries, and remember few batches to recognize repeats."""
    with patched(
        (Log, "most_entries", lambda _: 4),
        (Log, "left_entries", lambda _: 1),
        (Segments, "most_entries", lambda _: 6),
        (log_index, "FAN", lambda _: 3),
        (opendata_buffer.gc, "_PAGE", lambda _: 5),
        *(
            (module, "REMEMBERED", lambda _: 3)
            for module in (log_index, reader_queue, opendata_buffer.gc)
        ),
    ):
        yield


def record(seed: int, *mutations: Mutation, records: int = 24) -> Trace:
    """Run the code, with mutations if there are any, and return its trace."""
    # Mutations come first, so that the notes are about the mutated code.
    with small(), patched(*mutations):
        cluster = TracedLogCluster(seed, records)
        calls = notes_calls(cluster.recorder)
        run_noted(cluster.simulation, cluster.scenario, calls, is_mutated=bool(mutations))
    return LogConverter(cluster.recorder, cluster.names).trace()


class LogConverter(Converter):
    """Converts the notes of a log."""

    def __init__(self, recorder: Recorder, names: list[str]) -> None:
        super().__init__(recorder)
        self.begin = next(n for n, note in enumerate(self.notes) if note.kind == "begin")
        self.names = names
        self.entries: dict[str, int] = {}  # by location, the entry in the specification
        self.groups: dict[str, list[int]] = {}
        self.movers: dict[str, str] = {}  # by segment
        self.runs: dict[int, str] = {}  # by reader queue
        self.taken: set[str] = set()
        self.moved: dict[str, int] = {}  # by run, the note of its last move of a position
        self.run_of: dict[str, str] = {}  # by process, its last run
        self.view: dict[str, tuple[bytes, LogIndex, bool]] = {}
        self.appending: dict[str, str] = {}  # by task
        self.moving: dict[str, bytes] = {}  # by task, the manifest that it moves from
        self.floors: set[str] = set()  # processes that raise the floor
        self.seeks = self._spans("seek", "sought")
        self.objects: dict[str, bytes] = {}
        self.gone: set[str] = set()
        self.manifests = {
            data: version for (key, version), data in recorder.data.items() if key == MANIFEST
        }
        self.indexes = {
            version: LogIndex.from_json(data)
            for (key, version), data in recorder.data.items()
            if key == INDEX
        }
        self.positions = {
            version: ReaderPosition.from_json(data)
            for (key, version), data in recorder.data.items()
            if key.startswith(READERS)
        }
        # Versions of the index are counted from the initial one.
        made = [n.version for n in self.notes[: self.begin] if n.what == INDEX and n.call]
        base = recorder.versions[INDEX].index(max(filter(None, made), key=int))
        self.changes = {v: n - base for n, v in enumerate(recorder.versions[INDEX])}

    def _spans(self, begin: str, end: str) -> dict[str, list[tuple[int, int]]]:
        """Return where the notes of a call begin and end, by the task that made it."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, note in enumerate(self.notes):
            spans = found.setdefault(note.task, [])
            if note.kind == begin:
                spans.append((number, len(self.notes)))
            elif note.kind == end:
                spans[-1] = (spans[-1][0], number)
        return found

    def trace(self) -> Trace:
        """Return all events, with the constants of the specification."""
        for number, note in enumerate(self.notes):
            if number > self.begin:
                self.convert(number, note)
            elif note.kind == "put":
                self.objects[note.what] = note.data
        return Trace(
            "Log",
            self.timeline.events(),
            {
                "TraceProducers": set(self.groups),
                "TraceGroups": self.groups,
                "TraceMovers": set(self.movers.values()),
                "TraceReaders": set(self.names),
                "TraceRuns": set(self.runs.values()),
            },
        )

    # Reads: where a process learned a value that it uses later.

    def look(
        self,
        process: str,
        key: str,
        version: str | None,
        before: int,
        event: Event,
        after: int = 0,
    ) -> None:
        """Add a look, at the time when the process learned the version, or at ``after``."""
        at = self.knowledge.of_version(process, key, version, before)
        at = max(self.begin if at is None else at, self.begin, after)
        if key == MANIFEST:
            event |= self.manifest(version)
        else:
            assert version is not None
            event |= {"changes": self.changes[version]}
        self.timeline.add(at, event)

    def look_at_index(
        self, process: str, index: LogIndex, before: int, event: Event, after: int = 0
    ) -> None:
        # Of several equal versions, the one that the process has learned last.
        (version,) = [v for v, found in self.indexes.items() if found == index]
        self.look(process, INDEX, version, before, event, after)

    def manifest(self, version: str | None) -> Event:
        if version is None:
            return {"first": 0, "end": 0}
        return self._manifest_event(Manifest.parse(self.recorder.data[MANIFEST, version]))

    def _manifest_event(self, manifest: Manifest) -> Event:
        return {"first": manifest.first_sequence, "end": manifest.next_sequence}

    # Requests.

    def _get(self, number: int, note: Note) -> None:
        if note.process in self.floors and note.what.startswith(READERS) and note.version:
            at = self.positions[note.version].next
            name = note.what.removeprefix(READERS)[:-5]
            self.timeline.add(number, {"is": "read position", "name": name, "at": at})

    def _put(self, number: int, note: Note) -> None:
        if not note.what.startswith(SEGMENTS):
            return
        self.objects[note.what] = note.data
        span = span_of_segment(note.what)
        if span is None:
            return  # a page
        mover = self.movers.setdefault(note.what, f"m{len(self.movers)}")
        manifest = self.manifests[self.moving[note.task]]
        self.look(note.process, MANIFEST, manifest, number, self._by("look before move", mover))
        learned = [
            n
            for n, found in enumerate(self.notes[:number])
            if found.process == note.process
            and found.what == INDEX
            and found.version in self.changes
            and (found.kind == "get" or (found.call is not None and found.call.answer == "applied"))
        ]
        version = self.notes[learned[-1]].version
        event = self._by("read index before move", mover)
        self.look(note.process, INDEX, version, number, event)
        event = self._by("store segment", mover)
        self.timeline.add(number, {**event, "from": span[0], "to": span[1]})

    def _by(self, event: str, who: str) -> Event:
        return {"is": event, "by": who}

    def _delete(self, number: int, note: Note) -> None:
        key = note.what
        if key in self.gone:
            return
        self.gone.add(key)
        if (span := span_of_segment(key)) is not None and key in self.movers:
            event = self._by("delete segment", self.movers[key])
            self.timeline.add(number, {**event, "from": span[0], "to": span[1]})
        elif (sequence := self.sequence_of(key, number)) is not None:
            self.timeline.add(number, {"is": "delete", "sequence": sequence})

    def sequence_of(self, location: str, before: int) -> int | None:
        """Return the sequence of a batch before a note, if it was queued."""
        for note in self.notes[:before]:
            if note.what == MANIFEST and note.call is not None and note.version is not None:
                found = Manifest.parse(note.call.data)
                if (sequence := found.find(location)) is not None:
                    return sequence
        return None

    def arrived(self, number: int, note: Note, call: Call) -> None:
        if call.key == MANIFEST:
            event = self._manifest_event(Manifest.parse(call.data))
            self.timeline.add(number, {"is": "arrive", "at": "manifest", **event})
        elif call.key == INDEX:
            assert note.version is not None
            event = self._index_event(LogIndex.from_json(call.data), self.changes[note.version])
            self.timeline.add(number, {"is": "arrive", "at": "index", **event})
        elif call.key.startswith(READERS) and self._moves(call):
            found = ReaderPosition.from_json(call.data)
            name = call.key.removeprefix(READERS)[:-5]
            event = {"is": "arrive", "at": name, "next": found.next, "epoch": found.epoch}
            self.timeline.add(number, event)

    def write(self, number: int, note: Note, call: Call, answer: str) -> None:
        if call.key == MANIFEST:
            self._write_manifest(number, note, call, answer)
        elif call.key == INDEX:
            self._write_index(number, call, answer)
        elif call.key.startswith(READERS):
            self._write_position(number, call, answer)

    def _write_manifest(self, number: int, note: Note, call: Call, answer: str) -> None:
        old = self.manifest(call.bound_to)
        new = self._manifest_event(Manifest.parse(call.data))
        if new["end"] > old["end"]:
            group = self.appending[call.task]
            look = self._by("look before append", group)
            self.look(call.process, MANIFEST, call.bound_to, number, look)
            self.timeline.add(number, {**self._by("append", group), "answer": answer, **new})
        elif answer == "applied" or (answer == "unknown" and self.is_current(call, number)):
            # A write that was certainly not applied is not a step.
            self.timeline.add(number, {"is": "trim", "answer": answer, **new})

    def _segments(self, index: LogIndex) -> SetOf:
        """Return the segments from the floor on, including those that pages name."""
        waiting = [(part, level) for level, parts in enumerate(index.levels) for part in parts]
        found: list[Part] = []
        while waiting:
            part, level = waiting.pop()
            if level:
                data = self.objects[SEGMENTS + part.name]
                waiting += [(child, level - 1) for child in page_from_json(data)]
            elif part.end > index.floor:
                found.append(part)
        return SetOf(
            {"mover": self._mover_of(part), "from": part.first, "to": part.end} for part in found
        )

    def _mover_of(self, part: Part) -> str:
        return self.movers.get(SEGMENTS + part.name, "nobody")

    def _index_event(self, index: LogIndex, changes: int) -> Event:
        return {
            "changes": changes,
            "end": index.end,
            "floor": index.floor,
            "readers": frozenset(index.readers),
            "segments": self._segments(index),
        }

    def _write_index(self, number: int, call: Call, answer: str) -> None:
        assert call.bound_to is not None
        old, new = self.indexes[call.bound_to], LogIndex.from_json(call.data)
        event = {"answer": answer, **self._index_event(new, self.changes[call.bound_to] + 1)}
        bound = call.bound_to
        if new.end > old.end:
            (part,) = [part for part in new.parts() if part.end == new.end]
            mover = self._mover_of(part)
            self.timeline.add(number, {**self._by("write index", mover), **event})
        elif new.floor > old.floor or not set(old.readers) <= set(new.readers):
            self.timeline.add(number, {"is": "write floor", **event})
        elif new.levels != old.levels:
            if answer == "applied":
                self.timeline.add(number, {"is": "change index", **event})
        else:
            run = OPERATOR if call.process.startswith(OPERATOR) else self.run_of[call.process]
            moved = self.moved.get(run, 0)
            learned = self.knowledge.of_version(call.process, INDEX, bound, number)
            if (learned or 0) < moved and answer != "applied" and not self.is_current(call, number):
                return  # It began with the index from before the position, and nothing happened.
            if run == OPERATOR:
                look, write = {"is": "look before confirmation"}, {"is": "confirm reset"}
            else:
                look = self._by("look before registration", run)
                write = self._by("register", run)
            self.look(call.process, INDEX, bound, number, look, after=moved)
            self.timeline.add(number, {**write, **event})

    def _moves(self, call: Call) -> bool:
        """Return whether a write of a position changes more than its time."""
        new = ReaderPosition.from_json(call.data)
        if call.bound_to is None:
            return True
        old = self.positions[call.bound_to]
        return (old.next, old.epoch) != (new.next, new.epoch)

    def _is_seek(self, call: Call) -> bool:
        spans = self.seeks.get(call.task, ())
        return any(begin < call.sent <= end for begin, end in spans)

    def _write_position(self, number: int, call: Call, answer: str) -> None:
        if answer == "conflict" or not self.is_current(call, number):
            return
        if not self._moves(call) and not self._is_seek(call):
            return
        new = ReaderPosition.from_json(call.data)
        name = call.key.removeprefix(READERS)[:-5]
        old = 0 if call.bound_to is None else self.positions[call.bound_to].epoch
        event = {"answer": answer, "name": name, "at": new.next, "epoch": new.epoch}
        if call.process.startswith(OPERATOR):
            self.moved[OPERATOR] = number
            self.timeline.add(number, {"is": "set back", **event})
        else:
            kind = "take position" if new.epoch > old else "acknowledge"
            if self._is_seek(call):
                kind = "seek"
            if kind != "acknowledge":
                self.moved[self.run_of[call.process]] = number
            self.timeline.add(number, {**self._by(kind, self.run_of[call.process]), **event})

    # Calls.

    def _append(self, number: int, note: Note) -> None:
        group = f"p{len(self.groups)}"
        ids = [self.entries.setdefault(e.location, 1 + len(self.entries)) for e in note.what]
        self.groups[group] = ids
        self.appending[note.task] = group

    def _appended(self, number: int, note: Note) -> None:
        _, first = note.what
        if isinstance(first, int):
            event = self._by("told", self.appending[note.task])
            self.timeline.add(number, {**event, "first": first})

    def _move(self, number: int, note: Note) -> None:
        self.moving[note.task] = note.what

    def _take(self, number: int, note: Note) -> None:
        queue, index, manifest = note.what
        if "reset" in queue._program:
            return
        run = self.runs.setdefault(id(queue), f"r{len(self.runs)}")
        self.run_of[note.process] = run
        if run in self.taken:
            # The floor was past its position before it was registered.
            look = self._by("look before registration", run)
            self.look_at_index(note.process, index, number, look, after=self.moved.get(run, 0))
            return
        self.taken.add(run)
        raw = b"" if manifest is None else manifest.raw
        look = {**self._by("look before take", run), "name": queue.name}
        self.look(note.process, MANIFEST, self.manifests.get(raw), number, look)
        look = self._by("read index before take", run)
        self.look_at_index(note.process, index, number, look)

    def _view(self, number: int, note: Note) -> None:
        queue, manifest, index, _ = note.what
        run = self.runs.get(id(queue))
        if run is None:
            return
        seen, known, is_known = self.view.get(run, (manifest.raw, index, True))
        if manifest.raw != seen:
            version = self.manifests[manifest.raw]
            self.look(note.process, MANIFEST, version, number, self._by("read manifest", run))
            is_known = is_known and manifest.first_sequence <= known.end
        if index != known or not is_known:
            self.look_at_index(note.process, index, number, self._by("read index", run))
        self.view[run] = (manifest.raw, index, True)

    def _handed(self, number: int, note: Note) -> None:
        _, batch = note.what
        if batch is not None:
            event = self._by("hand out", self.run_of[note.process])
            self.timeline.add(number, {**event, "sequence": batch.sequence})

    _skipped = _handed

    def _floor(self, number: int, note: Note) -> None:
        self.floors.add(note.process)
        self.look_at_index(note.process, note.what, number, {"is": "look before collection"})

    def _floor_ended(self, number: int, note: Note) -> None:
        self.floors.discard(note.process)


# ---- faults of the code that traces must show


def _trims_first(shorten: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(queue: Any, find_log: Any, manifest: Manifest, **options: Any) -> Any:
        end = manifest.next_sequence - Log.left_entries
        if manifest.entry_count > Log.most_entries:
            queue._change(lambda before: left_to_log(before, end))
        return shorten(queue, find_log, manifest, **options)

    return mutated


def _names_first(move: Callable[..., Any]) -> Callable[..., Any]:
    class Delayed:
        """A store that writes segments only on request."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.waiting: list[tuple[str, bytes]] = []

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def put(self, key: str, data: bytes) -> None:
            self.waiting.append((key, data))

    def mutated(log: Log, manifest: Manifest) -> Any:
        segments = log.segments
        store, segments.store = segments.store, Delayed(segments.store)  # type: ignore[assignment]
        try:
            return move(log, manifest)
        finally:
            delayed, segments.store = segments.store, store
            for key, data in delayed.waiting:  # type: ignore[attr-defined]
                store.put(key, data)

    return mutated


def _of_the_fastest(floor_of: Callable[..., int]) -> Callable[..., int]:
    def mutated(index: LogIndex, positions: dict[str, int], *others: Any) -> int:
        fastest = max(positions.values(), default=0)
        return floor_of(index, dict.fromkeys(positions, fastest), *others)

    return mutated


MUTATIONS: dict[str, tuple[int, Mutation, set[str]]] = {
    "the manifest is trimmed before the index is written": (
        2,
        (Queue, "shorten", _trims_first),
        {"trim"},
    ),
    "the index names a segment before it is stored": (
        2,
        (queue_module, "move_entries", _names_first),
        {"write index"},
    ),
    "the floor is that of the fastest reader": (
        11,
        (opendata_buffer.gc, "floor_of", _of_the_fastest),
        {"write floor"},
    ),
    "a fenced reader acknowledges": (
        2,
        (ReaderQueue, "check_epoch", lambda _: lambda *_: None),
        {"acknowledge", "seek"},
    ),
    "a lost append is not looked for": (
        1,
        (_Append, "find", lambda _: lambda *_: False),
        {"look before append"},
    ),
}
"""Mutations of the code by their effect: a seed that shows it, the change, and the kinds of events
at which its trace is rejected."""
