"""The status of queues, topics, brokers and consumers."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from opendata_buffer.admin.status import (
    Backlog,
    BrokerStatus,
    Status,
    ask_broker,
    read_backlog,
    read_claims,
    read_ownership,
    read_status,
    read_topic,
    summarise,
)
from opendata_buffer.broker import ws_client as dial_module
from opendata_buffer.broker.claims import Claims, claims_key, encode
from opendata_buffer.broker.client import Connection
from opendata_buffer.broker.lease import DiscoveryRecord
from opendata_buffer.broker.ws_client import connect
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import CorruptData, InvalidInput
from opendata_buffer.formats import manifest as manifest_module
from opendata_buffer.formats.entries import Metadata, NewEntry, QueueEntry
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
from tests.unit.broker.local import connected, entries, serving, soon

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


def test_empty_queue() -> None:
    status = status_of(Manifest.empty().with_epoch(3), listing())
    assert status.as_json() == {
        "store": "memory://status",
        "manifest": "ingest/manifest",
        "data_path_prefix": "ingest",
        "queue_length": 0,
        "oldest_sequence": None,
        "newest_sequence": None,
        "oldest_age_seconds": None,
        "newest_age_seconds": None,
        "next_sequence": 0,
        "epoch": 3,
        "bytes_queued": 0,
        "manifest_bytes": 22,
        "missing": 0,
        "orphans": 0,
        "orphan_bytes": 0,
        "broker": None,
        "claims": None,
        "undecided": 0,
        "oldest_undecided_seconds": None,
        "notes": (),
    }


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


def test_no_entry_but_the_first_and_the_last_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    really = manifest_module.decode_entry

    def counting(raw: bytes, at: int, expected: int, body: int) -> tuple[QueueEntry, int]:
        decoded.append(expected)
        return really(raw, at, expected, body)

    entries = [NewEntry(location(), (Metadata(0, NOW, b""),)) for _ in range(500)]
    manifest = Manifest.parse(Manifest.empty().append(entries).raw)
    monkeypatch.setattr(manifest_module, "decode_entry", counting)
    assert status_of(manifest, listing()).queue_length == 500
    assert decoded == [0, 499]


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
    assert found.as_json()["partitions"][33]["state"] == "draining"


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
    assert read_backlog(store, configs, RUNTIME) == Backlog(4, 7.0)


def test_a_producer_whose_clock_is_ahead_makes_no_age_below_zero() -> None:
    store = MemoryStore()
    assert read_backlog(store, [dated_queue(store, "a", -5)], RUNTIME) == Backlog(1, 0.0)


def test_a_queue_must_be_there_and_a_partition_need_not() -> None:
    config = QueueConfig(store="memory://x")
    with pytest.raises(InvalidInput, match="there is no queue"):
        read_backlog(MemoryStore(), [config], RUNTIME)
    assert read_backlog(MemoryStore(), [config], RUNTIME, topic=True) == Backlog(0, 0.0)


def test_what_is_too_much_is_told_and_a_bound_itself_is_not() -> None:
    backlog = Backlog(10, 5.0)
    assert backlog.excess(5.0, 10) == []
    assert backlog.excess(None, None) == []
    assert backlog.excess(4.5, 9) == [
        "the oldest waits 5.0 s, more than 4.5", "10 wait, more than 9",
    ]  # fmt: skip


# ---- the consumer


OWNED = ConsumerConfig(store="memory://owner")


def test_a_note_is_about_its_own_epoch_only() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    queue = Queue(store, OWNED, runtime=runtime, role="consumer")
    queue.claim_epoch(None)
    write_consumer_info(store, OWNED, runtime, 1, program="a")
    runtime.advance(5.0)
    found = read_ownership(ReadOnlyReader(OWNED, store=store, runtime=runtime))
    assert (found.epoch, found.known, found.since_seconds) == (1, True, 5.0)
    queue.claim_epoch(None)
    found = read_ownership(ReadOnlyReader(OWNED, store=store, runtime=runtime))
    assert (found.epoch, found.known) == (2, False)
    assert found.as_json()["holder_epoch"] == 1


def test_a_sealed_partition_is_nobody_s() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    Queue(store, OWNED, runtime=runtime, role="topic").seal()
    assert read_ownership(ReadOnlyReader(OWNED, store=store, runtime=runtime)).epoch == 0


# ---- a broker and its workers


BROKERED = QueueConfig(store="memory://unused")


def dial(announcement: DiscoveryRecord) -> Connection:
    return connect(announcement, BROKER_RUNTIME)


def test_a_broker_that_lives_tells_its_counters() -> None:
    with serving() as (_, announcement, _), connected(announcement) as client:
        client.append(entries("a", "b", "c"), since=None, begin_by=soon())
        client.append(entries("d"), since=None, begin_by=soon())
        found = ask_broker(announcement, dial)
    assert (found.term, found.id, found.address) == (1, "id", announcement.address)
    assert (found.alive, found.reason) == (True, "")
    assert (found.clients, found.commits, found.appended) == (2, 2, 4)
    assert (found.waiting, found.conflicts, found.group_size) == (0, 0, 2.0)
    assert found.floors == 0
    assert found.commit_rate is not None
    assert found.commit_rate > 0


def test_a_broker_whose_port_refuses_is_not_alive_and_says_why() -> None:
    with serving() as (_, announcement, _):
        pass
    found = ask_broker(announcement, dial)
    assert found.alive is False
    assert "nobody listens" in found.reason
    assert (found.clients, found.group_size, found.commit_rate) == (None, None, None)


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


def test_claims_are_counted() -> None:
    store = MemoryStore()
    assert read_claims(store, BROKERED) is None
    claims = Claims(epoch=1, frontier=5).claim([5, 6, 7], "one", 1_000).finish(6)
    claims = claims.release(5).claim([5], "two", 1_000)
    store.put(claims_key("ingest"), encode(claims))
    found = read_claims(store, BROKERED)
    assert found is not None
    assert (found.frontier, found.held, found.done) == (5, 2, 1)
    assert (found.oldest_held, found.oldest_worker, found.oldest_deliveries) == (5, "two", 2)


def test_claims_that_are_none_are_an_error() -> None:
    store = MemoryStore()
    store.put(claims_key("ingest"), b"garbage")
    with pytest.raises(CorruptData):
        read_claims(store, BROKERED)
