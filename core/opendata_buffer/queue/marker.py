"""Mark a data prefix with its owner, and remember how far the manifest got.

Two accidents would otherwise destroy a queue without an error:

* **Two queues share a data prefix** (failure F7). The batches of one are not in the manifest of the
  other, so the other's collector would delete them.
* **A manifest goes back** (failure F4): an operator deletes it, or restores an old copy. Sequences
  would start again at a lower number, and the positions that consumers have saved would hide new
  batches.

The owner marker ``<prefix>/_owner.json`` prevents both. It names the one manifest to which the
prefix belongs, and it holds a watermark that this manifest has reached at least once::

    {"version": 1, "manifest": "manifest", "id": "01J5...", "next_sequence": 42, "epoch": 3,
     "acked": 39, "acked_location": "ingest/01J6....batch", "grace_period_ms": 600000,
     "index_changes": 7,
     "probed": [{"place": "https://s3.eu-central-1.amazonaws.com/bucket",
                 "at_ms": 1767225600000, "probe": 1}]}

* ``manifest`` is relative to the marker, like a link. So the same queue has the same owner whether
  it is opened as ``s3://bucket`` or as ``s3://bucket/root``.
* ``id`` is a ULID that is drawn once. It distinguishes this queue from a queue that was deleted and
  created again at the same place. Saved positions contain it.
* ``next_sequence``, ``epoch``, ``acked`` and ``acked_location`` are the watermark. They may be
  missing. ``acked`` is the highest sequence that a consumer removed, and ``acked_location`` names
  its batch.
* ``grace_period_ms`` is how long the collector keeps objects that nothing names. It applies to all
  programs of the queue (failure F5, decision 0037). Release 0.1 did not write it; the first program
  that has a value adds it.
* ``index_changes`` is a watermark for the index of a log, which counts its own changes. An index
  with a lower count was restored from an old copy (failure F46).
* ``probed`` has the places at which a process has probed the store, so that later processes need
  not do it again (:mod:`opendata_buffer.stores.probed`, decision 0048).
* ``log`` is true for a queue that has become a log.
* ``reader`` is the name of a reader, and ``manifest`` that of its log, if the prefix has the queue
  of a v1 consumer (:mod:`opendata_buffer.queue.v1_feed`). Such a marker has version 2, so that
  earlier releases refuse it: they would take the queue for one of their own.
* ``skipped`` has the ranges of sequences, first and one past the last, that never held batches,
  because a repair let a rebuilt manifest begin after them. Errors about losses do not count them.

For example, the manifest ends at 50 and the marker says 42. An operator restores yesterday's
manifest, which ends at 30. The next program reads the marker first, sees that 30 is below 42, and
stops with :class:`.QueueReset`.

A watermark is written at most once a minute, after the manifest. So it lags behind the manifest and
never runs ahead of it. A manifest that was restored from less than a minute ago may therefore be
accepted; that is the price for not writing two objects with each append.

This module only describes the marker, and reads and writes it.
:mod:`opendata_buffer.queue.ownership` decides which program may claim a prefix.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from opendata_buffer import errors, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.cas import CasObject, CasStore
from opendata_buffer.queue.sidecar import Sidecar, is_number
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.probed import Probed

log = logging.getLogger(__name__)

OWNER_NAME = "_owner.json"

_OWNER = Sidecar("the owner marker", "If one queue alone uses this data prefix, delete the object.")
_OWNER_2 = replace(_OWNER, version=2)

IS_LOG = "log"
"""Field of the marker that is true for a log. It is never taken back."""

MOST_SKIPPED = 20
"""Most ranges in ``skipped``, one for each repair. The last ones are kept."""

MOST_PROBED = 8
"""Most places in ``probed``. The last ones are kept."""

JUST_READ_S = 5.0
"""Seconds for which an object that a claim has read may be used without reading it again."""

_NOTE_DEADLINE_MS = 5_000
"""Longest wait for a write of a watermark, in milliseconds."""


def owner_key(data_path_prefix: str) -> str:
    """Return the key of the owner marker of a data prefix."""
    return f"{data_path_prefix}/{OWNER_NAME}"


@dataclass(frozen=True, slots=True)
class Watermark:
    """A state that a manifest has reached. No later state is below it.

    Attributes:
        next_sequence: The sequence that the next append gets.
        epoch: The consumer's epoch.
        acked: The highest sequence that a consumer removed; None before any was removed.
        acked_location: Where the batch of that sequence was; empty if that is not known.
    """

    next_sequence: int
    epoch: int
    acked: int | None = None
    acked_location: str = ""

    @classmethod
    def of(cls, manifest: Manifest, acked_location: str = "") -> Watermark:
        """Return the watermark of a manifest."""
        acked = manifest.first_sequence - 1 if manifest.first_sequence else None
        return cls(manifest.next_sequence, manifest.epoch, acked, acked_location)

    def allows(self, manifest: Manifest | None) -> bool:
        """Return whether this manifest can follow: it exists and is not below (failure F4)."""
        return (
            manifest is not None
            and manifest.next_sequence >= self.next_sequence
            and manifest.epoch >= self.epoch
        )

    def covers(self, other: Watermark) -> bool:
        """Return whether no value is below that of the other watermark."""
        return all(mine >= its for mine, its in zip(self._levels, other._levels, strict=True))

    def includes(self, other: Watermark) -> bool:
        """Return whether nothing of the other watermark would be lost by keeping only this one.

        That takes more than covering it: with equal sequences, a watermark without the location of
        the last batch does not include one that has it. Otherwise a process that does not know the
        location would keep the consumer from adding it.
        """
        lacks_location = other.acked_location and not self.acked_location
        return self.covers(other) and not (self.acked == other.acked and lacks_location)

    def joined(self, other: Watermark) -> Watermark:
        """Return the lowest watermark that includes both."""
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
    """The content of one owner marker.

    Attributes:
        manifest_path: Key of the manifest to which the prefix belongs.
        queue_id: The id of the queue; empty for a marker without one.
        watermark: None before the first one was written.
        grace_ms: The grace period in milliseconds; None in a marker of release 0.1.
        index_changes: Changes of a log's index; None before they were noted.
        skipped: Ranges of sequences that never held batches: first, and one past the last.
        probed: Probes of conditional writes that have passed, the last one at the end.
        reader: The reader of the log with this manifest whose queue the prefix has; empty for the
            prefix of a queue or log.
        others: Fields of later releases, and the field that marks a log.
    """

    manifest_path: str
    queue_id: str
    watermark: Watermark | None = None
    grace_ms: int | None = None
    index_changes: int | None = None
    skipped: tuple[tuple[int, int], ...] = ()
    probed: tuple[Probed, ...] = ()
    reader: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self, data_path_prefix: str) -> bytes:
        """Return the bytes of the marker of this data prefix."""
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
        if self.skipped:
            own["skipped"] = [list(each) for each in self.skipped]
        if self.probed:
            own["probed"] = [asdict(probed) for probed in self.probed]
        if self.reader:
            return _OWNER_2.encode({**own, "reader": self.reader}, self.others)
        return _OWNER.encode(own, self.others)

    @classmethod
    def from_json(cls, data: bytes, data_path_prefix: str) -> PrefixOwner:
        """Parse the bytes of the marker of this data prefix.

        Args:
            data: The whole object.
            data_path_prefix: The data prefix of the marker. The path of the manifest in it is
                relative.

        Returns:
            The marker. Unknown fields are kept.

        Raises:
            CorruptData: They are not an owner marker, or a later version wrote them.
        """
        fields = _OWNER_2.decode(data)
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
        skipped = fields.ranges("skipped")[-MOST_SKIPPED:]
        probed = tuple(_parsed_probes(fields.items("probed", [])))[-MOST_PROBED:]
        reader = fields.text("reader", "")
        others = fields.others()
        return cls(
            manifest_path, queue_id, watermark, grace_ms, changes, skipped, probed, reader, others
        )

    def with_probe(self, probed: Probed | None) -> PrefixOwner:
        """Return the marker with one more probe, or this one if it has the probe already."""
        if probed is None or probed in self.probed:
            return self
        others = [known for known in self.probed if known.place != probed.place]
        return replace(self, probed=(*others, probed)[-MOST_PROBED:])


def _parsed_probes(items: Sequence[Any]) -> Iterator[Probed]:
    """Yield the probes in a marker. One that cannot be understood does not count."""
    for item in items:
        if isinstance(item, dict):
            place, at_ms, probe = (item.get(name) for name in ("place", "at_ms", "probe"))
            if isinstance(place, str) and is_number(at_ms) and is_number(probe):
                yield Probed(place, at_ms, probe)  # type: ignore[arg-type]  # is_number() checks


def owner_object(store: CasStore, config: QueueConfig, runtime: Runtime) -> CasObject[PrefixOwner]:
    """Return the owner marker of a queue's data prefix as an object to read and change."""
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


