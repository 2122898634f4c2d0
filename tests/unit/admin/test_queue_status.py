"""The status of queues, topics, brokers and consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from opendata_buffer.admin import queue_status as module
from opendata_buffer.admin.queue_status import Status, read_status, summarise
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.topic_status import read_topic
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob, Listing, ObjectInfo
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic

CONFIG = QueueConfig(store="memory://status")
RUNTIME = ManualRuntime()
NOW = RUNTIME.now_ms()


def location(age_ms: int = 0, txn: Transaction | None = None) -> str:
    return batch_key("ingest", RUNTIME.ulid_at(NOW - age_ms), txn)


def listing(*sizes: tuple[str, int]) -> Listing:
    return Listing(tuple(ObjectInfo(key, size, NOW) for key, size in sizes), NOW)


def status_of(
    before: Manifest, found: Listing, after: Manifest | None = None, now_ms: int = NOW
) -> Status:
    return summarise(before, after or before, found, CONFIG.store, CONFIG, now_ms)


def test_queued_consumed_and_missing_batches_are_counted() -> None:
    gone, first, last = location(9000), location(3000), location(1000)
    manifest = Manifest.empty().append([NewEntry(each) for each in (gone, first, last)])
    manifest = manifest.drop_through(0)
    status = status_of(manifest, listing((gone, 5), (first, 70), ("ingest/_owner.json", 9)))
    assert (status.queue_length, status.next_sequence) == (2, 3)
    assert (status.oldest_sequence, status.newest_sequence) == (1, 2)
    assert (status.oldest_age_seconds, status.newest_age_seconds) == (3.0, 1.0)
    assert (status.bytes_queued, status.missing) == (70, 1)
    assert (status.orphans, status.orphan_bytes) == (1, 5)


def test_objects_that_are_not_batches_are_not_orphans() -> None:
    found = listing(("ingest/notes.txt", 1), ("ingest/manifest", 2), ("ingest/x.batch", 3))
    assert status_of(Manifest.empty(), found).orphans == 0


def test_a_batch_enqueued_while_the_listing_ran_is_neither_orphan_nor_missing() -> None:
    early, listed, late = location(), location(), location()
    before = Manifest.empty().append([NewEntry(early)])
    after = before.append([NewEntry(listed), NewEntry(late)])
    status = status_of(before, listing((early, 1), (listed, 1)), after)
    assert (status.queue_length, status.orphans, status.missing) == (3, 0, 0)


def test_a_batch_dequeued_while_the_listing_ran_is_neither_orphan_nor_missing() -> None:
    gone, collected = location(), location()
    before = Manifest.empty().append([NewEntry(gone), NewEntry(collected)])
    status = status_of(before, listing((gone, 1)), before.drop_through(1))
    assert (status.queue_length, status.orphans, status.missing) == (0, 0, 0)


def test_a_status_does_not_list_more_objects_for_a_longer_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LISTED", 3)
    store = MemoryStore()
    named = sorted(location() for _ in range(8))
    for each in (named[0], *named[2:7]):
        store.put(each, b"12345")
    manifest = Manifest.empty().append([NewEntry(each) for each in named])
    store.put("ingest/manifest", manifest.raw)
    status = read_status(ReadOnlyReader(CONFIG, store=store, runtime=RUNTIME))
    assert (status.queue_length, status.bytes_queued, status.listed_all) == (8, 15, False)
    assert status.missing == 1, "a batch that was not listed is not missing"


SYSTEM = SystemRuntime()


# ---- the number of waiting records


class CountedReads(MemoryStore):
    """Records the requested byte ranges of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int] | None] = []

    def get(self, key: str, **options: Any) -> Blob | None:
        if key.endswith(".batch"):
            self.ranges.append(options.get("byte_range"))
        return super().get(key, **options)


def waiting_batches(counts: Sequence[int], store: MemoryStore, prefix: str = "ingest") -> list[str]:
    """Return a queue whose batches have these numbers of records, and their locations."""
    found = [batch_key(prefix, RUNTIME.ulid()) for _ in counts]
    for each, count in zip(found, counts, strict=True):
        store.put(each, encode_batch([b"x"] * count))
    manifest = Manifest.empty().append([NewEntry(each) for each in found])
    store.put(f"{prefix}/manifest", manifest.raw)
    return found


def read(store: MemoryStore) -> Status:
    return read_status(ReadOnlyReader(CONFIG, store=store, runtime=SystemRuntime()))


@pytest.mark.parametrize(
    ("counts", "records", "exact"),
    [
        ([], 0, True),
        ([3, 0, 5], 8, True),
        ([7] * 20, 140, True),
        ([7] * 2_000, 14_000, False),
        ([2] * 1_000 + [4] * 1_000, 6_000, False),  # spread over all batches
    ],
)
def test_waiting_records_are_counted_or_estimated_with_few_small_requests(
    counts: list[int], records: int, exact: bool
) -> None:
    store = CountedReads()
    waiting_batches(counts, store)
    found = read(store)
    assert (found.records, found.records_exact) == (records, exact)
    assert len(store.ranges) == min(len(counts), 20)
    assert all(each is not None and each[1] - each[0] == 7 for each in store.ranges)


def test_batches_that_cannot_be_read_are_left_out_of_the_estimate() -> None:
    store = MemoryStore()
    gone, short, damaged, _ = waiting_batches([9, 9, 9, 5], store)
    store.delete_many([gone])
    store.put(short, b"abc")
    store.put(damaged, b"no batch at all")
    found = read(store)
    assert (found.records, found.records_exact) == (20, False)
    waiting_batches([1], store)
    store.delete_many([each.key for each in store.list("ingest/0").objects])
    assert read(store).records is None


def test_f23_no_object_outside_the_prefix_is_read_for_its_count() -> None:
    store = CountedReads()
    store.put("other/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch", encode_batch([b"secret"]))
    entry = NewEntry("other/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch")
    store.put("ingest/manifest", Manifest.empty().append([entry]).raw)
    assert (read(store).records, store.ranges) == (None, [])


def test_the_records_of_a_topic_are_the_sum_of_its_partitions() -> None:
    store = CountedReads()
    topic = Topic.create(CONFIG, 3, store=store)
    first, second, _ = topic.description.names
    waiting_batches([1, 2], store, first)
    waiting_batches([4], store, second)
    found = read_topic(Target(store, CONFIG, SYSTEM, topic), topic)
    assert (found.records, found.records_exact) == (7, True)
    waiting_batches([3] * 50, store, second)
    store.ranges.clear()
    found = read_topic(Target(store, CONFIG, SYSTEM, topic), topic)
    assert found.records == pytest.approx(153, abs=8)
    assert (found.records_exact, len(store.ranges)) == (False, 20)
