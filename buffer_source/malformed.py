"""What becomes of malformed records of a task, by the option ``mode``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from buffer_source.columns import Piece
from opendata_buffer import metrics
from opendata_buffer.errors import MalformedRecord
from opendata_buffer.values.options import DROPMALFORMED, FAILFAST, ValueOptions

__all__ = ["Malformed"]

log = logging.getLogger(__name__)

_HEAD = 64
"""Bytes of a record that an error shows."""


class Malformed:
    """Keeps malformed records, leaves them out, or raises; counts them.

    Args:
        options: What the query asked for.
    """

    def __init__(self, options: ValueOptions) -> None:
        self._mode = options.mode

    def settle(
        self,
        rows: pa.RecordBatch,
        piece: Piece,
        malformed: Mapping[int, str],
        headers: Sequence[int] = (),
    ) -> pa.RecordBatch:
        """The rows that are delivered.

        Args:
            rows: Of the piece, one for each record.
            piece: Where they come from.
            malformed: By row, why its record is malformed.
            headers: Rows of records that are none.

        Raises:
            MalformedRecord: There is one, and mode is FAILFAST.
        """
        if not malformed:
            return _without(rows, headers)
        row = min(malformed)
        if self._mode == FAILFAST:
            raise MalformedRecord(
                piece.batch.sequence,
                piece.begin + row,
                piece.batch.location,
                malformed[row],
                piece.values[row].as_py()[:_HEAD],
            )
        metrics.records_malformed.add(len(malformed))
        if self._mode != DROPMALFORMED:
            return _without(rows, headers)
        metrics.records_dropped.add(len(malformed))
        log.warning(
            "%d malformed records of batch %d at %r left out, the first is record %d: %s",
            len(malformed),
            piece.batch.sequence,
            piece.batch.location,
            piece.begin + row,
            malformed[row],
        )
        return _without(rows, [*malformed, *headers])


def _without(rows: pa.RecordBatch, dropped: Sequence[int]) -> pa.RecordBatch:
    if not dropped:
        return rows
    kept = np.ones(rows.num_rows, np.bool_)
    kept[list(dropped)] = False
    return rows.filter(pa.array(kept))
