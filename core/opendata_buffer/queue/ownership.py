"""Which queue a data prefix belongs to, and how far that queue's manifest was.

A manifest only goes forward. One that is gone or behind was deleted, created again or restored from
an old copy, and every process refuses it (failure F4). The owner marker ``<prefix>/_owner.json``
names the one manifest that the prefix belongs to; a writer or collector of another one, which would
delete this one's batches, is refused (failure F7)::

    {"version": 1, "manifest": "manifest", "id": "01J5...", "next_sequence": 42, "epoch": 3,
     "acked": 39, "acked_location": "ingest/01J6....batch", "grace_period_ms": 600000,
     "index_changes": 7}

* ``manifest`` is relative to the marker, as a link would be: the same queue opened as
  ``s3://bucket`` or as ``s3://bucket/root`` has the same owner.
* ``id`` is a ULID, drawn once. It tells a position in this queue from one in another queue, or in
  one that was deleted and created again (failure F4).
* ``next_sequence`` to ``acked_location`` are a watermark, which the manifest has once reached. It
  lags, because it is written seldom (:meth:`QueueClaim.note`), and never runs ahead. It may be
  missing.
* ``grace_period_ms`` is the collector's, by which all programs of the queue go (failure F5,
  decision 0037). Release 0.1 wrote none: there the first program that has one of its own does.
* ``index_changes`` is a watermark of a log's index, which counts its own changes. An index that
  counts fewer was restored from an old copy, and is refused (failure F46).
"""

from __future__ import annotations

import json
import logging
import posixpath
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from opendata_buffer import errors, outcomes
from opendata_buffer.config import (
    DEFAULT_DATA_PATH_PREFIX,
    DEFAULT_GRACE_PERIOD_MS,
    PARTITION_NAME,
    QueueConfig,
)
from opendata_buffer.formats.batch import is_confined, parse_location, prefix_of
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest, with_queue_in_hint
from opendata_buffer.queue import unaccounted
from opendata_buffer.queue.cas import CasObject, CasStore
from opendata_buffer.queue.sidecar import Sidecar
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline
from opendata_buffer.stores.base import Get, Store, read_bytes

log = logging.getLogger(__name__)

OWNER_NAME = "_owner.json"

_OWNER = Sidecar("the owner marker", "If one queue alone uses this data prefix, delete the object.")

TOPIC_KEY = "_topic.json"
"""The description of a topic, below its root."""

IS_LOG = "log"
"""The field of the marker that says that the queue is a log; it never changes back."""

LISTED_BELOW = 1_000
"""Objects below a new prefix that are searched for markers: one page of a listing."""

NOTE_INTERVAL_S = 60.0
"""Seconds between two notes of a watermark by one process, while it writes."""

_NOTE_DEADLINE_MS = 5_000


def owner_key(data_path_prefix: str) -> str:
    """The key of the owner marker of a data prefix."""
    return f"{data_path_prefix}/{OWNER_NAME}"


