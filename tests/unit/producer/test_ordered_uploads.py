from __future__ import annotations

import time

import pytest

from opendata_buffer.errors import (
    Closed,
    CommitStateUnknown,
    PermanentStorageError,
    TransientStorageError,
)
from opendata_buffer.producer.accumulator import OrderedUploads
from opendata_buffer.producer.batching import Batch, DurabilityWatcher, Durable, Stage
from opendata_buffer.runtime import Moment
from opendata_buffer.testing.runtime import ManualRuntime

DENIED = PermanentStorageError("denied")
WATCHER = DurabilityWatcher(ManualRuntime())


def at(seconds: float, *, wall: float | None = None) -> Moment:
    return Moment(int((seconds if wall is None else wall) * 1000), seconds)


def line_of(max_age: float = 300.0, append_limit: float = 120.0) -> OrderedUploads:
    return OrderedUploads(manifest_path="q/manifest", max_age=max_age, append_limit=append_limit)


def enter(
    line: OrderedUploads,
    n: int,
    *,
    ordered: bool = False,
    deadline: float = 1e9,
    named: float = 0.0,
) -> Batch:
    batch = Batch(
        WATCHER,
        ordered=ordered,
        calls=1,
        deadline=deadline,
        location=f"ingest/{n:03d}.batch",
        data=b"bytes",
        named=at(named),
    )
    line.enter(batch)
    return batch


def append(line: OrderedUploads, first: int, now: float = 0.0) -> list[str]:
    """Append what is ready, and tell which batches that were."""
    group, _ = line.take(at(now))
    assert line.landed(first, at(now)) == []
    return [batch.location for batch in group]


def test_an_upload_waits_for_the_one_before_it() -> None:
    line = line_of()
    first, second = enter(line, 1), enter(line, 2)
    line.stored(second)
    assert line.take(at(0)) == ([], [])
    line.stored(first)
    assert append(line, 7) == [first.location, second.location]
    assert first.outcome == Durable(7, first.location)
    assert second.outcome == Durable(8, second.location)
    assert line.take_completed() == [first, second]


def test_one_group_is_appended_at_a_time() -> None:
    line = line_of()
    first, second = enter(line, 1), enter(line, 2)
    line.stored(first)
    assert line.take(at(0)) == ([first], [])
    line.stored(second)
    assert line.take(at(0)) == ([], [])
    line.landed(0, at(0))
    assert line.take(at(0)) == ([second], [])


def test_a_completed_batch_keeps_no_bytes() -> None:
    line = line_of()
    batch = enter(line, 1)
    line.fail(batch, DENIED)
    assert batch.data is None


def test_a_failed_upload_lets_those_behind_it_pass() -> None:
    line = line_of()
    first, second = enter(line, 1), enter(line, 2)
    line.stored(second)
    line.fail(first, DENIED)
    assert append(line, 0) == [second.location]
    assert first.outcome is DENIED


def test_a_failed_transaction_takes_later_ones_with_it_and_only_those() -> None:
    line = line_of()
    before = enter(line, 0, ordered=True)
    failed = enter(line, 1, ordered=True)
    plain = enter(line, 2)
    later = enter(line, 3, ordered=True)
    line.fail(failed, DENIED)
    for batch in (before, plain, later):
        line.stored(batch)
    assert later.stage is Stage.COMPLETED
    assert later.outcome is DENIED
    assert append(line, 0) == [before.location, plain.location]


def test_a_transaction_cannot_enter_behind_the_sweep_of_a_failed_one() -> None:
    """produce() may have looked for failures just before there was one."""
    line = line_of()
    line.fail(enter(line, 0, ordered=True), DENIED)
    late = enter(line, 1, ordered=True)
    assert late.outcome is DENIED
    plain = enter(line, 2)
    line.stored(plain)
    assert append(line, 0) == [plain.location]


def test_the_ordered_uploads_before_two_failures_are_swept_by_the_second() -> None:
    line = line_of()
    first, middle, third = (enter(line, n, ordered=True) for n in range(3))
    line.fail(third, DENIED)
    line.fail(first, DENIED)
    assert middle.outcome is DENIED


def test_f5_old_uploads_go_back_together_and_keep_their_places() -> None:
    line = line_of(max_age=300.0)
    old, young, old_too = enter(line, 1), enter(line, 2, named=301), enter(line, 3)
    for batch in (old, young, old_too):
        line.stored(batch)
    assert line.take(at(301)) == ([], [old, old_too])
    assert line.take(at(301)) == ([], [])
    for batch in (old_too, old):
        batch.named = at(302)
        line.stored(batch)
    assert append(line, 0, now=302) == [old.location, young.location, old_too.location]


def test_f5_an_upload_of_a_machine_that_was_suspended_goes_back() -> None:
    """Linux stops the monotonic clock while the machine sleeps; the collector does not."""
    line = line_of(max_age=300.0)
    batch = enter(line, 1)
    line.stored(batch)
    assert line.take(at(0, wall=301)) == ([], [batch])


def test_f5_f6_a_wall_clock_that_was_set_back_does_not_make_an_upload_young() -> None:
    line = line_of(max_age=300.0)
    batch = enter(line, 1, named=1000)
    line.stored(batch)
    assert line.take(at(1301, wall=0)) == ([], [batch])


