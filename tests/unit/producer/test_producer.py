from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pytest

from opendata_buffer import Consumer, Producer, Publisher, TopicProducer, outcomes
from opendata_buffer.errors import (
    Closed,
    CommitStateUnknown,
    FlushFailed,
    InvalidInput,
    PermanentStorageError,
    QueueFull,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.batch import Compression, Transaction, decode_batch, parse_location
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.producer import lifecycle
from opendata_buffer.queue.ownership import claim_for_writing, claim_queue
from opendata_buffer.runtime import SystemRuntime, Task, in_parallel
from opendata_buffer.stores.base import Blob, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.producer.in_memory import WAIT_S, bytes_of, config, entries, held_config, records


class Gate(MemoryStore):
    """Holds batch uploads until the gate opens, and then fails those with a refused part."""

    def __init__(self, *, is_open: bool = True) -> None:
        super().__init__("gate")
        self.open = threading.Event()
        if is_open:
            self.open.set()
        self.refused: dict[bytes, Exception] = {}
        self.before_put: Callable[[], None] = lambda: None
        self.uploads: list[str] = []

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.uploads.append(key)
        assert self.open.wait(WAIT_S)
        self.before_put()
        for part, error in self.refused.items():
            if part in bytes(data):
                raise error
        super().put(key, data)


DENIED = PermanentStorageError("access denied")


def test_a_durable_call_is_stored_and_queued() -> None:
    store = MemoryStore()
    with Producer(config(), store=store) as producer:
        handle = producer.produce([b"a", b"bc"], b"meta")
        durable = handle.result(WAIT_S)
        (entry,) = entries(store)
        assert (durable.sequence, durable.location) == (entry.sequence, entry.location)
        assert handle.result() == durable
        (metadata,) = entry.metadata
        assert (metadata.payload, metadata.ingestion_time_ms) == (b"meta", handle.ingestion_time_ms)
    assert records(store) == [b"a", b"bc"]


def test_close_flushes_and_keeps_produce_order() -> None:
    store = MemoryStore()
    producer = Producer(held_config(flush_size_bytes=64), store=store)
    for n in range(500):
        producer.produce([b"%d" % n])
    producer.close()
    producer.close()
    assert records(store) == [b"%d" % n for n in range(500)]
    with pytest.raises(Closed):
        producer.produce([b"late"])


@pytest.mark.parametrize(
    "given",
    [
        [b"abc", b""],
        iter([b"abc", b""]),
        [bytearray(b"abc"), memoryview(b"")],
        pa.array([b"abc", b""]),
        pa.array(["abc", ""]),
        pa.chunked_array([pa.array([b"abc"]), pa.array([b""])]),
    ],
)
def test_entries_are_accepted_in_any_form(given: Any) -> None:
    store = MemoryStore()
    with Producer(config(compression=Compression.ZSTD), store=store) as producer:
        producer.produce(given)
        buffer = bytearray(b"before")
        producer.produce([buffer])
        buffer[:] = b"after!"  # the buffer may be reused at once
    assert records(store) == [b"abc", b"", b"before"]


@pytest.mark.parametrize("wrong", ["abc", ["abc"], [None], [b"a", 3], pa.array([b"a", None])])
def test_a_call_with_an_invalid_entry_is_refused_as_a_whole(wrong: Any) -> None:
    store = MemoryStore()
    with Producer(config(), store=store) as producer:
        for call in (producer.produce, producer.send):
            with pytest.raises(InvalidInput):
                call(wrong)
        producer.produce([b"right"])
    assert records(store) == [b"right"]


def test_f35_metadata_that_is_too_large_for_the_manifest_is_refused() -> None:
    store = MemoryStore()
    with Producer(config(), store=store) as producer:
        with pytest.raises(InvalidInput, match="metadata has 1048577 bytes: use at most 1048576"):
            producer.produce([b"a"], bytes((1 << 20) + 1))
        producer.produce([b"b"], bytes(1 << 20))
    assert records(store) == [b"b"]


@pytest.mark.parametrize("enabled", [True, False, None])
def test_a_python_without_the_interpreters_lock_is_refused(
    enabled: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if enabled is None:  # Python 3.12 has no such function and always has the lock
        monkeypatch.delattr(sys, "_is_gil_enabled", raising=False)
    else:
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda: enabled, raising=False)
    store, threads = MemoryStore(), threading.active_count()
    if enabled is False:
        for made in (Producer, TopicProducer, partial(Publisher, name="billing")):
            with pytest.raises(InvalidInput, match="PYTHON_GIL=1"):
                made("memory://q", store=store)
        assert threading.active_count() == threads
        assert not store.list("").objects
        return
    with Producer(config(), store=store) as producer:
        producer.send(b"one").result(WAIT_S)
    assert records(store) == [b"one"]


@pytest.mark.parametrize("broker", ["auto", "off"])
def test_f4_a_producer_of_a_recreated_queue_works_next_to_an_open_old_one(
    broker: str,
) -> None:
    store = MemoryStore()
    old = Producer(config(broker=broker), store=store)
    for number in range(3):
        old.produce([b"%d" % number]).result(WAIT_S)
    store.delete_many(["ingest/manifest"])
    with pytest.raises(QueueReset):
        old.produce([b"lost"]).result(WAIT_S)
    claim_for_writing(store, config(), recreate=True)
    with Producer(config(broker=broker), store=store) as new:
        new.produce([b"new"]).result(WAIT_S)
    assert records(store) == [b"new"]
    with pytest.raises(FlushFailed):
        old.close()


def test_a_full_buffer_blocks_an_async_call_but_not_the_event_loop() -> None:
    store = Gate(is_open=False)

    async def main(producer: Producer) -> list[int]:
        handles = [await producer.produce_async([b"x" * 90])]
        *waiting, cancelled = (
            asyncio.create_task(producer.produce_async([b"%d" % n])) for n in range(4)
        )
        for _ in range(10):
            await asyncio.sleep(0)  # other tasks of the loop run
        assert not any(each.done() for each in (*waiting, cancelled))
        cancelled.cancel()
        store.open.set()
        handles += await asyncio.gather(*waiting)
        return [(await handle).sequence for handle in handles]

    with Producer(config(max_buffered_bytes=100, flush_size_bytes=1), store=store) as producer:
        sequences = asyncio.run(asyncio.wait_for(main(producer), WAIT_S))
    assert sorted(sequences) == [0, 1, 2, 3]
    assert sorted(records(store)) == [b"0", b"1", b"2", b"x" * 90]


def test_an_async_call_that_waits_while_the_producer_closes_is_refused() -> None:
    store = Gate(is_open=False)
    producer = Producer(config(max_buffered_bytes=100, flush_size_bytes=1), store=store)

    async def main() -> None:
        await producer.produce_async([b"x" * 90])
        waiting = asyncio.create_task(producer.produce_async([b"late"]))
        await asyncio.sleep(0)
        assert not waiting.done()
        closing = asyncio.create_task(asyncio.to_thread(producer.close))
        with pytest.raises(Closed):
            await waiting  # at once, and not when the upload has ended
        store.open.set()
        await closing

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert records(store) == [b"x" * 90]


@pytest.mark.parametrize("call", [([b"x" * 90], b""), ([], b"x" * 90)])
def test_f33_callers_wait_while_too_many_bytes_are_in_flight(
    call: tuple[list[bytes], bytes],
) -> None:
    store = Gate(is_open=False)
    producer = Producer(config(max_buffered_bytes=100, flush_size_bytes=1), store=store)
    producer.produce(*call)
    thread = threading.Thread(target=producer.produce, args=call)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    store.open.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    producer.close()


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000])
def test_f31_a_jump_of_the_wall_clock_does_not_change_the_time_of_a_flush(jump_ms: int) -> None:
    runtime = ManualRuntime()
    store = Gate()
    with Producer(config(flush_interval_ms=100), store=store, runtime=runtime) as producer:
        handle = producer.produce([b"a"])
        durable = threading.Event()
        handle.add_done_callback(lambda _: durable.set())
        runtime.set_wall_clock(runtime.now_ms() + jump_ms)
        runtime.await_waits(1)
        runtime.advance(0.099)
        assert store.uploads == []
        runtime.advance(0.002)
        assert durable.wait(WAIT_S)


