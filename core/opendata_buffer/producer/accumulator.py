"""Accepted calls until their outcome is known: the producer's state, under one lock.

The calling thread may be interrupted anywhere, so it changes the state in single steps. The threads
of the :class:`~.sender.Sender` take work from here and bring the results back. The accumulator
calls no store, no callback and no other object with a lock. Only the monotonic clock says what is
due (failure F31).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opendata_buffer.concurrency import locked
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Closed, FlushFailed, OpenDataBufferError, QueueFull
from opendata_buffer.producer.append_buffer import (
    AppendBuffer,
    CurrentBuffer,
    Item,
    ProduceRequest,
    held_at_opening,
)
from opendata_buffer.producer.batching import Batch, Batcher, Stage
from opendata_buffer.producer.handle import DurabilityWatcher, WriteHandle
from opendata_buffer.producer.ordered_uploads import LateUpload, OrderedUploads
from opendata_buffer.runtime import Moment, Runtime


@dataclass(slots=True, eq=False)
class Work:
    """What a worker does next: upload, or complete the watchers of batches.

    Attributes:
        batch: To be stored; None when there are completed ones.
        completed: Batches whose watchers are to be completed.
        add_worker: Whether to start one more worker first: no other one is idle.
    """

    batch: Batch | None = None
    completed: Sequence[Batch] = ()
    add_worker: bool = False


class Accumulator:
    """Batches that wait, the buffer limit, and what each thread is doing. Thread-safe.

    A worker uploads, completes watchers, or is idle: one idle worker keeps the time, so there is
    one more worker than there are uploads at once. One more thread, the appender, appends.

    Args:
        config: Settings.
        append_limit: Seconds after which an append without an answer is completed as unknown.
        runtime: Clock and lock.
    """

    def __init__(self, config: ProducerConfig, append_limit: float, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self._condition = runtime.condition()
        self._batcher = Batcher(
            flush_interval=config.flush_interval_ms / 1000,
            flush_size=config.flush_size_bytes,
            max_size=config.max_batch_bytes,
            watcher=lambda: DurabilityWatcher(runtime),
        )
        self._ordered = OrderedUploads(
            manifest_path=config.manifest_path,
            max_age=config.gc_grace_period_ms / 2000,
            append_limit=append_limit,
        )
        self._to_upload: deque[Batch] = deque()
        # Batches that have left the batcher and whose callers do not know the outcome.
        self._in_flight: dict[DurabilityWatcher, Batch] = {}
        self._in_flight_held = 0
        self._in_flight_calls = 0
        self._most: int | None = None  # batches in the next append; None: all that are ready
        self._apps: set[str] = set()
        self._first_failure: BaseException | None = None
        self._failed_calls = 0
        self._ordered_failed = False
        self._closing = False
        self._abandoned: BaseException | None = None
        self._threads = 0
        self._workers = 0
        self._idle = 0
        self._uploading = 0
        self._appending = False
        self._appender_waits = False
        self._callers_wait = 0
        self._when_room: list[Callable[[], None]] = []
        self._looks_at: float | None = None  # when an idle worker wakes by itself

    @property
    def current(self) -> CurrentBuffer:
        """Where callers put what needs no lock: see :mod:`.append_buffer`."""
        return self._batcher.current

    @property
    def threads(self) -> int:
        """How many threads of the producer have not ended."""
        return self._threads

    # Called by the calling thread.

    @locked
    def accept(self, request: ProduceRequest) -> DurabilityWatcher:
        """Take a request in, waiting for room in the buffer; stamps its ingestion time.

        Raises:
            Closed: The producer is being closed.
            FlushFailed: The request has a transaction and an earlier one failed.
        """
        self._wait_for_room(request.held)
        return self._accept(request)

    @locked
    def accept_now(
        self, request: ProduceRequest, when_room: Callable[[], None]
    ) -> DurabilityWatcher | None:
        """As :meth:`accept`, without waiting: None while there is no room.

        Args:
            request: What to take in.
            when_room: Called once when it is worth to try again, if there was no room.
        """
        self._check_closing()
        if self._has_room(request.held):
            return self._accept(request)
        self._let_look()
        self._when_room.append(when_room)
        return None

    @locked
    def add_item(self, item: Item, late_for: AppendBuffer | None = None) -> WriteHandle:
        """Take in a call without metadata, waiting for room; it opens the next buffer.

        Args:
            item: Records of the call.
            late_for: The buffer it was appended to around the time of its closing, if any.

        Raises:
            Closed: The producer is being closed.
        """
        if late_for is not None and late_for.was_included(item):
            assert late_for.handle is not None
            return late_for.handle
        self._wait_for_room(held_at_opening(item))
        # Where calls are counted, each has to take the lock: its buffer has no room for more.
        counted = self._config.max_buffered_inputs is not None
        room = 0 if counted else self._config.max_buffered_bytes - self._held()
        now = self._runtime.monotonic()
        handle = self._batcher.add_item(item, self._runtime.now_ms(), now, room)
        self._let_look()
        return handle

    def _accept(self, request: ProduceRequest) -> DurabilityWatcher:
        if request.transaction is not None and request.message is None:
            if self._ordered_failed:
                # The reader would take the failed transaction for a repeat of a later one when it
                # is produced again.
                reason = f"an earlier batch failed: {self._first_failure}"
                raise FlushFailed(self._failed_calls, reason)
            if request.transaction.app not in self._apps:
                # It may repeat one of an earlier process. Appended directly behind that one, the
                # reader would take both for one transaction: those are contiguous.
                self._batcher.add_separator(self._runtime.monotonic())
                self._apps.add(request.transaction.app)
        request.ingestion_time_ms = self._runtime.now_ms()
        watcher = self._batcher.add(request, self._runtime.monotonic())
        self._let_look()
        return watcher

    @locked
    def flush(self, timeout: float | None) -> None:
        """Wait until the outcome of everything accepted so far is known.

        Raises:
            TimeoutError: It is not, after ``timeout`` seconds.
            FlushFailed: Something was given up, now or before.
        """
        # Without a timeout each batch's own deadline is the limit: workers keep it.
        until = None if timeout is None else self._runtime.monotonic() + timeout
        self._batcher.seal(self._runtime.monotonic())
        self._condition.notify_all()
        # Not those sealed from now on: under a steady load there is always one.
        waiting = [*self._in_flight, *(batch.watcher for batch in self._batcher.batches)]
        while True:
            while waiting and waiting[-1].is_set and waiting[-1] not in self._in_flight:
                waiting.pop()
            if not waiting:
                break
            left = None if until is None else until - self._runtime.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"{len(waiting)} batches not durable after {timeout:g} s; the producer goes on "
                    "trying: flush again"
                )
            self._wait_as_caller(left)
        self._check_failures()

    @locked
    def begin_closing(self) -> list[Callable[[], None]]:
        """Accept nothing more; what is there is completed, and the threads end.

        Returns:
            Callbacks of those who wait for room: see :meth:`accept_now`.
        """
        self._closing = True
        self._batcher.seal(self._runtime.monotonic())
        self._condition.notify_all()
        return self._take_waiting()

    @locked
    def abandon(self, error: BaseException) -> None:
        """Fail at once what has no outcome; what is being appended is unknown."""
        self._abandoned = error
        self._condition.notify_all()

    @locked
    def await_end(self, seconds: float | None) -> bool:
        """Wait until every outcome is known and the threads left are waiting for the store.

        Returns:
            Whether it is so; False after so many seconds.
        """
        until = None if seconds is None else self._runtime.monotonic() + seconds
        while self._threads > (self._uploading + self._appending if self._is_done() else 0):
            left = None if until is None else until - self._runtime.monotonic()
            if left is not None and left <= 0:
                return False
            self._condition.wait(left)
        return True

    @locked
    def check(self) -> None:
        """Raise ``FlushFailed`` when something was given up."""
        self._check_failures()

    @locked
    def held_bytes(self) -> int:
        """Bytes of ``max_buffered_bytes`` in use."""
        return self._held()

    @locked
    def waiting_calls(self) -> int:
        """Accepted calls whose outcome is not known."""
        return self._in_flight_calls + self._batcher.calls

    # Called by workers.

    @locked
    def next_work(self) -> Work | None:
        """Wait for work; None when there will be none. The waiting worker keeps the time."""
        while True:
            now = self._runtime.monotonic()
            self._collect(now)
            self._let_append()
            completed = self._ordered.take_completed()
            if completed:
                return Work(completed=completed, add_worker=self._checkout())
            if self._to_upload and self._uploading < self._config.upload_concurrency:
                self._uploading += 1
                return Work(self._to_upload.popleft(), add_worker=self._checkout())
            if self._is_done():
                return None
            limits = [self._batcher.due_at, self._ordered.next_deadline()]
            self._looks_at = min((each for each in limits if each is not None), default=None)
            self._condition.wait(None if self._looks_at is None else max(0.0, self._looks_at - now))

    @locked
    def uploaded(self, batch: Batch, error: BaseException | None) -> None:
        """The worker's batch is stored, or failed for good; the worker is idle again."""
        if error is None:
            self._ordered.stored(batch)
        else:
            self._ordered.fail(batch, error)
        self._uploading -= 1
        self._idle += 1
        # This worker finds by itself what else there is to do.
        self._let_append()

    @locked
    def checkin(self) -> None:
        """The worker has completed the watchers, and is idle again."""
        self._idle += 1

    @locked
    def add_workers(self, count: int = 1) -> None:
        """Workers begin, all idle; a negative count removes one that did not start."""
        self._add_workers(count)

    # Called by the appender.

    @locked
    def next_group(self, pause: Callable[[], float]) -> list[Batch] | None:
        """Wait for batches to append; None when there will be none.

        Args:
            pause: Seconds to leave to other processes before the group is put together.
        """
        while not self._is_done() and self._abandoned is None:
            if (wait := self._pause(pause())) > 0:
                self._condition.wait(wait)
                continue
            group, again = self._ordered.take(Moment.now(self._runtime), self._most)
            # Before all others: behind a long queue they would grow too old again (failure F5).
            self._to_upload.extendleft(reversed(again))
            if again or self._ordered.has_completed:
                self._condition.notify_all()
            if group:
                self._appending = True
                return group
            self._appender_waits = True
            self._condition.wait()
            self._appender_waits = False
        return None

    def begin_by(self, group: Sequence[Batch]) -> float:
        """See :meth:`.OrderedUploads.begin_by`."""
        return self._ordered.begin_by(group)

    @locked
    def landed(self, first: int) -> list[LateUpload]:
        """The group was appended; see :meth:`.OrderedUploads.landed`."""
        self._most = None
        return self._ordered.landed(first, Moment.now(self._runtime))

    @locked
    def refused(self, group: Sequence[Batch], error: OpenDataBufferError) -> bool:
        """Surely nothing was appended. Returns whether to wait before the next append."""
        self._ordered.refused(error, Moment.now(self._runtime))
        if isinstance(error, QueueFull) and len(group) > 1:
            # Half of them may fit; all together never would, also into an empty queue.
            self._most = len(group) // 2
            return False
        self._most = None
        return True

    @locked
    def failed(self, error: BaseException) -> None:
        """The group failed for good."""
        self._ordered.failed(error)

    @locked
    def fail(self, batch: Batch, error: BaseException) -> None:
        """See :meth:`.OrderedUploads.fail`."""
        self._ordered.fail(batch, error)

    @locked
    def appended(self) -> list[Batch]:
        """The append has ended; returns what was completed."""
        self._appending = False
        return self._ordered.take_completed()

    # Called by workers and the appender.

    @locked
    def record_failures(self, batches: Sequence[Batch]) -> None:
        """Remember the failed ones for ever: each flush raises, and transactions are refused.

        Before their watchers are completed, so that no later transaction gets in.
        """
        for batch in batches:
            if isinstance(batch.outcome, BaseException):
                self._failed_calls += batch.calls
                self._first_failure = self._first_failure or batch.outcome
                self._ordered_failed |= batch.ordered

    @locked
    def release(self, batches: Sequence[Batch]) -> list[Callable[[], None]]:
        """Free the room of batches whose watchers are completed, and let flush() return.

        Returns:
            What to call now that there is room: see :meth:`accept_now`.
        """
        for batch in batches:
            self._in_flight_held -= batch.held
            self._in_flight_calls -= batch.calls
            del self._in_flight[batch.watcher]
        if self._callers_wait or self._closing:
            self._condition.notify_all()
        return self._take_waiting()

    @locked
    def begin_thread(self) -> None:
        """The appender is about to start."""
        self._threads += 1

    @locked
    def end_thread(self) -> None:
        """A thread ends."""
        self._threads -= 1
        self._condition.notify_all()

    # With the lock held.

    def _held(self) -> int:
        return self._in_flight_held + self._batcher.held

    def _has_room(self, size: int) -> bool:
        """Whether one more call with so many bytes may come in (failure F33)."""
        held = self._held()
        # A call larger than the whole buffer is let in alone, or it would wait for ever.
        if held and held + size > self._config.max_buffered_bytes:
            return False
        most = self._config.max_buffered_inputs
        return most is None or self._in_flight_calls + self._batcher.calls < most

    def _wait_for_room(self, size: int) -> None:
        self._check_closing()
        while not self._has_room(size):
            # An interrupted call may have left a batch without waking a worker.
            self._let_look()
            self._wait_as_caller(None)
            self._check_closing()

    def _check_closing(self) -> None:
        if self._closing:
            raise Closed("the producer was closed: produce() needs an open one")

    def _check_failures(self) -> None:
        if self._first_failure is not None:
            reason = str(self._first_failure)
            raise FlushFailed(self._failed_calls, reason) from self._first_failure

    def _take_waiting(self) -> list[Callable[[], None]]:
        waiting, self._when_room = self._when_room, []
        return waiting

    def _wait_as_caller(self, seconds: float | None) -> None:
        # Too high after an interrupt, which costs a needless notification for each group.
        self._callers_wait += 1
        self._condition.wait(seconds)
        self._callers_wait -= 1

    def _let_look(self) -> None:
        """Wake the workers when none of them looks at the batcher in time by itself."""
        due_at = self._batcher.due_at
        if due_at is not None and (self._looks_at is None or due_at < self._looks_at):
            self._condition.notify_all()

    def _let_append(self) -> None:
        """Wake the appender when it waits and need not."""
        if self._appender_waits and self._ordered.is_ready:
            self._condition.notify_all()

    def _add_workers(self, count: int) -> None:
        self._threads += count
        self._workers += count
        self._idle += count

    def _checkout(self) -> bool:
        """An idle worker leaves with work. Whether one more is added, because no other is idle."""
        self._idle -= 1
        if self._idle or self._workers > self._config.upload_concurrency:
            return False
        self._add_workers(1)
        return True

    def _pause(self, seconds: float) -> float:
        due = self._ordered.next_deadline()
        if due is None:
            return 0.0
        # No batch waits for other processes for more than half of its time.
        spare = self._config.delivery_timeout_ms / 2000
        return min(seconds, due - self._runtime.monotonic() - spare)

    def _is_done(self) -> bool:
        """Whether the outcome of every accepted call is known and no more can come."""
        return self._closing and not self._batcher.batches and not self._in_flight

    def _collect(self, now: float) -> None:
        """Let sealed batches be uploaded, and complete what is past its deadline."""
        if self._abandoned is not None:
            self._batcher.seal(now)
        while (batch := self._batcher.take(now)) is not None:
            assert batch.sealed_at is not None
            batch.deadline = batch.sealed_at + self._config.delivery_timeout_ms / 1000
            self._in_flight[batch.watcher] = batch
            self._in_flight_held += batch.held
            self._in_flight_calls += batch.calls
            self._ordered.enter(batch)
            self._to_upload.append(batch)
        if self._abandoned is not None:
            self._ordered.abandon(self._abandoned)
        else:
            self._ordered.expire(now)
        if self._ordered.has_completed:
            # Their bytes count no more, so they must not wait here for an upload to end.
            self._to_upload = deque(x for x in self._to_upload if x.stage is not Stage.COMPLETED)
