"""Keep a queue as a log: its oldest entries in segments, its newest ones in the manifest.

A manifest is rewritten with each append, so it has to stay small. A plain queue stays small because
its consumer removes entries. A log keeps them, for several readers and for replays, so its oldest
entries move out of the manifest into *segments*. A segment is an object that has the entries of a
range of sequences, in the format of a manifest, and that never changes::

    manifest                          entries 2816 to 3100
    _log/...1792-...2816-<ulid>.segment      entries 1792 to 2815
    _log/...1024-...1792-<ulid>.segment      entries 1024 to 1791
    _log.json                         the index: which segments there are

The index is ``<prefix>/_log.json``::

    {"version": 1, "queue": "01J5...", "end": 2816, "floor": 512, "readers": ["billing"],
     "levels": [[[1792, 2816, 1767225600000, 1767225700000, "0...-01J6....segment"]], ...],
     "lost": [], "missing": {}, "reader_expiry_ms": 604800000, "changes": 7}

* Entries from ``floor`` (the log start offset) up to, but not including, ``end`` are in segments.
  The ranges in ``lost`` are not there: a client that does not know logs removed them from the
  manifest before they were moved.
* ``levels[0]`` names segments. ``levels[n]`` names pages, each of which names :data:`FAN` parts of
  the level below. So the index stays small however long the log is.
* ``readers`` are the named readers. Their positions are objects of their own
  (:mod:`opendata_buffer.queue.reader_positions`).
* Entries before ``floor`` were acknowledged by every reader, and may be deleted.
* ``end``, ``floor`` and ``changes`` never fall (``tests/specification/Log.tla``).

**Moving.** Any writer of the queue may move entries, and several may try at the same time. A writer
stores a segment, then adds it to the index with compare-and-swap, then removes the entries from the
manifest. If it is killed in between, there is an unnamed segment, which the collector deletes, or
there are entries in both places. No entry is ever in neither (failure F43).

**Reading.** A reader reads the manifest first and the index second. An entry that left the manifest
in between is then in the index (decision 0038). :class:`LogView` is the two of them together.

**Things that can go wrong:**

* A client of v1 consumes the queue and knows nothing of the log. It removes entries from the
  manifest that were not moved yet. The index records them as lost, and readers learn which ones
  (failure F42).
* The index is restored from an old copy. It would hide the segments and the readers that were added
  since. Two things reveal it (failure F46): the owner marker remembers how many changes the index
  has had, and there are stored segments that begin after its end. Before entries count as lost,
  these segments are searched.
* The index is deleted. The owner marker still says that the queue is a log, so no program takes it
  for a plain queue (failure F45).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, TypeVar

from opendata_buffer import errors, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import name_time_ms
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.messages import undecided
from opendata_buffer.queue.cas import CasStore, sidecar_object
from opendata_buffer.queue.hints import queue_hint, reset_command
from opendata_buffer.queue.marker import IndexMark, PrefixOwner, owner_key
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.queue.sidecar import LARGEST, Sidecar, SidecarFields, is_number
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.stores.base import read_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

FAN = 128
"""Parts that one page names. The index itself names fewer than twice as many at each level."""

MOST_READERS = 1_000
"""Largest number of readers in an index."""

REMEMBERED = 2_048
"""Number of entries before the floor whose segments are kept.

A reader that starts compares new entries with these to recognise those that a writer has queued
twice.
"""

AHEAD_MS = 60 * 60 * 1000
"""Times further ahead of the collector's clock are ignored: the producer's clock is wrong."""

DEFAULT_READER_EXPIRY_MS = 7 * 24 * 60 * 60 * 1000

INDEX = Sidecar(
    "the index of the log",
    "Restore its latest version (bucket versioning): it says what the log keeps.",
    max_bytes=1024 * 1024,
)
PAGE = Sidecar(
    "a page of the log's index",
    "Restore the object (bucket versioning): it names segments of the log.",
    max_bytes=1024 * 1024,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A segment, or a page that names parts. Times are milliseconds since the Unix epoch.

    Attributes:
        first: The first sequence.
        end: The sequence after the last one.
        named_ms: The earliest time in the names of its batches; 0 if one name has no time.
        newest_ms: The latest time of a record.
        name: Name of the object, below the folder of the log.
    """

    first: int
    end: int
    named_ms: int
    newest_ms: int
    name: str

    @classmethod
    def of(cls, entries: Manifest, name: str) -> Part:
        """Return the segment of these entries, of which there must be at least one."""
        found = entries.entries()
        named = [name_ms(entry.location) for entry in found]
        newest = max(entry.latest_ms for entry in found)
        return cls(found[0].sequence, entries.next_sequence, min(named), max(newest, 0), name)

    @classmethod
    def page(cls, parts: Sequence[Part], name: str) -> Part:
        """Return the page that names these parts."""
        named, newest = min(p.named_ms for p in parts), max(p.newest_ms for p in parts)
        return cls(parts[0].first, parts[-1].end, named, newest, name)


