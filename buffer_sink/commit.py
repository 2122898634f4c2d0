"""The driver's part of a write: one compare-and-swap that makes all of it visible, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from buffer_sink.messages import Group
from buffer_sink.options import SinkOptions
from buffer_sink.upload_expiry import Expiry, Lifetimes
from opendata_buffer import metrics
from opendata_buffer.broker.network import Network
from opendata_buffer.broker.yielding_queue import YieldingQueue
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CommitStateUnknown,
    OpenDataBufferError,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key, parse_location
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.cas import CasObject, CasStore, Done
from opendata_buffer.queue.ownership import claim_for_use
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.transactions.commit_record import RECORD, CommitRecord, claimed, record_key

__all__ = [
    "ALREADY_DONE",
    "APPEND",
    "AlreadyDone",
    "Append",
    "CommitRecords",
    "Decision",
    "Expired",
    "Kind",
    "SEPARATE",
    "Separate",
    "WriteCommitter",
    "decide",
    "is_queued",
    "transaction_prefix",
]


# ---- The commit records of a queue's writers: which batch of which query was committed last. ----


log = logging.getLogger(__name__)

_DEADLINE_MS = 10_000  # of one change of a record; a micro-batch waits for it


class CommitRecords:
    """Reads and raises the record of each app that writes through this process.

    Args:
        store: Where the queue lives.
        config: The queue's data prefix and backoff.
        runtime: Clock and jitter.
    """

    def __init__(self, store: CasStore, config: QueueConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = replace(config, cas_deadline_ms=min(_DEADLINE_MS, config.cas_deadline_ms))
        self._runtime = runtime
        self._registers: dict[str, CasObject[CommitRecord]] = {}

    def claim(self, app: str, query: str | None) -> CommitRecord | None:
        """The app's record, which from now on belongs to this query. None when there is none.

        Costs one read, and one write when the app id belongs to no query yet. That write must
        have landed before the first append under the id: two queries that begin at once would
        otherwise both find nothing.

        Raises:
            InvalidInput: The app id belongs to another query; nothing was written.
            CorruptData: The record is not readable.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """
        # What another process wrote since counts, so each claim reads. A record that was deleted
        # by its operator is gone for good: a new register does not miss it.
        register = self._registers.get(app) or self._register(app)
        if not isinstance(register.read(), Done):
            register = self._register(app)
        outcome = register.update(lambda record: claimed(record, app, query), from_memory=True)
        if not isinstance(outcome, Done):
            raise TransientStorageError(
                f"commit record {register.key!r} could not be written: {outcome}. Nothing was "
                "appended; start the query again."
            )
        self._registers[app] = register
        return outcome.value

    def raise_to(self, app: str, batch: int, next_sequence: int, query: str | None) -> None:
        """Note a committed batch, best effort: it is in the queue and must not fail any more.

        A record that lags is covered by the manifest and by the reader's filter. It never falls
        when a driver that was thought dead writes late.
        """
        register = self._registers[app]
        empty = CommitRecord(-1, 0, query)
        try:
            outcome = register.update(
                lambda record: (record or empty).raised(batch, next_sequence, query),
                from_memory=True,
            )
        except OpenDataBufferError as error:
            log.warning("commit record %s was not written: %s", register.key, error)
            return
        if not isinstance(outcome, Done):
            log.warning("commit record %s was not written: %s", register.key, outcome)

    def _register(self, app: str) -> CasObject[CommitRecord]:
        return CasObject(
            self._store,
            record_key(self._config.data_path_prefix, app),
            decode=CommitRecord.from_json,
            encode=CommitRecord.to_json,
            runtime=self._runtime,
            settings=self._config,
            max_bytes=RECORD.max_bytes,
            unreadable=RECORD.unreadable,
        )


# ---- What an append has to do: pure decisions on a manifest and a commit record. ----
#
# A write with an identity (app, batch) has to enter the queue once, however often Spark commits
# it. Where a repeat is recognised, in this order:
#
# 1. In the **commit record**, ``<prefix>/app=<id>/_commit.json``: the highest batch of the app
#    known to be committed, and the queue's next sequence just after. It is written after the
#    append, so it may lag; it never runs ahead.
# 2. In the **manifest**: a queued entry of the app with this batch number or a higher one. This
#    is decided on the very manifest the compare-and-swap replaces, so of two drivers that append
#    the same batch at once one wins and the other finds it.
# 3. What both cannot see is a commit whose record is missing (a crash in between) and whose
#    entries a consumer has dequeued already. Such a batch is appended again, and the reader's
#    :class:`~opendata_buffer.consumer.isolation.TransactionFilter` drops it: the entries of a
#    batch are contiguous, so a second group of the same batch is a repeat.
#
# The filter tells two groups apart by the gap between them. There is none when the queue ran
# empty and nobody else appended; then an empty batch is put in between (``Separate``). It is
# needed only if an entry of ours can have been dequeued unseen, that is if the manifest's first
# sequence is beyond the one in the record: every commit of a later batch came after that. An idle
# queue with one writer has first == next == the record's sequence, so it never pays.
#
# All of that holds within one query. Another query counts its batches from 0 as well, and each of
# them would be taken for a repeat and be lost. So the record names the query that an app id
# belongs to, from before its first append, and any other one is refused.


@dataclass(frozen=True, slots=True)
class Append:
    """Append the group."""


@dataclass(frozen=True, slots=True)
class Separate:
    """Append an empty batch and the group: the filter needs a gap to recognise a repeat."""


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """The batch is committed; there is nothing to append.

    Attributes:
        queued: Locations of the batch that the manifest shows; empty where the record tells,
            or a later batch of the app.
    """

    queued: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Expired:
    """The uploads may be too old by now: look at them again before they are appended."""


APPEND = Append()
SEPARATE = Separate()
ALREADY_DONE = AlreadyDone()

Decision = Append | Separate | AlreadyDone | Expired
Kind = type[Append] | type[Separate] | type[AlreadyDone] | type[Expired]


def transaction_prefix(prefix: str, transaction: Transaction) -> str:
    """The directory of a transaction's batches, with a slash at the end."""
    return f"{prefix}/app={transaction.app}/batch={transaction.batch}/"


