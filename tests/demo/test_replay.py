"""The producers of the demo: each chunk has an identity, by which readers drop a repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from notebooks.demo.replay import produce
from opendata_buffer import (
    Consumer,
    ConsumerConfig,
    Producer,
    ProducerConfig,
    Topic,
    TopicConsumer,
    TopicProducer,
)


class Flights:
    """A share of the flights, with two in each chunk."""

    airport = "EWR"

    def records(self, chunk: int) -> list[bytes]:
        return [b"%d UA" % chunk, b"%d AA" % chunk]

    def carriers(self, chunk: int) -> list[str]:
        return ["UA", "AA"]


SHARE: Any = Flights()
DELIVERED = [b"0 AA", b"0 UA", b"1 AA", b"1 UA"]


def test_a_repeated_chunk_is_delivered_once_from_a_queue(tmp_path: Path) -> None:
    with Producer(ProducerConfig(store=str(tmp_path))) as producer:
        for chunk in (0, 1, 0):
            produce(producer, SHARE, chunk).result()
    config = ConsumerConfig(store=str(tmp_path))
    with Consumer(config, isolation="read_committed") as consumer:
        found = [value for batch in iter(consumer.next_batch, None) for value in batch.values]
    assert sorted(found) == DELIVERED


def test_a_repeated_chunk_is_delivered_once_from_a_topic(tmp_path: Path) -> None:
    Topic.create(str(tmp_path), partitions=2)
    with TopicProducer(ProducerConfig(store=str(tmp_path))) as producer:
        for chunk in (0, 1, 0):
            produce(producer, SHARE, chunk).result()
    with TopicConsumer(ConsumerConfig(store=str(tmp_path))) as consumer:
        found = [value for batch in iter(consumer.next_batch, None) for value in batch.values]
    assert sorted(found) == DELIVERED
