"""Copying a queue, so that each batch arrives once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from opendata_buffer import outcomes
from opendata_buffer.admin import copy_pace, copy_target
from opendata_buffer.admin.copy import Copier, step_all
from opendata_buffer.admin.copy_target import CopyTarget, Side
from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import (
    BatchMissing,
    DataLoss,
    InvalidInput,
    QueueFull,
    QueueReset,
    Superseded,
    TransientStorageError,
)
from opendata_buffer.formats.batch import decode_batch, encode_batch
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages.message_ids import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.queue.ownership import claim_queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import (
    Absent,
    Blob,
    IfVersion,
    PutOutcome,
)
from opendata_buffer.stores.memory import MemoryStore

RUNTIME = SystemRuntime()
CONFIG = ConsumerConfig(
    store="memory://copy", gc=GarbageCollectorConfig(enabled=False), backoff_base_ms=1
)
TARGET = replace(CONFIG, data_path_prefix="to", manifest_path="")
PRODUCER = bytes(6)


class World:
    """A source that is written by hand."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        claim_queue(self.store, CONFIG, runtime=RUNTIME)
        self.manifest = Manifest.empty()
        self.write()

    def write(self) -> None:
        self.store.put("ingest/manifest", self.manifest.raw)

    def add(
        self, value: bytes, txn: Transaction | None = None, message: tuple[int, int] | None = None
    ) -> None:
        uuid = None if message is None else build_uuid(PRODUCER, *message)
        location = batch_key("ingest", RUNTIME.ulid(), txn, uuid)
        self.store.put(location, encode_batch([value] if value else []))
        metadata = Metadata(0, 1_000 + self.manifest.next_sequence, value)
        self.manifest = self.manifest.append([NewEntry(location, (metadata,))])
        self.write()

    def side(self) -> Side:
        return Side(self.store, CONFIG)


def manifest_of(store: MemoryStore, key: str = "to/manifest") -> Manifest:
    got = store.get(key)
    assert isinstance(got, Blob)
    return Manifest.parse(got.data)


def value_at(store: MemoryStore, location: str) -> list[bytes]:
    got = store.get(location)
    assert isinstance(got, Blob)
    return decode_batch(got.data)


def values_of(store: MemoryStore) -> list[bytes]:
    entries = manifest_of(store).entries()
    return [value for entry in entries for value in value_at(store, entry.location)]


def copy(source: Side, store: MemoryStore, **options: Any) -> Copier:
    copier = Copier(source, Side(store, TARGET), RUNTIME, **options)
    while copier.step():
        pass
    copier.close()
    return copier


def plain(batches: int) -> World:
    world = World()
    for n in range(batches):
        world.add(b"%d" % n)
    return world


def test_batches_arrive_in_order_with_their_metadata_and_the_source_is_as_it_was() -> None:
    world, store = plain(3), MemoryStore()
    before = world.store.list("").objects
    copier = copy(world.side(), store)
    assert values_of(store) == [b"0", b"1", b"2"]
    assert [each.metadata for each in manifest_of(store).entries()] == [
        each.metadata for each in world.manifest.entries()
    ]
    assert (copier.total.batches, copier.total.next_sequence) == (3, 3)
    assert copier.total.stored_bytes == sum(
        each.size for each in world.store.list("ingest/0").objects
    )
    assert world.store.list("").objects == before


def test_a_second_run_copies_only_what_is_new() -> None:
    world, store = plain(2), MemoryStore()
    copy(world.side(), store)
    world.add(b"new")
    assert copy(world.side(), store).total.batches == 1
    assert copy(world.side(), store).total.batches == 0
    assert values_of(store) == [b"0", b"1", b"new"]


def test_a_run_with_nothing_to_copy_tells_how_far_the_copy_has_got() -> None:
    world, store = plain(2), MemoryStore()
    copy(world.side(), store)
    again = copy(world.side(), store)
    assert (again.total.batches, again.total.next_sequence) == (0, 2)
    world.add(b"first", message=(2, CONTINUE_TXN))
    copy(world.side(), store)
    again = copy(world.side(), store)
    assert (again.total.next_sequence, again.total.held_from) == (3, 2)
    world.manifest = world.manifest.append([NewEntry("x"), NewEntry("y")]).drop_through(4)
    world.write()
    behind = copy(world.side(), store, allow_data_loss=True)
    assert (behind.total.next_sequence, behind.total.held_from) == (5, None)


