"""Transactions over several queues: a commit record decides each one, and markers carry it out.

The problem: a write to several partitions needs one append per partition, and the writer may be
killed between any two of them. Readers must see all of it or nothing. The idea: the appends are
only *pending*, one compare-and-swap of a small record decides, and markers tell each partition.

Each attempt at a batch is a producer of its own with exactly one transaction. Its batches are
CONTINUE_TXN messages in each partition. The app's commit record decides, and markers in the
partitions carry out the decision::

    begin()     claim the record; commit in all partitions the batch that it names
    ...         the caller appends the pending batches, while prepare() stores those of the markers
    decide()    write the record: batch, producer, intents.  <- this commits
    complete()  write markers to all partitions in parallel; roll back the leftovers of other runs

What can go wrong: a run that is killed before ``decide`` was applied never commits. The next run
rolls its attempt back and repeats the batch as another producer. If a run is killed later, the next
run finds the batch in the record and writes the markers (failure F39).

**The commit record** of an app in a single queue is ``<prefix>/app=<id>/_commit.json``, and follows
the manifest. In a topic it is ``_topic/app=<id>/_commit.json`` and **decides**: a write to several
partitions is committed if and only if the record names its producer. Only the run named in its
field ``run`` may decide. A run claims the record once, before it appends anything. It notes the
undecided transactions of a manifest *before* it reads or writes the record, and rolls them back
only if the record still names the run (decision 0019).

**A marker** is an ACK_TXN message. With a clock beyond those of the producer's CONTINUE_TXN
messages it commits them; with a clock before them it rolls them back. It is appended only if the
very manifest that it goes into shows the producer as undecided, so writing it again does nothing.
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
from opendata_buffer.queue.cas import CasObject, CasStore, OutcomeUnknown, sidecar_object
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.sidecar import LARGEST, Sidecar, is_number
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.stores.base import Put, Store

log = logging.getLogger(__name__)

ROLL_BACK = 1
"""Clock of a marker that rolls back; clocks of transactions begin beyond it."""


@dataclass(frozen=True, slots=True)
class TransactionMarker:
    """The end of one producer's transaction in one queue.

    Attributes:
        producer: The producer's id.
        clock: Beyond the producer's last message, or :data:`ROLL_BACK`.
        txn: Part of the entry's name.
        since: The producer wrote nothing before this sequence, so earlier entries are not decoded.
    """

    producer: bytes
    clock: int
    txn: Transaction | None = None
    since: int = 0


def undecided_of_app(
    manifest: Manifest, prefix: str, app: str, since: int = 0
) -> dict[bytes, Undecided]:
    """Return an app's undecided transactions that began at ``since`` or later, by producer."""
    if f"{prefix}/app={app}/".encode() not in manifest.raw:
        return {}
    return {
        producer: transaction
        for producer, transaction in _undecided(manifest, prefix, since).items()
        if transaction.txn is not None and transaction.txn.app == app
    }


def undecided_markers(
    manifest: Manifest, prefix: str, markers: Sequence[TransactionMarker]
) -> tuple[TransactionMarker, ...]:
    """Return the markers whose producer the manifest shows as undecided."""
    # A message's UUID ends with its producer, so if the manifest's bytes do not contain the
    # producer, nothing needs to be decoded.
    raw = manifest.raw
    named = [marker for marker in markers if f"-{marker.producer.hex()}/".encode() in raw]
    if not named:
        return ()
    found = _undecided(manifest, prefix, min(marker.since for marker in named))
    return tuple(marker for marker in named if marker.producer in found)


def _undecided(manifest: Manifest, prefix: str, since: int) -> dict[bytes, Undecided]:
    first = manifest.first_sequence
    if since <= first:
        return undecided(enumerate(manifest.locations(), first), prefix)  # faster than entries
    entries = manifest.entries(since)
    return undecided(((each.sequence, each.location) for each in entries), prefix)


