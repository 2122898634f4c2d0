"""Everything that was accepted and not yet told: the producer's state, under one lock.

The calling thread accepts calls and asks: it may be interrupted anywhere, so it changes the state
in single steps. The threads of the :class:`~.sender.Sender` take work from here and bring the
results back. The backlog calls no store, no callback and no other object with a lock. What is due
when is told by the monotonic clock alone (failure F31).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from opendata_buffer.concurrency import locked
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Closed, FlushFailed, OpenDataBufferError, QueueFull
from opendata_buffer.producer.append_buffer import Call, Current, Item, Run, held_at_opening
from opendata_buffer.producer.batching import Batch, Batcher
from opendata_buffer.producer.handle import Completion, WriteHandle
from opendata_buffer.producer.ordered_uploads import LateUpload, OrderedUploads, Stage, Upload
from opendata_buffer.runtime import Moment, Runtime

__all__ = ["Backlog", "Budget", "Crew", "Failures", "UploadLine", "Work"]


# ---- How much a producer may hold at a time, and how much it holds. Pure. ----


class Waiting(Protocol):
    """What is not uploaded yet: a :class:`~.batching.Batcher`."""

    @property
    def held(self) -> int: ...
    @property
    def calls(self) -> int: ...


class Budget:
    """The buffer of a producer, in bytes and in calls (failure F33).

    Args:
        waiting: Knows what its batches hold; the rest is counted here.
        most_bytes: Most bytes at a time.
        most_calls: Most calls at a time; None: any number.
    """

    def __init__(self, waiting: Waiting, most_bytes: int, most_calls: int | None) -> None:
        self._waiting = waiting
        self._most_bytes = most_bytes
        self._most_calls = most_calls
        self._held = 0
        self._calls = 0

    @property
    def held(self) -> int:
        """Bytes in use."""
        return self._held + self._waiting.held

    @property
    def calls(self) -> int:
        """Calls that are not settled."""
        return self._calls + self._waiting.calls

    @property
    def room_for_run(self) -> int:
        """Bytes that a run may take without asking; where calls are counted each has to ask."""
        return 0 if self._most_calls is not None else self._most_bytes - self.held

    def has_room(self, size: int) -> bool:
        """Whether one more call with so many bytes may come in."""
        held = self.held
        # A call larger than the whole budget is let in alone, or it would wait for ever.
        if held and held + size > self._most_bytes:
            return False
        return self._most_calls is None or self.calls < self._most_calls

    def take(self, upload: Upload) -> None:
        """A batch is waiting no more, and goes on as this upload."""
        self._held += upload.held
        self._calls += upload.calls

    def give_back(self, upload: Upload) -> None:
        """Its callers were told."""
        self._held -= upload.held
        self._calls -= upload.calls


# ---- What a producer's workers do next, and the line of what is to be uploaded. Pure. ----


@dataclass(slots=True, eq=False)
class Work:
    """What a worker does next: upload, or tell what was settled.

    Attributes:
        upload: To be stored; None when there is something to tell.
        batch: What the upload is encoded from; None when it has its bytes from before.
        settled: Uploads whose callers are to be told.
        hire: Whether to start one more worker first: no other one is idle.
    """

    upload: Upload | None = None
    batch: Batch | None = None
    settled: Sequence[Upload] = ()
    hire: bool = False


class UploadLine:
    """Uploads that no worker has taken yet, in the order they are to be stored."""

    def __init__(self) -> None:
        self._line: deque[tuple[Upload, Batch | None]] = deque()

    def __len__(self) -> int:
        """How many."""
        return len(self._line)

    def enter(self, upload: Upload, batch: Batch) -> None:
        """One that was not stored yet, behind all others."""
        self._line.append((upload, batch))

    def enter_again(self, uploads: Sequence[Upload]) -> None:
        """Those that grew too old, in order and before all others.

        At the end of a long line they would grow too old again (failure F5).
        """
        self._line.extendleft((upload, None) for upload in reversed(uploads))

    def drop_settled(self) -> None:
        """What was given up must not wait here, out of the budget, for an upload to end."""
        self._line = deque(each for each in self._line if each[0].stage is not Stage.SETTLED)

    def take(self) -> Work:
        """The first one; there must be one."""
        return Work(*self._line.popleft())


# ---- What a producer has given up ----
#
# It is told with every flush, and keeps transactions out. Pure.


class Failures:
    """Uploads that were not appended, or not surely; none is forgotten."""

    def __init__(self) -> None:
        self._first: BaseException | None = None
        self._calls = 0
        self._of_transaction = False

    def record(self, failed: Sequence[Upload]) -> None:
        """Remember them; before their callers are told, so that no later transaction gets in."""
        for upload in failed:
            assert isinstance(upload.outcome, BaseException)
            self._calls += upload.calls
            self._first = self._first or upload.outcome
            self._of_transaction |= upload.ordered

    def check(self) -> None:
        """Raise ``FlushFailed`` when there is any."""
        if self._first is not None:
            raise FlushFailed(self._calls, str(self._first)) from self._first

    def check_transaction(self) -> None:
        """Raise ``FlushFailed`` when one was of a transaction: a later one would pass it.

        The reader would then take the failed one for a repeat when it is produced again.
        """
        if self._of_transaction:
            raise FlushFailed(self._calls, f"an earlier batch failed: {self._first}")


# ---- Which threads a producer has, and what each of them is at. Pure. ----
#
# A worker uploads, tells callers what became of their records, or is idle: one idle worker keeps
# the
# time, so there is one more than upload at once. Another thread appends.


class Crew:
    """Counts the threads. Not thread-safe: it belongs to the backlog, under its lock.

    Args:
        uploads_at_once: Most uploads at a time.

    Attributes:
        threads: How many have not ended.
    """

    def __init__(self, uploads_at_once: int) -> None:
        self._uploads_at_once = uploads_at_once
        self.threads = 0
        self._workers = 0
        self._idle = 0
        self._uploading = 0
        self._appending = 0

    @property
    def in_store(self) -> int:
        """Threads that wait for the store, which may never answer."""
        return self._uploading + self._appending

    @property
    def may_upload(self) -> bool:
        """Whether one more upload may begin."""
        return self._uploading < self._uploads_at_once

    def begin(self) -> None:
        """One more thread, which is no worker."""
        self.threads += 1

    def end(self) -> None:
        """A thread ends."""
        self.threads -= 1

    def hire(self, count: int) -> None:
        """Workers begin, all idle; a negative count takes back one that did not start."""
        self.threads += count
        self._workers += count
        self._idle += count

    def send_off(self) -> bool:
        """An idle worker leaves with work. Whether one more was hired, because no other is idle."""
        self._idle -= 1
        if self._idle or self._workers > self._uploads_at_once:
            return False
        self.hire(1)
        return True

    def take_back(self) -> None:
        """A worker is idle again."""
        self._idle += 1

    def begin_upload(self) -> None:
        """The work that a worker leaves with is an upload."""
        self._uploading += 1

    def end_upload(self) -> None:
        """It has ended, and its worker is idle again."""
        self._uploading -= 1
        self.take_back()

    def begin_append(self) -> None:
        """The appender goes to the store."""
        self._appending += 1

    def end_append(self) -> None:
        """It is back."""
        self._appending -= 1


class Backlog:
    """What waits, in which order, and how much of it. Thread-safe.

    Args:
        config: Settings.
        append_limit: Seconds after which an append without an answer is settled as unknown.
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
            completion=lambda: Completion(runtime),
        )
        self._lane = OrderedUploads(
            manifest_path=config.manifest_path,
            max_age=config.gc_grace_period_ms / 2000,
            append_limit=append_limit,
        )
        self._budget = Budget(self._batcher, config.max_buffered_bytes, config.max_buffered_inputs)
        self._crew = Crew(config.upload_concurrency)
        self._failures = Failures()
        self._to_upload = UploadLine()
        self._most: int | None = None  # uploads in the next append; None: all that are ready
        self._untold: dict[Completion, None] = {}  # of what has left the batcher
        self._apps: set[str] = set()
        self._closing = False
        self._abandoned: BaseException | None = None
        self._appender_waits = False
        self._callers_wait = 0
        self._when_room: list[Callable[[], None]] = []
        self._looks_at: float | None = None  # when an idle worker wakes by itself

    @property
    def current(self) -> Current:
        """Where callers put what needs no lock: see :mod:`.append_buffer`."""
        return self._batcher.current

    @property
    def threads(self) -> int:
        """How many threads of the pipeline have not ended."""
        return self._crew.threads

    # What the calling thread does.

    @locked
    def accept(self, call: Call) -> Completion:
        """Take a call in, waiting for room in the buffer; stamps its ingestion time.

        Raises:
            Closed: The producer is being closed.
            FlushFailed: The call has a transaction and an earlier one failed.
        """
        self._wait_for_room(call.held)
        return self._accept(call)

    @locked
    def accept_now(self, call: Call, when_room: Callable[[], None]) -> Completion | None:
        """As :meth:`accept`, without waiting: None while there is no room.

        Args:
            call: What to take in.
            when_room: Called once when it is worth to try again, if there was no room.
        """
        self._check_closing()
        if self._budget.has_room(call.held):
            return self._accept(call)
        self._let_look()
        self._when_room.append(when_room)
        return None

    @locked
    def put(self, item: Item) -> WriteHandle:
        """Take in a call without metadata, waiting for room; it opens a run for the next ones.

        Raises:
            Closed: The producer is being closed.
        """
        self._wait_for_room(held_at_opening(item))
        return self._put(item)

    @locked
    def put_late(self, run: Run, item: Item) -> WriteHandle:
        """As :meth:`put`, of an item that was appended to a run around the time of its closing."""
        if run.took_in(item):
            assert run.handle is not None
            return run.handle
        self._wait_for_room(held_at_opening(item))
        return self._put(item)

    def _put(self, item: Item) -> WriteHandle:
        now = self._runtime.monotonic()
        handle = self._batcher.put(item, self._runtime.now_ms(), now, self._budget.room_for_run)
        self._let_look()
        return handle

    def _accept(self, call: Call) -> Completion:
        if call.transaction is not None and call.message is None:
            self._failures.check_transaction()
            if call.transaction.app not in self._apps:
                # It may repeat one of an earlier process. Appended directly behind that one, the
                # reader would take both for one transaction, which is told by being contiguous.
                self._batcher.separate(self._runtime.monotonic())
                self._apps.add(call.transaction.app)
        call.ingestion_time_ms = self._runtime.now_ms()
        completion = self._batcher.add(call, self._runtime.monotonic())
        self._let_look()
        return completion

    @locked
    def flush(self, timeout: float | None) -> None:
        """Wait until everything accepted so far is settled.

        Raises:
            TimeoutError: It is not, after ``timeout`` seconds.
            FlushFailed: Something was given up, now or before.
        """
        # Without a timeout each batch's own deadline is the limit: workers keep it.
        until = None if timeout is None else self._runtime.monotonic() + timeout
        self._batcher.seal(self._runtime.monotonic())
        self._condition.notify_all()
        # Not those sealed from now on: under a steady load there is always one.
        waiting = [*self._untold, *(batch.completion for batch in self._batcher.batches)]
        while True:
            while waiting and waiting[-1].is_set and waiting[-1] not in self._untold:
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
        self._failures.check()

    @locked
    def begin_closing(self) -> list[Callable[[], None]]:
        """Accept nothing more; what is there is settled, and the threads end.

        Returns:
            What to call for those who wait for room: see :meth:`accept_now`.
        """
        self._closing = True
        self._batcher.seal(self._runtime.monotonic())
        self._condition.notify_all()
        return self._take_waiting()

    @locked
    def abandon(self, error: BaseException) -> None:
        """Settle at once what is not settled; what is being appended is unknown."""
        self._abandoned = error
        self._condition.notify_all()

    @locked
    def await_end(self, seconds: float | None) -> bool:
        """Wait until all is told and no thread is left but in the store; whether it is so."""
        until = None if seconds is None else self._runtime.monotonic() + seconds
        while self._crew.threads > (self._crew.in_store if self._is_done() else 0):
            left = None if until is None else until - self._runtime.monotonic()
            if left is not None and left <= 0:
                return False
            self._condition.wait(left)
        return True

    @locked
    def check(self) -> None:
        """Raise ``FlushFailed`` when something was given up."""
        self._failures.check()

    @locked
    def held_bytes(self) -> int:
        """Bytes of the budget in use."""
        return self._budget.held

    @locked
    def waiting_calls(self) -> int:
        """Accepted calls that are not settled."""
        return self._budget.calls

    # What a worker does.

    @locked
    def next_work(self) -> Work | None:
        """Wait for work; None when there will be none. The waiting worker keeps the time."""
        while True:
            now = self._runtime.monotonic()
            self._collect(now)
            self._let_append()
            settled = self._lane.take_settled()
            work = Work(settled=settled) if settled else self._next_upload()
            if work is not None:
                work.hire = self._crew.send_off()
                return work
            if self._is_done():
                return None
            limits = [self._batcher.due_at, self._lane.next_deadline()]
            self._looks_at = min((each for each in limits if each is not None), default=None)
            self._condition.wait(None if self._looks_at is None else max(0.0, self._looks_at - now))

    @locked
    def uploaded(self, upload: Upload, error: BaseException | None) -> None:
        """The worker's upload is stored, or failed for good."""
        if error is None:
            self._lane.stored(upload)
        else:
            self._lane.settle(upload, error)
        self._crew.end_upload()
        # What else there is to do, this worker finds by itself.
        self._let_append()

    @locked
    def back(self) -> None:
        """The worker has told what was settled."""
        self._crew.take_back()

    @locked
    def hired(self, count: int = 1) -> None:
        """Workers begin, all idle; a negative count takes back one that did not start."""
        self._crew.hire(count)

    # What the appender does.

    @locked
    def next_group(self, pause: Callable[[], float]) -> list[Upload] | None:
        """Wait for uploads to append; None when there will be none.

        Args:
            pause: Seconds to leave to other processes before the group is put together.
        """
        while not self._is_done() and self._abandoned is None:
            if (wait := self._patience(pause())) > 0:
                self._condition.wait(wait)
                continue
            group, again = self._lane.take(Moment.now(self._runtime), self._most)
            self._to_upload.enter_again(again)
            if again or self._lane.has_settled:
                self._condition.notify_all()
            if group:
                self._crew.begin_append()
                return group
            self._appender_waits = True
            self._condition.wait()
            self._appender_waits = False
        return None

    @locked
    def begin_by(self, group: Sequence[Upload]) -> float:
        """See :meth:`.OrderedUploads.begin_by`."""
        return self._lane.begin_by(group)

    @locked
    def landed(self, first: int) -> list[LateUpload]:
        """The group was appended; see :meth:`.OrderedUploads.landed`."""
        self._most = None
        return self._lane.landed(first, Moment.now(self._runtime))

    @locked
    def refused(self, group: Sequence[Upload], error: OpenDataBufferError) -> bool:
        """Surely nothing was appended. Returns whether to wait before the next append."""
        self._lane.refused(error, Moment.now(self._runtime))
        if isinstance(error, QueueFull) and len(group) > 1:
            # Half of them may fit; all together never would, also into an empty queue.
            self._most = len(group) // 2
            return False
        self._most = None
        return True

    @locked
    def failed(self, error: BaseException) -> None:
        """The group failed for good."""
        self._lane.failed(error)

    @locked
    def settle(self, upload: Upload, outcome: BaseException) -> None:
        """See :meth:`.OrderedUploads.settle`."""
        self._lane.settle(upload, outcome)

    @locked
    def answered(self) -> list[Upload]:
        """The append has ended; what was settled, to be told."""
        self._crew.end_append()
        return self._lane.take_settled()

    # What every thread of the pipeline does.

    @locked
    def record(self, failed: Sequence[Upload]) -> None:
        """See :meth:`.Failures.record`."""
        self._failures.record(failed)

    @locked
    def told(self, settled: Sequence[Upload]) -> list[Callable[[], None]]:
        """After their callers were told: flush() returns when every handle has its outcome.

        Returns:
            What to call now that there is room: see :meth:`accept_now`.
        """
        for upload in settled:
            self._budget.give_back(upload)
            del self._untold[upload.completion]
        if self._callers_wait or self._closing:
            self._condition.notify_all()
        return self._take_waiting()

    @locked
    def begin_thread(self) -> None:
        """One more thread, which is no worker, is about to start."""
        self._crew.begin()

    @locked
    def end_thread(self) -> None:
        """A thread ends."""
        self._crew.end()
        self._condition.notify_all()

    # With the lock held.

    def _wait_for_room(self, size: int) -> None:
        self._check_closing()
        while not self._budget.has_room(size):
            # An interrupted call may have left a batch that nobody was told of.
            self._let_look()
            self._wait_as_caller(None)
            self._check_closing()

    def _check_closing(self) -> None:
        if self._closing:
            raise Closed("the producer was closed: produce() needs an open one")

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
        if self._appender_waits and self._lane.is_ready:
            self._condition.notify_all()

    def _patience(self, pause: float) -> float:
        due = self._lane.next_deadline()
        if due is None:
            return 0.0
        # No batch waits for others for more than half of its time.
        spare = self._config.delivery_timeout_ms / 2000
        return min(pause, due - self._runtime.monotonic() - spare)

    def _is_done(self) -> bool:
        """Whether every accepted call was told its outcome and no more can come."""
        return self._closing and not self._batcher.batches and not self._untold

    def _collect(self, now: float) -> None:
        """Move what is sealed into the lane, and settle what is past its deadline."""
        if self._abandoned is not None:
            self._batcher.seal(now)
        while (batch := self._batcher.take(now)) is not None:
            assert batch.sealed_at is not None
            upload = batch.upload(batch.sealed_at + self._config.delivery_timeout_ms / 1000)
            self._untold[upload.completion] = None
            self._budget.take(upload)
            self._lane.enter(upload)
            self._to_upload.enter(upload, batch)
        if self._abandoned is not None:
            self._lane.abandon(self._abandoned)
        else:
            self._lane.expire(now)
        if self._lane.has_settled:
            self._to_upload.drop_settled()

    def _next_upload(self) -> Work | None:
        if not self._to_upload or not self._crew.may_upload:
            return None
        self._crew.begin_upload()
        return self._to_upload.take()