def quick_owner_object(
    store: CasStore, config: QueueConfig, runtime: Runtime
) -> CasObject[PrefixOwner]:
    """Return the owner marker for writing a watermark, which waits for a few seconds at most.

    A watermark that could not be written costs nothing: the next one contains everything in it.
    """
    quick = config.with_timeout(min(_NOTE_DEADLINE_MS, config.timeout_ms))
    return owner_object(store, quick, runtime)


def skipped_ranges(
    store: CasStore, config: QueueConfig, runtime: Runtime
) -> Sequence[tuple[int, int]]:
    """Read the ranges of sequences that never held batches, with one small request.

    Args:
        store: Where the queue is.
        config: The queue.
        runtime: Clock and sleep.

    Returns:
        The ranges: first, and one past the last. Empty if the marker is gone or cannot be read.

    Raises:
        StorageError: The store did not answer.
    """
    owner = IndexMark(store, config, runtime).read()
    return () if owner is None else owner.skipped


def held_batches(end: int, skipped: Sequence[tuple[int, int]]) -> int:
    """Return how many of the sequences before ``end`` may have held a batch."""
    return end - sum(min(end, after) - first for first, after in skipped if first < end)


def is_rebuilt_at(sequence: int, skipped: Sequence[tuple[int, int]]) -> bool:
    """Return whether a manifest that a repair rebuilt begins at a sequence."""
    return any(after == sequence for _, after in skipped)


