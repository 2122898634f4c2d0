"""Transactions over several queues: a commit record decides each, and markers carry it out.

Each attempt at a batch is a producer of its own with exactly one transaction. Its batches are
CONTINUE_TXN messages in each partition; the app's commit record decides; markers in the
partitions carry the decision out::

    begin()     claim the record; commit in all partitions the batch that it names
    ...         the caller appends the pending batches, while prepare() stores those of the markers
    decide()    write the record: batch, producer, intents.  <- this commits
    complete()  write markers to all partitions at once; roll back what other runs left undecided

A run that is killed before ``decide`` was applied never commits: the next run rolls its attempt
back and repeats the batch as another producer. If it is killed later, the next run finds the batch
in the record and writes the markers (failure F39).

**The commit record** of an app is ``<prefix>/app=<id>/_commit.json`` of a single queue, and follows
what the manifest shows. Of a topic it is ``_topic/app=<id>/_commit.json`` and **decides**: a write
to several partitions is committed if and only if the record names its producer. Only the run that
its field ``run`` names may decide. A run claims the record once, before it appends anything, and
notes what is undecided in a manifest *before* it reads or writes the record: it rolls that back
only if the record still names the run (decision 0019).

**A marker** is an ACK_TXN message: with a clock beyond those of the producer's CONTINUE_TXN
messages it commits them, with a clock before them it rolls them back. It is appended only where the
very manifest that it goes into shows the producer undecided, so writing it again does nothing.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from opendata_buffer import errors, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch, later_ulid
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages import ACK_TXN, FINAL, Undecided, build_uuid, undecided
from opendata_buffer.queue.cas import (
    LARGEST,
    CasObject,
    CasStore,
    OutcomeUnknown,
    Sidecar,
    is_number,
)
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.stores.base import Put, Store

log = logging.getLogger(__name__)

ROLL_BACK = 1
"""Clock of a marker that rolls back; clocks of transactions begin beyond it."""


@dataclass(frozen=True, slots=True)
class TransactionMarker:
    """The end of one producer's transaction in one queue.

    ``clock`` is beyond its last message, or :data:`ROLL_BACK`; ``txn`` is part of the entry's name;
    before the sequence ``since`` the producer wrote nothing: those entries are not decoded.
    """

    producer: bytes
    clock: int
    txn: Transaction | None = None
    since: int = 0


def undecided_of_app(
    manifest: Manifest, prefix: str, app: str, since: int = 0
) -> dict[bytes, Undecided]:
    """An app's undecided transactions by producer, those that began at ``since`` or later."""
    if f"{prefix}/app={app}/".encode() not in manifest.raw:
        return {}
    return {
        producer: each
        for producer, each in _undecided(manifest, prefix, since).items()
        if each.txn is not None and each.txn.app == app
    }


def undecided_markers(
    manifest: Manifest, prefix: str, markers: Sequence[TransactionMarker]
) -> tuple[TransactionMarker, ...]:
    """Those of the markers whose producer the manifest shows undecided."""
    # A message's UUID ends with its producer: where the manifest's bytes do not contain it,
    # nothing has to be decoded.
    raw = manifest.raw
    named = [each for each in markers if f"-{each.producer.hex()}/".encode() in raw]
    if not named:
        return ()
    found = _undecided(manifest, prefix, min(each.since for each in named))
    return tuple(each for each in named if each.producer in found)


def _undecided(manifest: Manifest, prefix: str, since: int) -> dict[bytes, Undecided]:
    first = manifest.first_sequence
    if since <= first:
        return undecided(enumerate(manifest.locations(), first), prefix)  # faster than entries
    entries = manifest.entries(since)
    return undecided(((each.sequence, each.location) for each in entries), prefix)


