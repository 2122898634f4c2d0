"""A model of a queue's promises, which is checked after every change.

:class:`WatchedStore` passes every change of the store, with the process that made it, to the
:class:`DeliveryModel`. :class:`Sink` is the transactional system that a consumer writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer import outcomes
from opendata_buffer.errors import CorruptManifest
from opendata_buffer.formats.batch import Transaction, decode_batch, parse_location
from opendata_buffer.formats.manifest import Manifest, Metadata, check_transition
from opendata_buffer.stores.base import Blob, DeleteFailure, Listing, PutOutcome, Store
from opendata_buffer.stores.probed import Probed
from tests.support.simulation import Simulation


@dataclass(frozen=True, slots=True)
class Record:
    """A record's identity: the name of its producer, and a number counted from 0."""

    producer: str
    number: int

    def encode(self) -> bytes:
        return f"{self.producer}:{self.number}".encode()

    @classmethod
    def decode(cls, entry: bytes) -> Record:
        producer, _, number = entry.decode().rpartition(":")
        return cls(producer, int(number))


@dataclass
class Sink:
    """A system with transactions.

    The sequence of the last batch, the reader's own state, and all records change together.
    """

    position: int | None = None
    state: Any = None
    records: list[Record] = field(default_factory=list)

    def write(
        self, expected: int | None, position: int, records: Iterable[Record], state: Any
    ) -> bool:
        """Write unless another process has written since ``expected`` was read."""
        if self.position != expected:
            return False
        self.position = position
        self.state = state
        self.records += records
        return True

    def holds(self, sequence: int) -> bool:
        """Return whether the sink has the batch of this sequence."""
        return self.position is not None and sequence <= self.position


