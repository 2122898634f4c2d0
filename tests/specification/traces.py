"""Check a simulated run of the code against a module of the specification, with TLC.

A simulation runs the real code. A :class:`Recorder` notes the reads and writes of each process, in
the order in which the store performed them, and the answers that the process got. The modules
``trace_log``, ``trace_collector``, and ``trace_broker`` turn these notes into a list of events.
Each event is a step of the specification with the values that were seen, such as::

    {"is": "trim", "first": 5, "answer": "applied"}

:func:`validate` writes the events as a TLA+ sequence, and TLC looks for a behaviour of the
specification that has these steps in this order. ``Trace<Module>.tla`` defines the action of each
event, and the steps without an event that may lie in between. If there is no such behaviour, the
code does something that the specification does not allow, or the specification is wrong.
:class:`Verdict` names the first event that no behaviour explains.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opendata_buffer import outcomes
from opendata_buffer.errors import ObjectNotFound
from opendata_buffer.stores.base import Blob, DeleteFailure, Listing, PutOutcome
from tests.support.faults import HarshStore
from tests.support.simulation import Simulation, SimulationFailed
from tools.specification import FOLDER, jar, java

Event = dict[str, Any]
Mutation = tuple[Any, str, Callable[[Any], Any]]
"""A class or module, the name of an attribute, and a function that returns its replacement."""
ANSWERS = {
    outcomes.Applied: "applied",
    outcomes.LostRace: "conflict",
    outcomes.Vanished: "conflict",
    outcomes.Unknown: "unknown",
}


# ---- recording


@dataclass(eq=False)
class Call:
    """A conditional write as its process sees it.

    Attributes:
        process, task, key, data: The process and its thread, and the object and bytes it wrote.
        bound_to: The version that it replaces; None if there was no object.
        effect: The effect in the store; None if the request has not arrived.
        answer: The answer that the process got; empty without an answer.
        sent: The number of the next note at the time of the request.
    """

    process: str
    key: str
    data: bytes
    bound_to: str | None
    task: str
    effect: PutOutcome | None = None
    answer: str = ""
    sent: int = 0


@dataclass
class Note:
    """One noted event.

    Attributes:
        kind: ``get``, ``put``, ``delete``, ``list``, ``effect`` and ``answer`` of a conditional
            write, ``late`` for a write that was given up before it arrived, or the argument of
            :meth:`Recorder.note`.
        at_s: Virtual time since the beginning, seconds.
        what: A key, or the argument of :meth:`Recorder.note`.
    """

    kind: str
    process: str
    task: str
    at_s: float
    what: Any
    version: str | None = None
    data: bytes = b""
    call: Call | None = None

    @property
    def at_ms(self) -> int:
        """Its time in whole milliseconds, like the wall clocks of the code."""
        return int(self.at_s * 1000)


class Recorder:
    """Notes the actions of a simulation's processes, in order.

    ``recording`` may be switched, because the setup of a queue is not part of a trace.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.notes: list[Note] = []
        self.recording = True
        self.data: dict[tuple[str, str], bytes] = {}
        """The bytes of each version that a conditional write made, by key."""
        self.versions: dict[str, list[str]] = {}
        """The versions of each key, oldest first."""
        self._open: dict[int, Call] = {}

    @property
    def process(self) -> str:
        """The running process."""
        return self.simulation.current.process.name

    def note(self, kind: str, what: Any = None, *, process: str | None = None, **rest: Any) -> None:
        """Add a note."""
        if self.recording:
            now, task = self.simulation.now, self.simulation.current.name
            self.notes.append(Note(kind, process or self.process, task, now, what, **rest))

    def watch(self, store: HarshStore, process: str) -> None:
        """Watch a process: the requests that it sends, and their effects."""
        watched: Any = store.inner
        # Below the scheduling points of a watched store, so a note is made together with its
        # effect.
        if hasattr(watched, "_inner"):
            watched._inner = Witness(watched._inner, self, process)
        else:
            store.inner = Witness(watched, self, process)
        send = store.put_if

        def put_if(key: str, data: bytes, version: str | None) -> PutOutcome:
            call = Call(process, key, data, version, self.simulation.current.name)
            call.sent = len(self.notes)
            self._open[id(data)] = call
            outcome = send(key, data, version)
            call.answer = ANSWERS[type(outcome)]
            self.note("answer", key, process=process, call=call)
            return outcome

        store.put_if = put_if  # type: ignore[method-assign]

    def applied(self, key: str, data: bytes, version: str) -> None:
        """Note a version that a conditional write made."""
        self.data[key, version] = data
        self.versions.setdefault(key, []).append(version)

    def call_of(self, data: bytes) -> Call | None:
        """Return the call that sent these bytes; late bytes are still the same Python object."""
        return self._open.get(id(data))


