"""Transaction coordinator: writes to several queues, each all or nothing.

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
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import OpenDataBufferError, Superseded, TransientStorageError
from opendata_buffer.formats.batch import Transaction
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.stores.base import Store
from opendata_buffer.transactions.commit_record import (
    TOPIC_FOLDER,
    CommitRecord,
    OwnedRecord,
    Verdict,
    record_key,
    record_object,
)
from opendata_buffer.transactions.markers import (
    ROLL_BACK,
    MarkerWriter,
    TransactionMarker,
    undecided_markers,
)

log = logging.getLogger(__name__)

_DEADLINE_MS = 10_000
"""Deadline of one change of a record; a micro-batch waits for it."""

_ANY_BATCH = 2**63


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a batch.

    Attributes:
        txn: App and batch.
        producer: 6 bytes, drawn for this attempt and used for nothing else.
        intents: The clock of the marker that commits it, by partition.
        positions: What it has processed, by queue; committed with it.
    """

    txn: Transaction
    producer: bytes
    intents: Mapping[str, int]
    positions: Mapping[str, str] = field(default_factory=dict)


class TransactionCoordinator:
    """Decides the writes of apps to one topic. Not thread-safe; an app has one at a time.

    After any error the next :meth:`begin` is that of a new run, which reads everything again.

    Args:
        store, config, queue_of, runtime, ahead_ms: As for :class:`.MarkerWriter`.
        folder: Of the records; of a single queue its data prefix.
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

        The first call costs one read and one write of the record, and one read of each manifest;
        the others cost no request. False when the batch was committed before; its markers are in
        all partitions now.

        Raises:
            InvalidInput: The app id belongs to another query; nothing was written.
            OpenDataBufferError: Storage or a manifest failed; nothing of this attempt is there.
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
                with suppress(Superseded):  # a run that claimed meanwhile does the same
                    self.recover(txn.app, query, partitions)
            return False
        self._owned[txn.app] = owned
        return True

    def recover(self, app: str, query: str | None, partitions: Collection[str]) -> int:
        """End what earlier runs of an app left undecided, without writing a batch.

        A live run of the app elsewhere is fenced: it fails, and repeats its batch when it is
        started again. Returns how many transactions were ended, counted per partition.

        Raises:
            Superseded: Another run began meanwhile; it does the same.
            InvalidInput, OpenDataBufferError: As :meth:`begin`.
        """
        if app in self._owned:
            return 0
        owned, record, ended = self._claim(app, _ANY_BATCH, query, partitions)
        if owned.roll_backs:
            if not owned.is_owned():
                raise Superseded(app, record.batch + 1)
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

        False when another run has committed this batch, or a later one, since :meth:`begin`; the
        attempt is rolled back.

        Raises:
            Superseded: Another run has begun since; the attempt is rolled back.
            TransientStorageError: It was not committed, or that is unknown: the text says which.
        """
        app, batch, producer = attempt.txn.app, attempt.txn.batch, attempt.producer.hex()
        owned = self._owned.pop(app)
        for name in attempt.intents:
            owned.note_undecided(name, self._queue_of(name).last_seen, but=attempt.producer)
        try:
            outcome = owned.decide(batch, producer, attempt.intents, attempt.positions)
        except TransientStorageError as error:
            outcome = outcomes.Unknown(str(error))
        if isinstance(outcome, outcomes.Unknown):
            raise TransientStorageError(
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
            raise Superseded(app, batch)
        raise TransientStorageError(
            f"{attempt.txn} was not committed: its commit record {owned.key!r} could not "
            f"be written ({outcome}). Nothing of it is visible; start the query again."
        )

    def complete(self, attempt: Attempt, since: Mapping[str, int]) -> None:
        """Write the markers of a committed attempt, and roll back what others left undecided.

        ``since`` has the sequence of the attempt's first batch in each partition. After an error it
        is committed, but not visible in all partitions yet; the next run completes it.
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
        """Roll back an attempt that can never be committed. If storage fails, the next run does."""
        self._owned.pop(attempt.txn.app, None)
        self.markers.drop_prepared(attempt.producer, attempt.intents)
        marker = TransactionMarker(attempt.producer, ROLL_BACK, attempt.txn)
        try:
            self.markers.write({name: [marker] for name in attempt.intents})
        except OpenDataBufferError as error:
            log.warning("%s is not rolled back everywhere yet: %s", attempt.txn, error)

    def forget(self, app: str) -> None:
        """Delete the record of an app that writes nothing any more. Failures are logged."""
        self._owned.pop(app, None)
        key = record_key(self._folder, app)
        try:
            failures: object = self._store.delete_many([key])
        except OpenDataBufferError as error:
            failures = error
        if failures:
            log.warning("commit record %s was not deleted: %s", key, failures)

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
