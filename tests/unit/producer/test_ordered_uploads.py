"""The order of batches from their upload to their outcome."""

from __future__ import annotations

import pytest

from opendata_buffer.errors import CommitStateUnknown, PermanentStorageError, TransientStorageError
from opendata_buffer.producer.batching import (
    Batch,
    Completion,
    Durable,
    Stage,
)
from opendata_buffer.producer.ordered_uploads import OrderedUploads
from opendata_buffer.runtime import Moment
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.producer.in_memory import config

DENIED = PermanentStorageError("denied")
COMPLETION = Completion(ManualRuntime())


def at(seconds: float, *, wall: float | None = None) -> Moment:
    return Moment(int((seconds if wall is None else wall) * 1000), seconds)


def uploads_of(max_age: float = 300.0, append_limit: float = 120.0) -> OrderedUploads:
    uploads = OrderedUploads(config(manifest_path="q/manifest"))
    uploads.set_limits(int(2_000 * max_age), append_limit)
    return uploads


def enter(
    uploads: OrderedUploads,
    n: int,
    *,
    ordered: bool = False,
    deadline: float = 1e9,
    named: float = 0.0,
    stored: bool = False,
) -> Batch:
    batch = Batch(
        COMPLETION,
        ordered=ordered,
        calls=1,
        deadline=deadline,
        location=f"ingest/{n:03d}.batch",
        data=b"bytes",
        named=at(named),
    )
    uploads.enter(batch)
    if stored:
        uploads.stored(batch)
    return batch


def append(uploads: OrderedUploads, first: int, now: float = 0.0) -> list[str]:
    """Append the ready batches, and return them."""
    group, _ = uploads.take(at(now))
    assert uploads.landed(first, at(now)) == []
    return [batch.location for batch in group]


def test_an_upload_waits_for_the_previous_one() -> None:
    uploads = uploads_of()
    first, second = enter(uploads, 1), enter(uploads, 2)
    uploads.stored(second)
    assert uploads.take(at(0)) == ([], [])
    uploads.stored(first)
    assert append(uploads, 7) == [first.location, second.location]
    assert first.outcome == Durable(7, first.location)
    assert second.outcome == Durable(8, second.location)
    assert uploads.take_completed() == [first, second]


def test_one_group_is_appended_at_a_time() -> None:
    uploads = uploads_of()
    first, second = enter(uploads, 1), enter(uploads, 2)
    uploads.stored(first)
    assert uploads.take(at(0)) == ([first], [])
    uploads.stored(second)
    assert uploads.take(at(0)) == ([], [])
    uploads.landed(0, at(0))
    assert uploads.take(at(0)) == ([second], [])


def test_a_failed_upload_releases_its_bytes_and_does_not_block_later_ones() -> None:
    uploads = uploads_of()
    first, second = enter(uploads, 1), enter(uploads, 2, stored=True)
    uploads.fail([first], DENIED)
    assert append(uploads, 0) == [second.location]
    assert (first.outcome, first.data) == (DENIED, None)


def test_a_transaction_that_follows_a_failed_one_fails() -> None:
    """produce() may have checked for failures just before the first one."""
    uploads = uploads_of()
    uploads.fail([enter(uploads, 0, ordered=True)], DENIED)
    late = enter(uploads, 1, ordered=True)
    assert late.outcome is DENIED
    plain = enter(uploads, 2, stored=True)
    assert append(uploads, 0) == [plain.location]


def test_the_earlier_of_two_failures_fails_the_batches_between_them() -> None:
    uploads = uploads_of()
    first, middle, third = (enter(uploads, n, ordered=True) for n in range(3))
    uploads.fail([third], DENIED)
    uploads.fail([first], DENIED)
    assert middle.outcome is DENIED


def test_f5_old_uploads_are_repeated_together_and_keep_their_order() -> None:
    uploads = uploads_of(max_age=300.0)
    failed, old = enter(uploads, 0, stored=True), enter(uploads, 1, stored=True)
    young, old_too = enter(uploads, 2, named=301, stored=True), enter(uploads, 3, stored=True)
    uploads.fail([failed], DENIED)
    assert uploads.take(at(301)) == ([], [old, old_too])
    assert uploads.take(at(301)) == ([], [])
    for batch in (old_too, old):
        batch.named = at(302)
        uploads.stored(batch)
    assert append(uploads, 0, now=302) == [old.location, young.location, old_too.location]