def decide(
    manifest: Manifest,
    record: CommitRecord | None,
    transaction: Transaction,
    *,
    prefix: str,
    key: str,
) -> Decision:
    """What an append does to a manifest.

    Args:
        manifest: The manifest that the compare-and-swap will replace.
        record: The app's commit record, read before the manifest.
        transaction: Identity of the write.
        prefix: The queue's data prefix.
        key: The manifest's key; for messages.

    Raises:
        QueueReset: The record knows of sequences the queue has not reached (failure F4).
    """
    # "At least" and not "equal", as Delta's txnVersion rule: a driver that lost its place may
    # come back with a batch older than the last one.
    if record is not None and record.batch >= transaction.batch:
        return ALREADY_DONE
    if record is not None and record.next_sequence > manifest.next_sequence:
        raise QueueReset(
            f"app {transaction.app!r} committed batch {record.batch} up to sequence "
            f"{record.next_sequence - 1}, but manifest {key!r} ends at "
            f"{manifest.next_sequence - 1}: it was deleted, recreated or restored from an old "
            "copy. Restore it (bucket versioning). If the queue was emptied on purpose, delete "
            f"{record_key(prefix, transaction.app)!r} as well."
        )
    if is_queued(manifest, prefix, transaction):
        folder = transaction_prefix(prefix, transaction)
        locations = (entry.location for entry in manifest.entries())
        return AlreadyDone(tuple(each for each in locations if each.startswith(folder)))
    unseen = manifest.first_sequence > (record.next_sequence if record is not None else 0)
    if unseen and manifest.entry_count == 0:
        return SEPARATE
    return APPEND


def is_queued(manifest: Manifest, prefix: str, transaction: Transaction) -> bool:
    """Whether the queue has an entry of this batch, or of a later one, of the same app.

    Batches of an app enter in rising order, so its last entry tells. That is found from the end
    as bytes: decoding 100,000 queued entries on each append would dominate it.
    """
    raw = manifest.raw
    start = f"{prefix}/app={transaction.app}/batch=".encode()
    position = raw.rfind(start)
    while position >= 0:
        # The payload of a range may hold the same text; but only a location has its own length
        # in the two bytes before it, and a positive answer is confirmed by walking the entries.
        found = _location_at(raw, position, prefix)
        if found is not None and found.txn is not None:
            if found.txn.batch < transaction.batch:
                return False
            if manifest.find(found.location) is not None:
                return True
        position = raw.rfind(start, 0, position)
    return False