class Witness:
    """A store that notes its requests."""

    def __init__(self, inner: Any, recorder: Recorder, process: str) -> None:
        self._inner = inner
        self._recorder = recorder
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, key: str, **options: Any) -> Blob | None:
        """Note the version that was read."""
        try:
            found: Blob | None = self._inner.get(key, **options)
        except ObjectNotFound:
            self._recorder.note("get", key, process=self._process)
            raise
        version = options.get("if_changed") if found is None else found.version
        self._recorder.note("get", key, process=self._process, version=version)
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Note the object."""
        self._inner.put(key, data)
        self._recorder.note("put", key, process=self._process, data=bytes(data))

    def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
        """Note the effect of the write, and its call."""
        outcome: PutOutcome = self._inner.put_if(key, data, version)
        call = self._recorder.call_of(data)
        made = None
        if isinstance(outcome, outcomes.Applied):
            made = outcome.value
            self._recorder.applied(key, data, made)
        late = call is not None and bool(call.answer)
        if call is not None and not late:
            call.effect = outcome
        # A request that was given up and then refused on arrival changes nothing.
        if not late or made is not None:
            kind = "late" if late else "effect"
            self._recorder.note(kind, key, process=self._process, version=made, call=call)
        return outcome

    def list(self, prefix: str, **options: Any) -> Listing:
        """Note the objects."""
        listing: Listing = self._inner.list(prefix, **options)
        self._recorder.note("list", listing, process=self._process)
        return listing

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """Note each key."""
        keys = tuple(keys)
        failed: tuple[DeleteFailure, ...] = self._inner.delete_many(keys)
        for key in keys:
            self._recorder.note("delete", key, process=self._process)
        return failed


@contextmanager
def patched(*changes: Mutation) -> Iterator[None]:
    """Temporarily replace attributes of classes or modules."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, change in changes:
            setattr(owner, name, change(getattr(owner, name)))
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def run_noted(
    simulation: Simulation,
    scenario: Callable[[], object],
    notes_calls: Iterable[Mutation],
    *,
    is_mutated: bool,
) -> None:
    """Run a scenario, and note its calls in addition to its requests.

    Args:
        simulation: The simulation.
        scenario: The scenario.
        notes_calls: The patches that note calls. They apply to the mutated code.
        is_mutated: Whether the code is mutated. Mutated code may notice an error and end the run
            early. The events before that are a trace too.
    """
    try:
        with patched(*notes_calls):
            simulation.run(scenario)
    except SimulationFailed:
        if not is_mutated:
            raise


class Timeline:
    """Events in the order of notes. Several events may belong to one note."""

    def __init__(self, recorder: Recorder) -> None:
        self.notes = recorder.notes
        self._events: dict[int, list[tuple[int, Event]]] = {}
        self._added = 0

    def add(self, at: int, event: Event) -> None:
        """Add an event to the note with this number, after its other events."""
        self._added += 1
        self._events.setdefault(at, []).append((self._added, event))

    def events(self) -> list[Event]:
        """Return all events in order, with the time of their notes."""
        return [
            {**event, "ms": self.notes[at].at_ms if at >= 0 else 0}
            for at in sorted(self._events)
            for _, event in self._events[at]
        ]

    def times_us(self) -> list[int]:
        """Return the time of each event, in microseconds."""
        return [
            int(self.notes[at].at_s * 1e6) for at in sorted(self._events) for _ in self._events[at]
        ]


