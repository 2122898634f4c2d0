"""Which objects the collector may delete, and which ones it must keep."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.formats.batch import Transaction, batch_key, name_time_ms
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.gc import (
    GcPlan,
    GcReport,
    Queued,
    clock_fault,
    plan,
    unlisted_markers,
    without_nested,
)
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.stores.base import DeleteFailure, Listing, ObjectInfo
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


@pytest.mark.parametrize(
    ("named_ms", "stored_ms", "own_ahead_ms", "deleted"),
    [
        (60 * MINUTE, MINUTE, 0, False),  # the producer's clock is slow
        (60 * MINUTE, GRACE, 0, False),
        (60 * MINUTE, GRACE + 1, 0, True),
        (GRACE, 60 * MINUTE, 0, False),
        (
            -60 * MINUTE,
            60 * MINUTE,
            0,
            False,
        ),  # its clock is fast, or a sink names its batches ahead of time
        (11 * MINUTE, 11 * MINUTE, 0, True),
        (11 * MINUTE, 11 * MINUTE, -11 * MINUTE, False),  # the store's date is ahead
        (GRACE, GRACE, 60 * MINUTE, False),  # the collector's clock is ahead
    ],
)
def test_f6_a_slow_producer_clock_does_not_make_an_upload_old(
    named_ms: int, stored_ms: int, own_ahead_ms: int, deleted: bool
) -> None:
    made = _plan([], [_object(_key(named_ms), age_ms=stored_ms)], own_ms=NOW + own_ahead_ms)
    assert (len(made.delete), made.waiting) == ((1, 0) if deleted else (0, 1))


def test_f6_store_and_collector_clocks_that_are_equally_ahead_cannot_be_detected() -> None:
    # docs/explanation/guarantees.md states this limit, and the simulation does not exercise it:
    # no third clock could tell. By the true time all of these objects are 9 minutes old.
    truth = NOW - 11 * MINUTE
    young = _object(_key(20 * MINUTE), age_ms=20 * MINUTE)
    assert clock_fault(NOW, NOW, GRACE) is None
    assert _keys(_plan([], [young])) == [young.key]
    # It is safe if only one clock is ahead, or if the two differ by more than the tolerance.
    assert _plan([], [young], own_ms=truth).delete == ()
    assert clock_fault(NOW, truth, GRACE) is not None
    assert clock_fault(NOW, NOW + 11 * MINUTE, GRACE) is not None


# OpenData's Go producer names a batch by the ULID of its run and a number.


@pytest.mark.parametrize(
    "key",
    [
        "ingest/manifest",
        "ingest/_owner.json",
        "ingest/_gc.json",
        "ingest/app=a/_commit.json",
        "ingest/_quarantine/00000000000000000007-abc.object",
        "ingest/_quarantine/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
        "ingest/notes.batch",
        "ingest/tenant/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch",
    ],
)
def test_f7_names_that_this_library_does_not_create_are_left_alone(key: str) -> None:
    made = _plan([], [_object(key)])
    assert (made.delete, made.ignored) == ((), 1)


def test_f7_every_object_that_is_not_a_batch_is_counted() -> None:
    made = _plan([], [_object("ingest/manifest"), _object("ingest/_gc.json")])
    assert (made.delete, made.ignored) == ((), 2)


def test_f7_a_queue_inside_a_transaction_directory_is_left_alone() -> None:
    foreign = _key(60 * MINUTE, "ingest/app=a/batch=1")
    marker = "ingest/app=a/batch=1/_owner.json"
    assert _keys(_plan([], [_object(foreign)])) == [foreign], (
        "the key alone looks like a batch of this queue"
    )
    assert _plan([], [_object(foreign), _object(marker)]).delete == ()


def test_the_oldest_objects_are_deleted_first() -> None:
    keys = [_key(age * MINUTE) for age in (30, 90, 60)]
    made = _plan([], map(_object, keys))
    assert (_keys(made), made.delete_bytes) == ([keys[1], keys[2], keys[0]], 21)


# Queues inside the prefix, listed page by page.


@given(
    st.lists(st.integers(-20, 60), max_size=6),
    st.lists(
        st.tuples(st.integers(-20, 60), st.integers(0, 60), st.booleans(), st.booleans()),
        max_size=12,
    ),
)
def test_a_plan_follows_all_rules_together(
    queued_ages: list[int], orphan_ages: list[tuple[int, int, bool, bool]]
) -> None:
    # The ages are in minutes, by the name and by the store. The loop restates the rules.
    queued = [_key(age * MINUTE) for age in queued_ages]
    objects = [_object(key, age_ms=0) for key in queued]
    expected = set()
    for named, stored, in_transaction, is_message in orphan_ages:
        txn = Transaction("a", 1) if in_transaction else None
        message = build_uuid(b"\1AAAAA", 2, CONTINUE_TXN) if is_message else None
        key = batch_key("ingest", _ulids.ulid_at(NOW - named * MINUTE), txn, message)
        objects.append(_object(key, age_ms=stored * MINUTE))
        if min(named, stored) > 10 and (not queued_ages or named > queued_ages[0]):
            expected.add(key)
    made = _plan(queued, objects)
    assert set(_keys(made)) == expected
    assert made.referenced + made.waiting + len(made.delete) == len(objects)


def test_plans_and_reports_of_two_pages_are_added() -> None:
    first, second = _object("ingest/a", size=3), _object("ingest/b", size=4)
    one, two = GcPlan((first,), 1, 2, 3), GcPlan((second,), 10, 20, 30, held="because")
    assert one + two == GcPlan((first, second), 11, 22, 33, "because")
    assert (two + one).held == "because"
    assert (one + two).delete_bytes == 7
    lost = DeleteFailure("ingest/b", "503")
    report = GcReport(one, 1, (), 5) + GcReport(two, 2, (lost,), 6)
    assert report == GcReport(one + two, 3, (lost,), 11)


@pytest.mark.parametrize(
    ("grace_ms", "apart_ms", "says"),
    [
        (GRACE, GRACE // 4, None),
        (GRACE, GRACE // 4 + 1, "150 s ahead of this machine's, .* grace period of 600 s"),
        (GRACE, -(GRACE // 4) - 1, "150 s behind this machine's"),
        (0, 5_000, None),
        (0, 5_001, "5 s ahead of this machine's, .* grace period of 0 s"),
    ],
)
def test_f6_clocks_may_differ_by_a_quarter_of_the_grace_period_and_at_least_five_seconds(
    grace_ms: int, apart_ms: int, says: str | None
) -> None:
    fault = clock_fault(NOW + apart_ms, NOW, grace_ms)
    if says is None:
        assert fault is None
    else:
        assert re.search(says, str(fault))


def test_markers_are_requested_only_where_the_page_does_not_list_them() -> None:
    deep = _object("ingest/app=a/batch=1/01J5T4R3KXBMZ7QV9N2WG8YDHP.batch")
    top = _object(_key(60 * MINUTE))
    made = GcPlan((deep, top))
    markers = ["ingest/app=a/_owner.json", "ingest/app=a/batch=1/_owner.json"]

    def unlisted(start_after: str, last: str, truncated: bool) -> list[str]:
        page = Listing((ObjectInfo(last, 0, 0),), NOW, truncated)
        return unlisted_markers(made, page, start_after, "ingest")

    assert unlisted("", "ingest/z", truncated=True) == []
    assert unlisted("", "ingest/a", truncated=False) == []
    assert unlisted("", "ingest/a", truncated=True) == markers
    assert unlisted("", markers[0], truncated=True) == markers[1:]
    assert unlisted("", markers[1], truncated=True) == []
    assert unlisted(markers[0], "ingest/z", truncated=True) == markers[:1]
    assert unlisted(markers[1], "ingest/z", truncated=True) == markers
    assert unlisted_markers(made, Listing((), NOW, True), "", "ingest") == []


def test_objects_in_the_folder_of_another_queue_are_not_in_the_plan() -> None:
    ours, theirs = _object("ingest/a.batch"), _object("ingest/inner/a.batch")
    alike = _object("ingest/inner-too/a.batch")
    made = GcPlan((ours, theirs, alike), 1, 2, 3)
    assert without_nested(made, []) is made
    assert without_nested(made, ["ingest/inner/"]) == GcPlan((ours, alike), 1, 2, 4)


def test_a_log_keeps_objects_that_are_not_older_than_its_oldest_name() -> None:
    keys = [_key(age * MINUTE) for age in (30, 20, 10)]
    manifest = Manifest.starting_at(40, 0).append([NewEntry(key) for key in keys])
    whole = Queued.of_log(LogIndex("q", 41, 0), manifest, None)
    assert whole == Queued(frozenset(keys), NOW - 30 * MINUTE)
    above = Queued.of_log(LogIndex("q", 41, 41), manifest, NOW - 25 * MINUTE)
    assert above == Queued(frozenset(keys[1:]), NOW - 25 * MINUTE)
    assert Queued.of_log(LogIndex("q", 43, 43), manifest, None) == Queued()
    unnamed = manifest.append([NewEntry("ingest/by hand")])
    assert Queued.of_log(LogIndex("q", 43, 43), unnamed, NOW).oldest_ms == 0
