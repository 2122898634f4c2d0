"""The status of queues, topics, brokers and consumers."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from opendata_buffer.admin.status import (
    BrokerStatus,
    Status,
    ask_broker,
    read_backlog,
    read_status,
    read_topic,
    summarise,
)
from opendata_buffer.broker import network as dial_module
from opendata_buffer.broker.client import Connection
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.broker.network import WebSocketNetwork
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.formats.entries import Metadata, NewEntry
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.messages.message_ids import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.consumer_info import write_consumer_info
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Listing, ObjectInfo
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic
from tests.unit.broker.local import RUNTIME as BROKER_RUNTIME
from tests.unit.broker.local import serving

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
    return summarise(
        before, after or before, found, store="memory://status", config=CONFIG, now_ms=now_ms
    )


def test_queued_consumed_and_missing_batches() -> None:
    gone, first, last = location(9000), location(3000), location(1000)
    manifest = Manifest.empty().append([NewEntry(each) for each in (gone, first, last)])
    manifest = manifest.drop_through(0)
    status = status_of(manifest, listing((gone, 5), (first, 70), ("ingest/_owner.json", 9)))
    assert (status.queue_length, status.next_sequence) == (2, 3)
    assert (status.oldest_sequence, status.newest_sequence) == (1, 2)
    assert (status.oldest_age_seconds, status.newest_age_seconds) == (3.0, 1.0)
    assert (status.bytes_queued, status.missing) == (70, 1)
    assert (status.orphans, status.orphan_bytes) == (1, 5)


def test_what_is_no_batch_is_no_orphan() -> None:
    found = listing(("ingest/notes.txt", 1), ("ingest/manifest", 2), ("ingest/x.batch", 3))
    assert status_of(Manifest.empty(), found).orphans == 0


def test_age_is_that_of_the_earliest_record() -> None:
    metadata = (Metadata(0, NOW - 7000, b""), Metadata(1, NOW - 8000, b""))
    manifest = Manifest.empty().append([NewEntry(location(1000), metadata)])
    assert status_of(manifest, listing()).oldest_age_seconds == 8.0


def test_a_foreign_entry_without_times_has_no_age() -> None:
    manifest = Manifest.empty().append([NewEntry("elsewhere/x.batch")])
    status = status_of(manifest, listing())
    assert status.oldest_age_seconds is None
    assert status.missing == 1


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


def test_reading_lists_once_and_writes_nothing() -> None:
    store = MemoryStore("status-reads")
    key = location()
    store.put(key, b"12345")
    store.put("ingest/manifest", Manifest.empty().append([NewEntry(key)]).raw)
    before = {each.key: each for each in store.list("").objects}
    status = read_status(ReadOnlyReader(CONFIG, store=store, runtime=RUNTIME))
    assert (status.queue_length, status.bytes_queued, status.orphans) == (1, 5, 0)
    assert {each.key: each for each in store.list("").objects} == before


# ---- a topic


TOPIC = QueueConfig(store="memory://unused")
SYSTEM = SystemRuntime()


def test_each_partition_is_looked_at_and_nothing_is_written() -> None:
    store = MemoryStore()
    topic = Topic.create(TOPIC, 40, store=store)
    queue = Queue(store, Topic.config_of("p-00033-06vz", TOPIC), runtime=SYSTEM, role="test")
    entry = NewEntry("p-00033-06vz/a.batch", (Metadata(0, SYSTEM.now_ms() - 5_000, b""),))
    queue.append([entry])
    queue.claim_epoch(None)
    topic.drain("p-00033-06vz")
    before = store.list("").objects
    found = read_topic(topic, TOPIC, SYSTEM)
    assert store.list("").objects == before
    assert len(found.partitions) == 40
    assert found.queue_length == 1
    one = found.partitions[33]
    assert (one.name, one.state, one.queue_length) == ("p-00033-06vz", "draining", 1)
    assert (one.next_sequence, one.epoch) == (1, 1)
    assert one.oldest_age_seconds is not None
    assert 5 <= one.oldest_age_seconds < 60
    assert found.partitions[0].oldest_age_seconds is None


def test_undecided_transactions_are_counted() -> None:
    store = MemoryStore()
    topic = Topic.create(TOPIC, 2, store=store)
    queue = Queue(store, Topic.config_of("p-00001-05mv", TOPIC), runtime=SYSTEM, role="test")
    for producer in (b"\1AAAAA", b"\1BBBBB"):
        message = build_uuid(producer, 2, CONTINUE_TXN)
        queue.append([NewEntry(batch_key("p-00001-05mv", SYSTEM.ulid(), None, message))])
    assert [each.undecided for each in read_topic(topic, TOPIC, SYSTEM).partitions] == [0, 2]


def test_a_partition_that_is_closed_and_still_listed_shows_no_giant_epoch() -> None:
    store = MemoryStore()
    topic = Topic.create(TOPIC, 2, store=store)
    topic.drain("p-00001-05mv")
    topic.seal("p-00001-05mv")
    assert [each.epoch for each in read_topic(topic, TOPIC, SYSTEM).partitions] == [0, 0]


# ---- the backlog


def dated_queue(store: MemoryStore, prefix: str, *ages_s: int) -> QueueConfig:
    now_ms = RUNTIME.now_ms()
    entries = [
        NewEntry(f"{prefix}/{n}", (Metadata(0, now_ms - age * 1000),))
        for n, age in enumerate(ages_s)
    ]
    store.put(f"{prefix}/manifest", Manifest.empty().append(entries).raw)
    return QueueConfig(store="memory://x", data_path_prefix=prefix)


def test_of_several_queues_the_batches_are_added_and_the_oldest_counts() -> None:
    store = MemoryStore()
    configs = [
        dated_queue(store, "a", 3, 1),
        dated_queue(store, "b"),
        dated_queue(store, "c", 7, 9),
    ]
    assert read_backlog(store, configs, RUNTIME) == (4, 7.0)


def test_a_producer_whose_clock_is_ahead_makes_no_age_below_zero() -> None:
    store = MemoryStore()
    assert read_backlog(store, [dated_queue(store, "a", -5)], RUNTIME) == (1, 0.0)


# ---- the consumer


OWNED = ConsumerConfig(store="memory://owner")


def test_a_consumer_without_a_record_is_not_taken_for_the_one_before() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    reader = ReadOnlyReader(OWNED, store=store, runtime=runtime)
    queue = Queue(store, OWNED, runtime=runtime, role="consumer")
    queue.claim_epoch(None)
    write_consumer_info(store, OWNED, runtime, 1, program="a")
    queue.claim_epoch(None)
    found = read_status(reader)
    assert found.consumer is not None
    assert (found.epoch, found.consumer.epoch, found.consumer.program) == (2, 1, "a")
    store.put("ingest/_consumer.json", b"garbage")
    found = read_status(reader)
    assert found.consumer is None
    assert "note of the consumer" in found.notes[0]


# ---- a broker and its workers


BROKERED = QueueConfig(store="memory://unused")


def dial(announcement: DiscoveryRecord) -> Connection:
    return WebSocketNetwork(BROKER_RUNTIME).connect(announcement)


def test_a_suspended_broker_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_module, "CONNECT_S", 0.3)
    # Its kernel accepts, and nobody ever answers.
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = ask_broker(DiscoveryRecord(1, "id", address, b"s" * 32), dial)
    assert found.alive is False


def test_somebody_else_on_the_port_is_not_the_broker() -> None:
    with serving(secret=b"t" * 32) as (_, announcement, _):
        found = ask_broker(replace(announcement, secret=b"s" * 32), dial)
    assert found.alive is False


@pytest.mark.parametrize("address", ["", "127.0.0.1:9"])
def test_one_that_has_left_or_cannot_be_asked_is_neither(address: str) -> None:
    announcement = DiscoveryRecord(3, "id", address, b"s" * 32 if address else b"")
    found = ask_broker(announcement, None if address else dial)
    assert found == BrokerStatus(term=3, id="id", address=address, seen_ms=0)
    assert found.alive is None