@dataclass
class Knowledge:
    """The notes at which each process learned a version of an object, by reading or writing it."""

    _learned: dict[tuple[str, str], list[tuple[int, str | None]]] = field(default_factory=dict)

    @classmethod
    def of(cls, notes: Sequence[Note]) -> Knowledge:
        """Create it from all notes."""
        found = cls()
        for number, note in enumerate(notes):
            call = note.call
            if note.kind == "get" or (
                note.kind == "effect" and call is not None and call.answer == "applied"
            ):
                found._learned.setdefault((note.process, note.what), []).append(
                    (number, note.version)
                )
        return found

    def of_version(self, process: str, key: str, version: str | None, before: int) -> int | None:
        """Return the last note before ``before`` at which a process learned a version, or None."""
        for number, found in reversed(self._learned.get((process, key), ())):
            if number < before and found == version:
                return number
        return None


class Converter:
    """Converts notes to events.

    The converter of a module has a method ``_<kind>`` for each kind of note that matters to it, and
    converts conditional writes in :meth:`write` and :meth:`arrived`.

    Args:
        recorder: The recorder of a simulation that has ended.
    """

    key = ""
    """The only object whose conditional writes count; empty for all."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.notes = recorder.notes
        self.knowledge = Knowledge.of(self.notes)
        self.timeline = Timeline(recorder)

    def convert(self, number: int, note: Note) -> None:
        """Convert a note, if its kind matters."""
        handle = getattr(self, f"_{note.kind.replace(' ', '_')}", None)
        if handle is not None:
            handle(number, note)

    def write(self, number: int, note: Note, call: Call, answer: str) -> None:
        """Convert a conditional write, at its effect or, if it had none, at its answer."""
        raise NotImplementedError

    def arrived(self, number: int, note: Note, call: Call) -> None:
        """Convert the effect of a write whose process got no answer."""
        raise NotImplementedError

    def is_current(self, call: Call, number: int) -> bool:
        """Return whether a write is bound to the version that is current before a note."""
        for note in reversed(self.notes[:number]):
            if (
                note.what == call.key
                and note.kind in ("effect", "late")
                and note.version is not None
            ):
                return note.version == call.bound_to
        return call.bound_to is None

    def _counted(self, note: Note) -> Call | None:
        call = note.call
        return call if call is not None and self.key in ("", call.key) else None

    def _effect(self, number: int, note: Note) -> None:
        if (call := self._counted(note)) is None:
            return
        effect = "applied" if note.version is not None else "conflict"
        self.write(number, note, call, call.answer or effect)
        if call.answer == "unknown" and effect == "applied":
            self.arrived(number, note, call)

    def _answer(self, number: int, note: Note) -> None:
        if (call := self._counted(note)) is not None and call.effect is None:
            self.write(number, note, call, call.answer)

    def _late(self, number: int, note: Note) -> None:
        if (call := self._counted(note)) is not None:
            self.arrived(number, note, call)


# ---- TLC's input and output


class SetOf(list[Any]):
    """A set in TLA+ whose members Python cannot hash."""


def tla(value: object) -> str:
    """Return a value in TLA+ syntax."""
    match value:
        case bool():
            return "TRUE" if value else "FALSE"
        case int():
            return str(value)
        case str():
            return f'"{value}"'
        case Mapping() if not value:
            return "<<>>"
        case Mapping():
            return "[" + ", ".join(f"{key} |-> {tla(value[key])}" for key in value) + "]"
        case SetOf() | set() | frozenset():
            return "{" + ", ".join(sorted(tla(item) for item in value)) + "}"
        case list() | tuple():
            return "<<" + ", ".join(tla(item) for item in value) + ">>"
    raise TypeError(f"{value!r} has no equivalent in TLA+")


def name_of(process: str) -> str:
    """Return a process's name as a field name of a TLA+ record."""
    return re.sub(r"\W", "_", process)


