from __future__ import annotations

from uuid import UUID

import pytest

from opendata_buffer.formats.batch import Compression, decode_batch
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.producer.batching import (
    METADATA_FLUSH_BYTES,
    RANGE_BYTES,
    RECORD_HELD,
    REQUEST_HELD,
    AppendBuffer,
    Batch,
    Batcher,
    DurabilityWatcher,
    ProduceRequest,
)
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.producer.world import config


def call(
    entry: bytes, metadata: bytes = b"", transaction: Transaction | None = None, at: int = 1_700
) -> ProduceRequest:
    return ProduceRequest(len(entry).to_bytes(4, "little") + entry, 1, metadata, at, transaction)


def batcher(flush_size: int = 100, max_size: int = 1_000) -> Batcher:
    settings = config(flush_interval_ms=100, flush_size_bytes=flush_size, max_batch_bytes=max_size)
    return Batcher(settings, lambda: DurabilityWatcher(ManualRuntime()))


def sealed(b: Batcher) -> list[Batch]:
    """The batches that are full; the open one stays, whatever its age."""
    return list(iter(lambda: b.take(0.0), None))


def take(b: Batcher, now: float = 0.0) -> Batch | None:
    b.seal(now)
    return b.take(now)


def test_calls_share_a_batch_and_its_watcher() -> None:
    b = batcher()
    first = b.add(call(b"a", b"m1"), now=5.0)
    second = b.add(call(b"bc", b"m2"), now=5.01)
    assert second is first
    assert sealed(b) == []
    batch = take(b)
    assert batch is not None
    assert batch.watcher is first
    data = b"".join(batch.encode(Compression.NONE, 3))
    assert batch.metadata == (Metadata(0, 1_700, b"m1"), Metadata(1, 1_700, b"m2"))
    assert (batch.count, batch.size) == (2, 11)
    assert data == b"\x01\0\0\0a\x02\0\0\0bc" + b"\0" + b"\x02\0\0\0" + b"\x01\0"
    assert decode_batch(data) == [b"a", b"bc"]
    assert take(b) is None


def test_due_when_the_interval_has_passed_since_the_first_call() -> None:
    b = batcher()
    assert b.due_at is None
    assert b.take(99.0) is None
    b.add(call(b"a"), now=5.0)
    b.add(call(b"b"), now=5.09)
    assert b.due_at == 5.1
    assert b.take(5.0999) is None
    batch = b.take(5.1)
    assert batch is not None
    assert batch.calls == 2


def test_under_a_steady_load_a_batch_is_due_every_interval() -> None:
    b = batcher()
    due = []
    # A call each 30 ms: the first one after 5.1 comes at 5.12, and does not shift the timer.
    for at in (5.0, 5.03, 5.06, 5.09, 5.12, 5.15, 5.18, 5.21, 5.24):
        b.take(at)
        b.add(call(b"a"), now=at)
        due.append(round(b.due_at or 0.0, 3))
    assert due == [5.1, 5.1, 5.1, 5.1, 5.2, 5.2, 5.2, 5.3, 5.3]


def test_after_a_pause_or_an_early_flush_the_interval_begins_with_the_call() -> None:
    b = batcher()
    b.add(call(b"a"), now=5.0)
    take(b)
    b.add(call(b"a"), now=5.05)  # before 5.1
    assert b.due_at == 5.05 + 0.1
    take(b)
    b.add(call(b"a"), now=5.35)  # an interval and more after it
    assert b.due_at == 5.35 + 0.1


def test_f32_a_call_that_finds_the_batch_due_takes_it_along() -> None:
    b = batcher()
    b.add(call(b"a"), now=5.0)
    b.add(call(b"b"), now=5.2)
    assert [batch.count for batch in sealed(b)] == [2]
    assert take(b) is None


@pytest.mark.parametrize(("entries", "size"), [([b"x" * 6, b""], 14), ([b""] * 3, 12)])
def test_f33_full_when_the_size_is_exceeded_prefixes_included(
    entries: list[bytes], size: int
) -> None:
    b = batcher(flush_size=10)
    for entry in entries:
        assert sealed(b) == []
        b.add(call(entry), now=0.0)
    assert [batch.size for batch in sealed(b)] == [size]


