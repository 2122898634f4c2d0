"""The producer (OpenData RFC 0001, Producer), and the threads that upload and append its batches.

::

    produce() ──> Batcher ──> workers: encode, upload ──> appender: OrderedUploads, Committer
    (caller)      (pure)      (several at once)           (one append at a time)

Calls are checked and encoded in the calling thread. Batches enter the queue in produce order,
whatever order their uploads finish in. One idle worker keeps the time: it seals the batch that is
due and fails what is past its deadline, also while every other thread waits for a store that does
not answer.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any
from uuid import UUID

from opendata_buffer import errors, metrics
from opendata_buffer.arguments import checked, take_bytes, wrong_type
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats import BytesLike
from opendata_buffer.formats.batch import Transaction, batch_key, tagged_ulid
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.messages import parse_uuid
from opendata_buffer.producer.accumulator import Accumulator
from opendata_buffer.producer.batching import (
    CLOSED,
    PIECE_HELD,
    RECORD_HELD,
    Batch,
    Entries,
    Item,
    ProduceRequest,
    Stage,
    block_bytes,
    encode_entries,
    encode_list,
)
from opendata_buffer.producer.group_commit import Committer, OpenCommitter, shared_committer
from opendata_buffer.producer.handles import WriteHandle, wakeable
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import WARN_S
from opendata_buffer.runtime import (
    Closeable,
    Interval,
    Moment,
    Runtime,
    SystemRuntime,
    Task,
    deadline,
    locked,
    wait_for,
)
from opendata_buffer.stores.base import Files, Put, Store
from opendata_buffer.stores.open import open_store

log = logging.getLogger(__name__)
delivery_log = logging.getLogger("opendata_buffer.producer.delivery")
"""What becomes of batches. Commands, which report that themselves, silence it."""

NO_METADATA = b""

MAX_METADATA_BYTES = 1024 * 1024
"""Largest metadata payload of a call: it is rewritten with every append while it is queued."""

RETRY_PAUSE_S = 0.25
"""Seconds between appends that the queue gave up, each after a backoff of its own."""

CLOSE_S = 5.0
"""Seconds that the committer may take to end; all is durable then."""

ABANDON_S = 1.0
"""Seconds that a close that is out of time waits for the outcomes to be set."""


def check_interpreter() -> None:
    """Refuse a Python that runs without its global interpreter lock.

    A call that is accepted takes no lock of its own. It relies on the interpreter's: no other
    thread runs between its reading and its writing of the count of free bytes (decision 0025).

    Raises:
        InvalidInput: This is a free-threaded build, and the lock is off.
    """
    # Python 3.13 has the function; earlier ones always have the lock.
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    if is_enabled is not None and not is_enabled():
        raise errors.InvalidInput(
            f"this Python ({sys.executable}) runs without the global interpreter lock, which a "
            "producer relies on. Start it with PYTHON_GIL=1 in the environment or with "
            "'python -X gil=1', or use a build of Python that has the lock."
        )


class Producer(Closeable):
    """Accepts entries, batches them and puts them into the queue. Thread-safe, not fork-safe.

    Producers of one process on the same manifest append together, with the deadlines and the
    manifest limit of the first of them.

    ::

        with Producer("s3://bucket/orders", compression="zstd") as producer:
            producer.produce([b"one", b"two"]).result()

    ``store``, ``runtime`` and ``open_committer`` are for tests, and for programs that are parts
    of this one.

    Args:
        config: The queue's URL or path, or a :class:`.ProducerConfig`.
        **settings: Fields of the configuration, by name.

    Raises:
        InvalidInput: A setting or the URL is wrong, or Python runs without its global interpreter
            lock.
        UnsafeStore: The store ignores conditional writes (failure F12).
        PrefixConflict: The data prefix belongs to another queue (failure F7).
        StorageError: The store cannot be reached, or did not answer within ``timeout_ms``.
    """

    @checked
    def __init__(
        self,
        config: ProducerConfig | str | PathLike[str],
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
        open_committer: OpenCommitter | None = None,
        **settings: Any,
    ) -> None:
        check_interpreter()
        config = ProducerConfig.of(config, settings)
        self._config = config
        self._pid = os.getpid()
        self._closed = False
        runtime = runtime or SystemRuntime()
        store = store or open_store(config.store, config.store_options)
        self._sender = Sender(config, store, runtime, open_committer or self._default_committer())
        # Attributes, because every call uses them.
        self._accumulator = self._sender.accumulator
        self._batcher = self._accumulator.batcher
        self._monotonic = runtime.monotonic
        where = {"queue": metrics.queue_label(store.url, config.manifest_path)}
        metrics.producer_buffered_bytes.watch(self, lambda each: each.buffered_bytes, where)
        if isinstance(runtime, SystemRuntime):
            _open_senders.add(self._sender)

    def _default_committer(self) -> OpenCommitter:
        """Return what opens the committer if the caller names none.

        Here: the committer of this process, without a broker. The public class overrides it; see
        :mod:`opendata_buffer.assembly`.
        """
        return shared_committer

    def send(self, record: bytes | bytearray | memoryview) -> WriteHandle:
        """Accept one record without metadata, at the least cost: half a microsecond.

        ::

            for record in records:
                handle = producer.send(record)

        As ``produce([record])`` in everything else. Calls of one millisecond share their handle.

        Args:
            record: Bytes. Another bytes-like object is copied and may be reused at once.

        Returns:
            A handle to await durability with. The record is not durable before.

        Raises:
            InvalidInput, Closed, KeyboardInterrupt: As :meth:`produce`.
        """
        if type(record) is bytes:
            handle = self._add(record)
            if handle is not None:
                return handle
        return self.accept(self.prepare([record]))

    def _add(self, item: Item) -> WriteHandle | None:
        """Add a record or a piece to the open buffer without a lock: see :mod:`.batching`.

        Returns None when the item is too large for a batch.
        """
        held = len(item[0]) + PIECE_HELD if type(item) is tuple else len(item) + RECORD_HELD
        # No call lies between reading what is left and writing it, so no other thread subtracts in
        # between. Calling `buffer.append(...)` and not a variable would take 30 ns longer.
        monotonic = self._monotonic
        now = monotonic()
        batcher = self._batcher
        buffer = batcher.buffer
        left = buffer.left - held
        if left >= 0 and now < buffer.until:
            buffer.left = left
            if type(item) is tuple:
                buffer.more += item[1] - 1
                buffer.pieces += 1
            append = buffer.append
            append(item)
            if batcher.buffer is buffer:
                return buffer.handle
            return self._accumulator.add_item(item, buffer)
        self._check_process()
        if block_bytes(item) > self._config.max_batch_bytes:
            return None
        return self._accumulator.add_item(item)

    def produce(
        self,
        entries: Entries,
        metadata: BytesLike = NO_METADATA,
        transaction: Transaction | None = None,
        message: UUID | None = None,
    ) -> WriteHandle:
        """Accept entries; they keep their order. Blocks while the buffer is full.

        Args:
            entries: Bytes-like objects, or an Arrow array of binary or string type, which is
                encoded without a Python object per entry. They may be reused at once.
            metadata: Bytes-like payload that the consumer gets with exactly these entries.
            transaction: Gives the call a batch of its own that carries this identity, so that
                a reader with a transaction filter drops it when it is produced again, by this
                process or the one that takes over. Batch numbers of one app must rise, and one
                live producer at a time may use it: two that produce one batch at the same
                moment can queue it twice back to back, which reads as one transaction.
            message: Gives the call a batch of its own that is this message: a version 1 UUID of
                producer, clock and flags, see :mod:`opendata_buffer.messages`. Messages enter
                the queue in produce order, so clocks of one producer must rise from call to
                call: readers take a lower one for a duplicate. ``transaction`` then only names
                its writer. A :class:`.Publisher` does all that.

        Returns:
            A handle to await durability with. The entries are not durable before.

        Raises:
            InvalidInput: An entry or the metadata is not ``bytes``, ``bytearray`` or
                ``memoryview``, the call exceeds ``max_batch_bytes``, or ``message`` is not a
                version 1 UUID. Nothing of the call was accepted.
            Closed: The producer was closed, or made before this process was forked.
            KeyboardInterrupt: The entries may have been accepted or not, as after any exception
                that a signal handler raises; what was accepted before is not affected.
            FlushFailed: An earlier transaction failed; later ones would be taken for repeats.
        """
        # transaction and message are not keyword-only: that saves 60 ns of each call.
        # By identity, so that only the default gets in here, and no 0, "" or None.
        if metadata is NO_METADATA and transaction is None and message is None:
            kind = type(entries)
            if kind is list or kind is tuple:
                if len(entries) == 1:
                    return self.send(entries[0])
                item = encode_list(entries)
                if item is not None:
                    handle = self._add(item)
                    if handle is not None:
                        return handle
        return self.accept(
            self.prepare(entries, metadata, transaction=transaction, message=message)
        )

    async def produce_async(
        self,
        entries: Entries,
        metadata: BytesLike = NO_METADATA,
        *,
        transaction: Transaction | None = None,
        message: UUID | None = None,
    ) -> WriteHandle:
        """As :meth:`produce`; while the buffer is full it waits without blocking the event loop.

        ::

            handle = await producer.produce_async([record])  # accepted
            await handle                                     # durable

        Calls that wait at the same time are accepted in any order: await one before the next
        where order matters. One that is cancelled while it waits was not accepted.

        Raises:
            OpenDataBufferError: As :meth:`produce`.
        """
        return await self.accept_async(
            self.prepare(entries, metadata, transaction=transaction, message=message)
        )

    @checked
    async def accept_async(self, request: ProduceRequest) -> WriteHandle:
        """As :meth:`accept`; while the buffer is full it waits without blocking the event loop."""
        while True:
            room, wake = wakeable()
            handle = self._accumulator.accept_now(request, wake)
            if handle is not None:
                return handle
            await room

    def prepare(
        self,
        entries: Entries,
        metadata: BytesLike = NO_METADATA,
        *,
        transaction: Transaction | None = None,
        message: UUID | None = None,
    ) -> ProduceRequest:
        """The first half of :meth:`produce`: check and encode a call. Nothing is accepted yet."""
        self._check_process()
        metadata = take_bytes("metadata", metadata)
        if not isinstance(transaction, Transaction | None):
            raise wrong_type("transaction", transaction, "a Transaction")
        if not isinstance(message, UUID | None):
            raise wrong_type("message", message, "a UUID")
        if len(metadata) > MAX_METADATA_BYTES:
            raise errors.InvalidInput(
                f"metadata has {len(metadata)} bytes: use at most {MAX_METADATA_BYTES}; it is "
                "rewritten with every append. Put large data into the entries."
            )
        block, count = encode_entries(entries)
        most = self._config.max_batch_bytes
        if len(block) > most:
            what, fix = (
                ("a record takes", "store it elsewhere and produce its name, or split it")
                if count == 1
                else (f"{count} records of one call take", "split the call")
            )
            raise errors.InvalidInput(
                f"{what} {len(block)} bytes in a batch, and a batch has at most {most}: {fix}"
            )
        if message is not None:
            parse_uuid(message)
        return ProduceRequest(block, count, metadata, 0, transaction, message)

    def accept(self, request: ProduceRequest) -> WriteHandle:
        """The second half: accept a prepared request. Blocks while the buffer is full."""
        if type(request) is not ProduceRequest:
            raise wrong_type("request", request, "what prepare() returned")
        return self._accumulator.accept(request)

    @checked
    def flush(self, timeout: float | None = None) -> None:
        """Make everything produced so far durable.

        Args:
            timeout: Seconds. Default: until each batch is durable or was given up, which takes
                ``delivery_timeout_ms`` and, if its append is under way by then, the time that
                an append may take.

        Raises:
            FlushFailed: This or an earlier batch was given up; a producer that has lost a
                batch raises it at every flush and at close (failures F29, F30).
            TimeoutError: Not done after ``timeout`` seconds; the producer goes on trying.
            Closed: The producer was made before this process was forked.
        """
        self._check_process()
        self._accumulator.flush(timeout)
        self._accumulator.check()

    @checked
    def close(self, timeout: float | None = None) -> None:
        """Flush, then end the threads. A second call does nothing; nor does one in a fork.

        Interrupted (Ctrl-C), it leaves the threads at work; they upload and append what was
        accepted, and end. Call it again to wait for them.

        Args:
            timeout: Seconds until what is not durable is given up; its handles raise ``Closed``,
                or ``CommitStateUnknown`` if its append is under way. It returns within a second
                after that. Default: as in :meth:`flush`.

        Raises:
            FlushFailed: As in :meth:`flush`. The producer is closed all the same.
        """
        if self._pid != os.getpid() or self._closed:
            return
        self._sender.close(timeout)
        self._closed = True
        metrics.producer_buffered_bytes.unwatch(self)
        _open_senders.discard(self._sender)
        self._accumulator.check()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of ``max_buffered_bytes`` that are taken by batches without an outcome."""
        return self._accumulator.held_bytes()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise errors.Closed(
                f"this producer belongs to process {self._pid}, which forked this one: its "
                "threads are not here. Make a producer in each process, after the fork."
            )


