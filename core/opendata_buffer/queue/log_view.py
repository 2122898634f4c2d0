"""View a manifest and the index that was read after it as one sequence of entries.

A consumer of a log reads its old entries from segments and its new ones from the manifest.
:class:`LogView` hides the difference::

    segments     512 to 2815     gone: 600 to 609
    manifest    2816 to 3100

    view.entries(2800, 50)       2800 to 2849: from a segment, then from the manifest
    view.available_from(605)     610

The manifest has to be read first. An entry that left it in between is then in the index, and the
view ends where the manifest did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from opendata_buffer.errors import CorruptData
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest, first_undated
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex, end_of_gap, joined_ranges
from opendata_buffer.queue.log_segments import SegmentGone


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

    @classmethod
    def of(cls, log: Log, index: LogIndex, manifest: Manifest) -> LogView:
        """View everything that a log keeps.

        Args:
            log: The log.
            index: Its index, read after the manifest.
            manifest: Its manifest.

        Returns:
            The view, from the log start offset (``floor``) on.

        Raises:
            OldIndex: As :meth:`.Log.check_gap`.
        """
        log.check_gap(index, manifest)
        path = log.config.manifest_path
        return cls(log, index, manifest, index.floor, manifest.epoch, path)

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
                found = self.log.segments.entries(self.index, at, limit)
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
        """Return the first sequence with a record of this time or later, or else the end.

        An entry without a time counts as being as late as the next entry that has one, as in
        :meth:`.Manifest.since`.
        """
        found = self.log.segments.sequence_since(self.index, time_ms)
        if found is None or found >= self.index.end:
            at = max(self.first_sequence, self.index.end)
            later = (e.sequence for e in self.manifest.entries(at) if e.latest_ms >= time_ms)
            found = next(later, self.next_sequence)
        found = min(max(found, self.first_sequence), self.next_sequence)
        try:
            return first_undated(self, found)
        except CorruptData:
            return found  # A segment before this place is damaged: readers past it continue.

    def find(self, location: str, since: int) -> int | None:
        """Return the sequence of a location from ``since`` on. Reads the segments from there."""
        found = self.log.segments.find(self.index, location, max(since, self.first_sequence))
        return self.manifest.find(location) if found is None else found

    def starting_at(self, sequence: int) -> LogView:
        """Return the same entries from a later sequence on."""
        return replace(self, first_sequence=max(sequence, self.first_sequence))