def _location_at(raw: bytes, position: int, prefix: str) -> _Found | None:
    length = int.from_bytes(raw[max(0, position - 2) : position], "little")
    try:
        location = raw[position : position + length].decode()
    except UnicodeDecodeError:
        return None
    parts = parse_location(location, prefix)
    return None if parts is None else _Found(location, parts.txn)


@dataclass(frozen=True, slots=True)
class _Found:
    location: str
    txn: Transaction | None


class WriteCommitter:
    """Appends groups of uploads to one queue. See :mod:`buffer_sink.commit` for the protocol.

    Args:
        store: Where queue and batches live.
        options: The sink's options.
        runtime: Clocks, names and threads.
        network: How brokers are reached; WebSockets by default.
    """

    def __init__(
        self,
        store: Store,
        options: SinkOptions,
        runtime: Runtime,
        network: Network | None = None,
    ) -> None:
        self._store = store
        self._config = options.queue
        self._broker = options.broker
        self._network = network
        self._runtime = runtime
        self._grace_ms = options.gc_grace_period_ms
        self._lifetimes = Lifetimes(
            store, options.gc_grace_period_ms, options.max_write_duration_ms, runtime
        )
        self._records = CommitRecords(store, options.queue, runtime)
        self._opened: YieldingQueue | None = None

    @property
    def _queue(self) -> YieldingQueue:
        # First use in this process: a store without compare-and-swap (failure F12), or a prefix
        # of another queue, whose collector would delete our batches (failure F7), is refused.
        if self._opened is None:
            claim = claim_for_use(self._store, self._config, runtime=self._runtime)
            self._opened = YieldingQueue(
                self._store,
                self._config,
                runtime=self._runtime,
                claim=claim,
                broker=self._broker,
                network=self._network,
            )
        return self._opened

    def append(self, group: Group | None) -> bool:
        """Append a group, unless it is in the queue or was there before.

        Returns:
            False when there was nothing to append.

        Raises:
            InvalidInput: The group's app id belongs to another query; nothing was appended.
            CommitStateUnknown: It may or may not be in the queue. Append it again.
            TransientStorageError: Uploads are so old that the collector may delete them before
                they are in the queue, or has deleted them; write all of them again.
            OpenDataBufferError: As :meth:`.Queue.append`; nothing was appended.
        """
        if group is None or not group.uploads:
            return False
        try:
            if group.transaction is not None:
                return self._append_once(group, group.transaction)
            self._append_if(group, group.entries, lambda before: APPEND)
            return True
        except CommitStateUnknown as error:
            # The batch may have landed and be gone again. Only an append from the start can go
            # on from here; it puts a separator in front, so the reader tells the two apart.
            if group.transaction is not None:
                error.add_note(
                    f"Start the query again: Spark repeats the batch {group.transaction.batch} "
                    "under the same identity, and the Spark source of this library drops the "
                    "repeat."
                )
            raise
        finally:
            if group.query is None and self._opened is not None:
                # A write outside of a query may be all that its process does, so the marker
                # learns now how far the queue got (failure F4), and not within the next minute.
                self._opened.close()

    def disconnect(self) -> None:
        """End connections that outlive an append; the next one makes what it needs."""
        if self._opened is not None:
            self._opened.disconnect()

    def _append_once(self, group: Group, transaction: Transaction) -> bool:
        queue = self._queue
        record = self._records.claim(transaction.app, group.query)

        def decision(before: Manifest) -> Decision:
            return decide(
                before, record, transaction, prefix=self._config.data_path_prefix, key=queue.key
            )

        entries: list[NewEntry] = group.entries
        accepted: tuple[Kind, ...] = (Append,)
        while True:
            outcome = self._append_if(group, entries, decision, accepted)
            if isinstance(outcome, int):
                break
            if isinstance(outcome, AlreadyDone):
                if not self._is_torn(outcome.queued):
                    self._drop_repeat(group, transaction)
                    return False
                log.warning("%s is queued, but its objects are gone: again", transaction)
            accepted = (*accepted, type(outcome))
            entries = [self._separator(), *group.entries]
        log.info(
            "%s: %d records in %d batches at sequence %d",
            transaction, group.records, len(group.uploads), outcome,
        )  # fmt: skip
        self._records.raise_to(
            transaction.app, transaction.batch, outcome + len(entries), group.query
        )
        return True

    def _append_if(
        self,
        group: Group,
        entries: Sequence[NewEntry],
        decision: Callable[[Manifest], Decision],
        accepted: tuple[Kind, ...] = (Append,),
    ) -> int | Decision:
        """Append while the uploads are safe and the decision is an accepted one.

        Args:
            group: Whose uploads the entries name.
            entries: What to append.
            decision: Asked of the manifest that is about to be replaced.
            accepted: Kinds of decisions that let the append go on.

        Returns:
            The first sequence, or the decision that stopped the append.
        """
        while True:
            expiry = self._lifetimes.expiry(group)

            def guard(before: Manifest, expiry: Expiry = expiry) -> Decision | None:
                # Asked on each attempt: the process may have been paused since the last one.
                if expiry.is_over(self._runtime):
                    return Expired()
                found = decision(before)
                return None if isinstance(found, accepted) else found

            outcome: int | Decision = self._queue.append(entries, guard=guard)
            if isinstance(outcome, int):
                self._check_late(group, expiry, outcome + len(entries))
            if not isinstance(outcome, Expired):
                return outcome

    def _check_late(self, group: Group, expiry: Expiry, next_sequence: int) -> None:
        """Notice an append that landed after its uploads had expired (failure F5).

        That takes a process that is frozen between the last look at the clock and the write, for
        long, while nobody else writes the manifest. A collector that had read the manifest
        before may then delete the uploads for another quarter of the grace period. What is there
        after that is queued and stays.
        """
        if not expiry.is_over(self._runtime):
            return
        locations = tuple(each.location for each in group.uploads)
        self._lifetimes.outwait_collector()
        if self._lifetimes.oldest_ms(locations) is None:
            raise CommitStateUnknown(
                self._queue.key,
                next_sequence - len(locations),
                locations,
                next_sequence,
                "it landed later than the collector's grace period allows, and objects are gone",
            )

    def _is_torn(self, queued: tuple[str, ...]) -> bool:
        """Whether queued batches of a transaction have lost their objects: it landed too late.

        Then they must be written again. The reader cannot deliver the first ones; once they are
        skipped there, its filter passes the others (``TransactionFilter.skip``).

        Asked of the manifest that shows them, and of a listing made after it: a reader may have
        passed them by at any time since, and a later manifest would not say how. If it delivered
        them, and they were collected since, the others are a repeat that its filter drops.

        Args:
            queued: Locations of the transaction in the manifest. None of them means that the
                record, or a later batch of the app, tells that this one was committed; a record
                is written only once all objects outlived the collector.
        """
        if not queued:
            return False
        oldest_ms = self._lifetimes.oldest_ms(queued)
        if oldest_ms is not None and oldest_ms > self._grace_ms:
            self._lifetimes.outwait_collector()
            oldest_ms = self._lifetimes.oldest_ms(queued)
        return oldest_ms is None

    def _drop_repeat(self, group: Group, transaction: Transaction) -> None:
        metrics.write_repeats_dropped.add(len(group.uploads))
        log.warning(
            "batch %d of app %s was committed before: %d records in %d batches are not appended "
            "again. After a restart of its query this is right; otherwise two writers share the "
            "txnAppId.",
            transaction.batch, transaction.app, group.records, len(group.uploads),
        )  # fmt: skip

    def _separator(self) -> NewEntry:
        """An empty batch without identity: a gap between two groups of one batch."""
        location = batch_key(self._config.data_path_prefix, self._runtime.ulid())
        self._store.put(location, encode_batch([]))
        return NewEntry(location)
