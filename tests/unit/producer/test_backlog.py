"""The backlog by itself, without the threads that work it off."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import (
    Closed,
    FlushFailed,
    PermanentStorageError,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.producer.accumulator import Backlog, Work
from opendata_buffer.producer.append_buffer import CALL_BYTES, Call
from opendata_buffer.producer.handle import Completion, Durable
from opendata_buffer.producer.ordered_uploads import Upload
from opendata_buffer.runtime import Moment
from opendata_buffer.testing.runtime import ManualRuntime

RECORD = b"\x01\0\0\0a"
DENIED = PermanentStorageError("denied")


def at_once() -> float:
    return 0.0


class Desk:
    """A backlog whose batches are sealed at once, with one worker."""

    def __init__(self, **settings: Any) -> None:
        self.runtime = ManualRuntime()
        settings = {"flush_size_bytes": 1, **settings}
        config = ProducerConfig(store="memory://unused", **settings)
        self.backlog = Backlog(config, 60.0, self.runtime)
        self.backlog.hired()

    def accept(self, transaction: Transaction | None = None) -> Completion:
        return self.backlog.accept(Call(RECORD, 1, b"", 0, transaction))

    def work(self) -> Work:
        work = self.backlog.next_work()
        assert work is not None
        return work

    def upload(self) -> Upload:
        upload = self.work().upload
        assert upload is not None
        return upload

    def tell(self) -> list[Upload]:
        """A worker's turn of telling."""
        settled = list(self.work().settled)
        self.told(settled)
        self.backlog.back()
        return settled

    def told(self, settled: list[Upload]) -> None:
        failed = [each for each in settled if isinstance(each.outcome, BaseException)]
        self.backlog.record(failed)
        for each in settled:
            assert each.outcome is not None
            each.completion.set(each.outcome)
        self.backlog.told(settled)


def test_a_batch_is_uploaded_appended_told_and_gone() -> None:
    desk = Desk()
    completion = desk.accept()
    upload = desk.upload()
    assert desk.backlog.held_bytes() == len(RECORD) + CALL_BYTES
    assert desk.backlog.waiting_calls() == 1
    desk.backlog.uploaded(upload, None)
    assert desk.backlog.next_group(at_once) == [upload]
    assert desk.backlog.landed(7) == []
    desk.told(desk.backlog.answered())
    assert completion.result() == Durable(7, upload.location)
    assert desk.backlog.held_bytes() == desk.backlog.waiting_calls() == 0
    desk.backlog.flush(0.0)


def test_one_more_worker_is_asked_for_when_the_last_idle_one_leaves() -> None:
    desk = Desk(upload_concurrency=2)
    for _ in range(3):
        desk.accept()
    first, second = desk.work(), desk.work()
    assert (first.hire, second.hire) == (True, True)
    # Two upload, and the third worker, the last, keeps the time.
    assert desk.backlog.threads == 3
    assert first.upload is not None
    desk.backlog.uploaded(first.upload, None)
    assert desk.work().hire is False


def test_a_worker_that_could_not_be_started_is_asked_for_again() -> None:
    desk = Desk()
    desk.accept()
    desk.accept()
    work = desk.work()
    assert work.hire
    desk.backlog.hired(-1)
    assert desk.backlog.threads == 1
    assert work.upload is not None
    desk.backlog.uploaded(work.upload, None)
    assert desk.work().hire


def test_no_transaction_is_accepted_once_callers_may_know_of_a_failed_one() -> None:
    desk = Desk()
    desk.accept(Transaction("a", 1))
    desk.backlog.uploaded(desk.upload(), None)  # the separator
    desk.backlog.uploaded(desk.upload(), DENIED)
    (failed,) = desk.tell()
    assert failed.outcome is DENIED
    with pytest.raises(FlushFailed, match="an earlier batch failed: denied"):
        desk.accept(Transaction("a", 2))
    desk.accept()
    with pytest.raises(FlushFailed, match="denied"):
        desk.backlog.check()


def test_what_is_past_its_deadline_is_told_although_its_upload_has_not_ended() -> None:
    desk = Desk(delivery_timeout_ms=1_000, upload_concurrency=1)
    hangs = desk.accept()
    waits = desk.accept()
    upload = desk.upload()
    desk.runtime.advance(1.0)
    assert len(desk.tell()) == 2
    for completion in (hangs, waits):
        with pytest.raises(TransientStorageError, match="delivery_timeout_ms"):
            completion.result()
    assert desk.backlog.held_bytes() == 0
    # Nor does the one that waited for the hanging one go on to be stored.
    desk.backlog.uploaded(upload, None)
    desk.backlog.begin_closing()
    assert desk.backlog.next_work() is None
    assert desk.backlog.next_group(at_once) is None


def test_f5_what_grew_old_is_stored_again_before_what_waits() -> None:
    desk = Desk(upload_concurrency=1, gc_grace_period_ms=10_000)
    fresh, old, waits = (desk.accept() for _ in range(3))
    for age in (0.0, 6.0):
        upload = desk.upload()
        upload.minted = Moment.now(desk.runtime)
        upload.minted = Moment(upload.minted.wall_ms, upload.minted.monotonic - age)
        desk.backlog.uploaded(upload, None)
    group = desk.backlog.next_group(at_once)
    assert group is not None
    assert [upload.completion for upload in group] == [fresh]
    again = desk.work()
    assert again.batch is None
    assert again.upload is not None
    assert again.upload.completion is old
    desk.backlog.uploaded(again.upload, None)
    assert desk.upload().completion is waits


def test_f35_half_of_a_group_that_did_not_fit_comes_next() -> None:
    desk = Desk(upload_concurrency=8)
    for _ in range(8):
        desk.accept()
    uploads = [desk.upload() for _ in range(8)]
    for upload in uploads:
        desk.backlog.uploaded(upload, None)
    full = QueueFull("m", 10, 5, 1, None)
    sizes = []
    while True:
        group = desk.backlog.next_group(at_once)
        assert group is not None
        sizes.append(len(group))
        pause = desk.backlog.refused(group, full)
        desk.backlog.answered()
        if pause:
            break
    assert sizes == [8, 4, 2, 1]
    assert desk.backlog.next_group(at_once) == uploads


def test_closing_refuses_calls_and_ends_when_all_is_told_and_every_thread_left() -> None:
    desk = Desk()
    desk.accept()
    desk.backlog.begin_closing()
    with pytest.raises(Closed):
        desk.accept()
    assert not desk.backlog.await_end(0.0)
    desk.backlog.uploaded(desk.upload(), DENIED)
    desk.tell()
    assert desk.backlog.next_work() is None
    assert not desk.backlog.await_end(0.0)
    # One of the two that were hired waits for its turn in next_work().
    desk.backlog.end_thread()
    desk.backlog.end_thread()
    assert desk.backlog.await_end(0.0)


def test_an_abandoned_backlog_tells_what_no_batch_was_made_of_yet() -> None:
    desk = Desk(flush_size_bytes=1_000, flush_interval_ms=60_000)
    completion = desk.accept()
    desk.backlog.begin_closing()
    desk.backlog.abandon(DENIED)
    (settled,) = desk.tell()
    assert settled.completion is completion
    assert completion.is_set
    assert desk.backlog.next_work() is None
