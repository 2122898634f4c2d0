"""The index of a log as a value: its bytes, and the result of each change.

The index names the segments, the readers of the log, and the first entry that is kept.
Each change returns a new index, and counts itself::

    index = LogIndex.from_json(data)            # end 1792, changes 6
    index = index.with_segment(part)            # end 2816, changes 7
    index.to_json()

:mod:`opendata_buffer.queue.log` has the fields, reads the index, and writes it with
compare-and-swap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.log_parts import Part, parts_in, rows_of
from opendata_buffer.queue.sidecar import Sidecar, SidecarFields, is_number

FAN = 128
"""Parts that one page names. The index itself names fewer than twice as many at each level."""

MOST_READERS = 1_000
"""Largest number of readers in an index."""

REMEMBERED = 2_048
"""Number of entries before the floor whose segments are kept.

A reader that starts compares new entries with these to recognise those that a writer has queued
twice.
"""

DEFAULT_READER_EXPIRY_MS = 7 * 24 * 60 * 60 * 1000

INDEX = Sidecar(
    "the index of the log",
    "Restore its latest version (bucket versioning): it says what the log keeps.",
    max_bytes=1024 * 1024,
)


def index_key(config: QueueConfig) -> str:
    """Return the key of the index of a log."""
    return f"{config.data_path_prefix}/_log.json"


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
        retention_ms: Milliseconds for which batches are kept even after all readers have
            acknowledged them.
        retention_bytes: Keep up to this many bytes of acknowledged batches. With both limits, a
            batch is kept while it is within both. With neither, it may be deleted once it is
            acknowledged.
        reader_expiry_ms: A reader that has not moved for this time, in milliseconds, no longer
            holds batches.
        changes: Number of changes of the index. It also makes every version differ in its bytes,
            because a store may compare versions by content.
        missing: By the name of a reader without a position, when the collector first missed it.
        v1: The prefix of each reader that is a v1 consumer, by its name
            (:mod:`opendata_buffer.queue.v1_feed`). A name that is not in ``readers`` has expired.
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
    v1: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the bytes of the index."""
        levels = [rows_of(level) for level in self.levels]
        v1 = {**self.v1} or None
        return INDEX.encode_value(self, queue=self.queue_id, queue_id=None, levels=levels, v1=v1)

    @classmethod
    def from_json(cls, data: bytes) -> LogIndex:
        """Parse the bytes of an index.

        Args:
            data: The bytes of the object.

        Returns:
            The index.

        Raises:
            CorruptData: They are not an index, its parts do not follow one another, or a later
                version wrote them.
        """
        found = INDEX.decode(data)
        readers, lost = found.items("readers"), found.ranges("lost")
        if not all(isinstance(name, str) for name in readers):
            raise found.wrong("readers", "a list of names")
        missing = found.mapping("missing", {})
        if not all(map(is_number, missing.values())):
            raise found.wrong("missing", "names with times in milliseconds")
        v1 = found.mapping("v1", {})
        if not all(isinstance(prefix, str) for prefix in v1.values()):
            raise found.wrong("v1", "names with prefixes")
        made = found.into(
            cls,
            queue_id=found.text("queue"),
            levels=tuple(parts_in(found, "levels", level) for level in found.items("levels")),
            readers=tuple(readers),
            lost=lost,
            missing=missing,
            v1=v1,
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

    def full_level(self) -> tuple[int, tuple[Part, ...]] | None:
        """Return the lowest level that has too many parts, and its oldest parts, for a page."""
        for number, level in enumerate(self.levels):
            if len(level) >= 2 * FAN:
                return number, level[:FAN]
        return None

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

    def with_v1_reader(self, name: str, prefix: str) -> LogIndex:
        """Return the index with a v1 consumer as a reader; see :meth:`with_reader`."""
        return replace(self.with_reader(name), v1={**self.v1, name: prefix})

    def without_v1_reader(self, name: str) -> LogIndex:
        """Return the index without a v1 consumer that was deleted."""
        v1 = {reader: prefix for reader, prefix in self.v1.items() if reader != name}
        return replace(self.without_readers([name]), v1=v1)

    def without_readers(self, names: Sequence[str]) -> LogIndex:
        """Return the index without some readers, which then hold nothing.

        A v1 consumer that has expired stays in ``v1``, so that its queue is not forgotten.
        """
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