@dataclass(frozen=True, slots=True)
class Watermark:
    """What a manifest has reached; later ones are never below it.

    ``acked`` is the highest sequence that a consumer took out of the manifest, ``acked_location``
    where that batch was; empty when that is not known.
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

    def allows(self, manifest: Manifest | None) -> bool:
        """Whether this manifest can follow: it is there, and is not behind (failure F4)."""
        return (
            manifest is not None
            and manifest.next_sequence >= self.next_sequence
            and manifest.epoch >= self.epoch
        )

    def covers(self, other: Watermark) -> bool:
        """Whether it is in nothing below the other."""
        return all(mine >= its for mine, its in zip(self._levels, other._levels, strict=True))

    def includes(self, other: Watermark) -> bool:
        """Whether it covers the other, and has the location of the last batch if the other has: the
        note of a process that does not know it must not keep the consumer from adding it."""
        lacks_location = other.acked_location and not self.acked_location
        return self.covers(other) and not (self.acked == other.acked and lacks_location)

    def joined(self, other: Watermark) -> Watermark:
        """The lowest one that includes both."""
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
class PrefixOwner:
    """The owner marker of one data prefix.

    ``queue_id`` is empty for a marker that has none, ``watermark`` None before the first note,
    ``grace_ms`` None for a marker of release 0.1, ``index_changes`` None before a log's index was
    noted. ``others`` are fields of later versions.
    """

    manifest_path: str
    queue_id: str
    watermark: Watermark | None = None
    grace_ms: int | None = None
    index_changes: int | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, data_path_prefix: str) -> bytes:
        """The object's bytes, for a marker of this prefix."""
        path = posixpath.relpath("/" + self.manifest_path, "/" + data_path_prefix)
        own: dict[str, Any] = {"manifest": path, "id": self.queue_id}
        if self.watermark is not None:
            own |= asdict(self.watermark)
            if self.watermark.acked is None:
                del own["acked"], own["acked_location"]
        if self.grace_ms is not None:
            own["grace_period_ms"] = self.grace_ms
        if self.index_changes is not None:
            own["index_changes"] = self.index_changes
        return _OWNER.encode(own, self.others)

    @classmethod
    def from_json(cls, data: bytes, data_path_prefix: str) -> PrefixOwner:
        """Read the bytes of the marker of this prefix; ``CorruptData`` where they are none."""
        fields = _OWNER.decode(data)
        relative = fields.text("manifest")
        if not relative:
            raise fields.wrong("manifest", "the path of a manifest")
        # No leading slash: '..' beyond the store's root stays visible and never matches.
        manifest_path = posixpath.normpath(posixpath.join(data_path_prefix, relative))
        next_sequence, epoch = fields.number("next_sequence", None), fields.number("epoch", None)
        acked, acked_location = fields.number("acked", None), fields.text("acked_location", "")
        watermark = None
        if next_sequence is not None and epoch is not None:
            location = "" if acked is None else acked_location
            watermark = Watermark(next_sequence, epoch, acked, location)
        grace_ms = fields.number("grace_period_ms", None, least=1)
        changes = fields.number("index_changes", None)
        queue_id = fields.text("id", "")
        return cls(manifest_path, queue_id, watermark, grace_ms, changes, fields.others())


