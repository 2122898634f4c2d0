"""A queue as a log: the oldest entries of its manifest in segments, and one view over both.

Any process stores the oldest entries as ``<prefix>/_log/<first>-<end>-<ulid>.segment``, adds that
to the index, and then takes them off the manifest. A reader reads the manifest before the index:
what left it in between is in the index (decision 0038). The index is ``<prefix>/_log.json``::

    {"version": 1, "queue": "01J5...", "end": 2816, "floor": 512, "readers": ["billing"],
     "levels": [[[1792, 2816, 1767225600000, 1767225700000, "0...-01J6....segment"]], ...],
     "lost": [], "missing": {}, "reader_expiry_ms": 604800000, "changes": 7}

* Entries from ``floor`` up to, not including, ``end`` are in segments, but for the ranges in
  ``lost``, which a client that knows no log took off the manifest before they were moved.
* ``levels[0]`` names segments, ``levels[n]`` pages, each of which names :data:`FAN` parts of the
  level below. So the index stays small however long the log is.
* What lies before ``floor`` is read and over, and may be deleted.
* ``end``, ``floor`` and ``changes`` never fall (``tests/specification/Log.tla``).

An index that was restored from an old copy would hide the segments that were named since, and the
readers that registered since. Two things give it away (failure F46). The owner marker remembers
how many changes the index has had. And segments are stored that begin after its end: so before
anyone believes that entries are lost, it looks for them there.
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
"""Parts that a page names. The index names less than twice as many of each level."""

MOST_READERS = 1_000
"""Names that an index takes."""

REMEMBERED = 2_048
"""Entries before the floor whose segments are kept: a reader that starts compares with them what a
writer has queued a second time."""

AHEAD_MS = 60 * 60 * 1000
"""A time that is further ahead of the collector's clock does not say when a batch was written: the
clock of its producer is wrong."""

DEFAULT_READER_EXPIRY_MS = 7 * 24 * 60 * 60 * 1000

INDEX = Sidecar(
    "the index of the log",
    "Restore its latest version (bucket versioning), which has what the log is to keep.",
    max_bytes=1024 * 1024,
)
PAGE = Sidecar(
    "a page of the log's index",
    "Restore the object (bucket versioning): it names segments of the log.",
    max_bytes=1024 * 1024,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A segment, or a page of parts: the sequences from ``first`` up to, not including, ``end``.

    ``named_ms`` is the earliest time in the names of its batches, 0 where one has none;
    ``newest_ms`` is the latest time of a record. Milliseconds since the Unix epoch. ``name`` is
    the object's, below the folder of the log.
    """

    first: int
    end: int
    named_ms: int
    newest_ms: int
    name: str

    @classmethod
    def of(cls, entries: Manifest, name: str) -> Part:
        """The segment of these entries, of which there is at least one."""
        found = entries.entries()
        named = [name_ms(each.location) for each in found]
        newest = max(each.latest_ms for each in found)
        return cls(found[0].sequence, entries.next_sequence, min(named), max(newest, 0), name)

    @classmethod
    def page(cls, parts: Sequence[Part], name: str) -> Part:
        """The page that names these parts."""
        named, newest = min(p.named_ms for p in parts), max(p.newest_ms for p in parts)
        return cls(parts[0].first, parts[-1].end, named, newest, name)


def name_ms(location: str) -> int:
    """The time in the name of a batch; 0 for a name without the batch's own time."""
    return max(name_time_ms(location) or 0, 0)


