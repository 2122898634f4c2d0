"""The threads of a producer: they upload its batches and append them to the queue.

**The problem.** A call of ``produce()`` should cost next to nothing, and storage takes tens of
milliseconds for each request. So calls fill a buffer, and threads do the rest. These threads have
to keep the order of the calls, although uploads finish in any order; give every call an outcome,
however the store fails; and use several connections, but only while there is work for them.

**The idea.** The :class:`.Accumulator` knows the next tasks and does no IO. It gives work to
two kinds of threads, which report back to it::

    produce() ---> Accumulator ---> workers: encode, upload ---> appender: append
    (caller)       (no IO)          (several at once)            (one append at a time)

*Workers* upload batches and set the outcomes of handles. There is one at first. A worker that
takes a task while no other worker is idle starts another one, up to ``upload_concurrency`` plus 1.
So one worker is idle and keeps the time: it seals a batch that is due, and fails a batch that is
past its deadline, even while every other thread waits for a store that does not answer.

*The appender* claims the queue, opens the committer, and appends the batches that are uploaded, in
the order of their calls.

**An example.** Batches 1 and 2 are uploaded at the same time, and 2 is done first. It waits. Once
1 is done, one append puts both into the queue, and a worker sets their outcomes.

**What can go wrong.**

* *An upload fails.* The uploader tries again until the deadline of the batch.
* *An upload waits for its append so long that the collector may delete it.* A worker uploads the
  batch again, under a new name.
* *An append lands so late that the collector may have deleted the object.* The object is written
  again, and the handle raises ``CommitStateUnknown`` (failure F5).
* *A store raises something unexpected.* It becomes the outcome of the batches concerned, so that
  no thread dies and no caller waits forever (failure F29).
* *No thread can be started.* The existing workers do everything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from opendata_buffer import errors, metrics
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.hints import Setting
from opendata_buffer.producer.accumulator import Accumulator
from opendata_buffer.producer.batching import Batch
from opendata_buffer.producer.committer import Committer, OpenCommitter
from opendata_buffer.producer.uploader import Uploader
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import WARN_S
from opendata_buffer.runtime import Interval, Runtime, Task, deadline, locked, wait_for
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)
delivery_log = logging.getLogger("opendata_buffer.producer.delivery")
"""The outcomes of batches. Commands silence it, because they report these themselves."""

RETRY_PAUSE_S = 0.25
"""Seconds between two appends that the queue gave up, each after a backoff of its own."""

CLOSE_S = 5.0
"""Seconds that the committer may take to end. Everything is durable by then."""

ABANDON_S = 1.0
"""Seconds that a close whose time is up waits for the outcomes to be set."""


class Sender:
    """The accumulator of a producer, and the threads that upload and append its batches.

    The threads keep it alive, also if the program drops its producer.

    Args:
        config: The queue and the producer's settings.
        store: The queue's store.
        runtime: The clock and the threads.
        open_committer: Opens what appends, once the queue is claimed.

    Raises:
        RuntimeError: The process cannot start another thread.
        OpenDataBufferError: As :class:`.Producer`.
    """

    def __init__(
        self, config: ProducerConfig, store: Store, runtime: Runtime, open_committer: OpenCommitter
    ) -> None:
        self._config = config
        self._open_committer = open_committer
        self._store = store
        self._runtime = runtime
        self._uploader = Uploader(store, config, runtime)
        self._warnings = Interval(runtime, WARN_S)
        self._append_limit = 0.0
        self.accumulator = Accumulator(config, runtime)
        self._tasks: list[Task] = []
        self._condition = runtime.condition()
        self._opened: Committer | BaseException | None = None
        try:
            # The worker first: the claim of the appender starts threads, and can do without them.
            self._start(self._work, "opendata-buffer-worker-0")
            self._start(self._append_all, "opendata-buffer-appender")
            self._await_claim()
        except BaseException:
            self.accumulator.begin_closing()
            raise

    @property
    def committer(self) -> Committer:
        """The committer that appends the batches."""
        assert not isinstance(self._opened, BaseException | None)
        return self._opened

    def close(self, timeout: float | None) -> None:
        """Complete all batches and end the threads. A thread that waits for the store ends later.

        Args:
            timeout: Seconds until batches without an outcome are given up. None: each batch has its
                own deadline.
        """
        for wake in self.accumulator.begin_closing():
            wake()
        if not self.accumulator.await_end(timeout):
            self.accumulator.abandon(
                errors.Closed(
                    f"the producer was closed before this was durable, after {timeout:g} s: look "
                    "at the store, or give close() more time"
                )
            )
            self.accumulator.await_end(ABANDON_S)
        if not self.accumulator.threads:
            for task in self._tasks:
                # Its loop has ended, so this takes no time.
                task.join(ABANDON_S)

    def _start(self, loop: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                loop()
            except Exception:
                delivery_log.exception("a thread of the producer died of a bug")
            finally:
                self.accumulator.end_thread()

        self._tasks.append(self._runtime.spawn(run, name))

    # The workers: upload batches, and set outcomes.

    def _work(self) -> None:
        while (work := self.accumulator.next_work()) is not None:
            if work.add_worker:
                try:
                    self._start(self._work, f"opendata-buffer-worker-{len(self._tasks) - 1}")
                except RuntimeError:
                    # The process has too many threads, or the interpreter is ending. Then the
                    # existing workers do everything, one task after the other.
                    self.accumulator.remove_worker()
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
            # Any failure becomes the outcome. A worker that died of it would hide it (failure F29).
            return _for_handles(error)
        return None

    def _complete(self, batches: Sequence[Batch]) -> None:
        """Set the outcomes of the handles. The callbacks of callers run here."""
        _log_failures(batches)
        try:
            for batch in batches:
                assert batch.outcome is not None
                if not isinstance(batch.outcome, BaseException):
                    metrics.batches_flushed.add(1)
                    metrics.entries_flushed.add(batch.count)
                    metrics.bytes_flushed.add(batch.size)
                batch.completion.complete(batch.outcome)
        finally:
            for wake in self.accumulator.release(batches):
                wake()

    # The appender: claims the queue, then makes one append after the other.

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
        with deadline(self._runtime, self._config.timeout_ms / 1000):
            claim = claim_for_writing(self._store, self._config, runtime=self._runtime)
        # An append tries for as long as its batches do. If an answer was lost, the manifest shows
        # whether the append landed, once the store answers again. An append that gave up before
        # would fail batches that may be in the queue. But it may take no longer than half of the
        # grace period, because the other half may have passed when it begins (failure F5).
        most_ms = min(self._config.delivery_timeout_ms, claim.grace_ms // 2)
        config = self._config.with_timeout(max(self._config.timeout_ms, most_ms))
        # The last attempt may begin at the deadline, and its answer takes as long again at most.
        self._append_limit = 2 * config.timeout_ms / 1000
        self.accumulator.set_limits(claim.grace_ms, self._append_limit)
        return self._open_committer(self._store, config, self._runtime, claim)

    @locked
    def _claimed(self, outcome: Committer | BaseException) -> None:
        self._opened = outcome
        self._condition.notify_all()

    @locked
    def _await_claim(self) -> None:
        """Wait until the appender has claimed the queue.

        Raises:
            TransientStorageError: The store did not answer within ``timeout_ms``.
            OpenDataBufferError: The queue could not be claimed.
        """
        limit = self._config.timeout_ms / 1000
        if not wait_for(self._runtime, self._condition, lambda: self._opened, limit):
            raise errors.TransientStorageError(
                f"store {self._store.url} did not answer within {limit:g} s (",
                Setting("timeout_ms"),
                "): check its address and the network. Nothing was produced.",
            )
        if isinstance(self._opened, BaseException):
            raise self._opened

    def _append(self, committer: Committer, group: list[Batch]) -> None:
        pause = False
        try:
            entries = [NewEntry(batch.location, batch.metadata) for batch in group]
            with deadline(self._runtime, self._append_limit):
                first = committer.append(entries, begin_by=self.accumulator.begin_by(group))
        except (errors.Conflict, errors.QueueFull, errors.TransientStorageError) as error:
            pause = self.accumulator.refused(group, error)
            if pause and self._warnings.is_due():
                count = len(group)
                delivery_log.warning("append of %d batches failed, trying again: %s", count, error)
        except BaseException as error:
            # If this thread died, every later produce() would wait forever.
            self.accumulator.fail(group, _for_handles(error))
            if not isinstance(error, errors.OpenDataBufferError):
                delivery_log.exception("group commit failed")
        else:
            for batch, sequence, age in self.accumulator.landed(first):
                self.accumulator.fail([batch], self._repair(batch, sequence, age))
        self._complete(self.accumulator.appended())
        if pause:
            self._runtime.sleep(RETRY_PAUSE_S)

    def _repair(self, batch: Batch, sequence: int, age: float) -> errors.CommitStateUnknown:
        """Write the object of a late append again, in case the collector deleted it (failure F5).

        Args:
            batch: The batch that was appended.
            sequence: Its sequence.
            age: Seconds between its upload and its append.

        Returns:
            The batch's outcome: whether it is complete is not known.
        """
        try:
            self._uploader.repair(batch)
            result = "its object was written again in case it is gone"
        except errors.OpenDataBufferError as error:
            result = f"its object could not be written again: {error}"
        return errors.CommitStateUnknown(
            self._config.manifest_path,
            sequence,
            (batch.location,),
            sequence + 1,
            f"it was appended {age:.0f} s after its upload, later than the collector's grace "
            f"period allows; {result}",
        )


def _log_failures(batches: Sequence[Batch]) -> None:
    """Log each cause once, with how much it affects, instead of once for each batch."""
    failed: dict[str, list[Batch]] = {}
    for batch in batches:
        if isinstance(batch.outcome, BaseException):
            try:
                cause = str(batch.outcome)
            except Exception:
                # An error class of a store may fail here. The handles must get their outcome.
                cause = type(batch.outcome).__name__
            failed.setdefault(cause, []).append(batch)
    for cause, together in failed.items():
        delivery_log.error(
            "%d produce() calls with %d records in %d batches failed: %s",
            sum(batch.calls for batch in together),
            sum(batch.count for batch in together),
            len(together),
            cause,
        )


def _for_handles(error: BaseException) -> BaseException:
    """Return an error that handles may raise.

    A ``SystemExit`` or ``KeyboardInterrupt`` from a store must not end the programs that await a
    handle.
    """
    if isinstance(error, Exception):
        return error
    return errors.PermanentStorageError(
        f"the store raised {error!r}, which is not an error of a store"
    )