class MarkerWriter:
    """Writes markers into the queues of a topic, several queues at once. Not thread-safe.

    ``queue_of`` gives a partition's queue, which one thread at a time uses. The names of markers'
    batches are ``ahead_ms`` ahead of time, the collector's grace period: so they outlive a pause of
    this process before they are appended.
    """

    def __init__(
        self,
        store: Put,
        config: QueueConfig,
        queue_of: Callable[[str], Queue],
        runtime: Runtime,
        *,
        ahead_ms: int,
    ) -> None:
        self._store = store
        self._config = config
        self._queue_of = queue_of
        self._runtime = runtime
        self._ahead_ms = ahead_ms
        self._prepared: defaultdict[str, dict[tuple[bytes, int], NewEntry]] = defaultdict(dict)
        """By partition, then producer and clock."""

    def prepare(self, name: str, marker: TransactionMarker) -> None:
        """Store a marker's batch, so that :meth:`write` does not have to. It decides nothing."""
        entry = self._store_batch(name, marker, self._ahead_ms)
        self._prepared[name][marker.producer, marker.clock] = entry

    def drop_prepared(self, producer: bytes, clocks: Mapping[str, int]) -> None:
        """Do not append the prepared markers of a producer, given by partition, any more."""
        for name, clock in clocks.items():
            self._prepared[name].pop((producer, clock), None)

    def write(self, markers: Mapping[str, Collection[TransactionMarker]]) -> int:
        """End transactions in these partitions at once, except those that have ended there. May be
        repeated at any time and from any process; raises as :meth:`.Queue.append`, of the first
        partition that failed. Returns how many this call ended, counted per partition.
        """
        ended = in_parallel(self._runtime, lambda name: self._write(name, markers[name]), markers)
        return sum(ended)

    def _write(self, name: str, markers: Collection[TransactionMarker]) -> int:
        queue, wanted = self._queue_of(name), tuple(markers)
        while wanted:
            todo = wanted
            entries = [
                self._prepared[name].get((each.producer, each.clock))
                or self._store_batch(name, each, self._ahead_ms)
                for each in todo
            ]

            def guard(
                before: Manifest, todo: tuple[TransactionMarker, ...] = todo
            ) -> tuple[TransactionMarker, ...] | None:
                left = undecided_markers(before, name, todo)
                return None if left == todo else left

            # A full manifest takes them, because without them it cannot be emptied (failure F35).
            outcome = queue.append(entries, guard=guard, makes_room=True)
            if isinstance(outcome, int):
                return len(todo)
            wanted = outcome
        return 0

    def expire_producer(self, producer: bytes, clock: int, names: Collection[str]) -> None:
        """Let readers forget a producer that has nothing undecided and writes nothing more. After
        an error some readers keep it for :data:`.HORIZON_DAYS` days."""

        def expire(name: str) -> None:
            marker = TransactionMarker(producer, clock)
            self._queue_of(name).append([self._store_batch(name, marker, 0)])

        in_parallel(self._runtime, expire, names)

    def _store_batch(self, name: str, marker: TransactionMarker, ahead_ms: int) -> NewEntry:
        """The entry of a marker. Its empty batch is stored; the entry is not appended."""
        ulid = later_ulid(self._runtime.ulid(), ahead_ms)
        message = build_uuid(marker.producer, marker.clock, ACK_TXN | FINAL)
        location = batch_key(name, ulid, marker.txn, message)
        # A committed transaction without its markers blocks its writer, so an outage of some
        # seconds must not end the attempt.
        self._config.retries(self._runtime)(self._store.put, location, encode_batch([]))
        return NewEntry(location)


TOPIC_FOLDER = "_topic"
"""Folder of the records of a topic's writers; no partition has such a name."""

RECORD = Sidecar(
    "the commit record",
    "It has the last batch that a query wrote. Restore its latest version (bucket "
    "versioning). That of a single queue may also be deleted: the manifest and the reader's filter "
    "still recognise repeats. That of a topic (below '_topic/') may not while its query has a "
    "batch to repeat.",
    max_bytes=1024 * 1024,  # the intents of a thousand partitions have 30 KiB
)


