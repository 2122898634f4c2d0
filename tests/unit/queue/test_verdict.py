"""What the probe found, kept for the next process."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.config import QueueConfig, StoreOptions
from opendata_buffer.errors import PrefixConflict, TransientStorageError, UnsafeStore
from opendata_buffer.queue.ownership import KEPT_MS, VERDICT_NAME, claim_for_use
from opendata_buffer.stores.base import Absent, Blob, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.stores.probe import SAFE
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.s3_server import S3Server

CONFIG = QueueConfig(store="memory://unused")
KEY = f"ingest/{VERDICT_NAME}"


class Process(MemoryStore):
    """The store as a new process sees it: its objects are there, and nothing is known of it."""

    def __init__(self, other: Process | None = None, subject: str = "https://s3/bucket") -> None:
        super().__init__()
        if other is not None:
            self.__dict__.update(other.__dict__)
        self.probe_subject = subject
        self.is_probed = False
        self.probes = 0
        self.safe = True

    def take_as_probed(self) -> None:
        self.is_probed = True

    def check_conditional_writes(self, near: str) -> None:
        if self.is_probed:
            return
        self.probes += 1
        if not self.safe:
            raise UnsafeStore("it is not")
        self.is_probed = True


def claimed(store: Process, runtime: ManualRuntime, config: QueueConfig = CONFIG) -> int:
    """How many probes it took to claim the queue."""
    before = store.probes
    claim_for_use(store, config, runtime=runtime)
    assert store.is_probed
    return store.probes - before


def test_the_next_process_does_not_probe_again(runtime: ManualRuntime) -> None:
    first = Process()
    assert claimed(first, runtime) == 1
    assert claimed(first, runtime) == 0
    kept = first.get(KEY)
    assert isinstance(kept, Blob)
    assert json.loads(kept.data) == {
        "version": 1,
        "store": "https://s3/bucket",
        "probed_ms": runtime.now_ms(),
    }
    assert claimed(Process(first), runtime) == 0


def test_a_verdict_of_another_store_does_not_count(runtime: ManualRuntime) -> None:
    first = Process()
    claimed(first, runtime)
    copied = Process(first, subject="https://other/bucket")
    assert claimed(copied, runtime) == 1
    assert claimed(Process(copied, subject="https://other/bucket"), runtime) == 0


def test_an_old_verdict_does_not_count_and_is_written_anew(runtime: ManualRuntime) -> None:
    first = Process()
    claimed(first, runtime)
    runtime.advance(KEPT_MS / 1000)
    second = Process(first)
    assert claimed(second, runtime) == 1
    assert claimed(Process(second), runtime) == 0


@pytest.mark.parametrize(
    "junk",
    [b"", b"[1]", b"\xff", b'{"version": 2}', b'{"version": 1, "store": 3, "probed_ms": 1}'],
)
def test_one_that_cannot_be_read_costs_a_probe_and_no_more(
    runtime: ManualRuntime, junk: bytes
) -> None:
    first = Process()
    first.put(KEY, junk)
    assert claimed(first, runtime) == 1
    assert claimed(Process(first), runtime) == 0


def test_one_from_the_future_costs_a_probe(runtime: ManualRuntime) -> None:
    first = Process()
    later = {"version": 1, "store": first.probe_subject, "probed_ms": runtime.now_ms() + 1}
    first.put(KEY, json.dumps(later).encode())
    assert claimed(first, runtime) == 1


def test_an_unsafe_store_keeps_no_verdict(runtime: ManualRuntime) -> None:
    store = Process()
    store.safe = False
    with pytest.raises(UnsafeStore):
        claim_for_use(store, CONFIG, runtime=runtime)
    assert store.list("").objects == ()


def test_nothing_is_written_into_the_prefix_of_another_queue(runtime: ManualRuntime) -> None:
    store = Process()
    claimed(store, runtime)
    store.delete_many([KEY])
    with pytest.raises(PrefixConflict):
        claim_for_use(
            Process(store),
            QueueConfig(store="memory://unused", manifest_path="other"),
            runtime=runtime,
        )
    assert KEY not in {each.key for each in store.list("").objects}


class Refusing(Process):
    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        if key == KEY:
            raise TransientStorageError("not now")
        return super().put_if(key, data, condition)


def test_a_verdict_that_cannot_be_written_stops_nobody(runtime: ManualRuntime) -> None:
    store = Refusing()
    assert claimed(store, runtime) == 1
    assert claimed(Refusing(store), runtime) == 1


def test_on_s3_the_second_process_makes_no_probe_objects(s3_server: S3Server) -> None:
    config = QueueConfig(store=s3_server.url)
    asked = []
    for _ in range(2):
        SAFE.clear()
        store = S3Store("bucket", options=StoreOptions(endpoint_url=s3_server.endpoint))
        claim_for_use(store, config)
        asked.append(len([each for each in s3_server.requests if ".probe-" in each.key]))
    assert asked[0] > 30
    assert asked[1] == asked[0]
