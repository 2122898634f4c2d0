"""Each transaction once, whatever a writer repeats."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.consumer.isolation import HORIZON_DAYS, TransactionFilter
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.testing.runtime import ManualRuntime

_ulids = ManualRuntime()
DAY_MS = 24 * 60 * 60 * 1000
TODAY = 20_454  # of ManualRuntime, since the Unix epoch
Entry = tuple[str, int] | None


def _location(entry: Entry) -> str:
    txn = None if entry is None else Transaction(*entry)
    return batch_key("ingest", _ulids.ulid(), txn)


def _passed(entries: list[Entry], made: TransactionFilter | None = None) -> list[int]:
    made = made or TransactionFilter("ingest")
    return [i for i, entry in enumerate(entries) if made.offer(i, _location(entry))]


def test_entries_without_a_transaction_always_pass() -> None:
    assert _passed([None, None, None]) == [0, 1, 2]


def test_a_transaction_passes_whole() -> None:
    assert _passed([("a", 0), ("a", 0), ("a", 0), ("a", 1)]) == [0, 1, 2, 3]


def test_a_repeated_transaction_is_dropped_whole() -> None:
    assert _passed([("a", 5), ("a", 5), None, ("a", 5), ("a", 5)]) == [0, 1, 2]


def test_a_repeat_behind_a_later_transaction_is_dropped() -> None:
    assert _passed([("a", 5), ("a", 6), ("a", 5)]) == [0, 1]


def test_apps_have_a_high_water_mark_each() -> None:
    assert _passed([("a", 5), ("b", 1), ("a", 5), ("b", 2)]) == [0, 1, 3]


def test_a_dropped_repeat_does_not_join_the_original() -> None:
    # 1 is a repeat of an older transaction; 2 was not written by the append that wrote 0.
    assert _passed([("a", 5), ("a", 4), ("a", 5)]) == [0]


def test_an_entry_without_a_transaction_leaves_nothing_to_continue() -> None:
    made = TransactionFilter("ingest")
    assert _passed([("a", 5), None], made) == [0, 1]
    assert made.to_dict() == {"v": 1, "apps": {"a": 5}, "tail": None, "seen": {"a": TODAY}}


def test_batch_numbers_may_leave_gaps() -> None:
    assert _passed([("a", 3), ("a", 90), ("a", 4)]) == [0, 1]


def test_batches_of_other_prefixes_have_no_transaction() -> None:
    made = TransactionFilter("ingest")
    foreign = batch_key("other", _ulids.ulid(), Transaction("a", 1))
    assert [made.offer(sequence, foreign) for sequence in (0, 5)] == [True, True]


def test_a_transaction_may_straddle_two_calls() -> None:
    first = TransactionFilter("ingest")
    assert first.offer(10, _location(("a", 5)))
    second = TransactionFilter.from_json(first.to_json(), "ingest")
    assert second.offer(11, _location(("a", 5)))
    assert not second.offer(13, _location(("a", 5)))


def test_the_same_entry_offered_twice_is_a_repeat() -> None:
    made = TransactionFilter("ingest")
    assert [made.offer(4, _location(("a", 5))) for _ in range(2)] == [True, False]


def test_an_adjacent_repeat_needs_an_entry_between() -> None:
    # The limit the module documents: nothing tells these two appends from one.
    assert _passed([("a", 5), ("a", 5)]) == [0, 1]
    assert _passed([("a", 5), None, ("a", 5)]) == [0, 1]


def test_a_copy_is_independent() -> None:
    made = TransactionFilter("ingest")
    other = made.copy()
    assert other.offer(0, _location(("a", 1)))
    assert made.to_json() == '{"v":1,"apps":{},"tail":null}'


def test_f5_repeat_of_a_skipped_transaction_passes() -> None:
    made = TransactionFilter("ingest")
    assert made.offer(0, _location(("a", 4)))
    made.skip(1, _location(("a", 5)))
    # A later one of the same late append was readable, and went by before the repeat comes.
    assert made.offer(2, _location(("a", 6)))
    assert made.to_json() == (
        '{"v":1,"apps":{"a":6},"tail":["a",2],"missing":{"a":[5]},"seen":{"a":20454}}'
    )
    made = TransactionFilter.from_json(made.to_json(), "ingest")
    assert not made.offer(3, _location(("a", 4)))
    assert made.offer(4, _location(("a", 5)))
    assert made.to_json() == '{"v":1,"apps":{"a":6},"tail":["a",4,5],"seen":{"a":20454}}'
    assert made.offer(5, _location(("a", 5)))
    assert not made.offer(6, _location(("a", 6)))
    assert not made.offer(7, _location(("a", 5)))
    assert made.offer(8, _location(("a", 7)))


def test_a_torn_transaction_passes_without_what_was_skipped_and_not_again() -> None:
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
    before = made.to_json()
    made.skip(2, _location(("a", 5)))
    made.skip(3, _location(("a", 4)))
    assert made.to_json() == before


def test_skipping_an_entry_without_a_transaction_separates() -> None:
    made = TransactionFilter("ingest")
    assert made.offer(0, _location(("a", 5)))
    made.skip(1, _location(None))
    assert not made.offer(2, _location(("a", 5)))


def test_a_copy_has_its_own_missing_transactions() -> None:
    made = TransactionFilter("ingest")
    made.skip(0, _location(("a", 5)))
    other = made.copy()
    assert other.offer(1, _location(("a", 5)))
    assert made.to_dict()["missing"] == {"a": [5]}
    assert "missing" not in other.to_dict()


def test_a_gap_inside_a_transaction_does_not_drop_what_is_behind_it() -> None:
    made = TransactionFilter("ingest")
    assert made.offer(0, _location(("a", 5)))
    made.lost(2)
    assert made.offer(3, _location(("a", 5)))
    assert made.offer(4, _location(("a", 5)))
    # A later repeat is one all the same.
    assert made.offer(5, _location(None))
    assert not made.offer(6, _location(("a", 5)))


def test_a_loss_before_the_last_entry_passed_changes_nothing() -> None:
    made = TransactionFilter("ingest")
    assert made.offer(7, _location(("a", 5)))
    made.lost(6)
    assert not made.offer(9, _location(("a", 5)))


def dated(app: str, batch: int, day: int) -> str:
    return batch_key("ingest", ulid_at(day * DAY_MS), Transaction(app, batch))


def ulid_at(now_ms: int) -> str:
    return ManualRuntime(now_ms=now_ms).ulid()


def test_an_app_that_wrote_nothing_for_long_is_forgotten() -> None:
    made = TransactionFilter("ingest")
    for sequence in range(1000):
        assert made.offer(sequence, dated(f"app{sequence:04d}", 0, day=sequence))
        made.prune(sequence * DAY_MS)
    assert len(made.to_dict()["apps"]) == HORIZON_DAYS + 1
    # What is within the horizon still drops its repeats.
    assert not made.offer(2000, dated("app0999", 0, day=999))
    assert not made.offer(2001, dated(f"app{999 - HORIZON_DAYS:04d}", 0, day=999))


def test_no_single_name_or_clock_that_is_far_ahead_forgets_all_apps() -> None:
    made = TransactionFilter("ingest")
    assert made.offer(0, dated("old", 3, day=100))
    made.prune(9_999 * DAY_MS)
    assert made.offer(1, dated("future", 0, day=9_999))
    made.prune(101 * DAY_MS)
    assert set(made.to_dict()["apps"]) == {"old", "future"}


def test_a_state_from_before_ages_were_kept_ages_from_now_on() -> None:
    text = '{"v":1,"apps":{"a":3,"b":4},"tail":null}'
    made = TransactionFilter.from_json(text, "ingest")
    made.prune(500 * DAY_MS)
    assert made.to_json() == text
    assert made.offer(9, dated("b", 5, day=500))
    made.prune(500 * DAY_MS)
    assert made.to_dict()["apps"] == {"a": 3, "b": 5}
    assert made.offer(10, dated("b", 6, day=501 + HORIZON_DAYS))
    made.prune((501 + HORIZON_DAYS) * DAY_MS)
    assert made.to_dict()["apps"] == {"b": 6}


def test_the_transaction_under_way_is_not_forgotten_and_skipped_ones_are() -> None:
    made = TransactionFilter("ingest")
    made.skip(0, dated("gone", 5, day=100))
    assert made.offer(1, dated("current", 5, day=100))
    made = TransactionFilter.from_json(made.to_json(), "ingest")
    # Another app moves the newest day on, but its repeat does not end the current transaction.
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
    assert made.to_json() == text
    assert TransactionFilter.from_json(text, "ingest").to_json() == text


def test_state_of_a_queue_without_transactions_never_changes() -> None:
    made = TransactionFilter("ingest")
    before = made.to_json()
    _passed([None] * 100, made)
    assert made.to_json() == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "{}",
        '{"v":2,"apps":{},"tail":null}',
        '{"v":1,"apps":{"a":"7"},"tail":null}',
        '{"v":1,"apps":{"a":-1},"tail":null}',
        '{"v":1,"apps":{},"tail":["a"]}',
        '{"v":1,"apps":{},"tail":["a",1]}',
        '{"v":1,"apps":{"a":1},"tail":["a",1,0,0]}',
        '{"v":1,"apps":{},"tail":null,"missing":{"a":5}}',
        '{"v":1,"apps":{},"tail":null,"missing":{"a":["5"]}}',
        '{"v":1,"apps":{},"tail":null,"seen":{"a":"5"}}',
        '{"v":1,"apps":{},"tail":null,"seen":5}',
    ],
)
def test_foreign_state_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="is not version 1"):
        TransactionFilter.from_json(text, "ingest")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", None]), st.integers(0, 4), st.integers(1, 3), st.booleans()
        ),
        max_size=30,
    ),
    st.randoms(use_true_random=False),
)
def test_passes_the_first_append_of_each_transaction_and_no_other(
    appends: list[tuple[str | None, int, int, bool]], cuts: random.Random
) -> None:
    # The model: appends in order; one passes whole when its number is new and not behind.
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
            made = TransactionFilter.from_json(made.to_json(), "ingest")
        if made.offer(sequence, _location(entry)):
            seen.append(sequence)
    assert seen == expected