@dataclass(frozen=True, slots=True)
class LogIndex:
    """One version of the index; see the module. Times in milliseconds.

    ``retention_ms`` and ``retention_bytes`` keep batches that all readers have acknowledged; with
    both, what one of them does not keep goes, and None of both keeps none. A reader that did not
    move for ``reader_expiry_ms`` holds nothing. ``missing`` says since when the collector has not
    found the position of a reader: without a position, it expires by this time. ``changes`` makes
    the bytes differ where nothing else does, because a store may compare versions by content.
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
        """The object's bytes."""
        levels = [_rows(level) for level in self.levels]
        return INDEX.encode_value(self, queue=self.queue_id, queue_id=None, levels=levels)

    @classmethod
    def from_json(cls, data: bytes) -> LogIndex:
        """Read the object's bytes; ``CorruptData`` where they are no such object."""
        found = INDEX.decode(data)
        readers, lost = found.items("readers"), found.items("lost", [])
        if not all(isinstance(each, str) for each in readers):
            raise found.wrong("readers", "a list of names")
        if not all(isinstance(each, list) and len(each) == 2 for each in lost) or not all(
            map(is_number, chain(*lost))
        ):
            raise found.wrong("lost", "a list of ranges")
        missing = found.mapping("missing", {})
        if not all(map(is_number, missing.values())):
            raise found.wrong("missing", "names with times in milliseconds")
        made = found.into(
            cls,
            queue_id=found.text("queue"),
            levels=tuple(_parts(found, "levels", each) for each in found.items("levels")),
            readers=tuple(readers),
            lost=tuple((first, end) for first, end in lost),
            missing=missing,
        )
        made._check(found)
        return made

    def _check(self, found: SidecarFields) -> None:
        """Parts follow one another, oldest first, and but for what was lost there is no gap."""
        at = None
        for part in self.parts():
            if at is not None and part.first != at and end_of_gap(at, self.lost) != part.first:
                raise found.wrong("levels", f"contiguous: {part.name!r} does not begin at {at}")
            at = part.end
        if at is not None and at != self.end and end_of_gap(at, self.lost) != self.end:
            raise found.wrong("end", f"{at}, where the last segment ends")

    def parts(self) -> list[Part]:
        """All parts that the index names itself, in order of their sequences."""
        return [*chain(*reversed(self.levels))]

    def with_segment(self, part: Part) -> LogIndex:
        """The index with one more segment; what is missing before it was taken by somebody."""
        lost = self.lost if part.first == self.end else (*self.lost, (self.end, part.first))
        levels = self.levels or ((),)
        return self.changed(end=part.end, lost=lost, levels=((*levels[0], part), *levels[1:]))

    def with_page(self, number: int, page: Part) -> LogIndex:
        """The index with the oldest parts of a level replaced by a page of the level above."""
        levels = [*self.levels, *([()] if number + 1 == len(self.levels) else [])]
        levels[number] = levels[number][FAN:]
        levels[number + 1] = (*levels[number + 1], page)
        return self.changed(levels=tuple(levels))

    def with_reader(self, name: str) -> LogIndex:
        """The index with a reader, whose position was written; changed in any case, so that a
        collector notices."""
        missing = {each: at for each, at in self.missing.items() if each != name}
        return self.changed(readers=tuple(sorted({*self.readers, name})), missing=missing)

    def without_readers(self, names: Sequence[str]) -> LogIndex:
        """The index without some readers: they hold nothing any more."""
        readers = tuple(each for each in self.readers if each not in names)
        missing = {each: at for each, at in self.missing.items() if each not in names}
        return self.changed(readers=readers, missing=missing)

    def with_floor(self, floor: int) -> LogIndex:
        """The index with a higher floor, without what lies before it."""
        forgotten = floor - REMEMBERED
        levels = tuple(
            tuple(part for part in level if part.end > forgotten) for level in self.levels
        )
        lost = tuple(each for each in self.lost if each[1] > forgotten)
        return self.changed(floor=max(self.floor, floor), levels=levels, lost=lost)

    def changed(self, **values: Any) -> LogIndex:
        """The index with other values."""
        return replace(self, changes=self.changes + 1, **values)


def floor_of(
    index: LogIndex, positions: Mapping[str, int], next_sequence: int, retained_from: int | None
) -> int:
    """The first sequence that has to be kept: the next one of a reader that counts, or the first
    one within the retention. Without both nothing goes."""
    bounds = [*positions.values(), *([] if retained_from is None else [retained_from])]
    return max(index.floor, min([*bounds, next_sequence])) if bounds else index.floor


