"""One producer process: replays the flights of one airport, starting at a given chunk.

Each chunk is one transaction: batch ``chunk`` of app ``airport``. In a topic, it goes to each
partition that gets some of its carriers.

The process first produces one chunk, so that Spark can get ready. It produces the others after it
reads a line from standard input. It reports on standard output how many flights are durable, and
the milliseconds from produce to durable of each chunk. It ends when its standard input closes,
which also happens when the demo dies.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque

import click

from notebooks.demo.flights import Share
from opendata_buffer import (
    Compression,
    Producer,
    ProducerConfig,
    TopicHandle,
    TopicProducer,
    Transaction,
    WriteHandle,
)
from opendata_buffer.producer.batching import ProduceRequest
from opendata_buffer.producer.producer import Producer as PartitionProducer
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import is_topic

Handle = WriteHandle | TopicHandle


def produce(producer: Producer | TopicProducer, share: Share, chunk: int) -> Handle:
    """Produce a chunk under an identity, by which readers drop a repeat."""
    records, identity = share.records(chunk), Transaction(share.airport, chunk)
    if isinstance(producer, Producer):
        return producer.produce(records, transaction=identity)

    def accept(_: str, part: PartitionProducer, call: ProduceRequest) -> WriteHandle:
        call.transaction = identity
        return part._accept(call)

    # produce() of a topic takes no identity: it has one for each partition.
    return producer._produce_by(accept, records, keys=share.carriers(chunk))


def replay(store: str, airport: str, first_chunk: int, seconds: float) -> None:
    """Produce at the speed at which a whole year takes ``seconds``."""
    share = Share.of(airport)
    go, stop = threading.Event(), threading.Event()

    def listen() -> None:
        for _ in sys.stdin:
            go.set()
        stop.set()
        go.set()

    threading.Thread(target=listen, daemon=True).start()
    pending: deque[tuple[int, Handle]] = deque()
    took: dict[int, float] = {}

    def report(all_of_them: bool = False) -> None:
        done = []
        while pending and (all_of_them or pending[0][0] in took):
            chunk, handle = pending.popleft()
            handle.result()
            done.append(chunk)
        if done:
            waits = (f"{took[chunk]:.0f}" for chunk in done if chunk in took)
            print(share.rows_before(done[-1] + 1), *waits, flush=True)

    def produce_timed(chunk: int) -> None:
        began = time.monotonic()
        handle = produce(producer, share, chunk)

        def durable(_: Handle) -> None:
            took[chunk] = (time.monotonic() - began) * 1000

        handle.add_done_callback(durable)
        pending.append((chunk, handle))

    config = ProducerConfig(store=store, compression=Compression.ZSTD)
    made = TopicProducer(config) if is_topic(open_store(store)) else Producer(config)
    with made as producer:
        start = 0.0
        for chunk in range(first_chunk, share.chunks):
            if chunk == first_chunk + 1:
                producer.flush()
                report(all_of_them=True)
                go.wait()
                start = time.monotonic()
            due = start + (chunk - first_chunk - 1) * seconds / share.chunks
            if stop.wait(max(0.0, due - time.monotonic())):
                break
            produce_timed(chunk)
            report()
        producer.flush()
        report(all_of_them=True)


@click.command()
@click.argument("store")
@click.argument("airport")
@click.argument("first_chunk", type=int)
@click.argument("seconds", type=float)
def main(store: str, airport: str, first_chunk: int, seconds: float) -> None:
    """Replay AIRPORT into STORE from FIRST_CHUNK on."""
    replay(store, airport, first_chunk, seconds)


if __name__ == "__main__":
    main()
