"""What users of other libraries type first: it works, or the error names the right call.

The guesses were written before anyone looked at which of them work. ``MISSED`` lists those that
neither work nor fail with a message that helps.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

import opendata_buffer
from opendata_buffer import (
    Consumer,
    Producer,
    Publisher,
    Topic,
    TopicConsumer,
    TopicProducer,
    Worker,
)

WAIT_S = 30.0


class Place:
    """A queue with a producer, a consumer, a batch and a record; and a topic."""

    def __init__(self) -> None:
        self.url = f"memory://guess-{uuid4()}"
        self.producer: Any = Producer(self.url, flush_interval_ms=1)
        self.handle = self.producer.produce([b"one", b"two"], metadata=b"m")
        self.handle.result(WAIT_S)
        self.consumer: Any = Consumer(self.url, gc=False)
        self.batch: Any = next(self.consumer)
        self.record = next(iter(self.batch))
        self.topic_url = f"memory://guess-{uuid4()}"
        Topic.create(self.topic_url, 2)
        self.topic: Any = TopicProducer(self.topic_url, flush_interval_ms=1)
        self.lib: Any = opendata_buffer

    def close(self) -> None:
        self.topic.close()
        self.consumer.close()
        self.producer.close()


@pytest.fixture
def place() -> Any:
    made = Place()
    yield made
    made.close()


def nothing(*_: Any) -> None:
    """Stand for a callback."""


Guess = Callable[[Any], Any]

# (the guess, the code, None if it works or a word of the advice)
GUESSES: dict[str, tuple[Guess, str | None]] = {
    # confluent-kafka
    "Producer({'bootstrap.servers': ...})": (
        lambda p: Producer({"bootstrap.servers": "x"}), "a URL or path such as"),
    "produce('orders', value=b'x')": (
        lambda p: p.producer.produce("orders", value=b"x"), "produce([value])"),
    "produce('orders', b'x')": (lambda p: p.producer.produce("orders", b"x"), "text.encode()"),
    "producer.poll(0)": (lambda p: p.producer.poll(0), "on_delivery"),
    "producer.flush(10)": (lambda p: p.producer.flush(10), None),
    "produce(callback=f)": (lambda p: p.producer.produce([b"x"], callback=nothing), "on_delivery"),
    "init_transactions()": (lambda p: p.producer.init_transactions(), "Publisher"),
    "begin_transaction()": (lambda p: p.producer.begin_transaction(), "transaction()"),
    "len(producer)": (lambda p: len(p.producer), "buffered_bytes"),
    "producer.list_topics()": (lambda p: p.producer.list_topics(), "Topic.open"),
    "producer.purge()": (lambda p: p.producer.purge(), "close(timeout=0)"),
    "consumer.subscribe([...])": (lambda p: p.consumer.subscribe(["orders"]), "of its URL"),
    "consumer.consume(10)": (lambda p: p.consumer.consume(10, timeout=1.0), "next_batch"),
    "consumer.assign([...])": (lambda p: p.consumer.assign([0]), "TopicConsumer"),
    "consumer.store_offsets()": (lambda p: p.consumer.store_offsets(p.record), "batch.ack()"),
    "consumer.committed()": (lambda p: p.consumer.committed(), "position"),
    "get_watermark_offsets()": (lambda p: p.consumer.get_watermark_offsets(), "first_sequence"),
    "batch.error()": (lambda p: p.batch.error(), "next_batch() raises"),
    "record.value()": (lambda p: p.record.value(), "value"),
    "record.key()": (lambda p: p.record.key(), "metadata"),
    "record.offset()": (lambda p: p.record.offset(), "sequence"),
    "record.timestamp()": (lambda p: p.record.timestamp(), "ingestion_time_ms"),
    # aiokafka
    "await producer.start()": (lambda p: p.producer.start(), "'with'"),
    "await producer.stop()": (lambda p: p.producer.stop(), "close()"),
    "send_and_wait()": (lambda p: p.producer.send_and_wait("orders", b"x"), "result()"),
    "Consumer(auto_offset_reset=)": (
        lambda p: Consumer(p.url, auto_offset_reset="earliest"), "start='earliest'"),
    "await consumer.getone()": (lambda p: p.consumer.getone(), "next_batch"),
    "await consumer.getmany()": (lambda p: p.consumer.getmany(timeout_ms=1), "next_batch"),
    "seek_to_beginning()": (lambda p: p.consumer.seek_to_beginning(), "'earliest'"),
    "consumer.position(tp)": (lambda p: p.consumer.position(0), "position"),
    "Producer(acks='all')": (lambda p: Producer(p.url, acks="all"), "leave it out"),
    "Producer(enable_idempotence=True)": (
        lambda p: Producer(p.url, enable_idempotence=True), "leave it out"),
    "Producer(transactional_id=)": (
        lambda p: Producer(p.url, transactional_id="x"), "Publisher(url, name)"),
    "Producer(compression_type=)": (
        lambda p: Producer(p.url, compression_type="zstd"), "use compression"),
    "Consumer(max_poll_records=)": (lambda p: Consumer(p.url, max_poll_records=5), "next_desc"),
    "Consumer(enable_auto_commit=)": (
        lambda p: Consumer(p.url, enable_auto_commit=False), "batch.ack()"),
    "Consumer(value_deserializer=)": (
        lambda p: Consumer(p.url, value_deserializer=json.loads), "json.loads(record.value)"),
    # concurrent.futures and asyncio
    "wait(FIRST_COMPLETED)": (
        lambda p: concurrent.futures.wait({p.handle}, return_when="FIRST_COMPLETED"), None),
    "handle.cancel()": (lambda p: p.handle.cancel(), None),
    "executor.map(producer.send, ...)": (
        lambda p: list(concurrent.futures.ThreadPoolExecutor(1).map(p.producer.send, [b"x"])),
        None),
    "asyncio.gather(*handles)": (
        lambda p: asyncio.run(gathered([p.producer.send(b"x"), p.producer.send(b"y")])), None),
    "handle.get(timeout=5)": (lambda p: p.handle.get(timeout=5), "result(timeout=5)"),
    # boto3
    "send_message(MessageBody=)": (
        lambda p: p.producer.send_message(MessageBody="x"), "produce([record])"),
    "put_record(Data=)": (
        lambda p: p.producer.put_record(Data=b"x", PartitionKey="k"), "produce([record])"),
    "receive_messages()": (lambda p: p.consumer.receive_messages(), "next_batch"),
    "batch.delete()": (lambda p: p.batch.delete(), "ack()"),
    "Producer(endpoint_url=)": (
        lambda p: Producer(p.url, endpoint_url="http://x"), "StoreOptions(endpoint_url=...)"),
    "Producer(region_name=)": (
        lambda p: Producer(p.url, region_name="x"), "StoreOptions(region=...)"),
    # queue.Queue
    "producer.put(b'x')": (lambda p: p.producer.put(b"x"), "produce([record])"),
    "consumer.get(timeout=1)": (lambda p: p.consumer.get(timeout=1), "next_batch"),
    "consumer.task_done()": (lambda p: p.consumer.task_done(), "batch.ack()"),
    "consumer.qsize()": (lambda p: p.consumer.qsize(), "len(consumer)"),
    # Pub/Sub
    "producer.publish(b'x')": (lambda p: p.producer.publish(b"x"), "produce([record])"),
    "topic.produce(ordering_key=)": (
        lambda p: p.topic.produce([b"x"], ordering_key="a"), "use key="),
    "consumer.pull(max_messages=)": (lambda p: p.consumer.pull(max_messages=1), "next_batch"),
    "batch.nack()": (lambda p: p.batch.nack(), "release()"),
    "record.data": (lambda p: p.record.data, "use value"),
    "record.attributes": (lambda p: p.record.attributes, "use metadata"),
    # Redis
    "producer.xadd()": (lambda p: p.producer.xadd("s", {"a": 1}), "produce([record])"),
    "consumer.xack()": (lambda p: p.consumer.xack("s", "g", 1), "batch.ack()"),
    # Python
    "produce({'id': 1})": (lambda p: p.producer.produce({"id": 1}), "json.dumps"),
    "produce([{'id': 1}])": (lambda p: p.producer.produce([{"id": 1}]), "bytes"),
    "batch[0]": (lambda p: p.batch[0], None),
    "batch.to_pandas()": (lambda p: p.batch.to_pandas(), "to_table()"),
    "lib.connect()": (lambda p: p.lib.connect(p.url), "Producer and Consumer"),
    "Consumer(group='billing')": (lambda p: Consumer(p.url, group="billing"), "use reader"),
    "Worker(visibility_timeout=30)": (
        lambda p: Worker(p.url, visibility_timeout=30), "claim_timeout_ms"),
    "TopicConsumer(group_id=)": (lambda p: TopicConsumer(p.topic_url, group_id="x"), "use reader"),
    "consumer.close(timeout=5)": (lambda p: p.consumer.close(timeout=5), None),
}  # fmt: skip

SECOND_ROUND: dict[str, tuple[Guess, str | None]] = {
    "Producer(url=)": (lambda p: Producer(url=p.url), "Producer('s3://bucket/orders')"),
    "Producer(store=)": (lambda p: Producer(store=p.url), "Producer('s3://bucket/orders')"),
    "Producer()": (lambda p: Producer(), "Producer('s3://bucket/orders')"),
    "Consumer(queue=)": (lambda p: Consumer(queue=p.url), "Consumer('s3://bucket/orders')"),
    "TopicProducer(topic=)": (
        lambda p: TopicProducer(topic=p.topic_url), "TopicProducer('s3://bucket/orders')"),
    "TopicConsumer(url=)": (
        lambda p: TopicConsumer(url=p.topic_url), "TopicConsumer('s3://bucket/orders')"),
    "Worker(url=)": (lambda p: Worker(url=p.url), "Worker('s3://bucket/orders')"),
    "Publisher(url=)": (lambda p: Publisher(url=p.url), "Publisher('s3://bucket/orders')"),
    "read()": (lambda p: p.lib.read(), "read('s3://bucket/orders')"),
    "send(metadata=)": (lambda p: p.producer.send(b"x", metadata=b"m"), None),
    "send(key=)": (lambda p: p.producer.send(b"x", key=b"k"), "TopicProducer"),
    "topic.send(metadata=)": (lambda p: p.topic.send(b"x", metadata=b"m"), None),
    "topic.send(key=)": (lambda p: p.topic.send(b"x", key=b"k"), None),
    "batch[0:3]": (lambda p: p.batch[0:3], None),
    "batch[-1].value": (lambda p: p.batch[-1].value, None),
    "batch['value']": (lambda p: p.batch["value"], "a number or a slice"),
    "arrow_batch[0]": (lambda p: p.batch.as_arrow()[0], None),
    "topic_consumer.close(timeout=5)": (
        lambda p: TopicConsumer(p.topic_url, gc=False).close(timeout=5), None),
    "read(url).read_pandas": (lambda p: p.lib.read(p.url).read_pandas, None),
    "ProducerConfig(compression='zstd')": (
        lambda p: p.lib.ProducerConfig(store=p.url, compression="zstd"), None),
    "ConsumerConfig(gc=False)": (lambda p: p.lib.ConsumerConfig(store=p.url, gc=False), None),
}  # fmt: skip
"""Guesses that failed with Python's own error when users tried the first version."""

