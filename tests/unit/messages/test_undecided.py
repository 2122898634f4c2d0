"""What a manifest's entries leave undecided."""

from __future__ import annotations

import pytest

from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.messages.message_ids import (
    ACK_TXN,
    CONTINUE_TXN,
    FINAL,
    OUTSIDE_TXN,
    build_uuid,
)
from opendata_buffer.messages.sequencer import Undecided, undecided

ULID = "01J5T4R3KXBMZ7QV9N2WG8YDHP"
A, B = b"\1AAAAA", b"\1BBBBB"
TXN = Transaction("app", 4)

Written = tuple[bytes, int, int]


def of(*messages: Written | None, txn: Transaction | None = None) -> dict[bytes, Undecided]:
    entries = [
        (
            100 + at,
            batch_key(
                "ingest", ULID, txn, None if each is None else build_uuid(each[0], each[1], each[2])
            ),
        )
        for at, each in enumerate(messages)
    ]
    return undecided(entries, "ingest")


def test_a_queue_without_messages_has_nothing_to_decide() -> None:
    assert of() == {}
    assert of(None, None) == {}
    assert of(None, txn=TXN) == {}


def test_what_was_continued_and_never_acknowledged_is_undecided() -> None:
    found = of(None, (A, 2, CONTINUE_TXN), (B, 7, CONTINUE_TXN), (A, 5, CONTINUE_TXN), txn=TXN)
    assert found == {A: Undecided(101, 2, 5, 2, TXN), B: Undecided(102, 7, 7, 1, TXN)}
    assert list(found) == [A, B]


@pytest.mark.parametrize("clock", [1, 4, 9])
@pytest.mark.parametrize("flags", [ACK_TXN, ACK_TXN | FINAL])
def test_any_acknowledgement_decides_what_its_producer_wrote(clock: int, flags: int) -> None:
    assert of((A, 2, CONTINUE_TXN), (A, 5, CONTINUE_TXN), (A, clock, flags)) == {}


def test_an_acknowledgement_decides_for_its_own_producer_alone() -> None:
    assert list(of((A, 2, CONTINUE_TXN), (B, 2, CONTINUE_TXN), (A, 3, ACK_TXN))) == [B]


def test_what_comes_after_an_acknowledgement_is_another_transaction() -> None:
    found = of((A, 2, CONTINUE_TXN), (A, 3, ACK_TXN), (A, 4, CONTINUE_TXN))
    assert found == {A: Undecided(102, 4, 4, 1)}


def test_a_duplicate_is_neither_counted_nor_a_new_transaction() -> None:
    twice = of((A, 2, CONTINUE_TXN), (A, 3, CONTINUE_TXN), (A, 2, CONTINUE_TXN))
    assert twice == {A: Undecided(100, 2, 3, 2)}
    assert of((A, 2, CONTINUE_TXN), (A, 3, ACK_TXN), (A, 2, CONTINUE_TXN)) == {}


def test_f40_what_follows_a_last_word_is_undecided_as_readers_hold_it_back() -> None:
    messages = [(A, 2, CONTINUE_TXN), (A, 3, ACK_TXN | FINAL), (A, 2, CONTINUE_TXN)]
    assert of(*messages) == {A: Undecided(102, 2, 2, 1)}
    rule = ReadCommitted("ingest")
    for at, each in enumerate(messages):
        rule.offer(100 + at, batch_key("ingest", ULID, None, build_uuid(*each)), lambda *_: [])
    assert rule.stable_end(103) == 102


def test_a_message_outside_of_transactions_gives_the_open_one_up() -> None:
    assert of((A, 2, CONTINUE_TXN), (A, 3, OUTSIDE_TXN)) == {}
    assert list(of((A, 2, CONTINUE_TXN), (A, 1, OUTSIDE_TXN))) == [A]  # a duplicate, and old


def test_a_message_without_a_clock_decides_nothing_and_waits_for_nothing() -> None:
    assert of((A, 0, CONTINUE_TXN)) == {}
    assert list(of((A, 2, CONTINUE_TXN), (A, 0, ACK_TXN))) == [A]


def test_entries_outside_of_the_prefix_are_no_messages() -> None:
    location = batch_key("other", ULID, None, build_uuid(A, 2, CONTINUE_TXN))
    assert undecided([(0, location)], "ingest") == {}
    assert list(undecided([(0, location)], "other")) == [A]