def test_two_sources_go_to_one_target() -> None:
    store = MemoryStore()
    for _ in range(2):
        copy(plain(2).side(), store)
    assert sorted(values_of(store)) == [b"0", b"0", b"1", b"1"]


def test_what_a_reader_would_not_be_given_is_not_copied() -> None:
    world, store = World(), MemoryStore()
    world.add(b"a", Transaction("app", 1))
    world.add(b"-")
    world.add(b"repeat of a", Transaction("app", 1))
    world.add(b"first", message=(2, CONTINUE_TXN))
    world.add(b"between")
    world.add(b"second", message=(3, CONTINUE_TXN))
    copier = copy(world.side(), store)
    assert values_of(store) == [b"a", b"-", b"between"]
    assert copier.total.held_from == 3
    world.add(b"", message=(4, ACK_TXN))
    world.add(b"rolled back", message=(5, CONTINUE_TXN))
    copier = copy(world.side(), store)
    assert values_of(store) == [b"a", b"-", b"between", b"first", b"second"]
    assert copier.total.held_from == 7


def test_a_transaction_is_appended_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pace, "MOST_AT_ONCE", 2)
    world, store = World(), MemoryStore()
    for clock in range(2, 9):
        world.add(b"%d" % clock, message=(clock, CONTINUE_TXN))
    world.add(b"", message=(9, ACK_TXN))
    world.add(b"x")
    copy(world.side(), store)
    assert values_of(store) == [*(b"%d" % n for n in range(2, 9)), b"x"]
    names = {each.location.split("/")[2] for each in manifest_of(store).entries()[:7]}
    assert names == {"batch=7"}


def test_what_the_source_lost_is_told_or_passed_by_when_that_is_allowed() -> None:
    world, store = plain(5), MemoryStore()
    world.manifest = world.manifest.drop_through(0)
    world.write()
    copy(world.side(), store)
    world.manifest = world.manifest.append([NewEntry("x"), NewEntry("y")]).drop_through(5)
    world.write()
    world.add(b"z")
    with pytest.raises(DataLoss, match=r"sequence 5 is needed .* --allow-data-loss"):
        copy(world.side(), store)
    world.manifest = world.manifest.drop_through(6)
    world.write()
    copier = copy(world.side(), store, allow_data_loss=True)
    assert copier.total.lost == 2
    assert values_of(store)[-1] == b"z"


def test_a_transaction_whose_beginning_was_taken_is_a_loss() -> None:
    world, store = World(), MemoryStore()
    world.add(b"first", message=(2, CONTINUE_TXN))
    world.add(b"a")
    copy(world.side(), store)
    world.manifest = world.manifest.drop_through(0)
    world.write()
    with pytest.raises(DataLoss, match="sequence 0 is needed"):
        copy(world.side(), store)


def test_f4_a_source_that_was_made_again_is_not_taken_for_the_one_before() -> None:
    world, store = plain(3), MemoryStore()
    world.store.delete_many(["ingest/_owner.json"])  # a client without markers wrote it
    copy(world.side(), store)
    again = plain(1)
    again.store.delete_many(["ingest/_owner.json"])
    side = again.side()
    object.__setattr__(side, "store", _at(again.store, world.store.url))
    with pytest.raises(QueueReset, match=r"has got to sequence 3 .* which ends at 0"):
        copy(side, store)


def _at(store: MemoryStore, url: str) -> MemoryStore:
    class There(MemoryStore):
        @property
        def url(self) -> str:
            return url

    there = There()
    there.__dict__.update(store.__dict__)
    return there


def test_a_queue_is_not_copied_onto_itself() -> None:
    world = plain(1)
    with pytest.raises(InvalidInput, match="source and target are the same queue"):
        Copier(world.side(), world.side(), RUNTIME)


def test_a_missing_batch_ends_the_copy_behind_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_pace, "MOST_AT_ONCE", 1)
    world, store = plain(3), MemoryStore()
    world.store.delete_many([world.manifest.entries()[1].location])
    with pytest.raises(BatchMissing, match="batch 1"):
        copy(world.side(), store)
    assert values_of(store) == [b"0"]


def test_a_full_target_loses_nothing() -> None:
    world, store = plain(5), MemoryStore()
    small = replace(TARGET, max_manifest_bytes=100)
    copier = Copier(world.side(), Side(store, small), RUNTIME)
    with pytest.raises(QueueFull):
        copier.step()
    copy(world.side(), store)
    assert values_of(store) == [b"%d" % n for n in range(5)]