def test_f29_f30_an_abandoned_batch_fails_its_handles_flush_and_close() -> None:
    store = Gate()
    store.refused[b"poor"] = TransientStorageError("slow down")
    settings = config(delivery_timeout_ms=50, flush_size_bytes=1)
    # Its time passes only while a failed upload waits for its next attempt.
    producer = Producer(settings, store=store, runtime=ManualRuntime())
    poor = producer.produce([b"poor"])
    with pytest.raises(TransientStorageError):
        poor.result(WAIT_S)
    # The producer continues, but never reports success for everything again.
    producer.produce([b"fine"]).result(WAIT_S)
    with pytest.raises(FlushFailed, match="1 produce"):
        producer.flush()
    with pytest.raises(FlushFailed, match="slow down"):
        producer.close()
    assert records(store) == [b"fine"]


def test_f2_a_lost_answer_is_verified_within_the_delivery_timeout() -> None:
    # It takes longer than timeout_ms until the store shows that the write had landed.
    class Partitioned(MemoryStore):
        lost = 0

        def get(self, key: str, **rest: Any) -> Blob | None:
            if self.lost and key == "ingest/manifest":
                self.lost -= 1
                raise TransientStorageError("unreachable")
            return super().get(key, **rest)

        def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            outcome = super().put_if(key, data, condition)
            return outcomes.Unknown("unreachable") if self.lost else outcome

    store, runtime = Partitioned(), ManualRuntime()
    settings = config(timeout_ms=100, backoff_base_ms=100, backoff_max_ms=100)
    producer = Producer(settings, store=store, runtime=runtime)
    store.lost = 50
    handle = producer.produce([b"a"])
    producer.flush(WAIT_S)
    assert handle.result(WAIT_S).sequence == 0
    assert runtime.monotonic() > 1
    assert records(store) == [b"a"]
    producer.close()


