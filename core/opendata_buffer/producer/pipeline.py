"""What happens to accepted calls, and the threads in which it happens.

::

    accept() ──> Batcher ──> workers: encode, upload ──> appender: Lane, Committer ──> handles
    (caller)     (pure)      (several at once)           (one append at a time)

The calling thread only accepts calls and asks: it may be interrupted anywhere. Everything with
more than one step is done by the pipeline's own threads. One idle worker keeps the time: it seals
the batch that is due and settles what is past its deadline, also while every other thread waits
for a store that does not answer.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from opendata_buffer import metrics
from opendata_buffer.broker.network import Network
from opendata_buffer.broker.shared import open_committer
from opendata_buffer.commit.committer import Committer
from opendata_buffer.commit.durability import Completion
from opendata_buffer.commit.upload import Lane, LateUpload, Stage, Upload
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import (
    Closed,
    CommitStateUnknown,
    Conflict,
    FlushFailed,
    OpenDataBufferError,
    PermanentStorageError,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.locks import locked
from opendata_buffer.producer.batcher import Batch, Batcher, Call
from opendata_buffer.producer.uploader import Uploader
from opendata_buffer.queue.owner import claim_for_use
from opendata_buffer.runtime import Moment, Runtime, Task, deadline
from opendata_buffer.stores import Store

__all__ = ["Pipeline"]

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.25
"""Between appends that the queue gave up; each of them has backed off on its own already."""

CLOSE_S = 5.0
"""How long the committer may take to end; all is durable then."""

ABANDON_S = 1.0
"""How long a close that is out of time waits for the handles to be told."""


class Pipeline:
    """Everything of a producer that outlives a call of it. Thread-safe.

    Args:
        config: Settings.
        store: Where objects and manifest live.
        runtime: Clock and threads.
        network: How brokers are reached; WebSockets by default.

    Raises:
        TransientStorageError: The store did not answer within ``cas_deadline_ms``.
        OpenDataBufferError: See :func:`.claim_for_use`.
        RuntimeError: The process has no thread left for it.
    """

    def __init__(
        self,
        config: ProducerConfig,
        store: Store,
        runtime: Runtime,
        network: Network | None = None,
    ) -> None:
        self._config = config
        self._network = network
        self._store = store
        self._runtime = runtime
        self._uploader = Uploader(store, config, runtime)
        self._append_config = _patient(config)
        # An append makes its last attempt at its deadline; half of this is for that one's answer.
        self._append_limit = 2 * self._append_config.cas_deadline_ms / 1000
        self.process = os.getpid()
        """The process that has the threads; a forked one has not."""
        self._condition = runtime.condition()
        self._batcher = Batcher(
            flush_interval=config.flush_interval_ms / 1000,
            flush_size=config.flush_size_bytes,
            max_size=config.max_batch_bytes,
            completion=lambda: Completion(runtime),
        )
        self._lane = Lane(
            manifest_path=config.manifest_path,
            max_age=config.gc_grace_period_ms / 2000,
            append_limit=self._append_limit,
        )
        self._to_upload: deque[_Work] = deque()
        self._most: int | None = None
        self._held = 0
        self._calls = 0
        self._untold: dict[Completion, None] = {}
        self._apps: set[str] = set()
        self._failure: BaseException | None = None
        self._failed_calls = 0
        self._transaction_failed = False
        self._committer: Committer | None = None
        self._refusal: BaseException | None = None
        self._closing = False
        self._abandoned: BaseException | None = None
        self._threads: list[Task] = []
        self._alive = 0
        self._in_store = 0
        self._idle = 0
        self._uploading = 0
        self._looks_at: float | None = None
        try:
            self._start()
            self._await_claim()
        except BaseException:
            self._closing = True
            self._wake()
            raise

    # What the calling thread does.

    @locked
    def accept(self, call: Call) -> Completion:
        """Take a call in, waiting for room in the buffer; stamps its ingestion time.

        Raises:
            Closed: The producer is being closed.
            FlushFailed: The call has a transaction and an earlier one failed.
        """
        self._wait_for_room(call.held)
        if call.transaction is not None:
            if self._transaction_failed:
                raise FlushFailed(self._failed_calls, f"an earlier batch failed: {self._failure}")
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
            while waiting and self._is_told(waiting[-1]):
                waiting.pop()
            if not waiting:
                break
            left = None if until is None else until - self._runtime.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"{len(waiting)} batches not durable after {timeout:g} s; the producer goes on "
                    "trying: flush again"
                )
            self._condition.wait(left)
        self._raise_failure()

    def close(self, timeout: float | None) -> None:
        """Settle everything and end the threads; those that wait for the store end by themselves.

        Raises:
            FlushFailed: Something was given up, now or before.
        """
        self._begin_closing()
        if not self._await_end(timeout):
            error = Closed(
                f"the producer was closed before this was durable, after {timeout:g} s: look at "
                "the store, or give close() more time"
            )
            self._abandon(error)
            self._await_end(ABANDON_S)
        for thread in self._ended_threads():
            thread.join(ABANDON_S)
        self._check()

    @locked
    def held_bytes(self) -> int:
        """Bytes of the budget in use."""
        return self._held + self._batcher.held

    @locked
    def waiting_calls(self) -> int:
        """Accepted calls that are not settled."""
        return self._calls + self._batcher.calls

    @property
    def committer(self) -> Committer:
        """Whom the batches are handed to."""
        assert self._committer is not None
        return self._committer

    @locked
    def _wake(self) -> None:
        self._condition.notify_all()

    @locked
    def _begin_closing(self) -> None:
        self._closing = True
        self._batcher.seal(self._runtime.monotonic())
        self._condition.notify_all()

    @locked
    def _abandon(self, error: BaseException) -> None:
        self._abandoned = error
        self._condition.notify_all()

    @locked
    def _await_end(self, seconds: float | None) -> bool:
        until = None if seconds is None else self._runtime.monotonic() + seconds
        while self._alive > (self._in_store if self._is_done() else 0):
            left = None if until is None else until - self._runtime.monotonic()
            if left is not None and left <= 0:
                return False
            self._condition.wait(left)
        return True

    @locked
    def _ended_threads(self) -> list[Task]:
        return [] if self._alive else list(self._threads)

    @locked
    def _check(self) -> None:
        self._raise_failure()

    @locked
    def _await_claim(self) -> None:
        """Wait for the appender's first act; with a deadline, whatever the store does."""
        limit = self._config.cas_deadline_ms / 1000
        until = self._runtime.monotonic() + limit
        while self._committer is None and self._refusal is None:
            left = until - self._runtime.monotonic()
            if left <= 0:
                raise TransientStorageError(
                    f"store {self._store.url} did not answer within {limit:g} s (cas_deadline_ms):"
                    " check its address and the network. Nothing was produced."
                )
            self._condition.wait(left)
        if self._refusal is not None:
            raise self._refusal

    # What runs with the lock held, called by locked methods.

    def _wait_for_room(self, size: int) -> None:
        config = self._config
        most_calls = config.max_buffered_inputs
        while not self._closing:
            held = self._held + self._batcher.held
            # A call larger than the whole budget is let in alone, or it would wait for ever.
            if (not held or held + size <= config.max_buffered_bytes) and (
                most_calls is None or self._calls + self._batcher.calls < most_calls
            ):
                return
            # An interrupted call may have left a batch that nobody was told of.
            self._let_look()
            self._condition.wait()
        raise Closed("the producer was closed: produce() needs an open one")

    def _let_look(self) -> None:
        """Wake the workers when none of them looks at the batcher in time by itself."""
        due_at = self._batcher.due_at
        if due_at is not None and (self._looks_at is None or due_at < self._looks_at):
            self._condition.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise FlushFailed(self._failed_calls, str(self._failure)) from self._failure

    def _is_told(self, completion: Completion) -> bool:
        return completion.is_set and completion not in self._untold

    def _is_done(self) -> bool:
        """Whether every accepted call was told its outcome and no more can come."""
        return self._closing and not self._batcher.batches and not self._untold

    # The pipeline's own threads.

    @locked
    def _start(self) -> None:
        self._spawn(self._append_all, "opendata-buffer-appender")
        self._idle = 1
        self._spawn(self._work, "opendata-buffer-worker-0")

    def _spawn(self, loop: Callable[[], None], name: str) -> None:
        self._threads.append(self._runtime.spawn(lambda: self._run(loop), name))
        self._alive += 1

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception:
            log.exception("a thread of the producer died of a bug")
        finally:
            self._leave()

    @locked
    def _leave(self) -> None:
        self._alive -= 1
        self._condition.notify_all()

    # Workers: the idle one keeps the time, the others tell outcomes and upload.

    def _work(self) -> None:
        while (work := self._next_work()) is not None:
            if work.upload is None:
                self._tell(work.settled)
                self._back()
            else:
                self._uploaded(work.upload, self._try_upload(work.upload, work.batch))

    @locked
    def _next_work(self) -> _Work | None:
        while True:
            now = self._runtime.monotonic()
            self._collect(now)
            settled = self._lane.take_settled()
            work = _Work(settled=settled) if settled else self._next_upload()
            if work is not None:
                self._idle -= 1
                self._staff()
                return work
            if self._is_done():
                return None
            limits = [self._batcher.due_at, self._lane.next_deadline()]
            self._looks_at = min((each for each in limits if each is not None), default=None)
            self._condition.wait(None if self._looks_at is None else max(0.0, self._looks_at - now))

    def _collect(self, now: float) -> None:
        """Move what is sealed into the lane, and settle what is past its deadline."""
        if self._abandoned is not None:
            self._batcher.seal(now)
        while (batch := self._batcher.take(now)) is not None:
            assert batch.sealed_at is not None
            upload = batch.upload(batch.sealed_at + self._config.delivery_timeout_ms / 1000)
            self._untold[upload.completion] = None
            self._held += upload.held
            self._calls += upload.calls
            self._lane.enter(upload)
            self._to_upload.append(_Work(upload, batch))
        if self._abandoned is not None:
            self._lane.abandon(self._abandoned)
        else:
            self._lane.expire(now)
        if self._lane.has_settled:
            # What was given up must not wait here, out of the budget, for an upload to end.
            waiting = (each for each in self._to_upload if not each.is_settled)
            self._to_upload = deque(waiting)

    def _next_upload(self) -> _Work | None:
        if not self._to_upload or self._uploading >= self._config.upload_concurrency:
            return None
        self._uploading += 1
        self._in_store += 1
        return self._to_upload.popleft()

    def _staff(self) -> None:
        """Start a worker when none is idle: beside those that upload, one keeps the time."""
        workers = len(self._threads) - 1
        if self._idle or workers > self._config.upload_concurrency:
            return
        try:
            self._spawn(self._work, f"opendata-buffer-worker-{workers}")
        except RuntimeError:
            # The process has no thread left, or the interpreter is ending and starts none:
            # those there do it all, one thing after the other.
            return
        self._idle += 1

    def _try_upload(self, upload: Upload, batch: Batch | None) -> BaseException | None:
        try:
            self._uploader.upload(upload, batch)
        except BaseException as error:
            # Every kind of failure ends in the handles; a dead worker would hide it (failure
            # F29).
            return _for_handles(error)
        return None

    @locked
    def _uploaded(self, upload: Upload, error: BaseException | None) -> None:
        if error is None:
            self._lane.stored(upload)
        else:
            self._lane.settle(upload, error)
        self._uploading -= 1
        self._in_store -= 1
        self._idle += 1
        self._condition.notify_all()

    @locked
    def _back(self) -> None:
        self._idle += 1

    def _tell(self, settled: Sequence[Upload]) -> None:
        """Tell the callers of settled uploads; not locked, because callbacks run here."""
        # Before the handles: who saw one fail must not get a later transaction in.
        self._record([each for each in settled if isinstance(each.outcome, BaseException)])
        try:
            for upload in settled:
                assert upload.outcome is not None
                if isinstance(upload.outcome, BaseException):
                    log.error(
                        "batch of %d produce() calls failed: %s", upload.calls, upload.outcome
                    )
                else:
                    metrics.batches_flushed.add(1)
                    metrics.entries_flushed.add(upload.count)
                    metrics.bytes_flushed.add(upload.size)
                upload.completion.set(upload.outcome)
        finally:
            # After the handles: flush() returns when every handle has its outcome.
            self._account(settled)

    @locked
    def _record(self, failed: Sequence[Upload]) -> None:
        for upload in failed:
            assert isinstance(upload.outcome, BaseException)
            self._failed_calls += upload.calls
            self._failure = self._failure or upload.outcome
            self._transaction_failed |= upload.ordered

    @locked
    def _account(self, settled: Sequence[Upload]) -> None:
        for upload in settled:
            self._held -= upload.held
            self._calls -= upload.calls
            del self._untold[upload.completion]
        self._condition.notify_all()

    # The appender: one append after the other.

    def _append_all(self) -> None:
        try:
            with deadline(self._runtime, self._config.cas_deadline_ms / 1000):
                claim = claim_for_use(self._store, self._config, runtime=self._runtime)
        except BaseException as error:
            self._claimed(error)
            return
        committer = open_committer(
            self._store,
            self._append_config,
            self._runtime,
            claim=claim,
            broker=self._config.broker,
            network=self._network,
        )
        try:
            self._claimed(committer)
            while (group := self._next_group()) is not None:
                self._append(committer, group)
        finally:
            with deadline(self._runtime, CLOSE_S):
                committer.close()

    @locked
    def _claimed(self, outcome: Committer | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._refusal = outcome
        else:
            self._committer = outcome
        self._condition.notify_all()

    @locked
    def _next_group(self) -> list[Upload] | None:
        while not self._is_done() and self._abandoned is None:
            group, again = self._lane.take(Moment.now(self._runtime), self._most)
            if again:
                # In front: at the end of a long line they would grow too old again.
                self._to_upload.extendleft(_Work(upload) for upload in reversed(again))
            if again or self._lane.has_settled:
                self._condition.notify_all()
            if group:
                self._in_store += 1
                return group
            self._condition.wait()
        return None

    def _append(self, committer: Committer, group: list[Upload]) -> None:
        pause = False
        try:
            entries = [upload.entry for upload in group]
            with deadline(self._runtime, self._append_limit):
                first = committer.append(entries, begin_by=self._lane.begin_by(group))
        except (Conflict, QueueFull, TransientStorageError) as error:
            pause = self._refused(group, error)
        except BaseException as error:
            # A thread that dies would leave every later produce() waiting for ever.
            self._failed(_for_handles(error))
            if not isinstance(error, OpenDataBufferError):
                log.exception("group commit failed")
        else:
            for late in self._landed(first):
                self._settle(late.upload, self._repair(late))
        self._tell(self._answered())
        if pause:
            self._runtime.sleep(RETRY_PAUSE_S)

    @locked
    def _refused(self, group: list[Upload], error: OpenDataBufferError) -> bool:
        """Returns whether to wait before the next append."""
        self._lane.refused(error, Moment.now(self._runtime))
        if isinstance(error, QueueFull) and len(group) > 1:
            # Half of them may fit; all together never would, also into an empty queue.
            self._most = len(group) // 2
            return False
        self._most = None
        log.warning("append of %d batches failed, trying again: %s", len(group), error)
        return True

    @locked
    def _failed(self, error: BaseException) -> None:
        self._lane.failed(error)

    @locked
    def _landed(self, first: int) -> list[LateUpload]:
        self._most = None
        return self._lane.landed(first, Moment.now(self._runtime))

    @locked
    def _settle(self, upload: Upload, outcome: BaseException) -> None:
        self._lane.settle(upload, outcome)

    @locked
    def _answered(self) -> list[Upload]:
        self._in_store -= 1
        return self._lane.take_settled()

    def _repair(self, late: LateUpload) -> CommitStateUnknown:
        """Write the object again so that its entry has one; what to tell of it (failure F5)."""
        try:
            self._uploader.repair(late.upload)
            result = "its object was written again in case it is gone"
        except OpenDataBufferError as error:
            result = f"its object could not be written again: {error}"
        return CommitStateUnknown(
            self._config.manifest_path,
            late.sequence,
            (late.upload.location,),
            late.sequence + 1,
            f"it was appended {late.age:.0f} s after its upload, later than the collector's grace "
            f"period allows; {result}",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """What a worker does next: tell what was settled, or upload."""

    upload: Upload | None = None
    batch: Batch | None = None
    settled: Sequence[Upload] = ()

    @property
    def is_settled(self) -> bool:
        return self.upload is not None and self.upload.stage is Stage.SETTLED


def _for_handles(error: BaseException) -> BaseException:
    """An error that handles may raise: sys.exit() somewhere below must not end their callers."""
    if isinstance(error, Exception):
        return error
    return PermanentStorageError(f"the store raised {error!r}, which is no error of a store's")


def _patient(config: ProducerConfig) -> ProducerConfig:
    """Let an append try as long as its batches do.

    One whose answer was lost is settled by reading, once the store can be read again. Given up
    before, its batches would have failed although they may be queued. But no longer than the
    second half of the grace period: the first one may have passed when it begins (failure F5).
    """
    most_ms = min(config.delivery_timeout_ms, config.gc_grace_period_ms // 2)
    return replace(config, cas_deadline_ms=max(config.cas_deadline_ms, most_ms))
