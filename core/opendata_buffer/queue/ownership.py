"""Claiming a data prefix for one queue, and what its marker remembers of the manifest.

The garbage collector deletes what its manifest does not name. Two queues with one data prefix
would therefore delete each other's batches, even though both manifests are sound. The prefix's
marker (:mod:`.ownership`) names the one manifest it belongs to; whoever comes with another one is
refused before it writes a batch or deletes one (failure F7).

The marker also remembers a watermark of the manifest. That lags, because it is written seldom
(:meth:`Claim.note`), and never runs ahead. A manifest that is gone or behind it was lost or
restored from an old copy: its unread batches are named by nothing any more, and the collector
would delete them (failure F4).
"""

from __future__ import annotations

import json
import logging
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    ObjectNotFound,
    OpenDataBufferError,
    PermanentStorageError,
    PrefixConflict,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest
from opendata_buffer.formats.sidecar import Fields, Sidecar
from opendata_buffer.queue.cas import CasObject, CasStore, Done
from opendata_buffer.queue.rollback_checks import Watermark, check_reached, named_manifest
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline
from opendata_buffer.stores.base import Blob, Get, List

__all__ = [
    "Claim",
    "MARKER",
    "MARKER_NAME",
    "Marker",
    "PARTITION_NAME",
    "TOPIC_KEY",
    "check_owner",
    "claim_for_use",
    "claim_queue",
    "lost_topic",
    "marker_key",
    "read_marker",
    "refuse_nesting",
]


log = logging.getLogger(__name__)


# ---- Queues inside each other's data prefix: refused where that can be seen (failure F7). ----
#
# The collector of a v1 client deletes everything under its prefix that its manifest does not name:
# a whole queue, if one lies there. Each queue's marker shows where a queue is, so who makes a new
# one looks for markers above it, and among the first objects below it.
#
# A topic's root shows by the topic's description. Below it lie its partitions and nothing else: a
# queue beside them is one that its readers do not see, most likely made by a producer that took
# the topic for a queue.


TOPIC_KEY = "_topic.json"
"""The description of a topic, below its root."""

PARTITION_NAME = re.compile(r"p-(?P<number>[0-9]{5})(?:-(?P<letters>[0-9a-z]{4}))?")
"""Names of partitions, which are their data prefixes below the topic's root. Topics that were made
before names had letters behind the number go on without."""

LOOKED_AT = 1_000
"""Objects below the new prefix that are looked at: one page of a listing."""

_MAX_MARKER_BYTES = 1024 * 1024


class ReadList(Get, List, Protocol):
    """What looking around needs of a store."""


def refuse_nesting(store: ReadList, data_path_prefix: str, marker_name: str) -> None:
    """Check a data prefix that is about to get its first queue.

    Raises:
        InvalidInput: It lies inside another queue's data prefix, or one lies inside it; or it
            lies at, in or around a topic, or beside what is left of one, and is no partition's.
        StorageError: The store did not answer.
    """
    parts = data_path_prefix.split("/")
    for length in range(len(parts) + 1):
        root, inner = "/".join(parts[:length]), "/".join(parts[length:])
        if _is_no_partition(store, root, inner):
            raise _in_topic(data_path_prefix, root)
    if PARTITION_NAME.fullmatch(parts[-1]) is None:
        for length in range(len(parts)):
            if lost := lost_topic(store, "/".join(parts[:length])):
                raise InvalidInput(lost)
    for length in range(1, len(parts)):
        outer = "/".join(parts[:length])
        if exists(store, f"{outer}/{marker_name}"):
            raise _nested(data_path_prefix, outer, f"inside the data prefix {outer!r} of another")
    below = store.list(f"{data_path_prefix}/", limit=LOOKED_AT)
    for found in below.objects:
        folder, _, name = found.key.rpartition("/")
        if name == marker_name and folder != data_path_prefix:
            raise _nested(data_path_prefix, folder, f"around the data prefix {folder!r} of another")
        if name == TOPIC_KEY:
            raise InvalidInput(
                f"data prefix {data_path_prefix!r} lies around the topic at {folder!r}: a garbage "
                f"collector may delete the topic's batches. Use a prefix beside {folder!r}."
            )


def lost_topic(store: ReadList, root: str = "") -> str | None:
    """What to tell who finds no topic at a root where the partitions of one lie; None otherwise.

    A queue made beside them would be read by nobody, once the description is back.

    Args:
        store: Where to look.
        root: A folder without a slash at its end; empty for the store's.
    """
    try:
        below = store.list(f"{root}/p-0".lstrip("/"), limit=1)
    except PermanentStorageError:
        return None  # who may not look outside of the prefix may still have a queue there
    for found in below.objects:
        name = found.key.removeprefix(f"{root}/").split("/")[0]
        if not _has_letters(name) or exists(store, f"{root}/{TOPIC_KEY}".lstrip("/")):
            break
        where = f"{root!r} in this store" if root else "the root of this store"
        return (
            f"there is partition {name!r} of a topic at {where}, and the topic's description "
            f"{TOPIC_KEY!r} is gone: who reads the topic would not see a queue beside it. Put its "
            "latest version back (bucket versioning). If the topic was given up, delete what is "
            "left of it, or use another store."
        )
    return None


