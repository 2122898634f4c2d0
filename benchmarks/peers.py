"""Beside the competitors, on the same machine and the same data: Kafka and Spark's own sources.

Each competitor runs at its defaults and tuned; the goal is against the better of the two. All
take turns in an order that is rotated from round to round, and what counts is the median, with the
least and the most beside it. The broker has no replicas and does not wait for its disk, as Kafka's
defaults are; ours writes to a directory and waits for it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.kafka import client, fill, running, why_not
from benchmarks.latency import latency_rows
from benchmarks.queues import Queued, records_of
from benchmarks.queues import fill as fill_queue
from benchmarks.table import Row
from opendata_buffer import (
    Consumer,
    ConsumerConfig,
    GarbageCollectorConfig,
    Producer,
    ProducerConfig,
    fetch_many,
)
from opendata_buffer.stores.local import LocalStore

RECORDS = 500_000
BATCHES = 10
PARTITIONS = 8
ROUNDS = 5

PRODUCERS = {
    "confluent-kafka": {"queue.buffering.max.messages": 1_000_000},
    "confluent-kafka, tuned": {
        "queue.buffering.max.messages": 10_000_000,
        "queue.buffering.max.kbytes": 2_000_000,
        "linger.ms": 50,
        "batch.size": 1_000_000,
        "compression.type": "lz4",
    },
}
CONSUMERS = {
    "confluent-kafka": {},
    "confluent-kafka, tuned": {
        "fetch.message.max.bytes": 16_000_000,
        "fetch.max.bytes": 64_000_000,
        "queued.min.messages": 1_000_000,
        "queued.max.messages.kbytes": 500_000,
        "check.crcs": False,
    },
}


class Turns:
    """Takes the same measure of several, in turns.

    Args:
        measures: Each gives its rate, in M rows or records a second.
    """

    def __init__(self, measures: dict[str, Callable[[], float]]) -> None:
        self._measures = measures
        self.rates: dict[str, list[float]] = {name: [] for name in measures}

    def run(self, rounds: int = ROUNDS, warm_up: int = 1) -> None:
        """So many rounds after those that do not count; each begins with another one."""
        names = list(self._measures)
        for turn in range(warm_up + rounds):
            begin = turn % len(names)
            for name in names[begin:] + names[:begin]:
                rate = self._measures[name]()
                if turn >= warm_up:
                    self.rates[name].append(rate)

    def rows(
        self, what: str, goals: Mapping[str, tuple[float | None, tuple[str, ...]]]
    ) -> Iterator[Row]:
        """A row for each; for some with what it is of the best of the others, and the goal.

        Args:
            what: Was measured.
            goals: For each of ours, how many times the best of which others it is to reach. For
                what shows a limit there is no goal (None).
        """
        for name, rates in self.rates.items():
            if name not in goals:
                yield Row(f"{what}: {name}", spread(rates))
                continue
            times, others = goals[name]
            best = max(statistics.median(self.rates[other]) for other in others)
            ratio = statistics.median(rates) / best
            yield Row(
                f"{what}: {name} / the best of {', '.join(others)}",
                f"{ratio:.2f} x",
                "" if times is None else f">= {times:g} x",
                None if times is None else ratio >= times,
                spread(rates),
            )


def spread(rates: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(rates):.2f} M/s ({min(rates):.2f} to {max(rates):.2f})"


def produce_to_kafka(address: str, settings: dict[str, Any], records: list[bytes]) -> float:
    producer = client().Producer({"bootstrap.servers": address, **settings})
    produce, poll = producer.produce, producer.poll
    started = time.perf_counter()
    for record in records:
        try:
            produce("produced", record)
        except BufferError:
            poll(0.1)
            produce("produced", record)
    producer.flush()
    return len(records) / (time.perf_counter() - started) / 1e6


def send(records: list[bytes]) -> float:
    with tempfile.TemporaryDirectory() as home:
        with Producer(ProducerConfig(store=home)) as producer:
            send = producer.send
            started = time.perf_counter()
            handles = [send(record) for record in records]
            producer.flush()
            taken = time.perf_counter() - started
        assert handles[-1].done()
    return len(records) / taken / 1e6


def consume_from_kafka(address: str, settings: dict[str, Any], count: int) -> float:
    consumer = client().Consumer(
        {
            "bootstrap.servers": address,
            "group.id": f"bench-{time.perf_counter_ns()}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **settings,
        }
    )
    consumer.subscribe(["consumed"])
    # Joining a group is not what is measured: the clock starts with the first records.
    found = len(consumer.consume(1, timeout=30))
    started = time.perf_counter()
    while found < count:
        # No more than there are: it would wait for the rest until its timeout.
        wanted = min(10_000, count - found)
        values = [each.value() for each in consumer.consume(wanted, timeout=10)]
        if not values:
            raise RuntimeError(f"Kafka gave {found} of {count} records")
        found += len(values)
    taken = time.perf_counter() - started
    consumer.close()
    return count / taken / 1e6


def consume(queued: Queued, directory: str, arrow: bool) -> float:
    queued.rewind()
    config = ConsumerConfig(store=directory, gc=GarbageCollectorConfig(enabled=False))
    with Consumer(config) as consumer:
        handle = consumer.fetch_handle()
        started = time.perf_counter()
        descriptors = consumer.next_descriptors(BATCHES)
        if arrow:
            count = sum(len(each.values) for each in fetch_many(handle.fetch_arrow, descriptors))
        else:
            count = sum(len(each.entries) for each in fetch_many(handle.fetch, descriptors))
        taken = time.perf_counter() - started
    assert count == queued.records * BATCHES
    return count / taken / 1e6


def producer_rows(address: str) -> Iterator[Row]:
    records = records_of(100, RECORDS)
    fill(address, "produced", PARTITIONS, [], 0)
    turns = Turns(
        {
            "send": lambda: send(records),
            **{
                name: lambda settings=settings: produce_to_kafka(address, settings, records)
                for name, settings in PRODUCERS.items()
            },
        }
    )
    turns.run()
    yield from turns.rows("a record of 100 bytes a call", {"send": (1.0, tuple(PRODUCERS))})


def consumer_rows(address: str) -> Iterator[Row]:
    records = records_of(100, RECORDS // BATCHES)
    fill(address, "consumed", PARTITIONS, records, BATCHES)
    with tempfile.TemporaryDirectory() as directory:
        queued = fill_queue(LocalStore(directory), records, BATCHES)
        turns = Turns(
            {
                "to Arrow": lambda: consume(queued, directory, True),
                "to bytes": lambda: consume(queued, directory, False),
                **{
                    name: lambda settings=settings: consume_from_kafka(address, settings, RECORDS)
                    for name, settings in CONSUMERS.items()
                },
            }
        )
        turns.run()
    others = tuple(CONSUMERS)
    goals = {"to Arrow": (2.0, others), "to bytes": (2.0, others)}
    yield from turns.rows("reading records of 100 bytes", goals)


def run() -> Iterator[Row]:
    """All lines of this suite, in the order of the report."""
    if missing := why_not():
        yield Row("competitors", "-", "", None, missing)
        return
    client()
    from benchmarks.peers_spark import spark_rows

    with running() as address:
        yield from producer_rows(address)
        yield from consumer_rows(address)
        yield from latency_rows(address)
        yield from spark_rows(address)
