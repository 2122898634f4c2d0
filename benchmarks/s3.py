"""What direct reads of small objects save a consumer of S3, beside boto3's ``get_object``.

The server is a real one (``./run servers``), in a process of its own.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from benchmarks.queues import fill, records_of
from benchmarks.table import Row
from opendata_buffer import Consumer
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, StoreOptions
from opendata_buffer.consumer.fetch import fetch_many
from opendata_buffer.stores.s3 import S3Store
from tools.servers import VERSITYGW

RECORDS = records_of(1_000, 100)
OBJECTS = 2_000
ROUNDS = 3
BAR = 0.25


@contextmanager
def bucket() -> Iterator[S3Store]:
    """An empty bucket of a real server that runs inside the block."""
    import boto3

    environment = {
        "AWS_ACCESS_KEY_ID": VERSITYGW.environment["ROOT_ACCESS_KEY"],
        "AWS_SECRET_ACCESS_KEY": VERSITYGW.environment["ROOT_SECRET_KEY"],
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with VERSITYGW.start() as url:
            boto3.client("s3", endpoint_url=url).create_bucket(Bucket="bucket")
            yield S3Store("bucket", options=StoreOptions(endpoint_url=url))
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def cpu_ms(store: S3Store) -> float:
    """Of all threads, per object, of a consumer that fetches and decodes all that is queued."""
    config = ConsumerConfig(store="s3://bucket", gc=GarbageCollectorConfig(enabled=False))
    with Consumer(config, store=store) as consumer:
        descriptors = consumer.next_descriptors(OBJECTS)
        started = time.process_time()
        fetched = fetch_many(consumer.fetch_handle().fetch, descriptors)
        records = sum(len(batch.entries) for batch in fetched)
        taken = time.process_time() - started
    assert records == OBJECTS * len(RECORDS)
    return taken / OBJECTS * 1e3


def get_row() -> Row:
    """A consumer's CPU per object, with and without direct reads, in turns."""
    with bucket() as store:
        queued = fill(store, RECORDS, OBJECTS)
        direct = store._direct._send
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * ROUNDS):
            queued.rewind()
            is_direct = turn % 2 == 0
            with patch.object(store._direct, "_send", direct if is_direct else lambda *_: None):
                times[is_direct].append(cpu_ms(store))
    taken, base = statistics.median(times[True]), statistics.median(times[False])
    saved = 1 - taken / base
    return Row(
        f"CPU that direct reads save a consumer of {OBJECTS:,} objects of 100 kB in S3",
        f"{saved:.0%}",
        f">= {BAR:.0%}",
        saved >= BAR,
        f"{taken:.2f} instead of {base:.2f} ms per object; medians of {ROUNDS}",
    )


def run() -> Iterator[Row]:
    """All lines of this suite."""
    if VERSITYGW.is_there:
        yield get_row()
    else:
        yield Row("CPU of reading an object from S3", "-", "", None, VERSITYGW.why_not)