class Verdict(Enum):
    """The meaning of a topic's record for one attempt at a batch."""

    COMMITTED = "committed"
    """It names the attempt's producer."""
    REPEATED = "repeated"
    """It names another attempt at this batch, or a later batch."""
    OPEN = "open"
    """It names neither."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The committed batches of one app.

    Attributes:
        batch: Highest committed batch; -1 when the app id is only claimed.
        next_sequence: The queue's next sequence just after that batch; 0 in a topic's record.
        query: Id of the streaming query the app id belongs to, if it is known.
        others: Fields of later versions, kept when the record is written again.
        run: The run that may decide the next batch of a topic's writer; None for a single queue.
        producer: The producer id that wrote the batch into a topic, as hexadecimal digits.
        intents: The clock of the marker that commits the batch, by partition.
        positions: What a publisher has processed, by queue: text of a :class:`.Position`.
    """

    batch: int
    next_sequence: int
    query: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None
    producer: str | None = None
    intents: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The object's bytes, without the fields that have no value."""
        intents, positions = (dict(sorted(x.items())) for x in (self.intents, self.positions))
        return RECORD.encode_value(self, intents=intents or None, positions=positions or None)

    @classmethod
    def from_json(cls, raw: bytes) -> CommitRecord:
        """Read the object's bytes. ``CorruptData`` if they are no record of this version."""
        fields = RECORD.decode(raw)
        intents, positions = fields.mapping("intents", {}), fields.mapping("positions", {})
        batch = fields.number("batch", least=-1)
        found = fields.into(cls, batch=batch, intents=intents, positions=positions)
        if found.producer is not None and not re.fullmatch("[0-9a-fA-F]{12}", found.producer):
            raise fields.wrong("producer", "a producer id of 12 hexadecimal digits")
        if not all(is_number(clock, least=1) for clock in intents.values()):
            raise fields.wrong("intents", f"a clock from 1 to {LARGEST} for each partition")
        if not all(isinstance(text, str) for text in positions.values()):
            raise fields.wrong("positions", "a text for each queue")
        return found

    def raised(self, batch: int, next_sequence: int, query: str | None) -> CommitRecord:
        """The record after one more batch; unchanged for an older batch or another query."""
        if self.batch >= batch or (query is not None and self.query not in (None, query)):
            return self
        return replace(self, batch=batch, next_sequence=next_sequence, query=self.query or query)


def record_key(prefix: str, app: str) -> str:
    """Key of an app's commit record. It is no batch's name, so the collector does not delete it."""
    return f"{prefix}/app={app}/_commit.json"


def record_object(
    store: CasStore, prefix: str, app: str, runtime: Runtime, settings: QueueConfig
) -> CasObject[CommitRecord]:
    """An app's commit record in the store; ``prefix`` is that of :func:`record_key`."""
    return RECORD.cas_object(CommitRecord, store, record_key(prefix, app), runtime, settings)


def claimed(record: CommitRecord | None, app: str, query: str | None) -> CommitRecord | None:
    """The record of an app, with the query that is about to write. ``InvalidInput`` if the app id
    belongs to another query; unknown ones are not checked."""
    if query is None or query == app:
        return record  # an app id that is the query's own id cannot be taken by another one
    if record is None:
        return CommitRecord(-1, 0, query)
    if record.query is None:
        return replace(record, query=query)
    if record.query != query:
        done = f"its batches up to {record.batch}" if record.batch >= 0 else "nothing yet"
        raise errors.InvalidInput(
            f"txnAppId {app!r} belongs to query {record.query}, which has written {done}; this is "
            f"query {query}. Both count their batches from 0, so batches of one would be taken "
            "for repeats of the other's and be lost. Give this query a txnAppId of its own. A "
            "query whose checkpoint was deleted is a new query, and needs a new one, too."
        )
    return record


@dataclass(frozen=True, slots=True)
class _BatchProof:
    """How the record shows that an attempt at a batch was committed."""

    batch: int
    producer: str
    key: str

    def mark(self) -> int:
        """A record has one place."""
        return 0

    def find(self, now: CommitRecord | None, marks: Sequence[int]) -> bool:
        """Whether the record names the attempt."""
        if marks and now is not None and now.batch > self.batch:
            # The answer was lost, and the next owner has committed a later batch since: it may have
            # found this one committed, or committed another attempt at it.
            raise OutcomeUnknown(f"{self.key!r} names batch {now.batch} by now")
        return now is not None and (now.batch, now.producer) == (self.batch, self.producer)


