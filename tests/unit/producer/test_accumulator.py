"""The accumulator by itself, without the threads of the sender."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import (
    Closed,
    FlushFailed,
    PermanentStorageError,
    TransientStorageError,
)
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.producer.accumulator import Accumulator, Work
from opendata_buffer.producer.batching import (
    REQUEST_HELD,
    Batch,
    DurabilityWatcher,
    Durable,
    ProduceRequest,
)
from opendata_buffer.runtime import Moment
from opendata_buffer.testing.runtime import ManualRuntime

RECORD = b"\x01\0\0\0a"
DENIED = PermanentStorageError("denied")


def at_once() -> float:
    return 0.0


class Fixture:
    """An accumulator whose batches are sealed at once, with one worker."""

    def __init__(self, **settings: Any) -> None:
        self.runtime = ManualRuntime()
        settings = {"flush_size_bytes": 1, **settings}
        config = ProducerConfig(store="memory://unused", **settings)
        self.accumulator = Accumulator(config, 60.0, self.runtime)
        self.accumulator.add_workers()

    def accept(self, transaction: Transaction | None = None) -> DurabilityWatcher:
        return self.accumulator.accept(ProduceRequest(RECORD, 1, b"", 0, transaction))

    def work(self) -> Work:
        work = self.accumulator.next_work()
        assert work is not None
        return work

    def upload(self) -> Batch:
        batch = self.work().batch
        assert batch is not None
        return batch

    def complete(self) -> list[Batch]:
        """A worker completes the watchers, and is idle again."""
        completed = list(self.work().completed)
        self.release(completed)
        self.accumulator.checkin()
        return completed

    def release(self, completed: list[Batch]) -> None:
        self.accumulator.record_failures(completed)
        for each in completed:
            assert each.outcome is not None
            each.watcher.complete(each.outcome)
        self.accumulator.release(completed)


def test_a_batch_is_uploaded_appended_told_and_gone() -> None:
    fixture = Fixture()
    watcher = fixture.accept()
    batch = fixture.upload()
    assert fixture.accumulator.held_bytes() == len(RECORD) + REQUEST_HELD
    assert fixture.accumulator.waiting_calls() == 1
    fixture.accumulator.uploaded(batch, None)
    assert fixture.accumulator.next_group(at_once) == [batch]
    assert fixture.accumulator.landed(7) == []
    fixture.release(fixture.accumulator.appended())
    assert watcher.result() == Durable(7, batch.location)
    assert fixture.accumulator.held_bytes() == fixture.accumulator.waiting_calls() == 0
    fixture.accumulator.flush(0.0)


def test_one_more_worker_is_asked_for_when_the_last_idle_one_leaves() -> None:
    fixture = Fixture(upload_concurrency=2)
    for _ in range(3):
        fixture.accept()
    first, second = fixture.work(), fixture.work()
    assert (first.add_worker, second.add_worker) == (True, True)
    # Two upload, and the third worker, the last, keeps the time.
    assert fixture.accumulator.threads == 3
    assert first.batch is not None
    fixture.accumulator.uploaded(first.batch, None)
    assert fixture.work().add_worker is False


def test_a_worker_that_could_not_be_started_is_asked_for_again() -> None:
    fixture = Fixture()
    fixture.accept()
    fixture.accept()
    work = fixture.work()
    assert work.add_worker
    fixture.accumulator.add_workers(-1)
    assert fixture.accumulator.threads == 1
    assert work.batch is not None
    fixture.accumulator.uploaded(work.batch, None)
    assert fixture.work().add_worker


def test_no_transaction_is_accepted_once_callers_may_know_of_a_failed_one() -> None:
    fixture = Fixture()
    fixture.accept(Transaction("a", 1))
    fixture.accumulator.uploaded(fixture.upload(), None)  # the separator
    fixture.accumulator.uploaded(fixture.upload(), DENIED)
    (failed,) = fixture.complete()
    assert failed.outcome is DENIED
    with pytest.raises(FlushFailed, match="an earlier batch failed: denied"):
        fixture.accept(Transaction("a", 2))
    fixture.accept()
    for _ in range(2):
        with pytest.raises(FlushFailed, match="denied") as caught:
            fixture.accumulator.check()
        assert caught.value.__cause__ is DENIED


def test_f33_room_is_counted_by_bytes_and_by_calls_and_a_large_call_comes_in_alone() -> None:
    fixture, request = Fixture(max_buffered_bytes=300), ProduceRequest(RECORD, 1, b"", 0)
    assert fixture.accumulator.accept_now(request, int) is not None
    assert fixture.accumulator.accept_now(request, int) is None
    fixture = Fixture(max_buffered_inputs=1)
    assert fixture.accumulator.accept_now(request, int) is not None
    assert fixture.accumulator.accept_now(request, int) is None
    fixture.accumulator.uploaded(fixture.upload(), DENIED)
    assert fixture.accumulator.accept_now(request, int) is None
    fixture.complete()
    assert fixture.accumulator.accept_now(request, int) is not None
    large = ProduceRequest(bytes(1_000), 1, b"", 0)
    assert Fixture(max_buffered_bytes=300).accumulator.accept_now(large, int) is not None


def test_what_is_past_its_deadline_is_told_although_its_upload_has_not_ended() -> None:
    fixture = Fixture(delivery_timeout_ms=1_000, upload_concurrency=1)
    hangs = fixture.accept()
    waits = fixture.accept()
    batch = fixture.upload()
    fixture.runtime.advance(1.0)
    assert len(fixture.complete()) == 2
    for watcher in (hangs, waits):
        with pytest.raises(TransientStorageError, match="delivery_timeout_ms"):
            watcher.result()
    assert fixture.accumulator.held_bytes() == 0
    # Nor does the one that waited for the hanging one go on to be stored.
    fixture.accumulator.uploaded(batch, None)
    fixture.accumulator.begin_closing()
    assert fixture.accumulator.next_work() is None
    assert fixture.accumulator.next_group(at_once) is None


def test_f5_what_grew_old_is_stored_again_before_what_waits() -> None:
    fixture = Fixture(upload_concurrency=1, gc_grace_period_ms=10_000)
    fresh, old, waits = (fixture.accept() for _ in range(3))
    for age in (0.0, 6.0):
        batch = fixture.upload()
        batch.named = Moment.now(fixture.runtime)
        batch.named = Moment(batch.named.wall_ms, batch.named.monotonic - age)
        fixture.accumulator.uploaded(batch, None)
    group = fixture.accumulator.next_group(at_once)
    assert group is not None
    assert [batch.watcher for batch in group] == [fresh]
    again = fixture.upload()
    assert again.watcher is old
    fixture.accumulator.uploaded(again, None)
    assert fixture.upload().watcher is waits


def test_closing_refuses_calls_and_ends_when_all_is_told_and_every_thread_left() -> None:
    fixture = Fixture()
    fixture.accept()
    fixture.accumulator.begin_closing()
    with pytest.raises(Closed):
        fixture.accept()
    assert not fixture.accumulator.await_end(0.0)
    fixture.accumulator.uploaded(fixture.upload(), DENIED)
    fixture.complete()
    assert fixture.accumulator.next_work() is None
    assert not fixture.accumulator.await_end(0.0)
    # One of the two workers waits in next_work().
    fixture.accumulator.end_thread()
    fixture.accumulator.end_thread()
    assert fixture.accumulator.await_end(0.0)


def test_after_abandon_calls_that_no_batch_was_made_of_yet_have_an_outcome() -> None:
    fixture = Fixture(flush_size_bytes=1_000, flush_interval_ms=60_000)
    watcher = fixture.accept()
    fixture.accumulator.begin_closing()
    fixture.accumulator.abandon(DENIED)
    (completed,) = fixture.complete()
    assert completed.watcher is watcher
    assert watcher.is_set
    assert fixture.accumulator.next_work() is None