class IndexMark:
    """The number of changes that the index of a log has had, kept in the owner marker.

    The index counts its own changes. The number is written into the marker after each change, so
    the marker may lag behind the index and never runs ahead of it.
    """

    def __init__(self, store: CasStore, config: QueueConfig, runtime: Runtime) -> None:
        self._object = owner_object(store, config, runtime)
        self._quick = quick_owner_object(store, config, runtime)
        self._runtime = runtime
        self._just_read_until = float("-inf")

    def adopt(self, marker: CasObject[PrefixOwner]) -> None:
        """Use the marker that a claim has just read, and do not read it again for a moment.

        A marker that is older than the index is always right: it only shows fewer changes.

        Args:
            marker: The object that has read it.
        """
        self._object.adopt(marker)
        self._quick.adopt(marker)
        self._just_read_until = self._runtime.monotonic() + JUST_READ_S

    def read(self) -> PrefixOwner | None:
        """Return the marker, to compare with an index that is read later. One conditional GET.

        Returns:
            The marker; None if it does not exist or cannot be read. Claiming the queue raises that
            error.

        Raises:
            StorageError: The store did not answer.
        """
        if self._runtime.monotonic() < self._just_read_until:
            return self._object.last_seen
        try:
            found = self._object.read()
        except errors.CorruptData:
            return None  # Claiming the queue raises this error.
        return found if isinstance(found, PrefixOwner) else None

    def note(self, queue_id: str, changes: int) -> None:
        """Raise the number of changes in the marker. Failures are only logged.

        Args:
            queue_id: The id of the queue. The marker of another queue is left alone.
            changes: The number of changes that the index has had.
        """

        def raised(before: PrefixOwner | None) -> PrefixOwner | None:
            if before is None or before.queue_id != queue_id:
                return before
            if (before.index_changes or 0) >= changes:
                return before
            return replace(before, index_changes=changes)

        try:
            outcome: object = self._quick.update(raised, from_memory=True)
        except errors.OpenDataBufferError as error:
            outcome = error
        if not isinstance(outcome, outcomes.Applied):
            log.warning("the owner marker %s was not written: %s", self._quick.key, outcome)
