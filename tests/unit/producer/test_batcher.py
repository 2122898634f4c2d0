from __future__ import annotations

import pytest

from opendata_buffer.commit.durability import Completion
from opendata_buffer.formats.batch import Compression, decode_batch
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.producer.batcher import METADATA_FLUSH_BYTES, Batcher, Call
from opendata_buffer.testing.runtime import ManualRuntime


def call(entry: bytes, metadata: bytes = b"", transaction: Transaction | None = None) -> Call:
    return Call(len(entry).to_bytes(4, "little") + entry, 1, metadata, 1_700, transaction)


def done() -> Completion:
    return Completion(ManualRuntime())


def batcher(flush_size: int = 100, max_size: int = 1_000) -> Batcher:
    return Batcher(flush_interval=0.1, flush_size=flush_size, max_size=max_size)


def test_calls_share_a_batch_and_its_completion() -> None:
    b = batcher()
    first, full = b.add(call(b"a", b"m1"), done(), now=5.0)
    second, _ = b.add(call(b"bc", b"m2"), done(), now=5.01)
    assert second is first
    assert full == []
    batch = b.take()
    assert batch is not None
    assert batch.metadata() == (Metadata(0, 1_700, b"m1"), Metadata(1, 1_700, b"m2"))
    data = batch.encode(Compression.NONE, 3)
    assert data == b"\x01\0\0\0a\x02\0\0\0bc" + b"\0" + b"\x02\0\0\0" + b"\x01\0"
    assert decode_batch(data) == [b"a", b"bc"]
    assert b.take() is None


def test_due_when_the_interval_has_passed_since_the_first_call() -> None:
    b = batcher()
    assert b.due_at is None
    assert not b.is_due(99.0)
    b.add(call(b"a"), done(), now=5.0)
    b.add(call(b"b"), done(), now=5.09)
    assert b.due_at == 5.1
    assert not b.is_due(5.0999)
    assert b.is_due(5.1)


def test_under_a_steady_load_a_batch_is_due_every_interval() -> None:
    b = batcher()
    due = []
    # A call each 30 ms: the first one after 5.1 comes at 5.12, and does not shift the timer.
    for at in (5.0, 5.03, 5.06, 5.09, 5.12, 5.15, 5.18, 5.21, 5.24):
        if b.is_due(at):
            b.take()
        b.add(call(b"a"), done(), now=at)
        due.append(round(b.due_at or 0.0, 3))
    assert due == [5.1, 5.1, 5.1, 5.1, 5.2, 5.2, 5.2, 5.3, 5.3]


def test_after_a_pause_or_an_early_flush_the_interval_begins_with_the_call() -> None:
    b = batcher()
    b.add(call(b"a"), done(), now=5.0)
    b.take()
    b.add(call(b"a"), done(), now=5.05)  # before 5.1
    assert b.due_at == 5.05 + 0.1
    b.take()
    b.add(call(b"a"), done(), now=5.35)  # an interval and more after it
    assert b.due_at == 5.35 + 0.1


def test_f32_a_call_that_finds_the_batch_due_takes_it_along() -> None:
    b = batcher()
    b.add(call(b"a"), done(), now=5.0)
    _, full = b.add(call(b"b"), done(), now=5.2)
    assert [batch.count for batch in full] == [2]
    assert b.take() is None


def test_full_only_when_the_size_is_exceeded() -> None:
    b = batcher(flush_size=10)
    _, full = b.add(call(b"x" * 6), done(), now=0.0)
    assert full == []
    _, full = b.add(call(b""), done(), now=0.0)
    assert [batch.size for batch in full] == [14]


def test_f35_metadata_fills_a_batch_too() -> None:
    # It is one entry of the manifest, which every later append writes again.
    b = batcher()
    payload = bytes(METADATA_FLUSH_BYTES // 4)
    for _ in range(4):
        assert b.add(call(b"a", payload), done(), now=0.0)[1] == []
    _, (full,) = b.add(call(b"a", payload), done(), now=0.0)
    assert (len(full.calls), full.metadata_size) == (5, 5 * len(payload))


def test_no_batch_exceeds_what_readers_accept() -> None:
    b = batcher(flush_size=100, max_size=50)
    first, full = b.add(call(b"x" * 40), done(), now=0.0)
    second, full = b.add(call(b"y" * 40), done(), now=0.0)
    assert second is not first
    assert [batch.size for batch in full] == [44]


def test_f34_no_batch_has_more_records_than_its_footer_can_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opendata_buffer.producer.batcher.MAX_RECORDS", 2)
    b = batcher()
    added = [b.add(call(b"x"), done(), now=0.0)[1] for _ in range(3)]
    assert [[batch.count for batch in full] for full in added] == [[], [], [2]]


def test_a_transaction_has_its_batch_to_itself() -> None:
    b = batcher()
    b.add(call(b"a"), done(), now=0.0)
    txn = Transaction("app", 3)
    _, full = b.add(call(b"t", transaction=txn), done(), now=0.0)
    assert [(batch.count, batch.transaction) for batch in full] == [(1, None), (1, txn)]
    assert b.take() is None


def test_f33_empty_records_count_by_their_prefix() -> None:
    b = batcher(flush_size=10)
    fulls = [b.add(call(b""), done(), now=0.0)[1] for _ in range(3)]
    assert [len(full) for full in fulls] == [0, 0, 1]