class MarkerWriter:
    """Writes markers into the queues of a topic, in parallel. Not thread-safe.

    Args:
        store: Where the markers' empty batches are stored.
        config: Its retries are used.
        queue_of: Returns a partition's queue, which only one thread at a time uses.
        runtime: Clock and threads.
        ahead_ms: The time in the names of the markers' batches is ahead by the collector's grace
            period, in milliseconds, so that they survive a pause of this process before the append.
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
        """By partition, then by producer and clock."""

    def prepare(self, name: str, marker: TransactionMarker) -> None:
        """Store a marker's batch in advance, to save :meth:`write` the time. It decides nothing."""
        entry = self._store_batch(name, marker, self._ahead_ms)
        self._prepared[name][marker.producer, marker.clock] = entry

    def drop_prepared(self, producer: bytes, clocks: Mapping[str, int]) -> None:
        """Forget the prepared markers of a producer, given by partition."""
        for name, clock in clocks.items():
            self._prepared[name].pop((producer, clock), None)

    def write(self, markers: Mapping[str, Collection[TransactionMarker]]) -> int:
        """End transactions in these partitions in parallel, except those that have already ended.

        May be repeated at any time and from any process.

        Args:
            markers: The transactions to end in each partition.

        Returns:
            How many transactions this call ended, counted per partition.

        Raises:
            OpenDataBufferError: As :meth:`.Queue.append`, of the first partition that failed.
        """
        ended = in_parallel(self._runtime, lambda name: self._write(name, markers[name]), markers)
        return sum(ended)

    def _write(self, name: str, markers: Collection[TransactionMarker]) -> int:
        queue, wanted = self._queue_of(name), tuple(markers)
        while wanted:
            todo = wanted
            entries = [
                self._prepared[name].get((marker.producer, marker.clock))
                or self._store_batch(name, marker, self._ahead_ms)
                for marker in todo
            ]

            def guard(
                before: Manifest, todo: tuple[TransactionMarker, ...] = todo
            ) -> tuple[TransactionMarker, ...] | None:
                left = undecided_markers(before, name, todo)
                return None if left == todo else left

            # Markers go into a full manifest too, because it cannot be emptied without them
            # (failure F35).
            outcome = queue.append(entries, guard=guard, makes_room=True)
            if isinstance(outcome, int):
                return len(todo)
            wanted = outcome
        return 0

    def expire_producer(self, producer: bytes, clock: int, names: Collection[str]) -> None:
        """Let readers forget a producer that has nothing undecided and writes nothing more.

        After an error, some readers keep the producer for :data:`.HORIZON_DAYS` days.
        """

        def expire(name: str) -> None:
            marker = TransactionMarker(producer, clock)
            self._queue_of(name).append([self._store_batch(name, marker, 0)])

        in_parallel(self._runtime, expire, names)

    def _store_batch(self, name: str, marker: TransactionMarker, ahead_ms: int) -> NewEntry:
        """Store a marker's empty batch and return its entry, which is not appended yet."""
        ulid = later_ulid(self._runtime.ulid(), ahead_ms)
        message = build_uuid(marker.producer, marker.clock, ACK_TXN | FINAL)
        location = batch_key(name, ulid, marker.txn, message)
        # A committed transaction without its markers blocks its writer, so an outage of a few
        # seconds must not end the attempt.
        self._config.retries(self._runtime)(self._store.put, location, encode_batch([]))
        return NewEntry(location)


TOPIC_FOLDER = "_topic"
"""Folder of the records of a topic's writers; no partition has such a name."""

RECORD = Sidecar(
    "the commit record",
    "It names the last batch that a query wrote. Restore its latest version (bucket versioning). "
    "You may delete the record of a single queue, because the manifest and the reader's filter "
    "still recognize repeats. Do not delete the record of a topic (below '_topic/') while its "
    "query has a batch to repeat.",
    max_bytes=1024 * 1024,  # the intents of a thousand partitions have 30 KiB
)


