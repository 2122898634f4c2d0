"""What the marker remembers of a manifest, and what is refused when that is lost (failure F4)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig, ProducerConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import CorruptManifest, Fenced, OpenDataBufferError, QueueReset
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.producer.producer import Producer
from opendata_buffer.queue.ownership import NOTE_INTERVAL_S, check_owner, claim_for_use, claim_queue
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.rollback_checks import Watermark
from opendata_buffer.stores.base import Absent, Blob, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

MARKER, MANIFEST = "ingest/_owner.json", "ingest/manifest"
PRODUCER = ProducerConfig(store="memory://q", flush_interval_ms=1)
CONSUMER = ConsumerConfig(store="memory://q", gc=GarbageCollectorConfig(enabled=False))
EAGER = replace(CONSUMER, gc=GarbageCollectorConfig(grace_period_ms=0))
REBUILD = r"opendata-buffer manifest rebuild memory://.* recreate=True"


class CountingStore(MemoryStore):
    """Counts the writes of the marker."""

    notes = 0

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        self.notes += key == MARKER
        return super().put_if(key, data, condition)


def produce(store: MemoryStore, *records: bytes, **settings: Any) -> None:
    with Producer(replace(PRODUCER, **settings), store=store) as producer:
        for record in records:
            producer.produce([record]).watcher.await_durable(20)


def consume(store: MemoryStore, config: ConsumerConfig = CONSUMER) -> list[bytes]:
    found = []
    with Consumer(config, store=store) as consumer:
        while (batch := consumer.next_batch()) is not None:
            found += batch.entries
            consumer.ack(batch.sequence)
    return found


def read(store: MemoryStore, key: str) -> bytes:
    got = store.get(key)
    assert isinstance(got, Blob)
    return got.data


def marker(store: MemoryStore) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(read(store, MARKER))
    return fields


def batches(store: MemoryStore) -> int:
    return sum(each.key.endswith(".batch") for each in store.list("ingest/").objects)


def entry(n: int) -> NewEntry:
    return NewEntry(f"ingest/01J5T4R3KXBMZ7QV9N2WG8Y{n:03d}.batch")


def lose(store: MemoryStore) -> None:
    store.delete_many([MANIFEST])


def restore_old(store: MemoryStore) -> None:
    store.put(MANIFEST, Manifest.empty().append([entry(0)]).raw)


@pytest.mark.parametrize("harm", [lose, restore_old])
def test_f4_a_lost_or_restored_manifest_stops_everybody_and_destroys_nothing(harm: Any) -> None:
    store = MemoryStore()
    produce(store, b"a", b"b", b"c", b"d", b"e")
    harm(store)
    before = store.list("")
    with pytest.raises(QueueReset, match=REBUILD):
        produce(store, b"f")
    with pytest.raises(QueueReset, match=REBUILD):
        consume(store)
    for dry_run in (True, False):
        with pytest.raises(QueueReset, match=REBUILD):
            GarbageCollector(store, EAGER).run_once(dry_run=dry_run)
    assert store.list("").objects == before.objects
    assert batches(store) == 5


def test_f4_an_epoch_that_went_backwards_is_refused_too() -> None:
    store = MemoryStore()
    produce(store, b"a")
    old = read(store, MANIFEST)
    assert consume(store) == [b"a"]
    store.put(MANIFEST, old)
    with pytest.raises(QueueReset, match=r"next sequence 1 -> 1, epoch 1 -> 0"):
        consume(store)


def test_f4_a_manifest_that_is_lost_after_the_claim_is_not_created_anew() -> None:
    store = MemoryStore()
    produce(store, b"a")
    queue = Queue(
        store,
        PRODUCER,
        runtime=ManualRuntime(),
        role="producer",
        claim=claim_for_use(store, PRODUCER),
    )
    lose(store)
    with pytest.raises(QueueReset, match="is gone from"):
        queue.append([entry(1)])
    with pytest.raises(QueueReset, match="is gone from"):
        queue.read()


def test_starting_over_takes_a_word_and_gives_the_queue_a_new_id() -> None:
    store = MemoryStore()
    produce(store, b"a", b"b")
    old = marker(store)["id"]
    lose(store)
    produce(store, b"c", recreate=True)
    assert marker(store)["id"] not in ("", old)
    assert marker(store)["next_sequence"] == 1
    # What is sound is not started over, whatever was asked for.
    new = marker(store)["id"]
    produce(store, b"d", recreate=True)
    assert marker(store)["id"] == new
    assert consume(store) == [b"c", b"d"]


def test_starting_over_keeps_the_fields_of_later_versions() -> None:
    store = MemoryStore()
    store.put(MARKER, b'{"version": 1, "manifest": "manifest", "id": "01J5", "colour": "red"}\n')
    produce(store, b"a")
    lose(store)
    produce(store, b"b", recreate=True)
    assert marker(store)["id"] != "01J5"
    assert marker(store)["colour"] == "red"


def test_of_two_that_start_over_the_first_ones_id_stays() -> None:
    store = MemoryStore()
    produce(store, b"a")
    lose(store)
    again = replace(PRODUCER, recreate=True)
    assert claim_for_use(store, again).queue_id == claim_for_use(store, again).queue_id


def test_a_marker_of_the_version_before_is_read_and_gains_the_watermark() -> None:
    store = MemoryStore()
    store.put(MARKER, b'{"version": 1, "manifest": "manifest", "id": "01J5", "colour": "red"}\n')
    produce(store, b"a")
    assert marker(store) == {
        "colour": "red",  # of a later version: kept
        "version": 1,
        "manifest": "manifest",
        "id": "01J5",
        "next_sequence": 1,
        "epoch": 0,
    }
    assert consume(store) == [b"a"]
    assert marker(store)["epoch"] == 1
    assert marker(store)["acked"] == 0
    assert marker(store)["acked_location"].endswith(".batch")


def test_the_watermark_is_written_seldom() -> None:
    store, runtime = CountingStore(), ManualRuntime()
    claim = claim_for_use(store, PRODUCER, runtime=runtime)
    queue = Queue(store, PRODUCER, runtime=runtime, role="producer", claim=claim)
    queue.append([entry(0)])
    assert store.notes == 2  # the claim, and that there is a manifest now
    for n in range(1, 100):
        queue.append([entry(n)])
    assert store.notes == 2
    runtime.advance(NOTE_INTERVAL_S)
    queue.append([entry(100)])
    queue.append([entry(101)])
    assert (store.notes, marker(store)["next_sequence"]) == (3, 101)
    queue.close()
    queue.close()
    assert (store.notes, marker(store)["next_sequence"]) == (4, 102)


def test_a_watermark_never_falls() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    slow = claim_queue(store, PRODUCER, runtime=runtime)
    quick = claim_queue(store, PRODUCER, runtime=runtime)
    first = Manifest.empty().append([entry(0)])
    quick.note(first.append([entry(1)]).with_epoch(4), now=True)
    slow.note(first.with_epoch(2), now=True)
    found = check_owner(store, PRODUCER)
    assert found is not None
    assert found.watermark == Watermark(2, 4)


def test_a_consumer_adds_where_its_last_batch_was_to_what_a_collector_noted_before() -> None:
    store = MemoryStore()
    produce(store, b"a", b"b")
    (_, last) = Manifest.parse(read(store, MANIFEST)).entries()
    with Consumer(CONSUMER, store=store) as consumer:
        for _ in range(2):
            assert consumer.next_batch() is not None
        consumer.ack_through(1)
        consumer.flush()
        # Seen by a collector after the acknowledgement, before the consumer's own note.
        collector = claim_queue(store, CONSUMER, runtime=ManualRuntime())
        collector.note(Manifest.parse(read(store, MANIFEST)), now=True)
        assert marker(store)["acked"] == 1
    assert marker(store)["acked_location"] == last.location
    # Who knows less does not take it away.
    assert consume(store) == []
    collector.note(Manifest.parse(read(store, MANIFEST)), now=True)
    assert marker(store)["acked_location"] == last.location


def test_a_fenced_consumer_does_not_tell_where_a_batch_was_that_still_waits() -> None:
    store = MemoryStore()
    produce(store, b"a", b"b", b"c")
    zombie = Consumer(CONSUMER, store=store)
    for _ in range(3):
        assert zombie.next_batch() is not None
    zombie.ack_through(0)
    put_if, successor = store.put_if, list[Consumer]()

    def taken_over(key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        store.put_if = put_if  # type: ignore[method-assign]
        successor.append(Consumer(CONSUMER, store=store))
        return put_if(key, data, condition)

    store.put_if = taken_over  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        zombie.ack_through(2)
    zombie.close()
    # The last one that left is the first; the others wait for the successor.
    assert marker(store)["acked"] == 0
    assert marker(store)["acked_location"] == ""
    assert len(successor) == 1
    successor[0].close()


def test_a_note_into_the_marker_of_a_queue_that_started_over_writes_nothing() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    old = claim_queue(store, PRODUCER, runtime=runtime)
    store.put(MARKER, b'{"version": 1, "manifest": "manifest", "id": "another"}\n')
    old.note(Manifest.empty().append([entry(0)]), now=True)
    assert marker(store) == {"version": 1, "manifest": "manifest", "id": "another"}


def test_a_marker_that_cannot_be_written_is_no_error_of_the_append() -> None:
    class ReadOnlyMarker(MemoryStore):
        broken = False
        tried = 0

        def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
            self.tried += key == MARKER
            if self.broken and key == MARKER:
                raise OpenDataBufferError("denied")
            return super().put_if(key, data, condition)

    store, runtime = ReadOnlyMarker(), ManualRuntime()
    claim = claim_for_use(store, PRODUCER, runtime=runtime)
    store.broken = True
    queue = Queue(store, PRODUCER, runtime=runtime, role="producer", claim=claim)
    assert queue.append([entry(0)]) == 0
    assert "next_sequence" not in marker(store)
    # Nor does each append try again.
    tried = store.tried
    assert queue.append([entry(1)]) == 1
    assert store.tried == tried
    store.broken = False
    runtime.advance(NOTE_INTERVAL_S)
    assert queue.append([entry(2)]) == 2
    assert marker(store)["next_sequence"] == 3


def test_a_damaged_manifest_is_named_before_anything_is_uploaded() -> None:
    store = MemoryStore()
    produce(store, b"a")
    store.put(MANIFEST, b"<html>")
    with pytest.raises(CorruptManifest, match=r"'ingest/manifest' in memory://"):
        produce(store, b"b")
    assert batches(store) == 1
