"""Rates, and a store that fails for a while."""

from __future__ import annotations

import threading

import pytest

from opendata_buffer.admin.overview import Overview, QueueLook
from opendata_buffer.admin.watch import HISTORY, WINDOW_S, WRITERS_S, Flow, Watch
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.testing.runtime import ManualRuntime


class Queues:
    """What a look finds: set it, and whether it fails."""

    def __init__(self) -> None:
        self.runtime = ManualRuntime()
        self.sequences = {"ingest": (0, 0)}
        self.writers: dict[str, int] = {}
        self.error: Exception | None = None
        self.watch = Watch(self.look, self.runtime)

    def look(self) -> Overview:
        if self.error is not None:
            raise self.error
        looks = [
            QueueLook(
                name=name,
                first_sequence=first,
                next_sequence=next_,
                backlog=next_ - first,
                writers=self.writers,
            )
            for name, (first, next_) in self.sequences.items()
        ]
        return Overview(
            store="memory://x",
            topic="",
            monotonic=self.runtime.monotonic(),
            queues=tuple(looks),
        )

    def after(self, seconds: float, first: int, next_: int) -> Flow:
        self.runtime.advance(seconds)
        self.sequences = {"ingest": (first, next_)}
        self.watch.step()
        return self.watch.view().flows["ingest"]


def test_rates_need_two_looks_and_are_averaged_over_a_window() -> None:
    queues = Queues()
    assert queues.after(0, 0, 0) == Flow()
    flow = queues.after(2, 10, 40)
    assert (flow.arriving, flow.leaving) == (20.0, 5.0)
    assert (flow.arrived_ago, flow.left_ago) == (0.0, 0.0)
    for _ in range(int(WINDOW_S / 2) + 1):
        flow = queues.after(2, 10, 40)
    assert (flow.arriving, flow.leaving) == (0.0, 0.0), "what was before the window is forgotten"
    assert flow.arrived_ago == flow.left_ago == 2 * (int(WINDOW_S / 2) + 1)


def test_a_queue_that_was_started_over_has_no_rate_below_zero() -> None:
    queues = Queues()
    queues.after(0, 50, 90)
    assert queues.after(1, 0, 2) == Flow(), "nothing before can be compared"
    flow = queues.after(1, 1, 5)
    assert (flow.arriving, flow.leaving) == (3.0, 1.0)


def test_the_backlog_of_the_last_looks_is_kept_and_no_more() -> None:
    queues = Queues()
    for backlog in range(HISTORY + 5):
        queues.after(1, 0, backlog)
    assert queues.watch.view().history == tuple(range(5, HISTORY + 5))


def test_a_topic_sums_its_partitions_and_was_last_seen_to_move_where_one_was() -> None:
    queues = Queues()
    queues.sequences = {"a": (0, 0), "b": (0, 0)}
    queues.watch.step()
    queues.runtime.advance(1)
    queues.sequences = {"a": (1, 3), "b": (0, 4)}
    queues.watch.step()
    queues.runtime.advance(5)
    total = queues.watch.view().total
    assert (total.arriving, total.leaving) == (7.0, 1.0)
    assert (total.arrived_ago, total.left_ago) == (5.0, 5.0)


def test_a_store_that_fails_leaves_what_was_seen_and_says_since_when() -> None:
    queues = Queues()
    queues.after(0, 0, 7)
    queues.error = TransientStorageError("no answer")
    queues.runtime.advance(3)
    queues.watch.step()
    queues.runtime.advance(4)
    queues.watch.step()
    view = queues.watch.view()
    assert view.overview is not None
    assert view.overview.backlog == 7
    assert (view.failure, view.failing_seconds, view.age_seconds) == ("no answer", 4.0, 7.0)
    assert view.as_json()["failure"] == "no answer"
    queues.error = None
    assert queues.after(1, 0, 15).arriving == 1.0
    assert queues.watch.view().failure is None


def test_an_error_is_raised_where_that_is_wanted_and_a_bug_always() -> None:
    queues = Queues()
    queues.error = InvalidInput("there is no queue")
    with pytest.raises(InvalidInput):
        queues.watch.step(raises=True)
    assert queues.watch.view().failure is None
    queues.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError):
        queues.watch.step()


def test_a_writer_is_told_of_for_a_while_after_its_last_batch_has_left() -> None:
    queues = Queues()
    queues.writers = {"app orders": 2}
    queues.after(0, 0, 2)
    queues.writers = {}
    queues.after(WRITERS_S, 2, 2)
    assert queues.watch.view().writers == {"app orders": WRITERS_S}
    queues.after(1, 2, 2)
    assert queues.watch.view().writers == {}


def test_a_thread_looks_until_the_end() -> None:
    queues = Queues()
    looked = threading.Semaphore(0)
    inner = queues.look

    def look() -> Overview:
        looked.release()
        return inner()

    watch = Watch(look, queues.runtime)
    watch.start(5.0)
    for _ in range(3):
        assert looked.acquire(timeout=30)
    watch.end()
    assert set(queues.runtime.slept) == {5.0}
    assert watch.view().overview is not None
