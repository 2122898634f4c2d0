"""Skip, restore, trim, and collect."""

from __future__ import annotations

from uuid import UUID

import pytest

from opendata_buffer import Consumer
from opendata_buffer.admin.queue_check import check_queue
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.trimming import (
    collect,
    plan_trim,
    restore_batch,
    skip_batch,
    trim_queue,
)
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.place import Place
from opendata_buffer.errors import (
    CommitStateUnknown,
    Fenced,
    InvalidInput,
    PermanentStorageError,
    TransientStorageError,
)
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch, parse_location
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.quarantine import list_quarantine, quarantine, read_copy
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic, partition_config
from tests.unit.cli.shell import Lossy, copy_into, manifest_of

# ---- skip and restore


RUNTIME = SystemRuntime()
CONFIG = ConsumerConfig(store="memory://skip", gc=GarbageCollectorConfig(enabled=False))
METADATA = (Metadata(0, 17, b"payload"),)


def at(store: MemoryStore, config: ConsumerConfig = CONFIG) -> Target:
    return Target(store, config, RUNTIME)


def queue_of(
    *batches: bytes | None, txn: Transaction | None = None, message: UUID | None = None
) -> MemoryStore:
    store = MemoryStore()
    entries = []
    for data in batches:
        location = batch_key("ingest", RUNTIME.ulid(), txn, message)
        if data is not None:
            store.put(location, data)
        entries.append(NewEntry(location, METADATA))
    store.put("ingest/manifest", Manifest.empty().append(entries).raw)
    return store


def records(store: MemoryStore) -> list[bytes]:
    found: list[bytes] = []
    with Consumer(CONFIG, store=store) as consumer:
        while (batch := consumer.next_batch()) is not None:
            found += batch.entries
    return found


GOOD = [encode_batch([b"%d" % n]) for n in range(66)]


@pytest.mark.parametrize("bad", [b"garbage", None], ids=["corrupt", "missing"])
@pytest.mark.parametrize("index", range(4))
def test_only_the_bad_batch_is_skipped_at_any_position(index: int, bad: bytes | None) -> None:
    store = queue_of(*GOOD[:index], bad, *GOOD[index + 1 : 4])
    skipped, _ = skip_batch(at(store), index)
    assert [each.sequence for each in manifest_of(store).entries()] == [0, 1, 2, 3]
    assert records(store) == [b"%d" % n for n in range(4) if n != index]
    assert list_quarantine(store, "ingest") == [skipped]
    if bad is not None:
        assert read_copy(store, "ingest", skipped) == bad


def test_the_rest_of_the_transaction_of_a_skipped_batch_is_still_one_transaction() -> None:
    txn = Transaction("app", 7)
    store = queue_of(GOOD[0], b"garbage", GOOD[2], txn=txn)
    skip_batch(at(store), 1)
    named = [parse_location(each, "ingest") for each in manifest_of(store).locations()]
    assert [each.txn for each in named if each] == [txn] * 3


def test_skip_fences_a_running_consumer() -> None:
    store = queue_of(GOOD[0], b"garbage")
    with Consumer(CONFIG, store=store) as consumer:
        assert consumer.next_batch() is not None
        assert skip_batch(at(store), 1)[1] == consumer.epoch + 1
        with pytest.raises(Fenced):
            consumer.next_batch()


def test_a_readable_batch_is_skipped_only_with_force() -> None:
    store = queue_of(*GOOD[:2])
    before = store.list("").objects
    with pytest.raises(InvalidInput, match="can be read"):
        skip_batch(at(store), 0)
    assert store.list("").objects == before
    skip_batch(at(store), 0, force=True)
    assert records(store) == [b"1"]


def test_the_error_about_a_sequence_that_is_not_queued_names_the_queued_ones() -> None:
    with pytest.raises(InvalidInput, match="it holds 0 to 1"):
        skip_batch(at(queue_of(*GOOD[:2])), 2)


def test_a_batch_does_not_count_as_bad_while_the_store_is_down() -> None:
    class Down(MemoryStore):
        def get(self, key: str, **options: object) -> Blob:  # type: ignore[override]
            if key.endswith(".batch"):
                raise TransientStorageError("down")
            return super().get(key)  # type: ignore[return-value]

    store = Down()
    copy_into(store, queue_of(GOOD[0]))
    with pytest.raises(TransientStorageError):
        skip_batch(at(store), 0)
    assert list_quarantine(store, "ingest") == []