def test_of_two_that_copy_at_once_the_first_one_ends() -> None:
    world, store = plain(2), MemoryStore()
    first = Copier(world.side(), Side(store, TARGET), RUNTIME)
    second = Copier(world.side(), Side(store, TARGET), RUNTIME)
    with pytest.raises(Superseded):
        first.step()
    while second.step():
        pass
    world.add(b"2")
    with pytest.raises(Superseded):
        first.step()
    assert values_of(store) == [b"0", b"1"]


def test_who_took_a_copy_over_goes_on_behind_what_the_one_before_had_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, store = plain(2), MemoryStore()
    first = Copier(world.side(), Side(store, TARGET), RUNTIME)
    second = Copier(world.side(), Side(store, TARGET), RUNTIME)
    monkeypatch.setattr(first._target, "_check_run", lambda first: None)  # It had looked before.
    with pytest.raises(Superseded):
        first.step()
    assert values_of(store) == [b"0", b"1"]
    world.add(b"2")
    while second.step():
        pass
    assert (second.total.batches, second.total.next_sequence) == (1, 3)
    assert values_of(store) == [b"0", b"1", b"2"]


def test_of_two_that_each_took_a_partition_from_the_other_one_goes_on() -> None:
    sources = [plain(2).side() for _ in range(3)]
    stores = [MemoryStore() for _ in sources]

    def opened(part: int) -> Copier:
        return Copier(sources[part], Side(stores[part], TARGET), RUNTIME)

    one, other = [opened(0)], [opened(0)]
    other += [opened(1), opened(2)]
    one += [opened(1), opened(2)]
    while step_all(other, RUNTIME):
        pass
    assert [values_of(store) for store in stores] == [[b"0", b"1"]] * 3
    assert [each.total.batches for each in other] == [2, 2, 2]
    with pytest.raises(Superseded):
        step_all(one, RUNTIME)


def test_who_is_overtaken_is_told_that_the_copy_goes_on_without_it() -> None:
    world, store = plain(1), MemoryStore()
    first = Copier(world.side(), Side(store, TARGET), RUNTIME)
    Copier(world.side(), Side(store, TARGET), RUNTIME)
    with pytest.raises(Superseded) as caught:
        first.step()
    text = str(caught.value)
    assert "another run of 'opendata-buffer copy' has taken this copy over" in text
    assert "_copy.json' in memory://" in text
    assert "let it finish" in text
    assert "query" not in text


