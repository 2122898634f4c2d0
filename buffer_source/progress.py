"""What one run of a query has planned and passed by, for its progress and the metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from opendata_buffer import metrics
from opendata_buffer.consumer.fetch import BatchDescriptor

__all__ = ["Progress"]

log = logging.getLogger(__name__)


class Progress:
    """Counts of one run. All start at 0 and only ``quarantined`` may fall.

    Attributes:
        batches: Batches given to tasks.
        bytes: Their stored bytes; None once the size of one was not known. Sizes are looked up
            for ``maxBytesPerTrigger`` and for large micro-batches, not for their own sake.
        repeats: Batches left out because their writer had repeated a transaction.
        missing: Batches passed by because their objects are gone.
        quarantined: Batches in the queue's quarantine when it was last looked at.
        retries: Requests of the driver that were made again.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.bytes: int | None = 0
        self.repeats = 0
        self.missing = 0
        self.quarantined = 0
        self.retries = 0

    def planned(
        self, batches: int, size: int | None, missing: int, repeats: Sequence[BatchDescriptor]
    ) -> None:
        """A micro-batch was planned.

        Args:
            batches: Batches that are read.
            size: Stored bytes of them together, if known.
            missing: Batches passed by because they are gone.
            repeats: Batches left out as repeats.
        """
        self.batches += batches
        self.bytes = None if size is None or self.bytes is None else self.bytes + size
        self.missing += missing
        self.repeats += len(repeats)
        if repeats:
            metrics.repeats_dropped.add(len(repeats))
            log.warning(
                "left out %d of %d batches, sequences %d to %d: their writer repeated "
                "transactions that were read already",
                len(repeats),
                batches + missing + len(repeats),
                repeats[0].sequence,
                repeats[-1].sequence,
            )

    def retried(self) -> None:
        """A request is about to be made again."""
        self.retries += 1

    def to_json(self) -> dict[str, Any]:
        """The counts as Spark shows them."""
        return {
            "batches": self.batches,
            "bytes": self.bytes,
            "droppedRepeats": self.repeats,
            "missing": self.missing,
            "quarantined": self.quarantined,
            "retries": self.retries,
        }
