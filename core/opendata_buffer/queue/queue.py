"""Layer 2: the one place where a manifest is changed (OpenData RFC 0001, Queue).

Every change is the same loop: read (cached, if-changed), compute the next manifest, check its
invariants, compare-and-swap, and settle what an answer left open. The changes themselves are
pure functions of manifests, so the loop has no idea what it writes.

A conditional put has four outcomes, and each leads somewhere else:

=================  =====================================================================
applied            remember the version: the next change needs no read before it
version conflict   somebody else wrote: read again, change again
vanished           the manifest was deleted: stop, never recreate it (failure F4)
unknown            the answer was lost: read, and look for our own write (failures F1, F2)
=================  =====================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from tenacity import Retrying

from opendata_buffer import metrics
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CommitStateUnknown,
    Conflict,
    DataLoss,
    Fenced,
    InvalidInput,
    ObjectNotFound,
    OpenDataBufferError,
    QueueFull,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.invariants import check_transition
from opendata_buffer.formats.keys import is_ulid, ulid_timestamp_ms
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest, NewEntry
from opendata_buffer.retry import full_jitter
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import (
    ABSENT,
    Applied,
    ConditionalPut,
    Get,
    IfVersion,
    NotModified,
    Vanished,
    VersionConflict,
)

__all__ = ["Queue", "QueueStore"]

log = logging.getLogger(__name__)

Change = Callable[[Manifest], Manifest]
"""From the manifest as it is to the manifest as it shall be; the same object means no write."""


class QueueStore(Get, ConditionalPut, Protocol):
    """What the queue needs of a store."""

    @property
    def url(self) -> str:
        """The URL that names the store."""
        ...


class _TryAgain(Exception):
    """An attempt that wrote nothing we know of; never leaves this module."""


class _AnswerLost(_TryAgain):
    """It may have written all the same."""


class Queue:
    """One manifest, as seen by one owner. Not thread-safe: its owner serialises the calls.

    Args:
        store: Where the manifest lives.
        config: Manifest path, deadline, backoff and size limit.
        runtime: Clock and jitter.
        role: Label of the write and conflict counters: ``producer``, ``consumer``, ...
    """

    def __init__(
        self, store: QueueStore, config: QueueConfig, *, runtime: Runtime, role: str
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._labels = {"role": role}
        self._key = config.manifest_path
        self._manifest: Manifest | None = None
        self._version: str | None = None
        self._fresh = False
        self.attempts = 0
        self.conflicts = 0

    @property
    def key(self) -> str:
        """The manifest's key."""
        return self._key

    def read(self) -> Manifest | None:
        """The manifest as it is now, or None when the queue was never created.

        Costs one conditional GET; an unchanged manifest is not transferred again.

        Raises:
            QueueReset: The manifest vanished or went backwards since it was last read.
            CorruptManifest: It is no v1 manifest.
            TransientStorageError: The store did not answer within ``cas_deadline_ms``.
        """
        retrying = self._retrying(TransientStorageError)
        result: Manifest | None = retrying(self._read_once)
        return result

    def append(
        self, entries: Sequence[NewEntry], *, guard: Callable[[Manifest], None] | None = None
    ) -> int:
        """Append a group in one write: contiguous, all or none. Returns the first sequence.

        Idempotent by location: after a lost answer the manifest is read again and searched for
        the group, so no batch is ever appended twice (failures F1, F2).

        Args:
            entries: At least one.
            guard: Called with each manifest that is about to be replaced; raise in it to stop.
                What it checks holds when the write lands, and not only when it was checked.

        Raises:
            QueueFull: The manifest would outgrow ``max_manifest_bytes``; nothing was appended.
            Conflict: Every attempt lost its race until the deadline; nothing was appended.
            CommitStateUnknown: The group may have landed and was dequeued since, or storage
                stopped answering before that could be told.
            QueueReset, CorruptManifest, PermanentStorageError: Nothing was appended.
        """
        if not entries:
            raise InvalidInput("append of no entries: give at least one")
        append = _Append(self._key, entries, self._check_size, guard)
        try:
            self._update(append.change, append)
        except CommitStateUnknown:
            raise
        except OpenDataBufferError as error:
            if append.in_doubt:
                # Whatever stopped us, an attempt of ours may still be on its way to the store.
                raise append.unknown(str(error), self._manifest) from error
            raise
        return append.sequence

    def claim_epoch(
        self, last_acked_sequence: int | None, *, allow_data_loss: bool = False
    ) -> Manifest:
        """Take over as the queue's consumer: bump the epoch, drop what is already acknowledged.

        A lost answer needs no proof here: bumping once more is as good (OpenData RFC 0001, Queue).

        Raises:
            QueueReset: ``last_acked_sequence`` was given and the queue is not there or ends
                before it (failures F4, F27).
            DataLoss: Entries after ``last_acked_sequence`` were dequeued by somebody else, and
                ``allow_data_loss`` is false.
        """

        def claim(before: Manifest) -> Manifest:
            if last_acked_sequence is not None:
                self._check_resume(before, last_acked_sequence, allow_data_loss)
            after = before.with_epoch(before.epoch + 1)
            return after if last_acked_sequence is None else after.drop_through(last_acked_sequence)

        return self._update(claim)

    def dequeue(self, through_sequence: int, epoch: int) -> Manifest:
        """Drop all entries up to and including ``through_sequence``; repeatable.

        Writes nothing when they are gone already.

        Raises:
            Fenced: The manifest carries another epoch; nothing was dropped.
            InvalidInput: The queue ends before ``through_sequence`` (failure F27).
        """

        def drop(before: Manifest) -> Manifest:
            self.check_epoch(before, epoch)
            if through_sequence >= before.next_sequence:
                raise InvalidInput(
                    f"cannot dequeue through {through_sequence}: manifest {self._key!r} ends at "
                    f"{before.next_sequence - 1}. Acknowledge only sequences that were handed out."
                )
            return before.drop_through(through_sequence)

        return self._update(drop)

    def check_epoch(self, manifest: Manifest, epoch: int) -> None:
        """Raise :class:`Fenced` unless ``epoch`` is the manifest's."""
        if manifest.epoch != epoch:
            raise Fenced(self._key, epoch, manifest.epoch)

    def _update(self, change: Change, append: _Append | None = None) -> Manifest:
        if append is None:
            # Producers write all the time, so a consumer's cached version is stale: one read is
            # cheaper than a lost race that makes a producer retry too.
            self._fresh = False
        started = self._runtime.monotonic()
        retrying = self._retrying(_TryAgain, TransientStorageError)
        attempts = self.attempts
        try:
            result: Manifest = retrying(self._attempt, change, append)
            return result
        except _TryAgain as error:
            if append is not None and append.in_doubt:
                raise append.unknown(str(error), self._manifest) from error
            waited = self._runtime.monotonic() - started
            tried = self.attempts - attempts
            if isinstance(error, _AnswerLost):
                raise TransientStorageError(
                    f"manifest {self._key!r} in {self._store.url} could not be written: {tried} "
                    f"attempts in {waited:.1f} s, and {error}. It may have been written; try again."
                ) from error
            raise Conflict(self._key, tried, waited) from error

    def _attempt(self, change: Change, append: _Append | None) -> Manifest:
        remembered = self._fresh
        if not remembered:
            self._read_once()
        before = self._manifest or Manifest.empty()
        if append is not None and append.has_landed(before, self._version):
            return before
        try:
            after = change(before)
        except Exception:
            if not remembered:
                raise
            # Nothing is refused by a manifest out of memory: what makes it too large may have
            # been dequeued since (failure F35).
            self._fresh = False
            return self._attempt(change, append)
        if after is before:
            return before
        check_transition(before, after)
        condition = ABSENT if self._version is None else IfVersion(self._version)
        # Until the outcome says otherwise, what we know of the manifest is out of date; this
        # also holds when put_if raises.
        self._fresh = False
        self.attempts += 1
        metrics.manifest_writes.add(1, self._labels)
        outcome = self._store.put_if(self._key, after.raw, condition)
        match outcome:
            case Applied(version):
                self._remember(after, version)
                return after
            case VersionConflict():
                self.conflicts += 1
                metrics.manifest_conflicts.add(1, self._labels)
                raise _TryAgain("another writer was faster")
            case Vanished():
                raise self._vanished()
            case _:
                log.warning("answer to a write of %s was lost: %s", self._key, outcome.reason)
                if append is not None:
                    append.doubt(before.next_sequence, self._version)
                raise _AnswerLost(f"answers were lost: {outcome.reason.rstrip('.')}")

    def _read_once(self) -> Manifest | None:
        try:
            got = self._store.get(self._key, if_changed=self._version, max_bytes=MAX_MANIFEST_BYTES)
        except ObjectNotFound as error:
            if self._version is not None:
                raise self._vanished() from error
            self._fresh = True
            return None
        if not isinstance(got, NotModified):
            manifest = Manifest.parse(got.data)
            known = self._manifest
            if known is not None and (
                manifest.next_sequence < known.next_sequence or manifest.epoch < known.epoch
            ):
                raise QueueReset(
                    f"manifest {self._key!r} in {self._store.url} went backwards: next sequence "
                    f"{known.next_sequence} -> {manifest.next_sequence}, epoch {known.epoch} -> "
                    f"{manifest.epoch}. It was deleted and recreated, or restored from an old "
                    "copy. Stop all producers and consumers before you go on."
                )
            self._remember(manifest, got.version)
        self._fresh = True
        return self._manifest

    def _remember(self, manifest: Manifest, version: str) -> None:
        self._manifest = manifest
        self._version = version
        self._fresh = True

    def _vanished(self) -> QueueReset:
        return QueueReset(
            f"manifest {self._key!r} in {self._store.url} vanished while in use. It is not "
            "recreated: sequences would start again at 0 and acknowledged positions would hide "
            "new batches. Restore it (bucket versioning), or start a new queue under another "
            "data_path_prefix. Check lifecycle rules on the bucket."
        )

    def _check_resume(self, before: Manifest, last_acked: int, allow_data_loss: bool) -> None:
        if last_acked < 0:
            raise InvalidInput(
                f"last_acked_sequence is {last_acked}: use None to start at the oldest entry"
            )
        if self._version is None:
            raise QueueReset(
                f"cannot resume after sequence {last_acked}: manifest {self._key!r} does not "
                f"exist in {self._store.url}. The queue was deleted or the URL, data_path_prefix "
                "or manifest_path is another queue's. Start without a position to create it."
            )
        if last_acked >= before.next_sequence:
            raise QueueReset(
                f"cannot resume after sequence {last_acked}: manifest {self._key!r} ends at "
                f"{before.next_sequence - 1}. The queue was recreated or the position belongs to "
                "another queue. Start without a position to read what is queued now."
            )
        if last_acked + 1 < before.first_sequence and not allow_data_loss:
            raise DataLoss(
                self._key,
                last_acked + 1,
                before.first_sequence,
                "Another consumer read this queue. Resume from its position, or accept the loss "
                "explicitly.",
            )

    def _check_size(self, before: Manifest, after: Manifest) -> None:
        limit = self._config.max_manifest_bytes
        if after.size <= limit:
            return
        oldest_ms = None
        if before.entry_count:
            location = before.entries(limit=1)[0].location
            ulid = location.rpartition("/")[2].removesuffix(".batch")
            if is_ulid(ulid):
                oldest_ms = max(0, self._runtime.now_ms() - ulid_timestamp_ms(ulid))
        raise QueueFull(self._key, after.size, limit, before.entry_count, oldest_ms)

    def _retrying(self, *errors: type[BaseException]) -> Retrying:
        return full_jitter(
            self._runtime,
            base_ms=self._config.backoff_base_ms,
            max_ms=self._config.backoff_max_ms,
            deadline_ms=self._config.cas_deadline_ms,
            retry_on=errors,
        )


