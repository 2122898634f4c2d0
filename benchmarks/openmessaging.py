"""The OpenMessaging benchmark's shape, ours beside Kafka: one topic, 16 partitions of 1 KiB.

Two producers send records of 1 KiB without a key at an even pace to 16 partitions, and one consumer
reads all of them. Latency is from the call that sends a record until the consumer has it. Then the
backlog: the consumer waits until 100 MB are there, and drains them while the producers go on. What
counts is how many records a second it takes until it has caught up.

Producers are processes, and so is the clock's reader: all on one machine. Ours is a directory on a
disk, and waits for it; so does ``Kafka, waits for its disk``. Kafka's defaults do not.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.kafka import client, fill
from benchmarks.latency import (
    age_ms,
    beside,
    in_turns,
    p99,
    taken_from_kafka,
    taken_from_topic,
)
from benchmarks.producers import paced
from benchmarks.table import Row
from opendata_buffer import Topic, TopicProducer

PARTITIONS = 16
PRODUCERS = 2
RECORD_BYTES = 1_024
RECORDS_S = 2_500  # of each producer
SECONDS, WARM_S = 8.0, 2.0
BACKLOG = 100_000_000 // RECORD_BYTES
AT_ONCE = 20_000  # records in one call of a producer that fills the backlog
PATIENCE_S = 120.0
LINGER_MS = 10

KAFKA: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "Kafka": ({}, {}),
    "Kafka, tuned": ({"linger.ms": LINGER_MS, "batch.size": 1_000_000}, {}),
    "Kafka, waits for its disk": ({"linger.ms": LINGER_MS}, {"flush.messages": "1"}),
}
"""Settings of producer and topic."""

Take = Callable[[], list[bytes]]


@dataclass(frozen=True)
class Found:
    """What one run measured: milliseconds of each record, and records a second of the drain."""

    delays_ms: list[float]
    drained_s: float


def stamped() -> bytes:
    record = b"%020d" % time.monotonic_ns()
    return record + bytes(RECORD_BYTES - len(record))


def produce(system: str, address: str, topic: str, backlog: Any, drained: Any) -> None:
    """One process: an even pace, then its part of the backlog, then the pace until that is read."""
    with ExitStack() as held:
        if system == "ours":
            ours = held.enter_context(TopicProducer(address, flush_interval_ms=LINGER_MS))
            send: Callable[[bytes], object] = ours.send
            poll: Callable[[], object] = lambda: None  # noqa: E731
            flush: Callable[[], object] = ours.flush
        else:
            settings, _ = KAFKA[system]
            kafka = client().Producer({"bootstrap.servers": address, **settings})
            kafka.list_topics(topic, PATIENCE_S)  # connecting is not what is measured
            send, poll = partial(kafka.produce, topic), partial(kafka.poll, 0)
            flush = partial(kafka.flush, PATIENCE_S)

        def call() -> None:
            send(stamped())
            poll()

        paced(RECORDS_S, SECONDS + WARM_S, call)
        backlog.wait()
        for number in range(BACKLOG // PRODUCERS):
            call()
            if number % AT_ONCE == 0:
                flush()
        flush()
        backlog.wait()
        while not drained.is_set():
            paced(RECORDS_S, 0.1, call)
        flush()


def measure(system: str, address: str, topic: str, take: Take) -> Found:
    """One run, with the call that takes what is there."""
    context = multiprocessing.get_context("spawn")
    backlog, drained = context.Barrier(PRODUCERS + 1), context.Event()
    arguments = (system, address, topic, backlog, drained)
    processes = [beside(produce, *arguments) for _ in range(PRODUCERS)]
    try:
        delays = _taken(take, int(PRODUCERS * RECORDS_S * (SECONDS + WARM_S)))
        backlog.wait(PATIENCE_S)  # they fill
        backlog.wait(PATIENCE_S)  # and are done
        began, count, oldest_ms = time.perf_counter(), 0, 1e9
        # Caught up when what it gets was sent while it drains, and is not older than usual.
        until = time.monotonic() + PATIENCE_S
        while count < BACKLOG or oldest_ms > 1_000:
            records = take()
            count += len(records)
            if records:
                oldest_ms = age_ms(records[0])
            if time.monotonic() > until:
                raise RuntimeError(f"{system} drained {count} of {BACKLOG} records")
        taken = time.perf_counter() - began
    finally:
        drained.set()
        backlog.abort()
        for each in processes:
            each.join(PATIENCE_S)
            each.kill()
    return Found(delays[int(PRODUCERS * RECORDS_S * WARM_S) :], count / taken)


def _taken(take: Take, wanted: int) -> list[float]:
    found: list[float] = []
    until = time.monotonic() + SECONDS + WARM_S + PATIENCE_S
    while len(found) < wanted:
        found += [age_ms(record) for record in take()]
        if time.monotonic() > until:
            raise RuntimeError(f"{len(found)} of {wanted} records came")
    return found


def ours() -> Found:
    with tempfile.TemporaryDirectory(prefix="buffer-bench-") as directory:
        Topic.create(directory, PARTITIONS)
        with taken_from_topic(directory, 0.1) as take:
            return measure("ours", directory, "", take)


def kafka(address: str, name: str) -> Found:
    _, settings = KAFKA[name]
    topic = f"openmessaging-{time.monotonic_ns()}"
    fill(address, topic, PARTITIONS, [b"%020d" % 0], 1, settings)
    with taken_from_kafka(address, topic, 0.01, joined=True) as take:
        return measure(name, address, topic, take)


def rows(address: str) -> Iterator[Row]:
    """Ours and Kafka's in turns: latency, and the drain of a backlog."""
    measures: dict[str, Callable[[], Found]] = {"ours": ours}
    measures |= {name: partial(kafka, address, name) for name in KAFKA}
    found = in_turns(measures)
    shape = f"OpenMessaging, {PARTITIONS} partitions of 1 KiB"
    for name, rounds in found.items():
        most = sorted(p99(each.delays_ms) for each in rounds)
        p50 = statistics.median(statistics.median(each.delays_ms) for each in rounds)
        yield Row(
            f"{shape}, {PRODUCERS * RECORDS_S:,} records/s: {name}",
            f"p50 {p50:.1f} ms, p99 {statistics.median(most):.1f} ms",
            detail=f"p99 {most[0]:.1f} to {most[-1]:.1f} in {len(rounds)} rounds",
        )
    for name, rounds in found.items():
        speeds = sorted(each.drained_s / 1e3 for each in rounds)
        yield Row(
            f"{shape}, a backlog of 100 MB drained while producing: {name}",
            f"{statistics.median(speeds):.0f} k records/s",
            detail=f"{speeds[0]:.0f} to {speeds[-1]:.0f} in {len(rounds)} rounds",
        )
