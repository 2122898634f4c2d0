"""Accepted calls until their outcome is known: order, limits and state, under one lock.

The threads of the :class:`~.producer.Sender` take work from here and bring the results back. The
calling thread may be interrupted anywhere, so it changes the state in single steps. A batch is due
by the monotonic clock only (failure F31).
"""

from __future__ import annotations

import math
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
from opendata_buffer.producer.handles import Completion, Durable, WriteHandle
from opendata_buffer.runtime import Moment, Runtime, locked, wait_for

LateUpload = tuple[Batch, int, float]
"""A batch whose entry landed when a collector may have deleted its object; its sequence; and the
seconds since its name was made."""


class OrderedUploads:
    """Which sealed batches of one producer may be appended, in which order. Pure.

    Times are passed in, as seconds of the monotonic clock. Every batch passes these stages::

                     stored()              take()                landed()
        UPLOADING ────────────> UPLOADED ──────────> APPENDING ────────────> COMPLETED
            ^                    │    ^                  │      fail()
            └────────────────────┘    └──────────────────┘
              take(): grew too old      refused(): surely not written

    1. Batches wait in produce order, which never changes: a group to append is a series of
       uploaded ones, and nothing passes a batch that is neither stored nor completed. One group is
       appended at a time.
    2. An uploaded object older than half the collector's grace period is not appended but stored
       again, under a new name: the append could take the other half (failure F5).
    3. An append that was refused leaves its batches where they were, for the next group.
    4. A batch that fails is completed alone, those behind it go on. An *ordered* one (a
       transaction, or the separator before it) completes all ordered ones behind it, too: appended
       now, they would make the reader take the failed one for a repeat when it is produced again.
    5. Every batch is completed by its deadline, in any stage but APPENDING; an append without an
       answer is completed as unknown after a time of its own.
    6. An outcome is final; a later one is ignored.
    """

    def __init__(self, config: ProducerConfig) -> None:
        self._manifest_path = config.manifest_path
        self._max_age = self._append_limit = math.inf
        # A completed batch stays in the queue until it is at the front: completing takes no search.
        self._queue: deque[Batch] = deque()
        self._group: list[Batch] = []
        self._group_limit = 0.0
        self._completed: list[Batch] = []
        self._ordered_failure: BaseException | None = None
        self.failed_calls = 0
        """Calls of the batches that failed so far."""
        self.first_failure: BaseException | None = None

    def set_limits(self, grace_ms: int, append_limit: float) -> None:
        """Once the queue is claimed: its grace period, and seconds after which an append without an
        answer is completed as unknown."""
        self._max_age, self._append_limit = grace_ms / 2000, append_limit

    def enter(self, batch: Batch) -> None:
        """Put a sealed batch at the end; behind a failed ordered batch an ordered one fails."""
        if batch.ordered and self._ordered_failure is not None:
            self._complete(batch, self._ordered_failure)
        else:
            self._queue.append(batch)

    def stored(self, batch: Batch) -> None:
        """The batch's object is stored."""
        if batch.stage is Stage.UPLOADING:
            batch.stage = Stage.UPLOADED

    def take(self, now: Moment, most: int | None = None) -> tuple[list[Batch], list[Batch]]:
        """Begin an append, of at most ``most`` batches; None takes all that are ready. Returns
        those batches, in order, until :meth:`landed`, :meth:`refused` or :meth:`fail`; and those
        that grew too old and must be stored again."""
        self.expire(now.monotonic)
        if self._group:
            return [], []
        ready: list[Batch] = []
        again: list[Batch] = []
        for batch in self._queue:
            if batch.stage is Stage.COMPLETED:
                continue
            if batch.stage is Stage.UPLOADING or len(ready) == most:
                break
            if batch.age(now) > self._max_age:
                batch.stage = Stage.UPLOADING
                again.append(batch)
            elif not again:
                ready.append(batch)
            # Go on behind an old one: all old ones are stored again at the same time.
        for batch in ready:
            batch.stage = Stage.APPENDING
        while self._queue and self._queue[0].stage in (Stage.APPENDING, Stage.COMPLETED):
            self._queue.popleft()
        self._group = ready
        self._group_limit = now.monotonic + self._append_limit
        return list(ready), again

    def begin_by(self, group: Sequence[Batch]) -> float:
        """Until when the append of the group may begin, monotonic seconds."""
        limits = [batch.deadline for batch in group]
        limits += [each.named.monotonic + self._max_age for each in group if each.named]
        return min(limits)

    def landed(self, first: int, now: Moment) -> list[LateUpload]:
        """The group was appended, its first batch with sequence ``first``.

        Returns:
            Those that landed later than the grace period allows, because the process slept
            between the age check and the answer: a collector may delete the object now or later
            (failure F5). Store each again, then :meth:`fail` it: it may still be deleted.
        """
        late: list[LateUpload] = []
        for position, batch in enumerate(self._group):
            age = batch.age(now)
            if age > 2 * self._max_age:
                late.append((batch, first + position, age))
            else:
                self._complete(batch, Durable(first + position, batch.location))
        self._group = [batch for batch, *_ in late]
        return late

    def refused(self, error: errors.OpenDataBufferError, now: Moment) -> None:
        """Surely nothing of the group was written: it goes back to the front of the queue."""
        group, self._group = self._group, []
        for batch in group:
            batch.stage = Stage.UPLOADED
            batch.last_error = error
        self._queue.extendleft(reversed(group))
        self.expire(now.monotonic)

    def fail(self, batches: Sequence[Batch], error: BaseException) -> None:
        """Give batches up; if one of them is ordered, the ordered ones behind it, too."""
        first = next((x for x in batches if x.ordered and x.stage is not Stage.COMPLETED), None)
        is_group = any(x.stage is Stage.APPENDING for x in batches)
        for batch in batches:
            self._complete(batch, error)
        if is_group:
            self._group = [x for x in self._group if x.stage is not Stage.COMPLETED]
        if first is not None:
            self._ordered_failure = error
            behind = first not in self._queue
            for batch in self._queue:
                if behind and batch.ordered:
                    self._complete(batch, error)
                behind = behind or batch is first

    def expire(self, now: float) -> None:
        """Fail what is past its deadline."""
        if self._group and now >= self._group_limit:
            self._fail_group_as_unknown(f"no answer in {self._append_limit:g} s")
        while (head := self._head()) is not None and head.deadline <= now:
            self.fail([head], head.last_error or _not_in_time(head))

    def abandon(self, error: BaseException) -> None:
        """Complete all batches; the outcome of those that are being appended is unknown."""
        self._fail_group_as_unknown(str(error))
        for batch in self._queue:
            self._complete(batch, error)
        self._queue.clear()

    def next_deadline(self) -> float | None:
        """When :meth:`expire` has something to do, monotonic seconds; None when never."""
        head = self._head()
        limits = [] if head is None else [head.deadline]
        if self._group:
            limits.append(self._group_limit)
        return min(limits, default=None)

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`take` has something to do."""
        head = self._head()
        return not self._group and head is not None and head.stage is Stage.UPLOADED

    @property
    def has_completed(self) -> bool:
        """Whether :meth:`take_completed` has any."""
        return bool(self._completed)

    def check_ordered(self) -> None:
        """Raise ``FlushFailed`` when an ordered batch failed: produced again behind a later one, it
        would look like a repeat of that."""
        if self._ordered_failure is not None:
            reason = f"an earlier batch failed: {self.first_failure}"
            raise errors.FlushFailed(self.failed_calls, reason)

    def take_completed(self) -> list[Batch]:
        """The batches that were completed since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def _head(self) -> Batch | None:
        # Deadlines rise along the queue, so the first batch without an outcome has the earliest.
        while self._queue and self._queue[0].stage is Stage.COMPLETED:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def _fail_group_as_unknown(self, reason: str) -> None:
        if self._group:
            locations = tuple(each.location for each in self._group)
            error = errors.CommitStateUnknown(self._manifest_path, None, locations, None, reason)
            self.fail(self._group, error)

    def _complete(self, batch: Batch, outcome: Durable | BaseException) -> None:
        if batch.stage is Stage.COMPLETED:
            return
        # The stage first: an uploading thread that sees another stage has read the bytes before.
        batch.stage = Stage.COMPLETED
        batch.outcome = outcome
        batch.data = None
        batch.parts = []
        self._completed.append(batch)
        if isinstance(outcome, BaseException):
            self.failed_calls += batch.calls
            self.first_failure = self.first_failure or outcome


