"""Records without a lock: what callers find that come while a buffer is closed; and encoding."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from opendata_buffer.errors import Closed, InvalidInput
from opendata_buffer.formats.batch import Compression, decode_batch, encode_block
from opendata_buffer.producer.batching import (
    BUFFER_HELD,
    PIECE_HELD,
    RECORD_HELD,
    RECORDS_AT_ONCE,
    AppendBuffer,
    Batch,
    DurabilityWatcher,
    Item,
    ProduceRequest,
    WriteHandle,
    encode_entries,
    encode_list,
)
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.interrupts import each_step
from tests.unit.producer.world import WAIT_S, batches, config, entries, held_config


class Still(SystemRuntime):
    """Time does not pass: a buffer stays open until something closes it."""

    monotonic = staticmethod(lambda: 5.0)


HANDLE = WriteHandle(DurabilityWatcher(ManualRuntime()), 1_700)


def opened_with(first: Item = b"first") -> AppendBuffer:
    return AppendBuffer(first, 1_700, HANDLE, 1_000, 5.0)


def producer_of(store: MemoryStore, **settings: Any) -> Producer:
    return Producer(held_config(**settings), store=store, runtime=Still())


def test_a_buffer_counts_records_calls_and_bytes() -> None:
    piece = (encode_block([b"a", b"bc"]), 2)
    opened = opened_with(piece)
    opened.left -= 3 + RECORD_HELD
    opened.append(b"def")
    assert (opened.calls, opened.pieces, opened.count) == (2, 1, 3)
    assert opened.held == BUFFER_HELD + PIECE_HELD + len(piece[0]) + RECORD_HELD + 3
    assert opened.size == 3 * 4 + 6
    opened.close()
    assert opened.items() == [piece, b"def"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_item_that_comes_after_the_closing_is_removed_once(interrupted: bool) -> None:
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


def test_of_one_object_that_came_twice_the_late_one_comes_again() -> None:
    opened = opened_with()
    twice = b"twice"
    opened.append(twice)
    opened.close()
    opened.append(twice)
    # Two callers ask, in any order; one of them is told to bring it again.
    assert [opened.was_included(twice), opened.was_included(twice)] == [False, True]
    assert opened.items() == [b"first", b"twice"]


def meanwhile(producer: Producer, act: Callable[[float], None]) -> None:
    """Just before the next record is appended to the open buffer, ``act`` runs."""
    opened = producer._batcher.buffer
    append = opened.append

    def act_first(item: Item) -> None:
        act(WAIT_S)
        append(item)

    opened.append = act_first


def test_a_record_that_comes_while_its_buffer_is_closed_goes_into_the_next_batch() -> None:
    store = MemoryStore()
    with producer_of(store) as producer:
        first = producer.send(b"first")
        meanwhile(producer, producer.flush)
        late = producer.send(b"late")
        assert first.watcher.result() is not None
        assert late.watcher.result() is None
    assert late.watcher.result() is not None
    assert batches(store) == [[b"first"], [b"late"]]


def test_a_record_that_comes_while_the_producer_is_closed_is_refused() -> None:
    store = MemoryStore()
    producer = producer_of(store)
    producer.send(b"first")
    meanwhile(producer, producer.close)
    with pytest.raises(Closed):
        producer.send(b"late")
    assert batches(store) == [[b"first"]]


@pytest.mark.parametrize("how", ["send", "produce", "many"])
def test_an_interrupt_at_any_instruction_loses_and_doubles_nothing(how: str) -> None:
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


def test_threads_that_send_beside_many_flushes_lose_and_double_nothing() -> None:
    store = MemoryStore()
    producer = Producer(config(flush_interval_ms=1, flush_size_bytes=2_000), store=store)
    each, threads = 3_000, 3
    handles: list[list[WriteHandle]] = [[] for _ in range(threads)]

    def send(number: int) -> None:
        for n in range(each):
            record = b"%d-%d" % (number, n)
            handles[number].append(
                producer.send(record) if n % 3 else producer.produce([record, record + b"+"])
            )

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            producer.flush(WAIT_S)
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    producer.close(WAIT_S)
    queued = batches(store)
    assert len(queued) > 10
    where = {record: index for index, batch in enumerate(queued) for record in batch}
    assert sum(map(len, queued)) == len(where) == threads * (each + each // 3)
    for number in range(threads):
        mine = [r for batch in queued for r in batch if r.startswith(b"%d-" % number)]
        wanted = []
        for n in range(each):
            wanted.append(b"%d-%d" % (number, n))
            if n % 3 == 0:
                wanted.append(b"%d-%d+" % (number, n))
        assert mine == wanted
        for n, handle in enumerate(handles[number]):
            durable = handle.watcher.result()
            assert durable is not None
            assert durable.sequence == where[b"%d-%d" % (number, n)]


def test_a_handle_says_the_time_that_is_queued_for_its_record() -> None:
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


def test_buffers_and_other_calls_keep_their_order_in_a_batch() -> None:
    store = MemoryStore()
    with producer_of(store) as producer:
        for n in range(3):
            producer.send(b"s%d" % n)
            producer.produce([b"p%d" % n, b"q%d" % n])
            producer.produce([b"m%d" % n], b"metadata")
            producer.send(memoryview(b"b%d" % n))
    assert batches(store) == [[b"%c%d" % (kind, n) for n in range(3) for kind in b"spqmb"]]


def test_f21_a_record_that_no_reader_would_accept_is_refused_and_the_largest_is_not() -> None:
    store = MemoryStore()
    with producer_of(store, max_batch_bytes=100) as producer:
        with pytest.raises(InvalidInput, match="makes 101 bytes, more than max_batch_bytes 100"):
            producer.send(b"x" * 97)
        with pytest.raises(InvalidInput, match="makes 102 bytes"):
            producer.produce([b"x" * 90, b"yyyy"])
        for _ in range(2):
            producer.send(b"x" * 96)
            producer.produce([b"x" * 90, b"yy"])
    assert [len(batch) for batch in batches(store)] == [1, 2, 1, 2]


def test_small_records_fill_a_batch_by_their_bytes_in_it() -> None:
    # What they take of the buffer limit is many times as much.
    store = MemoryStore()
    with producer_of(store, flush_size_bytes=10_000) as producer:
        for _ in range(5_000):
            producer.send(b"123456")
    sizes = [10 * len(batch) for batch in batches(store)]
    assert sum(sizes) == 50_000
    assert all(10_000 < size <= 10_010 for size in sizes[:-1])


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
    return Batch(HANDLE.watcher, parts=list(parts)).encode(Compression.NONE, 3)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_bytes_becomes_its_block(kind: Any) -> None:
    records = [b"", b"x", b"y" * 1_023, b"z" * 1_024, b"w" * 70_000]
    assert encode_list(kind(records)) == piece(*records)


@pytest.mark.parametrize("other", ["text", None, 7, bytearray(b"a"), memoryview(b"a")])
@pytest.mark.parametrize("at", [0, 50, 99])
def test_a_list_with_anything_else_is_encoded_one_by_one(other: Any, at: int) -> None:
    records: list[Any] = [b"record"] * 100
    records[at] = other
    assert encode_list(records) is None
    if isinstance(other, bytearray | memoryview):
        assert encode_entries(records) == piece(*map(bytes, records))
    else:
        with pytest.raises(InvalidInput, match=f"record {at} is {type(other).__name__}"):
            encode_entries(records)


def test_bytes_of_a_class_of_their_own_are_not_trusted_to_know_their_length() -> None:
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


def test_neighbouring_buffers_are_joined_in_one_go_and_many_records_in_several() -> None:
    records = [b"%d" % n for n in range(RECORDS_AT_ONCE + 2_000)]
    starts = range(0, len(records), 1_000)
    pieces = encoded(*(closed(*records[start : start + 1_000]) for start in starts))
    assert len(pieces) == 3  # the last one is the footer
    assert decode_batch(b"".join(pieces)) == records
