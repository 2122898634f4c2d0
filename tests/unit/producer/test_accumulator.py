"""What only the accumulator decides; the rest is tested through producers."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.producer.accumulator import Accumulator, Work
from opendata_buffer.producer.batching import Batch, DurabilityWatcher, ProduceRequest, WriteHandle
from opendata_buffer.runtime import Moment
from opendata_buffer.testing.runtime import ManualRuntime

RECORD = b"\x01\0\0\0a"
DENIED = PermanentStorageError("denied")


def accept_now(accumulator: Accumulator, size: int = len(RECORD)) -> WriteHandle | None:
    return accumulator.accept_now(ProduceRequest(bytes(size), 1, b"", 0), int)


class Fixture:
    """An accumulator whose batches are sealed at once, with one worker."""

    def __init__(self, **settings: Any) -> None:
        self.runtime = ManualRuntime()
        settings = {"flush_size_bytes": 1, **settings}
        config = ProducerConfig(store="memory://unused", **settings)
        self.accumulator = Accumulator(config, 60.0, self.runtime)
        self.accumulator.add_workers()

    def accept(self) -> DurabilityWatcher:
        return self.accumulator.accept(ProduceRequest(RECORD, 1, b"", 0)).watcher

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
        for each in completed:
            assert each.outcome is not None
            each.watcher.complete(each.outcome)
        self.accumulator.release(completed)
        self.accumulator.checkin()
        return completed


def test_a_worker_is_added_when_no_other_is_idle_and_again_when_it_did_not_start() -> None:
    fixture = Fixture(upload_concurrency=2)
    for _ in range(3):
        fixture.accept()
    assert fixture.work().add_worker
    fixture.accumulator.add_workers(-1)
    fixture.accumulator.checkin()
    assert fixture.work().add_worker
    # The appender, one worker that uploads, and one that keeps the time.
    assert fixture.accumulator.threads == 3


@pytest.mark.parametrize("limit", [{"max_buffered_bytes": 300}, {"max_buffered_inputs": 1}])
def test_f33_room_is_counted_by_bytes_and_by_calls(limit: dict[str, int]) -> None:
    fixture = Fixture(**limit)
    accumulator = fixture.accumulator
    assert accept_now(accumulator) is not None
    assert accept_now(accumulator) is None
    accumulator.uploaded(fixture.upload(), DENIED)
    assert accept_now(accumulator) is None
    fixture.complete()
    # One that is larger than the buffer is accepted alone.
    assert accept_now(accumulator, size=1_000) is not None


def test_f5_old_uploads_are_stored_again_before_new_ones_are_stored() -> None:
    fixture = Fixture(upload_concurrency=1, gc_grace_period_ms=10_000)
    fresh, old, new = (fixture.accept() for _ in range(3))
    for age in (0.0, 6.0):
        batch = fixture.upload()
        now = Moment.now(fixture.runtime)
        batch.named = Moment(now.wall_ms, now.monotonic - age)
        fixture.accumulator.uploaded(batch, None)
    group = fixture.accumulator.next_group(float)
    assert group is not None
    assert [batch.watcher for batch in group] == [fresh]
    again = fixture.upload()
    assert again.watcher is old
    fixture.accumulator.uploaded(again, None)
    assert fixture.upload().watcher is new


def test_calls_that_are_in_no_sealed_batch_when_time_is_up_have_an_outcome() -> None:
    fixture = Fixture(flush_size_bytes=1_000, flush_interval_ms=60_000)
    watcher = fixture.accept()
    fixture.accumulator.begin_closing()
    fixture.accumulator.abandon(DENIED)
    (completed,) = fixture.complete()
    assert completed.watcher is watcher
    assert watcher.is_set
    assert fixture.accumulator.next_work() is None