def _not_in_time(batch: Batch) -> errors.TransientStorageError:
    uploading = batch.stage is Stage.UPLOADING
    reason = "its upload did not end" if uploading else "a batch before it did not get in"
    return errors.TransientStorageError(
        f"a batch of {batch.calls} produce() calls was not durable within delivery_timeout_ms: "
        f"{reason}. Nothing of it is queued. Look at the store, or raise delivery_timeout_ms."
    )


@dataclass(slots=True, eq=False)
class Work:
    """The next task of a worker: it uploads a batch, or completes batches."""

    batch: Batch | None = None
    completed: Sequence[Batch] = ()
    add_worker: bool = False  # first, because no other one is idle


class Accumulator:
    """Batches that wait, the buffer limit, and what each thread is doing. Thread-safe.

    A worker uploads, completes batches, or is idle: one idle worker keeps the time, so there is
    one more worker than there are uploads at once. One more thread, the appender, appends.
    """

    def __init__(self, config: ProducerConfig, runtime: Runtime) -> None:
        self._config = config
        self._runtime = runtime
        self._condition = runtime.condition()
        self.batcher = Batcher(config, lambda: Completion(runtime))
        self._ordered = OrderedUploads(config)
        self.set_limits, self.begin_by = self._ordered.set_limits, self._ordered.begin_by
        self._to_upload: deque[Batch] = deque()
        # Batches that have left the batcher and whose callers do not know the outcome.
        self._in_flight: dict[Completion, Batch] = {}
        self._in_flight_held = 0
        self._most: int | None = None  # batches in the next append; None: all that are ready
        self._apps: set[str] = set()
        self._closing = False
        self._abandoned: BaseException | None = None
        self.threads = 2  # that have not ended: the appender and the first worker
        self._idle = 1
        self._uploading = 0
        self._appending = False
        self._appender_waits = False
        self._callers_wait = 0
        self._when_room: list[Callable[[], None]] = []
        self._worker_wakes_at: float | None = None  # when an idle worker wakes by itself

    # Called by the calling thread.

    @locked
    def accept(self, request: ProduceRequest) -> WriteHandle:
        """Accept a request when the buffer has room for it, and set its ingestion time."""
        self._wait_for_room(request.held)
        return self._accept(request)

    @locked
    def accept_now(
        self, request: ProduceRequest, when_room: Callable[[], None]
    ) -> WriteHandle | None:
        """As :meth:`accept`, without waiting: None while there is no room. ``when_room`` is then
        called once, when it is worth to try again."""
        self._check_closing()
        if self._has_room(request.held):
            return self._accept(request)
        self._wake_workers()
        self._when_room.append(when_room)
        return None

    @locked
    def add_item(self, item: Item, late_for: AppendBuffer | None = None) -> WriteHandle:
        """Accept a call without metadata when there is room for it; it opens the next buffer,
        unless it was included in the one that was closed around the time when it was appended."""
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
                # It may repeat one of an earlier process. Directly behind that one, the reader
                # would take both for one transaction: those are contiguous.
                self.batcher.add_separator(self._runtime.monotonic())
                self._apps.add(request.transaction.app)
        request.ingestion_time_ms = self._runtime.now_ms()
        completion = self.batcher.add(request, self._runtime.monotonic())
        self._wake_workers()
        return WriteHandle(completion, request.ingestion_time_ms)

    @locked
    def flush(self, timeout: float | None) -> None:
        """Wait until the outcome of everything accepted so far is known. See ``Producer.flush``."""
        self.batcher.seal(self._runtime.monotonic())
        self._condition.notify_all()
        # Not those sealed from now on: under a steady load there is always one.
        waiting = [*self._in_flight, *(batch.completion for batch in self.batcher.batches)]

        def is_done() -> bool:
            while waiting and waiting[-1].outcome and waiting[-1] not in self._in_flight:
                waiting.pop()
            return not waiting

        # Without a timeout each batch's own deadline is the limit: workers keep it.
        if not self._wait_as_caller(is_done, timeout):
            raise TimeoutError(
                f"{len(waiting)} batches not durable after {timeout:g} s; the producer goes on "
                "trying: flush again"
            )

    @locked
    def begin_closing(self) -> list[Callable[[], None]]:
        """Accept nothing more, complete what is there; returns callbacks of :meth:`accept_now`."""
        self._closing = True
        self.batcher.seal(self._runtime.monotonic())
        self._condition.notify_all()
        return self._take_waiting()

    @locked
    def abandon(self, error: BaseException) -> None:
        """Fail at once what has no outcome; what is being appended is unknown."""
        self._abandoned = error
        self._condition.notify_all()

    @locked
    def await_end(self, seconds: float | None) -> bool:
        """Wait until every outcome is known and all threads left wait for the store; else False."""

        def is_ended() -> bool:
            blocked = self._uploading + self._appending if self._is_done() else 0
            return self.threads <= blocked

        return wait_for(self._runtime, self._condition, is_ended, seconds)

    @locked
    def check(self) -> None:
        """Raise ``FlushFailed`` when something was given up."""
        failure = self._ordered.first_failure
        if failure is not None:
            raise errors.FlushFailed(self._ordered.failed_calls, str(failure)) from failure

    @locked
    def held_bytes(self) -> int:
        """Bytes of ``max_buffered_bytes`` in use."""
        return self._held()

    # Called by workers.

    @locked
    def next_work(self) -> Work | None:
        """Wait for work; None when there will be none. The waiting worker keeps the time."""
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
            wakes_at = min((each for each in limits if each is not None), default=None)
            self._worker_wakes_at = wakes_at
            self._condition.wait(None if wakes_at is None else max(0.0, wakes_at - now))

    @locked
    def uploaded(self, batch: Batch, error: BaseException | None) -> None:
        """The worker's batch is stored, or failed for good; the worker is idle again."""
        if error is None:
            self._ordered.stored(batch)
        else:
            self._ordered.fail([batch], error)
        self._uploading -= 1
        self._idle += 1
        self._wake_appender()

    @locked
    def checkin(self) -> None:
        """The worker has completed the batches, and is idle again."""
        self._idle += 1

    @locked
    def remove_worker(self) -> None:
        """The worker that was to be added could not be started."""
        self._add_worker(-1)

    # Called by the appender.

    @locked
    def next_group(self, pause: Callable[[], float]) -> list[Batch] | None:
        """Wait for batches to append; None when there will be none. ``pause`` gives the seconds to
        leave to other processes before the group is put together."""
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

    @locked
    def landed(self, first: int) -> list[LateUpload]:
        """The group was appended; see :meth:`.OrderedUploads.landed`."""
        self._most = None
        return self._ordered.landed(first, Moment.now(self._runtime))

    @locked
    def refused(self, group: Sequence[Batch], error: errors.OpenDataBufferError) -> bool:
        """Surely nothing was appended. Returns whether to wait before the next append."""
        self._ordered.refused(error, Moment.now(self._runtime))
        if isinstance(error, errors.QueueFull) and len(group) > 1:
            # Half of them may fit; all together never would, also into an empty queue.
            self._most = len(group) // 2
            return False
        self._most = None
        return True

    @locked
    def fail(self, batches: Sequence[Batch], error: BaseException) -> None:
        """See :meth:`.OrderedUploads.fail`."""
        self._ordered.fail(batches, error)

    @locked
    def appended(self) -> list[Batch]:
        """The append has ended; returns what was completed."""
        self._appending = False
        return self._ordered.take_completed()

    # Called by workers and the appender.

    @locked
    def release(self, batches: Sequence[Batch]) -> list[Callable[[], None]]:
        """Free the room of completed batches; returns callbacks of :meth:`accept_now`."""
        for batch in batches:
            self._in_flight_held -= batch.held
            del self._in_flight[batch.completion]
        if self._callers_wait or self._closing:
            self._condition.notify_all()
        return self._take_waiting()

    @locked
    def end_thread(self) -> None:
        """A thread ends."""
        self.threads -= 1
        self._condition.notify_all()

    # With the lock held.

    def _held(self) -> int:
        return self._in_flight_held + self.batcher.held

    def _has_room(self, size: int) -> bool:
        """Whether one more call with so many bytes may come in (failure F33)."""
        held = self._held()
        # A call larger than the whole buffer is accepted alone, or it would wait for ever.
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
        # Too high after an interrupt, which costs a needless notification for each group.
        self._callers_wait += 1
        met = wait_for(self._runtime, self._condition, is_met, seconds)
        self._callers_wait -= 1
        return met

    def _wake_workers(self) -> None:
        """Wake the workers when none of them wakes by itself before a batch is due."""
        due_at = self.batcher.due_at
        if due_at is not None and (self._worker_wakes_at is None or due_at < self._worker_wakes_at):
            self._condition.notify_all()

    def _wake_appender(self) -> None:
        """Wake the appender when it waits and need not."""
        if self._appender_waits and self._ordered.is_ready:
            self._condition.notify_all()

    def _add_worker(self, count: int = 1) -> None:
        self.threads += count
        self._idle += count

    def _checkout(self) -> bool:
        """Count one idle worker less; returns whether one more was added, as no other is idle."""
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
        """Whether the outcome of every accepted call is known and no more can come."""
        return self._closing and not self.batcher.batches and not self._in_flight

    def _collect(self, now: float) -> None:
        """Let sealed batches be uploaded, and complete what is past its deadline."""
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
            # Their bytes count no more, so they must not wait here for an upload to end.
            self._to_upload = deque(x for x in self._to_upload if x.stage is not Stage.COMPLETED)
