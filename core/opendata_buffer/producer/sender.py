"""The threads of a producer: they upload and append what its accumulator holds.

::

    accept() ──> Batcher ──> workers: encode, upload ──> appender: OrderedUploads, Committer
    (caller)     (pure)      (several at once)           (one append at a time)

One idle worker keeps the time: it seals the batch that is due and fails what is past its
deadline, also while every other thread waits for a store that does not answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from opendata_buffer import metrics
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import (
    Closed,
    CommitStateUnknown,
    Conflict,
    OpenDataBufferError,
    PermanentStorageError,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.formats.keys import batch_key, tagged_ulid
from opendata_buffer.producer.accumulator import Accumulator
from opendata_buffer.producer.batching import Batch, Stage
from opendata_buffer.producer.group_commit import Committer, OpenCommitter
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import WARN_S
from opendata_buffer.runtime import (
    Interval,
    Moment,
    Runtime,
    Task,
    deadline,
    locked,
    queue_retry,
    wait_for,
)
from opendata_buffer.stores.base import Put, PutPieces, Store


class Uploader:
    """Writes batch objects. Several threads call it at once, each with a batch of its own."""

    def __init__(self, store: Put, config: ProducerConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime

    def upload(self, batch: Batch, tag: str) -> None:
        """Encode the batch, and write it under a new name until it is stored or too late.

        A new name each time: the collector takes an object's age from its name (failure F5). The
        tag in the name is that of the committer which appends it.

        Raises:
            StorageError: The store refused it, or did not answer in time.
            InvalidInput: It cannot be encoded.
        """
        config = self._config
        data = batch.data
        if data is None:
            pieces = batch.encode(config.compression, config.zstd_level)
            # Joined only where the store needs it in one: that is a copy.
            data = pieces if isinstance(self._store, PutPieces) else b"".join(pieces)
            batch.data = data
            batch.parts = []
        if batch.stage is Stage.COMPLETED:
            # By another thread, perhaps before the encoding, which then found no parts.
            return
        ulid = tagged_ulid(self._runtime.ulid(), tag)
        batch.named = Moment.now(self._runtime)
        batch.location = batch_key(config.data_path_prefix, ulid, batch.transaction, batch.message)
        started = self._runtime.monotonic()
        left = max(0.001, batch.deadline - started)
        retrying = queue_retry(self._runtime, config, deadline_ms=int(left * 1000))
        with deadline(self._runtime, left):
            retrying(self._attempt, batch, data)
        metrics.flush_duration_seconds.record(self._runtime.monotonic() - started)
        metrics.bytes_written.add(len(data) if isinstance(data, bytes) else sum(map(len, data)))

    def repair(self, batch: Batch) -> None:
        """Write the object again under the name that its queue entry has; one attempt."""
        data = batch.data
        if data is not None and batch.stage is not Stage.COMPLETED:
            self._put(batch.location, data)

    def _attempt(self, batch: Batch, data: bytes | list[bytes | memoryview]) -> None:
        if batch.stage is Stage.COMPLETED:
            return
        try:
            self._put(batch.location, data)
        except TransientStorageError as error:
            batch.last_error = error
            raise

    def _put(self, location: str, data: bytes | list[bytes | memoryview]) -> None:
        if isinstance(data, bytes):
            self._store.put(location, data)
        else:
            assert isinstance(self._store, PutPieces)
            self._store.put_pieces(location, data)


log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.25
"""Seconds between appends that the queue gave up, each after a backoff of its own."""

CLOSE_S = 5.0
"""Seconds that the committer may take to end; all is durable then."""

ABANDON_S = 1.0
"""Seconds that a close that is out of time waits for the outcomes to be set."""


class Sender:
    """A producer's accumulator and the threads that upload and append what it holds.

    Raises ``RuntimeError`` when the process can start no thread, and as :class:`.Producer`.
    """

    def __init__(
        self,
        config: ProducerConfig,
        store: Store,
        runtime: Runtime,
        open_committer: OpenCommitter,
    ) -> None:
        self._config = config
        self._open_committer = open_committer
        self._store = store
        self._runtime = runtime
        self._uploader = Uploader(store, config, runtime)
        self._warnings = Interval(runtime, WARN_S)
        self._append_limit = 0.0
        self.accumulator = Accumulator(config, runtime)
        self.process = os.getpid()  # a forked process has no threads
        self._tasks: list[Task] = []
        self._condition = runtime.condition()
        self._committer: Committer | None = None
        self._refusal: BaseException | None = None
        try:
            self._start(self._append_all, "opendata-buffer-appender", self.accumulator.end_thread)
            self.accumulator.add_workers()
            self._start_worker()
            self._await_claim()
        except BaseException:
            self.accumulator.begin_closing()
            raise

    @property
    def committer(self) -> Committer:
        """Appends the batches."""
        assert self._committer is not None
        return self._committer

    def close(self, timeout: float | None) -> None:
        """Complete everything and end the threads; those that wait for the store end later."""
        _wake(self.accumulator.begin_closing())
        if not self.accumulator.await_end(timeout):
            self.accumulator.abandon(
                Closed(
                    f"the producer was closed before this was durable, after {timeout:g} s: look "
                    "at the store, or give close() more time"
                )
            )
            self.accumulator.await_end(ABANDON_S)
        if not self.accumulator.threads:
            for task in self._tasks:
                task.join(ABANDON_S)  # its loop has ended
        self.accumulator.check()

    def _start(self, loop: Callable[[], None], name: str, on_failure: Callable[[], None]) -> None:
        def run() -> None:
            try:
                loop()
            except Exception:
                log.exception("a thread of the producer died of a bug")
            finally:
                self.accumulator.end_thread()

        try:
            self._tasks.append(self._runtime.spawn(run, name))
        except RuntimeError:
            on_failure()
            raise

    # Workers.

    def _start_worker(self) -> None:
        name = f"opendata-buffer-worker-{len(self._tasks) - 1}"
        self._start(self._work, name, lambda: self.accumulator.add_workers(-1))

    def _work(self) -> None:
        while (work := self.accumulator.next_work()) is not None:
            if work.add_worker:
                try:
                    self._start_worker()
                except RuntimeError:
                    # The process has no thread left, or the interpreter is ending and starts none:
                    # the existing workers do everything, one task after the other.
                    log.debug("no thread for one more worker")
            if work.batch is None:
                self._complete(work.completed)
                self.accumulator.checkin()
            else:
                self.accumulator.uploaded(work.batch, self._try_upload(work.batch))

    def _try_upload(self, batch: Batch) -> BaseException | None:
        try:
            self._uploader.upload(batch, self.committer.tag)
        except BaseException as error:
            # Every kind of failure becomes the outcome; a dead worker would hide it (failure F29).
            return _for_handles(error)
        return None

    def _complete(self, batches: Sequence[Batch]) -> None:
        """Set the outcomes of the handles; callbacks of callers run here."""
        self.accumulator.record_failures(batches)
        try:
            for batch in batches:
                assert batch.outcome is not None
                if isinstance(batch.outcome, BaseException):
                    log.error("batch of %d produce() calls failed: %s", batch.calls, batch.outcome)
                else:
                    metrics.batches_flushed.add(1)
                    metrics.entries_flushed.add(batch.count)
                    metrics.bytes_flushed.add(batch.size)
                batch.completion.complete(batch.outcome)
        finally:
            _wake(self.accumulator.release(batches))

    # The appender: one append after the other.

    def _append_all(self) -> None:
        try:
            committer = self._claim()
        except BaseException as error:
            self._claimed(error)
            return
        try:
            self._claimed(committer)
            while (group := self.accumulator.next_group(committer.pause)) is not None:
                self._append(committer, group)
        finally:
            with deadline(self._runtime, CLOSE_S):
                committer.close()

    def _claim(self) -> Committer:
        with deadline(self._runtime, self._config.cas_deadline_ms / 1000):
            claim = claim_for_writing(self._store, self._config, runtime=self._runtime)
        config = _with_long_deadline(self._config, claim.grace_ms)
        # An append makes its last attempt at its deadline; half of this is for its answer.
        self._append_limit = 2 * config.cas_deadline_ms / 1000
        self.accumulator.set_limits(claim.grace_ms, self._append_limit)
        return self._open_committer(self._store, config, self._runtime, claim)

    @locked
    def _claimed(self, outcome: Committer | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._refusal = outcome
        else:
            self._committer = outcome
        self._condition.notify_all()

    @locked
    def _await_claim(self) -> None:
        """Wait until the appender has claimed the queue, at most until the deadline."""

        def is_claimed() -> bool:
            return self._committer is not None or self._refusal is not None

        limit = self._config.cas_deadline_ms / 1000
        if not wait_for(self._runtime, self._condition, is_claimed, limit):
            raise TransientStorageError(
                f"store {self._store.url} did not answer within {limit:g} s (cas_deadline_ms):"
                " check its address and the network. Nothing was produced."
            )
        if self._refusal is not None:
            raise self._refusal

    def _append(self, committer: Committer, group: list[Batch]) -> None:
        pause = False
        try:
            entries = [batch.entry for batch in group]
            with deadline(self._runtime, self._append_limit):
                first = committer.append(entries, begin_by=self.accumulator.begin_by(group))
        except (Conflict, QueueFull, TransientStorageError) as error:
            pause = self.accumulator.refused(group, error)
            if pause and self._warnings.is_due():
                log.warning("append of %d batches failed, trying again: %s", len(group), error)
        except BaseException as error:
            # A thread that dies would leave every later produce() waiting for ever.
            self.accumulator.failed(_for_handles(error))
            if not isinstance(error, OpenDataBufferError):
                log.exception("group commit failed")
        else:
            for batch, sequence, age in self.accumulator.landed(first):
                self.accumulator.fail(batch, self._repair(batch, sequence, age))
        self._complete(self.accumulator.appended())
        if pause:
            self._runtime.sleep(RETRY_PAUSE_S)

    def _repair(self, batch: Batch, sequence: int, age: float) -> CommitStateUnknown:
        """Write the object again so that its entry has one; returns the outcome (failure F5)."""
        try:
            self._uploader.repair(batch)
            result = "its object was written again in case it is gone"
        except OpenDataBufferError as error:
            result = f"its object could not be written again: {error}"
        return CommitStateUnknown(
            self._config.manifest_path,
            sequence,
            (batch.location,),
            sequence + 1,
            f"it was appended {age:.0f} s after its upload, later than the collector's grace "
            f"period allows; {result}",
        )


def _wake(waiting: Sequence[Callable[[], None]]) -> None:
    """Make coroutines that found no room try again."""
    for wake in waiting:
        wake()


def _for_handles(error: BaseException) -> BaseException:
    """An error that handles may raise: sys.exit() somewhere below must not end their callers."""
    if isinstance(error, Exception):
        return error
    return PermanentStorageError(f"the store raised {error!r}, which is no error of a store's")


def _with_long_deadline(config: ProducerConfig, grace_ms: int) -> ProducerConfig:
    """Let an append try as long as its batches do.

    The manifest shows whether an append without an answer has landed, once the store answers again.
    Given up before, its batches would fail although they may be queued. But no longer than the
    second half of the grace period: the first may have passed when it begins (failure F5).
    """
    most_ms = min(config.delivery_timeout_ms, grace_ms // 2)
    return replace(config, cas_deadline_ms=max(config.cas_deadline_ms, most_ms))