def name_ms(location: str) -> int:
    """Return the time in the name of a batch; 0 if the name has no time."""
    return max(name_time_ms(location) or 0, 0)


@dataclass(frozen=True, slots=True)
class LogIndex:
    """One version of the index. Times are milliseconds since the Unix epoch.

    Attributes:
        queue_id: Id of the queue to which the log belongs.
        end: The sequence after the last moved entry.
        floor: The first sequence that is kept.
        levels: Segments, and pages of each level above.
        readers: Names of the readers, in order.
        lost: Ranges that were removed by a client that does not know logs: first, and one past the
            last.
        retention_ms: Keep batches for this long after all readers have acknowledged them.
        retention_bytes: Keep up to this many bytes of acknowledged batches. With both limits, a
            batch is kept while it is within both. With neither, it may be deleted once it is
            acknowledged.
        reader_expiry_ms: A reader that has not moved for this long no longer holds batches.
        changes: Number of changes of the index. It also makes every version differ in its bytes,
            because a store may compare versions by content.
        missing: By the name of a reader without a position, when the collector first missed it.
        others: Fields of later releases.
    """

    queue_id: str
    end: int
    floor: int
    levels: tuple[tuple[Part, ...], ...] = ()
    readers: tuple[str, ...] = ()
    lost: tuple[tuple[int, int], ...] = ()
    retention_ms: int | None = None
    retention_bytes: int | None = None
    reader_expiry_ms: int = DEFAULT_READER_EXPIRY_MS
    changes: int = 0
    missing: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the bytes of the index."""
        levels = [_rows(level) for level in self.levels]
        return INDEX.encode_value(self, queue=self.queue_id, queue_id=None, levels=levels)

    @classmethod
    def from_json(cls, data: bytes) -> LogIndex:
        """Parse the bytes of an index.

        Raises:
            CorruptData: They are not an index, its parts do not follow one another, or a later
                version wrote them.
        """
        found = INDEX.decode(data)
        readers, lost = found.items("readers"), found.items("lost", [])
        if not all(isinstance(name, str) for name in readers):
            raise found.wrong("readers", "a list of names")
        are_pairs = all(isinstance(gap, list) and len(gap) == 2 for gap in lost)
        if not are_pairs or not all(map(is_number, chain(*lost))):
            raise found.wrong("lost", "a list of ranges")
        missing = found.mapping("missing", {})
        if not all(map(is_number, missing.values())):
            raise found.wrong("missing", "names with times in milliseconds")
        made = found.into(
            cls,
            queue_id=found.text("queue"),
            levels=tuple(_parts(found, "levels", level) for level in found.items("levels")),
            readers=tuple(readers),
            lost=tuple((first, end) for first, end in lost),
            missing=missing,
        )
        made._check(found)
        return made

    def _check(self, found: SidecarFields) -> None:
        """Check that the parts follow one another, with no gaps but the lost ranges."""
        at = None
        for part in self.parts():
            if at is not None and part.first != at and end_of_gap(at, self.lost) != part.first:
                raise found.wrong("levels", f"contiguous: {part.name!r} does not begin at {at}")
            at = part.end
        if at is not None and at != self.end and end_of_gap(at, self.lost) != self.end:
            raise found.wrong("end", f"{at}, where the last segment ends")

    def parts(self) -> list[Part]:
        """Return all parts that the index itself names, in the order of their sequences."""
        return [*chain(*reversed(self.levels))]

    def with_segment(self, part: Part) -> LogIndex:
        """Return the index with one more segment, and with a gap before it as lost."""
        lost = self.lost if part.first == self.end else (*self.lost, (self.end, part.first))
        levels = self.levels or ((),)
        return self.changed(end=part.end, lost=lost, levels=((*levels[0], part), *levels[1:]))

    def with_page(self, number: int, page: Part) -> LogIndex:
        """Return the index with the oldest parts of a level replaced by a page."""
        levels = [*self.levels, *([()] if number + 1 == len(self.levels) else [])]
        levels[number] = levels[number][FAN:]
        levels[number + 1] = (*levels[number + 1], page)
        return self.changed(levels=tuple(levels))

    def with_reader(self, name: str) -> LogIndex:
        """Return the index with a reader, whose position must be written already.

        The index changes even if it has the reader, so that a concurrent collector loses its race.
        """
        missing = {reader: at for reader, at in self.missing.items() if reader != name}
        return self.changed(readers=tuple(sorted({*self.readers, name})), missing=missing)

    def without_readers(self, names: Sequence[str]) -> LogIndex:
        """Return the index without some readers, which then hold nothing."""
        readers = tuple(name for name in self.readers if name not in names)
        missing = {name: at for name, at in self.missing.items() if name not in names}
        return self.changed(readers=readers, missing=missing)

    def with_floor(self, floor: int) -> LogIndex:
        """Return the index with a higher floor, without the parts below it."""
        forgotten = floor - REMEMBERED
        levels = tuple(
            tuple(part for part in level if part.end > forgotten) for level in self.levels
        )
        lost = tuple((first, end) for first, end in self.lost if end > forgotten)
        return self.changed(floor=max(self.floor, floor), levels=levels, lost=lost)

    def changed(self, **values: Any) -> LogIndex:
        """Return the index with other values, as one more change."""
        return replace(self, changes=self.changes + 1, **values)


def floor_of(
    index: LogIndex, positions: Mapping[str, int], next_sequence: int, retained_from: int | None
) -> int:
    """Return the first sequence that has to be kept.

    Args:
        index: The index.
        positions: The next sequence of each reader that has not expired.
        next_sequence: The end of the log.
        retained_from: The first sequence within the retention; None without a retention.
    """
    bounds = [*positions.values(), *([] if retained_from is None else [retained_from])]
    return max(index.floor, min([*bounds, next_sequence])) if bounds else index.floor


def chain_of(spans: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the spans that follow one another and together reach furthest, oldest first.

    Segments that lost a race overlap others and have the same entries.

    Args:
        spans: First sequence of each segment, and one past its last.
        end: The first sequence in the manifest, where a chain may end.
    """
    known = sorted(set(spans), reverse=True)
    # For the first sequence of a chain: how far the chain reaches, and where its first span ends.
    reach: dict[int, tuple[int, int]] = {}
    for first, last in known:
        if last in reach:
            reach[first] = max(reach.get(first, (0, 0)), (reach[last][0], last))
        elif last >= end or not any(begin < last < ends for begin, ends in known):
            reach[first] = max(reach.get(first, (0, 0)), (last, last))
    chain: list[tuple[int, int]] = []
    at = -1
    while at < end and (begins := [first for first in reach if at <= first < end]):
        at = min(begins)
        while at in reach and at < end:
            chain.append((at, reach[at][1]))
            at = reach[at][1]
    return chain