class OwnedRecord:
    """A topic's commit record as one run of an app owns it. A run claims once: what was appended
    under an earlier claim cannot be committed any more. Not thread-safe."""

    def __init__(self, app: str, record: CasObject[CommitRecord], run: str) -> None:
        self.key = record.key
        self.roll_backs: dict[str, dict[bytes, TransactionMarker]] = {}
        """By partition and producer, the markers that roll back earlier runs."""
        self._app = app
        self._object = record
        self._run = run
        self._searched: dict[str, int] = {}
        """Per partition, the sequence up to which its manifest was searched."""

    @property
    def record(self) -> CommitRecord | None:
        """The record as last read or written."""
        return self._object.last_seen

    def claim(self, batch: int, query: str | None) -> CommitRecord:
        """Write this run into the record, unless the batch is committed. Called once, first."""

        def change(record: CommitRecord | None) -> CommitRecord:
            found = claimed(record, self._app, query) or CommitRecord(-1, 0, query)
            if found.batch >= batch or found.run == self._run:
                return found
            return replace(found, run=self._run)

        return self._object.change(change)

    def is_owned(self) -> bool:
        """Whether no other run has claimed the record since. Reads it."""
        now = self._object.read()
        return isinstance(now, CommitRecord) and now.run == self._run

    def continues(self, batch: int, query: str | None) -> bool:
        """Whether this run may go on with a batch without a claim: not if the record does not name
        the query yet, or if batches are missing since its last one and another run has claimed the
        record, because Spark commits in any of its idle Python workers."""
        record = self.record
        if claimed(record, self._app, query) is not record:
            return False
        return record is None or batch <= record.batch + 1 or self.is_owned()

    def decide(
        self, batch: int, producer: str, intents: Mapping[str, int], positions: Mapping[str, str]
    ) -> outcomes.Outcome[CommitRecord | None]:
        """Write a batch into the record, which commits it; see :meth:`verdict`."""

        def change(record: CommitRecord | None) -> CommitRecord | None:
            # Unchanged also where it names this attempt already: it may be applied twice.
            if record is None or record.run != self._run or record.batch >= batch:
                return record
            # What was read and what was written of it are committed by one write.
            return replace(
                record,
                batch=batch,
                producer=producer,
                intents=dict(intents),
                positions={**record.positions, **positions},
            )

        proof = _BatchProof(batch, producer, self.key)
        return self._object.update(change, proof=proof, from_memory=True)

    def verdict(self, batch: int, producer: str) -> Verdict:
        """The meaning of the record, as last read or written, for an attempt."""
        record = self.record
        if record is None or record.batch < batch:
            return Verdict.OPEN
        named = record.batch == batch and record.producer == producer
        return Verdict.COMMITTED if named else Verdict.REPEATED

    def note_undecided(self, name: str, manifest: Manifest | None, but: bytes | None) -> None:
        """Note the undecided producers of a partition, which are to be rolled back, but one."""
        if manifest is None:
            return
        found = undecided_of_app(manifest, name, self._app, self._searched.get(name, 0))
        self._searched[name] = manifest.next_sequence
        for producer, each in found.items():
            if producer != but:
                marker = TransactionMarker(producer, ROLL_BACK, each.txn)
                self.roll_backs.setdefault(name, {})[producer] = marker


_DEADLINE_MS = 10_000
"""Deadline of one change of a record; a micro-batch waits for it."""