@pytest.mark.parametrize(
    ("named", "now"),
    [(0, at(0, wall=301)), (1000, at(1301, wall=0))],
    ids=["the machine was suspended", "the wall clock was set back"],
)
def test_f5_f6_the_age_of_an_upload_is_the_larger_one_of_both_clocks(
    named: float, now: Moment
) -> None:
    """Linux stops the monotonic clock while the machine sleeps, but the collector goes on."""
    uploads = uploads_of(max_age=300.0)
    batch = enter(uploads, 1, named=named, stored=True)
    assert uploads.take(now) == ([], [batch])


def test_f5_a_commit_that_slept_past_the_grace_period_is_not_durable() -> None:
    """The process freezes between the age check and the answer of its write."""
    uploads = uploads_of(max_age=300.0)
    late, fresh = enter(uploads, 1, stored=True), enter(uploads, 2, named=299, stored=True)
    uploads.take(at(300))
    assert uploads.landed(7, at(601)) == [(late, 7, 601.0)]
    assert late.outcome is None
    assert fresh.outcome == Durable(8, fresh.location)
    unknown = CommitStateUnknown("q/manifest", 7, (late.location,), 8, "late")
    uploads.fail([late], unknown)
    assert late.outcome is unknown


def test_the_uploads_of_a_refused_append_stay_first() -> None:
    uploads = uploads_of()
    first, second = (enter(uploads, n, stored=True) for n in range(2))
    third = enter(uploads, 2)
    uploads.take(at(0))
    uploads.stored(third)
    uploads.refused(TransientStorageError("slow down"), at(0))
    assert [batch.outcome for batch in (first, second)] == [None, None]
    assert append(uploads, 0) == [first.location, second.location, third.location]


def test_a_deadline_applies_to_every_wait_of_an_upload() -> None:
    uploads = uploads_of()
    hangs = enter(uploads, 1, deadline=10)
    behind = enter(uploads, 2, deadline=11, stored=True)
    refused = TransientStorageError("slow down")
    assert uploads.next_deadline() == 10
    uploads.expire(9.9)
    assert hangs.outcome is None
    uploads.expire(10)
    assert isinstance(hangs.outcome, TransientStorageError)
    assert "delivery_timeout_ms: its upload did not end" in str(hangs.outcome)
    assert uploads.take(at(10)) == ([behind], [])
    # While it is appended, it may already be queued.
    uploads.expire(50)
    assert behind.outcome is None
    uploads.refused(refused, at(51))
    assert behind.outcome is refused


def test_uploads_that_always_become_too_old_fail_at_their_deadline() -> None:
    uploads = uploads_of(max_age=1.0)
    batch = enter(uploads, 1, deadline=10)
    rounds = 0
    while batch.outcome is None:
        uploads.stored(batch)
        now = 2.0 * (rounds + 1)
        _, again = uploads.take(at(now))
        for each in again:
            each.named = at(now)
        rounds += 1
        assert rounds < 20
    assert isinstance(batch.outcome, TransientStorageError)


def test_an_append_without_an_answer_is_unknown_at_its_deadline() -> None:
    uploads = uploads_of(append_limit=120.0)
    first, second = (enter(uploads, n, ordered=True, stored=True) for n in range(2))
    behind = enter(uploads, 3, ordered=True)
    uploads.take(at(5))
    assert uploads.next_deadline() == 125
    uploads.expire(125)
    for batch in (first, second):
        assert isinstance(batch.outcome, CommitStateUnknown)
        assert batch.outcome.locations == (first.location, second.location)
    assert behind.stage is Stage.COMPLETED
    # A later answer changes nothing.
    uploads.landed(0, at(126))
    assert isinstance(first.outcome, CommitStateUnknown)


def test_an_append_must_start_before_its_objects_are_old_and_before_its_deadlines() -> None:
    uploads = uploads_of(max_age=300.0)
    group = [enter(uploads, 1, named=10), enter(uploads, 2, named=20, deadline=315)]
    assert uploads.begin_by(group) == 310
    assert uploads.begin_by(group[1:]) == 315