class Verdict(Enum):
    """The verdict of a topic's record on one attempt at a batch."""

    COMMITTED = "committed"
    """The record names the attempt's producer."""
    REPEATED = "repeated"
    """The record names another attempt at this batch, or a later batch."""
    OPEN = "open"
    """The record names neither."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The committed batches of one app.

    Attributes:
        batch: Highest committed batch; -1 if the app id is only claimed.
        next_sequence: The queue's next sequence just after that batch; 0 in a topic's record.
        query: Id of the streaming query that the app id belongs to, if known.
        others: Fields of later versions, kept when the record is written again.
        run: The run that may decide the next batch of a topic's writer; None for a single queue.
        producer: The producer id that wrote the batch into a topic, as hexadecimal digits.
        intents: The clock of the marker that commits the batch, by partition.
        positions: How far a publisher has processed each queue, as the text of a
            :class:`.Position`.
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
        """Return the object's bytes, without the fields that have no value."""
        intents = dict(sorted(self.intents.items()))
        positions = dict(sorted(self.positions.items()))
        return RECORD.encode_value(self, intents=intents or None, positions=positions or None)

    @classmethod
    def from_json(cls, raw: bytes) -> CommitRecord:
        """Parse the bytes of the record's object.

        Args:
            raw: The bytes.

        Returns:
            The record. Unknown fields are kept.

        Raises:
            CorruptData: They are not a record of this version.
        """
        fields = RECORD.decode(raw)
        intents, positions = fields.mapping("intents", {}), fields.mapping("positions", {})
        batch = fields.number("batch", least=-1)
        found = fields.into(cls, batch=batch, intents=intents, positions=positions)
        if found.producer is not None and not re.fullmatch("[0-9a-fA-F]{12}", found.producer):
            raise fields.wrong("producer", "a producer id of 12 hexadecimal digits")
        if not all(is_number(clock, least=1) for clock in intents.values()):
            raise fields.wrong("intents", f"a clock from 1 to {LARGEST} for each partition")
        if not all(isinstance(text, str) for text in positions.values()):
            raise fields.wrong("positions", "text for each queue")
        return found

    def raised(self, batch: int, next_sequence: int, query: str | None) -> CommitRecord:
        """Return the record after one more batch; unchanged for an older batch or another query."""
        if self.batch >= batch or (query is not None and self.query not in (None, query)):
            return self
        return replace(self, batch=batch, next_sequence=next_sequence, query=self.query or query)


def record_key(prefix: str, app: str) -> str:
    """Return the key of an app's commit record, which the collector does not take for a batch."""
    return f"{prefix}/app={app}/_commit.json"


def record_object(
    store: CasStore, prefix: str, app: str, runtime: Runtime, settings: QueueConfig
) -> CasObject[CommitRecord]:
    """Return an app's commit record in the store; ``prefix`` is that of :func:`record_key`."""
    return sidecar_object(RECORD, CommitRecord, store, record_key(prefix, app), runtime, settings)


def claimed(record: CommitRecord | None, app: str, query: str | None) -> CommitRecord | None:
    """Enter the query that is about to write into the record of an app.

    An app id that equals the query's own id needs no check, because no other query can use it.

    Args:
        record: The app's record as it was read; None if it does not exist.
        app: The app id.
        query: The id of the query; None for a writer that is not a query.

    Returns:
        The record to write; None if there is still none to write.

    Raises:
        InvalidInput: The app id belongs to another query.
    """
    if query is None or query == app:
        return record
    if record is None:
        return CommitRecord(-1, 0, query)
    if record.query is None:
        return replace(record, query=query)
    if record.query != query:
        done = f"its batches up to {record.batch}" if record.batch >= 0 else "nothing yet"
        raise errors.InvalidInput(
            f"txnAppId {app!r} belongs to query {record.query}, which has written {done}; this is "
            f"query {query}. Both count their batches from 0, so batches of one would be lost as "
            "repeats of the other's. Give this query a txnAppId of its own. A query whose "
            "checkpoint was deleted is a new query and needs a new txnAppId too."
        )
    return record


@dataclass(frozen=True, slots=True)
class _BatchProof:
    """Recognizes in the record that an attempt at a batch was committed."""

    batch: int
    producer: str
    key: str

    def mark(self) -> int:
        """Return 0, because a record has one place."""
        return 0

    def find(self, now: CommitRecord | None, marks: Sequence[int]) -> bool:
        """Return whether the record names the attempt."""
        if marks and now is not None and now.batch > self.batch:
            # The answer was lost, and the next owner has committed a later batch since. It may
            # have found this attempt committed, or committed another attempt at the batch.
            raise OutcomeUnknown(f"{self.key!r} now names batch {now.batch}")
        return now is not None and (now.batch, now.producer) == (self.batch, self.producer)


