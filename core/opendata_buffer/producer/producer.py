"""Layer 3: the producer (OpenData RFC 0001, Producer).

A pipeline, not a loop::

    produce() ──> batcher ──> workers: compress, upload ──> committer: one CAS for all
    (caller)      (pure)      (several at once)             (one per manifest and process)

Batches enter the queue in produce order, whatever order their uploads finish in.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import pyarrow as pa

from opendata_buffer import metrics
from opendata_buffer.commit.committer import Lane, Upload, shared_committer
from opendata_buffer.commit.durability import Completion, DurabilityWatcher, Durable, WriteHandle
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import (
    Closed,
    FlushFailed,
    InvalidInput,
    OpenDataBufferError,
)
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.producer.batcher import Batch, Batcher, Call, encode_entries
from opendata_buffer.queue.owner import claim_for_use
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Runtime, SystemRuntime, Task
from opendata_buffer.stores import Store
from opendata_buffer.stores.factory import open_store

__all__ = ["Producer"]

log = logging.getLogger(__name__)

MAX_METADATA_BYTES = 1024 * 1024
"""Largest metadata payload of a call: it is rewritten with every append while it is queued."""


class Producer:
    """Accepts entries, batches them and puts them into the queue. Thread-safe, not fork-safe.

    Producers of one process on the same manifest append together, with the deadlines and the
    manifest limit of the first of them.

    Args:
        config: Settings.
        store: Use this store instead of opening ``config.store``.
        runtime: Clock and threads; the system's by default.

    Raises:
        InvalidInput: A setting or the URL is wrong.
        UnsafeStore: The store ignores conditional writes (failure F12).
        PrefixConflict: The data prefix belongs to another queue (failure F7).
        StorageError: The store cannot be reached.
    """

    def __init__(
        self,
        config: ProducerConfig,
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._config = config
        self._runtime = runtime or SystemRuntime()
        self._store = store or open_store(config.store, config.store_options)
        claim = claim_for_use(self._store, config, runtime=self._runtime)
        self._batcher = Batcher(
            flush_interval=config.flush_interval_ms / 1000,
            flush_size=config.flush_size_bytes,
            max_size=config.max_batch_bytes,
        )
        self._condition = self._runtime.condition()
        self._sealed: deque[Upload] = deque()
        self._workers: list[Task] = []
        self._idle_workers = 0
        self._waiting_calls = 0
        self._waiting_bytes = 0
        self._unsettled: set[Upload] = set()
        self._failed_calls = 0
        self._failure: BaseException | None = None
        self._transaction_failed = False
        self._apps: set[str] = set()
        self._closing = False
        self._closed = False
        self._pid = os.getpid()
        self._lane = Lane(
            max_age=config.gc_grace_period_ms / 2000,
            reupload=self._reupload,
            settle=self._settle,
            repair=self._repair,
        )
        self._committer = shared_committer(
            self._store, _patient(config), self._runtime, self._lane, claim=claim
        )
        if isinstance(self._runtime, SystemRuntime):
            _open_producers.add(self)

    def produce(
        self,
        entries: Sequence[bytes | bytearray | memoryview] | pa.Array | pa.ChunkedArray,
        metadata: bytes = b"",
        *,
        transaction: Transaction | None = None,
    ) -> WriteHandle:
        """Accept entries; they keep their order. Blocks while the buffer is full.

        Args:
            entries: Bytes-like objects, or an Arrow array of binary or string type, which is
                encoded without a Python object per entry. They may be reused at once.
            metadata: Payload that the consumer gets with exactly these entries.
            transaction: Gives the call a batch of its own that carries this identity, so that
                a reader with a transaction filter drops it when it is produced again, by this
                process or the one that takes over. Batch numbers of one app must rise, and one
                live producer at a time may use it: two that produce one batch at the same
                moment can queue it twice back to back, which reads as one transaction.

        Returns:
            A handle to await durability with. The entries are not durable before.

        Raises:
            InvalidInput: An entry is not bytes-like or null, or the call exceeds
                ``max_batch_bytes``. Nothing of the call was accepted.
            Closed: The producer was closed, or made before this process was forked.
            FlushFailed: An earlier transaction failed; later ones would be taken for repeats.
        """
        self._check_process()
        metadata = bytes(metadata)
        if len(metadata) > MAX_METADATA_BYTES:
            raise InvalidInput(
                f"metadata has {len(metadata)} bytes: use at most {MAX_METADATA_BYTES}; it is "
                "rewritten with every append. Put large data into the entries."
            )
        block, count = encode_entries(entries)
        size = len(block)
        if size > self._config.max_batch_bytes:
            raise InvalidInput(
                f"one call of {count} entries makes {size} bytes, more than max_batch_bytes "
                f"{self._config.max_batch_bytes}: split it, or raise the limit here and at the "
                "consumer"
            )
        with self._condition:
            self._wait_for_room(size + len(metadata))
            if transaction is not None and self._transaction_failed:
                raise FlushFailed(self._failed_calls, f"an earlier batch failed: {self._failure}")
            if transaction is not None and transaction.app not in self._apps:
                self._apps.add(transaction.app)
                self._separate()
            # Before the call is accepted: without any thread it would never be flushed.
            self._staff()
            call = Call(block, count, metadata, self._runtime.now_ms(), transaction)
            now = self._runtime.monotonic()
            had_timer = self._batcher.due_at is not None
            completion, full = self._batcher.add(call, Completion(self._runtime), now)
            if not had_timer:
                # An idle worker waits without a timeout; now there is a time to keep.
                self._condition.notify_all()
            self._waiting_calls += 1
            self._waiting_bytes += size + len(metadata)
            for batch in full:
                self._seal(batch)
        return WriteHandle(DurabilityWatcher(completion), call.ingestion_time_ms)

    def flush(self, timeout: float | None = None) -> None:
        """Make everything produced so far durable.

        Raises:
            FlushFailed: This or an earlier batch was given up; a producer that has lost a
                batch says so at every flush and at close (failures F29, F30).
            TimeoutError: Not done after ``timeout`` seconds; the producer goes on trying.
            Closed: The producer was made before this process was forked.
        """
        self._check_process()
        deadline = None if timeout is None else self._runtime.monotonic() + timeout
        with self._condition:
            self._seal_open()
            # Not those sealed from now on: under a steady load there is always one.
            waiting = set(self._unsettled)
            while waiting:
                left = None if deadline is None else deadline - self._runtime.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"{len(waiting)} batches not durable after {timeout} s; the producer "
                        "goes on trying: flush again"
                    )
                self._condition.wait(left)
                waiting &= self._unsettled
            self._raise_failure()

    def close(self) -> None:
        """Flush, then end the threads. A second call does nothing; nor does one in a fork.

        Interrupted (Ctrl-C), it leaves the producer at work: call it again, or the end of the
        interpreter does.

        Raises:
            FlushFailed: As in :meth:`flush`. The producer is closed all the same.
        """
        if self._pid != os.getpid():
            return
        with self._condition:
            if self._closed:
                return
            self._closing = True
            self._condition.notify_all()
        try:
            self.flush()
        finally:
            # After an interrupt there may be handles that still wait for their outcome.
            if not self._waiting_calls:
                self._end()

    def _end(self) -> None:
        """Stop the threads; several callers of close() may do it at once."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for worker in self._workers:
            worker.join()
        self._committer.close_lane(self._lane)
        _open_producers.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except OpenDataBufferError:
            if exc is None:
                raise
            # Do not hide the error that ended the with block.
            log.exception("closing the producer failed")

    @property
    def commit_attempts(self) -> int:
        """Manifest writes tried by this process's committer for this queue."""
        return self._committer.queue.attempts

    @property
    def commit_conflicts(self) -> int:
        """How many of them lost against another process."""
        return self._committer.queue.conflicts

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise Closed(
                f"this producer belongs to process {self._pid}, which forked this one: its "
                "threads are not here. Make a producer in each process, after the fork."
            )

    # Everything below runs with the condition held, unless it says otherwise.

    def _wait_for_room(self, size: int) -> None:
        config = self._config
        while not self._closing:
            # A call larger than the whole budget is let in alone, or it would wait for ever.
            fits = (
                self._waiting_bytes + size <= config.max_buffered_bytes or not self._waiting_calls
            )
            if fits and self._waiting_calls < config.max_buffered_inputs:
                return
            self._condition.wait()
        raise Closed("the producer was closed: produce() needs an open one")

    def _seal_open(self) -> None:
        batch = self._batcher.take()
        if batch is not None:
            self._seal(batch)
            self._staff()

    def _separate(self) -> None:
        """Put an empty batch in front of an app's first transaction.

        It may repeat one of an earlier process. Were it appended directly behind that one, the
        reader would take the two for one transaction: a transaction is told by being contiguous.
        """
        self._seal_open()
        self._seal(Batch(Completion(self._runtime), self._runtime.monotonic()))

    def _seal(self, batch: Batch) -> None:
        deadline = self._runtime.monotonic() + self._config.delivery_timeout_ms / 1000
        upload = Upload.of(batch, deadline)
        self._unsettled.add(upload)
        failure = self._committer.enter(self._lane, upload)
        if failure is None:
            self._sealed.append(upload)
        else:
            self._settle(upload, failure)
        self._condition.notify_all()

    def _staff(self) -> None:
        """Start a worker when all are busy: one keeps the flush timer, more upload."""
        if self._idle_workers or len(self._workers) >= self._config.upload_concurrency:
            return
        name = f"opendata-buffer-producer-{len(self._workers)}"
        try:
            worker = self._runtime.spawn(self._work, name)
        except RuntimeError:
            # The process has no thread left, or the interpreter is ending and starts none.
            if not self._workers:
                raise
            return  # those there are upload one after the other
        self._idle_workers += 1
        self._workers.append(worker)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise FlushFailed(self._failed_calls, str(self._failure)) from self._failure

    def _work(self) -> None:
        """A worker: keeps the flush timer while it waits, and uploads."""
        while True:
            with self._condition:
                upload = self._next_upload()
                if upload is None:
                    return
                self._idle_workers -= 1
                if self._sealed or self._batcher.due_at is not None:
                    self._staff()
            try:
                self._upload(upload)
            except Exception as error:
                # Every kind of failure ends in the handles; a dead worker would hide it (failure
                # F29).
                self._committer.give_up(self._lane, upload, error)
            with self._condition:
                self._idle_workers += 1

    def _next_upload(self) -> Upload | None:
        while True:
            now = self._runtime.monotonic()
            if self._batcher.is_due(now):
                self._seal_open()
            if self._sealed:
                return self._sealed.popleft()
            if self._closed:
                return None
            due_at = self._batcher.due_at
            self._condition.wait(None if due_at is None else max(0.0, due_at - now))

    def _upload(self, upload: Upload) -> None:
        """Store the object; without the lock."""
        config = self._config
        if upload.batch is not None:
            upload.data = upload.batch.encode(config.compression, config.zstd_level)
            upload.batch = None
        # A new name for each upload: an object may not be enqueued long after its ULID (failure
        # F5).
        ulid = self._runtime.ulid()
        upload.minted_at = self._runtime.monotonic()
        upload.minted_ms = self._runtime.now_ms()
        upload.location = batch_key(config.data_path_prefix, ulid, upload.transaction)
        left_ms = max(1, int((upload.deadline - self._runtime.monotonic()) * 1000))
        retrying = queue_retry(self._runtime, config, deadline_ms=left_ms)
        started = self._runtime.monotonic()
        retrying(self._store.put, upload.location, upload.data)
        metrics.flush_duration_seconds.record(self._runtime.monotonic() - started)
        metrics.bytes_written.add(len(upload.data))
        self._committer.uploaded(upload)

    # Called by the committer, without the lock.

    def _reupload(self, upload: Upload) -> None:
        with self._condition:
            self._sealed.appendleft(upload)
            self._staff()
            self._condition.notify_all()

    def _repair(self, upload: Upload) -> None:
        self._store.put(upload.location, upload.data)

    def _settle(self, upload: Upload, outcome: Durable | BaseException) -> None:
        upload.data = b""
        if isinstance(outcome, BaseException):
            log.error("batch of %d produce() calls failed: %s", upload.calls, outcome)
            # Before the handles tell: who saw one fail must not get a later transaction in.
            with self._condition:
                self._failed_calls += upload.calls
                self._failure = self._failure or outcome
                self._transaction_failed |= upload.ordered
        else:
            metrics.batches_flushed.add(1)
            metrics.entries_flushed.add(upload.count)
            metrics.bytes_flushed.add(upload.size)
        upload.completion.set(outcome)
        # After the handles tell: flush() returns when every handle has its outcome.
        with self._condition:
            self._waiting_calls -= upload.calls
            self._waiting_bytes -= upload.held
            self._unsettled.remove(upload)
            self._condition.notify_all()


def _patient(config: ProducerConfig) -> ProducerConfig:
    """Let an append try as long as its batches do.

    One whose answer was lost is settled by reading, once the store can be read again. Given up
    before, its batches would have failed although they may be queued. But no longer than the
    second half of the grace period: the first one may have passed when it begins (failure F5).
    """
    most_ms = min(config.delivery_timeout_ms, config.gc_grace_period_ms // 2)
    return replace(config, cas_deadline_ms=max(config.cas_deadline_ms, most_ms))


_open_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


@atexit.register
def _close_forgotten() -> None:
    """A service that exits without close() still has its entries in memory (failure F30)."""
    for producer in list(_open_producers):
        if producer._pid != os.getpid():
            continue  # the parent's, in a forked child
        log.warning("a producer was not closed before exit; closing it now")
        try:
            producer.close()
        except KeyboardInterrupt:
            log.error("interrupted: %d produce() calls are not durable", producer._waiting_calls)
            return
        except Exception:
            log.exception("closing the producer failed")
