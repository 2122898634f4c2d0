"""Writes to several queues, each all or nothing: the driver's part of a write to a topic.

Each attempt at a batch is a producer of its own with exactly one transaction. Its batches lie in
each partition as CONTINUE_TXN messages; the app's commit record decides; acknowledgements carry
the decision out::

    begin()    claim the record; end what earlier runs left: commit what the record names
    ...        the caller appends the pending batches, to all partitions at once; meanwhile
               prepare() stores what settle() will append
    decide()   write the record: batch, producer, intents.  <- the one point that decides
    settle()   acknowledge in all partitions at once; roll back what others left undecided

Killed before ``decide`` has landed, the attempt can never be committed: the next run, which
repeats the batch as another producer, rolls it back. Killed after it, the next run finds the
batch in the record and carries the decision out. A reader by the rule of read-committed sees
nothing of it in the one case, and in the end all of it in the other (failure F39).

Why nobody rolls back what may still be committed: see
:mod:`opendata_buffer.transactions.commit_record`; what
a run notes to be rolled back, :mod:`opendata_buffer.transactions.commit_record`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from opendata_buffer import outcomes
from opendata_buffer.concurrency import together
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import OpenDataBufferError, Superseded, TransientStorageError
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.transactions.commit_record import (
    RECORD,
    TOPIC_FOLDER,
    ClaimedRecord,
    CommitRecord,
    Verdict,
    record_key,
    verdict,
)
from opendata_buffer.transactions.markers import (
    ROLL_BACK,
    PatientPut,
    TransactionMarker,
    acknowledgement,
    open_endings,
    settle,
)

__all__ = ["Attempt", "TransactionCoordinator"]


log = logging.getLogger(__name__)

_DEADLINE_MS = 10_000  # of one change of a record; a micro-batch waits for it
_ANY_BATCH = 2**63


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a batch.

    Attributes:
        txn: App and batch.
        producer: 6 bytes, drawn for this attempt and used for nothing else.
        intents: Of each partition it writes to, the clock of the acknowledgement.
        query: Id of the streaming query that the app belongs to, if it is known.
    """

    txn: Transaction
    producer: bytes
    intents: Mapping[str, int]
    query: str | None = None


