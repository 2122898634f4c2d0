"""The target of a copy by itself: what arrives once, and who may write there."""

from __future__ import annotations

import pytest

from opendata_buffer.admin.copy_pace import CopyPace
from opendata_buffer.admin.copy_target import CopyTarget, Group, Side
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.fetch import BatchDescriptor, RawBatch
from opendata_buffer.errors import Drained, Superseded
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import parse_location
from opendata_buffer.formats.manifest import Manifest, QueueEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore

RUNTIME = SystemRuntime()
CONFIG = ConsumerConfig(store="memory://to", gc=GarbageCollectorConfig(enabled=False))


def target(store: MemoryStore, app: str = "copy-x") -> CopyTarget:
    made = CopyTarget(Side(store, CONFIG), app, CopyPace(), RUNTIME)
    made.take_over("s3://from ingest/manifest", 0, {})
    return made


def group(*numbers: int, batches: int = 1) -> Group:
    return [
        (n, [BatchDescriptor(n, f"in/{n}", (Metadata(0, n, b"m"),)) for _ in range(batches)])
        for n in numbers
    ]


def fetch(descriptor: BatchDescriptor) -> RawBatch:
    data = encode_batch([b"%d" % descriptor.sequence])
    return RawBatch(data, descriptor.sequence, descriptor.location, descriptor.metadata)


def entries(store: MemoryStore) -> tuple[QueueEntry, ...]:
    got = store.get("ingest/manifest")
    assert isinstance(got, Blob)
    return Manifest.parse(got.data).entries()


def numbers(store: MemoryStore) -> list[int | None]:
    parsed = [parse_location(each.location, "ingest") for each in entries(store)]
    return [None if each is None or each.txn is None else each.txn.batch for each in parsed]


def take_everything(store: MemoryStore) -> None:
    queue = Queue(store, CONFIG, runtime=RUNTIME, role="consumer")
    last = entries(store)[-1].sequence
    queue.dequeue(last, queue.claim_epoch(None).epoch)


def test_transactions_arrive_in_order_under_their_numbers_with_their_metadata() -> None:
    store = MemoryStore()
    to = target(store)
    assert to.highest() is None
    moved = to.append(group(3, 7, batches=2), fetch)
    assert numbers(store) == [3, 3, 7, 7]
    assert [each.metadata for each in entries(store)] == [
        (Metadata(0, n, b"m"),) for n in (3, 3, 7, 7)
    ]
    assert sum(each.nbytes for each in moved) == 4 * len(fetch(group(3)[0][1][0]).data)
    assert to.highest() == 7


def test_copies_of_two_queues_do_not_know_each_other() -> None:
    store = MemoryStore()
    target(store, "copy-x").append(group(5), fetch)
    other = target(store, "copy-y")
    assert other.highest() is None
    other.append(group(1), fetch)
    assert numbers(store) == [5, 1]


def test_what_waits_there_is_not_appended_again() -> None:
    store = MemoryStore()
    to = target(store)
    to.append(group(1, 2), fetch)
    assert list(to.append(group(2), fetch)) == []
    assert numbers(store) == [1, 2]
    assert len(to.append(group(2, 3), fetch)) == 1
    assert numbers(store) == [1, 2, 3]


def test_behind_what_its_reader_took_goes_an_empty_batch_first() -> None:
    store = MemoryStore()
    to = target(store)
    to.append(group(1), fetch)
    take_everything(store)
    to.append(group(2), fetch)
    assert numbers(store) == [None, 2]


def test_who_took_the_copy_over_ends_the_one_before_and_goes_on_from_its_record() -> None:
    store = MemoryStore()
    first = target(store)
    first.note(4, {"k": 1})
    second = CopyTarget(Side(store, CONFIG), "copy-x", CopyPace(), RUNTIME)
    record = second.take_over("elsewhere", 0, {})
    assert (record.next_sequence, record.transactions) == (4, {"k": 1})
    assert record.source == "s3://from ingest/manifest"
    for call in (lambda: first.note(9, {}), lambda: first.append(group(4), fetch)):
        with pytest.raises(Superseded):
            call()
    second.note(5, {})


def test_a_target_that_was_closed_is_told_as_such() -> None:
    store = MemoryStore()
    to = target(store)
    Queue(store, CONFIG, runtime=RUNTIME, role="producer").seal()
    with pytest.raises(Drained):
        to.highest()
