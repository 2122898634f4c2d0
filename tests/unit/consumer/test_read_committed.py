"""One rule for what is delivered: repeats, duplicates and undecided transactions are not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from opendata_buffer.consumer.isolation import (
    READ_UNCOMMITTED,
    ReadCommitted,
    TransactionFilter,
    is_acknowledgement,
)
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.messages.message_ids import (
    ACK_TXN,
    CONTINUE_TXN,
    FINAL,
    OUTSIDE_TXN,
    build_uuid,
)
from opendata_buffer.testing.runtime import ManualRuntime

DAY_MS = 24 * 60 * 60 * 1000
NOW = 1_767_225_600_000
_names = ManualRuntime(NOW)
A, B = b"\1AAAAA", b"\1BBBBB"


def plain(at_ms: int = NOW) -> str:
    return batch_key("ingest", _names.ulid_at(at_ms))


def old(batch: int, app: str = "app") -> str:
    return batch_key("ingest", _names.ulid_at(NOW), Transaction(app, batch))


def message(
    producer: bytes, clock: int, flags: int, at_ms: int = NOW, txn: Transaction | None = None
) -> str:
    return batch_key("ingest", _names.ulid_at(at_ms), txn, build_uuid(producer, clock, flags))


def con(producer: bytes, clock: int, **options: Any) -> str:
    return message(producer, clock, CONTINUE_TXN, **options)


def ack(producer: bytes, clock: int, *, final: bool = False, **options: Any) -> str:
    return message(producer, clock, ACK_TXN | (FINAL if final else 0), **options)


class Reader:
    """Reads a log that it was given, and reads again only what was not acknowledged."""

    def __init__(self, **options: Any) -> None:
        self.rule = ReadCommitted("ingest", **options)
        self.log: list[str] = []
        self.floor = 0
        self.replays: list[tuple[int, int]] = []

    def read(self, *locations: str) -> list[int]:
        delivered = []
        for location in locations:
            self.log.append(location)
            delivered += self.rule.offer(len(self.log) - 1, location, self.replay)
            assert self.floor <= self.rule.floor(len(self.log)) <= len(self.log)
            self.floor = self.rule.floor(len(self.log))
        return delivered

    def replay(self, begin: int, end: int) -> Iterable[tuple[int, str]]:
        assert self.floor <= begin < end
        self.replays.append((begin, end))
        return list(enumerate(self.log))[begin:end]

    def restart(self) -> None:
        state = json.loads(json.dumps(self.rule.to_dict()))
        self.rule = ReadCommitted.from_dict(state, "ingest")


def test_batches_without_identity_are_delivered_at_once() -> None:
    reader = Reader()
    assert reader.read(plain(), "ingest/any/name", "elsewhere/x.batch") == [0, 1, 2]
    assert reader.floor == 3
    assert reader.rule.to_dict() == TransactionFilter("ingest").to_dict()


def test_repeats_of_the_old_identity_are_dropped_as_ever() -> None:
    assert Reader().read(old(0), old(0), plain(), old(0), old(1)) == [0, 1, 2, 4]


def test_a_message_between_the_batches_of_an_old_transaction_ends_it() -> None:
    assert Reader().read(old(0), message(A, 5, OUTSIDE_TXN), old(0)) == [0, 1]


def test_a_transaction_is_delivered_whole_at_its_acknowledgement() -> None:
    reader = Reader()
    assert reader.read(plain(), con(A, 2), plain(), con(A, 3)) == [0, 2]
    assert reader.floor == 1
    assert reader.read(ack(A, 4)) == [1, 3]
    assert reader.floor == 5
    assert reader.replays == []


def test_messages_with_an_app_go_by_the_message_and_not_by_the_number() -> None:
    txn = Transaction("app", 7)
    reader = Reader()
    assert reader.read(con(A, 2, txn=txn), plain(), con(A, 3, txn=txn)) == [1]
    assert reader.read(ack(A, 4, final=True, txn=txn)) == [0, 2]
    assert reader.rule.to_dict() == TransactionFilter("ingest").to_dict()
    # Another attempt at the same number, by another producer: only its own messages decide.
    assert reader.read(con(B, 2, txn=txn), ack(B, 1, final=True, txn=txn)) == []


def test_an_undecided_transaction_holds_up_nobody_else() -> None:
    reader = Reader()
    assert reader.read(con(A, 2), con(B, 2), ack(B, 3), plain(), con(B, 4), ack(B, 5)) == [1, 3, 4]
    assert reader.floor == 0


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_a_rolled_back_transaction_is_never_delivered(final: bool, restart: bool) -> None:
    reader = Reader()
    assert reader.read(con(A, 2), con(A, 3)) == []
    if restart:
        reader.restart()
    assert reader.read(ack(A, 1, final=final)) == []
    assert reader.floor == 3
    assert reader.read(con(A, 4), ack(A, 5)) == [3]


def test_duplicates_are_dropped_inside_and_behind_a_transaction() -> None:
    reader = Reader()
    assert reader.read(con(A, 2), con(A, 2), con(A, 3), con(A, 2), ack(A, 4)) == [0, 2]
    assert reader.read(con(A, 3), ack(A, 4), message(A, 5, OUTSIDE_TXN)) == [7]
    assert reader.read(message(A, 5, OUTSIDE_TXN)) == []


@pytest.mark.parametrize("at", range(1, 5))
def test_f38_after_a_restart_what_was_read_before_is_read_again_from_the_manifest(at: int) -> None:
    log = [con(A, 2), plain(), con(A, 3), con(A, 3), ack(A, 4)]
    reader = Reader()
    delivered = reader.read(*log[:at])
    reader.restart()
    assert sorted(delivered + reader.read(*log[at:])) == [0, 1, 2]
    assert reader.replays == [(0, at if at != 1 else 2)]


def test_what_fell_out_of_the_buffer_is_read_again_from_the_manifest() -> None:
    reader = Reader(buffer=2)
    assert reader.read(*(con(A, clock) for clock in range(2, 12)), ack(A, 12)) == list(range(10))
    assert reader.replays == [(0, 9)]


def test_a_replay_that_fails_changes_nothing_and_the_call_can_be_made_again() -> None:
    reader = Reader()
    reader.read(con(A, 2), con(A, 3))
    reader.restart()

    def deaf(begin: int, end: int) -> list[tuple[int, str]]:
        raise OSError("no answer")

    last = ack(A, 4)
    for _ in range(2):
        with pytest.raises(OSError, match="no answer"):
            reader.rule.offer(2, last, deaf)
    assert reader.rule.offer(2, last, reader.replay) == [0, 1]
    assert reader.rule.floor(3) == 3


def test_a_message_without_a_clock_counts_once_when_it_is_read() -> None:
    reader = Reader()
    assert reader.read(con(A, 2), message(A, 0, CONTINUE_TXN)) == [1]
    reader.restart()
    assert reader.read(ack(A, 3)) == [0]


def test_a_producer_is_forgotten_at_its_final_acknowledgement() -> None:
    reader = Reader()
    for number in range(20):
        producer = b"\1PROD" + bytes([number])
        assert reader.read(con(producer, 2), ack(producer, 3, final=True)) == [2 * number]
    assert "producers" not in reader.rule.to_dict()


def test_the_state_names_producers_with_their_last_word_and_what_they_have_open() -> None:
    reader = Reader()
    reader.read(con(A, 2), ack(A, 3), con(B, 9))
    day = NOW // DAY_MS
    assert reader.rule.to_dict() == {
        "v": 1,
        "apps": {},
        "tail": None,
        "producers": {A.hex(): [3, -1, day], B.hex(): [8, 2, day]},
    }


def test_the_state_of_the_version_before_is_read() -> None:
    before = TransactionFilter("ingest")
    before.offer(0, old(4))
    made = ReadCommitted.from_dict(before.to_dict(), "ingest")
    assert made.to_dict() == before.to_dict()
    assert made.offer(1, plain(), Reader().replay) == [1]
    assert made.offer(2, old(4), Reader().replay) == []


@pytest.mark.parametrize(
    "producers",
    [
        [],
        {"01": [1, -1, 0]},
        {"0141414141zz": [1, -1, 0]},
        {A.hex(): [1, -1]},
        {A.hex(): [-1, -1, 0]},
        {A.hex(): [1, -2, 0]},
        {A.hex(): [2**64, -1, 0]},
        {A.hex(): ["1", -1, 0]},
        {A.hex(): {}},
    ],
)
def test_a_state_of_somebody_else_is_refused(producers: object) -> None:
    state = {"v": 1, "apps": {}, "tail": None, "producers": producers}
    with pytest.raises(InvalidInput, match="transaction state"):
        ReadCommitted.from_dict(state, "ingest")


def test_a_copy_goes_its_own_way() -> None:
    reader = Reader()
    reader.read(con(A, 2), con(A, 3))
    other = reader.rule.copy()
    assert other.offer(2, ack(A, 4), reader.replay) == [0, 1]
    assert reader.replays == []
    assert reader.rule.floor(2) == 0
    assert reader.rule.offer(2, ack(A, 1), reader.replay) == []


def test_producers_without_a_batch_for_a_month_are_forgotten_and_open_ones_are_not() -> None:
    reader = Reader()
    long_ago = NOW - 31 * DAY_MS
    reader.read(con(A, 2, at_ms=long_ago), con(B, 2, at_ms=long_ago), ack(B, 3, at_ms=long_ago))
    reader.rule.prune(NOW)
    assert set(reader.rule.to_dict()["producers"]) == {A.hex(), B.hex()}  # nothing is younger
    reader.read(message(b"\1CCCCC", 5, OUTSIDE_TXN))
    reader.rule.prune(long_ago)
    assert len(reader.rule.to_dict()["producers"]) == 3
    reader.rule.prune(NOW)
    assert set(reader.rule.to_dict()["producers"]) == {A.hex(), b"\1CCCCC".hex()}
    assert reader.floor == 0


def test_a_message_whose_object_is_gone_is_passed_by_and_its_repeat_counts() -> None:
    reader = Reader()
    reader.log.append(con(A, 2))
    reader.rule.skip(0, reader.log[0])
    assert reader.read(con(A, 2), ack(A, 3)) == [1]


def test_an_acknowledgement_is_not_to_be_skipped() -> None:
    with pytest.raises(InvalidInput, match="offer it"):
        ReadCommitted("ingest").skip(0, ack(A, 2))


def test_skips_and_losses_of_the_old_identity_are_those_of_the_filter() -> None:
    rule = ReadCommitted("ingest")
    filtered = TransactionFilter("ingest")
    for each in (rule, filtered):
        each.skip(0, old(0))
        each.lost(3)
    assert rule.to_dict() == filtered.to_dict()
    assert rule.offer(4, old(0), Reader().replay) == [4]


def test_behind_a_loss_what_was_open_is_given_up_and_blocks_nothing() -> None:
    reader = Reader()
    reader.read(con(A, 2), con(B, 2))
    reader.rule.lost(9)
    assert reader.rule.floor(10) == 10
    assert reader.rule.offer(10, ack(A, 3), reader.replay) == []
    # Of one that goes on behind the loss the rest is delivered.
    assert reader.rule.offer(11, con(B, 3), reader.replay) == []
    assert reader.rule.offer(12, ack(B, 4), reader.replay) == [11]
    assert reader.replays == []


def test_read_uncommitted_delivers_all_but_acknowledgements_and_holds_nothing_back() -> None:
    reader = Reader(isolation=READ_UNCOMMITTED)
    log = [con(A, 2), con(A, 2), old(0), plain(), old(0), ack(A, 3), ack(A, 4, final=True)]
    assert reader.read(*log) == [0, 1, 2, 3, 4]
    assert reader.floor == len(log)
    reader.rule.skip(7, old(9))
    reader.rule.lost(8)
    assert reader.rule.to_dict() == TransactionFilter("ingest").to_dict()


def test_an_unknown_isolation_is_refused() -> None:
    with pytest.raises(InvalidInput, match="use read_committed or read_uncommitted"):
        ReadCommitted("ingest", "serializable")


def test_what_is_an_acknowledgement() -> None:
    assert is_acknowledgement(ack(A, 2), "ingest")
    assert is_acknowledgement(ack(A, 2, final=True), "ingest")
    assert not is_acknowledgement(con(A, 2), "ingest")
    assert not is_acknowledgement(plain(), "ingest")
    assert not is_acknowledgement(ack(A, 2), "other")