def test_f35_a_full_queue_delays_calls_until_the_delivery_timeout() -> None:
    store = MemoryStore()
    settings = config(max_manifest_bytes=150, delivery_timeout_ms=100, flush_size_bytes=1)
    producer = Producer(settings, store=store, runtime=ManualRuntime())
    producer.produce([b"a"]).result(WAIT_S)
    with pytest.raises(QueueFull, match="batches wait for the consumer"):
        producer.produce([b"b"]).result(WAIT_S)
    with pytest.raises(FlushFailed):
        producer.close()
    assert records(store) == [b"a"]


def test_f5_an_object_that_was_collected_before_its_entry_landed_is_written_again() -> None:
    class Late(MemoryStore):
        """The append takes longer than the grace period, and the collector deletes its object."""

        def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            if key == "ingest/manifest":
                threading.Event().wait(0.3)
                batches = (info.key for info in self.list("ingest/").objects)
                self.delete_many([key for key in batches if key.endswith(".batch")])
            return super().put_if(key, data, condition)

    store = Late()
    claim_queue(store, config(), grace_ms=200)
    producer = Producer(config(), store=store)
    with pytest.raises(CommitStateUnknown, match="its object was written again"):
        producer.produce([b"a"]).result(WAIT_S)
    with pytest.raises(FlushFailed):
        producer.close()
    assert records(store) == [b"a"]