def test_f1_a_skip_whose_answer_was_lost_replaces_one_entry_once() -> None:
    store = Lossy()
    copy_into(store, queue_of(GOOD[0], b"garbage", GOOD[2]))
    store.armed = True
    assert skip_batch(at(store), 1)[1] == 1
    assert not store.armed
    assert records(store) == [b"0", b"2"]


# ---- restore


class Killed(BaseException):
    """The process was killed."""


def killed(*args: object, **named: object) -> None:
    raise Killed


def quarantined(data: bytes | None) -> tuple[MemoryStore, str]:
    store = queue_of(data, GOOD[1])
    return store, skip_batch(at(store), 0, force=True)[0].id


def test_a_restored_batch_is_appended_with_its_metadata() -> None:
    store, name = quarantined(GOOD[0])
    assert restore_batch(at(store), name) == (name, 2, True)
    assert restore_batch(at(store), name) == (name, 2, False)
    assert manifest_of(store).entries()[2].metadata == METADATA
    assert records(store) == [b"1", b"0"]


def test_a_batch_that_a_query_skipped_is_restored_although_its_entry_is_still_queued() -> None:
    store = queue_of(GOOD[0], GOOD[1])
    entry = manifest_of(store).entries()[0]
    report = quarantine(store, "ingest", entry, "torn", runtime=RUNTIME, query="q")
    assert restore_batch(at(store), report.id).sequence == 2


def restored_and_killed(monkeypatch: pytest.MonkeyPatch) -> tuple[MemoryStore, str]:
    """Return a batch that was restored by a process that was killed before it noted the restore."""
    store, name = quarantined(GOOD[0])
    put = store.put

    def dying(key: str, data: bytes | memoryview) -> None:
        if key.endswith(".json") and b'"restored_sequence": 2' in bytes(data):
            raise Killed
        put(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", dying)
        with pytest.raises(Killed):
            restore_batch(at(store), name)
    return store, name


def test_a_restore_that_was_killed_after_its_append_appends_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, name = restored_and_killed(monkeypatch)
    assert restore_batch(at(store), name).sequence == 2
    assert records(store) == [b"1", b"0"]


def test_a_restore_that_was_killed_and_may_have_been_read_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, name = restored_and_killed(monkeypatch)
    with Consumer(CONFIG, store=store) as consumer:
        while (batch := consumer.next_batch()) is not None:
            consumer.ack(batch.sequence)
    with pytest.raises(CommitStateUnknown, match="an earlier restore was interrupted"):
        restore_batch(at(store), name)


def test_a_batch_without_a_copy_or_a_report_cannot_be_restored() -> None:
    store, name = quarantined(None)
    with pytest.raises(InvalidInput, match="has no copy"):
        restore_batch(at(store), name)
    with pytest.raises(InvalidInput, match="no batch '9-x'"):
        restore_batch(at(store), "9-x")


@pytest.mark.parametrize("txn", [None, Transaction("app", 3)])
def test_a_skipped_message_keeps_its_identity(txn: Transaction | None) -> None:
    message = build_uuid(b"\1AAAAA", 9, ACK_TXN)
    store = queue_of(None, txn=txn, message=message)
    skip_batch(at(store), 0)
    (location,) = manifest_of(store).locations()
    parsed = parse_location(location, "ingest")
    assert parsed is not None
    assert (parsed.txn, parsed.message) == (txn, message)
    assert records(store) == []
    assert check_queue(at(store)).ok


# ---- trim


PRODUCER = bytes(6)


def test_every_dropped_batch_has_a_copy_in_the_quarantine() -> None:
    store = queue_of(*GOOD[:66])
    plan = plan_trim(at(store), Place.parse("65"))
    done = trim_queue(at(store), plan)
    reports = list_quarantine(store, "ingest")
    assert [each.id for each in reports] == done[2]
    assert read_copy(store, "ingest", reports[7]) == encode_batch([b"7"])
    assert manifest_of(store).entry_count == 1


def test_the_queue_is_unchanged_if_a_copy_cannot_be_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = queue_of(*GOOD[:3])
    plan = plan_trim(at(store), Place.parse("latest"))

    def full(key: str, data: bytes | memoryview) -> None:
        raise PermanentStorageError("no space")

    monkeypatch.setattr(store, "put", full)
    with pytest.raises(PermanentStorageError, match="no space"):
        trim_queue(at(store), plan)
    assert (manifest_of(store).entry_count, manifest_of(store).epoch) == (3, 0)


def test_batches_that_were_appended_or_read_since_the_plan_are_not_touched() -> None:
    store = queue_of(*GOOD[:4])
    plan = plan_trim(at(store), Place.parse("2"))
    with Consumer(CONFIG, store=store) as consumer:
        consumer.next_descriptors(3)
        consumer.ack_through(2)
    done = trim_queue(at(store), plan)
    assert done[0] == manifest_of(store).first_sequence == 3


def test_a_trim_that_was_killed_before_the_drop_is_finished_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = queue_of(*GOOD[:3])
    plan = plan_trim(at(store), Place.parse("2"))
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "claim_epoch", killed)
        with pytest.raises(Killed):
            trim_queue(at(store), plan)
    left = list_quarantine(store, "ingest")
    assert manifest_of(store).entry_count == 3
    with pytest.raises(InvalidInput, match="still queued as sequence 0"):
        restore_batch(at(store), left[0].id)
    plan = plan_trim(at(store), Place.parse("latest"))
    done = trim_queue(at(store), plan)
    assert manifest_of(store).entry_count == 0
    copied = list_quarantine(store, "ingest")
    assert [each.id for each in copied] == done[2]
    assert copied[:2] == left
    assert restore_batch(at(store), left[0].id).sequence == 3


