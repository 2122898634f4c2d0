"""What one read of a small object from S3 takes of a processor, beside boto3's ``get_object``.

The server is a real one (``./run servers``), in a process of its own; only the time of the thread
that reads counts.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.table import Row
from opendata_buffer.config import StoreOptions
from opendata_buffer.stores.s3 import S3Store
from tools.servers import VERSITYGW

OBJECT_BYTES = 64 * 1024
READS = 200
ROUNDS = 9
BAR_MS = 1.1


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


def cpu_ms(read: Callable[[], object]) -> float:
    started = time.thread_time()
    for _ in range(READS):
        read()
    return (time.thread_time() - started) / READS * 1e3


def get_row() -> Row:
    """CPU per GET, in turns with boto3."""
    with bucket() as store:
        store.put("object", os.urandom(OBJECT_BYTES))
        client = store._client.get()

        def boto() -> bytes:
            data: bytes = client.get_object(Bucket="bucket", Key="object")["Body"].read()
            return data

        def ours() -> object:
            return store.get("object")

        boto(), ours(), ours()
        pairs = [(cpu_ms(ours), cpu_ms(boto)) for _ in range(ROUNDS)]
    taken, base = (statistics.median(each) for each in zip(*pairs, strict=True))
    return Row(
        "CPU of reading an object of 64 KiB from S3",
        f"{taken:.2f} ms",
        f"<= {BAR_MS:g} ms",
        taken <= BAR_MS,
        f"boto3's get_object {base:.2f} ms; medians of {ROUNDS} x {READS} reads",
    )


def run() -> Iterator[Row]:
    """All lines of this suite."""
    if VERSITYGW.is_there:
        yield get_row()
    else:
        yield Row("CPU of reading an object from S3", "-", "", None, VERSITYGW.why_not)
