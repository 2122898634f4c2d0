"""Claiming a data prefix for one queue, and what its marker remembers of the manifest.

The garbage collector deletes what its manifest does not name. Two queues with one data prefix
would therefore delete each other's batches, even though both manifests are sound. The prefix's
marker (:mod:`.marker`) names the one manifest it belongs to; whoever comes with another one is
refused before it writes a batch or deletes one (failure F7).

The marker also remembers a watermark of the manifest. That lags, because it is written seldom
(:meth:`Claim.note`), and never runs ahead. A manifest that is gone or behind it was lost or
restored from an old copy: its unread batches are named by nothing any more, and the collector
would delete them (failure F4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    OpenDataBufferError,
    PrefixConflict,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.formats.manifest_footer import MAX_MANIFEST_BYTES
from opendata_buffer.queue.cas import CasStore, Done, Register
from opendata_buffer.queue.continuity import check_reached
from opendata_buffer.queue.marker import MARKER, MARKER_NAME, Marker, marker_key
from opendata_buffer.queue.nesting import refuse_nesting
from opendata_buffer.queue.verdict import StoreVerdict
from opendata_buffer.queue.watermark import Watermark
from opendata_buffer.queue.words import named_manifest
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline
from opendata_buffer.stores import List

__all__ = ["Claim", "check_owner", "claim_for_use", "claim_queue", "read_marker"]

log = logging.getLogger(__name__)

NOTE_INTERVAL_S = 60.0
"""Seconds between two notes of a watermark by one process, while it writes."""

_NOTE_DEADLINE_MS = 5_000


class ClaimStore(CasStore, List, Protocol):
    """What claiming a queue needs of a store."""


class Claim:
    """A queue that was claimed for use, and what its marker remembers of it.

    Not thread-safe: it belongs to the queue object that notes in it.

    Attributes:
        queue_id: The queue's id, a ULID; empty for a marker that has none.
    """

    def __init__(
        self, store: CasStore, config: QueueConfig, runtime: Runtime, marker: Marker
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        # A note is worth a short wait and no more: the next one says all that this one says.
        quick = replace(config, cas_deadline_ms=min(_NOTE_DEADLINE_MS, config.cas_deadline_ms))
        self._register = _register(store, quick, runtime)
        self._seen = marker.watermark
        self._tried, self._tried_at = self._seen, runtime.monotonic()
        self.queue_id = marker.queue_id

    @property
    def watermark(self) -> Watermark | None:
        """As last read or noted."""
        return self._seen

    def check(self, manifest: Manifest | None) -> None:
        """Refuse a manifest that is gone or behind what the marker has seen (failure F4).

        Raises:
            QueueReset: With what to do about it.
        """
        if self._seen is not None:
            check_reached(self._seen, manifest, self._config, self._store.url)

    def note(self, manifest: Manifest, *, now: bool = False, acked_location: str = "") -> None:
        """Let the marker remember how far a manifest is, that was read or written just now.

        Writes when the manifest is seen for the first time, when its epoch has risen, after
        ``NOTE_INTERVAL_S``, or ``now``; and only what the marker does not know yet. Raises
        nothing: a marker that lags is still right.

        Args:
            manifest: As it is on storage.
            now: Write also when it is not time.
            acked_location: Where the batch was that left the manifest last, if that is known.
        """
        reached = Watermark.of(manifest, acked_location)
        seen, tried = self._seen, self._tried
        waited_s = self._runtime.monotonic() - self._tried_at
        due = now or tried is None or reached.epoch > tried.epoch or waited_s >= NOTE_INTERVAL_S
        if not due or (seen is not None and seen.knows(reached)):
            return
        # Also when it fails: a marker that cannot be written must not slow every append down.
        self._tried, self._tried_at = reached, self._runtime.monotonic()

        def raised(before: Marker | None) -> Marker | None:
            # Deleted, or of a queue that was started over: not ours to write any more.
            if before is None or before.queue_id != self.queue_id:
                return before
            known = before.watermark
            if known is not None and known.knows(reached):
                return before
            return replace(before, watermark=known.joined(reached) if known else reached)

        try:
            outcome = self._register.update(raised)
        except OpenDataBufferError as error:
            log.warning("the queue's marker %s was not written: %s", self._register.key, error)
            return
        if isinstance(outcome, Done):
            self._seen = reached if seen is None else seen.joined(reached)
        else:
            log.info("the queue's marker %s was not written: %s", self._register.key, outcome)


def claim_for_use(
    store: ClaimStore, config: QueueConfig, *, runtime: Runtime | None = None
) -> Claim:
    """What whoever writes to a queue does before its first write; free to repeat.

    Makes sure that the store honours conditional writes (failure F12), that the data prefix
    belongs to this queue (failure F7), and that the manifest is not behind what the marker has
    seen (failure F4); with ``config.recreate`` a queue whose manifest is gets a new identity
    instead, and starts over.

    Raises:
        UnsafeStore: The store ignores or does not know conditional writes.
        PrefixConflict: The prefix belongs to the queue of another manifest.
        InvalidInput: A new queue would lie inside another one's data prefix, or around it.
        QueueReset: The manifest is gone, or was restored from an old copy.
        CorruptData: The marker or the manifest cannot be read.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    runtime = runtime if runtime is not None else SystemRuntime()
    with deadline(runtime, config.cas_deadline_ms / 1000):
        return _claim_for_use(store, config, runtime)


