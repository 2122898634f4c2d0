"""Read, list and store the segments and pages of a log.

An index names many segments: some itself, most through pages. :class:`Segments` finds the ones that
a caller needs and reads only those. For example, the entries from sequence 1500 on::

    index   levels[1]  page     0 to 131072    read: one of its segments has 1500
            levels[0]  segment  131072 to ...  read after those of the page
    page               segment  0 to 1024      skipped
                       segment  1024 to 1792   read

A segment never changes, so the last few are kept in memory, and many pages.

Things that can go wrong: a segment or a page is gone, or has garbage in it. The error names its
sequences, and says how a reader can continue after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import islice
from typing import TypeVar

from opendata_buffer import errors
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import (
    MAX_SEGMENT_BYTES,
    PAGE,
    Part,
    begin_of_part,
    page_from_json,
    page_to_json,
    part_name,
    parts_folder,
    span_of_segment,
)
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.stores.base import read_bytes

T = TypeVar("T")

_PAGES = 64
"""Pages that a log keeps in memory."""
_SEGMENTS = 4
"""Segments that a log keeps in memory, and reads at the same time."""
_LISTED = 1_000
"""Objects in one page of a listing."""


class SegmentGone(errors.CorruptData):
    """A segment that the index names does not exist."""


class Segments:
    """The segments and pages of one log.

    Not thread-safe: the owner of this object must make its calls one after another.

    Args:
        store: Where the log is.
        config: The log's queue.
        runtime: Clock and threads.
        reader: Name of the reader to whom errors give advice; empty without one.
    """

    most_entries = 8_192
    """Largest number of entries in one segment."""

    def __init__(
        self, store: CasStore, config: QueueConfig, runtime: Runtime, reader: str = ""
    ) -> None:
        self.store = store
        self._runtime = runtime
        self._folder = parts_folder(config)
        # Not methods of this object: the reference cycle would keep large segments in memory until
        # the next run of Python's garbage collector.
        read = partial(_read_part, store, config, reader)
        self._page: Callable[[Part], tuple[Part, ...]]
        self._page = lru_cache(_PAGES)(partial(read, PAGE.max_bytes, page_from_json))
        self._segment: Callable[[Part], Manifest]
        self._segment = lru_cache(_SEGMENTS)(partial(read, MAX_SEGMENT_BYTES, Manifest.parse))

    def add(self, entries: Manifest) -> Part:
        """Store entries, of which there must be at least one, as a segment that no index names."""
        name = self._name(entries.first_sequence, entries.next_sequence, "segment")
        part = Part.of(entries, name)
        self.store.put(self._folder + name, entries.raw)
        return part

    def with_pages(self, index: LogIndex) -> LogIndex:
        """Return the index with pages instead of the oldest parts of each level that is full.

        The pages are stored, the index is not written. Returns the same index if no level is full.
        """
        while (full := index.full_level()) is not None:
            level, parts = full
            page = Part.page(parts, self._name(parts[0].first, parts[-1].end, "page"))
            self.store.put(self._folder + page.name, page_to_json(parts))
            index = index.with_page(level, page)
        return index

    def _name(self, first: int, end: int, kind: str) -> str:
        return part_name(first, end, self._runtime.ulid(), kind)

    def stored_between(self, first: int, end: int) -> list[tuple[int, int, str]]:
        """Return the stored segments that contain a sequence of a range, oldest first.

        Args:
            first: First sequence of the range.
            end: End of the range. It is not in the range.

        Returns:
            The first sequence, the end, and the key of each segment.
        """
        after = f"{self._folder}{max(0, first - self.most_entries):020d}"
        found: list[tuple[int, int, str]] = []
        while True:
            page = self.store.list(self._folder, start_after=after, limit=_LISTED)
            for info in page.objects:
                span = span_of_segment(info.key)
                if span is not None and span[0] < end and span[1] > first:
                    found.append((*span, info.key))
            if not page.truncated or begin_of_part(page.objects[-1].key) >= end:
                return sorted(found)
            after = page.objects[-1].key

    def entries(self, index: LogIndex, start: int, limit: int) -> list[BatchDescriptor]:
        """Return up to ``limit`` entries from ``start`` on in segments, up to a gap.

        Several segments are read at the same time: a query that was stopped for a while plans from
        a dozen.
        """
        found: list[BatchDescriptor] = []
        end = start + limit
        parts = self._parts_between(index, start, end)
        while chunk := [*islice(parts, _SEGMENTS)]:
            for segment in in_parallel(self._runtime, self._segment, chunk):
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

    def newer_entries(self, index: LogIndex, time_ms: int) -> Iterator[BatchDescriptor]:
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

    def each(self, index: LogIndex) -> Iterator[tuple[Part, Manifest | errors.CorruptData]]:
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
        what = "is gone" if gone else f"cannot be read: {error.problem}"
        raise (SegmentGone if gone else errors.CorruptData)(
            f"{key!r} in {store.url} {what}. It names sequences {part.first} to {part.end - 1} of "
            "the log: readers that are before or past them continue",
            Hint(
                Action.RESET_PAST_SEGMENT if reader else Action.RESET_READERS_PAST_SEGMENT,
                queue_name(store.url, config),
                sequence=part.end,
                readers=(reader,) if reader else (),
            ),
        ) from error
