"""The rule that holds back repeats, duplicates, and undecided transactions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.consumer.isolation import (
    HORIZON_DAYS,
    READ_UNCOMMITTED,
    ReadCommitted,
    TransactionFilter,
)
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import Transaction, batch_key
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, FINAL, OUTSIDE_TXN, build_uuid
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
    """Reads a log, and replays only entries that are not acknowledged."""

    def __init__(self, **options: Any) -> None:
        self.rule = ReadCommitted("ingest", **options)
        self.log: list[str] = []
        self.stable_end = 0
        self.replays: list[tuple[int, int]] = []

    def read(self, *locations: str) -> list[int]:
        delivered = []
        for location in locations:
            self.log.append(location)
            delivered += self.rule.offer(len(self.log) - 1, location, self.replay)
            assert self.stable_end <= self.rule.stable_end(len(self.log)) <= len(self.log)
            self.stable_end = self.rule.stable_end(len(self.log))
        return delivered

    def replay(self, begin: int, end: int) -> Iterable[tuple[int, str]]:
        assert self.stable_end <= begin < end
        self.replays.append((begin, end))
        return list(enumerate(self.log))[begin:end]

    def restart(self) -> None:
        state = json.loads(json.dumps(self.rule.to_dict()))
        self.rule = ReadCommitted.from_dict(state, "ingest")


def test_batches_without_identity_are_delivered_at_once() -> None:
    reader = Reader()
    assert reader.read(plain(), "ingest/any/name", "elsewhere/x.batch") == [0, 1, 2]
    assert reader.stable_end == 3
    assert reader.rule.to_dict() == TransactionFilter("ingest").to_dict()
    reader.rule.lost(8)
    assert reader.rule.stable_end(9) == 9


def test_a_message_between_the_batches_of_an_old_transaction_ends_it() -> None:
    assert Reader().read(old(0), message(A, 5, OUTSIDE_TXN), old(0)) == [0, 1]


def test_a_transaction_is_delivered_completely_at_its_acknowledgement() -> None:
    reader = Reader()
    assert reader.read(plain(), con(A, 2), plain(), con(A, 3)) == [0, 2]
    assert reader.stable_end == 1
    assert reader.read(ack(A, 4)) == [1, 3]
    assert reader.stable_end == 5
    assert reader.replays == []


@pytest.mark.parametrize("at", range(1, 5))
def test_f38_after_a_restart_an_open_transaction_is_read_again_from_the_manifest(at: int) -> None:
    log = [con(A, 2), plain(), con(A, 3), con(A, 3), ack(A, 4)]
    reader = Reader()
    delivered = reader.read(*log[:at])
    reader.restart()
    assert sorted(delivered + reader.read(*log[at:])) == [0, 1, 2]
    assert reader.replays == [(0, at if at != 1 else 2)]


def test_a_failed_replay_changes_nothing_and_the_call_can_be_repeated() -> None:
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
    assert reader.rule.stable_end(3) == 3


def test_a_message_without_a_clock_counts_once_when_it_is_read() -> None:
    reader = Reader()
    assert reader.read(con(A, 2), message(A, 0, CONTINUE_TXN)) == [1]
    reader.restart()
    assert reader.read(ack(A, 3)) == [0]


def test_the_state_has_each_producers_last_clock_and_open_transaction() -> None:
    reader = Reader()
    reader.read(con(A, 2), ack(A, 3), con(B, 9))
    day = NOW // DAY_MS
    assert reader.rule.to_dict() == {
        "v": 1,
        "apps": {},
        "tail": None,
        "producers": {A.hex(): [3, -1, day], B.hex(): [8, 2, day]},
    }


def test_a_producer_is_forgotten_after_its_final_acknowledgement() -> None:
    reader = Reader()
    assert reader.read(con(A, 2), con(B, 2), ack(A, 3, final=True)) == [0]
    assert list(reader.rule.to_dict()["producers"]) == [B.hex()]
    assert len(reader.rule._seen) == 1


def test_an_older_name_does_not_make_an_app_or_a_producer_older() -> None:
    reader = Reader()
    long_ago = NOW - 31 * DAY_MS
    reader.read(old(4), con(A, 2), ack(A, 3))
    before = reader.rule.to_dict()
    name = batch_key("ingest", _names.ulid_at(long_ago), Transaction("app", 3))
    assert reader.read(name, con(A, 2, at_ms=long_ago)) == []
    after = reader.rule.to_dict()
    assert (after["seen"], after["producers"]) == (before["seen"], before["producers"])


def test_a_copy_decides_like_the_original_and_does_not_change_it() -> None:
    reader = Reader()
    reader.read(old(4), con(A, 2))
    before = reader.rule.to_dict()
    copy = reader.rule.copy()
    assert copy.to_dict() == before
    assert copy.offer(2, ack(A, 3), reader.replay) == [1]
    assert copy.offer(3, old(4), reader.replay) == []
    copy.prune(NOW)
    assert reader.rule.to_dict() == before
    assert reader.read(con(A, 3), ack(A, 4)) == [1, 2]
    uncommitted = ReadCommitted("ingest", READ_UNCOMMITTED).copy()
    assert uncommitted.offer(0, con(A, 2), reader.replay) == [0]


def test_a_copy_in_the_middle_of_a_transaction_passes_its_rest() -> None:
    reader = Reader()
    reader.read(old(4))
    assert reader.rule.copy().offer(1, old(4), reader.replay) == [1]


def test_an_unknown_isolation_level_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'serializable': use read_committed or read_unc"):
        ReadCommitted("ingest", "serializable")


def test_a_restored_reader_keeps_its_isolation_level() -> None:
    made = ReadCommitted.from_dict(TransactionFilter("x").to_dict(), "ingest", READ_UNCOMMITTED)
    assert made.offer(0, con(A, 2), Reader().replay) == [0]


@pytest.mark.parametrize("values", [[0, 4, 0], [2**64 - 1, -1, 0]])
def test_the_first_and_the_last_clock_and_day_of_a_state_are_read(values: list[int]) -> None:
    state = {"v": 1, "apps": {}, "tail": None, "producers": {A.hex(): values}}
    assert ReadCommitted.from_dict(state, "ingest").to_dict() == state


def test_the_state_of_the_previous_version_is_read() -> None:
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
        {A.hex(): [1, -2, 0]},
        {A.hex(): [2**64, -1, 0]},
        {A.hex(): ["1", -1, 0]},
    ],
)
def test_a_state_of_another_program_is_refused(producers: object) -> None:
    state = {"v": 1, "apps": {}, "tail": None, "producers": producers}
    with pytest.raises(InvalidInput, match=r"transaction state \{'v': 1, 'apps'"):
        ReadCommitted.from_dict(state, "ingest")


def test_producers_without_a_batch_for_a_month_are_forgotten_and_open_ones_are_not() -> None:
    reader = Reader()
    long_ago = NOW - 31 * DAY_MS
    reader.read(con(A, 2, at_ms=long_ago), con(B, 2, at_ms=long_ago), ack(B, 3, at_ms=long_ago))
    reader.rule.prune(NOW)
    assert set(reader.rule.to_dict()["producers"]) == {A.hex(), B.hex()}  # no entry is younger
    reader.read(message(b"\1CCCCC", 5, OUTSIDE_TXN))
    reader.rule.prune(long_ago)
    assert len(reader.rule.to_dict()["producers"]) == 3
    reader.rule.prune(NOW)
    assert set(reader.rule.to_dict()["producers"]) == {A.hex(), b"\1CCCCC".hex()}
    assert reader.stable_end == 0


def test_a_message_without_its_object_is_skipped_and_its_repeat_is_delivered() -> None:
    reader = Reader()
    reader.log.append(con(A, 2))
    reader.rule.skip(0, reader.log[0])
    assert reader.read(con(A, 2), ack(A, 3)) == [1]


def test_an_acknowledgement_cannot_be_skipped() -> None:
    with pytest.raises(InvalidInput, match="offer it"):
        ReadCommitted("ingest").skip(0, ack(A, 2))


def test_a_loss_drops_open_transactions_and_blocks_nothing() -> None:
    reader = Reader()
    reader.read(con(A, 2), con(B, 2))
    reader.rule.lost(9)
    assert reader.rule.stable_end(10) == 10
    assert reader.rule.offer(10, ack(A, 3), reader.replay) == []
    # The rest of a transaction that continues after the loss is delivered.
    assert reader.rule.offer(11, con(B, 3), reader.replay) == []
    assert reader.rule.offer(12, ack(B, 4), reader.replay) == [11]
    assert reader.replays == []


@pytest.mark.parametrize(("through", "stable_end"), [(0, 1), (1, 3), (2, 3)])
def test_a_loss_drops_only_a_transaction_whose_beginning_is_lost(
    through: int, stable_end: int
) -> None:
    reader = Reader()
    reader.read(plain(), con(A, 2), plain())
    reader.rule.lost(through)
    assert reader.rule.stable_end(3) == stable_end


def test_the_rest_of_a_transaction_is_delivered_after_a_gap_and_after_a_skip() -> None:
    reader = Reader()
    assert reader.read(old(4)) == [0]
    reader.rule.lost(2)
    assert reader.rule.offer(3, old(4), reader.replay) == [3]
    reader.rule.skip(4, old(4))
    assert reader.rule.offer(5, old(4), reader.replay) == [5]


def test_apps_without_a_batch_for_a_month_are_forgotten() -> None:
    reader = Reader()
    long_ago = _names.ulid_at(NOW - 31 * DAY_MS)
    reader.read(batch_key("ingest", long_ago, Transaction("gone", 4)), old(4))
    reader.rule.prune(NOW)
    assert reader.rule.to_dict()["apps"] == {"app": 4}


def test_read_uncommitted_delivers_everything_except_acknowledgements_at_once() -> None:
    reader = Reader(isolation=READ_UNCOMMITTED)
    log = [con(A, 2), con(A, 2), old(0), plain(), old(0), ack(A, 3), ack(A, 4, final=True)]
    assert reader.read(*log) == [0, 1, 2, 3, 4]
    assert reader.stable_end == len(log)
    reader.rule.skip(7, old(9))
    reader.rule.lost(8)
    assert reader.rule.to_dict() == TransactionFilter("ingest").to_dict()


_ulids = ManualRuntime()


Entry = tuple[str, int] | None


def _location(entry: Entry) -> str:
    txn = None if entry is None else Transaction(*entry)
    return batch_key("ingest", _ulids.ulid(), txn)


def _passed(entries: list[Entry], made: TransactionFilter | None = None) -> list[int]:
    made = made or TransactionFilter("ingest")
    return [i for i, entry in enumerate(entries) if made.offer(i, _location(entry))]


def text_of(made: TransactionFilter) -> str:
    return json.dumps(made.to_dict(), separators=(",", ":"))


def test_an_adjacent_repeat_needs_an_entry_between() -> None:
    # This limit is documented in the module: these two appends look like one.
    assert _passed([("a", 5), ("a", 5)]) == [0, 1]
    assert _passed([("a", 5), None, ("a", 5)]) == [0, 1]


def test_a_prefix_that_looks_like_a_transaction_is_not_taken_for_one() -> None:
    made = TransactionFilter("app=a/batch=1")
    name = batch_key("app=a/batch=1", ulid_at(NOW))
    assert made.offer(0, name)
    made.skip(1, name)
    assert made.offer(2, name)
    assert made.to_dict() == TransactionFilter("").to_dict()


def test_a_message_of_a_named_publisher_is_not_part_of_a_transaction_of_its_app() -> None:
    made = TransactionFilter("ingest")
    sent = con(A, 2, txn=Transaction("app", 7))
    assert made.offer(0, sent)
    made.skip(1, sent)
    made.skip(2, "elsewhere/x.batch")
    assert made.to_dict() == TransactionFilter("").to_dict()


def test_f5_the_repeat_of_a_skipped_first_transaction_is_delivered() -> None:
    made = TransactionFilter("ingest")
    made.skip(0, _location(("a", 0)))
    assert made.offer(1, _location(("a", 1)))
    assert made.offer(2, _location(("a", 0)))


def test_f5_the_repeat_of_a_skipped_transaction_is_delivered() -> None:
    made = TransactionFilter("ingest")
    assert made.offer(0, _location(("a", 4)))
    made.skip(1, _location(("a", 5)))
    # A later transaction was readable, and passed before the repeat.
    assert made.offer(2, _location(("a", 6)))
    assert text_of(made) == (
        '{"v":1,"apps":{"a":6},"tail":["a",2],"missing":{"a":[5]},"seen":{"a":20454}}'
    )
    made = TransactionFilter.from_dict(made.to_dict(), "ingest")
    assert not made.offer(3, _location(("a", 4)))
    assert made.offer(4, _location(("a", 5)))
    assert text_of(made) == '{"v":1,"apps":{"a":6},"tail":["a",4,5],"seen":{"a":20454}}'
    made = TransactionFilter.from_dict(made.to_dict(), "ingest")
    assert made.offer(5, _location(("a", 5)))
    assert not made.offer(6, _location(("a", 6)))
    assert not made.offer(7, _location(("a", 5)))
    assert made.offer(8, _location(("a", 7)))


def test_a_torn_transaction_is_delivered_once_without_its_skipped_batch() -> None:
    for gap in range(3):
        made = TransactionFilter("ingest")
        for sequence in range(3):
            if sequence == gap:
                made.skip(sequence, _location(("a", 5)))
            else:
                assert made.offer(sequence, _location(("a", 5)))
        assert made.offer(3, _location(None))
        assert not made.offer(4, _location(("a", 5)))


def test_skipping_a_repeat_changes_nothing() -> None:
    made = TransactionFilter("ingest")
    _passed([("a", 5), None], made)
    before = text_of(made)
    made.skip(2, _location(("a", 5)))
    made.skip(3, _location(("a", 4)))
    assert text_of(made) == before


def test_the_rest_of_a_transaction_after_lost_entries_is_delivered() -> None:
    made = TransactionFilter("ingest")
    assert made.offer(0, _location(("a", 5)))
    before = made.copy()
    before.lost(-1)  # before the last delivered entry
    assert not before.offer(3, _location(("a", 5)))
    made.lost(2)
    assert made.offer(3, _location(("a", 5)))
    assert made.offer(4, _location(("a", 5)))
    # A later repeat is still recognized.
    assert made.offer(5, _location(None))
    assert not made.offer(6, _location(("a", 5)))


def dated(app: str, batch: int, day: int) -> str:
    return batch_key("ingest", ulid_at(day * DAY_MS), Transaction(app, batch))


def ulid_at(now_ms: int) -> str:
    return ManualRuntime(now_ms=now_ms).ulid()


def test_an_app_that_wrote_nothing_for_a_long_time_is_forgotten() -> None:
    made = TransactionFilter("ingest")
    for sequence in range(1000):
        assert made.offer(sequence, dated(f"app{sequence:04d}", 0, day=sequence))
        made.prune(sequence * DAY_MS)
    assert len(made.to_dict()["apps"]) == HORIZON_DAYS + 1
    # Repeats of an app within the horizon are still dropped.
    assert not made.offer(2000, dated("app0999", 0, day=999))
    assert not made.offer(2001, dated(f"app{999 - HORIZON_DAYS:04d}", 0, day=999))


def test_an_app_is_remembered_through_its_whole_last_day() -> None:
    made = TransactionFilter("ingest")
    made.offer(0, dated("a", 1, day=500))
    made.offer(1, dated("ahead", 1, day=900))
    made.prune((501 + HORIZON_DAYS) * DAY_MS - 1)
    assert set(made.to_dict()["apps"]) == {"a", "ahead"}
    made.prune((501 + HORIZON_DAYS) * DAY_MS)
    assert set(made.to_dict()["apps"]) == {"ahead"}


def test_a_state_without_ages_starts_to_age_now() -> None:
    text = '{"v":1,"apps":{"a":3,"b":4},"tail":null}'
    made = TransactionFilter.from_dict(json.loads(text), "ingest")
    made.prune(500 * DAY_MS)
    assert text_of(made) == text
    assert made.offer(9, dated("b", 5, day=500))
    made.prune(500 * DAY_MS)
    assert made.to_dict()["apps"] == {"a": 3, "b": 5}
    assert made.offer(10, dated("b", 6, day=501 + HORIZON_DAYS))
    made.prune((501 + HORIZON_DAYS) * DAY_MS)
    assert made.to_dict()["apps"] == {"b": 6}


def test_skipped_transactions_are_forgotten_but_not_the_current_one() -> None:
    made = TransactionFilter("ingest")
    made.skip(0, dated("gone", 5, day=100))
    assert made.offer(1, dated("current", 5, day=100))
    made = TransactionFilter.from_dict(made.to_dict(), "ingest")
    # Another app advances the newest day, but its repeat does not end the current transaction.
    assert not made.copy().offer(3, dated("current", 4, day=500))
    state = made.to_dict()
    state["seen"]["other"] = 500
    made = TransactionFilter.from_dict(state, "ingest")
    made.prune(500 * DAY_MS)
    assert made.to_dict()["apps"] == {"current": 5}
    assert "missing" not in made.to_dict()
    assert made.offer(2, dated("current", 5, day=100))


def test_state_is_small_fixed_json() -> None:
    made = TransactionFilter("ingest")
    _passed([("b", 2), ("a", 7)], made)
    text = '{"v":1,"apps":{"a":7,"b":2},"tail":["a",1],"seen":{"a":20454,"b":20454}}'
    assert text_of(made) == text
    assert text_of(TransactionFilter.from_dict(json.loads(text), "ingest")) == text


@pytest.mark.parametrize(
    "text",
    [
        "7",
        "{}",
        '{"v":2,"apps":{},"tail":null}',
        '{"v":1,"apps":{"a":"7"},"tail":null}',
        '{"v":1,"apps":{"a":-1},"tail":null}',
        '{"v":1,"apps":{},"tail":["a",1]}',
        '{"v":1,"apps":{"a":1},"tail":["a",1,0,0]}',
        '{"v":1,"apps":{},"tail":null,"missing":{"a":["5"]}}',
        '{"v":1,"apps":{},"tail":null,"seen":{"a":"5"}}',
        '{"v":1,"apps":{},"tail":null,"seen":5}',
    ],
)
def test_foreign_state_is_refused(text: str) -> None:
    state = json.loads(text)
    with pytest.raises(InvalidInput, match="is not version 1") as caught:
        TransactionFilter.from_dict(state, "ingest")
    assert f"transaction state {state!r} is" in str(caught.value)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", None]), st.integers(0, 4), st.integers(1, 3), st.booleans()
        ),
        max_size=30,
    ),
    st.randoms(use_true_random=False),
)
def test_only_the_first_append_of_each_transaction_is_delivered(
    appends: list[tuple[str | None, int, int, bool]], cuts: random.Random
) -> None:
    # The model: an append is delivered if its number is larger than all earlier ones.
    entries: list[Entry] = []
    expected: list[int] = []
    high: dict[str, int] = {}
    for app, batch, size, _ in appends:
        group: list[Entry] = [None if app is None else (app, batch)] * size
        if app is not None and entries and entries[-1] == (app, batch):
            expected.append(len(entries))
            entries.append(None)  # the writer's side of the contract
        passes = app is None or batch > high.get(app, -1)
        if passes:
            expected += range(len(entries), len(entries) + size)
            if app is not None:
                high[app] = batch
        entries += group

    made = TransactionFilter("ingest")
    seen = []
    for sequence, entry in enumerate(entries):
        if cuts.random() < 0.3:
            made = TransactionFilter.from_dict(made.to_dict(), "ingest")
        if made.offer(sequence, _location(entry)):
            seen.append(sequence)
    assert seen == expected