class QueueClaim:
    """A data prefix that was claimed for a queue, and what its marker remembers of the manifest.
    Not thread-safe: it belongs to the queue object that notes in it."""

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        runtime: Runtime,
        owner: PrefixOwner,
        grace_ms: int | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime
        # A note is worth only a short wait: the next one contains what this one does.
        quick = config.with_timeout(min(_NOTE_DEADLINE_MS, config.timeout_ms))
        self._object = owner_object(store, quick, runtime)
        self.watermark = owner.watermark
        """As last read or noted."""
        self._tried, self._tried_at = self.watermark, runtime.monotonic()
        self.queue_id = owner.queue_id
        self.grace_ms = owner.grace_ms or grace_ms or DEFAULT_GRACE_PERIOD_MS
        """The grace period to go by."""
        self.is_log = owner.others.get(IS_LOG) is True
        """Whether the queue has named readers (:mod:`opendata_buffer.queue.reader_queue`)."""

    def check(self, manifest: Manifest | None) -> None:
        """Raise ``QueueReset`` for a manifest that is gone or behind the watermark (failure F4)."""
        if self.watermark is not None:
            check_reached(self.watermark, manifest, self._config, self._store.url)

    def start_over(self, manifest: Manifest | None) -> QueueClaim:
        """A claim with a new id: positions of the queue before are no positions of this one."""
        watermark = None if manifest is None else Watermark.of(manifest)
        ulid = self._runtime.ulid()

        def renewed(before: PrefixOwner | None) -> PrefixOwner:
            known = before or PrefixOwner(self._config.manifest_path, self.queue_id)
            # Of two that start over at once the first one's id stays.
            if known.queue_id != self.queue_id:
                return known
            grace_ms = known.grace_ms or self.grace_ms
            return replace(
                known,
                queue_id=ulid,
                watermark=watermark,
                grace_ms=grace_ms,
                index_changes=None,
            )

        owner = owner_object(self._store, self._config, self._runtime).change(renewed)
        return QueueClaim(self._store, self._config, self._runtime, owner)

    def note(self, manifest: Manifest, *, now: bool = False, acked_location: str = "") -> None:
        """Raise the marker's watermark to a manifest that was read or written just now.

        Writes when the manifest is seen for the first time, when its epoch has risen, after
        ``NOTE_INTERVAL_S``, or ``now``. Raises nothing: a marker that lags is still right.
        ``acked_location`` is where the batch was that left the manifest last, if that is known.
        """
        reached = Watermark.of(manifest, acked_location)
        seen, tried = self.watermark, self._tried
        waited_s = self._runtime.monotonic() - self._tried_at
        due = now or tried is None or reached.epoch > tried.epoch or waited_s >= NOTE_INTERVAL_S
        if not due or (seen is not None and seen.includes(reached)):
            return

        # Also when it fails: a marker that cannot be written must not slow every append down.
        self._tried, self._tried_at = reached, self._runtime.monotonic()

        def raised(before: PrefixOwner | None) -> PrefixOwner | None:
            # A marker that was deleted, or names a queue that was started over, is not ours.
            if before is None or before.queue_id != self.queue_id:
                return before
            known = before.watermark
            if known is not None and known.includes(reached):
                return before
            return replace(before, watermark=known.joined(reached) if known else reached)

        try:
            outcome = self._object.update(raised)
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
    """Claim a queue before the first write to it; may be repeated.

    ``grace_ms`` is the grace period of a queue that has none yet. Where there is neither manifest
    nor marker it raises what ``missing`` returns; None creates the queue. ``uploaded`` are batches
    that the caller has put there itself.

    Raises ``UnsafeStore`` where the store does not honour conditional writes (failure F12),
    ``PrefixConflict`` where the data prefix belongs to another queue, ``InvalidInput`` where a new
    queue would lie inside or around another's prefix (failure F7) or over batches that it does not
    know (failure F51), ``QueueReset`` where the manifest is behind what the marker has seen
    (failure F4), unless it is to ``recreate`` that.
    """
    runtime = runtime if runtime is not None else SystemRuntime()
    with deadline(runtime, config.timeout_ms / 1000):
        claim, found = check_owner(store, config, runtime=runtime, grace_ms=grace_ms), None
        if claim is None:
            found = read_manifest(store, config, runtime)
            if found is None and missing is not None:
                raise missing()
        store.check_conditional_writes(config.manifest_path)
        if claim is None:
            check_manifest_path(store, config)
            _check_prefix_is_free(store, config)
            if fault := misplaced(found, config, store.url):
                raise errors.InvalidInput(fault)
            hint = queue_hint(store.url, config)
            error = unaccounted.refusal(store, config, found, hint, uploaded)
            # Read again: a process may have claimed the prefix, or written its first manifest,
            # and uploaded the batches between the first read and the listing.
            if error and not _is_claimed_by_now(store, config, found, runtime):
                raise error
        if claim is None or claim.grace_ms == grace_ms:  # perhaps not written yet
            claim = claim_queue(store, config, runtime=runtime, grace_ms=grace_ms)
        if grace_ms not in (None, claim.grace_ms):
            _warn_of_grace(queue_hint(store.url, config), grace_ms, claim.grace_ms)
        if claim.watermark is None:
            return claim
        manifest = read_manifest(store, config, runtime)
        try:
            claim.check(manifest)
            if manifest is not None:
                # Bytes behind the last entry, too: readers refuse them, and what is appended would
                # be reported as durable and never be read.
                manifest.check()
        except errors.QueueReset as error:
            if not recreate:
                raise
            log.warning("the queue starts over, as asked: %s", error)
            return claim.start_over(manifest)
        return claim


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
) -> QueueClaim:
    """Make the data prefix belong to the queue of this manifest; may be repeated.

    Writes when it has no owner yet, or no grace period and one is given; ``PrefixConflict`` when it
    belongs to another manifest's queue.
    """
    runtime = runtime if runtime is not None else SystemRuntime()
    new_ms = grace_ms or DEFAULT_GRACE_PERIOD_MS
    fresh = PrefixOwner(config.manifest_path, runtime.ulid(), grace_ms=new_ms)

    def claimed(before: PrefixOwner | None) -> PrefixOwner:
        # The first marker stays, with its id. So a lost answer needs no proof: whichever process
        # wrote the marker, what counts is what the next read finds.
        if before is None:
            return fresh
        _check_manifest_path(before, config, store.url)
        return before if before.grace_ms is not None else replace(before, grace_ms=grace_ms)

    owner = owner_object(store, config, runtime).change(claimed)
    return QueueClaim(store, config, runtime, owner, grace_ms)


