"""Decisions of the accumulator that are not visible through a producer."""

from __future__ import annotations

from typing import Any

from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.producer.accumulator import Accumulator
from opendata_buffer.producer.batching import (
    Batch,
    Completion,
    ProduceRequest,
    WriteHandle,
)
from opendata_buffer.runtime import Moment
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.producer.in_memory import config

DENIED = PermanentStorageError("denied")
RECORD = b"\x01\0\0\0a"


def accept_now(accumulator: Accumulator, size: int = len(RECORD)) -> WriteHandle | None:
    return accumulator.accept_now(ProduceRequest(bytes(size), 1, b"", 0), int)


class Fixture:
    """An accumulator with one worker, whose batches are sealed at once."""

    def __init__(self, **settings: Any) -> None:
        self.runtime = ManualRuntime()
        self.accumulator = Accumulator(config(flush_size_bytes=1, **settings), self.runtime)

    def accept(self) -> Completion:
        return self.accumulator.accept(ProduceRequest(RECORD, 1, b"", 0))._completion

    def upload(self) -> Batch:
        work = self.accumulator.next_work()
        assert work is not None
        assert work.batch is not None
        return work.batch

    def release(self) -> None:
        work = self.accumulator.next_work()
        assert work is not None
        self.accumulator.release(work.completed)


def test_f33_free_space_is_counted_in_bytes() -> None:
    fixture = Fixture(max_buffered_bytes=300)
    accumulator = fixture.accumulator
    assert accept_now(accumulator) is not None
    assert accept_now(accumulator) is None
    accumulator.uploaded(fixture.upload(), DENIED)
    assert accept_now(accumulator) is None
    fixture.release()
    # A batch larger than the buffer is accepted alone.
    assert accept_now(accumulator, size=1_000) is not None


def test_f5_old_uploads_are_repeated_before_new_ones_are_started() -> None:
    fixture = Fixture(upload_concurrency=1)
    fixture.accumulator.set_limits(10_000, 60.0)
    fresh, old, new = (fixture.accept() for _ in range(3))
    for age in (0.0, 6.0):
        batch = fixture.upload()
        now = Moment.now(fixture.runtime)
        batch.named = Moment(now.wall_ms, now.monotonic - age)
        fixture.accumulator.uploaded(batch, None)
    group = fixture.accumulator.next_group(float)
    assert group is not None
    assert [batch.completion for batch in group] == [fresh]
    again = fixture.upload()
    assert again.completion is old
    fixture.accumulator.uploaded(again, None)
    assert fixture.upload().completion is new
