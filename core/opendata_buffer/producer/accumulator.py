"""The state of a producer: accepted records until their outcome, under one lock.

**The problem.** Four kinds of threads share a producer: callers, which add records; workers, which
upload batches and set outcomes; the appender; and whoever flushes or closes. The memory has a
limit, deadlines must hold, and a caller can be interrupted between any two steps (Ctrl-C).

**The idea.** The :class:`Accumulator` has the whole state and one lock, and does no IO. The threads
of the :class:`.Sender` ask it for their next task, do it without the lock, and report back. Three
parts that know no threads choose the next task: the :class:`.Batcher` collects calls into batches,
:class:`.OrderedUploads` keeps the order, and the accumulator itself counts bytes and threads.

**An example.** The way of one batch::

    caller      add_item()    the batcher opens a batch, and a worker knows when it is due
    worker      next_work()   the batch is due: it is sealed, and this worker uploads it
    worker      uploaded()    the appender wakes up
    appender    next_group()  gets it, with all uploaded batches after it
    appender    landed()      the batch has its outcome
    worker      next_work()   gets it again, and sets the outcome of its handles
    worker      release()     its bytes are free, and callers that wait for room go on

**What can go wrong.**

* *The buffer is full.* Callers wait for room. A call that is larger than the whole buffer is
  accepted alone (failure F33).
* *A caller is interrupted.* It changes the state in single steps, each of which leaves the rest
  valid. A wakeup may be lost, so the next caller that waits wakes the workers again.
* *The wall clock jumps.* A batch is due by the monotonic clock only (failure F31).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opendata_buffer import errors
from opendata_buffer.config import ProducerConfig
from opendata_buffer.producer.batching import (
    AppendBuffer,
    Batch,
    Batcher,
    Item,
    ProduceRequest,
    Stage,
    held_at_opening,
)
from opendata_buffer.producer.handles import Completion, WriteHandle
from opendata_buffer.producer.ordered_uploads import LateUpload, OrderedUploads
from opendata_buffer.runtime import Moment, Runtime, locked, wait_for


@dataclass(slots=True, eq=False)
class Work:
    """The next task of a worker: to upload a batch, or to set the outcome of some."""

    batch: Batch | None = None
    completed: Sequence[Batch] = ()
    add_worker: bool = False
    """Whether to start another worker first, because no other one is idle."""


class Accumulator:
    """Batches, the limit of their memory, and what each thread is doing. Thread-safe.

    A worker uploads a batch, sets outcomes, or is idle. One idle worker keeps the time, so there is
    one more worker than there are uploads at once. One more thread, the appender, appends.

    Args:
        config: The limits and deadlines.
        runtime: The clock and the locks.
    """

    def __init__(self, config: ProducerConfig, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self._condition = runtime.condition()
        queue = f"{config.store} ({config.manifest_path!r})"
        self.batcher = Batcher(config, lambda: Completion(runtime, queue))
        self._ordered = OrderedUploads(config)
        self.set_limits, self.begin_by = self._ordered.set_limits, self._ordered.begin_by
        self._to_upload: deque[Batch] = deque()
        # Batches that have left the batcher and whose callers do not know the outcome.
        self._in_flight: dict[Completion, Batch] = {}
        self._in_flight_held = 0
        self._most: int | None = None
        """Most batches in the next append; None: all that are ready."""
        self._apps: set[str] = set()
        self._closing = False
        self._abandoned: BaseException | None = None
        self.threads = 2  # Running ones: the appender and the first worker.
        self._idle = 1
        self._uploading = 0
        self._appending = False
        self._appender_waits = False
        self._callers_wait = 0
        self._when_room: list[Callable[[], None]] = []
        self._worker_wakes_at: float | None = None  # When an idle worker wakes by itself.

    # Called by the calling thread.

    @locked
    def accept(self, request: ProduceRequest) -> WriteHandle:
        """Accept a request as soon as the buffer has room for it, and set its ingestion time.

        Args:
            request: The encoded call.

        Returns:
            The handle of the call.

        Raises:
            Closed: The producer was closed.
            FlushFailed: An earlier transaction failed, and this is one.
        """
        self._wait_for_room(request.held)
        return self._accept(request)

    @locked
    def accept_now(
        self, request: ProduceRequest, when_room: Callable[[], None]
    ) -> WriteHandle | None:
        """Accept a request if the buffer has room for it.

        Args:
            request: The request.
            when_room: Called once if the buffer is full, when it is worth trying again.

        Returns:
            The handle; None if the buffer is full.

        Raises:
            Closed: As :meth:`accept`.
            FlushFailed: As :meth:`accept`.
        """
        self._check_closing()
        if self._has_room(request.held):
            return self._accept(request)
        self._wake_workers()
        self._when_room.append(when_room)
        return None

    @locked
    def add_item(self, item: Item, late_for: AppendBuffer | None = None) -> WriteHandle:
        """Accept a call without metadata as soon as there is room. It opens the next buffer.

        Args:
            item: The records of the call.
            late_for: The buffer that the caller has appended the item to while it was being closed.
                If the item counts there, it is accepted already.

        Returns:
            The handle of the buffer that has the item.

        Raises:
            Closed: The producer was closed.
        """
        if late_for is not None and late_for.was_included(item):
            assert late_for.handle is not None
            return late_for.handle
        self._wait_for_room(held_at_opening(item))
        room = self._config.max_buffered_bytes - self._held()
        now = self._runtime.monotonic()
        handle = self.batcher.add_item(item, self._runtime.now_ms(), now, room)
        self._wake_workers()
        return handle

    def _accept(self, request: ProduceRequest) -> WriteHandle:
        if request.transaction is not None and request.message is None:
            self._ordered.check_ordered()
            if request.transaction.app not in self._apps:
                # It may repeat a transaction of an earlier process. If it came directly after
                # that one, the reader would take both for one, since a transaction is contiguous.
                self.batcher.add_separator(self._runtime.monotonic())
                self._apps.add(request.transaction.app)
        request.ingestion_time_ms = self._runtime.now_ms()
        completion = self.batcher.add(request, self._runtime.monotonic())
        self._wake_workers()
        return WriteHandle(completion, request.ingestion_time_ms)

    @locked
    def flush(self, timeout: float | None) -> None:
        """Wait until everything accepted so far has an outcome; see :meth:`.Producer.flush`.

        Args:
            timeout: Seconds to wait; None waits for all outcomes.

        Raises:
            TimeoutError: Something has no outcome after ``timeout`` seconds.
        """
        self.batcher.seal(self._runtime.monotonic())
        self._condition.notify_all()
        # Not the batches sealed from now on: under a steady load there is always another one.
        waiting = [*self._in_flight, *(batch.completion for batch in self.batcher.batches)]

        def is_done() -> bool:
            while waiting and waiting[-1].outcome and waiting[-1] not in self._in_flight:
                waiting.pop()
            return not waiting

        # Without a timeout, the workers see to it that each batch ends by its own deadline.
        if not self._wait_as_caller(is_done, timeout):
            raise TimeoutError(
                f"{len(waiting)} batches not durable after {timeout:g} s; the producer goes on "
                "trying: flush again"
            )

    @locked
    def begin_closing(self) -> list[Callable[[], None]]:
        """Accept nothing more, and complete the batches that were accepted.

        Returns:
            Callbacks of :meth:`accept_now`, to be called without the lock.
        """
        self._closing = True
        self.batcher.seal(self._runtime.monotonic())
        self._condition.notify_all()
        return self._take_waiting()

    @locked
    def abandon(self, error: BaseException) -> None:
        """Fail every batch without an outcome at once; those being appended are unknown."""
        self._abandoned = error
        self._condition.notify_all()

    @locked
    def await_end(self, seconds: float | None) -> bool:
        """Wait until every outcome is known, and all remaining threads wait for the store.

        Args:
            seconds: Seconds to wait; None waits without a limit.

        Returns:
            False if the time is up.
        """

        def is_ended() -> bool:
            blocked = self._uploading + self._appending if self._is_done() else 0
            return self.threads <= blocked

        return wait_for(self._runtime, self._condition, is_ended, seconds)

    @locked
    def check(self) -> None:
        """Raise an error if any batch was given up.

        Raises:
            FlushFailed: With the number of calls and the first cause.
        """
        failure = self._ordered.first_failure
        if failure is not None:
            raise self._ordered.flush_failed() from failure

    @locked
    def held_bytes(self) -> int:
        """Return how many of ``max_buffered_bytes`` are in use."""
        return self._held()

    # Called by workers.

    @locked
    def next_work(self) -> Work | None:
        """Wait for the next task of a worker. While it waits, it keeps the time.

        Returns:
            The task; None if there will be no more.
        """
        while True:
            now = self._runtime.monotonic()
            self._collect(now)
            self._wake_appender()
            completed = self._ordered.take_completed()
            if completed:
                return Work(completed=completed, add_worker=self._checkout())
            if self._to_upload and self._uploading < self._config.upload_concurrency:
                self._uploading += 1
                return Work(self._to_upload.popleft(), add_worker=self._checkout())
            if self._is_done():
                return None
            limits = [self.batcher.due_at, self._ordered.next_deadline()]
            wakes_at = min((limit for limit in limits if limit is not None), default=None)
            self._worker_wakes_at = wakes_at
            self._condition.wait(None if wakes_at is None else max(0.0, wakes_at - now))

    @locked
    def uploaded(self, batch: Batch, error: BaseException | None) -> None:
        """Note that a batch is stored, or has failed with an error. Its worker is idle again."""
        if error is None:
            self._ordered.stored(batch)
        else:
            self._ordered.fail([batch], error)
        self._uploading -= 1
        self._idle += 1
        self._wake_appender()

    @locked
    def checkin(self) -> None:
        """Note that a worker has set the outcomes it was given, and is idle again."""
        self._idle += 1

    @locked
    def remove_worker(self) -> None:
        """Note that a worker that was counted could not be started."""
        self._add_worker(-1)

    # Called by the appender.

    @locked
    def next_group(self, pause: Callable[[], float]) -> list[Batch] | None:
        """Wait for batches to append.

        Args:
            pause: Returns the seconds to leave to other processes before the group is put together.

        Returns:
            The batches in order; None if there will be no more.
        """
        while not self._is_done() and self._abandoned is None:
            if (wait := self._pause(pause())) > 0:
                self._condition.wait(wait)
                continue
            group, again = self._ordered.take(Moment.now(self._runtime), self._most)
            # Before all others: after a long queue they would grow too old again (failure F5).
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

    @locked
    def landed(self, first: int) -> list[LateUpload]:
        """Note that the group was appended; see :meth:`.OrderedUploads.landed`."""
        self._most = None
        return self._ordered.landed(first, Moment.now(self._runtime))

    @locked
    def refused(self, group: Sequence[Batch], error: errors.OpenDataBufferError) -> bool:
        """Note that nothing of the group was appended, for certain.

        Args:
            group: The batches that were to be appended together.
            error: The reason.

        Returns:
            Whether to wait before the next append.
        """
        self._ordered.refused(error, Moment.now(self._runtime))
        if isinstance(error, errors.QueueFull) and len(group) > 1:
            # Half of them may fit. All of them might not even fit into an empty queue.
            self._most = len(group) // 2
            return False
        self._most = None
        return True

    @locked
    def fail(self, batches: Sequence[Batch], error: BaseException) -> None:
        """Give batches up; see :meth:`.OrderedUploads.fail`."""
        self._ordered.fail(batches, error)

    @locked
    def appended(self) -> list[Batch]:
        """Note that the append has ended, and return the batches that have an outcome now."""
        self._appending = False
        return self._ordered.take_completed()

    # Called by workers and the appender.

    @locked
    def release(self, batches: Sequence[Batch]) -> list[Callable[[], None]]:
        """Free the memory of completed batches.

        Args:
            batches: The completed batches.

        Returns:
            Callbacks of :meth:`accept_now`, to be called without the lock.
        """
        for batch in batches:
            self._in_flight_held -= batch.held
            del self._in_flight[batch.completion]
        if self._callers_wait or self._closing:
            self._condition.notify_all()
        return self._take_waiting()

    @locked
    def end_thread(self) -> None:
        """Note that a thread has ended."""
        self.threads -= 1
        self._condition.notify_all()

    # With the lock held.

    def _held(self) -> int:
        return self._in_flight_held + self.batcher.held

    def _has_room(self, size: int) -> bool:
        """Return whether a call of ``size`` more bytes may come in (failure F33)."""
        held = self._held()
        # A call larger than the whole buffer is accepted alone, or it would wait forever.
        return not held or held + size <= self._config.max_buffered_bytes

    def _wait_for_room(self, size: int) -> None:
        def is_met() -> bool:
            if self._closing or self._has_room(size):
                return True
            # An interrupted call may have left a batch without waking a worker.
            self._wake_workers()
            return False

        if not is_met():
            self._wait_as_caller(is_met)
        self._check_closing()

    def _check_closing(self) -> None:
        if self._closing:
            raise errors.Closed("the producer was closed: produce() needs an open one")

    def _take_waiting(self) -> list[Callable[[], None]]:
        waiting, self._when_room = self._when_room, []
        return waiting

    def _wait_as_caller(self, is_met: Callable[[], bool], seconds: float | None = None) -> bool:
        # An interrupt can leave this too high. The cost is one spurious wakeup per group.
        self._callers_wait += 1
        met = wait_for(self._runtime, self._condition, is_met, seconds)
        self._callers_wait -= 1
        return met

    def _wake_workers(self) -> None:
        """Wake the workers, unless one of them wakes by itself before a batch is due."""
        due_at = self.batcher.due_at
        if due_at is not None and (self._worker_wakes_at is None or due_at < self._worker_wakes_at):
            self._condition.notify_all()

    def _wake_appender(self) -> None:
        """Wake the appender if it waits and there is something to append."""
        if self._appender_waits and self._ordered.is_ready:
            self._condition.notify_all()

    def _add_worker(self, count: int = 1) -> None:
        self.threads += count
        self._idle += count

    def _checkout(self) -> bool:
        """Count one idle worker less.

        Returns:
            Whether another worker was counted, because no other one is idle. It has to be started.
        """
        self._idle -= 1
        if self._idle or self.threads - 1 > self._config.upload_concurrency:
            return False
        self._add_worker()
        return True

    def _pause(self, seconds: float) -> float:
        due = self._ordered.next_deadline()
        if due is None:
            return 0.0
        # No batch waits for other processes for more than half of its time.
        spare = self._config.delivery_timeout_ms / 2000
        return min(seconds, due - self._runtime.monotonic() - spare)

    def _is_done(self) -> bool:
        """Return whether every accepted call has its outcome and no more can come."""
        return self._closing and not self.batcher.batches and not self._in_flight

    def _collect(self, now: float) -> None:
        """Hand sealed batches over to be uploaded, and fail those that are past their deadline."""
        if self._abandoned is not None:
            self.batcher.seal(now)
        while (batch := self.batcher.take(now)) is not None:
            assert batch.sealed_at is not None
            batch.deadline = batch.sealed_at + self._config.delivery_timeout_ms / 1000
            self._in_flight[batch.completion] = batch
            self._in_flight_held += batch.held
            self._ordered.enter(batch)
            self._to_upload.append(batch)
        if self._abandoned is not None:
            self._ordered.abandon(self._abandoned)
        else:
            self._ordered.expire(now)
        if self._ordered.has_completed:
            # Their bytes no longer count, so they must not stay here until an upload ends.
            self._to_upload = deque(
                batch for batch in self._to_upload if batch.stage is not Stage.COMPLETED
            )