class DeliveryModel:
    """The promises and the facts to check them; calls ``fail`` with the first broken promise."""

    def __init__(self, fail: Callable[[str], object], prefix: str, manifest_path: str) -> None:
        self._fail = fail
        self._prefix = prefix
        self.manifest_path = manifest_path
        self.sink = Sink()
        self.manifest = Manifest.empty()
        self.owner = ""
        self.durable: dict[Record, str] = {}
        """Records that were reported durable, and their reported locations."""
        self.sequences: dict[str, int] = {}
        """The first sequence of every location that was ever in the manifest."""
        self.may_repeat: Callable[[str], bool] = lambda location: False
        """Whether a location's writer queues it again if it gets no answer."""
        self.repeats: dict[int, str] = {}
        """Repeats by sequence. They must not be delivered unless the first copy was skipped."""
        self.lost: set[str] = set()
        """Batches deleted before the sink had them. None of them may be or become durable."""
        self.counts = dict.fromkeys(
            ("manifest writes", "claims", "dequeues", "collected", "lost unacknowledged", "torn"), 0
        )
        self._durable_locations: set[str] = set()
        self._last: dict[str, int] = {}
        self._seen: set[Record] = set()
        self._written: dict[str, list[Record]] = {}
        self._locations: dict[int, str] = {}
        self._passed: set[int] = set()
        self._skipped: dict[Record, list[int]] = {}
        self._plain: set[Record] = set()

    # Changes of the store.

    def manifest_written(self, process: str, raw: bytes) -> None:
        before, self.counts["manifest writes"] = self.manifest, self.counts["manifest writes"] + 1
        try:
            after = Manifest.parse(raw)
            after.entries()
            check_transition(before, after)
        except CorruptManifest as error:
            self._fail(f"{process} wrote an illegal manifest: {error}")
            return
        old, new = before.entries(), after.entries()
        dropped = after.first_sequence - before.first_sequence
        kept = max(0, len(old) - dropped)
        if old[len(old) - kept :] != new[:kept]:
            self._fail(f"{process} changed queued entries: {old} -> {new}")
        for entry in new[kept:]:
            first = self.sequences.setdefault(entry.location, entry.sequence)
            if first != entry.sequence:
                self.repeats[entry.sequence] = entry.location
                if not self.may_repeat(entry.location):
                    self._fail(f"{entry.location} is queued twice, at {first} and {entry.sequence}")
            self._locations[entry.sequence] = entry.location
        if after.epoch != before.epoch:
            self.counts["claims"] += 1
            if after.epoch != before.epoch + 1 or len(new) != kept:
                self._fail(f"{process} claimed {before} as {after}")
            self.owner = process
        if dropped:
            self.counts["dequeues"] += 1
            self._check_dequeued(process, after)
        self.manifest = after

    def _check_dequeued(self, process: str, after: Manifest) -> None:
        if process != self.owner:
            self._fail(f"{process} dequeued, but {self.owner} owns epoch {after.epoch}")
        if not self.sink.holds(after.first_sequence - 1):
            self._fail(
                f"{process} dequeued through {after.first_sequence - 1}, but the sink holds only "
                f"{self.sink.position}"
            )

    def sidecar_written(self, process: str, key: str, data: bytes) -> None:
        """Note a change of another object by compare-and-swap."""

    def object_written(self, key: str, data: bytes) -> None:
        self.lost.discard(key)
        self._written[key] = [Record.decode(entry) for entry in decode_batch(data)]

    def object_deleted(self, process: str, key: str) -> None:
        if parse_location(key, self._prefix) is None:
            self._fail(f"{process} deleted {key}, which is not a batch")
        self.counts["collected"] += 1
        sequence = self.sequences.get(key)
        if sequence is not None and self.sink.holds(sequence):
            return
        if key in self._durable_locations:
            self._fail(f"{process} deleted {key} (sequence {sequence}), durable and not yet read")
        self.lost.add(key)
        if sequence is not None:
            # It can land after the collector looked. Then it may never be reported durable.
            self.counts["lost unacknowledged"] += 1

    # Reports of the actors.

    def produced_plain(self, records: Iterable[Record]) -> None:
        """Note records that are about to be produced without metadata. All others have metadata."""
        self._plain.update(records)

    def reported_durable(self, records: Iterable[Record], sequence: int, location: str) -> None:
        if location in self.lost:
            self._fail(f"{location} is reported durable after it was deleted unread")
        if self.sequences.get(location) != sequence:
            at = self.sequences.get(location)
            self._fail(f"{location} is reported durable at {sequence}, but it was put at {at}")
        self._durable_locations.add(location)
        for record in records:
            self.durable[record] = location

    def is_forgotten(self, first: int | None, sequence: int) -> bool:
        """Return whether a repeat at ``sequence`` comes too late to be recognized."""
        return False

    def check_batch(
        self, sequence: int, location: str, entries: list[bytes], metadata: tuple[Metadata, ...]
    ) -> list[Record]:
        """Check that the ranges of a batch match the calls that produced it."""
        records = [Record.decode(entry) for entry in entries]
        first = self.sequences.get(location)
        was_skipped = any(first in self._skipped.get(record, ()) for record in records)
        is_repeat = self.repeats.get(sequence) == location
        if is_repeat and self.is_forgotten(first, sequence):
            return []  # The sink's users live with it; the model counts the first delivery.
        if first != sequence and not (was_skipped and is_repeat):
            self._fail(f"batch {location} was read at {sequence}, queued elsewhere")
        starts = [item.start_index for item in metadata]
        ends = [*starts[1:], len(records)] if starts else []
        for item, end in zip(metadata, ends, strict=True):
            said = item.payload.decode()
            call = records[item.start_index : end]
            if call and not said and self._plain.issuperset(call):
                continue  # the range may span several calls
            if not call or said != f"{call[0].producer}:{call[0].number}+{len(call)}":
                self._fail(f"range {item} of {location} holds {call}")
        if sum(end - start for start, end in zip(starts, ends, strict=True)) != len(records):
            self._fail(f"metadata of {location} does not cover its {len(records)} records")
        return records

    def write_sink(
        self, expected: int | None, position: int, records: list[Record], state: Any
    ) -> bool:
        """Write a batch to the sink; fail if a record is out of order or repeated."""
        if not self.sink.write(expected, position, records, state):
            return False
        if records:
            self._passed.add(position)
        for record in records:
            if record in self._seen:
                self._fail(f"{record} is in the sink twice, again with batch {position}")
            self._seen.add(record)
            last = self._last.get(record.producer, -1)
            if record.number < last and record not in self._skipped:
                self._fail(f"{record} comes after number {last} (batch {position})")
            self._last[record.producer] = max(last, record.number)
        return True

    def poison(self, sequence: int, location: str) -> None:
        """Note that a batch cannot be read; fail if it was reported durable and never read.

        A zombie may miss a batch that its successor has read and the collector has deleted. That
        breaks no promise. The records of the batch may arrive later and out of order if their
        producer repeats them.
        """
        for record in self._written.get(location, ()):
            self._skipped.setdefault(record, []).append(sequence)
        if location in self._durable_locations and not self.sink.holds(sequence):
            self._fail(f"durable batch {sequence} at {location} cannot be read")

    # At the end.

    @property
    def is_drained(self) -> bool:
        """Whether the sink has everything, and the queue holds nothing except repeats after it."""
        last = self.manifest.next_sequence - 1
        while last in self.repeats:
            last -= 1
        return self.sink.holds(last) and self.manifest.first_sequence > last

    def check_delivered(self) -> None:
        """Check that no durable record is missing from the sink after the queue was drained."""
        missing = [
            record
            for record in self.durable
            if record not in self._seen and not self._is_torn(record)
        ]
        if missing:
            where = {self.durable[record] for record in missing}
            self._fail(f"{len(missing)} durable records are not in the sink: {missing}, {where}")
        if not self.is_drained:
            self._fail(f"the drained queue still holds {self.manifest}")

    def check_complete(self, producer: str, count: int) -> None:
        """Check that the sink has ``count`` records of a producer that retried, each once."""
        numbers = {record.number for record in self.sink.records if record.producer == producer}
        missing = [
            number
            for number in range(count)
            if number not in numbers and not self._is_torn(Record(producer, number))
        ]
        if missing or len(numbers) > count:
            self._fail(f"{producer} made {count} records durable; {missing} are missing")

    def _is_torn(self, record: Record) -> bool:
        """Return whether the record was skipped although another batch of its append was read.

        The filter cannot repair this loss: a repeat would deliver the other batch twice
        (see :meth:`~opendata_buffer.consumer.isolation.TransactionFilter.skip`).
        """
        torn = any(
            sequence in self._passed
            for skipped in self._skipped.get(record, ())
            for sequence in self._append_of(skipped)
        )
        self.counts["torn"] += torn
        return torn

    def _append_of(self, sequence: int) -> list[int]:
        """Return the contiguous sequences of the transaction that contains an entry, if any."""
        txn = self._transaction(sequence)
        if txn is None:
            return []
        first = last = sequence
        while self._transaction(first - 1) == txn:
            first -= 1
        while self._transaction(last + 1) == txn:
            last += 1
        return list(range(first, last + 1))

    def _transaction(self, sequence: int) -> Transaction | None:
        parsed = parse_location(self._locations.get(sequence, ""), self._prefix)
        return None if parsed is None else parsed.txn