def test_f5_an_upload_that_failed_is_not_uploaded_again() -> None:
    line = line_of(max_age=300.0)
    old, young = enter(line, 1), enter(line, 2, named=301)
    line.stored(old)
    line.stored(young)
    line.fail(old, DENIED)
    assert line.take(at(301)) == ([young], [])


def test_f5_a_commit_that_slept_past_the_grace_period_is_not_told_as_durable() -> None:
    """The process freezes between the age check and the answer of its write."""
    line = line_of(max_age=300.0)
    late, fresh = enter(line, 1), enter(line, 2, named=299)
    line.stored(late)
    line.stored(fresh)
    line.take(at(300))
    (found,) = line.landed(7, at(601))
    assert (found.batch, found.sequence, found.age) == (late, 7, 601.0)
    assert late.outcome is None
    assert fresh.outcome == Durable(8, fresh.location)
    unknown = CommitStateUnknown("q/manifest", 7, (late.location,), 8, "late")
    line.fail(late, unknown)
    assert late.outcome is unknown


def test_a_refused_append_leaves_its_uploads_in_front() -> None:
    line = line_of()
    first, second, third = (enter(line, n) for n in range(3))
    line.stored(first)
    line.stored(second)
    line.take(at(0))
    line.stored(third)
    line.refused(TransientStorageError("slow down"), at(0))
    assert [batch.outcome for batch in (first, second)] == [None, None]
    assert append(line, 0) == [first.location, second.location, third.location]


def test_f35_a_part_of_what_is_ready_can_be_taken() -> None:
    line = line_of()
    batches = [enter(line, n) for n in range(5)]
    for batch in batches:
        line.stored(batch)
    assert line.take(at(0), 2) == (batches[:2], [])
    line.landed(0, at(0))
    assert line.take(at(0)) == (batches[2:], [])


def test_a_deadline_is_kept_whatever_an_upload_waits_for() -> None:
    line = line_of()
    hangs = enter(line, 1, deadline=10)
    behind = enter(line, 2, deadline=11)
    refused = TransientStorageError("slow down")
    line.stored(behind)
    assert line.next_deadline() == 10
    line.expire(9.9)
    assert hangs.outcome is None
    line.expire(10)
    assert isinstance(hangs.outcome, TransientStorageError)
    assert "delivery_timeout_ms: its upload did not end" in str(hangs.outcome)
    assert line.take(at(10)) == ([behind], [])
    # While it is being appended, nobody knows whether it is queued.
    line.expire(50)
    assert behind.outcome is None
    line.refused(refused, at(51))
    assert behind.outcome is refused


def test_uploads_that_always_grow_too_old_end_at_their_deadline() -> None:
    line = line_of(max_age=1.0)
    batch = enter(line, 1, deadline=10)
    rounds = 0
    while batch.outcome is None:
        line.stored(batch)
        now = 2.0 * (rounds + 1)
        _, again = line.take(at(now))
        for each in again:
            each.named = at(now)
        rounds += 1
        assert rounds < 20
    assert isinstance(batch.outcome, TransientStorageError)


def test_an_append_without_an_answer_is_unknown_in_the_end() -> None:
    line = line_of(append_limit=120.0)
    first, second = enter(line, 1, ordered=True), enter(line, 2, ordered=True)
    behind = enter(line, 3, ordered=True)
    line.stored(first)
    line.stored(second)
    line.take(at(5))
    assert line.next_deadline() == 125
    line.expire(125)
    for batch in (first, second):
        assert isinstance(batch.outcome, CommitStateUnknown)
        assert batch.outcome.locations == (first.location, second.location)
    assert behind.stage is Stage.COMPLETED
    # What becomes known later changes nothing.
    line.landed(0, at(126))
    assert isinstance(first.outcome, CommitStateUnknown)


def test_after_abandon_every_batch_has_an_outcome() -> None:
    line = line_of()
    appending, waiting = enter(line, 1), enter(line, 2)
    line.stored(appending)
    line.take(at(0))
    closed = Closed("no time left")
    line.abandon(closed)
    assert isinstance(appending.outcome, CommitStateUnknown)
    assert waiting.outcome is closed


def test_an_append_must_begin_before_its_objects_are_old_and_its_deadlines_pass() -> None:
    line = line_of(max_age=300.0)
    group = [enter(line, 1, named=10), enter(line, 2, named=20, deadline=315)]
    assert line.begin_by(group) == 310
    assert line.begin_by(group[1:]) == 315


@pytest.mark.parametrize("outcome", ["landed", "failed", "refused", "expired"])
def test_completing_a_long_queue_takes_time_in_proportion_to_its_length(outcome: str) -> None:
    def seconds(count: int) -> float:
        line = line_of()
        batches = [enter(line, n, ordered=True, deadline=100) for n in range(count)]
        for batch in batches:
            line.stored(batch)
        began = time.thread_time()
        line.take(at(0))
        if outcome == "landed":
            line.landed(0, at(0))
        elif outcome == "failed":
            line.failed(DENIED)
        else:
            line.refused(TransientStorageError("slow down"), at(0))
            line.expire(100 if outcome == "expired" else 0)
        took = time.thread_time() - began
        assert (len(line.take_completed()) == count) == (outcome != "refused")
        return took

    # As many batches in 16 queues as in one: 16 times the time if each searched its queue.
    few = min(sum(seconds(500) for _ in range(16)) for _ in range(3))
    many = min(seconds(8_000) for _ in range(3))
    assert many < 4 * few
