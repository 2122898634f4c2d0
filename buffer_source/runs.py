"""Metadata ranges of a batch as runs of rows. Pure.

A range is a run length: it says something about every record from its start to the next one's.
As runs, ranges become columns by decoding an Arrow run-end array, never a Python row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from opendata_buffer.formats.manifest import Metadata

__all__ = ["Runs"]


@dataclass(frozen=True, slots=True)
class Runs:
    """``values[i]`` holds up to row ``ends[i]``, exclusive, and from where the run before ends."""

    ends: list[int]
    values: list[Metadata | None]

    @classmethod
    def of(cls, ranges: Sequence[Metadata], count: int) -> Runs:
        """Cut the ranges to the rows there are.

        A range reaches to where the next one starts, the last to the end. Rows before the
        first range, and all rows without one, have none. Starts beyond the end are legal and
        cover nothing; of ranges out of order the later in the list wins where they overlap.
        """
        starts: list[int] = []
        values: list[Metadata | None] = []
        if not ranges or ranges[0].start_index > 0:
            starts.append(0)
            values.append(None)
        for each in ranges:
            # Ranges that begin at or after this one are covered by it from here on.
            while starts and starts[-1] >= each.start_index:
                starts.pop()
                values.pop()
            starts.append(each.start_index)
            values.append(each)
        visible = sum(1 for start in starts if start < count)
        return cls([*starts[1:visible], count], values[:visible])

    def cut(self, start: int, stop: int) -> Runs:
        """The runs of rows [start, stop), counted from ``start``."""
        first = bisect_right(self.ends, start)
        last = bisect_right(self.ends, stop - 1)
        ends = [*(end - start for end in self.ends[first:last]), stop - start]
        return Runs(ends, self.values[first : last + 1])

    def fit(self, start: int, limit: int, most_bytes: int) -> int:
        """The largest end in (start, limit] with at most so many bytes of payload on its rows."""
        end, left = start, most_bytes
        for run in range(bisect_right(self.ends, start), len(self.ends)):
            value = self.values[run]
            size = 0 if value is None else len(value.payload)
            stop = min(limit, self.ends[run])
            if size * (stop - end) > left:
                return max(start + 1, end + left // size)
            left -= size * (stop - end)
            end = stop
            if end == limit:
                break
        return end

    def expand(self, values: list[Any], dtype: pa.DataType) -> pa.Array:
        """One array with ``values[i]`` on every row of run ``i``."""
        import pyarrow.compute as pc  # 40 ms, and who plans a query makes no rows

        encoded = pa.RunEndEncodedArray.from_arrays(
            pa.array(self.ends, pa.int32()), pa.array(values, dtype)
        )
        return pc.run_end_decode(encoded)