class WatchedStore:
    """One process's connection to the shared store.

    Each access has a scheduling point before and after it, and is atomic in between, as on an
    object store. A process that is killed at the first point has written nothing. If it is killed
    at the second one, it has written but never learns it. ``on_access`` is called with operation
    and key before an access takes effect, for pauses and kills at moments that random times would
    hardly ever hit.
    """

    def __init__(
        self,
        inner: Store,
        simulation: Simulation,
        model: DeliveryModel,
        process: str,
        *,
        on_access: Callable[[str, str], object] = lambda operation, key: None,
    ) -> None:
        self._inner = inner
        self._simulation = simulation
        self._model = model
        self._process = process
        self._on_access = on_access

    @property
    def url(self) -> str:
        return self._inner.url

    def get(self, key: str, **options: Any) -> Blob | None:
        self._begin("get", key)
        found = self._inner.get(key, **options)
        self._simulation.checkpoint()
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._begin("put", key)
        self._inner.put(key, data)
        self._model.object_written(key, bytes(data))
        self._simulation.checkpoint()

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        self._begin("put_if", key)
        outcome = self._inner.put_if(key, data, condition)
        self._simulation.log(f"  {type(outcome).__name__}")
        if isinstance(outcome, outcomes.Applied) and key == self._model.manifest_path:
            self._model.manifest_written(self._process, data)
            self._simulation.log(f"  {self._model.manifest}")
        elif isinstance(outcome, outcomes.Applied):
            self._model.sidecar_written(self._process, key, data)
        self._simulation.checkpoint()
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
        self._simulation.checkpoint()
        return listing

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        failed: list[DeleteFailure] = []
        for key in keys:
            self._begin("delete", key)
            failed += self._inner.delete_many([key])
            self._model.object_deleted(self._process, key)
        self._simulation.checkpoint()
        return tuple(failed)

    def _begin(self, operation: str, key: str) -> None:
        self._on_access(operation, key)
        self._simulation.checkpoint()
        self._simulation.log(f"{self._process} {operation} {key}")
