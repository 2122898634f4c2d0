"""Records that are cut into as many segments each, to be looked at a segment of all at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opendata_buffer.values.spans import Bytes, Spans

__all__ = ["Segments"]

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_SPACE = 0x20


class Segments:
    """The segments of some records.

    Arrow is told that every segment is a string of one array, which takes no copy, and asked for
    the same segment of all records.

    Args:
        source: The bytes.
        edges: A line for each record: where its first segment begins, and where each one ends.
            They never go back, also from one line to the next: this is memory that Arrow reads.
    """

    def __init__(self, source: Bytes, edges: npt.NDArray[np.int32]) -> None:
        self._source = source
        self._edges = edges
        self._count = len(edges)
        # What stands between two records is an item, too; behind the last one there is none.
        items = max(0, edges.size - 1)
        self._items = pa.Array.from_buffers(
            pa.string(), items, [None, pa.py_buffer(edges), source.buffer]
        )
        self._first = np.arange(0, edges.size, edges.shape[1])

    def __len__(self) -> int:
        """How many records there are."""
        return self._count

    def texts(self, numbers: Sequence[int]) -> list[pa.StringArray]:
        """These segments of all records, an array for each; the records must be UTF-8."""
        # Slices of one array would do, but pc.if_else of Arrow 18 reads slices of strings wrongly.
        return [self._taken([number]) for number in numbers]

    def spans(self, number: int, texts: pa.StringArray | None = None) -> Spans:
        """Where a segment stands in all records; ``texts`` are what :meth:`texts` said."""
        begin = self._edges[:, number].astype(np.int64)
        return Spans(self._source, begin, self._edges[:, number + 1] - begin, texts)

    def filter(self, good: Mask) -> Segments:
        """Those of some of the records."""
        return Segments(self._source, self._edges[good])

    def are(self, numbers: Sequence[int], texts: Sequence[bytes]) -> Mask | None:
        """Which records have these texts as these segments, of the same length; None: all."""
        data = self._taken(numbers).buffers()[2]
        expected = b"".join(each * self._count for each in texts)
        if not expected or data.slice(0, len(expected)).equals(pa.py_buffer(expected)):
            return None
        found = np.frombuffer(data, np.uint8)
        good = np.ones(self._count, np.bool_)
        at = 0
        for each in texts:
            block = found[at : at + len(each) * self._count].reshape(self._count, len(each))
            good &= (block == np.frombuffer(each, np.uint8)).all(axis=1)
            at += block.size
        return good

    def blank(self, number: int) -> Mask | None:
        """Which records have nothing but spaces as this segment; None: all."""
        length = self._edges[:, number + 1] - self._edges[:, number]
        if not length.any():
            return None
        found = np.frombuffer(self._taken([number]).buffers()[2], np.uint8)[: length.sum()]
        other = np.flatnonzero(found != _SPACE)
        if not len(other):
            return None
        good = np.ones(self._count, np.bool_)
        good[np.searchsorted(np.cumsum(length), other, "right")] = False
        return good

    def _taken(self, numbers: Sequence[int]) -> pa.StringArray:
        places = np.array(numbers, np.int64)[:, None] + self._first
        return self._items.take(pa.array(places.ravel()))
