"""A program that uses the public interface; tests/unit/test_typing.py checks its types."""

import concurrent.futures

from opendata_buffer import (
    Consumer,
    ConsumerConfig,
    Durable,
    Producer,
    ProducerConfig,
    Publisher,
    StoreOptions,
    TopicConsumer,
    TopicProducer,
    Worker,
)


def produce() -> int:
    with Producer(
        "memory://x",
        compression="zstd",
        flush_interval_ms=5,
        store_options=StoreOptions(region="r"),
    ) as producer:
        handle = producer.send(b"one")
        producer.produce([b"one", b"two"], metadata=b"m", on_delivery=lambda error, durable: None)
        producer.produce(b"one")
        producer.produce(entries=[b"one"])
        concurrent.futures.wait([handle], timeout=5)
        place: Durable = handle.result(timeout=5)
        return place.sequence


def configure() -> tuple[ProducerConfig, ConsumerConfig]:
    producing = ProducerConfig(store="memory://x", compression="zstd")
    return producing, ConsumerConfig(store="memory://x", gc=False)


async def consume() -> None:
    async with Consumer(
        ConsumerConfig(store="memory://x"), start="latest", ack_interval=1, gc=False
    ) as consumer:
        async for batch in consumer:
            for record in batch:
                value: bytes = record.value
                print(value, len(batch), batch.values, batch[0].value, batch[:2][0].metadata)
            await batch.ack_async()


def topics() -> None:
    with TopicProducer("memory://t") as producer:
        handle = producer.produce([b"a"], key="k", partition=0)
        print(handle.result().items())
    with TopicConsumer("memory://t", partitions=[0]) as consumer:
        batch = next(consumer)
        batch.ack()
    with Worker("memory://t", claim_timeout_ms=5) as worker:
        for claimed in worker:
            claimed.ack()
    with Publisher("memory://t", "name") as publisher, publisher.transaction() as txn:
        txn.produce([b"a"], keys=["k"])