def change_grace_period(
    store: CasStore, config: QueueConfig, runtime: Runtime, grace_ms: int
) -> None:
    """Give the queue another grace period, in milliseconds.

    Collectors that run follow at once, everything else when it starts. So a longer one may be
    given at any time, and a shorter one while no producer runs (failure F5).
    """
    claim_queue(store, config, runtime=runtime)
    marker = owner_object(store, config, runtime)
    marker.change(lambda before: before and replace(before, grace_ms=grace_ms))


@lru_cache(maxsize=10_000)  # A process says it once of each queue, however often it opens that.
def _warn_of_grace(queue: str, own_ms: int, grace_ms: int) -> None:
    log.warning(
        "the queue %s has a grace period of %d ms, and this program was given %d ms: it uses the "
        "queue's. 'opendata-buffer gc %s --grace-period-ms %d' changes that for all programs",
        *(queue, grace_ms, own_ms, queue, own_ms),
    )


def check_owner(
    store: CasStore,
    config: QueueConfig,
    *,
    runtime: Runtime | None = None,
    grace_ms: int | None = None,
) -> QueueClaim | None:
    """As :func:`claim_queue`, but writes nothing: None when the prefix has no owner yet."""
    runtime = runtime if runtime is not None else SystemRuntime()
    owner = owner_object(store, config, runtime).read()
    if not isinstance(owner, PrefixOwner):
        return None
    _check_manifest_path(owner, config, store.url)
    return QueueClaim(store, config, runtime, owner, grace_ms)


def owner_object(store: CasStore, config: QueueConfig, runtime: Runtime) -> CasObject[PrefixOwner]:
    """The owner marker of the data prefix."""
    prefix = config.data_path_prefix
    return CasObject(
        store,
        owner_key(prefix),
        decode=lambda data: PrefixOwner.from_json(data, prefix),
        encode=lambda owner: owner.to_json(prefix),
        runtime=runtime,
        settings=config,
        sidecar=_OWNER,
    )


class IndexMark:
    """How far the index of a log got, as the owner marker of its queue remembers it.

    The index counts its own changes. After each change the number is noted here, so the marker may
    lag behind the index, and never runs ahead of it.
    """

    def __init__(self, store: CasStore, config: QueueConfig, runtime: Runtime) -> None:
        self._object = owner_object(store, config, runtime)
        # A note is worth only a short wait: the next one contains what this one does.
        quick = config.with_timeout(min(_NOTE_DEADLINE_MS, config.timeout_ms))
        self._quick = owner_object(store, quick, runtime)

    def read(self) -> PrefixOwner | None:
        """Return the marker, to be compared with an index that is read after it; None where it
        says nothing. One conditional GET."""
        try:
            found = self._object.read()
        except errors.CorruptData:
            return None  # Whoever claims the queue raises the error about its marker.
        return found if isinstance(found, PrefixOwner) else None

    def note(self, queue_id: str, changes: int) -> None:
        """Raise the number in the marker of this queue. Raises nothing: an older one is right."""

        def raised(before: PrefixOwner | None) -> PrefixOwner | None:
            if before is None or before.queue_id != queue_id:
                return before
            if (before.index_changes or 0) >= changes:
                return before
            return replace(before, index_changes=changes)

        try:
            outcome: object = self._quick.update(raised)
        except errors.OpenDataBufferError as error:
            outcome = error
        if not isinstance(outcome, outcomes.Applied):
            log.warning("the owner marker %s was not written: %s", self._quick.key, outcome)


def manifest_object(
    store: CasStore,
    config: QueueConfig,
    runtime: Runtime,
    *,
    check_read: Callable[[Manifest, Manifest], None] | None = None,
    after_conflict: Callable[[], float | None] | None = None,
) -> CasObject[Manifest]:
    """The manifest of a queue; see :class:`.CasObject`."""
    place, hint = f"{config.manifest_path!r} in {store.url}", queue_hint(store.url, config)
    return CasObject(
        store,
        config.manifest_path,
        decode=lambda data: parse_manifest(data, place, hint),
        encode=lambda manifest: manifest.raw,
        runtime=runtime,
        settings=config,
        max_bytes=MAX_MANIFEST_BYTES,
        check_read=check_read,
        after_conflict=after_conflict,
    )


