"""The driver's part of a write: one compare-and-swap that makes all of it visible, once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from buffer_sink.decision import (
    AlreadyDone,
    CommitRecord,
    Separate,
    decide,
    record_key,
    transaction_prefix,
)
from buffer_sink.messages import Group
from buffer_sink.options import SinkOptions
from opendata_buffer.errors import (
    CommitStateUnknown,
    ObjectNotFound,
    OpenDataBufferError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.owner import claim_for_use
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Moment, Runtime
from opendata_buffer.stores import ABSENT, Absent, Applied, Blob, IfVersion, Store

__all__ = ["WriteCommitter"]

log = logging.getLogger(__name__)

_MAX_RECORD_BYTES = 64 * 1024


class _AlreadyDone(Exception):
    """The manifest about to be replaced holds the batch."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.manifest = manifest


class _Expired(OpenDataBufferError):
    """The uploads grew too old on the way. A library error: the queue may add its doubts."""


class _SeparatorNeeded(Exception):
    """The manifest about to be replaced is empty and may have held the batch."""


class WriteCommitter:
    """Commits groups of uploads to one queue. See :mod:`buffer_sink.decision` for the protocol.

    Args:
        store: Where queue and batches live.
        options: The sink's options.
        runtime: Clocks and names.
    """

    def __init__(self, store: Store, options: SinkOptions, runtime: Runtime) -> None:
        self._store = store
        self._options = options
        self._runtime = runtime
        self._prefix = options.queue.data_path_prefix
        self._queue = Queue(store, options.queue, runtime=runtime, role="producer")
        self._checked = False

    def append(self, group: Group | None) -> bool:
        """Append a group, unless it is in the queue or was there before.

        Returns:
            False when there was nothing to append.

        Raises:
            CommitStateUnknown: It may or may not be in the queue. Commit it again.
            TransientStorageError: Uploads are so old that the collector may delete them before
                they are in the queue, or has deleted them; write all of them again.
            OpenDataBufferError: As :meth:`Queue.append`; nothing was appended.
        """
        if group is None or not group.uploads:
            return False
        if not self._checked:
            # First use in this process: a store without compare-and-swap (failure F12), or a
            # prefix of another queue whose collector would delete our batches (failure F7).
            queue = self._options.queue
            claim = claim_for_use(self._store, queue, runtime=self._runtime)
            self._queue = Queue(
                self._store, queue, runtime=self._runtime, role="producer", claim=claim
            )
            self._checked = True
        expiry = self._expiry(group)
        try:
            if group.transaction is not None:
                return self._append_once(group, group.transaction, expiry)
            sequence = self._queue.append(
                group.entries, guard=lambda before: expiry.check(self._runtime)
            )
            self._check_late(group, expiry, sequence + len(group.uploads))
            return True
        except _Expired as error:
            raise _too_old(self._options.gc_grace_period_ms) from error

    def _append_once(self, group: Group, transaction: Transaction, expiry: _Expiry) -> bool:
        key = record_key(self._prefix, transaction.app)
        record, version = self._read_record(key)
        entries = group.entries

        torn = False

        def guard(before: Manifest) -> None:
            expiry.check(self._runtime)
            if torn:
                return
            decision = decide(before, record, transaction, prefix=self._prefix, key=self._queue.key)
            if isinstance(decision, AlreadyDone):
                raise _AlreadyDone(before)
            if isinstance(decision, Separate) and len(entries) == len(group.uploads):
                raise _SeparatorNeeded

        try:
            while True:
                try:
                    sequence = self._queue.append(entries, guard=guard)
                    break
                except _SeparatorNeeded:
                    pass
                except _AlreadyDone as done:
                    # A record is written only once all objects outlived the collector.
                    known = record is not None and record.batch >= transaction.batch
                    torn = not known and self._is_torn(transaction, done.manifest)
                    if not torn:
                        log.info("%s is committed already: nothing to do", transaction)
                        return False
                    log.warning("%s is queued, but its objects are gone: again", transaction)
                entries = [self._separator(), *group.entries]
            self._check_late(group, expiry, sequence + len(entries))
        except CommitStateUnknown as error:
            # The batch may have landed and be gone again. Only a commit from the start can go
            # on from here; it puts a separator in front, so the reader tells the two apart.
            error.add_note(
                f"Start the query again: Spark repeats the batch {transaction.batch} under the "
                "same identity, and the Spark source of this library drops the repeat."
            )
            raise
        log.info(
            "%s: %d records in %d batches at sequence %d",
            transaction, group.records, len(group.uploads), sequence,
        )  # fmt: skip
        self._write_record(key, CommitRecord(transaction.batch, sequence + len(entries)), version)
        return True

    def _check_late(self, group: Group, expiry: _Expiry, next_sequence: int) -> None:
        """Notice an append that landed after the grace period (failure F5).

        That takes a process that is frozen between the last look at the clock and the write, for
        long, while nobody else writes the manifest. A collector that had read the manifest
        before may then delete the uploads for another quarter of the grace period. What is there
        after that is queued and stays.
        """
        if not expiry.is_over(self._runtime):
            return
        self._outwait_collector()
        if self._oldest_of(group) is None:
            raise CommitStateUnknown(
                self._queue.key,
                next_sequence - len(group.uploads),
                tuple(each.location for each in group.uploads),
                next_sequence,
                "it landed later than the collector's grace period allows, and objects are gone",
            )

    def _is_torn(self, transaction: Transaction, manifest: Manifest) -> bool:
        """Whether queued batches of a transaction have lost their objects: it landed too late.

        Then they must be written again. The reader cannot deliver the first ones; once they are
        skipped there, its filter passes the others (``TransactionFilter.skip``).

        Asked of the manifest that shows them, and of a listing made after it: a reader may have
        passed them by at any time since, and a later manifest would not say how. If it delivered
        them, and they were collected since, the others are a repeat that its filter drops.
        """
        directory = transaction_prefix(self._prefix, transaction)
        queued = [
            entry.location for entry in manifest.entries() if entry.location.startswith(directory)
        ]
        if not queued:
            return False  # A later batch of the app is queued, so this one was committed.
        oldest_ms = self._oldest_ms(directory, queued)
        if oldest_ms is not None and oldest_ms > self._options.gc_grace_period_ms:
            self._outwait_collector()
            oldest_ms = self._oldest_ms(directory, queued)
        return oldest_ms is None

    def _outwait_collector(self) -> None:
        """Wait until no collector deletes by a manifest it read before now."""
        wait_s = self._options.gc_grace_period_ms / 4000 + 1
        log.warning(
            "objects are older than the collector's grace period: waiting %.0f s to see that none "
            "of them is deleted",
            wait_s,
        )
        self._runtime.sleep(wait_s)

    def _separator(self) -> NewEntry:
        """An empty batch without identity: a gap between two groups of one batch."""
        location = batch_key(self._prefix, self._runtime.ulid())
        self._store.put(location, encode_batch([]))
        return NewEntry(location)

    def _read_record(self, key: str) -> tuple[CommitRecord | None, Absent | IfVersion]:
        try:
            blob = self._store.get(key, max_bytes=_MAX_RECORD_BYTES)
        except ObjectNotFound:
            return None, ABSENT
        assert isinstance(blob, Blob)
        return CommitRecord.from_json(key, blob.data), IfVersion(blob.version)

    def _write_record(self, key: str, record: CommitRecord, condition: Absent | IfVersion) -> None:
        # Best effort: the batch is committed, and must not fail any more. A record that lags
        # is covered by the manifest and by the reader's filter. The condition keeps the mark
        # from falling when a driver that was thought dead writes it late.
        try:
            outcome = self._store.put_if(key, record.to_json(), condition)
        except StorageError as error:
            log.warning("commit record %s was not written: %s", key, error)
            return
        if not isinstance(outcome, Applied):
            log.warning("commit record %s was not written: %s", key, outcome)

    def _expiry(self, group: Group) -> _Expiry:
        """Until when the uploads are safe from the collector (failure F5).

        It deletes unreferenced batches that are older than its grace period. No upload is
        older than the write's plan, and both that and the present are told by the driver's
        clocks; so most writes are young without asking the store. An older write is settled by
        one listing, on the store's own clock: each upload must exist and be younger than half
        the grace period. The other half is what the append may take.

        A write that is too old fails and is made anew. Copying its batches under new names
        here would move all its data through the driver, and could not save those that are gone.
        """
        grace_ms = self._options.gc_grace_period_ms
        now = Moment.now(self._runtime)
        age_ms = group.planned.age_ms(now)
        if age_ms > grace_ms / 2 or not group.planned.precedes(now):
            oldest_ms = self._oldest_of(group)
            if oldest_ms is None or oldest_ms > grace_ms / 2:
                raise _too_old(grace_ms)
            age_ms = oldest_ms
        return _Expiry(now, grace_ms - age_ms)

    def _oldest_of(self, group: Group) -> float | None:
        directory = f"{self._prefix}/"
        if group.transaction is not None:
            directory = transaction_prefix(self._prefix, group.transaction)
        return self._oldest_ms(directory, [each.location for each in group.uploads])

    def _oldest_ms(self, directory: str, locations: Sequence[str]) -> float | None:
        """Age of the oldest object by the store's clock; None when one is gone."""
        listing = self._store.list(directory)
        written = {each.key: each.last_modified_ms for each in listing.objects}
        if any(each not in written for each in locations):
            return None
        return float(listing.now_ms - min(written[each] for each in locations))


@dataclass(frozen=True, slots=True)
class _Expiry:
    """A moment after which uploads must not be appended any more."""

    since: Moment
    left_ms: float

    def is_over(self, runtime: Runtime) -> bool:
        """Whether it has passed."""
        return self.since.age_ms(Moment.now(runtime)) > self.left_ms

    def check(self, runtime: Runtime) -> None:
        """Asked on each attempt: the process may have been paused since the last one."""
        if self.is_over(runtime):
            raise _Expired("uploads are older than the grace period")


def _too_old(grace_ms: int) -> TransientStorageError:
    return TransientStorageError(
        f"the write took so long that its first batches may be deleted as orphans: they are "
        f"older than half the garbage collector's grace period of {grace_ms / 1000:.0f} s, or "
        "gone. Nothing was appended; write again. If writes need that long, use smaller ones "
        "(maxBytesPerTrigger, more partitions), or raise gcGracePeriodMs here and where the "
        "queue is read."
    )