def _claim_for_use(store: ClaimStore, config: QueueConfig, runtime: Runtime) -> Claim:
    verdict = StoreVerdict(store, config, runtime)
    verdict.check()
    claim = check_owner(store, config, runtime=runtime)
    if claim is None:
        refuse_nesting(store, config.data_path_prefix, MARKER_NAME)
        claim = claim_queue(store, config, runtime=runtime)
    verdict.keep()
    if claim.watermark is None:
        return claim
    manifest = _read_manifest(store, config, runtime)
    try:
        claim.check(manifest)
    except QueueReset as error:
        if not config.recreate:
            raise
        log.warning("the queue starts over, as asked: %s", error)
        return _start_over(store, config, runtime, claim.queue_id, manifest)
    return claim


def claim_queue(store: CasStore, config: QueueConfig, *, runtime: Runtime | None = None) -> Claim:
    """Make the data prefix belong to the queue of this manifest; free to repeat.

    Costs one read when it does already, one more write when it belongs to nobody yet.

    Raises:
        PrefixConflict: It belongs to the queue of another manifest; nothing was written.
        CorruptData: The marker cannot be read; nothing was written.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    runtime = runtime if runtime is not None else SystemRuntime()
    fresh = _new_marker(config, runtime)

    def claimed(before: Marker | None) -> Marker:
        # The first marker stays, with its id. So a lost answer needs no proof: whoever wrote
        # it, what counts is what the next read finds.
        if before is None:
            return fresh
        _check_manifest_path(before, config)
        return before

    return Claim(store, config, runtime, _write(store, config, runtime, claimed))


def check_owner(
    store: CasStore, config: QueueConfig, *, runtime: Runtime | None = None
) -> Claim | None:
    """The claim of whoever claimed the prefix for this queue; None when nobody did yet.

    Writes nothing.

    Raises:
        PrefixConflict: It belongs to the queue of another manifest.
        CorruptData: The marker cannot be read.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    runtime = runtime if runtime is not None else SystemRuntime()
    found = _register(store, config, runtime).read()
    if not isinstance(found, Done) or found.value is None:
        return None
    _check_manifest_path(found.value, config)
    return Claim(store, config, runtime, found.value)


def read_marker(store: CasStore, config: QueueConfig, runtime: Runtime) -> Marker | None:
    """The marker of a data prefix, whatever manifest it names; None when there is none.

    Raises:
        CorruptData: It cannot be read.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    found = _register(store, config, runtime).read()
    return found.value if isinstance(found, Done) else None


def _start_over(
    store: CasStore, config: QueueConfig, runtime: Runtime, old_id: str, manifest: Manifest | None
) -> Claim:
    """A new id, so that positions of the queue before are not taken for positions of this one."""
    fresh = _new_marker(config, runtime)
    if manifest is not None:
        fresh = replace(fresh, watermark=Watermark.of(manifest))

    def renewed(before: Marker | None) -> Marker:
        if before is None:
            return fresh
        # Of two that start over at once the first one's id stays.
        return replace(fresh, others=before.others) if before.queue_id == old_id else before

    return Claim(store, config, runtime, _write(store, config, runtime, renewed))


def _write(
    store: CasStore,
    config: QueueConfig,
    runtime: Runtime,
    decide: Callable[[Marker | None], Marker],
) -> Marker:
    outcome = _register(store, config, runtime).update(decide)
    if isinstance(outcome, Done) and outcome.value is not None:
        return outcome.value
    raise TransientStorageError(
        f"owner marker {marker_key(config.data_path_prefix)!r} in {store.url} could not be "
        f"written within {config.cas_deadline_ms / 1000:.0f} s: {outcome}. Try again."
    )


def _register(store: CasStore, config: QueueConfig, runtime: Runtime) -> Register[Marker]:
    prefix = config.data_path_prefix
    return Register(
        store,
        marker_key(prefix),
        decode=lambda data: Marker.from_json(data, prefix),
        encode=lambda marker: marker.to_json(prefix),
        runtime=runtime,
        settings=config,
        max_bytes=MARKER.max_bytes,
        unreadable=MARKER.unreadable,
    )


def _read_manifest(store: CasStore, config: QueueConfig, runtime: Runtime) -> Manifest | None:
    register = Register(
        store,
        config.manifest_path,
        decode=lambda data: named_manifest(data, store.url, config),
        encode=lambda manifest: manifest.raw,
        runtime=runtime,
        settings=config,
        max_bytes=MAX_MANIFEST_BYTES,
    )
    found = register.read()
    return found.value if isinstance(found, Done) else None


def _check_manifest_path(marker: Marker, config: QueueConfig) -> None:
    if marker.manifest_path != config.manifest_path:
        raise PrefixConflict(config.data_path_prefix, config.manifest_path, marker.manifest_path)


def _new_marker(config: QueueConfig, runtime: Runtime) -> Marker:
    return Marker(config.manifest_path, runtime.ulid())
