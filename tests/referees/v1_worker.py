"""Programs of a log that are killed: ``python -m tests.referees.v1_worker ROLE URL ARGUMENT...``.

* ``produce URL NAME``: our producer, which prints each record as soon as it is durable.
* ``host URL NAME``: the same, with a broker. ``join URL NAME`` appends through that broker.
* ``go URL NAME``: appends like the Go producer of OpenTelemetry's exporter, with its names: a ULID
  for each process, and a number. It does not know logs, and feeds nothing.
* ``read URL``: a named reader in Python, with a collector. It prints and acknowledges records.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

from opendata_buffer import Consumer, Producer, outcomes
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store

PREFIX, MANIFEST = "ingest/otel/logs/data", "ingest/otel/logs/manifest"
PLACE: dict[str, Any] = {"data_path_prefix": PREFIX, "manifest_path": MANIFEST}
GRACE_MS = 60_000


def say(*words: object) -> None:
    print(*words, flush=True)


def produce(url: str, name: str, broker: str = "off") -> None:
    config = ProducerConfig(store=url, flush_interval_ms=5, broker=broker, **PLACE)
    with Producer(config) as producer:
        number = 0
        while True:
            handles = []
            for _ in range(8):
                record = f"{name}:{number}"
                handles.append((record, producer.produce([record.encode()])))
                time.sleep(0.01)
                number += 1
            for record, handle in handles:
                handle.result(120)
                say(record)


def go(url: str, name: str) -> None:
    store, run, number = open_store(url), SystemRuntime().ulid(), 0
    while True:
        entries = []
        for _ in range(25):
            number += 1
            location = f"{PREFIX}/{run}/{number:016d}"
            store.put(location, encode_batch([f"{name}:{number}".encode()]))
            entries.append((f"{name}:{number}", NewEntry(location)))
        while True:
            found: Any = store.get(MANIFEST)
            manifest = Manifest.parse(found.data)
            if manifest.find(entries[-1][1].location) is not None:
                break
            after = manifest.append([entry for _, entry in entries])
            outcome = store.put_if(MANIFEST, after.raw, found.version)
            if isinstance(outcome, outcomes.Applied):
                for record, _ in entries:
                    say(record)
                break
            if isinstance(outcome, outcomes.Unknown):
                # It may have been appended, and moved to a segment since: give the entries up.
                break


def read(url: str) -> None:
    gc = GarbageCollectorConfig(interval_ms=1_000, grace_period_ms=GRACE_MS)
    config = ConsumerConfig(store=url, reader="python", gc=gc, **PLACE)
    with Consumer(config) as consumer:
        while True:
            batch = consumer.next_batch(timeout=1)
            if batch is not None:
                say(
                    batch.sequence,
                    batch.location,
                    ",".join(record.value.decode() for record in batch),
                )
                batch.ack()


if __name__ == "__main__":
    roles = {
        "produce": produce,
        "host": partial(produce, broker="host"),
        "join": partial(produce, broker="auto"),
        "go": go,
        "read": read,
    }
    roles[sys.argv[1]](*sys.argv[2:])
