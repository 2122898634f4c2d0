"""What the collector may delete, and above all what it leaves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.formats.batch import Transaction, batch_key, name_time_ms
from opendata_buffer.gc import GcPlan, Queued, clock_fault, plan
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


@pytest.mark.parametrize(
    ("named_ms", "stored_ms", "own_ahead_ms", "deleted"),
    [
        (60 * MINUTE, MINUTE, 0, False),  # the producer's clock is slow
        (60 * MINUTE, GRACE, 0, False),
        (60 * MINUTE, GRACE + 1, 0, True),
        (GRACE, 60 * MINUTE, 0, False),
        (-60 * MINUTE, 60 * MINUTE, 0, False),  # it is fast, or a sink names its batches ahead
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


# OpenData's Go producer: a ULID for its run, a number for each batch.


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
def test_f7_names_this_queue_does_not_make_are_left_alone(key: str) -> None:
    made = _plan([], [_object(key)])
    assert (made.delete, made.ignored) == ((), 1)


def test_f7_a_queue_inside_a_transaction_directory_is_left_alone() -> None:
    foreign = _key(60 * MINUTE, "ingest/app=a/batch=1")
    marker = "ingest/app=a/batch=1/_owner.json"
    assert _keys(_plan([], [_object(foreign)])) == [foreign], "the shape alone does not tell"
    assert _plan([], [_object(foreign), _object(marker)]).delete == ()


def test_deletes_come_oldest_first() -> None:
    keys = [_key(age * MINUTE) for age in (30, 90, 60)]
    made = _plan([], map(_object, keys))
    assert (_keys(made), made.delete_bytes) == ([keys[1], keys[2], keys[0]], 21)


# Queues inside the prefix, seen page by page.


@given(
    st.lists(st.integers(-20, 60), max_size=6),
    st.lists(
        st.tuples(st.integers(-20, 60), st.integers(0, 60), st.booleans(), st.booleans()),
        max_size=12,
    ),
)
def test_the_plan_obeys_every_rule_at_once(
    queued_ages: list[int], orphan_ages: list[tuple[int, int, bool, bool]]
) -> None:
    # Ages in minutes: by the name, and by the store. The rules, written down a second time.
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