def test_only_the_first_transaction_of_each_app_has_a_separator_before_it() -> None:
    store = MemoryStore()
    given = [("a", 1), ("a", 2), ("b", 1), ("a", 3), ("b", 2)]
    with Producer(config(), store=store) as producer:
        for app, number in given:
            producer.produce([b"x"], transaction=Transaction(app, number))
        producer.produce([b"y"])
    queued = entries(store)
    found = [parse_location(entry.location, "ingest") for entry in queued]
    transactions = [each and each.txn and (each.txn.app, each.txn.batch) for each in found]
    assert transactions == [None, *given[:2], None, *given[2:], None]
    for separator in (queued[0], queued[3]):
        assert separator.metadata == ()
        assert decode_batch(bytes_of(store, separator.location)) == []


def test_a_failed_transaction_is_not_overtaken_by_later_ones() -> None:
    store = Gate(is_open=False)
    store.refused[b"one"] = DENIED
    producer = Producer(config(), store=store)
    one = producer.produce([b"one"], transaction=Transaction("a", 1))
    two = producer.produce([b"two"], transaction=Transaction("a", 2))
    store.open.set()
    for handle in (one, two):
        with pytest.raises(PermanentStorageError):
            handle.result(WAIT_S)
    with pytest.raises(FlushFailed):
        producer.produce([b"three"], transaction=Transaction("a", 3))
    with pytest.raises(FlushFailed):
        producer.close()
    assert records(store) == []


def test_each_message_is_one_batch_and_they_are_queued_in_produce_order() -> None:
    store = MemoryStore()
    txn = Transaction("a", 1)
    messages = [build_uuid(b"\1AAAAA", clock, CONTINUE_TXN) for clock in range(2, 22)]
    with Producer(config(upload_concurrency=8), store=store) as producer:
        producer.produce([b"before"])
        for at, message in enumerate(messages):
            producer.produce([b"%d" % at], message=message, transaction=txn if at % 2 else None)
        with pytest.raises(InvalidInput, match="is not a version 1 UUID"):
            producer.produce([b"x"], message=UUID("7d444840-9dc0-41d1-b245-5ffdce74fad2"))
        producer.produce([b"behind"])
    found = [parse_location(entry.location, "ingest") for entry in entries(store)]
    assert [each and each.message for each in found] == [None, *messages, None]
    assert [each and each.txn for each in found[1:-1]] == [None, txn] * 10
    assert records(store) == [b"before", *(b"%d" % at for at in range(20)), b"behind"]


def test_threads_may_close_one_producer_at_once() -> None:
    for _ in range(20):
        store = MemoryStore()
        producer = Producer(held_config(), store=store)
        handle = producer.produce([b"a"])
        together = threading.Barrier(4)

        def close(_: int, producer: Producer = producer, together: Any = together) -> None:
            together.wait(WAIT_S)
            producer.close()

        in_parallel(SystemRuntime(), close, range(4))
        assert handle.result(0).sequence == 0
        assert records(store) == [b"a"]


