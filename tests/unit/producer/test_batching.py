"""Append buffers without a lock, batches, and handles."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from opendata_buffer import Producer
from opendata_buffer.errors import Closed, InvalidInput
from opendata_buffer.formats.batch import Compression, Transaction, decode_batch, encode_block
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.producer.batching import (
    METADATA_FLUSH_BYTES,
    RANGE_BYTES,
    RECORDS_AT_ONCE,
    REQUEST_HELD,
    AppendBuffer,
    Batch,
    Batcher,
    Completion,
    Item,
    ProduceRequest,
    WriteHandle,
    encode_entries,
    encode_list,
)
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.interrupts import each_step
from tests.unit.producer.in_memory import WAIT_S, batches, config, entries, held_config

# Append buffers.


class Still(SystemRuntime):
    """A clock that stands still, so that a buffer stays open until it is closed explicitly."""

    monotonic = staticmethod(lambda: 5.0)


COMPLETION = Completion(ManualRuntime())
HANDLE = WriteHandle(COMPLETION, 1_700)


def opened_with(first: Item = b"first") -> AppendBuffer:
    return AppendBuffer(first, 1_700, HANDLE, 1_000, 5.0)


def producer_of(store: MemoryStore, **settings: Any) -> Producer:
    return Producer(held_config(**settings), store=store, runtime=Still())


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_item_that_arrives_after_close_is_removed_once(interrupted: bool) -> None:
    opened = opened_with()
    opened.append(b"in")
    if interrupted:
        assert opened.was_included(b"in")  # closes the buffer
    else:
        opened.close()
    late = b"late"
    opened.append(late)
    assert opened.items() == [b"first", b"in"]
    assert opened.was_included(late) is False
    assert opened.was_included(b"in") is True
    assert opened.items() == [b"first", b"in"]


def test_only_the_late_one_of_two_appends_of_an_object_is_repeated() -> None:
    opened = opened_with()
    twice = b"twice"
    opened.append(twice)
    opened.close()
    opened.append(twice)
    # Two callers check, in any order, and one of them appends the object again.
    assert [opened.was_included(twice), opened.was_included(twice)] == [False, True]
    assert opened.items() == [b"first", b"twice"]


def meanwhile(producer: Producer, act: Callable[[float], None]) -> None:
    """Call ``act`` just before the next record is appended to the open buffer."""
    opened = producer._batcher.buffer
    append = opened.append

    def act_first(item: Item) -> None:
        act(WAIT_S)
        append(item)

    opened.append = act_first


def test_a_record_that_arrives_while_its_buffer_is_closed_goes_into_the_next_batch() -> None:
    store = MemoryStore()
    with producer_of(store) as producer:
        first = producer.send(b"first")
        meanwhile(producer, producer.flush)
        late = producer.send(b"late")
        assert first.done()
        assert not late.done()
    assert late.done()
    assert batches(store) == [[b"first"], [b"late"]]


def test_a_single_record_may_have_metadata() -> None:
    store = MemoryStore()
    with producer_of(store) as producer:
        producer.send(b"a")
        producer.send(b"b", b"m")
        producer.send(b"c", metadata=b"")
        with pytest.raises(InvalidInput, match=r"metadata is 3 \(int\): use bytes"):
            producer.send(b"d", metadata=3)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=r"key is of type bytes: use TopicProducer.send\(\)"):
            producer.send(b"d", key=b"k")  # type: ignore[arg-type]
    assert batches(store) == [[b"a", b"b", b"c"]]
    (entry,) = entries(store)
    assert [(item.start_index, item.payload) for item in entry.metadata] == [
        (0, b""),
        (1, b"m"),
        (2, b""),
    ]


def test_a_record_that_arrives_while_the_producer_is_closed_is_refused() -> None:
    store = MemoryStore()
    producer = producer_of(store)
    producer.send(b"first")
    meanwhile(producer, producer.close)
    with pytest.raises(Closed):
        producer.send(b"late")
    assert batches(store) == [[b"first"]]


@pytest.mark.full
@pytest.mark.parametrize("how", ["send", "produce", "many"])
def test_an_interrupt_at_any_instruction_neither_loses_nor_duplicates_a_record(how: str) -> None:
    seen = set()
    for interrupt in each_step(least=30, opcodes=True):
        store = MemoryStore()
        producer = producer_of(store)
        call = {
            "send": partial(producer.send, b"hit"),
            "produce": partial(producer.produce, [b"hit"]),
            "many": partial(producer.produce, [b"hit", b"and"]),
        }[how]
        producer.send(b"before")
        interrupt(call)
        producer.send(b"after")
        producer.close(WAIT_S)
        (got,) = batches(store)
        assert producer.buffered_bytes == 0
        seen.add(tuple(got))
    hit = (b"hit", b"and") if how == "many" else (b"hit",)
    assert seen == {(b"before", b"after"), (b"before", *hit, b"after")}


def test_concurrent_sends_and_flushes_neither_lose_nor_duplicate_a_record() -> None:
    store = MemoryStore()
    producer = Producer(config(flush_interval_ms=1, flush_size_bytes=2_000), store=store)
    calls: list[list[tuple[list[bytes], WriteHandle]]] = [[] for _ in range(3)]

    def send(number: int) -> None:
        for n in range(3_000):
            record = b"%d-%d" % (number, n)
            given = [record] if n % 3 else [record, record + b"+"]
            handle = producer.produce(given) if len(given) > 1 else producer.send(record)
            calls[number].append((given, handle))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=send, args=(number,)) for number in range(len(calls))]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            producer.flush(WAIT_S)
    finally:
        sys.setswitchinterval(interval)
    producer.close(WAIT_S)
    queued = batches(store)
    assert len(queued) > 10
    where = {record: index for index, batch in enumerate(queued) for record in batch}
    assert sum(map(len, queued)) == len(where) == len(calls) * 4_000
    for number, made in enumerate(calls):
        mine = [record for record in where if record.startswith(b"%d-" % number)]
        assert mine == [record for given, _ in made for record in given]
        for given, handle in made:
            durable = handle.result()
            assert durable is not None
            assert {where[record] for record in given} == {durable.sequence}


def test_a_handle_has_the_time_that_is_queued_for_its_record() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    with Producer(held_config(), store=store, runtime=runtime) as producer:
        times = []
        for _ in range(4):
            times += [producer.send(b"x").ingestion_time_ms, producer.send(b"y").ingestion_time_ms]
            runtime.advance(0.0015)
    (entry,) = entries(store)
    ranges = [(each.start_index, each.ingestion_time_ms) for each in entry.metadata]
    assert ranges == [(2 * n, times[2 * n]) for n in range(4)]
    assert times[0::2] == times[1::2]


def test_f21_a_record_above_the_limit_of_readers_is_refused_and_the_largest_is_accepted() -> None:
    store = MemoryStore()
    with producer_of(store, max_batch_bytes=100) as producer:
        with pytest.raises(InvalidInput, match=r"record takes 101 bytes.*at most 100: store"):
            producer.send(b"x" * 97)
        with pytest.raises(InvalidInput, match=r"2 records of one call take 102 bytes.*split"):
            producer.produce([b"x" * 90, b"yyyy"])
        for _ in range(2):
            producer.send(b"x" * 96)
            producer.produce([b"x" * 90, b"yy"])
    assert [len(batch) for batch in batches(store)] == [1, 2, 1, 2]


def closed(*items: Item) -> AppendBuffer:
    first, *others = items
    buffer = AppendBuffer(first, 0, None, 1_000_000, 1.0)
    for item in others:
        if type(item) is tuple:
            buffer.more += item[1] - 1
            buffer.pieces += 1
        buffer.append(item)
    buffer.close()
    return buffer


def piece(*records: bytes) -> tuple[bytes, int]:
    return encode_block(records), len(records)


def encoded(*parts: AppendBuffer | ProduceRequest) -> list[bytes | memoryview]:
    return Batch(COMPLETION, parts=list(parts)).encode(Compression.NONE, 3)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_bytes_is_encoded_as_one_block(kind: Any) -> None:
    records = [b"", b"x", b"y" * 1_023, b"z" * 1_024, b"w" * 7_000]
    assert encode_list(kind(records)) == piece(*records)
    block, count = encode_list(kind(records * 300)) or (b"", 0)  # Arrow joins lists of this length
    assert (bytes(block), count) == piece(*records * 300)


@pytest.mark.parametrize("other", ["text", None, 7, bytearray(b"a"), memoryview(b"a")])
@pytest.mark.parametrize("at", [0, 50, 99])
def test_a_list_with_other_types_is_encoded_record_by_record(other: Any, at: int) -> None:
    records: list[Any] = [b"record"] * 100
    records[at] = other
    assert encode_list(records) is None
    if isinstance(other, bytearray | memoryview):
        assert encode_entries(records) == piece(*map(bytes, records))
    else:
        with pytest.raises(InvalidInput, match=f"record {at} is of type {type(other).__name__}"):
            encode_entries(records)


def test_the_length_of_a_subclass_of_bytes_is_not_trusted() -> None:
    class Odd(bytes):
        def __len__(self) -> int:
            return 3

    assert encode_list([b"a", Odd(b"longer")]) is None
    assert encode_entries([b"a", Odd(b"longer")]) == piece(b"a", b"longer")


def test_records_and_pieces_keep_their_order() -> None:
    pieces = encoded(
        closed(b"a", b"b"),
        closed(b"c", piece(b"d", b"e"), b"f"),
        ProduceRequest(*piece(b"g", b"h"), b"", 0),
        closed(piece(b"i", b""), piece(b"j")),
    )
    assert decode_batch(b"".join(pieces)) == [*map(bytes, zip(b"abcdefghi")), b"", b"j"]


def test_neighboring_buffers_are_joined_at_once_and_many_records_in_several_steps() -> None:
    records = [b"%d" % n for n in range(RECORDS_AT_ONCE + 2_000)]
    starts = range(0, len(records), 1_000)
    pieces = encoded(*(closed(*records[start : start + 1_000]) for start in starts))
    assert len(pieces) == 3  # the last one is the footer
    assert decode_batch(b"".join(pieces)) == records


# Batches.


def call(
    entry: bytes, metadata: bytes = b"", transaction: Transaction | None = None, at: int = 1_700
) -> ProduceRequest:
    return ProduceRequest(len(entry).to_bytes(4, "little") + entry, 1, metadata, at, transaction)


def batcher(flush_size: int = 100, max_size: int = 1_000) -> Batcher:
    settings = config(flush_interval_ms=100, flush_size_bytes=flush_size, max_batch_bytes=max_size)
    return Batcher(settings, lambda: Completion(ManualRuntime()))


def sealed(b: Batcher) -> list[Batch]:
    """Return the full batches, and keep the open one regardless of its age."""
    return list(iter(lambda: b.take(0.0), None))


def take(b: Batcher, now: float = 0.0) -> Batch | None:
    b.seal(now)
    return b.take(now)


def test_a_batch_is_due_when_the_interval_has_passed_since_its_first_call() -> None:
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
    # A call comes every 30 ms. The first one after 5.1 is at 5.12, which does not shift the timer.
    for at in (5.0, 5.03, 5.06, 5.09, 5.12, 5.15, 5.18, 5.21, 5.24):
        b.take(at)
        b.add(call(b"a"), now=at)
        due.append(round(b.due_at or 0.0, 3))
    assert due == [5.1, 5.1, 5.1, 5.1, 5.2, 5.2, 5.2, 5.3, 5.3]


@pytest.mark.parametrize("at", [5.05, 5.35], ids=["before 5.1", "an interval and more after it"])
def test_after_a_pause_or_an_early_flush_the_interval_starts_with_the_next_call(at: float) -> None:
    b = batcher()
    b.add(call(b"a"), now=5.0)
    take(b)
    b.add(call(b"a"), now=at)
    assert b.due_at == at + 0.1


def test_f32_a_call_that_finds_the_batch_due_flushes_it() -> None:
    b = batcher()
    b.add(call(b"a"), now=5.0)
    b.add(call(b"b"), now=5.2)
    assert [batch.count for batch in sealed(b)] == [2]
    assert take(b) is None


@pytest.mark.parametrize(("entries", "size"), [([b"x" * 6, b""], 14), ([b""] * 3, 12)])
def test_f33_a_batch_is_full_when_its_size_with_prefixes_exceeds_the_limit(
    entries: list[bytes], size: int
) -> None:
    b = batcher(flush_size=10)
    for entry in entries:
        assert sealed(b) == []
        b.add(call(entry), now=0.0)
    assert [batch.size for batch in sealed(b)] == [size]


def test_f35_metadata_counts_toward_the_size_of_a_batch() -> None:
    # Metadata is stored in the manifest entry, which every later append writes again.
    b = batcher()
    payload = bytes(METADATA_FLUSH_BYTES // 4)
    for n in range(3):
        b.add(call(b"a", payload, at=n), now=0.0)
    assert sealed(b) == []
    b.add(call(b"a", payload, at=3), now=0.0)
    (full,) = sealed(b)
    assert (full.calls, full.metadata_size) == (4, 4 * (RANGE_BYTES + len(payload)))


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


def test_f33_waiting_bytes_are_counted_until_they_are_taken() -> None:
    b = batcher()
    assert b.held == 0
    b.add(call(b"abc", b"m"), now=0.0)
    assert b.held == 7 + 1 + REQUEST_HELD
    b.add(call(b"x", transaction=Transaction("a", 1)), now=0.0)
    assert b.held == 7 + 1 + 5 + 2 * REQUEST_HELD
    first = b.take(0.0)
    assert first is not None
    assert b.held == 5 + REQUEST_HELD
    assert first.held == 7 + 1 + REQUEST_HELD
    b.take(0.0)
    assert b.held == 0


def batch(*requests: ProduceRequest) -> Batch:
    made = Batch(COMPLETION)
    for each in requests:
        made.add(each)
    return made


def ranges(made: Batch) -> tuple[Metadata, ...]:
    made.encode(Compression.NONE, 3)
    return made.metadata


def test_f35_calls_with_the_same_time_and_payload_share_a_range() -> None:
    # Ranges are stored in the manifest, which each append writes again.
    made = batch(*(call(b"x", b"topic", at=n // 100) for n in range(1_000)))
    assert ranges(made) == tuple(Metadata(n * 100, n, b"topic") for n in range(10))
    assert made.metadata_size == 10 * (RANGE_BYTES + len(b"topic"))
    given = [(b"a", 1), (b"a", 1), (b"b", 1), (b"a", 1), (b"a", 2)]
    made = batch(*(call(b"", payload, at=at) for payload, at in given))
    assert ranges(made) == tuple(Metadata(n, *given[n][::-1]) for n in (0, 2, 3, 4))