def chain_of(spans: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The spans that follow one another and together reach furthest, oldest first. Segments that
    lost a race overlap others, with the same entries; the manifest has what begins at ``end``."""
    known = sorted(set(spans), reverse=True)
    reach: dict[int, tuple[int, int]] = {}  # from a first: how far a chain gets, by which end
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
    """The parts that a page names; ``CorruptData`` where the bytes are none."""
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
    """The first sequence from this one on that is in none of the gaps, which are in order."""
    for first, end in gaps:
        if first <= sequence < end:
            sequence = end
    return sequence


MAX_SEGMENT_BYTES = 1 << 28
_PAGES, _SEGMENTS = 64, 4  # that are kept in memory
_LISTED = 1_000  # parts in one page of a listing


def index_key(config: QueueConfig) -> str:
    """The key of the index of a log."""
    return f"{config.data_path_prefix}/_log.json"


def parts_folder(config: QueueConfig) -> str:
    """Where the segments of a log and the pages of its index are."""
    return f"{config.data_path_prefix}/_log/"


class SegmentGone(errors.CorruptData):
    """A segment that the index named is not there."""


class OldIndex(errors.CorruptData):
    """The index of a log was restored from an old copy: it lacks changes that were made to it."""


def span_of_segment(key: str) -> tuple[int, int] | None:
    """First sequence of a segment, and the one before which it ends; None of another object."""
    first, _, _ = key.rsplit("/", 1)[-1].partition("-")
    end = end_of_part(key)
    known = key.endswith(".segment") and first.isascii() and first.isdigit() and end != LARGEST
    return (int(first), end) if known and int(first) < end else None


def _begin_of_part(key: str) -> int:
    """The first sequence of a segment or a page, by its name; -1 of another object."""
    first = key.rsplit("/", 1)[-1].partition("-")[0]
    return int(first) if first.isascii() and first.isdigit() else -1


def end_of_part(key: str) -> int:
    """The sequence before which a segment or a page ends, by its name; LARGEST of another object.
    Where that is below the floor, it can be deleted."""
    _, end, *rest = (*key.rsplit("/", 1)[-1].split("-"), "", "")
    return int(end) if end.isascii() and end.isdigit() and rest[0] else LARGEST


class Log:
    """The index and the segments of one log, which is that of ``queue_id`` or, if that is empty,
    any. ``reader`` is the named reader that errors are for, if there is one. Not thread-safe."""

    most_entries = 1_024
    """Entries in the manifest of a log from which on the oldest ones are moved."""
    left_entries = 256
    """The newest entries stay in the manifest, where writers look for an append of theirs."""
    most_moved = 8_192
    """Entries of one segment."""

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
        # Not methods of this object: in a cycle with it they would outlive its use.
        read = partial(_read_part, store, config, reader)
        self._page: Callable[[Part], tuple[Part, ...]]
        self._page = lru_cache(_PAGES)(partial(read, PAGE.max_bytes, page_from_json))
        self._segment: Callable[[Part], Manifest]
        self._segment = lru_cache(_SEGMENTS)(partial(read, MAX_SEGMENT_BYTES, Manifest.parse))

    @property
    def last_seen(self) -> LogIndex | None:
        """The index as last read or written; None when none was seen."""
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
        # Not a method of this object: in a cycle with it the index would outlive its use.
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
        """Check that what is missing between the index and the manifest is in no segment.

        The marker may lag behind the index that it guards, so this looks at what is stored: one
        listing for each new gap.

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
                # A mover had stored the segment and not yet named it, while a v1 consumer took the
                # same entries.
                raise errors.TransientStorageError(
                    f"{self._object.key!r} in {self.store.url} was changed while it was read: try "
                    "again"
                )
            first, end = found[0][0], found[-1][1]
            what = f"ends at {index.end}, and segments of {first} to {end - 1} are stored"
            raise _old_index(self.store, self.config, what)
        self._true_gap = gap

    def stored_between(self, first: int, end: int) -> list[tuple[int, int, str]]:
        """Return the stored segments that have a sequence from ``first`` up to, not including,
        ``end``, oldest first: where each begins and ends, and its key."""
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
        """As :meth:`read`, for a process that has claimed nothing: one more read says whose index
        counts. One of the queue before would hide the first batches of the new one."""
        if self.read() is not None and not self.queue_id:
            claim = check_owner(self.store, self.config, runtime=self.runtime)
            self.queue_id = "" if claim is None else claim.queue_id
        return self.read()

    def need(self, *, marked: bool = False) -> LogIndex:
        """As :meth:`read`; ``InvalidInput`` where the queue is no log, ``CorruptData`` where the
        owner marker says that it is one (``marked``): then the index was lost (failure F45)."""
        found = self.read()
        if found is None and marked:
            raise self._gone()
        if found is None:
            raise errors.InvalidInput(
                f"the queue with manifest {self.config.manifest_path!r} in {self.store.url} is "
                "no log, and has no named readers. 'opendata-buffer readers enable "
                f"{queue_hint(self.store.url, self.config)}' makes it one, and says what "
                "changes."
            )
        return found

    def _gone(self) -> errors.CorruptData:
        words = queue_hint(self.store.url, self.config)
        return errors.CorruptData(
            f"{self._object.key!r} in {self.store.url} is gone. {INDEX.remedy} 'opendata-buffer "
            f"fsck {words} --repair' makes it anew. Where 'opendata-buffer readers enable "
            f"{words}' was interrupted, run it again."
        )

    def view(self, index: LogIndex, manifest: Manifest) -> LogView:
        """Return all that the log keeps, by a manifest and the index that was read after it;
        ``OldIndex`` as :meth:`check_gap`."""
        self.check_gap(index, manifest)
        path = self.config.manifest_path
        return LogView(self, index, manifest, index.floor, manifest.epoch, path)

    def change(self, decide: Callable[[LogIndex | None], LogIndex | None]) -> LogIndex:
        """Make a change that may be applied twice, and return the index that holds now.

        Notes in the owner marker how far the index got. Raises as :meth:`read`.
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
        """Move the oldest entries of a manifest into segments, if it is long. Returns the index,
        whose ``end`` says what may leave the manifest; None without a log."""
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
            # The object first: the index never names a segment that is not stored (failure F43).
            self.store.put(parts_folder(self.config) + part.name, entries.raw)
            if first > index.end:  # failure F42
                log.error(
                    "sequences %d to %d were taken off manifest %r by a consumer that knows no log "
                    "(the manifest has epoch %d): stop it, readers have lost them. It may go on as "
                    "a named reader.",
                    *(index.end, first - 1, self.config.manifest_path, manifest.epoch),
                )
            index = self._replace(index, index.with_segment(part))
        paged = self.with_pages(index)
        return index if paged is index else self._replace(index, paged)

    def _first_open(self, manifest: Manifest, first: int) -> int:
        """The first sequence of an open transaction, or the end. From there on nothing is moved:
        who ends a transaction looks for it in the manifest (transactions.py)."""
        if b"/message=" not in manifest.raw:
            return manifest.next_sequence
        names = enumerate(manifest.locations(), manifest.first_sequence)
        found = undecided(names, self.config.data_path_prefix).values()
        begins = (each.first_sequence for each in found if each.first_sequence >= first)
        return min(begins, default=manifest.next_sequence)

    def with_pages(self, index: LogIndex) -> LogIndex:
        """The index, which is not written, with pages, which are stored, for levels that are full;
        the same one where none is."""
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
        """Write the index if it is still the known one; what holds now, in any case."""
        return self.change(lambda before: new if before == known else before)

    def _name(self, first: int, end: int, kind: str) -> str:
        # By their sequences in order, so that a listing finds what lies before the floor.
        return f"{first:020d}-{end:020d}-{self.runtime.ulid()}.{kind}"

    def entries(self, index: LogIndex, start: int, limit: int) -> list[BatchDescriptor]:
        """Up to ``limit`` entries from ``start`` on that are in segments, without a gap.

        Several segments are read at the same time: a query that was away plans from a dozen.
        """
        found: list[BatchDescriptor] = []
        end = start + limit
        parts = self._parts_between(index, start, end)
        while chunk := [*islice(parts, _SEGMENTS)]:
            for segment in in_parallel(self.runtime, self._segment, chunk):
                found += segment.entries(start + len(found), end - start - len(found))
        return found

    def _parts_between(self, index: LogIndex, start: int, end: int) -> Iterator[Part]:
        """The segments of some sequences, up to a gap; raises the error of a page among them."""
        at = start
        for part in self._parts(index, lambda part: part.first < end and part.end > start):
            if part.first > at:
                return
            yield part
            at = part.end

    def find(self, index: LogIndex, location: str, since: int) -> int | None:
        """The sequence of a location in the segments from ``since`` on; None if none has it."""
        for part in self._parts(index, lambda part: part.end > since):
            if (found := self._segment(part).find(location)) is not None:
                return found
        return None

    def sequence_since(self, index: LogIndex, time_ms: int) -> int | None:
        """The first sequence in the segments from the floor on with a record of this time or later;
        None without."""
        fits = self._parts(index, lambda p: p.end > index.floor and p.newest_ms >= time_ms)
        if (part := next(fits, None)) is None:
            return None
        entries = self._segment(part).entries()
        return next((each.sequence for each in entries if each.latest_ms >= time_ms), part.end)

    def newer_segments(self, index: LogIndex, time_ms: int) -> Iterator[BatchDescriptor]:
        """Yield the entries from the floor on of those segments that have a record of this time or
        later, in order."""
        for part in self._parts(index, lambda p: p.end > index.floor and p.newest_ms >= time_ms):
            for entry in self._segment(part).entries():
                if entry.sequence >= index.floor:
                    yield entry

    def oldest_name_ms(self, index: LogIndex) -> int | None:
        """The earliest time in the names of batches from the segment on that the floor is in; None
        where none is there. Reads the page that it is in, if any."""
        found = []
        waiting = [(part, level) for level, parts in enumerate(index.levels) for part in parts]
        while waiting:
            part, level = waiting.pop()
            if part.end <= index.floor:
                continue
            if level and part.first < index.floor:
                waiting += [(each, level - 1) for each in self._page(part)]
            else:
                found.append(part.named_ms)
        return min(found, default=None)

    def segments(self, index: LogIndex) -> Iterator[tuple[Part, Manifest | errors.CorruptData]]:
        """Each segment from the floor on, or the error of one that cannot be read, or of a page."""
        for part, fault in self._walk(index, lambda part: part.end > index.floor):
            try:
                yield part, fault or self._segment(part)
            except errors.CorruptData as error:
                yield part, error

    def _parts(self, index: LogIndex, fits: Callable[[Part], bool]) -> Iterator[Part]:
        """The segments that fit, in order; raises the error of a page among them."""
        for part, fault in self._walk(index, fits):
            if fault is not None:
                raise fault
            yield part

    def _walk(
        self, index: LogIndex, fits: Callable[[Part], bool]
    ) -> Iterator[tuple[Part, errors.CorruptData | None]]:
        """The segments that fit, in order; of a page that fits and cannot be read its error."""
        levels = enumerate(index.levels)
        # The next one is the last.
        waiting = [(part, level) for level, parts in levels for part in reversed(parts)]
        while waiting:
            part, level = waiting.pop()
            if not fits(part):
                continue
            if not level:
                yield part, None
                continue
            try:
                waiting += [(each, level - 1) for each in reversed(self._page(part))]
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
    """What is in a segment or page; errors say which sequences it has, and what to do."""
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
    """A manifest, and the index that was read after it: the entries of both, as a manifest has
    them. ``first_sequence`` is the first that counts, of a reader or of the whole log."""

    log: Log
    index: LogIndex
    manifest: Manifest
    first_sequence: int
    epoch: int
    key: str
    check_current: Callable[[], None] = lambda: None
    """Raises where the view is out of date: its reader was fenced, or was passed by the floor."""
    missing: tuple[tuple[int, int], ...] = ()
    """Ranges whose objects are known to be gone."""

    @property
    def next_sequence(self) -> int:
        """What the next appended batch gets."""
        return self.manifest.next_sequence

    @property
    def entry_count(self) -> int:
        """Entries from ``first_sequence`` on, without those that are gone."""
        return self.count(self.first_sequence, self.next_sequence)

    def count(self, first: int, end: int) -> int:
        """Return how many entries there are from ``first`` up to, not including, ``end``."""
        gone = (min(end, last) - max(first, begin) for begin, last in self.gaps)
        return max(0, end - first - sum(each for each in gone if each > 0))

    @property
    def sealed(self) -> bool:
        """Whether the queue is closed for good."""
        return self.manifest.sealed

    @property
    def gaps(self) -> Sequence[tuple[int, int]]:
        """Ranges that are gone, in order: those in :attr:`lost`, and those without objects."""
        return self.lost if not self.missing else joined_ranges((*self.lost, *self.missing))

    @property
    def lost(self) -> Sequence[tuple[int, int]]:
        """Ranges that a client which knows no log took off the manifest."""
        first, end = self.manifest.first_sequence, self.index.end
        return (*self.index.lost, *([(end, first)] if first > end else []))

    def available_from(self, needed: int) -> int:
        """The first sequence from ``needed`` on that is kept and was not taken away."""
        return end_of_gap(max(needed, self.first_sequence), self.gaps)

    def entries(
        self, start: int | None = None, limit: int | None = None
    ) -> tuple[BatchDescriptor, ...]:
        """Up to ``limit`` entries from ``start`` on, up to a gap at most; reads what it needs."""
        at = max(self.first_sequence, start if start is not None else 0)
        # The index may have been read later, and have more by then.
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
        """Seconds since the first entry from ``start`` on was written, without a request; in a
        segment the age of the oldest name there."""
        at = self.available_from(start if start is not None else 0)
        if at >= self.manifest.first_sequence:
            return self.manifest.age_s(now_ms, at)
        found = next((each for each in self.index.parts() if each.first <= at < each.end), None)
        if found is None or not found.named_ms:
            return None
        return max(0, now_ms - found.named_ms) / 1000

    def since(self, time_ms: int) -> int:
        """The first sequence with a record of this time or later; the end if there is none."""
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
        that one does, and is kept while there is none (failure F50).

        Args:
            time_ms: The retention keeps what was written since then, milliseconds since the Unix
                epoch.
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
        """The sequence of a location from ``since`` on; reads the segments from there."""
        found = self.log.find(self.index, location, max(since, self.first_sequence))
        return self.manifest.find(location) if found is None else found

    def behind(self, sequence: int) -> LogView:
        """The same entries from a later sequence on."""
        return replace(self, first_sequence=max(sequence, self.first_sequence))
