"""What a query does with a batch that cannot be delivered: one value, which its tasks ask. Pure.

Three things may be wrong with a queued batch, and each has the option that decides about it:

============  ======================  ==========================================
its object    error                   option
============  ======================  ==========================================
is gone       ``BatchMissing``        ``failOnDataLoss``: fail or pass it by
is corrupt    ``BatchUnreadable``     ``corruptBatches``: fail or quarantine it
is foreign    ``ForeignLocation``     ``allowForeignLocations``: fail or read it
============  ======================  ==========================================
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from opendata_buffer.errors import BatchMissing, BatchUnreadable, PoisonBatch

__all__ = ["Action", "BadBatchPolicy"]


class Action(Enum):
    """What to do with one batch."""

    FAIL = "fail"
    """End the query; the batch stays queued."""

    PASS_BY = "pass by"
    """Go on behind it; there is nothing left of it to keep."""

    QUARANTINE = "quarantine"
    """Copy its object and a report to the quarantine, then go on behind it."""


_HINTS = {
    BatchMissing: "A query passes it by with the option failOnDataLoss set to false.",
    BatchUnreadable: (
        "A query copies it to the quarantine and goes on with the option corruptBatches set to "
        "quarantine."
    ),
}


@dataclass(frozen=True, slots=True)
class BadBatchPolicy:
    """What to do with a batch whose object is gone or corrupt; a foreign one always fails."""

    missing: Action = Action.FAIL
    corrupt: Action = Action.FAIL

    @property
    def checks_first(self) -> bool:
        """Whether a batch is checked to its end before its first row is handed to Spark.

        A batch that is passed by must not have been read in part: its repaired copy would
        repeat those rows.
        """
        return self.corrupt is not Action.FAIL

    def action(self, error: PoisonBatch) -> Action:
        """What to do with the batch the error is about; on FAIL the error tells the options."""
        action = Action.FAIL
        if isinstance(error, BatchMissing):
            action = self.missing
        elif isinstance(error, BatchUnreadable):
            action = self.corrupt
        hint = _HINTS.get(type(error), "")
        if action is Action.FAIL and hint not in str(error):
            error.args = (f"{error} {hint}",)
        return action
