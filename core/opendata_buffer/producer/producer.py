"""The producer (OpenData RFC 0001, Producer).

Calls are checked and encoded in the calling thread. The :class:`~.sender.Sender` uploads and
appends their batches in threads of its own. Batches enter the queue in produce order, whatever
order their uploads finish in.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pyarrow as pa

from opendata_buffer import metrics
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Closed, FlushFailed, InvalidInput
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.messages import parse_uuid
from opendata_buffer.producer.batching import (
    CLOSED,
    PIECE_HELD,
    RECORD_HELD,
    Item,
    ProduceRequest,
    block_bytes,
    encode_entries,
    encode_list,
)
from opendata_buffer.producer.group_commit import OpenCommitter, open_committer
from opendata_buffer.producer.handles import WriteHandle, wakeable
from opendata_buffer.producer.sender import Sender
from opendata_buffer.runtime import Closeable, Runtime, SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

log = logging.getLogger(__name__)

MAX_METADATA_BYTES = 1024 * 1024
"""Largest metadata payload of a call: it is rewritten with every append while it is queued."""


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
        config: The queue's URL, or a :class:`.ProducerConfig`.
        **settings: Fields of the configuration, by name.

    Raises:
        InvalidInput: A setting or the URL is wrong.
        UnsafeStore: The store ignores conditional writes (failure F12).
        PrefixConflict: The data prefix belongs to another queue (failure F7).
        StorageError: The store cannot be reached, or did not answer within ``cas_deadline_ms``.
    """

    def __init__(
        self,
        config: ProducerConfig | str,
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
        open_committer: OpenCommitter = open_committer,
        **settings: Any,
    ) -> None:
        config = ProducerConfig.of(config, settings)
        self._config = config
        self._pid = os.getpid()
        self._closed = False
        runtime = runtime or SystemRuntime()
        store = store or open_store(config.store, config.store_options)
        self._sender = Sender(config, store, runtime, open_committer)
        # An attribute, because every call uses it.
        self._accumulator = self._sender.accumulator
        self._batcher = self._accumulator.batcher
        self._monotonic = runtime.monotonic
        where = {"queue": metrics.queue_label(store.url, config.manifest_path)}
        metrics.producer_buffered_bytes.watch(self, lambda each: each.buffered_bytes, where)
        if isinstance(runtime, SystemRuntime):
            _open_senders.add(self._sender)

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
        entries: Sequence[bytes | bytearray | memoryview] | pa.Array | pa.ChunkedArray,
        metadata: bytes = b"",
        transaction: Transaction | None = None,
        message: UUID | None = None,
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
            message: Gives the call a batch of its own that is this message: a version 1 UUID of
                producer, clock and flags, see :mod:`opendata_buffer.messages`. Messages enter
                the queue in produce order, so clocks of one producer must rise from call to
                call: readers take a lower one for a duplicate. ``transaction`` then only names
                its writer. A :class:`.Publisher` does all that.

        Returns:
            A handle to await durability with. The entries are not durable before.

        Raises:
            InvalidInput: An entry is not bytes-like or null, the call exceeds
                ``max_batch_bytes``, or ``message`` is no version 1 UUID. Nothing of the call was
                accepted.
            Closed: The producer was closed, or made before this process was forked.
            KeyboardInterrupt: The entries may have been accepted or not, as after any exception
                that a signal handler raises; what was accepted before is not affected.
            FlushFailed: An earlier transaction failed; later ones would be taken for repeats.
        """
        # transaction and message are not keyword-only: that saves 60 ns of each call.
        if not metadata and transaction is None and message is None:
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
        entries: Sequence[bytes | bytearray | memoryview] | pa.Array | pa.ChunkedArray,
        metadata: bytes = b"",
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
        entries: Sequence[bytes | bytearray | memoryview] | pa.Array | pa.ChunkedArray,
        metadata: bytes = b"",
        *,
        transaction: Transaction | None = None,
        message: UUID | None = None,
    ) -> ProduceRequest:
        """The first half of :meth:`produce`: check and encode a call. Nothing is accepted yet."""
        self._check_process()
        metadata = bytes(metadata)
        if len(metadata) > MAX_METADATA_BYTES:
            raise InvalidInput(
                f"metadata has {len(metadata)} bytes: use at most {MAX_METADATA_BYTES}; it is "
                "rewritten with every append. Put large data into the entries."
            )
        block, count = encode_entries(entries)
        most = self._config.max_batch_bytes
        if len(block) > most:
            raise InvalidInput(
                f"one call of {count} entries makes {len(block)} bytes, more than max_batch_bytes "
                f"{most}: split it, or raise the limit here and at the consumer"
            )
        if message is not None:
            parse_uuid(message)
        return ProduceRequest(block, count, metadata, 0, transaction, message)

    def accept(self, request: ProduceRequest) -> WriteHandle:
        """The second half: accept a prepared request. Blocks while the buffer is full."""
        return self._accumulator.accept(request)

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
        try:
            self._sender.close(timeout)
        except FlushFailed:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self._closed = True
        metrics.producer_buffered_bytes.unwatch(self)
        _open_senders.discard(self._sender)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of ``max_buffered_bytes`` that are taken by batches without an outcome."""
        return self._accumulator.held_bytes()

    @property
    def commit_attempts(self) -> int:
        """Manifest writes tried by this process's committer for this queue."""
        return self._sender.committer.attempts

    @property
    def commit_conflicts(self) -> int:
        """How many of them lost against another process."""
        return self._sender.committer.conflicts

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise Closed(
                f"this producer belongs to process {self._pid}, which forked this one: its "
                "threads are not here. Make a producer in each process, after the fork."
            )


_open_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def _close_buffers() -> None:
    """In a forked child: send() must reach the check that this is another process."""
    for sender in list(_open_senders):
        sender.accumulator.batcher.buffer = CLOSED


if hasattr(os, "register_at_fork"):  # where there is a fork
    os.register_at_fork(after_in_child=_close_buffers)


@atexit.register
def _close_forgotten() -> None:
    """A service that exits without close() still has its entries in memory (failure F30)."""
    for sender in list(_open_senders):
        if sender.process != os.getpid():
            continue  # the parent's, in a forked child
        log.warning("a producer was not closed before exit; closing it now")
        try:
            sender.close(None)
        except KeyboardInterrupt:
            calls = sender.accumulator.waiting_calls()
            log.error("interrupted: %d produce() calls are not durable", calls)
            return
        except Exception:
            log.exception("closing the producer failed")
