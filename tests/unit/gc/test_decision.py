"""What the collector may delete, and above all what it leaves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.errors import CorruptManifest
from opendata_buffer.formats.entries import NewEntry
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.gc import (
    GcPlan,
    Queued,
    clock_fault,
    name_time_ms,
    plan,
    unlisted_markers,
    without_nested,
)
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.stores.base import Listing, ObjectInfo
from opendata_buffer.testing.runtime import ManualRuntime

MINUTE = 60_000
NOW = 1_767_225_600_000
GRACE = 10 * MINUTE
_ulids = ManualRuntime(NOW)


def _key(age_ms: int, prefix: str = "ingest", txn: Transaction | None = None) -> str:
    return batch_key(prefix, _ulids.ulid_at(NOW - age_ms), txn)


def _object(key: str, age_ms: int = 60 * MINUTE, size: int = 7) -> ObjectInfo:
    return ObjectInfo(key, size, NOW - age_ms)


def _plan(
    queued: Iterable[str],
    objects: Iterable[ObjectInfo],
    *,
    own_ms: int = NOW,
    oldest_ms: int | None = None,
) -> GcPlan:
    locations = list(queued)
    if locations and oldest_ms is None:
        oldest_ms = name_time_ms(locations[0])
    return plan(
        Queued(frozenset(locations), oldest_ms),
        Listing(tuple(sorted(objects, key=lambda each: each.key)), NOW),
        own_ms=own_ms,
        data_path_prefix="ingest",
        grace_ms=GRACE,
    )


def _keys(made: GcPlan) -> list[str]:
    return [info.key for info in made.delete]


def test_an_old_orphan_is_deleted() -> None:
    orphan, queued = _key(60 * MINUTE), _key(30 * MINUTE)
    made = _plan([queued], [_object(orphan, size=11), _object(queued)])
    assert (_keys(made), made.delete_bytes, made.referenced) == ([orphan], 11, 1)


def test_a_queued_batch_is_never_deleted() -> None:
    queued = [_key(90 * MINUTE), _key(120 * MINUTE)]
    assert _plan(queued, map(_object, queued)).delete == ()


def test_an_orphan_newer_than_the_oldest_queued_batch_waits() -> None:
    # Its producer may be about to enqueue it.
    made = _plan([_key(60 * MINUTE)], [_object(_key(60 * MINUTE)), _object(_key(30 * MINUTE))])
    assert (made.delete, made.waiting) == ((), 2)


def test_an_empty_queue_leaves_the_grace_period_alone_to_decide() -> None:
    old, young = _key(GRACE + 1), _key(GRACE)
    assert _keys(_plan([], [_object(old), _object(young)])) == [old]


def test_f6_a_slow_producer_clock_does_not_make_an_upload_old() -> None:
    # The name says one hour ago, the store says one minute ago.
    just_uploaded = _object(_key(60 * MINUTE), age_ms=MINUTE)
    assert _plan([], [just_uploaded]).delete == ()
    assert _plan([], [_object(just_uploaded.key, age_ms=GRACE)]).delete == ()
    assert _keys(_plan([], [_object(just_uploaded.key, age_ms=GRACE + 1)])) == [just_uploaded.key]


def test_f6_a_fast_producer_clock_keeps_a_batch_longer_and_no_more() -> None:
    assert _plan([], [_object(_key(-15 * MINUTE), age_ms=60 * MINUTE)]).delete == ()


def test_f6_a_store_that_tells_a_date_ahead_makes_nothing_old() -> None:
    # By the store's clock the object is 11 minutes old; by the collector's it was just written.
    just_uploaded = _object(_key(11 * MINUTE), age_ms=11 * MINUTE)
    assert _keys(_plan([], [just_uploaded])) == [just_uploaded.key]
    made = _plan([], [just_uploaded], own_ms=NOW - 11 * MINUTE)
    assert (made.delete, made.waiting) == ((), 1)


def test_f6_a_collector_whose_clock_is_ahead_makes_nothing_old() -> None:
    young = _object(_key(GRACE), age_ms=GRACE)
    assert _plan([], [young], own_ms=NOW + 60 * MINUTE).delete == ()


def test_f6_clocks_of_store_and_collector_ahead_alike_are_what_nothing_can_tell() -> None:
    # The limit that docs/explanation/guarantees.md states, and why the simulated processes are
    # spared it: there is no third clock to ask. By the true time all of these are 9 minutes old.
    truth = NOW - 11 * MINUTE
    young = _object(_key(20 * MINUTE), age_ms=20 * MINUTE)
    assert clock_fault(NOW, NOW, GRACE) is None
    assert _keys(_plan([], [young])) == [young.key]
    # Either one of them alone, and both of them apart by more than is tolerated, is safe.
    assert _plan([], [young], own_ms=truth).delete == ()
    assert clock_fault(NOW, truth, GRACE) is not None
    assert clock_fault(NOW, NOW + 11 * MINUTE, GRACE) is not None


def test_f5_a_name_ahead_of_time_keeps_a_long_write_alive() -> None:
    # As the Spark sink names its batches: uploaded an hour ago, not to be deleted for another.
    made = _plan([], [_object(_key(-60 * MINUTE), age_ms=60 * MINUTE)])
    assert (made.delete, made.waiting) == ((), 1)


@pytest.mark.parametrize(("store_ahead_ms", "says"), [(0, None), (150_000, None), (-150_000, None)])
def test_f6_clocks_about_right_allow_to_collect(store_ahead_ms: int, says: None) -> None:
    assert clock_fault(NOW + store_ahead_ms, NOW, GRACE) is says


def test_f6_clocks_far_apart_stop_the_collection_with_both_named() -> None:
    fault = clock_fault(NOW + 150_001, NOW, GRACE)
    assert fault is not None
    assert "store's clock is 150 s ahead of this machine's" in fault
    assert "NTP" in fault
    assert "behind" in str(clock_fault(NOW - 150_001, NOW, GRACE))
    # Whole seconds and slow answers are no fault, however short the grace period.
    assert clock_fault(NOW, NOW + 5_000, 0) is None


# OpenData's Go producer: a ULID for its run, a number for each batch.


def _go_key(run_age_ms: int, number: int) -> str:
    return f"ingest/{_ulids.ulid_at(NOW - run_age_ms)}/{number:016x}"


def test_consumed_batches_of_a_go_producer_are_collected_while_it_runs() -> None:
    run = _ulids.ulid_at(NOW - 10_000 * MINUTE)
    consumed, queued, fresh = (f"ingest/{run}/{number:016x}" for number in (1, 2, 3))
    objects = [_object(consumed, 60 * MINUTE), _object(queued, 30 * MINUTE), _object(fresh, MINUTE)]
    made = _plan([queued], objects, oldest_ms=NOW - 30 * MINUTE)
    # All three names say "a week old"; what the store knows of each tells them apart.
    assert (_keys(made), made.referenced, made.waiting) == ([consumed], 1, 1)


def test_an_orphan_of_a_go_producer_that_is_newer_than_the_oldest_queued_batch_waits() -> None:
    orphan = _go_key(10_000 * MINUTE, 7)
    made = _plan(["ingest/x"], [_object(orphan, 30 * MINUTE)], oldest_ms=NOW - 60 * MINUTE)
    assert (made.delete, made.waiting) == ((), 1)


def test_the_name_of_a_go_producer_s_batch_does_not_tell_its_time() -> None:
    assert name_time_ms(_go_key(MINUTE, 1)) is None
    assert name_time_ms(_key(MINUTE)) == NOW - MINUTE
    assert name_time_ms("ingest/old-name.batch") is None


@pytest.mark.parametrize(
    "key",
    [
        "ingest/manifest",
        "ingest/_owner.json",
        "ingest/_gc.json",
        "ingest/app=a/_commit.json",
        "ingest/_quarantine/00000000000000000007-abc.object",
        "ingest/_quarantine/00000000000000000007-abc.json",
        "ingest/_quarantine/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/notes.batch",
        "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP",
        "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP.parquet",
        "ingest/01j5t4r3kxbmz7qv9n2wg8ydhp.batch",
        "ingest/tenant/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/app=a/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/app=a/batch=01/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest2/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
    ],
)
def test_f7_names_this_queue_does_not_make_are_left_alone(key: str) -> None:
    made = _plan([], [_object(key)])
    assert (made.delete, made.ignored) == ((), 1)


def test_batches_of_transactions_are_collected_too() -> None:
    orphan = _key(60 * MINUTE, txn=Transaction("query", 3))
    assert _keys(_plan([], [_object(orphan)])) == [orphan]


def test_f7_a_queue_inside_a_transaction_directory_is_left_alone() -> None:
    foreign = _key(60 * MINUTE, "ingest/app=a/batch=1")
    marker = "ingest/app=a/batch=1/_owner.json"
    assert _keys(_plan([], [_object(foreign)])) == [foreign], "the shape alone does not tell"
    assert _plan([], [_object(foreign), _object(marker)]).delete == ()


def test_deletes_come_oldest_first() -> None:
    keys = [_key(age * MINUTE) for age in (30, 90, 60)]
    assert _keys(_plan([], map(_object, keys))) == [keys[1], keys[2], keys[0]]


def test_an_unreadable_manifest_names_nothing() -> None:
    raw = Manifest.empty().append([NewEntry("ingest/a"), NewEntry("ingest/b")]).raw
    broken = Manifest.parse(raw.replace(b"\x01\0\0\0\0\0\0\0\x08\0", b"\x07\0\0\0\0\0\0\0\x08\0"))
    with pytest.raises(CorruptManifest, match="has sequence 7, expected 1"):
        Queued.of(broken, None)


# Queues inside the prefix, seen page by page.


def _page(objects: Iterable[ObjectInfo], truncated: bool) -> Listing:
    return Listing(tuple(sorted(objects, key=lambda each: each.key)), NOW, truncated)


@pytest.mark.parametrize(
    ("start_after", "truncated", "asked"),
    [
        ("", False, []),
        # The folder's marker may follow on the next page; the one of app=a was on this one.
        ("", True, ["ingest/app=a/batch=1/_owner.json"]),
        ("ingest/app=a/a", False, ["ingest/app=a/_owner.json"]),
    ],
)
def test_f7_a_marker_that_the_page_cannot_show_is_asked_for(
    start_after: str, truncated: bool, asked: list[str]
) -> None:
    orphan = _object(_key(60 * MINUTE, txn=Transaction("a", 1)))
    page = _page([_object("ingest/app=A/x"), orphan], truncated)
    made = GcPlan((orphan,))
    assert unlisted_markers(made, page, start_after, "ingest") == asked


def test_f7_batches_of_a_plain_queue_need_no_marker() -> None:
    orphan = _object(_key(60 * MINUTE))
    assert unlisted_markers(GcPlan((orphan,)), _page([orphan], True), "ingest/0", "ingest") == []


def test_f7_what_lies_below_a_queue_inside_the_prefix_is_spared() -> None:
    mine, theirs = _object("ingest/app=a/batch=1/x"), _object("ingest/app=b/batch=1/x")
    made = without_nested(GcPlan((mine, theirs), ignored=2), ["ingest/app=b/"])
    assert made == GcPlan((mine,), ignored=3)
    assert without_nested(made, []) is made


@given(
    st.lists(st.integers(-20, 60), max_size=6),
    st.lists(st.tuples(st.integers(-20, 60), st.integers(0, 60), st.booleans()), max_size=12),
)
def test_the_plan_obeys_every_rule_at_once(
    queued_ages: list[int], orphan_ages: list[tuple[int, int, bool]]
) -> None:
    # Ages in minutes: by the name, and by the store. The rules, written down a second time.
    queued = [_key(age * MINUTE) for age in queued_ages]
    objects = [_object(key, age_ms=0) for key in queued]
    expected = set()
    for named, stored, in_transaction in orphan_ages:
        key = _key(named * MINUTE, txn=Transaction("a", 1) if in_transaction else None)
        objects.append(_object(key, age_ms=stored * MINUTE))
        if min(named, stored) > 10 and (not queued_ages or named > queued_ages[0]):
            expected.add(key)
    made = _plan(queued, objects)
    assert set(_keys(made)) == expected
    assert made.referenced + made.waiting + len(made.delete) == len(objects)


@pytest.mark.parametrize("txn", [None, Transaction("app", 1)])
def test_a_message_is_collected_as_any_batch_and_never_before_its_time(
    txn: Transaction | None,
) -> None:
    def key(age_ms: int) -> str:
        message = build_uuid(b"\1AAAAA", 2, CONTINUE_TXN)
        return batch_key("ingest", _ulids.ulid_at(NOW - age_ms), txn, message)

    old, young, queued = key(60 * MINUTE), key(5 * MINUTE), key(30 * MINUTE)
    made = _plan([queued], [_object(old), _object(young), _object(queued)])
    assert _keys(made) == [old]
    assert (made.referenced, made.waiting, made.ignored) == (1, 1, 0)