class _Append:
    """One group on its way into the manifest, and what is known of its earlier attempts."""

    def __init__(
        self,
        key: str,
        entries: Sequence[NewEntry],
        check_size: Callable[[Manifest, Manifest], None],
        guard: Callable[[Manifest], None] | None,
    ) -> None:
        self._key = key
        self._entries = entries
        self._check_size = check_size
        self._guard = guard
        self._tried = False
        self._doubts: list[tuple[int, str | None]] = []
        self.sequence = -1

    @property
    def in_doubt(self) -> bool:
        """Whether an attempt may have landed, or may still land, without our knowing."""
        return bool(self._doubts)

    def doubt(self, sequence: int, version: str | None) -> None:
        """The answer to an attempt at ``sequence``, bound to ``version``, was lost."""
        self._doubts.append((sequence, version))

    def has_landed(self, manifest: Manifest, version: str | None) -> bool:
        """Look for the group in a manifest read after an attempt (failures F1, F2).

        Raises:
            CommitStateUnknown: A doubtful attempt's sequences were dequeued already.
        """
        if not self._tried:
            return False
        # Also after a plain conflict: a proxy that repeats requests turns our own success into
        # a conflict. The search is a bytes search, decoding nothing; it looks for the last
        # entry because the consumer drops the group from its front.
        last = manifest.find(self._entries[-1].location)
        if last is not None:
            self.sequence = last - len(self._entries) + 1
            self._doubts.clear()
            return True
        if any(sequence < manifest.first_sequence for sequence, _ in self._doubts):
            raise self.unknown("those sequences were dequeued since", manifest)
        # An attempt bound to a version that is no longer current can never land any more;
        # one bound to the current version may still be on its way.
        self._doubts = [doubt for doubt in self._doubts if doubt[1] == version]
        return False

    def change(self, before: Manifest) -> Manifest:
        if self._guard is not None:
            self._guard(before)
        self._tried = True
        after = before.append(self._entries)
        self._check_size(before, after)
        self.sequence = before.next_sequence
        return after

    def unknown(self, reason: str, manifest: Manifest | None) -> CommitStateUnknown:
        return CommitStateUnknown(
            self._key,
            self._doubts[0][0],
            tuple(entry.location for entry in self._entries),
            None if manifest is None else manifest.next_sequence,
            reason,
        )
