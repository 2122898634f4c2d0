"""The threads of a producer: they work off its backlog.

::

    accept() ──> Batcher ──> workers: encode, upload ──> appender: Lane, Committer ──> handles
    (caller)     (pure)      (several at once)           (one append at a time)

One idle worker keeps the time: it seals the batch that is due and settles what is past its
deadline, also while every other thread waits for a store that does not answer.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from opendata_buffer import metrics
from opendata_buffer.broker.committer import open_committer
from opendata_buffer.broker.network import Network
from opendata_buffer.concurrency import locked
from opendata_buffer.config import ProducerConfig
from opendata_buffer.consumer.consumer import Consumer
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
from opendata_buffer.producer.accumulator import Backlog, Work
from opendata_buffer.producer.batching import Batch
from opendata_buffer.producer.group_commit import Committer
from opendata_buffer.producer.ordered_uploads import LateUpload, Stage, Upload
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Moment, Runtime, Task, deadline
from opendata_buffer.stores.base import Put, PutPieces, Store

__all__ = ["Sender", "Uploader"]


# ---- From an upload to its object in the store: encoded, named, written with retries. ----


class Uploader:
    """Writes batch objects; called by several threads at once, with an upload each."""

    def __init__(self, store: Put, config: ProducerConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime

    def upload(self, upload: Upload, batch: Batch | None, tag: str) -> None:
        """Write the object under a new name; retried until the upload's deadline.

        A new name each time: the collector takes an object's age from its name (failure F5).

        Args:
            upload: Gets the name, and what was encoded.
            batch: Encoded first; None when the upload has its bytes from before.
            tag: Of who appends it, for its name.

        Raises:
            StorageError: The store refused it, or did not take it in time.
            InvalidInput: It cannot be encoded.
        """
        config = self._config
        data = upload.data
        if batch is not None:
            upload.data = data = self._encode(upload, batch)
        if upload.stage is Stage.SETTLED:
            # By another thread, which took its bytes away: they must not be written as they are.
            return
        ulid = tagged_ulid(self._runtime.ulid(), tag)
        upload.minted = Moment.now(self._runtime)
        upload.location = batch_key(
            config.data_path_prefix, ulid, upload.transaction, upload.message
        )
        started = self._runtime.monotonic()
        left = max(0.001, upload.deadline - started)
        retrying = queue_retry(self._runtime, config, deadline_ms=int(left * 1000))
        with deadline(self._runtime, left):
            retrying(self._attempt, upload, data)
        metrics.flush_duration_seconds.record(self._runtime.monotonic() - started)
        metrics.bytes_written.add(len(data) if isinstance(data, bytes) else sum(map(len, data)))

    def _encode(self, upload: Upload, batch: Batch) -> bytes | list[bytes | memoryview]:
        encoded = batch.encode(self._config.compression, self._config.zstd_level)
        upload.metadata, upload.count, upload.size = encoded.metadata, encoded.count, encoded.size
        # Joined only where the store needs it in one: that is a copy.
        return encoded.pieces if isinstance(self._store, PutPieces) else encoded.data

    def repair(self, upload: Upload) -> None:
        """Write the object again under the name that its queue entry has; one attempt."""
        data = upload.data
        if upload.stage is not Stage.SETTLED:
            self._put(upload.location, data)

    def _attempt(self, upload: Upload, data: bytes | list[bytes | memoryview]) -> None:
        if upload.stage is Stage.SETTLED:
            return
        try:
            self._put(upload.location, data)
        except TransientStorageError as error:
            upload.trouble = error
            raise

    def _put(self, location: str, data: bytes | list[bytes | memoryview]) -> None:
        if isinstance(data, bytes):
            self._store.put(location, data)
        else:
            assert isinstance(self._store, PutPieces)
            self._store.put_pieces(location, data)


log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.25
"""Between appends that the queue gave up; each of them has backed off on its own already."""

CLOSE_S = 5.0
"""How long the committer may take to end; all is durable then."""

ABANDON_S = 1.0
"""How long a close that is out of time waits for the handles to be told."""


class Sender:
    """A producer's backlog and the threads that work it off.

    Args:
        config: Settings.
        store: Where objects and manifest live.
        runtime: Clock and threads.
        network: How brokers are reached; WebSockets by default.

    Attributes:
        backlog: What callers put their calls into.
        process: Id of the process that has the threads; a forked one has not.

    Raises:
        TransientStorageError: The store did not answer within ``cas_deadline_ms``.
        OpenDataBufferError: See :func:`.claim_for_writing`.
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
        self.backlog = Backlog(config, self._append_limit, runtime)
        self.process = os.getpid()
        self._tasks: list[Task] = []
        self._condition = runtime.condition()
        self._committer: Committer | None = None
        self._refusal: BaseException | None = None
        try:
            self.backlog.begin_thread()
            self._start(self._append_all, "opendata-buffer-appender", self.backlog.end_thread)
            self.backlog.hired()
            self._start(self._work, "opendata-buffer-worker-0", lambda: self.backlog.hired(-1))
            self._await_claim()
        except BaseException:
            self.backlog.begin_closing()
            raise

    @property
    def committer(self) -> Committer:
        """Whom the batches are handed to."""
        assert self._committer is not None
        return self._committer

    def close(self, timeout: float | None) -> None:
        """Settle everything and end the threads; those that wait for the store end by themselves.

        Raises:
            FlushFailed: Something was given up, now or before.
        """
        _wake(self.backlog.begin_closing())
        if not self.backlog.await_end(timeout):
            self.backlog.abandon(
                Closed(
                    f"the producer was closed before this was durable, after {timeout:g} s: look "
                    "at the store, or give close() more time"
                )
            )
            self.backlog.await_end(ABANDON_S)
        if not self.backlog.threads:
            for task in self._tasks:
                task.join(ABANDON_S)  # it has said that it ends
        self.backlog.check()

    def _start(self, loop: Callable[[], None], name: str, on_failure: Callable[[], None]) -> None:
        def run() -> None:
            try:
                loop()
            except Exception:
                log.exception("a thread of the producer died of a bug")
            finally:
                self.backlog.end_thread()

        try:
            self._tasks.append(self._runtime.spawn(run, name))
        except RuntimeError:
            on_failure()
            raise

    # Workers.

    def _work(self) -> None:
        while (work := self.backlog.next_work()) is not None:
            if work.hire:
                self._hire()
            if work.upload is None:
                self._tell(work.settled)
                self.backlog.back()
            else:
                self.backlog.uploaded(work.upload, self._try_upload(work))

    def _hire(self) -> None:
        name = f"opendata-buffer-worker-{len(self._tasks) - 1}"
        try:
            self._start(self._work, name, lambda: self.backlog.hired(-1))
        except RuntimeError:
            # The process has no thread left, or the interpreter is ending and starts none:
            # those there do it all, one thing after the other.
            log.debug("no thread for one more worker")

    def _try_upload(self, work: Work) -> BaseException | None:
        assert work.upload is not None
        try:
            self._uploader.upload(work.upload, work.batch, self.committer.tag)
        except BaseException as error:
            # Every kind of failure ends in the handles; a dead worker would hide it (failure
            # F29).
            return _for_handles(error)
        return None

    def _tell(self, settled: Sequence[Upload]) -> None:
        """Tell the callers of settled uploads; their callbacks run here."""
        self.backlog.record([each for each in settled if isinstance(each.outcome, BaseException)])
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
            _wake(self.backlog.told(settled))

    # The appender: one append after the other.

    def _append_all(self) -> None:
        try:
            committer = self._claim()
        except BaseException as error:
            self._claimed(error)
            return
        try:
            self._claimed(committer)
            while (group := self.backlog.next_group(committer.pause)) is not None:
                self._append(committer, group)
        finally:
            with deadline(self._runtime, CLOSE_S):
                committer.close()

    def _claim(self) -> Committer:
        with deadline(self._runtime, self._config.cas_deadline_ms / 1000):
            claim = claim_for_writing(self._store, self._config, runtime=self._runtime)
        return open_committer(
            self._store,
            self._append_config,
            self._runtime,
            Consumer,
            claim=claim,
            broker=self._config.broker,
            network=self._network,
        )

    @locked
    def _claimed(self, outcome: Committer | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._refusal = outcome
        else:
            self._committer = outcome
        self._condition.notify_all()

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

    def _append(self, committer: Committer, group: list[Upload]) -> None:
        pause = False
        try:
            entries = [upload.entry for upload in group]
            with deadline(self._runtime, self._append_limit):
                first = committer.append(entries, begin_by=self.backlog.begin_by(group))
        except (Conflict, QueueFull, TransientStorageError) as error:
            pause = self.backlog.refused(group, error)
            if pause:
                log.warning("append of %d batches failed, trying again: %s", len(group), error)
        except BaseException as error:
            # A thread that dies would leave every later produce() waiting for ever.
            self.backlog.failed(_for_handles(error))
            if not isinstance(error, OpenDataBufferError):
                log.exception("group commit failed")
        else:
            for late in self.backlog.landed(first):
                self.backlog.settle(late.upload, self._repair(late))
        self._tell(self.backlog.answered())
        if pause:
            self._runtime.sleep(RETRY_PAUSE_S)

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


def _wake(waiting: Sequence[Callable[[], None]]) -> None:
    """Let those try again who found no room; each of these only tells an event loop."""
    for wake in waiting:
        wake()


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