REVIEWED: dict[str, tuple[Guess, str | None]] = {
    "produce(b'x')": (lambda p: p.producer.produce(b"x"), None),
    "produce(value=)": (lambda p: p.producer.produce(value=b"x"), "produce([value])"),
    "produce(headers=)": (lambda p: p.producer.produce([b"x"], headers={}), "metadata"),
    "produce(key=)": (lambda p: p.producer.produce([b"x"], key=b"k"), "TopicProducer"),
    "produce(on_delivery=)": (lambda p: p.producer.produce([b"x"], on_delivery=nothing), None),
    "topic.produce(key=)": (lambda p: p.topic.produce([b"x"], key=b"k"), None),
    "topic.produce(partition=0)": (lambda p: p.topic.produce([b"x"], partition=0), None),
    "consumer.poll(1.0)": (lambda p: p.consumer.poll(1.0), "next_batch"),
    "for record in batch": (lambda p: list(p.batch), None),
    "len(batch)": (lambda p: len(p.batch), None),
    "next(consumer)": (lambda p: (p.producer.send(b"x"), next(p.consumer)), None),
    "consumer.pause()": (lambda p: p.consumer.pause(), "stop calling next_batch()"),
    "consumer.resume()": (lambda p: p.consumer.resume(), "stop calling next_batch()"),
    "consumer.commit()": (lambda p: p.consumer.commit(), "batch.ack()"),
    "consumer.lag()": (lambda p: p.consumer.lag(), None),
    "Consumer(start='latest')": (lambda p: Consumer(p.topic_url + "x", start="latest",
                                                    create_if_missing=True).close(), None),
    "group_id=": (lambda p: Consumer(p.url, group_id="x"), "use reader"),
    "linger_ms=": (lambda p: Producer(p.url, linger_ms=5), "flush_interval_ms"),
    "await batch.ack_async()": (lambda p: asyncio.run(p.batch.ack_async()), None),
    "futures.wait([handle])": (lambda p: concurrent.futures.wait([p.handle]), None),
    "as_completed([handle])": (lambda p: list(concurrent.futures.as_completed([p.handle])), None),
    "wrap_future(handle)": (lambda p: asyncio.run(wrapped(p.handle)), None),
}  # fmt: skip

MISSED = {"record.value()", "consumer.position(tp)", "len(producer)"}
"""Python's own error comes first: an attribute is not a function, or there is no such operation."""


async def gathered(handles: list[Any]) -> list[Any]:
    return await asyncio.gather(*handles)


async def wrapped(handle: Any) -> Any:
    return await asyncio.wrap_future(handle)


def outcome_of(place: Any, guess: Guess, advice: str | None) -> str:
    """Return an empty text if the guess works, or fails with the advice; otherwise what it did."""
    try:
        guess(place)
    except Exception as error:
        text = str(error)
        return "" if advice is not None and advice in text else f"{type(error).__name__}: {text}"
    return "" if advice is None else "it worked"


ALL = {**GUESSES, **SECOND_ROUND, **REVIEWED}


@pytest.mark.parametrize("name", ALL)
def test_a_first_guess_works_or_names_the_right_call(name: str, place: Any) -> None:
    found = outcome_of(place, *ALL[name])
    assert bool(found) is (name in MISSED), found


def test_at_least_fifty_of_sixty_new_guesses_are_answered() -> None:
    assert len(GUESSES) >= 60
    assert (len(GUESSES) - len(MISSED)) / len(GUESSES) >= 50 / 60