class FewThreads(SystemRuntime):
    """Starts a limited number of threads, as at interpreter shutdown."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        if not self.left:
            raise RuntimeError("can't start new thread")
        self.left -= 1
        return super().spawn(target, name)


def test_one_worker_is_enough_if_no_more_threads_can_start() -> None:
    store = MemoryStore()
    settings = held_config(flush_size_bytes=1)
    with Producer(settings, store=store, runtime=FewThreads(2)) as producer:
        for n in range(50):
            producer.produce([b"%d" % n])
    assert len(entries(store)) == 50


@pytest.mark.parametrize("threads", [0, 1])
def test_a_producer_is_not_created_if_no_thread_can_flush_it(threads: int) -> None:
    runtime, store = FewThreads(threads), MemoryStore()
    with pytest.raises(RuntimeError, match="new thread"):
        Producer(held_config(), store=store, runtime=runtime)
    # It leaves nothing that would disturb the next producer.
    runtime.left = 10
    with Producer(held_config(), store=store, runtime=runtime) as producer:
        producer.produce([b"a"])
    assert records(store) == [b"a"]


def test_f30_exit_closes_every_open_producer_until_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupted(seconds: float) -> bool:
        raise KeyboardInterrupt

    store = MemoryStore()
    stores = [MemoryStore(), store, MemoryStore(), MemoryStore()]
    producers = [Producer(held_config(), store=each) for each in stores]
    for producer in producers[1:]:
        producer.produce([b"a"])
    senders = [producer._sender for producer in producers]
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(lifecycle, "_open_senders", senders)
        patch.setattr(senders[0].accumulator, "begin_closing", lambda: 1 / 0)
        patch.setattr(senders[2].accumulator, "await_end", interrupted)
        lifecycle._close_at_exit()
        assert producers[3].buffered_bytes > 0
        patch.setattr(lifecycle, "_open_senders", senders[3:])
        lifecycle._close_at_exit()
    assert "closing the producer failed" in caplog.text
    assert "of produced records are not durable" in caplog.text
    assert records(store) == records(stores[3]) == [b"a"]
    for producer in producers:
        producer.close()


@pytest.mark.parametrize("record", [b"one", bytearray(b"one"), memoryview(b"one")])
def test_one_record_is_produced_without_a_list(record: Any) -> None:
    url = f"memory://{uuid4()}"
    with Producer(url) as producer:
        producer.produce(record).result(30)
        producer.produce(record, metadata=b"m").result(30)
        asyncio.run(producer.produce_async(record)).result(30)
    with Consumer(url) as consumer:
        found = [value for _ in range(3) for value in next(consumer).values]
    assert found == [b"one"] * 3


def test_the_name_of_the_rfc_for_the_records_is_accepted() -> None:
    with Producer(f"memory://{uuid4()}") as producer:
        assert producer.produce(entries=[b"one"]).result(30).sequence == 0
        with pytest.raises(InvalidInput, match="entries and records are two names"):
            producer.produce([b"one"], entries=[b"two"])
        with pytest.raises(InvalidInput, match="no records: give a list of bytes"):
            producer.produce()


def test_a_delivery_callback_is_called_once_with_the_place_or_the_error() -> None:
    found: list[Any] = []
    producer = Producer(f"memory://{uuid4()}", flush_interval_ms=1)
    handle = producer.produce([b"one"], on_delivery=lambda *given: found.append(given))
    asyncio.run(producer.produce_async([b"two"], on_delivery=lambda *given: found.append(given)))
    producer.flush()
    assert found[0] == (None, handle.result())
    assert [error for error, _ in found] == [None, None]
    producer.produce([b"lost"], on_delivery=lambda *given: found.append(given))
    with suppress(FlushFailed):
        producer.close(timeout=0)
    error, durable = found[2]
    assert (error is None) != (durable is None)
    assert len(found) == 3
    with pytest.raises(InvalidInput, match=r"on_delivery is 7 \(int\): use a function of \(error"):
        producer.produce([b"one"], on_delivery=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("value", r"no argument 'value': pass the records as a list of bytes: produce\(\[value\]"),
        ("headers", "use metadata"),
        ("key", "a TopicProducer has them"),
        ("callback", r"use on_delivery, a function of \(error, durable\)"),
        ("topic", "the producer's URL names the queue or topic"),
        ("reocrds", "use records, metadata and on_delivery"),
    ],
)
def test_an_unknown_argument_of_a_call_names_what_to_use(name: str, words: str) -> None:
    arguments: dict[str, Any] = {name: b"x"}
    with Producer(f"memory://{uuid4()}") as producer:
        with pytest.raises(InvalidInput, match=words):
            producer.produce(**arguments)
        with pytest.raises(InvalidInput, match=words):
            asyncio.run(producer.produce_async([b"one"], **arguments))
