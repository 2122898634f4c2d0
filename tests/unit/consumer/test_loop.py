"""Waiting for batches of a queue or a topic: calls, iteration, and asyncio."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from opendata_buffer import (
    Consumer,
    ConsumerConfig,
    GarbageCollectorConfig,
    Producer,
    ProducerConfig,
    Topic,
    TopicConsumer,
    TopicProducer,
)
from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch
from opendata_buffer.errors import Closed, InvalidInput
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.stores.memory import MemoryStore

URL = "memory://loop"
WAIT_S = 60.0


class Log:
    """A queue, or a topic with one partition."""

    def __init__(self, is_topic: bool) -> None:
        self.store = MemoryStore()
        if is_topic:
            Topic.create(URL, 1, store=self.store)
        producer, self._consumer = (
            (TopicProducer, TopicConsumer) if is_topic else (Producer, Consumer)
        )
        config = ProducerConfig(store=URL, flush_interval_ms=1)
        self.producer: Any = producer(config, store=self.store)

    def consumer(self) -> Any:
        config = ConsumerConfig(store=URL, gc=GarbageCollectorConfig(enabled=False))
        return self._consumer(config, store=self.store)

    def produce(self, *records: bytes) -> None:
        self.producer.produce(records, metadata=b"till-7").result(WAIT_S)


@pytest.fixture(params=[False, True], ids=["queue", "topic"])
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    log = Log(request.param)
    yield log
    log.producer.close()


def test_a_call_waits_for_a_batch_and_returns_none_after_its_timeout(log: Log) -> None:
    with log.consumer() as consumer:
        assert consumer.next_batch() is consumer.next_batch(timeout=0.01) is None
        later = threading.Timer(0.05, log.produce, [b"late"])
        later.start()
        assert consumer.next_batch(timeout=WAIT_S).entries == [b"late"]
        later.join()


def test_a_batch_can_acknowledge_itself_and_has_its_position(log: Log) -> None:
    log.produce(b"one", b"two")
    with log.consumer() as consumer:
        for batch in consumer:
            (record, second) = batch.records()
            assert (record.value, second.value, record.metadata) == (b"one", b"two", b"till-7")
            assert record.ingestion_time_ms == batch.metadata[0].ingestion_time_ms
            assert batch.position == consumer.position_of(batch)
            batch.ack()
            with pytest.raises(InvalidInput, match="acknowledged"):
                batch.ack()
            break
        log.produce(b"three")
        arrow = consumer.next_arrow_batch()
        assert (arrow.values.to_pylist(), [each.value for each in arrow.records()]) == (
            [b"three"], [b"three"],
        )  # fmt: skip
        arrow.ack()
    with log.consumer() as consumer:
        assert consumer.next_batch() is None


def test_iteration_ends_when_another_thread_closes_the_consumer(log: Log) -> None:
    log.produce(b"one")
    consumer = log.consumer()
    seen = []
    for batch in consumer:
        seen += batch.entries
        batch.ack()
        threading.Timer(0.05, consumer.close).start()
    assert seen == [b"one"]
    with pytest.raises(Closed):
        consumer.next_batch(timeout=None)


def test_a_cancelled_async_wait_loses_no_batch(log: Log) -> None:
    async def main() -> list[bytes]:
        seen: list[bytes] = []
        async with log.consumer() as consumer:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(aiter(consumer)), 0.05)
            log.produce(b"one")
            begun, go_on = threading.Event(), threading.Event()
            ready = consumer._next_now

            def slow(**options: Any) -> Any:
                found = ready(**options)
                begun.set()
                assert go_on.wait(WAIT_S)
                return found

            consumer._next_now = slow
            call = asyncio.create_task(consumer.next_batch_async(timeout=None))
            await asyncio.to_thread(begun.wait, WAIT_S)
            call.cancel()  # the batch is taken, and its thread has not returned
            with pytest.raises(asyncio.CancelledError):
                await call
            go_on.set()
            log.produce(b"two")
            async for batch in consumer:
                seen += batch.entries
                batch.ack()
                if len(seen) == 2:
                    break
        with pytest.raises(Closed):
            await consumer.next_batch_async()
        return seen

    assert asyncio.run(main()) == [b"one", b"two"]


def test_the_error_of_a_pickled_batch_says_that_it_has_no_consumer() -> None:
    ranges = (Metadata(1, 8, b"late"), Metadata(1, 5, b"late"), Metadata(9, 9))
    batch = ConsumedBatch([b"a", b"b"], 3, "x", ranges, "p", Consumer)  # type: ignore[arg-type]
    alone = pickle.loads(pickle.dumps(batch))
    assert alone == batch
    for call in (alone.ack, lambda: alone.position):
        with pytest.raises(InvalidInput, match="by a handle"):
            call()
    assert [tuple(each) for each in alone.records()] == [(b"a", b"", None), (b"b", b"late", 5)]
    assert isinstance(batch.as_arrow(), ArrowBatch)


def test_a_consumer_is_an_iterator_whose_next_waits(log: Log) -> None:
    with log.consumer() as consumer:
        later = threading.Timer(0.05, log.produce, [b"late"])
        later.start()
        assert next(consumer).values == [b"late"]
        later.join()
        assert iter(consumer) is consumer
    with pytest.raises(StopIteration):
        next(consumer)
    assert next(consumer, None) is None


def test_a_batch_is_acknowledged_without_blocking_the_event_loop(log: Log) -> None:
    async def work() -> int:
        async with log.consumer() as consumer:
            await (await anext(consumer)).ack_async()
            first: int = (await anext(consumer)).sequence
            return first

    log.produce(b"one")
    log.produce(b"two")
    assert asyncio.run(work()) == 1
    with log.consumer() as consumer:
        assert next(consumer).values == [b"two"]


def test_a_cancelled_acknowledgement_ends_before_the_call_does() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    class Owner:
        def ack(self, _: object) -> None:
            begun.set()
            may_end.wait(WAIT_S)
            ended.set()

    async def work() -> None:
        batch = ConsumedBatch([b"one"], 0, "x", (), "", Owner())
        task = asyncio.create_task(batch.ack_async())
        await asyncio.to_thread(begun.wait, WAIT_S)
        task.cancel()
        threading.Timer(0.01, may_end.set).start()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(work())