def read_manifest(store: CasStore, config: QueueConfig, runtime: Runtime) -> Manifest | None:
    """The queue's manifest as it is now; None where there is none."""
    found = manifest_object(store, config, runtime).read()
    return found if isinstance(found, Manifest) else None


def _check_manifest_path(owner: PrefixOwner, config: QueueConfig, url: str) -> None:
    if owner.manifest_path != config.manifest_path:
        prefix, fix = config.data_path_prefix, _if_wrong(config, url)
        raise errors.PrefixConflict(prefix, config.manifest_path, owner.manifest_path, fix)


def _if_wrong(config: QueueConfig, url: str) -> str:
    hint = queue_hint(url, config)
    return (
        " If nothing but a wrong option made its owner marker, 'opendata-buffer fsck "
        f"{hint} --repair' gives the prefix to this queue."
    )


def misplaced(
    manifest: Manifest | None, config: QueueConfig, url: str, acked_location: str = ""
) -> str | None:
    """The text of an error where all of a queue's batches lie in a data prefix inside this one;
    None for the right prefix. ``acked_location`` counts where no batch is queued."""
    prefix = config.data_path_prefix
    queue = manifest or Manifest.empty()
    first = [entry.location for entry in queue.entries(limit=1)] or [acked_location]
    right = prefix_of(first[0])
    if right is None or not is_confined(right, prefix):
        return None  # Decided by the first batch of nearly every queue: there may be a million.
    if any(parse_location(each, prefix) for each in queue.locations()):
        return None
    words = queue_hint(url, replace(config, data_path_prefix=right))
    use = f"data_path_prefix={right!r}"
    if config.manifest_path != f"{right}/manifest":
        use += f" and manifest_path={config.manifest_path!r}"
    return (
        f"no batch of the queue with manifest {config.manifest_path!r} lies in the data prefix "
        f"{prefix!r}: what was read would never be collected. Its batches lie in {right!r}: use "
        f"{use}. If {owner_key(prefix)!r} is there, 'opendata-buffer fsck "
        f"{words} --repair' puts it where it belongs."
    )


def check_manifest_path(store: Store, config: QueueConfig) -> None:
    """Refuse a manifest of its own for a queue in a store that holds a topic.

    Costs a small read where the manifest is not at its default place, and nothing otherwise.

    Raises:
        InvalidInput: There is a topic, whose partitions all have their manifests at the default.
    """
    if config.manifest_path == f"{config.data_path_prefix}/manifest":
        return
    try:
        is_topic = exists(store, TOPIC_KEY)
    except errors.PermanentStorageError:
        return  # A process that may not read outside of the prefix may still have a queue.
    if is_topic:
        raise errors.InvalidInput(
            f"there is a topic at {store.url}, and each of its partitions has its manifest at "
            f"'<partition>/manifest'. Leave out manifest_path={config.manifest_path!r}. To use one "
            "partition alone, name it with data_path_prefix."
        )


def _check_prefix_is_free(store: Store, config: QueueConfig) -> None:
    """Refuse a data prefix for a new queue inside or around another's, whose collector deletes what
    its manifest does not name (failure F7); or at, in or around a topic, whose readers would not
    see it, also where only partitions of the topic are left.
    """
    data_path_prefix = config.data_path_prefix
    parts = data_path_prefix.split("/")
    outer = ["/".join(parts[:length]) for length in range(len(parts))]
    for root in (*outer, data_path_prefix):
        inner = data_path_prefix[len(root) :].lstrip("/")
        if _is_beside_partitions(store, root, inner):
            raise errors.InvalidInput(
                f"there is a topic at {_root_text(root)}, and {data_path_prefix!r} is none of its "
                "partitions: readers of the topic would not see this queue. Use a TopicProducer "
                "or TopicConsumer, one partition (--partition 0, in Python Topic.config_of), or "
                "another store for a queue."
            )
    if PARTITION_NAME.fullmatch(parts[-1]) is None:
        for root in outer:
            if hint := missing_topic_hint(store, root):
                raise errors.InvalidInput(hint)
    for root in outer[1:]:
        if exists(store, owner_key(root)):
            other = _nested(data_path_prefix, root, f"inside the data prefix {root!r} of another")
            raise errors.InvalidInput(f"{other}{_if_wrong(config, store.url)}")
    below = store.list(f"{data_path_prefix}/", limit=LISTED_BELOW)
    for found in below.objects:
        folder, _, name = found.key.rpartition("/")
        if name == OWNER_NAME and folder != data_path_prefix:
            raise _nested(data_path_prefix, folder, f"around the data prefix {folder!r} of another")
        if name == TOPIC_KEY:
            raise errors.InvalidInput(
                f"data prefix {data_path_prefix!r} lies around the topic at {folder!r}: a garbage "
                f"collector may delete the topic's batches. Use a prefix beside {folder!r}."
            )


