"""A publisher's name and its record."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import InvalidInput, Superseded
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.messages.message_ids import CONTINUE_TXN, build_uuid
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.transaction import (
    AckIntents,
    Endings,
    OpenTransaction,
    PublisherName,
    app_of,
)
from opendata_buffer.transactions.coordinator import TransactionCoordinator
from tests.unit.topic.world import producing

RUNTIME = SystemRuntime()
PARTITIONS = ["p-00000-04pn"]
(P,) = PARTITIONS
A, B = b"\1AAAAA", b"\1BBBBB"


class World:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.endings = Endings(self.store, producing(), RUNTIME)

    def claimed(self) -> PublisherName:
        ledger = TransactionCoordinator(
            self.store, producing(), self.endings.queue, RUNTIME, ahead_ms=60_000
        )
        name = PublisherName("billing", ledger)
        name.claim(PARTITIONS)
        return name

    def wrote(self, name: PublisherName, producer: bytes) -> tuple[AckIntents, OpenTransaction]:
        """An open transaction with one durable batch, and its intents."""
        txn = name.next_transaction()
        current = OpenTransaction(producer, txn, RUNTIME)
        location = batch_key(P, RUNTIME.ulid(), txn, build_uuid(producer, 2, CONTINUE_TXN))
        self.endings.queue(P).append([NewEntry(location)])
        current.clocks[P] = 2
        return current.build("topic"), current

    def acknowledged(self) -> int:
        manifest = self.endings.queue(P).read()
        assert manifest is not None
        return len(manifest.locations()) // 2


def test_transactions_are_numbered_behind_the_last_that_was_committed() -> None:
    world = World()
    name = world.claimed()
    first = name.next_transaction()
    assert first == name.next_transaction() == Transaction("publisher.billing", first.batch)
    name.commit(*world.wrote(name, A))
    assert name.next_transaction().batch == first.batch + 1
    assert world.claimed().next_transaction().batch == first.batch + 1
    assert world.acknowledged() == 1


def test_of_saved_intents_those_that_were_rolled_back_are_told() -> None:
    world = World()
    name = world.claimed()
    kept, current = world.wrote(name, A)
    name.commit(kept, current)
    lost, _ = world.wrote(name, B)
    again = world.claimed()
    again.check_applied(kept)
    with pytest.raises(InvalidInput, match="was rolled back"):
        again.check_applied(lost)
    for txn in (None, Transaction("publisher.other", 0)):
        with pytest.raises(InvalidInput, match="of another publisher"):
            again.check_applied(AckIntents("topic", A, {P: 3}, txn))


def test_saved_intents_are_not_taken_for_those_of_another_transaction_with_their_number() -> None:
    world = World()
    lost, _ = world.wrote(world.claimed(), A)
    again = world.claimed()
    kept, current = world.wrote(again, B)
    assert kept.txn == lost.txn
    again.commit(kept, current)
    again.check_applied(kept)
    with pytest.raises(InvalidInput, match="was rolled back"):
        again.check_applied(lost)


def test_who_was_taken_over_commits_nothing() -> None:
    world = World()
    old = world.claimed()
    intents, current = world.wrote(old, A)
    world.claimed()
    with pytest.raises(Superseded):
        old.commit(intents, current)
    world.claimed()


@pytest.mark.parametrize("name", ["", "a/b", "a=b", "x" * 191, "Zürich"])
def test_a_name_that_makes_no_key_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"publisher name is .* 1 to 190 characters"):
        app_of(name)


def test_a_name_makes_an_app_that_no_spark_query_has() -> None:
    assert app_of("billing") == "publisher.billing"
    assert app_of("x" * 190)
