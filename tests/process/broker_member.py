"""One process of a deployment with brokers, in a role of its own, until input ends.

Arguments: role, store, name. What it prints, one line each:

* ``host``: ``id ID``, its broker's.
* ``produce``: ``durable SECONDS RECORD`` with the machine's monotonic clock, ``unknown RECORD``,
  ``failed RECORD``.
* ``sink``: ``committed SECONDS BATCH`` for each micro-batch, from the number behind the name's
  ``@`` on.
* ``work``: ``got RECORD`` for each record handed to it, ``done RECORD`` after it was done.
"""

from __future__ import annotations

import sys
import threading
import time

from buffer_sink.committer import Group, QueueCommitter, UploadedBatch
from buffer_sink.options import SinkOptions
from opendata_buffer import Producer, ProducerConfig, QueueConfig, Worker, WorkerConfig
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork
from opendata_buffer.errors import (
    ClaimLost,
    CommitStateUnknown,
    OpenDataBufferError,
    TransientStorageError,
)
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.runtime import Moment, SystemRuntime
from opendata_buffer.stores.open import open_store

_printing = threading.Lock()


def say(*words: object) -> None:
    with _printing:
        print(*words, flush=True)


def host(store: str) -> None:
    runtime = SystemRuntime()
    network = WebSocketNetwork(runtime)
    config = ProducerConfig(store=store)
    serving = LeaderElection(open_store(store), config, runtime, network)
    say("id", serving._id)
    sys.stdin.read()


def produce(store: str, name: str, over: threading.Event) -> None:
    number = 0
    with Producer(ProducerConfig(store=store, flush_interval_ms=20)) as producer:
        while not over.wait(0.1):
            produce_one(producer, f"{name}:{number:06}")
            number += 1


def produce_one(producer: Producer, record: str) -> None:
    handle = producer.produce([record.encode()])

    def report(_: object) -> None:
        try:
            handle.result()
        except CommitStateUnknown:
            say("unknown", record)
        except OpenDataBufferError:
            say("failed", record)
        else:
            say("durable", f"{time.monotonic():.3f}", record)

    handle.add_done_callback(report)


def sink(store: str, batch: int, over: threading.Event) -> None:
    """What Spark's sink does for a query: each batch until it is committed, then the next one."""
    objects, runtime = open_store(store), SystemRuntime()
    committer = QueueCommitter(objects, SinkOptions(queue=QueueConfig(store=store)), runtime)
    while not over.wait(0.02):
        txn = Transaction("job", batch)
        key = batch_key("ingest", runtime.ulid(), txn)
        data = encode_batch([b"job:%06d" % batch])
        try:
            objects.put(key, data)
            uploads = (UploadedBatch(key, 1, (Metadata(0, 7, b""),)),)
            committer.append(Group(Moment.now(runtime), uploads, txn, "query"))
        except OpenDataBufferError as error:
            print(f"sink: {error}", file=sys.stderr, flush=True)
            continue
        say("committed", f"{time.monotonic():.3f}", batch)
        batch += 1


def work(store: str, name: str, over: threading.Event) -> None:
    # Long enough for a worker that has no processor for some seconds: its claims are its own.
    config = WorkerConfig(
        store=store, broker="host", claim_timeout_ms=8_000, max_deliveries=0, create_if_missing=True
    )
    # A worker over S3 would listen on all interfaces; these are all on one machine.
    network = WebSocketNetwork(SystemRuntime())
    with Worker(config, network=network) as worker:
        while not over.is_set():
            try:
                batches = worker.claim(5, timeout=0.5)
                for batch in batches:
                    for record in batch.entries:
                        say("got", record.decode())
                for batch in batches:
                    time.sleep(0.01)
                    finish(batch)
                    for record in batch.entries:
                        say("done", record.decode())
            except (TransientStorageError, ClaimLost) as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)


def finish(batch) -> None:  # type: ignore[no-untyped-def]
    while True:
        try:
            return batch.done()
        except TransientStorageError:
            time.sleep(0.1)


def main() -> None:
    role, store, name = sys.argv[1:]
    if role == "host":
        return host(store)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    if role == "sink":
        return sink(store, int(name.partition("@")[2]), over)
    return produce(store, name, over) if role == "produce" else work(store, name, over)


if __name__ == "__main__":
    main()