def missing_topic_hint(store: Store, root: str = "") -> str | None:
    """The text of an error where partitions lie without their topic's description, or None;
    ``root`` is a folder without a slash at its end, or empty."""
    try:
        below = store.list(f"{root}/p-0".lstrip("/"), limit=1)
    except errors.PermanentStorageError:
        return None  # A process that may not read outside of the prefix may still have a queue.
    for found in below.objects:
        name = found.key.removeprefix(f"{root}/").split("/")[0]
        if not has_letters(name) or exists(store, _topic_key(root)):
            break
        return (
            f"there is partition {name!r} of a topic at {_root_text(root)}, and the topic's "
            f"description {TOPIC_KEY!r} is gone: readers of the topic would not see a queue beside "
            "it. Put its latest version back (bucket versioning). If the topic was given up, "
            "delete what is left of it, or use another store."
        )
    return None


def exists(store: Get, key: str) -> bool:
    """Whether an object is there; one read of one byte."""
    try:
        store.get(key, byte_range=(0, 1))
    except errors.ObjectNotFound:
        return False
    return True


def _is_beside_partitions(store: Get, root: str, inner: str) -> bool:
    """Whether there is a topic at this root, and it has no partition of this name."""
    try:
        description = read_bytes(store, _topic_key(root), 1024 * 1024)
    except (errors.ObjectNotFound, errors.PermanentStorageError):
        # A process that may not read outside of the prefix may still have a queue there.
        return False
    name = PARTITION_NAME.fullmatch(inner)
    if name is None or name["letters"]:
        # A name with letters cannot be guessed, so it was listed once. If it is listed no more,
        # its manifest is sealed and refuses every write.
        return name is None
    try:
        names = [str(each["name"]) for each in json.loads(description)["partitions"]]
    except (ValueError, RecursionError, TypeError, KeyError):
        return False  # Reading the topic raises the error about its description.
    return inner not in names and any(has_letters(name) for name in names)


def has_letters(name: str) -> bool:
    """Whether this is the whole name of a topic's partition, and cannot be an abbreviation."""
    found = PARTITION_NAME.fullmatch(name)
    return found is not None and found["letters"] is not None


def _topic_key(root: str) -> str:
    return f"{root}/{TOPIC_KEY}".lstrip("/")


def _root_text(root: str) -> str:
    return f"{root!r} in this store" if root else "the root of this store"


def _nested(data_path_prefix: str, other: str, where: str) -> errors.InvalidInput:
    return errors.InvalidInput(
        f"data prefix {data_path_prefix!r} lies {where} queue: a garbage collector of the outer "
        f"one may delete the inner one's batches. Use a prefix beside {other!r}."
    )


def queue_hint(url: str, config: QueueConfig) -> str:
    """A queue as commands take it: store, the options that are not at their default, and how to
    reach the store. Quoted where a shell needs it; without secrets."""
    prefix, manifest = config.data_path_prefix, config.manifest_path
    found = [url]
    if prefix != DEFAULT_DATA_PATH_PREFIX:
        found += ["--data-path-prefix", prefix]
    if manifest != f"{prefix}/manifest":
        found += ["--manifest-path", manifest]
    return shlex.join([*found, *config.store_options.command_words()])