def page_from_json(data: bytes) -> tuple[Part, ...]:
    """Parse the bytes of a page.

    Raises:
        CorruptData: They are not a page, or a later version wrote them.
    """
    found = PAGE.decode(data)
    return _parts(found, "parts", found.items("parts"))


def _rows(parts: Sequence[Part]) -> list[list[Any]]:
    return [[p.first, p.end, p.named_ms, p.newest_ms, p.name] for p in parts]


def _parts(found: SidecarFields, name: str, rows: Any) -> tuple[Part, ...]:
    made = []
    for row in rows if isinstance(rows, list) else [None]:
        match row:
            case [int(first), int(end), int(named), int(newest), str(text)] if (
                0 <= first < end <= LARGEST and text and "/" not in text
            ):
                made.append(Part(first, end, named, newest, text))
            case _:
                raise found.wrong(name, "a list of parts", row)
    return tuple(made)


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, with those that overlap or touch joined."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


def end_of_gap(sequence: int, gaps: Sequence[tuple[int, int]]) -> int:
    """Return the first sequence from this one on that is in no gap. The gaps must be in order."""
    for first, end in gaps:
        if first <= sequence < end:
            sequence = end
    return sequence


MAX_SEGMENT_BYTES = 1 << 28
_PAGES = 64
"""Pages that a log keeps in memory."""
_SEGMENTS = 4
"""Segments that a log keeps in memory, and reads at the same time."""
_LISTED = 1_000
"""Objects in one page of a listing."""


def index_key(config: QueueConfig) -> str:
    """Return the key of the index of a log."""
    return f"{config.data_path_prefix}/_log.json"


def parts_folder(config: QueueConfig) -> str:
    """Return the folder of the segments and pages, with a slash at the end."""
    return f"{config.data_path_prefix}/_log/"


class SegmentGone(errors.CorruptData):
    """A segment that the index names does not exist."""


class OldIndex(errors.CorruptData):
    """The index of a log was restored from an old copy, and lacks later changes."""


def span_of_segment(key: str) -> tuple[int, int] | None:
    """Return the first sequence of a segment and one past its last; None for any other object."""
    first, _, _ = key.rsplit("/", 1)[-1].partition("-")
    end = end_of_part(key)
    known = key.endswith(".segment") and first.isascii() and first.isdigit() and end != LARGEST
    return (int(first), end) if known and int(first) < end else None


def _begin_of_part(key: str) -> int:
    """Return the first sequence of a segment or a page, by its name; -1 for any other object."""
    first = key.rsplit("/", 1)[-1].partition("-")[0]
    return int(first) if first.isascii() and first.isdigit() else -1