@dataclass(frozen=True)
class Trace:
    """The events of one run.

    Attributes:
        module: Module of the specification: ``Log``, ``Queue`` or ``Broker``.
        events: Events in order.
        constants: Definitions by name, which the configuration ``Trace<module>.cfg`` uses.
    """

    module: str
    events: Sequence[Event]
    constants: Mapping[str, object]

    def text(self) -> str:
        """Return the module ``TraceData``."""
        lines = [f"{name} == {tla(value)}" for name, value in self.constants.items()]
        events = ",\n".join(f"  {tla(event)}" for event in self.events)
        body = "\n".join([*lines, f"Trace == <<\n{events}\n>>"])
        return f"---- MODULE TraceData ----\nEXTENDS Integers, Sequences\n{body}\n====\n"


@dataclass(frozen=True)
class Verdict:
    """TLC's verdict on a trace.

    Attributes:
        accepted: Whether a behaviour of the specification has all the events.
        reached: The number of events that the longest behaviour explains.
        event: The first event that no behaviour explains; empty if the trace was accepted.
        violated: An invariant of the specification that fails in a state on the way.
        states: Distinct states that TLC found.
        seconds: Seconds that TLC took.
    """

    accepted: bool
    reached: int
    event: Event
    violated: str
    states: int
    seconds: float

    def __str__(self) -> str:
        if self.accepted:
            return f"accepted: {self.reached} events, {self.states} states, {self.seconds:.1f} s"
        if self.violated:
            return f"{self.violated} does not hold after {self.reached} events"
        return f"no behaviour explains event {self.reached + 1}: {self.event}"


def validate(trace: Trace, *, keep: Path | None = None, minutes: float = 5) -> Verdict:
    """Ask TLC whether the specification has a behaviour with the events of a trace.

    Args:
        trace: The recorded trace.
        keep: A folder for the modules, to read them or to run TLC by hand.
        minutes: TLC's time limit.

    Raises:
        NotThere: Java or TLC is missing.
        RuntimeError: TLC ended without a verdict, for example with an error in a module.
    """
    began = time.monotonic()
    name = f"Trace{trace.module}"
    with tempfile.TemporaryDirectory(prefix="tlc-") as scratch:
        folder = Path(scratch) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        for module in ("Store.tla", f"{trace.module}.tla", f"{name}.tla", f"{name}.cfg"):
            shutil.copy(FOLDER / module, folder)
        (folder / "TraceData.tla").write_text(trace.text())
        tlc = [
            java(),
            f"-Djava.io.tmpdir={scratch}",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-cp",
        ]
        tlc += [str(jar(get=False)), "tlc2.TLC", "-deadlock", "-workers", "1"]
        tlc += ["-metadir", scratch, "-config", f"{name}.cfg", name]
        out = subprocess.run(tlc, cwd=folder, capture_output=True, timeout=60 * minutes).stdout
    said = out.decode()
    reached = [int(number) - 1 for number in re.findall(r'^<<"reached", (\d+)>>', said, re.M)]
    states = re.findall(r"([\d,]+) distinct states found", said)
    violated = re.search(r"(?:Invariant|property) (\w+) is violated", said)
    if not reached or not states or ("No error has been found" not in said and not violated):
        where = max(said.find("Error:"), 0)
        raise RuntimeError("TLC gave no verdict. Its output:\n" + said[where : where + 3_000])
    accepted = violated is not None and violated[1] == "Unfinished"
    return Verdict(
        accepted,
        reached[-1],
        {} if accepted else trace.events[reached[-1]] if reached[-1] < len(trace.events) else {},
        "" if accepted or violated is None else violated[1],
        int(states[-1].replace(",", "")),
        time.monotonic() - began,
    )
