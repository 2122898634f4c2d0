"""Stores and queues that the suites read and write.

:func:`as_slow_as_s3` gives any store the latency of S3 Standard. :func:`fill` writes a queue
straight into a store, because making the queue is not part of the measurement.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.measuring import MIB, sized
from opendata_buffer.config import (
    DEFAULT_DATA_PATH_PREFIX,
    GarbageCollectorConfig,
    QueueConfig,
    StoreOptions,
)
from opendata_buffer.formats.batch import Compression, batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Delete, Put, Store
from opendata_buffer.testing.faults import FaultPlan, FaultyStore
from tools.servers import VERSITYGW

if TYPE_CHECKING:
    from opendata_buffer.stores.s3 import S3Store

PUT_MS, GET_MS, CAS_MS = 100, 60, 60
"""Milliseconds that S3 Standard takes for a put, a read, and a conditional put."""

S3_TIMES = FaultPlan(put_ms=PUT_MS, get_ms=GET_MS, cas_ms=CAS_MS)

NO_COLLECTOR = GarbageCollectorConfig(enabled=False)
INGESTED_MS = 1_700_000_000_000
BLOCK_BYTES = sized(32 * MIB, tiny=MIB // 4)


def as_slow_as_s3(store: Store, times: FaultPlan = S3_TIMES) -> FaultyStore:
    """Wrap a store, so that each request takes as long as on S3 Standard.

    The result also counts the requests, in ``operations``.

    Args:
        store: The store that holds the objects.
        times: Milliseconds of each kind of request.

    Returns:
        The slower store.
    """
    return FaultyStore(store, SystemRuntime(), times)


# ---- S3


@contextmanager
def bucket() -> Iterator[S3Store]:
    """Run a real S3 server in a process of its own, with one empty bucket.

    The environment has the server's credentials inside the block.
    """
    import boto3  # slow to import, and not every suite needs it

    from opendata_buffer.stores.s3 import S3Store

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


class Requests:
    """Counts the requests that a boto3 client sends, including those that bypass its methods.

    Args:
        client: A client of boto3.

    Attributes:
        sent: Number of requests by the name of S3's operation, such as ``PutObject``.
        bytes_out: Bytes in their bodies.
    """

    def __init__(self, client: Any) -> None:
        self.sent: Counter[str] = Counter()
        self.bytes_out = 0
        self._lock = threading.Lock()
        client.meta.events.register("before-send.s3", self._count)

    def _count(self, event_name: str, request: Any, **_: object) -> None:
        with self._lock:
            self.sent[event_name.rsplit(".", 1)[-1]] += 1
            self.bytes_out += int(request.headers.get("Content-Length", 0))


# ---- queues


class Puts(Put, Delete, Protocol):
    """The operations of a store that filling a queue needs."""


@dataclass(frozen=True)
class Queued:
    """A queue of equal batches.

    Attributes:
        store: The store that holds the queue.
        manifest: The manifest of the queue before any batch was read.
        records: Number of records in each batch.
        prefix: Data prefix of the queue.
    """

    store: Puts
    manifest: Manifest
    records: int
    prefix: str = DEFAULT_DATA_PATH_PREFIX

    def rewind(self) -> None:
        """Queue every batch again. No consumer may be reading the queue meanwhile."""
        config = QueueConfig(store="memory://any", data_path_prefix=self.prefix)
        # The marker remembers the position of the manifest, so the library refuses an older
        # copy (failure F4). Without the marker it accepts one.
        assert not self.store.delete_many([owner_key(config.data_path_prefix)])
        self.store.put(config.manifest_path, self.manifest.raw)


def fill(
    store: Puts,
    records: Sequence[bytes],
    batches: int,
    compression: Compression = Compression.NONE,
    prefix: str = DEFAULT_DATA_PATH_PREFIX,
) -> Queued:
    """Queue ``batches`` batches of the same records.

    Args:
        store: The store.
        records: The records of each batch.
        batches: Number of batches.
        compression: Compression of the batch objects.
        prefix: Data prefix of the queue.

    Returns:
        The queue.
    """
    return queue_all(store, [encode_batch(records, compression)] * batches, len(records), prefix)


def queue_all(
    store: Puts, objects: Iterable[bytes], records: int, prefix: str = DEFAULT_DATA_PATH_PREFIX
) -> Queued:
    """Queue encoded batches.

    Args:
        store: The store.
        objects: The encoded batches.
        records: Number of records in each batch, if they are alike; 0 otherwise.
        prefix: Data prefix of the queue.

    Returns:
        The queue.
    """
    runtime = SystemRuntime()
    entries = []
    for data in objects:
        location = batch_key(prefix, runtime.ulid())
        store.put(location, data)
        entries.append(NewEntry(location, (Metadata(0, INGESTED_MS, b"bench"),)))
    queued = Queued(store, Manifest.empty().append(entries), records, prefix)
    queued.rewind()
    return queued


# ---- records


def records_of(size: int, count: int, seed: int = 7) -> list[bytes]:
    """Return ``count`` records of ``size`` random bytes, which do not compress."""
    rng = random.Random(seed)
    return [rng.randbytes(size) for _ in range(count)]


def log_events(rng: random.Random, size: int = 263) -> list[bytes]:
    """Return JSON log events of ``size`` bytes each, as many as fill a block of 32 MiB."""
    kinds = ["click", "view", "purchase", "error", "login"]
    records = []
    for number in range(BLOCK_BYTES // (size + 4)):
        event: Mapping[str, object] = {
            "ts": 1_700_000_000_000 + number * 7,
            "user": f"user-{rng.randint(0, 99_999):05d}",
            "kind": rng.choice(kinds),
            "url": f"/products/{rng.randint(0, 9_999)}/details",
            "ip": ".".join(str(rng.randint(0, 255)) for _ in range(4)),
            "agent": "Mozilla/5.0 (X11; Linux x86_64)",
            "session": f"{rng.getrandbits(80):020x}",
        }
        text = json.dumps(event).encode()
        records.append(text + b" " * (size - len(text)))
    return records
