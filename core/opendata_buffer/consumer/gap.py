"""Entries that left a queue before this reader got them: an error, or a loss that was allowed."""

from __future__ import annotations

import logging

from opendata_buffer.consumer.frontier import Frontier
from opendata_buffer.errors import DataLoss
from opendata_buffer.formats.manifest import Manifest

__all__ = ["behind_gap", "report_loss"]

log = logging.getLogger(__name__)


def behind_gap(
    frontier: Frontier, manifest: Manifest, key: str, *, allowed: bool, cause: str
) -> Frontier:
    """Where a reader goes on: where it is, or where the queue begins by now (failure F28).

    Entries that left the queue behind the reader's cursor are no loss: they were handed out.

    Args:
        frontier: Of the reader.
        manifest: As it is now.
        key: The manifest's.
        allowed: Go on behind a gap, with a warning.
        cause: How entries can have gone, in a sentence.

    Raises:
        DataLoss: There is a gap, and none is allowed.
    """
    needed, oldest = frontier.next_hand_out, manifest.first_sequence
    if oldest <= needed:
        return frontier
    if not allowed:
        raise DataLoss(key, needed, oldest, cause)
    report_loss(key, needed, oldest)
    return frontier.jump(oldest)


def report_loss(key: str, needed: int, oldest: int) -> None:
    """Warn that entries from ``needed`` up to ``oldest`` are passed by."""
    log.warning(
        "data loss allowed: %s starts at %d, sequences %d to %d are gone unread",
        key,
        oldest,
        needed,
        oldest - 1,
    )