class Uploader:
    """Writes batch objects. Several threads call it at once, each with a batch of its own."""

    def __init__(self, store: Put, config: ProducerConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime

    def upload(self, batch: Batch, tag: str) -> None:
        """Encode the batch, and write it until it is stored or too late; ``StorageError`` or
        ``InvalidInput`` otherwise. Under a new name each time, because the collector takes an
        object's age from it (failure F5), with the tag of the committer that appends it.
        """
        config = self._config
        data = batch.data
        if data is None:
            pieces = batch.encode(config.compression, config.zstd_level)
            # Joined only where the store needs it in one: that is a copy.
            data = pieces if isinstance(self._store, Files) else b"".join(pieces)
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
        retrying = config.retries(self._runtime, deadline_ms=int(left * 1000))
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
        except errors.TransientStorageError as error:
            batch.last_error = error
            raise

    def _put(self, location: str, data: bytes | list[bytes | memoryview]) -> None:
        if isinstance(data, bytes):
            self._store.put(location, data)
        else:
            assert isinstance(self._store, Files)
            self._store.put_pieces(location, data)


class Sender:
    """A producer's accumulator, and the threads that upload and append what it holds; they keep it
    alive. Raises ``RuntimeError`` when the process can start no thread, and as :class:`Producer`.
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
            self._start(self._append_all, "opendata-buffer-appender")
            self._start(self._work, "opendata-buffer-worker-0")
            self._await_claim()
        except BaseException:
            self.accumulator.begin_closing()
            raise

    @property
    def committer(self) -> Committer:
        """Appends the batches."""
        assert not isinstance(self._opened, BaseException | None)
        return self._opened

    def close(self, timeout: float | None) -> None:
        """Complete everything and end the threads; those that wait for the store end later."""
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
                task.join(ABANDON_S)  # its loop has ended

    def _start(self, loop: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                loop()
            except Exception:
                delivery_log.exception("a thread of the producer died of a bug")
            finally:
                self.accumulator.end_thread()

        self._tasks.append(self._runtime.spawn(run, name))

    # Workers.

    def _work(self) -> None:
        while (work := self.accumulator.next_work()) is not None:
            if work.add_worker:
                try:
                    self._start(self._work, f"opendata-buffer-worker-{len(self._tasks) - 1}")
                except RuntimeError:
                    # The process has no thread left, or the interpreter is ending and starts none:
                    # the existing workers do everything, one task after the other.
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
            # Every kind of failure becomes the outcome; a dead worker would hide it (failure F29).
            return _for_handles(error)
        return None

    def _complete(self, batches: Sequence[Batch]) -> None:
        """Set the outcomes of the handles; callbacks of callers run here."""
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
        with deadline(self._runtime, self._config.timeout_ms / 1000):
            claim = claim_for_writing(self._store, self._config, runtime=self._runtime)
        # An append tries as long as its batches do: the manifest shows whether one without an
        # answer has landed, once the store answers again. Given up before, its batches would fail
        # although they may be queued. But no longer than the second half of the grace period: the
        # first may have passed when it begins (failure F5).
        most_ms = min(self._config.delivery_timeout_ms, claim.grace_ms // 2)
        config = self._config.with_timeout(max(self._config.timeout_ms, most_ms))
        # An append makes its last attempt at its deadline; half of this is for its answer.
        self._append_limit = 2 * config.timeout_ms / 1000
        self.accumulator.set_limits(claim.grace_ms, self._append_limit)
        return self._open_committer(self._store, config, self._runtime, claim)

    @locked
    def _claimed(self, outcome: Committer | BaseException) -> None:
        self._opened = outcome
        self._condition.notify_all()

    @locked
    def _await_claim(self) -> None:
        """Wait until the appender has claimed the queue, at most until the deadline."""
        limit = self._config.timeout_ms / 1000
        if not wait_for(self._runtime, self._condition, lambda: self._opened, limit):
            raise errors.TransientStorageError(
                f"store {self._store.url} did not answer within {limit:g} s (timeout_ms):"
                " check its address and the network. Nothing was produced."
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
            # A thread that dies would leave every later produce() waiting for ever.
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
        """Write the object again so that its entry has one; returns the outcome (failure F5)."""
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
    """Log each cause once, however many batches one failed append has."""
    failed: dict[str, list[Batch]] = {}
    for batch in batches:
        if isinstance(batch.outcome, BaseException):
            try:
                cause = str(batch.outcome)
            except Exception:  # of a store's own class; the handles must get their outcome
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
    """An error that handles may raise: sys.exit() somewhere below must not end their callers."""
    if isinstance(error, Exception):
        return error
    return errors.PermanentStorageError(
        f"the store raised {error!r}, which is no error of a store's"
    )


_open_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child, which has none of the threads: send() must reach the check for that."""
    for sender in list(_open_senders):
        sender.accumulator.batcher.buffer = CLOSED
    _open_senders.clear()


os.register_at_fork(after_in_child=_let_go)


@atexit.register
def _close_forgotten() -> None:
    """A service that exits without close() still has its entries in memory (failure F30)."""
    for sender in list(_open_senders):
        log.warning("a producer was not closed before exit; closing it now")
        try:
            sender.close(None)
            sender.accumulator.check()
        except KeyboardInterrupt:
            held = sender.accumulator.held_bytes()
            log.error("interrupted: what was produced is not durable, about %d bytes", held)
            return
        except Exception:
            log.exception("closing the producer failed")