class OwnedRecord:
    """A topic's commit record as owned by one run of an app. Not thread-safe.

    A run claims the record once. Batches that were appended under an earlier claim can no longer be
    committed.
    """

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
        """Write this run into the record, unless the batch is committed. Call it once, first."""

        def change(record: CommitRecord | None) -> CommitRecord:
            found = claimed(record, self._app, query) or CommitRecord(-1, 0, query)
            if found.batch >= batch or found.run == self._run:
                return found
            return replace(found, run=self._run)

        return self._object.change(change)

    def is_owned(self) -> bool:
        """Read the record, and return whether no other run has claimed it since."""
        now = self._object.read()
        return isinstance(now, CommitRecord) and now.run == self._run

    def continues(self, batch: int, query: str | None) -> bool:
        """Return whether this run may continue with a batch without claiming the record again.

        It may not if the record does not name the query yet. It may not either if batches are
        missing since the run's last one and another run has claimed the record, because Spark
        commits in any of its idle Python workers.
        """
        record = self.record
        if claimed(record, self._app, query) is not record:
            return False
        return record is None or batch <= record.batch + 1 or self.is_owned()

    def decide(
        self, batch: int, producer: str, intents: Mapping[str, int], positions: Mapping[str, str]
    ) -> outcomes.Outcome[CommitRecord | None]:
        """Write a batch into the record, which commits it; see :meth:`verdict`."""

        def change(record: CommitRecord | None) -> CommitRecord | None:
            # Unchanged also if it already names this attempt: a change may be applied twice.
            if record is None or record.run != self._run or record.batch >= batch:
                return record
            # One write commits both the positions that were read and the batch that was written.
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
        """Return the verdict on an attempt, by the record as it was last read or written."""
        record = self.record
        if record is None or record.batch < batch:
            return Verdict.OPEN
        named = record.batch == batch and record.producer == producer
        return Verdict.COMMITTED if named else Verdict.REPEATED

    def note_undecided(self, name: str, manifest: Manifest | None, but: bytes | None) -> None:
        """Note the undecided producers of a partition, except ``but``, to roll them back later."""
        if manifest is None:
            return
        found = undecided_of_app(manifest, name, self._app, self._searched.get(name, 0))
        self._searched[name] = manifest.next_sequence
        for producer, transaction in found.items():
            if producer != but:
                marker = TransactionMarker(producer, ROLL_BACK, transaction.txn)
                self.roll_backs.setdefault(name, {})[producer] = marker


_DEADLINE_MS = 10_000
"""Deadline of one change of a record; a micro-batch waits for it."""

