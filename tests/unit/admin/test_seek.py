"""Moving the beginning of a queue."""

from __future__ import annotations

import pytest

from opendata_buffer.admin.seek import GROUP, plan_seek, seek
from opendata_buffer.admin.skip import restore_batch
from opendata_buffer.admin.start import Start
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages.message_ids import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.quarantine import list_quarantine, read_copy
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore

RUNTIME = SystemRuntime()
CONFIG = ConsumerConfig(store="memory://seek", gc=GarbageCollectorConfig(enabled=False))
PRODUCER = bytes(6)


def queue_of(batches: int) -> MemoryStore:
    store = MemoryStore()
    entries = []
    for n in range(batches):
        entries.append(NewEntry(batch_key("ingest", RUNTIME.ulid())))
        store.put(entries[-1].location, encode_batch([b"%d" % n]))
    store.put("ingest/manifest", Manifest.empty().append(entries).raw)
    return store


def manifest_of(store: MemoryStore) -> Manifest:
    got = store.get("ingest/manifest")
    assert isinstance(got, Blob)
    return Manifest.parse(got.data)


def test_everything_that_is_dropped_has_its_copy() -> None:
    store = queue_of(GROUP + 2)
    told: list[tuple[int, int]] = []
    plan = plan_seek(store, CONFIG, Start.parse(str(GROUP + 1)), RUNTIME)
    done = seek(store, CONFIG, plan, RUNTIME, advance=lambda *each: told.append(each))
    assert told == [(GROUP, GROUP + 1), (GROUP + 1, GROUP + 1)]
    reports = list_quarantine(store, "ingest")
    assert [each.id for each in reports] == list(done.copies)
    assert read_copy(store, "ingest", reports[7]) == encode_batch([b"7"])
    assert manifest_of(store).entry_count == 1


def test_a_store_that_takes_no_copy_keeps_the_queue_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = queue_of(3)
    plan = plan_seek(store, CONFIG, Start.parse("latest"), RUNTIME)

    def full(key: str, data: bytes | memoryview) -> None:
        raise PermanentStorageError("no space")

    monkeypatch.setattr(store, "put", full)
    with pytest.raises(PermanentStorageError, match="no space"):
        seek(store, CONFIG, plan, RUNTIME)
    assert (manifest_of(store).entry_count, manifest_of(store).epoch) == (3, 0)


def test_what_is_appended_or_read_since_the_plan_is_left_as_it_is() -> None:
    store = queue_of(4)
    plan = plan_seek(store, CONFIG, Start.parse("2"), RUNTIME)
    with Consumer(CONFIG, store=store) as consumer:
        consumer.next_descriptors(3)
        consumer.ack_through(2)
    done = seek(store, CONFIG, plan, RUNTIME)
    assert done.first == manifest_of(store).first_sequence == 3


def test_a_seek_that_was_killed_before_it_dropped_is_done_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Killed(BaseException):
        pass

    store = queue_of(3)
    plan = plan_seek(store, CONFIG, Start.parse("2"), RUNTIME)
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "claim_epoch", lambda *args, **named: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            seek(store, CONFIG, plan, RUNTIME)
    left = list_quarantine(store, "ingest")
    assert manifest_of(store).entry_count == 3
    with pytest.raises(InvalidInput, match="still queued as sequence 0"):
        restore_batch(store, CONFIG, left[0].id, RUNTIME)
    plan = plan_seek(store, CONFIG, Start.parse("latest"), RUNTIME)
    done = seek(store, CONFIG, plan, RUNTIME)
    assert manifest_of(store).entry_count == 0
    copied = list_quarantine(store, "ingest")
    assert [each.id for each in copied] == list(done.copies)
    assert copied[:2] == left
    assert restore_batch(store, CONFIG, left[0].id, RUNTIME).restored_sequence == 3


def test_a_transaction_that_is_not_decided_is_not_torn_apart() -> None:
    store = queue_of(1)

    def message(clock: int, flags: int) -> NewEntry:
        location = batch_key("ingest", RUNTIME.ulid(), message=build_uuid(PRODUCER, clock, flags))
        store.put(location, encode_batch([]))
        return NewEntry(location)

    open_ = manifest_of(store).append([message(2, CONTINUE_TXN), message(3, CONTINUE_TXN)])
    store.put("ingest/manifest", open_.raw)
    with pytest.raises(InvalidInput, match=r"begins at sequence 1 .* or seek to 1 at the most"):
        plan_seek(store, CONFIG, Start.parse("2"), RUNTIME)
    assert plan_seek(store, CONFIG, Start.parse("1"), RUNTIME).target == 1
    store.put("ingest/manifest", open_.append([message(4, ACK_TXN)]).raw)
    plans = [plan_seek(store, CONFIG, Start.parse(str(n)), RUNTIME) for n in range(5)]
    assert [(plan.target, plan.cut) for plan in plans] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 0)]


def test_a_transaction_of_one_piece_is_counted_where_the_place_is_inside() -> None:
    store = queue_of(0)
    entries = [
        NewEntry(batch_key("ingest", RUNTIME.ulid(), Transaction("app", n))) for n in (1, 1, 2)
    ]
    store.put("ingest/manifest", Manifest.empty().append(entries).raw)
    plans = [plan_seek(store, CONFIG, Start.parse(str(n)), RUNTIME) for n in range(4)]
    assert [plan.cut for plan in plans] == [0, 1, 0, 0]
