"""Which queue a data prefix belongs to, and how far that queue was: the marker below the prefix.

The garbage collector deletes what its manifest does not name. Two queues with one data prefix
would therefore delete each other's batches, even though both manifests are sound. The marker
``<prefix>/_owner.json`` names the one manifest the prefix belongs to; whoever comes with
another one is refused before it writes a batch or deletes one (failure F7)::

    {"version": 1, "manifest": "manifest", "id": "01J5...", "next_sequence": 42, "epoch": 3,
     "acked": 39, "acked_location": "ingest/01J6....batch"}

``manifest`` is relative to the marker, as a link would be: the same queue opened as
``s3://bucket`` or as ``s3://bucket/root`` is the same owner. ``id`` is a ULID, drawn once:
positions in a queue are bare sequences, and only the id tells one queue's from another's, or
from those of a queue that was deleted and made anew (failure F4).

The other four are the watermark, which the manifest has once reached. It lags,
because it is written seldom (:meth:`Claim.note`), and never runs ahead. A manifest that is gone
or behind it was lost or restored from an old copy: its unread batches are named by nothing any
more, and the collector would delete them. Markers without a watermark are read as well; readers
that do not know it ignore it. See the decision on the watermark.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CorruptData,
    CorruptManifest,
    ObjectNotFound,
    OpenDataBufferError,
    PermanentStorageError,
    PrefixConflict,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest
from opendata_buffer.queue.cas import CasStore, Done, Raced, Register
from opendata_buffer.queue.nesting import refuse_nesting
from opendata_buffer.queue.verdict import StoreVerdict
from opendata_buffer.queue.words import shell_words
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline
from opendata_buffer.stores import Blob, List

__all__ = [
    "MARKER_NAME",
    "Claim",
    "Marker",
    "Watermark",
    "check_owner",
    "claim_for_use",
    "claim_queue",
    "marker_key",
    "read_marker",
]

log = logging.getLogger(__name__)

MARKER_NAME = "_owner.json"
NOTE_INTERVAL_S = 60.0
"""Seconds between two notes of a watermark by one process, while it writes."""

_VERSION = 1
_FIELDS = frozenset(
    {"version", "manifest", "id", "next_sequence", "epoch", "acked", "acked_location"}
)
_MAX_BYTES = 64 * 1024
_NOTE_DEADLINE_MS = 5_000


class ClaimStore(CasStore, List, Protocol):
    """What claiming a queue needs of a store."""


def marker_key(data_path_prefix: str) -> str:
    """The key of the marker of a data prefix."""
    return f"{data_path_prefix}/{MARKER_NAME}"


@dataclass(frozen=True, slots=True)
class Watermark:
    """What a manifest has reached; later ones are never below it.

    Attributes:
        next_sequence: What the next appended batch got.
        epoch: Of the last consumer.
        acked: The highest sequence that a consumer took out of the manifest; None when none.
        acked_location: Where that batch was; empty when that is not known.
    """

    next_sequence: int
    epoch: int
    acked: int | None = None
    acked_location: str = ""

    @classmethod
    def of(cls, manifest: Manifest, acked_location: str = "") -> Watermark:
        """The watermark of a manifest."""
        acked = manifest.first_sequence - 1 if manifest.first_sequence else None
        return cls(manifest.next_sequence, manifest.epoch, acked, acked_location)

    def covers(self, other: Watermark) -> bool:
        """Whether it is not below the other in anything."""
        return all(mine >= its for mine, its in zip(self._levels, other._levels, strict=True))

    def knows(self, other: Watermark) -> bool:
        """Whether it covers the other, and where the last batch was if the other knows that.

        Whoever only reads the manifest, a collector or a producer, knows how far it is and not
        where that batch was: its note must not keep the consumer from adding that.
        """
        if self.acked == other.acked and other.acked_location and not self.acked_location:
            return False
        return self.covers(other)

    def joined(self, other: Watermark) -> Watermark:
        """The lowest one that covers both."""
        further = max(self, other, key=lambda each: (each._levels[2], each.acked_location))
        return Watermark(
            max(self.next_sequence, other.next_sequence),
            max(self.epoch, other.epoch),
            further.acked,
            further.acked_location,
        )

    @property
    def _levels(self) -> tuple[int, int, int]:
        return self.next_sequence, self.epoch, -1 if self.acked is None else self.acked


@dataclass(frozen=True, slots=True)
class Marker:
    """The marker of one data prefix.

    Attributes:
        manifest_path: Key of the manifest that the prefix belongs to.
        queue_id: The queue's id; empty for a marker that has none.
        watermark: None when none was noted yet.
        others: Fields of later versions, kept when the marker is written again.
    """

    manifest_path: str
    queue_id: str
    watermark: Watermark | None
    others: Mapping[str, Any]


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
        seen = self._seen
        if seen is None:
            return
        if (
            manifest is not None
            and manifest.next_sequence >= seen.next_sequence
            and manifest.epoch >= seen.epoch
        ):
            return
        path, url = self._config.manifest_path, self._store.url
        if manifest is None:
            what = (
                f"manifest {path!r} is gone from {url}: it had reached next sequence "
                f"{seen.next_sequence} and epoch {seen.epoch}"
            )
        else:
            what = (
                f"manifest {path!r} in {url} went backwards: next sequence {seen.next_sequence} "
                f"-> {manifest.next_sequence}, epoch {seen.epoch} -> {manifest.epoch}. It was "
                "deleted and recreated, or restored from an old copy"
            )
        raise QueueReset(
            f"{what}. Batches that wait to be read may be named by nothing now. Stop producers, "
            "consumers and collectors. Then 'opendata-buffer manifest rebuild "
            f"{shell_words(url, self._config)}' enqueues them again. To start over "
            "without them, use --recreate (in Python recreate=True)."
        )

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
    manifest = _read_manifest(store, config)
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
        # Of two that start over at once the first one's id stays.
        return fresh if before is None or before.queue_id == old_id else before

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
    why = "other writers were faster" if isinstance(outcome, Raced) else str(outcome)
    raise TransientStorageError(
        f"owner marker {marker_key(config.data_path_prefix)!r} in {store.url} could not be "
        f"written within {config.cas_deadline_ms / 1000:.0f} s: {why}. Try again."
    )


def _register(store: CasStore, config: QueueConfig, runtime: Runtime) -> Register[Marker]:
    prefix = config.data_path_prefix
    return Register(
        store,
        marker_key(prefix),
        decode=lambda data: _decode(prefix, data),
        encode=lambda marker: _encode(prefix, marker),
        runtime=runtime,
        settings=config,
        max_bytes=_MAX_BYTES,
    )


def _read_manifest(store: CasStore, config: QueueConfig) -> Manifest | None:
    key = config.manifest_path
    try:
        got = store.get(key, max_bytes=MAX_MANIFEST_BYTES)
    except ObjectNotFound:
        return None
    if not isinstance(got, Blob):
        raise PermanentStorageError(
            f"store {store.url} answered 'not modified' to a plain read of {key!r}"
        )
    try:
        return Manifest.parse(got.data)
    except CorruptManifest as error:
        raise CorruptManifest(f"{key!r} in {store.url}: {error}") from error


def _check_manifest_path(marker: Marker, config: QueueConfig) -> None:
    if marker.manifest_path != config.manifest_path:
        raise PrefixConflict(config.data_path_prefix, config.manifest_path, marker.manifest_path)


def _new_marker(config: QueueConfig, runtime: Runtime) -> Marker:
    return Marker(config.manifest_path, runtime.ulid(), None, {})


def _encode(data_path_prefix: str, marker: Marker) -> bytes:
    fields: dict[str, Any] = {
        "version": _VERSION,
        "manifest": posixpath.relpath("/" + marker.manifest_path, "/" + data_path_prefix),
        "id": marker.queue_id,
    }
    if marker.watermark is not None:
        fields["next_sequence"] = marker.watermark.next_sequence
        fields["epoch"] = marker.watermark.epoch
        if marker.watermark.acked is not None:
            fields["acked"] = marker.watermark.acked
            fields["acked_location"] = marker.watermark.acked_location
    return json.dumps({**marker.others, **fields}, ensure_ascii=False).encode() + b"\n"


def _decode(data_path_prefix: str, data: bytes) -> Marker:
    try:
        fields = json.loads(data.decode())
    except (ValueError, RecursionError):
        fields = None
    match fields:
        case {"version": 1, "manifest": str(relative)} if relative:
            # No leading slash: '..' beyond the store's root stays visible and never matches.
            owner = posixpath.normpath(posixpath.join(data_path_prefix, relative))
            others = {name: value for name, value in fields.items() if name not in _FIELDS}
            return Marker(owner, str(fields.get("id", "")), _watermark(fields), others)
    raise CorruptData(
        f"owner marker holds {data[:100]!r} and not "
        f'{{"version": {_VERSION}, "manifest": "..."}}: a later version of this library or '
        "somebody else wrote it. If one queue alone uses this data prefix, delete the object."
    )


def _watermark(fields: Mapping[str, Any]) -> Watermark | None:
    match fields:
        case {"next_sequence": int(next_sequence), "epoch": int(epoch)}:
            acked = fields.get("acked")
            location = fields.get("acked_location", "")
            if isinstance(acked, int) and isinstance(location, str):
                return Watermark(next_sequence, epoch, acked, location)
            return Watermark(next_sequence, epoch)
    return None
