"""The commit record of an app: which run may decide, and what earlier runs left."""

from __future__ import annotations

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData, InvalidInput
from opendata_buffer.formats.entries import NewEntry
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.transactions.commit_record import (
    RECORD,
    CommitRecord,
    OwnedRecord,
    Verdict,
    claimed,
)
from opendata_buffer.transactions.markers import ROLL_BACK, TransactionMarker


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"7",
        b"{}",
        b"\xff",
        b'{"version": 2, "batch": 3, "next_sequence": 7}',
        b'{"version": 1, "batch": -2, "next_sequence": 7}',
        b'{"version": 1, "batch": 3, "next_sequence": -1}',
        b'{"version": 1, "batch": 3, "next_sequence": 7, "query": 5}',
        b'{"version": 1, "batch": true, "next_sequence": 7}',
        b'{"version": 1, "batch": 3, "next_sequence": "7"}',
    ],
)
def test_an_unreadable_record_is_named(raw: bytes) -> None:
    with pytest.raises(CorruptData, match="the commit record is not readable"):
        CommitRecord.from_json(raw)


# Which query an app id belongs to.


def test_the_record_of_an_older_version_has_no_query_and_is_read() -> None:
    record = CommitRecord.from_json(b'{"version": 1, "batch": 3, "next_sequence": 7}')
    assert record == CommitRecord(3, 7, None)
    assert record.to_json() == b'{"version": 1, "batch": 3, "next_sequence": 7}'


def test_the_query_and_fields_of_later_versions_survive_being_written_again() -> None:
    raw = b'{"version": 1, "batch": 3, "next_sequence": 7, "query": "one", "later": [1]}'
    record = CommitRecord.from_json(raw)
    assert (record.query, record.others) == ("one", {"later": [1]})
    assert CommitRecord.from_json(record.raised(4, 9, "one").to_json()) == CommitRecord(
        4, 9, "one", {"later": [1]}
    )


def test_a_record_never_falls_and_is_not_raised_by_another_query() -> None:
    record = CommitRecord(3, 7, "one")
    assert record.raised(2, 9, "one") is record
    assert record.raised(4, 9, "two") is record
    assert record.raised(4, 9, None) == CommitRecord(4, 9, "one")


def test_the_first_query_claims_an_app_id() -> None:
    assert claimed(None, "job", "one") == CommitRecord(-1, 0, "one")
    assert claimed(CommitRecord(3, 7), "job", "one") == CommitRecord(3, 7, "one")
    mine = CommitRecord(3, 7, "one")
    assert claimed(mine, "job", "one") is mine


def test_another_query_is_refused_naming_both_and_the_fix() -> None:
    with pytest.raises(InvalidInput) as refused:
        claimed(CommitRecord(3, 7, "one"), "job", "two")
    for part in ("'job'", "query one", "up to 3", "query two", "txnAppId of its own"):
        assert part in str(refused.value)


def test_a_writer_without_a_query_and_one_named_after_its_query_claim_nothing() -> None:
    theirs = CommitRecord(3, 7, "one")
    assert claimed(theirs, "job", None) is theirs
    assert claimed(None, "job", None) is None
    assert claimed(None, "two", "two") is None


MINE = "01" * 6


def test_a_topic_s_record_on_storage() -> None:
    record = CommitRecord(3, 0, "q", {"later": 1}, "run", MINE, {"p-00001": 9, "p-00000": 7})
    assert CommitRecord.from_json(record.to_json()) == record
    assert b'"intents": {"p-00000": 7, "p-00001": 9}' in record.to_json()


@pytest.mark.parametrize(
    "field",
    [
        b'"run": 1',
        b'"producer": "0102"',
        b'"producer": "not hexadecimal."',
        b'"intents": []',
        b'"intents": {"p-00000": 0}',
        b'"intents": {"p-00000": true}',
        b'"intents": {"p-00000": "7"}',
    ],
)
def test_a_topic_s_record_that_is_unreadable_is_named(field: bytes) -> None:
    with pytest.raises(CorruptData, match="the commit record is not readable"):
        CommitRecord.from_json(b'{"version": 1, "batch": 3, "next_sequence": 0, ' + field + b"}")


APP, KEY = "q", "_topic/app=q/_commit.json"
MY_ID, THEIR_ID = b"\x01" * 6, b"\x02" * 6