def reset_command(url: str, config: QueueConfig, reader: str, sequence: int) -> str:
    """Return the command, in quotes, that sets a reader of a log to a sequence."""
    words = queue_hint(url, config)
    return f"'opendata-buffer readers reset {words} {reader} --to-sequence {sequence}'"


def topic_hint(url: str, config: QueueConfig) -> str:
    """As :func:`queue_hint`, but the whole topic where the queue is a partition of one."""
    if PARTITION_NAME.fullmatch(config.data_path_prefix) is not None:
        config = replace(config, data_path_prefix=DEFAULT_DATA_PATH_PREFIX, manifest_path="")
    return queue_hint(url, config)


def parse_manifest(data: bytes, place: str, hint: str) -> Manifest:
    """A queue's manifest, whose errors about damaged entries name its place, and the command that
    helps with the queue's :func:`queue_hint`. An error from here names the command only."""
    try:
        return Manifest.parse(data).named(place, hint)
    except errors.CorruptManifest as error:
        raise errors.CorruptManifest(with_queue_in_hint(str(error), hint)) from error


def check_reached(seen: Watermark, now: Manifest | None, config: QueueConfig, url: str) -> None:
    """Raise ``QueueReset`` for a manifest that is gone, or behind what was seen of it before."""
    if seen.allows(now):
        return
    if now is None:
        what = (
            f"is gone from {url}: it had reached next sequence {seen.next_sequence} and epoch "
            f"{seen.epoch}"
        )
    else:
        what = (
            f"in {url} went backwards: next sequence {seen.next_sequence} -> {now.next_sequence}, "
            f"epoch {seen.epoch} -> {now.epoch}. It was deleted and recreated, or restored from an "
            "old copy"
        )
    raise errors.QueueReset(
        f"manifest {config.manifest_path!r} {what}. {_restore(config, url)} To start over without "
        f"them, use 'opendata-buffer produce {queue_hint(url, config)} --recreate'."
    )


def vanished(config: QueueConfig, url: str) -> errors.QueueReset:
    """The error about a manifest that was deleted while this process used it."""
    return errors.QueueReset(
        f"manifest {config.manifest_path!r} in {url} vanished while in use. It is not "
        "recreated: sequences would start again at 0 and acknowledged positions would hide "
        f"new batches. {_restore(config, url)} Check lifecycle rules on the bucket."
    )


def check_resume(
    now: Manifest | None, last_acked: int, config: QueueConfig, url: str, *, allow_data_loss: bool
) -> None:
    """Refuse to resume after a batch: ``QueueReset`` where the queue is not there or ends before it
    (failure F27), ``DataLoss`` where later ones were dequeued and that is not allowed."""
    if last_acked < 0:
        raise errors.InvalidInput(
            f"last_acked_sequence is {last_acked}: use None to start at the oldest entry"
        )
    if now is None:
        raise errors.QueueReset(
            f"cannot resume after sequence {last_acked}: manifest {config.manifest_path!r} does "
            f"not exist in {url}. The queue was deleted or the URL, data_path_prefix "
            "or manifest_path is another queue's. Start without a position to create it."
        )
    if last_acked >= now.next_sequence:
        why = ends_before(last_acked, now.next_sequence, config.manifest_path, url)
        raise errors.QueueReset(f"{why} Start without a position to read what is queued now.")
    if last_acked + 1 < now.first_sequence and not allow_data_loss:
        raise errors.DataLoss(
            config.manifest_path,
            last_acked + 1,
            now.first_sequence,
            "Another consumer read this queue. Resume from its position, or accept the loss "
            "explicitly.",
        )


def ends_before(last_acked: int, next_sequence: int, key: str, url: str) -> str:
    """The text of an error about a queue that ends before the batch to resume after."""
    return (
        f"cannot resume after sequence {last_acked}: manifest {key!r} in {url} ends at "
        f"{next_sequence - 1}. The queue was recreated or the position belongs to another queue."
    )


def _restore(config: QueueConfig, url: str) -> str:
    return (
        "Stop producers, consumers and collectors. Restore the latest version (bucket "
        "versioning), or let 'opendata-buffer fsck "
        f"{queue_hint(url, config)} --repair' enqueue the batches again that are still there."
    )
