"""Claim a data prefix for a queue, before anything is written or deleted there.

Every program that writes to a queue or collects its garbage claims the queue first. The claim
compares the manifest path of the program with the owner marker
(:mod:`opendata_buffer.queue.marker`), and creates the marker for a new queue::

    claim = claim_for_writing(store, config)      # PrefixConflict: the prefix has another owner
    claim.check(manifest)                         # QueueReset: the manifest went back
    claim.note(manifest)                          # remember how far it got

:func:`claim_for_writing` also makes the checks that only a new queue needs: the store honours
conditional writes, the prefix is not inside another queue
(:mod:`opendata_buffer.queue.neighbours`), and no batch of another client lies there
(:mod:`opendata_buffer.queue.unaccounted`). :func:`check_owner` is for programs that must not write.

Every process claims its queue at its start, so a claim takes as few requests as possible. It reads
the marker and the manifest at the same time, and sends one write that a sound store refuses. The
marker names the places at which the store was probed (decision 0048).

Things that can go wrong:

* Two programs claim a new prefix at the same time. The marker is created with a conditional write,
  the first one stays, and the other program goes by it. If both mean the same manifest, both
  succeed. If not, the second one gets ``PrefixConflict``.
* A program has a wrong ``manifest_path`` or ``data_path_prefix``. If it were allowed to start, its
  collector would delete the batches of the right queue (failure F7). It gets ``PrefixConflict``
  with both paths.
* The manifest is read at the same time as the marker, and may be older than the watermark. Before
  that is an error, the manifest is read again.
* The marker was copied to a store that ignores conditions, or a proxy stands in front of the store.
  The place then has another name, and is probed. A place that only accepts wrong writes fails at
  the first write, and one whose manifest goes back is probed before the error is raised.
* The manifest was deleted on purpose, and the queue should start over. The operator has to say so
  (``recreate``). The queue gets a new id, so that positions of the old queue are recognised and
  refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

from opendata_buffer import errors, outcomes
from opendata_buffer.config import (
    DEFAULT_GRACE_PERIOD_MS,
    QueueConfig,
)
from opendata_buffer.formats.batch import is_confined, parse_location, prefix_of
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.hints import Action, Hint, Message, QueueName
from opendata_buffer.queue import unaccounted
from opendata_buffer.queue.cas import CasObject, CasStore
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.marker import (
    IS_LOG,
    JUST_READ_S,
    MOST_SKIPPED,
    PrefixOwner,
    Watermark,
    owner_key,
    owner_object,
    quick_owner_object,
)
from opendata_buffer.queue.neighbours import check_manifest_path, check_prefix_is_free
from opendata_buffer.queue.stored_manifest import check_reached, manifest_object, read_manifest
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline, in_parallel
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.probed import Probed

log = logging.getLogger(__name__)

NOTE_INTERVAL_S = 60.0
"""Seconds between two writes of the watermark by one process."""


class QueueClaim:
    """A claim of a data prefix, with the watermark of its manifest.

    Not thread-safe: it belongs to one :class:`.Queue`, which writes the watermark through it.

    Args:
        store: Where the queue is.
        config: The queue.
        runtime: Clock and sleep.
        owner: The marker as it was read or written.
        grace_ms: The grace period of this program in milliseconds, used if the marker has none.
        marker: The object that has read or written the marker; None if it is to be read again.
    """

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        runtime: Runtime,
        owner: PrefixOwner,
        grace_ms: int | None = None,
        marker: CasObject[PrefixOwner] | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        self._object = quick_owner_object(store, config, runtime)
        if marker is not None:
            self._object.adopt(marker)
        self.marker = marker
        """The object that has read or written the marker for this claim."""
        self._claimed_at = runtime.monotonic()
        self._manifest: CasObject[Manifest] | None = None
        self._probed: Probed | None = None
        self.has_grace = owner.grace_ms is not None
        """Whether the marker has a grace period."""
        self.probes = tuple(each for each in owner.probed if each.counts(runtime.now_ms()))
        """The probes in the marker that count."""
        self.watermark = owner.watermark
        """The watermark as it was last read or written."""
        self._tried, self._tried_at = self.watermark, runtime.monotonic()
        self.queue_id = owner.queue_id
        self.grace_ms = owner.grace_ms or grace_ms or DEFAULT_GRACE_PERIOD_MS
        """The grace period of the queue, in milliseconds."""
        self.is_log = owner.others.get(IS_LOG) is True
        """Whether the queue has named readers (:mod:`opendata_buffer.queue.reader_queue`)."""
        self.skipped = owner.skipped
        """Ranges of sequences that never held batches: first, and one past the last."""

    def remember(self, manifest: CasObject[Manifest], probed: Probed | None) -> None:
        """Keep what the claim has found out.

        Args:
            manifest: The object that has just read the manifest.
            probed: The probe that counts here. The next write of the watermark adds it to the
                marker.
        """
        self._manifest = manifest
        self._probed = None if probed in self.probes else probed

    def take_manifest(self) -> CasObject[Manifest] | None:
        """Return the object that read the manifest for this claim, once, and only for a moment.

        Later the manifest has probably changed, and a read costs less than a lost race.
        """
        taken, self._manifest = self._manifest, None
        just_claimed = self._runtime.monotonic() - self._claimed_at <= JUST_READ_S
        return taken if just_claimed else None

    def check(self, manifest: Manifest | None) -> None:
        """Refuse a manifest that is gone or below the watermark.

        Args:
            manifest: The manifest as it was read after the marker; None if it does not exist.

        Raises:
            QueueReset: It was deleted, or restored from an old copy (failure F4).
        """
        if self.watermark is not None:
            check_reached(self.watermark, manifest, self._config, self._store.url)

    def start_over(self, manifest: Manifest | None) -> QueueClaim:
        """Give the queue a new id, so that positions in the old queue are refused.

        Args:
            manifest: The manifest from which the queue continues; None if it does not exist.

        Returns:
            A claim with the new id. If two programs start over at once, both get the id of the
            first.

        Raises:
            StorageError: The store did not answer, or refused the write.
        """
        watermark = None if manifest is None else Watermark.of(manifest)
        ulid = self._runtime.ulid()

        def renewed(before: PrefixOwner | None) -> PrefixOwner:
            known = before or PrefixOwner(self._config.manifest_path, self.queue_id)
            # If two programs start over at once, the id of the first one stays.
            if known.queue_id != self.queue_id:
                return known
            grace_ms = known.grace_ms or self.grace_ms
            return replace(
                known,
                queue_id=ulid,
                watermark=watermark,
                grace_ms=grace_ms,
                index_changes=None,
                skipped=(),
            )

        owner = owner_object(self._store, self._config, self._runtime).change(renewed)
        return QueueClaim(self._store, self._config, self._runtime, owner)

    def note_skipped(self, first: int, end: int) -> None:
        """Note that a rebuilt manifest begins at ``end``, and that nothing was ever at ``first``.

        A failure is only logged: errors about losses then count these sequences as batches.

        Args:
            first: The first sequence that never held a batch.
            end: The first sequence of the manifest.
        """

        def noted(before: PrefixOwner | None) -> PrefixOwner | None:
            if before is None or before.queue_id != self.queue_id:
                return before
            if (first, end) in before.skipped:
                return before
            return replace(before, skipped=(*before.skipped, (first, end))[-MOST_SKIPPED:])

        try:
            outcome: object = self._object.update(noted)
        except errors.OpenDataBufferError as error:
            outcome = error
        if not isinstance(outcome, outcomes.Applied):
            log.warning("the owner marker %s was not written: %s", self._object.key, outcome)

    def note(self, manifest: Manifest, *, now: bool = False, acked_location: str = "") -> None:
        """Raise the watermark in the marker to a manifest that was just read or written.

        Writes at the first call, when the epoch has risen, and every ``NOTE_INTERVAL_S``. A failure
        is only logged: a watermark that lags is still correct.

        Args:
            manifest: The manifest.
            now: Write in any case, unless the marker has this watermark.
            acked_location: Where the batch was that left the manifest last; empty if it is not
                known.
        """
        reached = Watermark.of(manifest, acked_location)
        seen, tried = self.watermark, self._tried
        waited_s = self._runtime.monotonic() - self._tried_at
        probed, self._probed = self._probed, None
        due = now or tried is None or reached.epoch > tried.epoch or waited_s >= NOTE_INTERVAL_S
        if probed is None and (not due or (seen is not None and seen.includes(reached))):
            return

        # Set now, also for a write that fails: it must not slow down every append.
        just_claimed = self._runtime.monotonic() - self._claimed_at <= JUST_READ_S
        self._tried, self._tried_at = reached, self._runtime.monotonic()

        def raised(before: PrefixOwner | None) -> PrefixOwner | None:
            # The marker was deleted, or belongs to a queue that was started over.
            if before is None or before.queue_id != self.queue_id:
                return before
            before, known = before.with_probe(probed), before.watermark
            if known is not None and known.includes(reached):
                return before
            return replace(before, watermark=known.joined(reached) if known else reached)

        try:
            # Later another program has probably changed the marker. A read is then cheaper than a
            # lost race.
            outcome = self._object.update(raised, from_memory=just_claimed)
        except errors.OpenDataBufferError as error:
            log.warning("the owner marker %s was not written: %s", self._object.key, error)
            return
        if isinstance(outcome, outcomes.Applied):
            self.watermark = reached if seen is None else seen.joined(reached)
        else:
            log.info("the owner marker %s was not written: %s", self._object.key, outcome)


def claim_for_writing(
    store: Store,
    config: QueueConfig,
    *,
    runtime: Runtime | None = None,
    missing: Callable[[], errors.InvalidInput] | None = None,
    grace_ms: int | None = None,
    recreate: bool = False,
    uploaded: Collection[str] = (),
) -> QueueClaim:
    """Claim a queue before the first write to it. Safe to repeat.

    Args:
        store: Where the queue is.
        config: The queue.
        runtime: Clock and sleep. Default: those of the system.
        missing: Returns the error to raise if the queue does not exist. None creates the queue.
        grace_ms: Grace period of a queue that has none yet, in milliseconds.
        recreate: Start the queue over if its manifest is gone or went back.
        uploaded: Locations of batches that the caller itself has just put there.

    Returns:
        The claim.

    Raises:
        UnsafeStore: The store does not honour conditional writes (failure F12).
        PrefixConflict: The data prefix belongs to another queue (failure F7).
        InvalidInput: A new queue would be inside or around another queue's prefix (failure F7), or
            at batches that it does not know (failure F51).
        QueueReset: The manifest is gone or below the watermark (failure F4).
        StorageError: The store did not answer, or refused the write.
    """
    runtime = runtime if runtime is not None else SystemRuntime()
    with deadline(runtime, config.timeout_ms / 1000):
        marker, manifest = (
            owner_object(store, config, runtime),
            manifest_object(store, config, runtime),
        )
        # At the same time, because each of them takes as long as a request.
        owner, found, refusal = in_parallel(
            runtime,
            _answer,
            (marker.read, manifest.read, lambda: store.check_refusal(config.manifest_path)),
        )
        claim = _claim_of(_raised(owner), marker, store, config, runtime, grace_ms)
        if claim is None and _present(_raised(found)) is None and missing is not None:
            raise missing()
        _raised(refusal)
        known = () if claim is None else claim.probes
        probed = store.check_conditional_writes(config.manifest_path, known)
        if claim is None:
            read = _present(_raised(found))
            check_manifest_path(store, config)
            check_prefix_is_free(store, config)
            if fault := misplaced(read, config, store.url):
                raise errors.InvalidInput(*fault.parts)
            error = unaccounted.refusal(store, config, read, uploaded)
            # Read again: a process may have claimed the prefix, or written its first manifest,
            # and uploaded the batches between the first read and the listing.
            if error and not _is_claimed_by_now(store, config, read, runtime):
                raise error
        if claim is None or (grace_ms is not None and not claim.has_grace):
            claim = claim_queue(store, config, runtime=runtime, grace_ms=grace_ms, probed=probed)
        if grace_ms not in (None, claim.grace_ms):
            _warn_of_grace(queue_name(store.url, config), grace_ms, claim.grace_ms)
        if claim.watermark is not None:
            read = _present(_raised(found))
            if not claim.watermark.allows(read):
                read = _present(manifest.read())  # It may have been older than the marker.
            try:
                claim.check(read)
                if read is not None:
                    # Check the bytes after the last entry, too. Readers would refuse them, so
                    # appends would be reported as durable and never be read.
                    read.check()
            except errors.QueueReset as error:
                # Writers on a store that ignores conditions overwrite each other, and the manifest
                # goes back. Then another process's probe is not believed.
                suspect(store, config.manifest_path)
                if not recreate:
                    raise
                log.warning("the queue starts over, as asked: %s", error)
                return claim.start_over(read)
        if not isinstance(found, errors.OpenDataBufferError):
            claim.remember(manifest, probed)
        return claim


def suspect(store: CasStore, near: str) -> None:
    """Probe the store, after something that a store with conditional writes does not allow.

    This process makes the probe itself, unless it has done so before.

    Args:
        store: The store.
        near: A key below which probe objects are named.

    Raises:
        UnsafeStore: The store does not honour conditional writes (failure F12).
    """
    try:
        store.check_conditional_writes(near, trust=False)
    except errors.UnsafeStore:
        raise
    except errors.OpenDataBufferError as error:
        log.warning("%s was not probed again: %s", store.url, error)


def _answer(call: Callable[[], object]) -> object:
    """Return the result of a call, or its error, which may not matter."""
    try:
        return call()
    except errors.OpenDataBufferError as error:
        return error


def _raised(answer: object) -> Any:
    """Return an answer, or raise it if it is an error."""
    if isinstance(answer, errors.OpenDataBufferError):
        raise answer
    return answer


def _present(found: Manifest | outcomes.Vanished | None) -> Manifest | None:
    return found if isinstance(found, Manifest) else None


def _is_claimed_by_now(
    store: Store, config: QueueConfig, found: Manifest | None, runtime: Runtime
) -> bool:
    if check_owner(store, config, runtime=runtime) is not None:
        return True
    return found is None and read_manifest(store, config, runtime) is not None


def claim_queue(
    store: CasStore,
    config: QueueConfig,
    *,
    runtime: Runtime | None = None,
    grace_ms: int | None = None,
    probed: Probed | None = None,
) -> QueueClaim:
    """Make the data prefix belong to the queue of this manifest. Safe to repeat.

    Writes a new marker, or adds a grace period to a marker without one.

    Args:
        store: Where the queue is.
        config: The queue.
        runtime: Clock and sleep. Default: those of the system.
        grace_ms: Grace period of a queue that has none yet, in milliseconds.
        probed: The probe that counts here, for a new marker.

    Returns:
        The claim.

    Raises:
        PrefixConflict: The data prefix belongs to another queue.
        StorageError: The store did not answer, or refused the write.
    """
    runtime = runtime if runtime is not None else SystemRuntime()
    new_ms = grace_ms or DEFAULT_GRACE_PERIOD_MS
    fresh = PrefixOwner(config.manifest_path, runtime.ulid(), grace_ms=new_ms).with_probe(probed)

    def claimed(before: PrefixOwner | None) -> PrefixOwner:
        # The first marker stays, with its id. So a lost answer does not matter: whichever process
        # wrote the marker, the next read finds it.
        if before is None:
            return fresh
        _check_manifest_path(before, config, store.url)
        return before if before.grace_ms is not None else replace(before, grace_ms=grace_ms)

    marker = owner_object(store, config, runtime)
    owner = marker.change(claimed)
    return QueueClaim(store, config, runtime, owner, grace_ms, marker)


def change_grace_period(
    store: CasStore, config: QueueConfig, runtime: Runtime, grace_ms: int
) -> None:
    """Change the grace period of a queue.

    Running collectors use the new one at once, all other programs when they start. So a longer one
    may be set at any time, and a shorter one only while no producer runs (failure F5).

    Args:
        store: Where the queue is.
        config: The queue.
        runtime: Clock and sleep.
        grace_ms: The new grace period, in milliseconds.

    Raises:
        PrefixConflict: The data prefix belongs to another queue.
        StorageError: The store did not answer, or refused the write.
    """
    claim_queue(store, config, runtime=runtime)
    marker = owner_object(store, config, runtime)
    marker.change(lambda before: before and replace(before, grace_ms=grace_ms))


@lru_cache(maxsize=10_000)  # Warn once for each queue, however often this process opens it.
def _warn_of_grace(queue: QueueName, own_ms: int, grace_ms: int) -> None:
    log.warning(
        "the queue %s has a grace period of %d ms, and this program was given %d ms: it uses the "
        "queue's. %s",
        queue.words(),
        grace_ms,
        own_ms,
        Hint(Action.CHANGE_GRACE_PERIOD, queue, count=own_ms),
    )


def check_owner(
    store: CasStore,
    config: QueueConfig,
    *,
    runtime: Runtime | None = None,
    grace_ms: int | None = None,
) -> QueueClaim | None:
    """Return the claim of a queue that exists, like :func:`claim_queue`, but write nothing.

    Args:
        store: The opened store of the queue.
        config: The queue.
        runtime: Clock and sleep. Default: those of the system.
        grace_ms: The grace period to use if the marker has none, in milliseconds.

    Returns:
        The claim, or None if the prefix has no owner yet.

    Raises:
        PrefixConflict: The data prefix belongs to another queue.
        StorageError: The store did not answer.
    """
    runtime = runtime if runtime is not None else SystemRuntime()
    marker = owner_object(store, config, runtime)
    return _claim_of(marker.read(), marker, store, config, runtime, grace_ms)


def _claim_of(
    owner: PrefixOwner | outcomes.Vanished | None,
    marker: CasObject[PrefixOwner],
    store: CasStore,
    config: QueueConfig,
    runtime: Runtime,
    grace_ms: int | None,
) -> QueueClaim | None:
    """Return the claim of a queue with this marker, which was just read; None without a marker."""
    if not isinstance(owner, PrefixOwner):
        return None
    _check_manifest_path(owner, config, store.url)
    return QueueClaim(store, config, runtime, owner, grace_ms, marker)


def _check_manifest_path(owner: PrefixOwner, config: QueueConfig, url: str) -> None:
    if owner.reader:
        raise errors.InvalidInput(
            f"data prefix {config.data_path_prefix!r} has the queue of reader {owner.reader!r} of "
            f"the log with manifest {owner.manifest_path!r}: only v1 consumers may read it, and "
            "only the processes of the log may write it. Write to the log, and read it as a reader "
            "with another name."
        )
    if owner.manifest_path != config.manifest_path:
        hint = Hint(Action.CORRECT_OWNER, queue_name(url, config))
        raise errors.PrefixConflict(
            config.data_path_prefix, config.manifest_path, owner.manifest_path, hint
        )


def misplaced(
    manifest: Manifest | None, config: QueueConfig, url: str, acked_location: str = ""
) -> Message | None:
    """Return an error message if all batches of a queue are in a data prefix inside this one.

    Args:
        manifest: The manifest; None if it does not exist.
        config: The queue, with the data prefix that may be wrong.
        url: The URL of the store.
        acked_location: Location of the last batch that left the queue, for an empty manifest.

    Returns:
        The message, or None if the data prefix is right.
    """
    prefix = config.data_path_prefix
    queue = manifest or Manifest.empty()
    first = [entry.location for entry in queue.entries(limit=1)] or [acked_location]
    right = prefix_of(first[0])
    if right is None or not is_confined(right, prefix):
        return None  # The first batch decides for nearly every queue; there may be a million.
    if any(parse_location(each, prefix) for each in queue.locations()):
        return None
    path = config.manifest_path
    action = Action.USE_PREFIX
    if path != f"{right}/manifest":
        action = Action.USE_PREFIX_AND_MANIFEST
    name = queue_name(url, replace(config, data_path_prefix=right))
    text = (
        f"no batch of the queue with manifest {config.manifest_path!r} lies in the data prefix "
        f"{prefix!r}, so batches would never be deleted after they were read. Its batches lie in "
        f"{right!r}"
    )
    use = Hint(action, prefix=right, path=path)
    return Message(text, use, Hint(Action.MOVE_OWNER, name, path=owner_key(prefix)))