_ANY_BATCH = 2**63


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a batch, by a producer drawn for it; ``intents`` has the clock of the marker
    that commits it by partition, ``positions`` what it has processed by queue."""

    txn: Transaction
    producer: bytes
    intents: Mapping[str, int]
    positions: Mapping[str, str] = field(default_factory=dict)


class TransactionCoordinator:
    """Decides the writes of apps to one topic. Not thread-safe; an app has one at a time.

    After any error the next :meth:`begin` is that of a new run, which reads everything again. The
    arguments are those of :class:`MarkerWriter`, and the ``folder`` of the records.
    """

    def __init__(
        self,
        store: Store,
        config: QueueConfig,
        queue_of: Callable[[str], Queue],
        runtime: Runtime,
        *,
        ahead_ms: int,
        folder: str = TOPIC_FOLDER,
    ) -> None:
        self._store = store
        self._folder = folder
        self._config = config.with_timeout(min(_DEADLINE_MS, config.timeout_ms))
        self._queue_of = queue_of
        self._runtime = runtime
        self.markers = MarkerWriter(store, config, queue_of, runtime, ahead_ms=ahead_ms)
        self._owned: dict[str, OwnedRecord] = {}
        self._decided: dict[str, OwnedRecord] = {}
        """Batches without all of their markers. While an app is here it is not in ``_owned``: its
        next batch would overwrite the record that names this one."""

    def begin(self, txn: Transaction, query: str | None, partitions: Collection[str]) -> bool:
        """Called before anything of an attempt is appended, with all partitions of the topic.

        False when the batch was committed before; its markers are in all partitions now. The first
        call reads and writes the record, and reads each manifest; the others cost no request.
        ``InvalidInput`` where the app id belongs to another query.
        """
        known = self._owned.get(txn.app)
        if known is not None:
            # Queries of one process share its coordinator. A query whose checkpoint was deleted
            # counts from 0 again: without this check its batches would pass for repeats.
            if known.continues(txn.batch, query):
                return known.record is None or known.record.batch < txn.batch
            del self._owned[txn.app]
        owned, record, _ = self._claim(txn.app, txn.batch, query, partitions)
        if record.batch >= txn.batch:
            if owned.roll_backs:
                # The run that committed the batch was killed before it had rolled back the
                # others; or it lives and writes its next batch. Only a claim distinguishes them:
                # in the second case it makes that run fail.
                with suppress(errors.Superseded):  # a run that claimed meanwhile does the same
                    self.recover(txn.app, query, partitions)
            return False
        self._owned[txn.app] = owned
        return True

    def recover(self, app: str, query: str | None, partitions: Collection[str]) -> int:
        """End what earlier runs of an app left undecided, without writing a batch; returns how many
        transactions, counted per partition. A live run of the app elsewhere is fenced.
        ``Superseded`` where another run began meanwhile; it does the same.
        """
        if app in self._owned:
            return 0
        owned, record, ended = self._claim(app, _ANY_BATCH, query, partitions)
        if owned.roll_backs:
            if not owned.is_owned():
                raise errors.Superseded(app, record.batch + 1)
            ended += self._end(owned, {})
        self._owned[app] = owned
        return ended

    def committed(self, app: str) -> int:
        """The highest committed batch of an app that was begun or recovered; -1 for none."""
        record = self._owned[app].record
        return -1 if record is None else record.batch

    def positions(self, app: str) -> Mapping[str, str]:
        """The committed positions of an app that was begun or recovered."""
        owned = self._owned.get(app)
        return {} if owned is None or owned.record is None else owned.record.positions

    def verdict_on(self, txn: Transaction, producer: bytes) -> Verdict:
        """The meaning of the record of an app that was begun or recovered, for an attempt."""
        return self._owned[txn.app].verdict(txn.batch, producer.hex())

    def prepare(self, attempt: Attempt, name: str) -> None:
        """See :meth:`.MarkerWriter.prepare`. May be called for several partitions at once."""
        marker = TransactionMarker(attempt.producer, attempt.intents[name], attempt.txn)
        self.markers.prepare(name, marker)

    def decide(self, attempt: Attempt) -> bool:
        """Commit an attempt whose pending batches are in all partitions.

        False when another run has committed this batch, or a later one, since :meth:`begin`, and
        ``Superseded`` where one has begun: the attempt is rolled back. ``TransientStorageError``
        where it was not committed, or that is unknown: the text says which.
        """
        app, batch, producer = attempt.txn.app, attempt.txn.batch, attempt.producer.hex()
        owned = self._owned.pop(app)
        for name in attempt.intents:
            owned.note_undecided(name, self._queue_of(name).last_seen, but=attempt.producer)
        try:
            outcome = owned.decide(batch, producer, attempt.intents, attempt.positions)
        except errors.TransientStorageError as error:
            outcome = outcomes.Unknown(str(error))
        if isinstance(outcome, outcomes.Unknown):
            raise errors.TransientStorageError(
                f"whether {attempt.txn} was committed is not known: its commit record "
                f"{owned.key!r} may or may not have been written ({outcome.reason}). Start the "
                "query, or open the publisher, again: it reads the record, and completes or "
                "repeats the batch."
            )
        found = owned.verdict(batch, producer)
        if found is Verdict.COMMITTED:
            self._decided[app] = owned
            return True
        self.abandon(attempt)
        if found is Verdict.REPEATED:
            return False
        if isinstance(outcome, outcomes.Applied):
            raise errors.Superseded(app, batch)
        raise errors.TransientStorageError(
            f"{attempt.txn} was not committed: its commit record {owned.key!r} could not "
            f"be written ({outcome}). Nothing of it is visible; start the query again."
        )

    def complete(self, attempt: Attempt, since: Mapping[str, int]) -> None:
        """Write the markers of a committed attempt, and roll back what others left undecided. After
        an error the next run does it. ``since`` has the first sequence in each partition."""
        app = attempt.txn.app
        owned = self._decided.pop(app)
        markers = {
            name: TransactionMarker(attempt.producer, clock, attempt.txn, since.get(name, 0))
            for name, clock in attempt.intents.items()
        }
        try:
            self._end(owned, markers)
        finally:
            self.markers.drop_prepared(attempt.producer, attempt.intents)
        self._owned[app] = owned

    def abandon(self, attempt: Attempt) -> None:
        """Roll back an attempt that can never be committed. If storage fails, the next run does."""
        self._owned.pop(attempt.txn.app, None)
        self.markers.drop_prepared(attempt.producer, attempt.intents)
        marker = TransactionMarker(attempt.producer, ROLL_BACK, attempt.txn)
        try:
            self.markers.write({name: [marker] for name in attempt.intents})
        except errors.OpenDataBufferError as error:
            log.warning("%s is not rolled back everywhere yet: %s", attempt.txn, error)

    def forget(self, app: str) -> None:
        """Delete the record of an app that writes nothing any more. Failures are logged."""
        self._owned.pop(app, None)
        for each in self._store.delete_many([record_key(self._folder, app)]):
            log.warning("commit record %s was not deleted: %s", each.key, each.reason)

    def _claim(
        self, app: str, batch: int, query: str | None, partitions: Collection[str]
    ) -> tuple[OwnedRecord, CommitRecord, int]:
        """Claim an app's record, write its batch's markers, and note what else is undecided."""
        stored = record_object(self._store, self._folder, app, self._runtime, self._config)
        owned = OwnedRecord(app, stored, self._runtime.ulid())
        record = owned.claim(batch, query)
        committed = None if record.producer is None else bytes.fromhex(record.producer)
        names = sorted({*partitions, *record.intents})
        manifests = in_parallel(self._runtime, lambda name: self._queue_of(name).read(), names)
        markers: dict[str, list[TransactionMarker]] = {}
        for name, manifest in zip(names, manifests, strict=True):
            owned.note_undecided(name, manifest, but=committed)
            clock = record.intents.get(name)
            if manifest is None or clock is None or committed is None:
                continue
            marker = TransactionMarker(committed, clock, Transaction(app, max(record.batch, 0)))
            if undecided_markers(manifest, name, [marker]):
                markers[name] = [marker]
        if markers:
            log.warning(
                "batch %d of app %s was committed and not visible yet in %s: it is now",
                record.batch, app, ", ".join(markers),
            )  # fmt: skip
        return owned, record, self.markers.write(markers)

    def _end(self, owned: OwnedRecord, committing: Mapping[str, TransactionMarker]) -> int:
        markers = {name: [marker] for name, marker in committing.items()}
        for name, roll_backs in owned.roll_backs.items():
            abandoned = ", ".join(str(marker.txn) for marker in roll_backs.values())
            log.warning("abandoned in %s, and rolled back: %s", name, abandoned)
            markers.setdefault(name, []).extend(roll_backs.values())
        ended = self.markers.write(markers)
        owned.roll_backs.clear()
        return ended