def test_f35_metadata_fills_a_batch_too() -> None:
    # It is one entry of the manifest, which every later append writes again.
    b = batcher()
    payload = bytes(METADATA_FLUSH_BYTES // 4)
    for n in range(3):
        b.add(call(b"a", payload, at=n), now=0.0)
    assert sealed(b) == []
    b.add(call(b"a", payload, at=3), now=0.0)
    (full,) = sealed(b)
    assert (full.calls, full.metadata_size) == (4, 4 * (RANGE_BYTES + len(payload)))


def test_no_batch_exceeds_what_readers_accept() -> None:
    b = batcher(flush_size=100, max_size=50)
    first = b.add(call(b"x" * 40), now=0.0)
    second = b.add(call(b"y" * 40), now=0.0)
    assert second is not first
    assert [batch.size for batch in sealed(b)] == [44]


def test_f34_no_batch_has_more_records_than_its_footer_can_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opendata_buffer.producer.batching.MAX_RECORDS", 2)
    b = batcher()
    added = []
    for _ in range(3):
        b.add(call(b"x"), now=0.0)
        added.append(sealed(b))
    assert [[batch.count for batch in full] for full in added] == [[], [], [2]]


@pytest.mark.parametrize("message", [None, UUID("9a1b2c3d-4e5f-1678-8a02-010203040506")])
def test_a_transaction_or_message_has_its_batch_and_only_a_transaction_is_ordered(
    message: UUID | None,
) -> None:
    b = batcher()
    transaction = Transaction("a", 1)
    b.add(call(b"x"), now=0.0)
    b.add(ProduceRequest(b"\1\0\0\0m", 1, b"", 1_700, transaction, message), now=0.0)
    b.add(call(b"y"), now=0.0)
    plain, alone = sealed(b)
    assert (plain.transaction, plain.message, plain.ordered) == (None, None, False)
    assert (alone.transaction, alone.message) == (transaction, message)
    assert alone.ordered is (message is None)


def test_f33_what_waits_is_counted_until_it_is_taken() -> None:
    b = batcher()
    assert b.held == 0
    b.add(call(b"abc", b"m"), now=0.0)
    assert b.held == 7 + 1 + REQUEST_HELD
    b.add(call(b"x", transaction=Transaction("a", 1)), now=0.0)
    assert (b.held, b.calls) == (7 + 1 + 5 + 2 * REQUEST_HELD, 2)
    first = b.take(0.0)
    assert first is not None
    assert (b.held, b.calls) == (5 + REQUEST_HELD, 1)
    assert first.held == 7 + 1 + REQUEST_HELD
    b.take(0.0)
    assert (b.held, b.calls) == (0, 0)


def batch(*requests: ProduceRequest) -> Batch:
    made = Batch(DurabilityWatcher(ManualRuntime()))
    for each in requests:
        made.add(each)
    return made


def ranges(made: Batch) -> tuple[Metadata, ...]:
    made.encode(Compression.NONE, 3)
    return made.metadata


def test_f35_calls_of_one_time_and_payload_share_a_range() -> None:
    # The manifest has the ranges, and is written again with each append.
    made = batch(*(call(b"x", b"topic", at=n // 100) for n in range(1_000)))
    assert ranges(made) == tuple(Metadata(n * 100, n, b"topic") for n in range(10))
    assert made.metadata_size == 10 * (RANGE_BYTES + len(b"topic"))
    given = [(b"a", 1), (b"a", 1), (b"b", 1), (b"a", 1), (b"a", 2)]
    made = batch(*(call(b"", payload, at=at) for payload, at in given))
    assert ranges(made) == tuple(Metadata(n, *given[n][::-1]) for n in (0, 2, 3, 4))


def test_a_buffer_is_counted_when_it_is_closed_and_stands_in_its_place() -> None:
    made = batch(call(b"first", at=5))
    counted = (made.count, made.calls, made.size)
    buffer = AppendBuffer(b"second", 5, None, 10_000, 1.0)
    made.add_buffer(buffer)
    buffer.append(b"third")
    buffer.left -= len(b"third") + RECORD_HELD
    assert (made.count, made.calls, made.size) == counted
    made.close_buffer()
    made.close_buffer()
    assert (made.count, made.calls) == (3, 3)
    made.add(call(b"last", at=6))
    most = made.size
    data = b"".join(made.encode(Compression.NONE, 3))
    assert decode_batch(data) == [b"first", b"second", b"third", b"last"]
    assert made.metadata == (Metadata(0, 5), Metadata(3, 6))
    assert (made.count, made.size) == (4, most)
