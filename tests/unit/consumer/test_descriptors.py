"""Values a consumer hands out: small, immutable, and able to travel."""

from __future__ import annotations

import dataclasses

import pytest

from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.formats.manifest import Metadata, QueueEntry

META = (Metadata(0, -1, b"m"),)


def test_a_descriptor_is_a_queue_entry_and_maybe_a_size() -> None:
    entry = QueueEntry(3, "ingest/x.batch", META)
    assert BatchDescriptor.of(entry) == BatchDescriptor(3, "ingest/x.batch", META, None)
    assert BatchDescriptor.of(entry, 10).size == 10


def test_a_descriptor_never_changes() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BatchDescriptor(3, "x").sequence = 4  # type: ignore[misc]
    assert len({BatchDescriptor(3, "x"), BatchDescriptor(3, "x")}) == 1