def _is_no_partition(store: Get, root: str, inner: str) -> bool:
    """Whether a topic is at this root, and has no partition of this name."""
    try:
        found = store.get(f"{root}/{TOPIC_KEY}".lstrip("/"), max_bytes=_MAX_MARKER_BYTES)
    except ObjectNotFound:
        return False
    except PermanentStorageError:
        return False  # who may not look outside of the prefix may still have a queue there
    meant = PARTITION_NAME.fullmatch(inner)
    if meant is None or meant["letters"]:
        # A name with its letters nobody makes up. If it is not listed any more, what its writer
        # does next is refused by its manifest, which was closed.
        return meant is None
    names = _listed(found.data) if isinstance(found, Blob) else []
    return inner not in names and any(_has_letters(name) for name in names)


def _has_letters(name: str) -> bool:
    found = PARTITION_NAME.fullmatch(name)
    return found is not None and found["letters"] is not None


def _listed(description: bytes) -> list[str]:
    """The names in a topic's description; none if they cannot be read: others say so."""
    try:
        return [str(each["name"]) for each in json.loads(description)["partitions"]]
    except (ValueError, RecursionError, TypeError, KeyError):
        return []


def exists(store: Get, key: str) -> bool:
    """Whether a small object, such as a marker, is there; one read.

    Raises:
        StorageError: The store did not answer.
    """
    try:
        store.get(key, max_bytes=_MAX_MARKER_BYTES)
    except ObjectNotFound:
        return False
    except CorruptData:
        return True  # It is too large to be one; who reads it says so.
    return True


def _in_topic(data_path_prefix: str, root: str) -> InvalidInput:
    where = f"{root!r} in this store" if root else "the root of this store"
    return InvalidInput(
        f"there is a topic at {where}, and {data_path_prefix!r} is none of its partitions: readers "
        "of the topic would not see this queue. Use a TopicProducer or TopicConsumer, one "
        "partition (--partition 0, in Python Topic.config_of), or another store for a queue."
    )


def _nested(data_path_prefix: str, other: str, where: str) -> InvalidInput:
    return InvalidInput(
        f"data prefix {data_path_prefix!r} lies {where} queue: a garbage collector of the outer "
        f"one may delete the inner one's batches. Use a prefix beside {other!r}."
    )


# ---- The marker below a data prefix ----
#
# Which queue the prefix belongs to, and how far that was. Pure.
#
# ``<prefix>/_owner.json`` holds::
#
#     {"version": 1, "manifest": "manifest", "id": "01J5...", "next_sequence": 42, "epoch": 3,
#      "acked": 39, "acked_location": "ingest/01J6....batch"}
#
# ``manifest`` is relative to the marker, as a link would be: the same queue opened as
# ``s3://bucket`` or as ``s3://bucket/root`` is the same owner. ``id`` is a ULID, drawn once:
# positions in a queue are bare sequences, and only the id tells one queue's from another's, or
# from those of a queue that was deleted and made anew (failure F4).
#
# The other four are the watermark, which the manifest has once reached. Markers without one are
# read as well; readers that do not know it ignore it. See the decision on the watermark.


MARKER_NAME = "_owner.json"

MARKER = Sidecar("the owner marker", "If one queue alone uses this data prefix, delete the object.")


def marker_key(data_path_prefix: str) -> str:
    """The key of the marker of a data prefix."""
    return f"{data_path_prefix}/{MARKER_NAME}"


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
    watermark: Watermark | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, data_path_prefix: str) -> bytes:
        """The object's bytes, for a marker of this prefix."""
        own: dict[str, Any] = {
            "manifest": posixpath.relpath("/" + self.manifest_path, "/" + data_path_prefix),
            "id": self.queue_id,
        }
        if self.watermark is not None:
            own["next_sequence"] = self.watermark.next_sequence
            own["epoch"] = self.watermark.epoch
            if self.watermark.acked is not None:
                own["acked"] = self.watermark.acked
                own["acked_location"] = self.watermark.acked_location
        return MARKER.encode(own, self.others)

    @classmethod
    def from_json(cls, data: bytes, data_path_prefix: str) -> Marker:
        """Read the bytes of the marker of this prefix.

        Raises:
            CorruptData: They are no marker of this version.
        """
        fields = MARKER.decode(data)
        relative = fields.text("manifest")
        if not relative:
            raise fields.wrong("manifest", "the path of a manifest")
        # No leading slash: '..' beyond the store's root stays visible and never matches.
        manifest_path = posixpath.normpath(posixpath.join(data_path_prefix, relative))
        queue_id, watermark = fields.text("id", ""), _watermark(fields)
        return cls(manifest_path, queue_id, watermark, fields.others())


def _watermark(fields: Fields) -> Watermark | None:
    next_sequence, epoch = fields.number("next_sequence", None), fields.number("epoch", None)
    acked, acked_location = fields.number("acked", None), fields.text("acked_location", "")
    if next_sequence is None or epoch is None:
        return None
    return Watermark(next_sequence, epoch, acked, "" if acked is None else acked_location)


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
    store.check_conditional_writes(config.manifest_path)
    claim = check_owner(store, config, runtime=runtime)
    if claim is None:
        refuse_nesting(store, config.data_path_prefix, MARKER_NAME)
        claim = claim_queue(store, config, runtime=runtime)
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


def _register(store: CasStore, config: QueueConfig, runtime: Runtime) -> CasObject[Marker]:
    prefix = config.data_path_prefix
    return CasObject(
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
    register = CasObject(
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
