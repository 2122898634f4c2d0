"""Decide from which sequence on a log keeps its batches.

A batch of a log is kept until every reader has acknowledged it, and then for as long as the
retention says. The retention is a time, a size, or both::

    readers at               1200, 1350
    retention keeps from     1100
    log start offset         1100      the lowest of them; batches before it may be deleted

The collector (:mod:`opendata_buffer.gc`) asks, and raises the log start offset (``floor``).

What can go wrong: the clock of a producer is wrong. Its batches must neither vanish early nor stay
for years (failure F50).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from opendata_buffer.queue.log_index import LogIndex, end_of_gap
from opendata_buffer.queue.log_parts import name_ms
from opendata_buffer.queue.log_view import LogView

AHEAD_MS = 60 * 60 * 1000
"""Times further ahead of the collector's clock are ignored: the producer's clock is wrong."""


def floor_of(
    index: LogIndex, positions: Mapping[str, int], next_sequence: int, retained_from: int | None
) -> int:
    """Find the first sequence that has to be kept.

    Args:
        index: The index.
        positions: The next sequence of each reader that has not expired.
        next_sequence: The end of the log.
        retained_from: The first sequence within the retention; None without a retention.

    Returns:
        The log start offset, which never falls.
    """
    bounds = [*positions.values(), *([] if retained_from is None else [retained_from])]
    return max(index.floor, min([*bounds, next_sequence])) if bounds else index.floor


def kept_since(view: LogView, time_ms: int, now_ms: int) -> int:
    """Find the first sequence that a retention keeps.

    A batch counts as written at the time of its latest record or of its name, whichever is
    earlier: a record may have any time. A batch that has only times ahead of now was written by
    a producer whose clock is wrong. It is older than the next batch in the log, so it counts as
    that one does, and is kept until a next one exists (failure F50).

    Args:
        view: The log.
        time_ms: The retention keeps batches written at this time or later, in milliseconds
            since the Unix epoch.
        now_ms: The clock of the collector, in milliseconds since the Unix epoch.

    Returns:
        The sequence, or the end of the log if the retention keeps nothing.

    Raises:
        CorruptData: A segment or a page that has to be read cannot be read.
    """
    undated: int | None = None  # the first of the undated batches that end right before `at`
    at = view.first_sequence
    recent = view.manifest.entries(max(view.first_sequence, view.index.end))
    for entry in chain(view.log.segments.newer_entries(view.index, time_ms), recent):
        if entry.sequence != end_of_gap(at, view.gaps):
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
    is_last = end_of_gap(at, view.gaps) >= view.next_sequence
    return view.next_sequence if undated is None or not is_last else undated


def full_since(sizes: Mapping[int, int], wanted: int) -> int | None:
    """Return the latest time since which batches have the ``wanted`` bytes.

    Args:
        sizes: Bytes by the minute since the Unix epoch.
        wanted: Number of bytes.

    Returns:
        Milliseconds since the Unix epoch; None if all batches together have fewer bytes.
    """
    for minute in sorted(sizes, reverse=True):
        wanted -= sizes[minute]
        if wanted <= 0:
            # Add a minute, because the records of a batch are somewhat older than its name.
            return (minute - 1) * 60_000
    return None