def test_an_undecided_transaction_is_not_split() -> None:
    store = queue_of(*GOOD[:1])

    def message(clock: int, flags: int) -> NewEntry:
        location = batch_key("ingest", RUNTIME.ulid(), message=build_uuid(PRODUCER, clock, flags))
        store.put(location, encode_batch([]))
        return NewEntry(location)

    open_ = manifest_of(store).append([message(2, CONTINUE_TXN), message(3, CONTINUE_TXN)])
    store.put("ingest/manifest", open_.raw)
    with pytest.raises(InvalidInput, match=r"begins at sequence 1 .* Trim up to 1 at the most"):
        plan_trim(at(store), Place.parse("2"))
    assert plan_trim(at(store), Place.parse("1")).target == 1
    store.put("ingest/manifest", open_.append([message(4, ACK_TXN)]).raw)
    assert plan_trim(at(store), Place.parse("2")).target == 2


# ---- collect


COLLECTED = ConsumerConfig(store="memory://x", gc=GarbageCollectorConfig(grace_period_ms=1))


def of_topic(store: MemoryStore, config: ConsumerConfig, topic: Topic) -> Target:
    return Target(store, config, RUNTIME, topic)


def consumed(store: MemoryStore, config: ConsumerConfig) -> str:
    """Append, read, and acknowledge one batch, and return its location."""
    queue = Queue(store, config, runtime=RUNTIME, role="test")
    location = batch_key(config.data_path_prefix, RUNTIME.ulid())
    store.put(location, encode_batch([b"x"]))
    queue.append([NewEntry(location)])
    queue.dequeue(0, queue.claim_epoch(None).epoch)
    # It is too young to be collected until two milliseconds after it was written.
    written_ms = RUNTIME.now_ms()
    while RUNTIME.now_ms() <= written_ms + 1:
        pass
    return location


def test_active_and_removed_partitions_are_collected_and_the_removed_ones_forgotten() -> None:
    store = MemoryStore()
    topic = Topic.create(COLLECTED, 3, store=store)
    for name in topic.description.names[:2]:
        consumed(store, partition_config(name, COLLECTED))
    topic.drain("0")
    (left,) = topic.remove_drained(after_s=0)
    assert collect(of_topic(store, COLLECTED, topic), dry_run=True).deleted == 0
    assert topic.read().left == (left,)
    assert collect(of_topic(store, COLLECTED, topic)).deleted == 2
    assert not [each for each in store.list("").objects if each.key.endswith(".batch")]
    assert topic.read().left == ()
    assert not store.list("p-00002").objects, (
        "no process has written to it, and collect did not either"
    )


def test_a_removed_partition_is_remembered_while_some_of_its_objects_are_too_young() -> None:
    store = MemoryStore()
    topic = Topic.create(COLLECTED, 2, store=store)
    consumed(store, partition_config(topic.description.names[0], COLLECTED))
    topic.drain("0")
    left = topic.remove_drained(after_s=0)
    patient = ConsumerConfig(store="memory://x")
    assert collect(of_topic(store, patient, topic)).plan.waiting == 1
    assert list(topic.read().left) == left
