"""Run one process of a deployment with brokers, in one role, until its input ends.

Arguments: role, store, name. It prints these lines:

* ``host``: ``id ID``, the id of its broker.
* ``produce``: ``durable SECONDS RECORD`` with the machine's monotonic clock, ``unknown RECORD``,
  ``failed RECORD``.
"""

from __future__ import annotations

import sys
import threading
import time

from opendata_buffer import Producer, ProducerConfig
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork
from opendata_buffer.errors import CommitStateUnknown, OpenDataBufferError
from opendata_buffer.runtime import SystemRuntime
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


def main() -> None:
    role, store, name = sys.argv[1:]
    if role == "host":
        return host(store)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    return produce(store, name, over)


if __name__ == "__main__":
    main()
