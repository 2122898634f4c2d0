"""Byte streams into a queue; topics are in test_produce.py."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.cli.intake import Intake, Produced, into_queue
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest, QueueEntry
from opendata_buffer.producer.producer import Producer
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore


def data_of(store: MemoryStore, key: str) -> bytes:
    got = store.get(key)
    assert isinstance(got, Blob)
    return got.data


def entries_of(store: MemoryStore) -> tuple[QueueEntry, ...]:
    return Manifest.parse(data_of(store, "ingest/manifest")).entries()


def records_of(store: MemoryStore) -> list[bytes]:
    return [
        record
        for entry in entries_of(store)
        for record in decode_batch(data_of(store, entry.location))
    ]


def run(
    store: MemoryStore, *chunks: bytes, metadata: bytes = b"", **settings: Any
) -> tuple[Produced, list[tuple[int, int]]]:
    # What was read by several calls makes one batch, however slow the machine.
    config = ProducerConfig(store="memory://unused", **{"flush_interval_ms": 60_000, **settings})
    told: list[tuple[int, int]] = []
    pieces = iter([*chunks, b""])
    with Producer(config, store=store) as producer:
        intake = Intake(into_queue(producer), config, metadata, lambda *each: told.append(each))
        intake.run(lambda limit: next(pieces))
    intake.settle()
    return intake.durable, told


def test_lines_become_records_in_order() -> None:
    store = MemoryStore()
    durable, _ = run(store, b"one\ntw", b"o\n\nthree")
    assert records_of(store) == [b"one", b"two", b"", b"three"]
    assert durable == Produced(records=4, batches=1, bytes=11)


def test_no_input_is_no_batch() -> None:
    store = MemoryStore()
    durable, told = run(store)
    assert (durable, told) == (Produced(), [])


def test_every_call_carries_the_metadata() -> None:
    store = MemoryStore()
    run(store, b"1\n2\n", b"3\n", metadata=b"topic")
    (entry,) = entries_of(store)
    # One range for both calls when they were made in one millisecond.
    ranges = [(each.start_index, each.payload) for each in entry.metadata]
    assert ranges in ([(0, b"topic")], [(0, b"topic"), (2, b"topic")])


def test_the_flush_size_cuts_one_large_read_into_batches() -> None:
    store = MemoryStore()
    lines = [b"%04d" % n for n in range(100)]
    durable, _ = run(store, b"\n".join(lines), flush_size_bytes=79, flush_interval_ms=60_000)
    assert records_of(store) == lines
    # 8 bytes a record: the tenth takes a batch past 79 bytes.
    assert [len(decode_batch(data_of(store, e.location))) for e in entries_of(store)] == [10] * 10
    assert durable == Produced(records=100, batches=10, bytes=400)


def test_no_call_exceeds_the_largest_batch() -> None:
    store = MemoryStore()
    durable, _ = run(store, b"12345\n12345\n12345678\n1\n", max_batch_bytes=12)
    assert records_of(store) == [b"12345", b"12345", b"12345678", b"1"]
    assert durable.batches == 4


def test_a_line_that_fits_into_no_batch_is_refused_after_what_came_before() -> None:
    store = MemoryStore()
    with pytest.raises(InvalidInput, match="line 2 has more than 8 bytes"):
        run(store, b"1\n", b"123456789\n", max_batch_bytes=12)
    assert records_of(store) == [b"1"]


def test_progress_is_told_per_call() -> None:
    _, told = run(MemoryStore(), b"a\nbb\n", b"c")
    assert told == [(3, 2), (1, 1)]
