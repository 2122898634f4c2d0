"""The index of a log, ``<prefix>/_log.json``: segments, readers, and what is kept. Pure::

    {"version": 1, "queue": "01J5...", "end": 2816, "floor": 512, "readers": ["billing"],
     "levels": [[[1792, 2816, 1767225600000, 1767225700000, "0...-01J6....segment"]], ...],
     "lost": [], "retention_ms": null, "retention_bytes": null,
     "reader_expiry_ms": 604800000, "changes": 7}

* Entries from ``floor`` up to, not including, ``end`` are in segments, but for the ranges in
  ``lost``, which a client that knows no log took off the manifest before they were moved.
* ``levels[0]`` names segments, ``levels[n]`` pages, each of which names :data:`FAN` parts of the
  level below. So the index stays small however long the log is.
* What lies before ``floor`` is read and over, and may be deleted.

It changes by compare-and-swap alone, and ``end``, ``floor`` and ``changes`` never fall (decision
0038, ``tests/specification/Log.tla``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

from opendata_buffer.formats.batch import name_time_ms
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.cas import LARGEST, Sidecar, SidecarFields, is_number

FAN = 128
"""Parts that a page names. The index names less than twice as many of each level."""

MOST_READERS = 1_000
"""Names that an index takes."""

REMEMBERED = 2_048
"""Entries before the floor whose segments are kept: a reader that starts compares with them what a
writer has queued a second time."""

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
    move for ``reader_expiry_ms`` holds nothing. ``changes`` makes the bytes differ where nothing
    else does, because a store may compare versions by content.
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
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The object's bytes."""
        own: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        del own["others"], own["queue_id"]
        own["levels"] = [_rows(level) for level in self.levels]
        return INDEX.encode({"queue": self.queue_id, **own}, self.others)

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
        made = cls(
            queue_id=found.text("queue"),
            end=found.number("end"),
            floor=found.number("floor"),
            levels=tuple(_parts(found, "levels", each) for each in found.items("levels")),
            readers=tuple(readers),
            lost=tuple((first, end) for first, end in lost),
            retention_ms=found.number("retention_ms", None),
            retention_bytes=found.number("retention_bytes", None),
            reader_expiry_ms=found.number("reader_expiry_ms", DEFAULT_READER_EXPIRY_MS),
            changes=found.number("changes", 0),
            others=found.others(),
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
        return self._changed(end=part.end, lost=lost, levels=((*levels[0], part), *levels[1:]))

    def full_level(self) -> tuple[int, tuple[Part, ...]] | None:
        """A level that has too many parts, and the oldest of them, for a page of their own."""
        for number, level in enumerate(self.levels):
            if len(level) >= 2 * FAN:
                return number, level[:FAN]
        return None

    def with_page(self, number: int, page: Part) -> LogIndex:
        """The index with the oldest parts of a level replaced by a page of the level above."""
        levels = [*self.levels, *([()] if number + 1 == len(self.levels) else [])]
        levels[number] = levels[number][FAN:]
        levels[number + 1] = (*levels[number + 1], page)
        return self._changed(levels=tuple(levels))

    def with_reader(self, name: str) -> LogIndex:
        """The index with a reader; changed in any case, so that a collector notices."""
        return self._changed(readers=tuple(sorted({*self.readers, name})))

    def without_readers(self, names: Sequence[str]) -> LogIndex:
        """The index without some readers: they hold nothing any more."""
        return self._changed(readers=tuple(each for each in self.readers if each not in names))

    def with_floor(self, floor: int) -> LogIndex:
        """The index with a higher floor, without what lies before it."""
        forgotten = floor - REMEMBERED
        levels = tuple(
            tuple(part for part in level if part.end > forgotten) for level in self.levels
        )
        lost = tuple(each for each in self.lost if each[1] > forgotten)
        return self._changed(floor=max(self.floor, floor), levels=levels, lost=lost)

    def with_settings(self, **settings: int | None) -> LogIndex:
        """The index with another ``retention_ms``, ``retention_bytes`` or ``reader_expiry_ms``."""
        return self._changed(**settings)

    def _changed(self, **values: Any) -> LogIndex:
        return replace(self, changes=self.changes + 1, **values)


def floor_of(
    index: LogIndex, positions: Mapping[str, int], next_sequence: int, retained_from: int | None
) -> int:
    """The first sequence that has to be kept, by the next one of each reader that counts, and the
    first one within the retention, if there is one.

    A batch goes when all readers have acknowledged it and its retention is over. Without readers
    the retention decides alone; without both nothing goes.
    """
    bounds = [*positions.values(), *([] if retained_from is None else [retained_from])]
    return max(index.floor, min([*bounds, next_sequence])) if bounds else index.floor


def chain_of(spans: Iterable[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The spans that follow one another and together reach furthest, oldest first.

    Segments that lost a race overlap those that the index named, with the same entries. What begins
    at ``end`` or later the manifest has. Where nothing follows, what lies between is lost.
    """
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


def page_to_json(parts: Sequence[Part]) -> bytes:
    """The bytes of a page."""
    return PAGE.encode({"parts": _rows(parts)})


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


def end_of_gap(sequence: int, gaps: Sequence[tuple[int, int]]) -> int:
    """The first sequence from this one on that is in none of the gaps, which are in order."""
    for first, end in gaps:
        if first <= sequence < end:
            sequence = end
    return sequence