def end_of_part(key: str) -> int:
    """Return one past the last sequence of a segment or page, by its name.

    :data:`LARGEST` for any other object. The object can be deleted if that is below the floor.
    """
    _, end, *rest = (*key.rsplit("/", 1)[-1].split("-"), "", "")
    return int(end) if end.isascii() and end.isdigit() and rest[0] else LARGEST


class Log:
    """The index and the segments of one log.

    Not thread-safe: the owner of this object must make its calls one after another.

    Args:
        store: Where the log is.
        config: The log's queue.
        runtime: Clock and sleep.
        queue_id: Id of the queue. An index of another queue is refused. Empty accepts any.
        reader: Name of the reader to whom errors give advice; empty without one.
    """

    most_entries = 1_024
    """Number of entries in the manifest above which the oldest ones are moved."""
    left_entries = 256
    """Number of newest entries that stay in the manifest, where writers look for their appends."""
    most_moved = 8_192
    """Largest number of entries in one segment."""

    def __init__(
        self,
        store: CasStore,
        config: QueueConfig,
        runtime: Runtime,
        queue_id: str = "",
        reader: str = "",
    ) -> None:
        self.store = store
        self.config = config
        self.runtime = runtime
        self.queue_id = queue_id
        self.reader = reader
        self._object = sidecar_object(
            INDEX,
            LogIndex,
            store,
            index_key(config),
            runtime,
            config,
            check_read=self._checks_read(),
        )
        self._mark = IndexMark(store, config, runtime)
        self._true_gap = (0, 0)
        # Not methods of this object: the reference cycle would keep large segments in memory until
        # the next run of Python's garbage collector.
        read = partial(_read_part, store, config, reader)
        self._page: Callable[[Part], tuple[Part, ...]]
        self._page = lru_cache(_PAGES)(partial(read, PAGE.max_bytes, page_from_json))
        self._segment: Callable[[Part], Manifest]
        self._segment = lru_cache(_SEGMENTS)(partial(read, MAX_SEGMENT_BYTES, Manifest.parse))

    @property
    def last_seen(self) -> LogIndex | None:
        """Return the index as it was last read or written; None before that."""
        return self._object.last_seen

    def read(self) -> LogIndex | None:
        """Return the index as it is now; None where the queue is not a log.

        Two conditional GETs: the owner marker and then the index.

        Raises:
            OldIndex: The index was restored from an old copy.
            CorruptData: It is gone, cannot be read, or is another queue's.
        """
        marker = self._mark.read()
        found = self._object.read()
        if isinstance(found, outcomes.Vanished):
            raise self._gone()
        if found is not None and self.queue_id and found.queue_id != self.queue_id:
            raise errors.CorruptData(
                f"{self._object.key!r} in {self.store.url} is of queue {found.queue_id}, and the "
                f"queue is {self.queue_id}: it was started over. If the old log is given up, "
                f"delete the object and everything below {parts_folder(self.config)!r}. If only "
                f"{owner_key(self.config.data_path_prefix)!r} was lost, write the old id back "
                "into it."
            )
        if found is not None:
            self._check_marked(found, marker)
        return found

    def _checks_read(self) -> Callable[[LogIndex, LogIndex], None]:
        """Return the check that an index which is read now can follow the one known before."""
        # Not a method of this object: the reference cycle would keep the index in memory until the
        # next run of Python's garbage collector.
        store, config = self.store, self.config

        def check(known: LogIndex, now: LogIndex) -> None:
            if known.queue_id == now.queue_id and now.changes < known.changes:
                raise _old_index(
                    store, config, f"had {known.changes} changes, and now {now.changes}"
                )

        return check

    def _check_marked(self, index: LogIndex, marker: PrefixOwner | None) -> None:
        if marker is None or marker.queue_id != index.queue_id or marker.index_changes is None:
            return
        if index.changes < marker.index_changes:
            what = f"had {marker.index_changes} changes, and now {index.changes}"
            raise _old_index(self.store, self.config, what)

    def check_gap(self, index: LogIndex, manifest: Manifest) -> None:
        """Check that no segment has the entries missing between index and manifest.

        The marker may lag behind the index that it guards, so this looks at the stored segments:
        one listing for each new gap.

        Raises:
            OldIndex: Segments are stored that have the missing entries.
            TransientStorageError: The index has changed meanwhile.
        """
        gap = index.end, manifest.first_sequence
        if gap[0] >= gap[1] or gap == self._true_gap:
            return
        if found := self.stored_between(*gap):
            now = self._object.read()
            if not isinstance(now, LogIndex) or now.end != index.end:
                # A writer had stored the segment and not yet named it, while a v1 consumer removed
                # the same entries.
                raise errors.TransientStorageError(
                    f"{self._object.key!r} in {self.store.url} was changed while it was read: try "
                    "again"
                )
            first, end = found[0][0], found[-1][1]
            what = f"ends at {index.end}, and segments of {first} to {end - 1} are stored"
            raise _old_index(self.store, self.config, what)
        self._true_gap = gap

    def stored_between(self, first: int, end: int) -> list[tuple[int, int, str]]:
        """Return the stored segments that contain a sequence of a range, oldest first.

        Args:
            first: First sequence of the range.
            end: End of the range. It is not in the range.

        Returns:
            The first sequence, the end, and the key of each segment.
        """
        folder = parts_folder(self.config)
        after = f"{folder}{max(0, first - self.most_moved):020d}"
        found: list[tuple[int, int, str]] = []
        while True:
            page = self.store.list(folder, start_after=after, limit=_LISTED)
            for info in page.objects:
                span = span_of_segment(info.key)
                if span is not None and span[0] < end and span[1] > first:
                    found.append((*span, info.key))
            if not page.truncated or _begin_of_part(page.objects[-1].key) >= end:
                return sorted(found)
            after = page.objects[-1].key

    def read_unclaimed(self) -> LogIndex | None:
        """Read the index for a process that has not claimed the queue.

        It reads the owner marker, too, to learn the id of the queue. The index of a queue that was
        deleted and created again would hide the first batches of the new one.

        Raises:
            CorruptData: As :meth:`read`.
        """
        if self.read() is not None and not self.queue_id:
            claim = check_owner(self.store, self.config, runtime=self.runtime)
            self.queue_id = "" if claim is None else claim.queue_id
        return self.read()

    def need(self, *, marked: bool = False) -> LogIndex:
        """Read the index of a queue that must be a log.

        Args:
            marked: Whether the owner marker says that the queue is a log.

        Raises:
            InvalidInput: The queue is not a log.
            CorruptData: As :meth:`read`, or the marker says that there should be an index (failure
                F45).
        """
        found = self.read()
        if found is None and marked:
            raise self._gone()
        if found is None:
            raise errors.InvalidInput(
                f"the queue with manifest {self.config.manifest_path!r} in {self.store.url} is "
                "not a log, and has no named readers. 'opendata-buffer readers enable "
                f"{queue_hint(self.store.url, self.config)}' makes it one, and says what "
                "changes."
            )
        return found

    def _gone(self) -> errors.CorruptData:
        words = queue_hint(self.store.url, self.config)
        return errors.CorruptData(
            f"{self._object.key!r} in {self.store.url} is gone. {INDEX.remedy} 'opendata-buffer "
            f"fsck {words} --repair' builds a new one. If 'opendata-buffer readers enable "
            f"{words}' was interrupted, run it again."
        )

    def view(self, index: LogIndex, manifest: Manifest) -> LogView:
        """Return everything that the log keeps.

        Args:
            index: The index, read after the manifest.
            manifest: The manifest.

        Raises:
            OldIndex: As :meth:`check_gap`.
        """
        self.check_gap(index, manifest)
        path = self.config.manifest_path
        return LogView(self, index, manifest, index.floor, manifest.epoch, path)

    def change(self, decide: Callable[[LogIndex | None], LogIndex | None]) -> LogIndex:
        """Make a change that may be applied twice, and note it in the owner marker.

        Args:
            decide: Returns the index as it should be, given the index as it is. It must be pure.

        Returns:
            The index that holds now.

        Raises:
            OldIndex: The index was restored from an old copy.
            TransientStorageError: It is not known whether the change was written; try again.
            CorruptData: The index cannot be read.
        """
        marker = self._mark.read()

        def checked(before: LogIndex | None) -> LogIndex | None:
            if before is not None:
                self._check_marked(before, marker)
            return decide(before)

        now = self._object.change(checked)
        if marker is None or (marker.index_changes or 0) < now.changes:
            self._mark.note(now.queue_id, now.changes)
        return now

    def put_back(self, known: LogIndex | None, new: LogIndex) -> None:
        """Write an index in place of the known one, which may be an old copy.

        Raises:
            TransientStorageError: The index was changed meanwhile, or the outcome is not known.
        """
        now = self._object.change(lambda before: new if before == known else before)
        if now != new:
            raise errors.TransientStorageError(
                f"{self._object.key!r} in {self.store.url} was changed meanwhile. Stop producers, "
                "consumers and collectors, and try again."
            )
        self._mark.note(new.queue_id, new.changes)

    def move(self, manifest: Manifest) -> LogIndex | None:
        """Move the oldest entries of a long manifest into segments.

        Args:
            manifest: The manifest as it was just read.

        Returns:
            The index, whose ``end`` says which entries may leave the manifest. None if the queue is
            not a log.

        Raises:
            OldIndex: The index was restored from an old copy.
            CorruptData: The index cannot be read.
            StorageError: The store did not answer, or refused a write.
        """
        if (index := self.read()) is None:
            return None
        self.check_gap(index, manifest)
        while manifest.next_sequence - (first := max(index.end, manifest.first_sequence)) > (
            self.most_entries
        ):
            end = min(manifest.next_sequence - self.left_entries, first + self.most_moved)
            end = min(end, self._first_open(manifest, first))
            if end == first:
                break
            entries = manifest.part(first, end)
            part = Part.of(entries, self._name(first, end, "segment"))
            # Store the object first, so that the index never names a missing segment (failure F43).
            self.store.put(parts_folder(self.config) + part.name, entries.raw)
            if first > index.end:  # failure F42
                log.error(
                    "sequences %d to %d were removed from manifest %r by a consumer that does not "
                    "know logs (the manifest has epoch %d). Readers have lost them. Stop that "
                    "consumer. It can continue as a named reader.",
                    index.end,
                    first - 1,
                    self.config.manifest_path,
                    manifest.epoch,
                )
            index = self._replace(index, index.with_segment(part))
        paged = self.with_pages(index)
        return index if paged is index else self._replace(index, paged)

    def _first_open(self, manifest: Manifest, first: int) -> int:
        """Return the first sequence of an open transaction, or the end of the manifest.

        Nothing is moved from there on: the process that ends a transaction looks for it in the
        manifest (transactions.py).
        """
        if b"/message=" not in manifest.raw:
            return manifest.next_sequence
        names = enumerate(manifest.locations(), manifest.first_sequence)
        found = undecided(names, self.config.data_path_prefix).values()
        begins = (txn.first_sequence for txn in found if txn.first_sequence >= first)
        return min(begins, default=manifest.next_sequence)

    def with_pages(self, index: LogIndex) -> LogIndex:
        """Return the index with pages instead of the oldest parts of each level that is full.

        The pages are stored, the index is not written. Returns the same index if no level is full.
        """
        number = 0
        while number < len(index.levels):
            if len(index.levels[number]) < 2 * FAN:
                number += 1
                continue
            parts = index.levels[number][:FAN]
            page = Part.page(parts, self._name(parts[0].first, parts[-1].end, "page"))
            data = PAGE.encode({"parts": _rows(parts)})
            self.store.put(parts_folder(self.config) + page.name, data)
            index = index.with_page(number, page)
        return index

    def _replace(self, known: LogIndex, new: LogIndex) -> LogIndex:
        """Write the index if it is still the known one. Return the index that holds now."""
        return self.change(lambda before: new if before == known else before)

    def _name(self, first: int, end: int, kind: str) -> str:
        # Padded, so that a listing is in the order of sequences and begins with what lies before
        # the floor.
        return f"{first:020d}-{end:020d}-{self.runtime.ulid()}.{kind}"

    def entries(self, index: LogIndex, start: int, limit: int) -> list[BatchDescriptor]:
        """Return up to ``limit`` entries from ``start`` on in segments, up to a gap.

        Several segments are read at the same time: a query that was stopped for a while plans from
        a dozen.
        """
        found: list[BatchDescriptor] = []
        end = start + limit
        parts = self._parts_between(index, start, end)
        while chunk := [*islice(parts, _SEGMENTS)]:
            for segment in in_parallel(self.runtime, self._segment, chunk):
                found += segment.entries(start + len(found), end - start - len(found))
        return found

    def _parts_between(self, index: LogIndex, start: int, end: int) -> Iterator[Part]:
        """Yield the segments with these sequences, up to a gap. Raise a page's error."""
        at = start
        for part in self._parts(index, lambda part: part.first < end and part.end > start):
            if part.first > at:
                return
            yield part
            at = part.end

    def find(self, index: LogIndex, location: str, since: int) -> int | None:
        """Return the sequence of a location in the segments from ``since`` on, or None."""
        for part in self._parts(index, lambda part: part.end > since):
            if (found := self._segment(part).find(location)) is not None:
                return found
        return None

    def sequence_since(self, index: LogIndex, time_ms: int) -> int | None:
        """Return the first sequence from the floor on with a record of this time or later.

        Only segments are searched. None if they have no such record.
        """
        fits = self._parts(index, lambda p: p.end > index.floor and p.newest_ms >= time_ms)
        if (part := next(fits, None)) is None:
            return None
        entries = self._segment(part).entries()
        return next((entry.sequence for entry in entries if entry.latest_ms >= time_ms), part.end)

    def newer_segments(self, index: LogIndex, time_ms: int) -> Iterator[BatchDescriptor]:
        """Yield the entries from the floor on of segments with a record since this time."""
        for part in self._parts(index, lambda p: p.end > index.floor and p.newest_ms >= time_ms):
            for entry in self._segment(part).entries():
                if entry.sequence >= index.floor:
                    yield entry

    def oldest_name_ms(self, index: LogIndex) -> int | None:
        """Return the earliest time in the names of batches that are kept in segments.

        None without a segment. Reads at most the page that contains the floor.
        """
        found = []
        waiting = [(part, level) for level, parts in enumerate(index.levels) for part in parts]
        while waiting:
            part, level = waiting.pop()
            if part.end <= index.floor:
                continue
            if level and part.first < index.floor:
                waiting += [(below, level - 1) for below in self._page(part)]
            else:
                found.append(part.named_ms)
        return min(found, default=None)

    def segments(self, index: LogIndex) -> Iterator[tuple[Part, Manifest | errors.CorruptData]]:
        """Yield each segment from the floor on, or the error of an unreadable one."""
        for part, fault in self._walk(index, lambda part: part.end > index.floor):
            try:
                yield part, fault or self._segment(part)
            except errors.CorruptData as error:
                yield part, error

    def _parts(self, index: LogIndex, fits: Callable[[Part], bool]) -> Iterator[Part]:
        """Yield the segments that fit, in order. Raise the error of a page among them."""
        for part, fault in self._walk(index, fits):
            if fault is not None:
                raise fault
            yield part

    def _walk(
        self, index: LogIndex, fits: Callable[[Part], bool]
    ) -> Iterator[tuple[Part, errors.CorruptData | None]]:
        """Yield the segments that fit, in order, and the errors of unreadable pages."""
        levels = enumerate(index.levels)
        # A stack: the next part is the last one.
        waiting = [(part, level) for level, parts in levels for part in reversed(parts)]
        while waiting:
            part, level = waiting.pop()
            if not fits(part):
                continue
            if not level:
                yield part, None
                continue
            try:
                waiting += [(below, level - 1) for below in reversed(self._page(part))]
            except errors.CorruptData as error:
                yield part, error


