"""A claimed commit record: who may decide, and what earlier runs left to be rolled back."""

from __future__ import annotations

import pytest

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages.message_ids import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.transactions.commit_record import RECORD, ClaimedRecord, CommitRecord
from opendata_buffer.transactions.markers import ROLL_BACK, TransactionMarker

APP, KEY = "q", "_topic/app=q/_commit.json"
MINE, THEIRS = b"\x01" * 6, b"\x02" * 6


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

    def run(self, name: str) -> ClaimedRecord:
        register: CasObject[CommitRecord] = CasObject(
            self.store,
            KEY,
            decode=CommitRecord.from_json,
            encode=CommitRecord.to_json,
            runtime=self.runtime,
            settings=QueueConfig(store="memory://x"),
            max_bytes=RECORD.max_bytes,
        )
        return ClaimedRecord(APP, register, name)

    def manifest(self, *producers: bytes) -> Manifest:
        """With one undecided batch of each of these producers."""
        entries = [
            NewEntry(
                batch_key(
                    "p", self.runtime.ulid(), Transaction(APP, 7), build_uuid(who, 2, CONTINUE_TXN)
                )
            )
            for who in producers
        ]
        return Manifest.empty().append(entries)


@pytest.fixture
def world() -> World:
    return World()


def test_of_two_runs_only_the_later_one_decides(world: World) -> None:
    first, second = world.run("first"), world.run("second")
    first.claim(0, None)
    assert first.is_held()
    second.claim(0, None)
    assert not first.is_held()
    first.decide(0, MINE.hex(), {"p": 9})
    second.decide(0, THEIRS.hex(), {"p": 9})
    assert second.record is not None
    assert second.record.producer == THEIRS.hex()


def test_a_batch_that_is_committed_is_claimed_by_nobody(world: World) -> None:
    first, late = world.run("first"), world.run("late")
    first.claim(0, None)
    first.decide(0, MINE.hex(), {"p": 9})
    assert late.claim(0, None).batch == 0
    assert first.is_held()
    assert not late.is_held()


def test_the_app_of_another_query_is_refused_and_not_claimed(world: World) -> None:
    world.run("first").claim(0, "query-1")
    other = world.run("other")
    with pytest.raises(InvalidInput, match="belongs to query query-1"):
        other.claim(0, "query-2")
    assert not other.is_held()
    with pytest.raises(InvalidInput, match="belongs to query query-1"):
        other.belongs_to("query-2")
    assert other.belongs_to("query-1")


def test_only_a_gap_between_two_batches_is_looked_into(world: World) -> None:
    run = world.run("mine")
    run.claim(0, None)
    run.decide(0, MINE.hex(), {"p": 9})
    world.reads = 0
    assert not run.was_overtaken_before(1)
    assert world.reads == 0
    assert not run.was_overtaken_before(2)
    assert world.reads == 1
    world.run("other").claim(1, None)
    assert run.was_overtaken_before(2)


def test_what_others_left_undecided_is_rolled_back_once(world: World) -> None:
    run = world.run("mine")
    run.claim(7, None)
    manifest = world.manifest(THEIRS, MINE)
    assert not run.leaves
    run.note("p", manifest, but=MINE)
    run.note("empty", None, but=MINE)
    assert run.leaves
    assert run.roll_backs() == {"p": [TransactionMarker(THEIRS, ROLL_BACK, Transaction(APP, 7))]}
    run.rolled_back()
    run.note("p", manifest, but=None)  # nothing is new in it, so it is not looked through again
    assert not run.leaves
    assert run.roll_backs() == {}


def test_a_query_that_the_record_does_not_name_yet_has_to_claim_it(world: World) -> None:
    run = world.run("mine")
    run.claim(0, None)
    assert run.belongs_to(None)
    assert not run.belongs_to("query-1")
