"""What was fetched: values that travel and tell their size."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from opendata_buffer.consumer.fetch import ArrowBatch, ConsumedBatch, RawBatch
from opendata_buffer.formats.entries import Metadata

META = (Metadata(0, -1, b"m"),)
VALUES = pa.array([b"ab", b""], pa.binary())


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (ConsumedBatch([b"ab", b""], 3, "x", META), 2),
        (RawBatch(b"abc", 3, "x", META), 3),
        (ArrowBatch(VALUES, 3, "x", META), VALUES.nbytes),
    ],
    ids=lambda each: type(each).__name__,
)
def test_batches_travel_and_tell_their_size(
    value: ConsumedBatch | RawBatch | ArrowBatch, nbytes: int
) -> None:
    assert pickle.loads(pickle.dumps(value)) == value
    assert value.nbytes == nbytes