class World:
    """One record, and any number of runs that claim it."""

    def __init__(self) -> None:
        self.runtime = ManualRuntime()
        self.store = MemoryStore(now_ms=self.runtime.now_ms)
        self.reads = 0
        really_get = self.store.get

        def get(key: str, **options: object) -> object:
            self.reads += 1
            return really_get(key, **options)  # type: ignore[arg-type]

        self.store.get = get  # type: ignore[method-assign, assignment]

    def run(self, name: str) -> OwnedRecord:
        register: CasObject[CommitRecord] = CasObject(
            self.store,
            KEY,
            decode=CommitRecord.from_json,
            encode=CommitRecord.to_json,
            runtime=self.runtime,
            settings=QueueConfig(store="memory://x"),
            max_bytes=RECORD.max_bytes,
        )
        return OwnedRecord(APP, register, name)

    def manifest(self, *producers: bytes) -> Manifest:
        """With one undecided batch of each of these producers."""
        txn = Transaction(APP, 7)
        messages = [build_uuid(producer, 2, CONTINUE_TXN) for producer in producers]
        entries = [NewEntry(batch_key("p", self.runtime.ulid(), txn, each)) for each in messages]
        return Manifest.empty().append(entries)


@pytest.fixture
def world() -> World:
    return World()


def test_of_two_runs_only_the_later_one_decides(world: World) -> None:
    first, second = world.run("first"), world.run("second")
    first.claim(0, None)
    assert first.is_owned()
    second.claim(0, None)
    assert not first.is_owned()
    first.decide(0, MY_ID.hex(), {"p": 9})
    assert first.verdict(0, MY_ID.hex()) is Verdict.OPEN
    second.decide(0, THEIR_ID.hex(), {"p": 9})
    assert second.verdict(0, THEIR_ID.hex()) is Verdict.COMMITTED
    assert second.verdict(0, MY_ID.hex()) is Verdict.REPEATED
    second.decide(0, MY_ID.hex(), {"p": 9})
    assert second.verdict(0, THEIR_ID.hex()) is Verdict.COMMITTED


def test_without_a_claim_nothing_is_decided(world: World) -> None:
    run = world.run("mine")
    run.decide(0, MY_ID.hex(), {"p": 9})
    assert run.record is None
    assert run.verdict(0, MY_ID.hex()) is Verdict.OPEN


def test_a_committed_batch_is_not_claimed_again_and_the_next_claim_keeps_it(world: World) -> None:
    first, late, following = world.run("first"), world.run("late"), world.run("following")
    first.claim(0, None)
    first.decide(0, MY_ID.hex(), {"p": 9})
    assert late.claim(0, None).batch == 0
    assert first.is_owned()
    assert not late.is_owned()
    after = following.claim(1, None)
    assert following.is_owned()
    assert (after.batch, after.producer, after.intents) == (0, MY_ID.hex(), {"p": 9})


def test_the_app_of_another_query_is_refused_and_not_claimed(world: World) -> None:
    world.run("first").claim(0, "query-1")
    other = world.run("other")
    with pytest.raises(InvalidInput, match="belongs to query query-1"):
        other.claim(0, "query-2")
    assert not other.is_owned()
    with pytest.raises(InvalidInput, match="belongs to query query-1"):
        other.belongs_to("query-2")
    assert other.belongs_to("query-1")


def test_only_a_gap_between_two_batches_is_looked_into(world: World) -> None:
    run = world.run("mine")
    run.claim(0, None)
    run.decide(0, MY_ID.hex(), {"p": 9})
    world.reads = 0
    assert not run.was_overtaken_before(1)
    assert world.reads == 0
    assert not run.was_overtaken_before(2)
    assert world.reads == 1
    world.run("other").claim(1, None)
    assert run.was_overtaken_before(2)


def test_what_others_left_undecided_is_noted_once(world: World) -> None:
    run = world.run("mine")
    run.claim(7, None)
    manifest = world.manifest(THEIR_ID, MY_ID)
    run.note_undecided("p", manifest, but=MY_ID)
    run.note_undecided("empty", None, but=MY_ID)
    marker = TransactionMarker(THEIR_ID, ROLL_BACK, Transaction(APP, 7))
    assert run.roll_backs == {"p": {THEIR_ID: marker}}
    run.roll_backs.clear()
    run.note_undecided("p", manifest, but=None)  # not searched again
    assert run.roll_backs == {}


def test_a_query_that_the_record_does_not_name_yet_has_to_claim_it(world: World) -> None:
    run = world.run("mine")
    run.claim(0, None)
    assert run.belongs_to(None)
    assert not run.belongs_to("query-1")
