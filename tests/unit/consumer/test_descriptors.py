"""Values a consumer hands out: small, immutable, and able to travel."""

from __future__ import annotations

import dataclasses
import pickle

import pyarrow as pa
import pytest

from opendata_buffer.consumer.descriptors import (
    ArrowBatch,
    BatchDescriptor,
    ConsumedBatch,
    RawBatch,
)
from opendata_buffer.formats.manifest import Metadata, QueueEntry

META = (Metadata(0, -1, b"m"),)
VALUES = pa.array([b"ab", b""], pa.binary())


def test_a_descriptor_is_a_queue_entry_and_maybe_a_size() -> None:
    entry = QueueEntry(3, "ingest/x.batch", META)
    assert BatchDescriptor.of(entry) == BatchDescriptor(3, "ingest/x.batch", META, None)
    assert BatchDescriptor.of(entry, 10).size == 10


def test_a_descriptor_never_changes() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BatchDescriptor(3, "x").sequence = 4  # type: ignore[misc]
    assert len({BatchDescriptor(3, "x"), BatchDescriptor(3, "x")}) == 1


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