_ANY_BATCH = 2**63


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a batch, by a producer that was generated for it.

    Attributes:
        txn: App and batch number.
        producer: The producer's id.
        intents: By partition, the clock of the marker that commits the attempt.
        positions: By queue, how far the attempt has processed it.
    """

    txn: Transaction
    producer: bytes
    intents: Mapping[str, int]
    positions: Mapping[str, str] = field(default_factory=dict)


class TransactionCoordinator:
    """Decides the writes of apps to one topic. Not thread-safe; an app has one at a time.

    After any error, the next :meth:`begin` is that of a new run, which reads everything again.

    Args:
        store: The opened store of the queues.
        config: Settings of the queues, without a prefix and a manifest.
        queue_of: Returns the queue of a partition.
        runtime: Clock and threads.
        ahead_ms: How far the names of the markers' batches are ahead, in milliseconds; see
            :class:`MarkerWriter`.
        folder: Folder of the commit records.
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
        """Apps whose last batch does not have all of its markers yet. They are not in ``_owned``,
        because their next batch would overwrite the record that names this one."""

    def begin(self, txn: Transaction, query: str | None, partitions: Collection[str]) -> bool:
        """Prepare for an attempt. Call it before anything of the attempt is appended.

        The first call reads and writes the record and reads each manifest; later calls cost no
        request.

        Args:
            txn: App and batch number.
            query: Id of the streaming query, if known.
            partitions: All partitions of the topic.

        Returns:
            False if the batch was committed before; its markers are then in all partitions.

        Raises:
            InvalidInput: The app id belongs to another query.
        """
        known = self._owned.get(txn.app)
        if known is not None:
            # Queries of one process share its coordinator. A query whose checkpoint was deleted
            # counts from 0 again, and without this check its batches would look like repeats.
            if known.continues(txn.batch, query):
                return known.record is None or known.record.batch < txn.batch
            del self._owned[txn.app]
        owned, record, _ = self._claim(txn.app, txn.batch, query, partitions)
        if record.batch >= txn.batch:
            if owned.roll_backs:
                # The run that committed the batch was killed before it rolled back the others, or
                # it is alive and writes its next batch. Only a claim can tell: in the second case,
                # the claim makes that run fail.
                with suppress(errors.Superseded):  # a run that claimed meanwhile does the same
                    self.recover(txn.app, query, partitions)
            return False
        self._owned[txn.app] = owned
        return True

    def recover(self, app: str, query: str | None, partitions: Collection[str]) -> int:
        """End the undecided transactions of earlier runs of an app, without writing a batch.

        A live run of the app elsewhere is fenced.

        Args:
            app: The app id.
            query: The id of the query; None for a writer that is not a query.
            partitions: The partitions in which the app may have undecided transactions.

        Returns:
            How many transactions were ended, counted per partition.

        Raises:
            Superseded: Another run began meanwhile; it does the same.
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
        """Return the highest committed batch of an app that was begun or recovered; -1 for none."""
        record = self._owned[app].record
        return -1 if record is None else record.batch

    def positions(self, app: str) -> Mapping[str, str]:
        """Return the committed positions of an app that was begun or recovered."""
        owned = self._owned.get(app)
        return {} if owned is None or owned.record is None else owned.record.positions

    def verdict_on(self, txn: Transaction, producer: bytes) -> Verdict:
        """Return the verdict on an attempt, by the record of an app that was begun or recovered."""
        return self._owned[txn.app].verdict(txn.batch, producer.hex())

    def prepare(self, attempt: Attempt, name: str) -> None:
        """Store a marker's batch in advance; may be called for several partitions in parallel."""
        marker = TransactionMarker(attempt.producer, attempt.intents[name], attempt.txn)
        self.markers.prepare(name, marker)

    def decide(self, attempt: Attempt) -> bool:
        """Commit an attempt whose pending batches are in all partitions.

        Args:
            attempt: The attempt that :meth:`begin` returned.

        Returns:
            False if another run has committed this batch, or a later one, since :meth:`begin`. The
            attempt was rolled back.

        Raises:
            Superseded: Another run has begun; the attempt was rolled back.
            TransientStorageError: The attempt was not committed, or that is unknown; the text says
                which.
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
                f"it is not known whether {attempt.txn} was committed: its commit record "
                f"{owned.key!r} may or may not have been written ({outcome.reason}). Start the "
                "query, or open the publisher, again: it reads the record and completes or "
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
        """Write the markers of a committed attempt, and roll back undecided ones of other runs.

        After an error, the next run does it.

        Args:
            attempt: The committed attempt.
            since: The attempt's first sequence in each partition.
        """
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
        """Roll back an attempt that can never be committed; after an error, the next run does."""
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
        for failure in self._store.delete_many([record_key(self._folder, app)]):
            log.warning("commit record %s was not deleted: %s", failure.key, failure.reason)

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
                "batch %d of app %s was committed but not yet visible in %s; it is visible now",
                record.batch, app, ", ".join(markers),
            )  # fmt: skip
        return owned, record, self.markers.write(markers)

    def _end(self, owned: OwnedRecord, committing: Mapping[str, TransactionMarker]) -> int:
        markers = {name: [marker] for name, marker in committing.items()}
        for name, roll_backs in owned.roll_backs.items():
            abandoned = ", ".join(str(marker.txn) for marker in roll_backs.values())
            log.warning("rolled back abandoned transactions in %s: %s", name, abandoned)
            markers.setdefault(name, []).extend(roll_backs.values())
        ended = self.markers.write(markers)
        owned.roll_backs.clear()
        return ended