def _old_index(store: CasStore, config: QueueConfig, what: str) -> OldIndex:
    """Return the error about an index that is an old copy."""
    return OldIndex(
        f"{index_key(config)!r} in {store.url} went backwards: it {what}. It was restored from an "
        "old copy, and hides newer segments and readers. Stop producers, consumers and "
        "collectors, and run 'opendata-buffer fsck "
        f"{queue_hint(store.url, config)} --repair', which finds them again."
    )


def _read_part(
    store: CasStore,
    config: QueueConfig,
    reader: str,
    most: int,
    decode: Callable[[bytes], T],
    part: Part,
) -> T:
    """Return the content of a segment or page. Errors name its sequences and the way out."""
    key = parts_folder(config) + part.name
    try:
        found = decode(read_bytes(store, key, most))
        if isinstance(found, Manifest) and found.next_sequence != part.end:
            raise errors.CorruptData(
                f"it ends at {found.next_sequence}, and the index has {part.end}"
            )
        return found
    except (errors.ObjectNotFound, errors.CorruptData) as error:
        gone = isinstance(error, errors.ObjectNotFound)
        what = "is gone" if gone else "cannot be read: " + str(error).split(". ")[0]
        if reader:
            command = reset_command(store.url, config, reader, part.end)
            go_on = f"continue after them with {command}"
        else:
            words = queue_hint(store.url, config)
            go_on = (
                f"set each reader that stops there to sequence {part.end} with 'readers reset'. "
                f"'opendata-buffer readers list {words}' shows where they are"
            )
        raise (SegmentGone if gone else errors.CorruptData)(
            f"{key!r} in {store.url} {what}. It names sequences {part.first} to {part.end - 1} of "
            "the log: readers that are before or past them continue. Restore the object (bucket "
            f"versioning), or {go_on}."
        ) from error


