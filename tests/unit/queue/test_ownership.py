"""The queue that owns a data prefix, and the watermark in its marker."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import Consumer, Producer
from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    ProducerConfig,
    QueueConfig,
)
from opendata_buffer.errors import (
    CorruptData,
    CorruptManifest,
    Fenced,
    OpenDataBufferError,
    PrefixConflict,
    QueueReset,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.queue.marker import owner_key
from opendata_buffer.queue.ownership import (
    NOTE_INTERVAL_S,
    change_grace_period,
    check_owner,
    claim_for_writing,
    claim_queue,
)
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import PutOutcome, read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.scripted import ScriptedStore, not_applied_answer_lost

INGEST = QueueConfig(store="memory://unused")


def _config(prefix: str, manifest: str) -> QueueConfig:
    return QueueConfig(store="memory://unused", data_path_prefix=prefix, manifest_path=manifest)


def _claim(store: MemoryStore, prefix: str, manifest: str) -> str:
    return claim_queue(store, _config(prefix, manifest)).queue_id


def _owned(store: MemoryStore, prefix: str, manifest: str) -> bool:
    return check_owner(store, _config(prefix, manifest)) is not None


def test_f4_a_queue_keeps_its_id_until_it_is_created_again() -> None:
    store = MemoryStore()
    first = _claim(store, "ingest", "ingest/manifest")
    before = store.get(owner_key("ingest"))
    assert _claim(store, "ingest", "ingest/manifest") == first
    assert store.get(owner_key("ingest")) == before, "the second claim wrote nothing"
    store.delete_many(["ingest/_owner.json"])
    assert _claim(store, "ingest", "ingest/manifest") not in ("", first)


def test_f7_a_prefix_of_another_queue_is_refused_naming_both_manifests() -> None:
    store = MemoryStore()
    _claim(store, "ingest", "a/manifest")
    for refuse in (_claim, _owned):
        with pytest.raises(PrefixConflict, match=r"'a/manifest'.*'b/manifest'") as caught:
            refuse(store, "ingest", "b/manifest")
        assert (caught.value.owner, caught.value.manifest_path) == ("a/manifest", "b/manifest")


def test_f2_a_claim_that_never_lands_is_a_transient_error() -> None:
    store = ScriptedStore(*[not_applied_answer_lost] * 10_000)
    with pytest.raises(
        TransientStorageError,
        match=r"written within 60 s: answers were lost: connection reset\. It may",
    ):
        claim_queue(store, INGEST, runtime=ManualRuntime())


def test_the_first_of_two_concurrent_claims_wins() -> None:
    class Late(MemoryStore):
        def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            rival = b'{"version": 1, "manifest": "../rival"}'
            super().put_if(key, rival, None)
            return super().put_if(key, data, condition)

    with pytest.raises(PrefixConflict, match="'rival'"):
        _claim(Late(), "ingest", "ingest/manifest")


def test_the_error_about_a_marker_that_is_too_large_has_its_key_and_a_fix() -> None:
    store = MemoryStore()
    store.put("ingest/_owner.json", bytes(64 * 1024 + 1))
    with pytest.raises(
        CorruptData,
        match=r"^'ingest/_owner\.json' in memory://\S*: the owner marker is not readable: .* 65537 "
        r"bytes .* limit of 65536: .*\. If one queue alone uses this data prefix, delete",
    ):
        claim_queue(store, INGEST)


def test_f7_f12_a_claim_for_use_probes_the_store_then_claims_the_prefix() -> None:
    class Unsafe(MemoryStore):
        def check_conditional_writes(self, near: str, *_: object, **__: object) -> None:
            raise UnsafeStore(f"no compare-and-swap near {near}")

    config = QueueConfig(store="memory://unused")
    store = MemoryStore()
    first = claim_for_writing(store, config, runtime=ManualRuntime())
    assert first.queue_id
    assert claim_for_writing(store, config, runtime=ManualRuntime()).queue_id == first.queue_id

    unsafe = Unsafe()
    with pytest.raises(UnsafeStore, match="near ingest/manifest"):
        claim_for_writing(unsafe, config, runtime=ManualRuntime())
    assert unsafe.list("").objects == ()


OWNER_KEY, MANIFEST = "ingest/_owner.json", "ingest/manifest"
PRODUCER = ProducerConfig(store="memory://q", flush_interval_ms=1)
CONSUMER = ConsumerConfig(store="memory://q", gc=GarbageCollectorConfig(enabled=False))
REBUILD = r"buffer fsck memory://.* --repair.* 'opendata-buffer produce memory://.* --recreate'"


def produce(store: MemoryStore, *records: bytes, **settings: Any) -> None:
    with Producer(replace(PRODUCER, **settings), store=store) as producer:
        for record in records:
            producer.produce([record]).result(20)


def consume(store: MemoryStore, config: ConsumerConfig = CONSUMER) -> list[bytes]:
    found = []
    with Consumer(config, store=store) as consumer:
        while (batch := consumer.next_batch()) is not None:
            found += batch.entries
            consumer.ack(batch.sequence)
    return found


def marker(store: MemoryStore) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(read_bytes(store, OWNER_KEY))
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
def test_f4_a_lost_or_restored_manifest_stops_every_process_and_nothing_is_deleted(
    harm: Any,
) -> None:
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
            GarbageCollector(store, CONSUMER).run_once(dry_run=dry_run)
    assert store.list("").objects == before.objects
    assert batches(store) == 5


def test_f4_an_epoch_that_went_backwards_is_refused() -> None:
    store = MemoryStore()
    produce(store, b"a")
    old = read_bytes(store, MANIFEST)
    assert consume(store) == [b"a"]
    store.put(MANIFEST, old)
    with pytest.raises(QueueReset, match=r"next sequence 1 -> 1, epoch 1 -> 0"):
        consume(store)


def test_f4_a_manifest_that_is_lost_after_the_claim_is_not_created_again() -> None:
    store = MemoryStore()
    produce(store, b"a")
    claim = claim_for_writing(store, PRODUCER)
    queue = Queue(store, PRODUCER, runtime=ManualRuntime(), role="producer", claim=claim)
    lose(store)
    with pytest.raises(QueueReset, match=r"vanished while in use\. It is not recreated"):
        queue.append([entry(1)])
    with pytest.raises(QueueReset, match="vanished while in use"):
        queue.read()


def test_starting_over_takes_a_command_and_gives_the_queue_a_new_id() -> None:
    store = MemoryStore()
    store.put(OWNER_KEY, b'{"version": 1, "manifest": "manifest", "id": "01J5", "colour": "red"}\n')
    produce(store, b"a", b"b")
    lose(store)
    claim_for_writing(store, PRODUCER, recreate=True)
    produce(store, b"c")
    new = marker(store)["id"]
    assert new not in ("", "01J5")
    assert (marker(store)["next_sequence"], marker(store)["colour"]) == (1, "red")
    # A sound queue is not recreated, even if the caller asks for it.
    claim_for_writing(store, PRODUCER, recreate=True)
    produce(store, b"d")
    assert marker(store)["id"] == new
    assert consume(store) == [b"c", b"d"]


def test_two_processes_that_recreate_a_queue_agree_on_the_first_ones_id() -> None:
    store = MemoryStore()
    produce(store, b"a")
    lose(store)
    first, second = (claim_for_writing(store, PRODUCER, recreate=True) for _ in range(2))
    assert first.queue_id == second.queue_id


def test_a_marker_without_a_watermark_is_read_and_gets_one() -> None:
    store = MemoryStore()
    store.put(OWNER_KEY, b'{"version": 1, "manifest": "manifest", "id": "01J5", "colour": "red"}\n')
    produce(store, b"a")
    assert marker(store) == {
        "colour": "red",  # a field of a later version is kept
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


def test_a_consumer_adds_the_location_of_its_last_batch_to_a_note_of_the_collector() -> None:
    store = MemoryStore()
    produce(store, b"a", b"b")
    (_, last) = Manifest.parse(read_bytes(store, MANIFEST)).entries()
    with Consumer(CONSUMER, store=store) as consumer:
        for _ in range(2):
            assert consumer.next_batch() is not None
        consumer.ack_through(1)
        consumer.flush()
        # A collector notes the acknowledgement before the consumer does.
        collector = claim_queue(store, CONSUMER, runtime=ManualRuntime())
        collector.note(Manifest.parse(read_bytes(store, MANIFEST)), now=True)
        assert marker(store)["acked"] == 1
    assert marker(store)["acked_location"] == last.location
    # A process that knows less does not remove the location.
    assert consume(store) == []
    collector.note(Manifest.parse(read_bytes(store, MANIFEST)), now=True)
    assert marker(store)["acked_location"] == last.location


def test_a_fenced_consumer_does_not_note_the_location_of_a_batch_that_is_still_queued() -> None:
    store = MemoryStore()
    produce(store, b"a", b"b", b"c")
    zombie = Consumer(CONSUMER, store=store)
    for _ in range(3):
        assert zombie.next_batch() is not None
    zombie.ack_through(0)
    put_if, successor = store.put_if, list[Consumer]()

    def taken_over(key: str, data: bytes, condition: str | None) -> PutOutcome:
        if key == CONSUMER.manifest_path:
            store.put_if = put_if  # type: ignore[method-assign]
            successor.append(Consumer(CONSUMER, store=store))
        return put_if(key, data, condition)

    store.put_if = taken_over  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        zombie.ack_through(2)
    zombie.close()
    # Only the first batch was dequeued; the others wait for the successor.
    assert marker(store)["acked"] == 0
    assert marker(store)["acked_location"] == ""
    assert len(successor) == 1
    successor[0].close()


def test_a_note_for_a_queue_that_was_recreated_meanwhile_writes_nothing() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    old = claim_queue(store, PRODUCER, runtime=runtime)
    store.put(OWNER_KEY, b'{"version": 1, "manifest": "manifest", "id": "another"}\n')
    old.note(Manifest.empty().append([entry(0)]), now=True)
    assert marker(store) == {"version": 1, "manifest": "manifest", "id": "another"}


def test_an_append_succeeds_although_the_marker_cannot_be_written() -> None:
    class ReadOnlyMarker(MemoryStore):
        broken = False
        tried = 0

        def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
            self.tried += key == OWNER_KEY
            if self.broken and key == OWNER_KEY:
                raise OpenDataBufferError("denied")
            return super().put_if(key, data, condition)

    store, runtime = ReadOnlyMarker(), ManualRuntime()
    claim = claim_for_writing(store, PRODUCER, runtime=runtime)
    store.broken = True
    queue = Queue(store, PRODUCER, runtime=runtime, role="producer", claim=claim)
    assert queue.append([entry(0)]) == 0
    assert "next_sequence" not in marker(store)
    # Later appends do not retry it either.
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
    with pytest.raises(
        CorruptManifest, match=r"'ingest/manifest' in memory://.*fsck memory:.* --repair"
    ):
        produce(store, b"b")
    assert batches(store) == 1


# ---- the grace period, which all programs of a queue share


@pytest.mark.parametrize(("own_ms", "written_ms"), [(None, 600_000), (7_000, 7_000)])
def test_the_process_that_creates_a_queue_writes_its_grace_period(
    own_ms: int | None, written_ms: int
) -> None:
    store = MemoryStore()
    gc = GarbageCollectorConfig(enabled=False, grace_period_ms=own_ms)
    consume(store, replace(CONSUMER, gc=gc, create_if_missing=True))
    assert marker(store)["grace_period_ms"] == written_ms


def test_a_program_with_another_grace_period_warns_once_and_uses_that_of_the_queue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = ManualRuntime()
    store = MemoryStore(now_ms=runtime.now_ms)
    config = replace(INGEST, store="memory://contradicted")
    claim_for_writing(store, config, runtime=runtime, grace_ms=3_600_000)
    for _ in range(2):
        claim = claim_for_writing(store, config, runtime=runtime, grace_ms=1_000)
        assert claim.grace_ms == 3_600_000
    (said,) = (each for each in caplog.messages if "grace period" in each)
    for part in ("memory://", "3600000 ms", "1000 ms", "gc memory", "--grace-period-ms 1000"):
        assert part in said
    caplog.clear()
    claim_for_writing(store, config, runtime=runtime, grace_ms=3_600_000)
    claim_for_writing(store, INGEST, runtime=runtime)
    assert not caplog.messages


def test_f5_a_collector_uses_the_grace_period_of_its_queue() -> None:
    runtime = ManualRuntime()
    store = MemoryStore(now_ms=runtime.now_ms)
    claim_queue(store, INGEST, runtime=runtime, grace_ms=3_600_000)
    store.put(MANIFEST, Manifest.starting_at(1, 0).raw)
    store.put(f"ingest/{runtime.ulid()}.batch", b"")
    hasty = replace(CONSUMER, gc=GarbageCollectorConfig(grace_period_ms=1_000))
    runtime.advance(3_599)
    assert GarbageCollector(store, hasty, runtime=runtime).run_once().plan.waiting == 1
    runtime.advance(2)
    assert GarbageCollector(store, hasty, runtime=runtime).run_once().deleted == 1


def test_a_marker_of_an_older_release_gets_the_first_configured_grace_period() -> None:
    store = MemoryStore()
    old = {"version": 1, "manifest": "manifest", "id": "01J5T4R3KXBMZ7QV9N2WG8YDHP", "more": [1]}
    store.put(OWNER_KEY, json.dumps(old).encode())
    assert claim_for_writing(store, INGEST).grace_ms == 600_000
    assert marker(store) == old
    assert claim_for_writing(store, INGEST, grace_ms=9_000).grace_ms == 9_000
    assert marker(store) == {**old, "grace_period_ms": 9_000}
    assert claim_for_writing(store, INGEST, grace_ms=8_000).grace_ms == 9_000


def test_a_recreated_queue_keeps_its_grace_period() -> None:
    store = MemoryStore()
    claim_for_writing(store, INGEST, grace_ms=7_000)
    produce(store, b"a")
    lose(store)
    claim_for_writing(store, INGEST, recreate=True)
    assert marker(store)["grace_period_ms"] == 7_000


def test_f7_notes_keep_a_changed_grace_period_and_another_queue_cannot_change_it() -> None:
    store = MemoryStore()
    produce(store, b"a")
    change_grace_period(store, INGEST, ManualRuntime(), 5_000)
    produce(store, b"b")
    assert (marker(store)["grace_period_ms"], marker(store)["next_sequence"]) == (5_000, 2)
    with pytest.raises(PrefixConflict):
        change_grace_period(store, _config("ingest", "other"), ManualRuntime(), 1)
