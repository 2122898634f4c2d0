"""Traces of a queue: producers, a consumer, and a collector, with clocks and late writes.

The collector's part of ``Queue.tla`` is about time: which objects are old, and how long one
reading of the manifest may be used for deletes. Each event therefore has its time, and TLC compares
the same numbers as the code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import opendata_buffer.gc
from opendata_buffer import Consumer
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import CommitStateUnknown, Fenced, FlushFailed, PoisonBatch
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.producer.handles import Durable
from opendata_buffer.producer.ordered_uploads import OrderedUploads
from opendata_buffer.producer.uploader import Uploader
from opendata_buffer.queue.queue import Queue, _Append
from tests.simulation.actors import collect_garbage
from tests.simulation.cluster import MANIFEST, PASSING, PREFIX, Node
from tests.specification.recorded_cluster import LOST, RecordedCluster
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
from tests.support.simulation import START_MS
from tests.support.tuned import tuned

KINDS = {
    *("store", "remember", "begin append", "look before append", "append", "durable", "arrive"),
    *("look before claim", "claim", "hand out", "look before acknowledge", "acknowledge"),
    *("list", "read after listing", "delete"),
}
"""The kinds of events in traces."""


class TracedCluster(RecordedCluster):
    """Producers, a consumer, and a collector, all recorded."""

    def __init__(self, seed: int, records: int = 8) -> None:
        super().__init__(seed)
        self.records = records
        # Some writes are delayed until the object may be deleted when they land (failure F5).
        self.request_faults = 0.1
        self.faulty_requests = ("put_if",)
        # With every second seed, they take longer than the grace period, and the append waits.
        late = seed % 2 == 1
        low, high = (1.05, 1.5) if late else (0.3, 1.0)
        self.fault_pause_s = (low * self.grace_s, high * self.grace_s)
        self.timeout_ms = 120_000 if late else 20_000
        self.disturbances = ("kill", "short pause", "outage")
        lost = {name: getattr(self.plan, name) / 2 for name in LOST}
        # The specification stores an upload once, and its deletes arrive at once.
        still = dict.fromkeys(("put_errors", "delete_errors", "stalls", "hangs", "wrong_dates"), 0)
        self.plan = replace(self.plan, partial_lists=0, **still, **lost)
        self.skew_ms = self.draw(20_000) - 10_000
        """Error of the collector's clock, milliseconds; with more it would delete nothing."""

    def _disturb(self, node: Node, zombies: bool) -> bool:
        return self.chance(0.2) and super()._disturb(node, zombies)

    def node(self, name: str) -> Node:
        # A machine that sleeps stops its clock, which this module does not model.
        node = replace(super().node(name), sleeps=False)
        node.runtime.clock_skew_ms = self.skew_ms if name == "cron" else self.draw(8_000) - 4_000
        return node

    def _pause(self, node: Node, seconds: float) -> None:
        self.simulation.pause(node.runtime, seconds)

    def producer_config(self) -> ProducerConfig:
        return tuned(
            ProducerConfig,
            store="memory://simulation",
            data_path_prefix=PREFIX,
            flush_interval_ms=50,
            delivery_timeout_ms=600_000,
            timeout_ms=self.timeout_ms,
        )

    def produce(self, node: Node, name: str) -> None:
        """Produce one batch after the other, and wait for each of them."""
        producer = self.patiently(node, lambda: self.producer(node, self.producer_config()))
        while self.left[name]:
            self.left[name] -= 1
            producer.produce([f"{name}:{self.left[name]}".encode()])
            try:
                producer.flush()
            except FlushFailed as error:
                self.log(f"{node.name}: {error}")
            node.runtime.sleep(self.uniform(0, 20))
        try:
            producer.close()
        except FlushFailed as error:
            self.log(f"{node.name}: {error}")

    def consume(self, node: Node) -> None:
        """Read and acknowledge one batch at a time."""
        try:
            consumer = self.patiently(
                node,
                lambda: Consumer(self.consumer_config(), store=node.store, runtime=node.runtime),
            )
            while True:
                try:
                    batch = consumer.next_batch()
                    if batch is None:
                        self.patiently(node, consumer.flush)
                        node.runtime.sleep(self.uniform(0.1, 5))
                        continue
                    self.patiently(node, lambda batch=batch: consumer.ack(batch.sequence))
                except PASSING:
                    node.runtime.sleep(0.5)
                except PoisonBatch as error:
                    sequence = error.sequence
                    self.patiently(node, lambda sequence=sequence: consumer.skip(sequence))
                    self.patiently(node, lambda sequence=sequence: consumer.ack(sequence))
        except Fenced as error:
            self.log(f"{node.name}: {error}")

    def scenario(self) -> None:
        """Run until everything is produced and the collector has run after that."""
        names = [f"producer{n}" for n in range(2)]
        self.left = dict.fromkeys(names, self.records // 2)
        tasks = [
            self.supervise(
                name,
                lambda node, name=name: self.produce(node, name),
                lambda name=name: not self.left[name],
            )
            for name in names
        ]
        self.supervise("reader", self.consume, lambda: False)
        self.supervise("cron", lambda node: collect_garbage(self, node), lambda: False)
        for task in tasks:
            task.join()
        self.director.sleep(2.5 * self.grace_s)


def notes_calls(recorder: Recorder) -> list[Mutation]:
    """Return the patches that note calls, in addition to requests."""

    def append(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(queue: Queue, entries: Any, **options: Any) -> Any:
            recorder.note("append", entries)
            try:
                return call(queue, entries, **options)
            finally:
                recorder.note("appended")

        return noted

    def upload(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(uploader: Any, batch: Any, *arguments: Any) -> Any:
            recorder.note("upload", batch)
            return call(uploader, batch, *arguments)

        return noted

    def repair(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(uploader: Any, batch: Any) -> Any:
            recorder.note("repair", batch)
            return call(uploader, batch)

        return noted

    def take(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(uploads: Any, now: Any, most: Any = None) -> Any:
            ready, again = call(uploads, now, 1)  # the specification has groups of one
            for batch in ready:
                recorder.note("take", batch)
            return ready, again

        return noted

    def refused(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(uploads: Any, error: Any, now: Any) -> Any:
            for batch in uploads._group:
                recorder.note("refused", batch)
            return call(uploads, error, now)

        return noted

    def complete(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(uploads: Any, batch: Any, outcome: Any) -> Any:
            if batch.outcome is None:
                recorder.note("completed", (batch, outcome))
            return call(uploads, batch, outcome)

        return noted

    def handed(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            found = call(*arguments, **options)
            recorder.note("handed", found)
            return found

        return noted

    return [
        (Queue, "append", append),
        (Uploader, "upload", upload),
        (Uploader, "repair", repair),
        (OrderedUploads, "take", take),
        (OrderedUploads, "refused", refused),
        (OrderedUploads, "_complete", complete),
        (Consumer, "next_batch", handed),
        (Consumer, "skip", handed),
    ]


def record(seed: int, *mutations: Mutation, records: int = 8) -> Trace:
    """Run the code, with mutations if there are any, and return its trace."""
    with patched(*mutations):
        cluster = TracedCluster(seed, records)
        calls = notes_calls(cluster.recorder)
        run_noted(cluster.simulation, cluster.scenario, calls, is_mutated=bool(mutations))
    return QueueConverter(cluster.recorder, int(cluster.grace_s * 1000), cluster.skew_ms).trace()


class QueueConverter(Converter):
    """Converts the notes of a queue."""

    key = MANIFEST

    def __init__(self, recorder: Recorder, grace_ms: int, skew_ms: int) -> None:
        super().__init__(recorder)
        self.grace_ms = grace_ms
        self.skew_ms = skew_ms
        self.batches: dict[int, str] = {}
        self.producer_of: dict[str, str] = {}  # by location
        self.uploading: dict[str, Any] = {}  # by task
        self.appending: dict[str, str] = {}  # by task
        self.asked: set[str] = set()  # producers that have read the manifest in this append
        self.consumers: set[str] = set()
        self.completed: dict[str, int] = {}  # by producer, when it got an outcome
        self.listed: dict[str, int] = {}  # by collector, its last listing
        self.told: set[int] = set()  # listings that have events
        self.stored: set[str] = set()
        self.repaired: set[str] = set()

    def trace(self) -> Trace:
        """Return all events, with the constants of the specification."""
        for number, note in enumerate(self.notes):
            self.convert(number, note)
        return Trace(
            "Queue",
            self.timeline.events(),
            {
                "TraceProducers": set(self.batches.values()),
                "TraceConsumers": self.consumers,
                "TraceGrace": self.grace_ms,
                "TraceSkew": self.skew_ms,
            },
        )

    def producer(self, batch: Any) -> str:
        return self.batches.setdefault(id(batch), f"p{len(self.batches)}")

    def manifest(self, version: str | None) -> Event:
        if version is None:
            return {"first": 0, "epoch": 0, "end": 0}
        return self.shown(Manifest.parse(self.recorder.data[MANIFEST, version]))

    def shown(self, manifest: Manifest) -> Event:
        return {
            "first": manifest.first_sequence,
            "epoch": manifest.epoch,
            "end": manifest.next_sequence,
        }

    def named(self, location: str) -> int:
        parsed = parse_location(location, PREFIX)
        assert parsed is not None
        return parsed.timestamp_ms - START_MS

    def add(self, number: int, kind: str, by: str, **rest: Any) -> None:
        self.timeline.add(number, {"is": kind, "by": by, **rest})

    # Producers.

    def _upload(self, number: int, note: Note) -> None:
        self.producer(note.what)
        self.uploading[note.task] = note.what

    def _put(self, number: int, note: Note) -> None:
        key = note.what
        if parse_location(key, PREFIX) is None:
            return
        if key in self.stored:
            by = self.producer_of[key]
            if key in self.repaired:
                self.add(number, "repair", by)
                self.completed[by] = number
            else:
                self.add(number, "store again", by, named=self.named(key))
            return
        self.stored.add(key)
        batch = self.uploading[note.task]
        by = self.producer_of[key] = self.producer(batch)
        # The name was made in the first step of the upload, which takes no virtual time.
        begun = next(
            n for n in reversed(self.notes[:number]) if n.kind == "upload" and n.task == note.task
        )
        self.add(number, "store", by, made=begun.at_ms, named=self.named(key))

    def _repair(self, number: int, note: Note) -> None:
        self.repaired.add(note.what.location)

    def _take(self, number: int, note: Note) -> None:
        self.add(number, "begin append", self.producer(note.what))

    def _append(self, number: int, note: Note) -> None:
        (entry,) = note.what
        self.appending[note.task] = self.producer_of[entry.location]
        self.asked.discard(note.task)

    def _appended(self, number: int, note: Note) -> None:
        self.appending.pop(note.task, None)

    def _get(self, number: int, note: Note) -> None:
        if note.what != MANIFEST:
            return
        if note.task in self.appending:
            self.asked.add(note.task)
            by = self.appending[note.task]
            if by in self.completed:
                return  # it was given up, so its outcome reaches no caller
            self.add(number, "look before append", by, **self.manifest(note.version))
            return
        listing = self.listed.get(note.process)
        if listing not in self.told and listing is not None and self.deletes_after(number, note):
            self.told.add(listing)
            self.timeline.add(listing, {"is": "list"})
            self.timeline.add(number, {"is": "read after listing", **self.manifest(note.version)})

    def deletes_after(self, number: int, read: Note) -> bool:
        """Return whether a collector deletes anything before it lists or reads again."""
        for note in self.notes[number + 1 :]:
            if note.process == read.process:
                if note.kind == "list" or (note.kind == "get" and note.what == MANIFEST):
                    return False
                if note.kind == "delete" and note.what in self.producer_of:
                    return True
        return False

    def _refused(self, number: int, note: Note) -> None:
        self.add(number, "refuse", self.producer(note.what))

    def _completed(self, number: int, note: Note) -> None:
        batch, outcome = note.what
        by = self.producer(batch)
        if by in self.completed:
            return
        if isinstance(outcome, Durable):
            kind = "durable"
        else:
            kind = "unknown" if isinstance(outcome, CommitStateUnknown) else "failed"
        self.add(number, kind, by)
        self.completed[by] = number

    # Writes of the manifest.

    def arrived(self, number: int, note: Note, call: Call) -> None:
        self.timeline.add(number, {"is": "arrive", **self.shown(Manifest.parse(call.data))})

    def write(self, number: int, note: Note, call: Call, answer: str) -> None:
        old, new = self.manifest(call.bound_to), self.shown(Manifest.parse(call.data))
        learned = self.knowledge.of_version(call.process, MANIFEST, call.bound_to, number)
        at = -1 if learned is None else learned
        if new["end"] > old["end"]:
            by = self.appending[call.task]
            if call.task not in self.asked:
                self.add(at, "remember", by, **old)
            self.asked.add(call.task)
            over = self.completed.get(by, number)
            if call.sent <= over < number:
                # The batch was given up while the request was on its way. It arrives now.
                self.add(over - 1, "append", by, answer="unknown", **new)
                if answer == "applied":
                    self.timeline.add(number, {"is": "arrive", **new})
                return
            self.add(number, "append", by, answer=answer, **new)
            return
        by = self.consumer(call.process)
        if new["epoch"] > old["epoch"]:
            self.add(at, "look before claim", by, **old)
            self.add(number, "claim", by, answer=answer, **new)
        else:
            self.add(at, "look before acknowledge", by, **old)
            self.add(number, "acknowledge", by, answer=answer, **new)

    # The consumer and the collector.

    def consumer(self, process: str) -> str:
        name = "c" + process.partition("#")[2]
        self.consumers.add(name)
        return name

    def _handed(self, number: int, note: Note) -> None:
        if note.what is not None:
            by = self.consumer(note.process)
            self.add(number, "hand out", by, sequence=note.what.sequence)

    def _list(self, number: int, note: Note) -> None:
        self.listed[note.process] = number

    def _delete(self, number: int, note: Note) -> None:
        if note.what in self.producer_of and note.what in self.stored:
            by = self.producer_of[note.what]
            self.add(number, "delete", by, named=self.named(note.what))


# ---- faults of the code that traces must show


def _reads_first(pages: Callable[..., Any]) -> Callable[..., Any]:
    class Remembered:
        def __init__(self, inner: Any) -> None:
            self.found = inner.read()

        def read(self) -> Any:
            return self.found

    def mutated(collector: GarbageCollector, dry_run: bool) -> Any:
        inner = collector._manifest
        collector._manifest = Remembered(inner)  # type: ignore[assignment]
        try:
            yield from pages(collector, dry_run)
        finally:
            collector._manifest = inner

    return mutated


def _without_grace(plan: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, grace_ms, **options: plan(*arguments, grace_ms=0, **options)


def _believes(landed: Callable[..., Any]) -> Callable[..., Any]:
    def mutated(uploads: OrderedUploads, first: int, now: Any) -> Any:
        for position, batch in enumerate(uploads._group):
            uploads._complete(batch, Durable(first + position, batch.location))
        uploads._group = []
        return []

    return mutated


MUTATIONS: dict[str, tuple[int, Mutation, set[str]]] = {
    "the manifest is read before the listing": (
        0,
        (GarbageCollector, "_pages", _reads_first),
        {"delete", "list"},
    ),
    "there is no grace period": (
        0,
        (opendata_buffer.gc, "plan", _without_grace),
        {"delete", "list"},
    ),
    "a late append is believed": (3, (OrderedUploads, "landed", _believes), {"durable"}),
    "a lost append is not looked for": (
        0,
        (_Append, "find", lambda _: lambda *_: False),
        {"append", "look before append"},
    ),
}
"""Mutations of the code by their effect: a seed that shows it, the change, and the kinds of events
at which its trace is rejected."""