@dataclass(frozen=True, eq=False)
class LogView:
    """A manifest, and the index that was read after it, as one sequence of entries.

    It has the methods of a manifest that consumers use.

    Attributes:
        log: Reads segments.
        index: The index.
        manifest: The manifest.
        first_sequence: The first sequence that counts, for one reader or for the whole log.
        epoch: The epoch of the reader or of the queue.
        key: The object that has this epoch.
    """

    log: Log
    index: LogIndex
    manifest: Manifest
    first_sequence: int
    epoch: int
    key: str
    check_current: Callable[[], None] = lambda: None
    """Raises if the view is out of date: its reader was fenced, or the floor has passed it.
    """
    missing: tuple[tuple[int, int], ...] = ()
    """Ranges whose objects are known to be gone."""

    @property
    def next_sequence(self) -> int:
        """Return the sequence of the next batch that is appended."""
        return self.manifest.next_sequence

    @property
    def entry_count(self) -> int:
        """Return the number of entries from ``first_sequence`` on, without those that are gone."""
        return self.count(self.first_sequence, self.next_sequence)

    def count(self, first: int, end: int) -> int:
        """Return the number of entries from ``first`` up to, but not including, ``end``."""
        gone = (min(end, last) - max(first, begin) for begin, last in self.gaps)
        return max(0, end - first - sum(length for length in gone if length > 0))

    @property
    def sealed(self) -> bool:
        """Return whether the queue is closed for good."""
        return self.manifest.sealed

    @property
    def gaps(self) -> Sequence[tuple[int, int]]:
        """Return the ranges that are gone, in order: :attr:`lost`, and missing objects."""
        return self.lost if not self.missing else joined_ranges((*self.lost, *self.missing))

    @property
    def lost(self) -> Sequence[tuple[int, int]]:
        """Return the ranges that a client which does not know logs removed from the manifest."""
        first, end = self.manifest.first_sequence, self.index.end
        return (*self.index.lost, *([(end, first)] if first > end else []))

    def available_from(self, needed: int) -> int:
        """Return the first sequence from ``needed`` on that is kept and is not lost."""
        return end_of_gap(max(needed, self.first_sequence), self.gaps)

    def entries(
        self, start: int | None = None, limit: int | None = None
    ) -> tuple[BatchDescriptor, ...]:
        """Return up to ``limit`` entries from ``start`` on, up to the first gap."""
        at = max(self.first_sequence, start if start is not None else 0)
        # The index was read later than the manifest, and may end after it.
        left = self.next_sequence - at
        limit = left if limit is None else min(limit, left)
        if limit <= 0:
            return ()
        found: list[BatchDescriptor] = []
        if at < self.manifest.first_sequence:
            try:
                found = self.log.entries(self.index, at, limit)
            except SegmentGone:
                self.check_current()
                raise
            at += len(found)
            if at < self.manifest.first_sequence:
                return tuple(found)
        return (*found, *self.manifest.entries(at, limit - len(found)))

    def age_s(self, now_ms: int, start: int | None = None) -> float | None:
        """Return how many seconds ago the first entry from ``start`` on was written.

        Makes no request. For an entry in a segment, this is the age of the oldest name in the
        segment.
        """
        at = self.available_from(start if start is not None else 0)
        if at >= self.manifest.first_sequence:
            return self.manifest.age_s(now_ms, at)
        found = next((part for part in self.index.parts() if part.first <= at < part.end), None)
        if found is None or not found.named_ms:
            return None
        return max(0, now_ms - found.named_ms) / 1000

    def since(self, time_ms: int) -> int:
        """Return the first sequence with a record of this time or later, or else the end."""
        found = self.log.sequence_since(self.index, time_ms)
        if found is not None and found < self.index.end:
            return min(max(found, self.first_sequence), self.next_sequence)
        at = max(self.first_sequence, self.index.end)
        later = (e.sequence for e in self.manifest.entries(at) if e.latest_ms >= time_ms)
        return next(later, self.next_sequence)

    def kept_since(self, time_ms: int, now_ms: int) -> int:
        """Return the first sequence that a retention keeps, or the end if it keeps none.

        A batch counts as written at the time of its latest record or of its name, whichever is
        earlier: a record may have any time. A batch that has only times ahead of now was written by
        a producer whose clock is wrong. It is older than the next batch in the log, so it counts as
        that one does, and is kept until a next one exists (failure F50).

        Args:
            time_ms: The retention keeps batches written at this time or later, in milliseconds
                since the Unix epoch.
            now_ms: The clock of the collector.

        Raises:
            CorruptData: A segment or a page that has to be read cannot be read.
        """
        undated: int | None = None  # the first of the undated batches that end right before `at`
        at = self.first_sequence
        recent = self.manifest.entries(max(self.first_sequence, self.index.end))
        for entry in chain(self.log.newer_segments(self.index, time_ms), recent):
            if entry.sequence != end_of_gap(at, self.gaps):
                undated = None  # The segments in between are older than the retention.
            at = entry.sequence + 1
            times = (entry.latest_ms, name_ms(entry.location))
            written_ms = min(filter(None, times), default=0)
            if written_ms > now_ms + AHEAD_MS:
                undated = entry.sequence if undated is None else undated
            elif written_ms >= time_ms:
                return entry.sequence if undated is None else undated
            else:
                undated = None
        is_last = end_of_gap(at, self.gaps) >= self.next_sequence
        return self.next_sequence if undated is None or not is_last else undated

    def find(self, location: str, since: int) -> int | None:
        """Return the sequence of a location from ``since`` on. Reads the segments from there."""
        found = self.log.find(self.index, location, max(since, self.first_sequence))
        return self.manifest.find(location) if found is None else found

    def starting_at(self, sequence: int) -> LogView:
        """Return the same entries from a later sequence on."""
        return replace(self, first_sequence=max(sequence, self.first_sequence))