def test_who_finds_its_record_deleted_is_told_to_run_again() -> None:
    world, store = plain(1), MemoryStore()
    copier = Copier(world.side(), Side(store, TARGET), RUNTIME)
    store.delete_many([each.key for each in store.list("to/app=").objects])
    with pytest.raises(TransientStorageError, match=r"_copy\.json' in .* was deleted.* Run"):
        copier.step()
    copy(world.side(), store)
    assert values_of(store) == [b"0"]


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        ("take_over", nullcontext()),  # It notes what it copied.
        ("highest", pytest.raises(Superseded)),  # It appends, and cannot note it any more.
    ],
)
def test_a_source_that_grew_while_the_copy_was_taken_over_has_not_gone_back(
    call: str, ends: AbstractContextManager[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, store = plain(2), MemoryStore()
    first = copy(world.side(), store)
    monkeypatch.setattr(first._target, "_check_run", lambda first: None)
    real = getattr(CopyTarget, call)

    def beside_the_first_one(target: CopyTarget, *args: Any) -> Any:
        monkeypatch.setattr(CopyTarget, call, real)
        world.add(b"2")
        with ends:
            first.step()
        assert values_of(store) == [b"0", b"1", b"2"]
        return real(target, *args)

    monkeypatch.setattr(CopyTarget, call, beside_the_first_one)
    second = copy(world.side(), store)
    assert getattr(CopyTarget, call) is real
    assert (second.total.batches, second.total.next_sequence) == (0, 3)
    assert values_of(store) == [b"0", b"1", b"2"]


def test_uploads_that_take_too_long_for_the_collector_are_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, store = plain(4), MemoryStore()
    slow = itertools.chain([copy_target.GRACE_MS], itertools.repeat(0))
    monkeypatch.setattr(copy_target.Moment, "age_ms", lambda self, now: next(slow))
    copy(world.side(), store)
    assert values_of(store) == [b"0", b"1", b"2", b"3"]
    assert len(store.list("to/app=").objects) == 2 * 4 + 1  # the record, too
    monkeypatch.setattr(copy_target.Moment, "age_ms", lambda self, now: copy_target.GRACE_MS)
    world.add(b"4")
    with pytest.raises(Exception, match="could delete them before they are appended"):
        copy(world.side(), store)
    assert len(values_of(store)) == 4


# ---- ended at any point


class Killed(BaseException):
    """The process is gone."""


class Dying(MemoryStore):
    """The target's store, as seen by a process that is killed at one of its writes."""

    left = -1

    def _step(self, write: Callable[[], Any]) -> Any:
        if self.left == 0:
            raise Killed
        self.left -= 1
        done = write()
        if self.left == 0:
            raise Killed  # it landed, and nobody heard
        return done

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._step(lambda: MemoryStore.put(self, key, data))

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        done: PutOutcome = self._step(lambda: MemoryStore.put_if(self, key, data, condition))
        return done


class Reader:
    """The target's reader, which knows the rule, and takes what it was given out of the queue."""

    def __init__(self) -> None:
        self.rule = ReadCommitted("to")
        self.values: list[bytes] = []

    def read(self, store: MemoryStore) -> None:
        if not store.list("to/manifest").objects:
            return
        store.left = -1  # type: ignore[attr-defined]
        with Consumer(TARGET, store=store) as consumer:
            for entry in consumer.next_descriptors(1_000):
                if self.rule.offer(entry.sequence, entry.location, lambda begin, end: ()):
                    self.values += value_at(store, entry.location)
                consumer.ack_through(entry.sequence)


def source_of_everything() -> tuple[World, list[bytes]]:
    world = World()
    world.add(b"a")
    world.add(b"t1", Transaction("app", 1))
    world.add(b"t2", Transaction("app", 1))
    world.add(b"m1", message=(2, CONTINUE_TXN))
    world.add(b"b")
    world.add(b"repeat", Transaction("app", 1))
    world.add(b"m2", message=(3, CONTINUE_TXN))
    world.add(b"", message=(4, ACK_TXN))
    world.add(b"c")
    return world, [b"a", b"t1", b"t2", b"b", b"m1", b"m2", b"c"]


@pytest.mark.parametrize("reads", [False, True], ids=["nobody reads", "what is there is taken"])
@pytest.mark.parametrize("group", [1, 2, 100])
def test_killed_at_any_write_and_run_again_each_batch_arrives_once_and_in_order(
    monkeypatch: pytest.MonkeyPatch, group: int, reads: bool
) -> None:
    monkeypatch.setattr(copy_pace, "MOST_AT_ONCE", group)
    monkeypatch.setattr(copy_target, "CONCURRENCY", 1)
    world, expected = source_of_everything()
    kills = 0
    for point in itertools.count(1):
        store, reader = Dying(), Reader()
        store.left = point
        try:
            copy(world.side(), store)
            break
        except Killed:
            kills += 1
        if reads:
            reader.read(store)
        store.left = -1
        copy(world.side(), store)
        if reads:
            reader.read(store)
            assert reader.values == expected, point
        else:
            assert values_of(store) == expected, point
    assert kills >= 12


def test_killed_again_and_again_at_random_while_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_pace, "MOST_AT_ONCE", 2)
    total = 0
    for seed in range(30):
        chance = random.Random(seed)
        world, expected = source_of_everything()
        store, reader = Dying(), Reader()
        while True:
            store.left = chance.randrange(1, 12)
            try:
                copy(world.side(), store)
                break
            except Killed:
                total += 1
            if chance.random() < 0.7:
                reader.read(store)
        reader.read(store)
        assert reader.values == expected, seed
    assert total > 60


class Silent(MemoryStore):
    """Every other answer about the manifest is lost, after the write has landed."""

    asked = 0

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        done = super().put_if(key, data, condition)
        self.asked += key.endswith("/manifest")
        if key.endswith("/manifest") and self.asked % 2 and isinstance(done, outcomes.Applied):
            return outcomes.Unknown("lost")
        return done


def test_f1_a_lost_answer_copies_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pace, "MOST_AT_ONCE", 1)
    world, store = plain(4), Silent()
    copy(world.side(), store)
    assert values_of(store) == [b"0", b"1", b"2", b"3"]
    assert store.asked >= 4