class TransactionCoordinator:
    """Decides the writes of apps to one topic. Not thread-safe; an app has one at a time.

    After any error the next :meth:`begin` is that of a new run, which looks afresh.

    Args:
        store: Of the topic.
        config: Deadline and backoff.
        queue_of: The queue of a partition, by its name; each is used by one thread at a time.
        runtime: Clocks, names and threads.
        ahead_ms: As for :func:`.settle`: the collector's grace period.
    """

    def __init__(
        self,
        store: Store,
        config: QueueConfig,
        queue_of: Callable[[str], Queue],
        runtime: Runtime,
        *,
        ahead_ms: int,
    ) -> None:
        self._store = store
        self._batches = PatientPut(store, config, runtime)
        self._config = replace(config, cas_deadline_ms=min(_DEADLINE_MS, config.cas_deadline_ms))
        self._queue_of = queue_of
        self._runtime = runtime
        self._ahead_ms = ahead_ms
        self._claims: dict[str, ClaimedRecord] = {}
        self._stored: defaultdict[str, dict[tuple[bytes, int], NewEntry]] = defaultdict(dict)
        """Per partition, acknowledgements that were prepared and not appended yet."""
        self._decided: dict[str, ClaimedRecord] = {}
        """Apart from the others: the next batch must not be decided before this one is settled,
        because the record would no longer name it."""

    def begin(self, txn: Transaction, query: str | None, partitions: Collection[str]) -> bool:
        """Before anything of an attempt is appended.

        The first time it costs one read and one write of the record, and one read of each
        manifest; after that nothing.

        Args:
            txn: App and batch.
            query: Id of the query, if it is known.
            partitions: All of the topic.

        Returns:
            False when the batch was committed before; it is settled in all partitions now.

        Raises:
            InvalidInput: The app id belongs to another query; nothing was written.
            OpenDataBufferError: Storage or a manifest failed; nothing of this attempt is there.
        """
        known = self._claims.get(txn.app)
        if known is not None:
            record = known.record
            # Queries of one process share its ledger, and so does one whose checkpoint was
            # deleted: it counts from 0 again, and each of its batches would pass for a repeat.
            if known.belongs_to(query) and not known.was_overtaken_before(txn.batch):
                return record is None or record.batch < txn.batch
            del self._claims[txn.app]
        claim, record = self._claim(txn.app, txn.batch, query)
        self._finish_earlier(claim, txn.app, record, partitions)
        if record.batch >= txn.batch:
            if claim.leaves:
                # The run that committed it died before it had rolled back what others left. It
                # may also live and be at its next batch, so this takes a claim: then it fails.
                with suppress(Superseded):  # whoever came in between does the same
                    self.recover(txn.app, query, partitions)
            return False
        self._claims[txn.app] = claim
        return True

    def recover(self, app: str, query: str | None, partitions: Collection[str]) -> int:
        """End whatever earlier runs of an app left undecided, without writing a batch.

        Does nothing for an app that this ledger has begun: its earlier runs are ended. A run of
        the app elsewhere is overtaken: it fails, and repeats its batch when it is started again.

        Returns:
            How many transactions were ended, counted per partition.

        Raises:
            Superseded: Another run began meanwhile; it does the same.
            InvalidInput, OpenDataBufferError: As :meth:`begin`.
        """
        if app in self._claims:
            return 0
        claim, record = self._claim(app, _ANY_BATCH, query)
        ended = self._finish_earlier(claim, app, record, partitions)
        if claim.leaves:
            if not claim.is_held():
                raise Superseded(app, record.batch + 1)
            ended += self._end(claim, {})
        self._claims[app] = claim
        return ended

    def committed(self, app: str) -> int:
        """The highest committed batch of an app that was begun or recovered; -1 for none."""
        record = self._claims[app].record
        return -1 if record is None else record.batch

    def told(self, txn: Transaction, producer: bytes) -> Verdict:
        """What the record of an app that was begun or recovered says about an attempt."""
        return verdict(self._claims[txn.app].record, txn.batch, producer.hex())

    def prepare(self, attempt: Attempt, name: str) -> None:
        """Store the batch of one partition's acknowledgement ahead: :meth:`settle` need not.

        It decides nothing, and may be left out. May be called for several partitions at once,
        while the pending batches are appended.

        Raises:
            StorageError: It could not be stored.
        """
        ending = TransactionMarker(attempt.producer, attempt.intents[name], attempt.txn)
        entry = acknowledgement(name, ending, self._batches, self._runtime, self._ahead_ms)
        self._stored[name][ending.producer, ending.clock] = entry

    def decide(self, attempt: Attempt) -> bool:
        """Commit an attempt whose pending batches are in all partitions.

        Returns:
            False when another run has committed this batch, or a later one, since
            :meth:`begin`; the attempt is rolled back.

        Raises:
            Superseded: Another run has begun since; the attempt is rolled back.
            TransientStorageError: It was not committed, and is rolled back; or nobody can tell
                whether it was. The message says which. The next run does what is right.
        """
        app, batch, producer = attempt.txn.app, attempt.txn.batch, attempt.producer.hex()
        claim = self._claims.pop(app)
        for name in attempt.intents:
            claim.note(name, self._queue_of(name).last_seen, but=attempt.producer)
        try:
            outcome = claim.decide(batch, producer, attempt.intents)
        except TransientStorageError as error:
            raise _unknown(attempt.txn, claim.key, str(error)) from error
        if isinstance(outcome, outcomes.Unknown):
            raise _unknown(attempt.txn, claim.key, outcome.reason)
        record = outcome.value if isinstance(outcome, outcomes.Applied) else claim.record
        found = verdict(record, batch, producer)
        if found is Verdict.COMMITTED:
            self._decided[app] = claim
            return True
        self.abandon(attempt)
        if found is Verdict.REPEATED:
            return False
        if isinstance(outcome, outcomes.Applied):
            raise Superseded(app, batch)
        raise TransientStorageError(
            f"{attempt.txn} was not committed: its commit record {claim.key!r} could not "
            f"be written ({outcome}). Nothing of it is visible; start the query again."
        )

    def settle(self, attempt: Attempt, since: Mapping[str, int]) -> None:
        """Carry a decision out: acknowledge in all partitions, and roll back what others left.

        Args:
            attempt: It was decided by :meth:`decide`.
            since: Of each partition, the sequence of the attempt's first batch.

        Raises:
            OpenDataBufferError: It is committed, but not visible in all partitions yet; the next
                run completes it.
        """
        app = attempt.txn.app
        claim = self._decided.pop(app)
        endings = {
            name: TransactionMarker(attempt.producer, clock, attempt.txn, since.get(name, 0))
            for name, clock in attempt.intents.items()
        }
        try:
            self._end(claim, endings)
        finally:
            self._unstore(attempt)
        self._claims[app] = claim

    def abandon(self, attempt: Attempt) -> None:
        """Roll back an attempt that is not committed and never will be, as far as that works.

        What cannot be rolled back now, because storage fails, the next run rolls back.
        """
        self._claims.pop(attempt.txn.app, None)
        self._unstore(attempt)
        ending = TransactionMarker(attempt.producer, ROLL_BACK, attempt.txn)
        try:
            self._settle_all({name: [ending] for name in attempt.intents})
        except OpenDataBufferError as error:
            log.warning("%s is not rolled back everywhere yet: %s", attempt.txn, error)

    def forget(self, app: str) -> None:
        """Delete the record of an app that writes nothing any more; best effort."""
        self._claims.pop(app, None)
        key = record_key(TOPIC_FOLDER, app)
        try:
            failures = self._store.delete_many([key])
        except OpenDataBufferError as error:
            log.warning("commit record %s was not deleted: %s", key, error)
            return
        for failure in failures:
            log.warning("commit record %s was not deleted: %s", key, failure)

    def _claim(self, app: str, batch: int, query: str | None) -> tuple[ClaimedRecord, CommitRecord]:
        claim = ClaimedRecord(app, self._register(app), self._runtime.ulid())
        return claim, claim.claim(batch, query)

    def _finish_earlier(
        self, claim: ClaimedRecord, app: str, record: CommitRecord, partitions: Collection[str]
    ) -> int:
        """Carry out what the record names; note what else is undecided, to be rolled back."""
        committed = None if record.producer is None else bytes.fromhex(record.producer)
        names = sorted({*partitions, *record.intents})
        manifests = together(self._runtime, lambda name: self._queue_of(name).read(), names)
        endings: dict[str, list[TransactionMarker]] = {}
        for name, manifest in zip(names, manifests, strict=True):
            claim.note(name, manifest, but=committed)
            clock = record.intents.get(name)
            if manifest is None or clock is None or committed is None:
                continue
            txn = Transaction(app, max(record.batch, 0))
            ending = TransactionMarker(committed, clock, txn)
            if open_endings(manifest, name, [ending]):
                endings[name] = [ending]
        if endings:
            log.warning(
                "batch %d of app %s was committed and not visible yet in %s: it is now",
                record.batch, app, ", ".join(endings),
            )  # fmt: skip
        return self._settle_all(endings)

    def _end(self, claim: ClaimedRecord, endings: Mapping[str, TransactionMarker]) -> int:
        wanted: dict[str, list[TransactionMarker]] = {
            name: [each] for name, each in endings.items()
        }
        for name, others in claim.roll_backs().items():
            wanted.setdefault(name, []).extend(others)
        ended = self._settle_all(wanted)
        claim.rolled_back()
        return ended

    def _settle_all(self, endings: Mapping[str, Collection[TransactionMarker]]) -> int:
        def one(name: str) -> int:
            return settle(
                self._queue_of(name),
                name,
                tuple(endings[name]),
                store=self._batches,
                runtime=self._runtime,
                ahead_ms=self._ahead_ms,
                stored=self._stored.get(name),
            )

        return sum(together(self._runtime, one, endings))

    def _unstore(self, attempt: Attempt) -> None:
        for name, clock in attempt.intents.items():
            self._stored[name].pop((attempt.producer, clock), None)

    def _register(self, app: str) -> CasObject[CommitRecord]:
        return CasObject(
            self._store,
            record_key(TOPIC_FOLDER, app),
            decode=CommitRecord.from_json,
            encode=CommitRecord.to_json,
            runtime=self._runtime,
            settings=self._config,
            max_bytes=RECORD.max_bytes,
            unreadable=RECORD.unreadable,
        )


def _unknown(txn: Transaction, key: str, reason: str) -> TransientStorageError:
    return TransientStorageError(
        f"whether {txn} was committed is not known: its commit record {key!r} may or may not have "
        f"been written ({reason}). Start the query, or open the publisher, again: it reads the "
        "record, and completes or repeats the batch."
    )
