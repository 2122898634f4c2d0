"""The producer's interface (OpenData RFC 0001, Producer).

``send()`` and ``produce()`` check and encode a call in the calling thread and add it to the open
buffer of the next batch (:mod:`.batching`). Everything after that happens in the threads of the
producer's :class:`.Sender`: batches are uploaded and appended to the queue in the order of the
calls. The call's handle (:mod:`.handles`) shows the outcome.
"""

from __future__ import annotations

import os
import sys
from os import PathLike
from typing import Any, TypedDict, Unpack
from uuid import UUID

from opendata_buffer import errors, metrics
from opendata_buffer.arguments import checked, take_bytes, wrong_type
from opendata_buffer.config import ProducerConfig, ProducerSettings
from opendata_buffer.familiar_names import OF_PRODUCERS, FamiliarNames, unknown_argument
from opendata_buffer.formats import BytesLike
from opendata_buffer.formats.batch import Transaction
from opendata_buffer.internal_parts import take_parts
from opendata_buffer.messages import parse_uuid
from opendata_buffer.producer import lifecycle
from opendata_buffer.producer.batching import (
    PIECE_HELD,
    RECORD_HELD,
    Item,
    Piece,
    ProduceRequest,
    Records,
    block_bytes,
    encode_entries,
    encode_list,
)
from opendata_buffer.producer.committer import OpenCommitter
from opendata_buffer.producer.handles import (
    Durable,
    OnDelivery,
    WriteHandle,
    check_on_delivery,
    wakeable,
)
from opendata_buffer.producer.sender import Sender
from opendata_buffer.producer.sharing import shared_committer
from opendata_buffer.runtime import Closeable, Runtime, SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

NO_METADATA = b""

MISSING: Any = object()
"""The default of ``records``, which every call has to give."""


class NameOfRfc(TypedDict, total=False):
    """The records of a call under the name that they have in OpenData RFC 0001."""

    entries: Records


def given_records(call: str, records: Any, others: dict[str, Any]) -> Any:
    """Return the records of a call.

    Args:
        call: The name of the method.
        records: Its argument ``records``; :data:`MISSING` if there is none.
        others: Keywords that the method does not have.

    Returns:
        The records, which may have the name ``entries``.

    Raises:
        InvalidInput: There are no records, or they are given twice, or there is another keyword.
    """
    for name in others:
        if name != "entries":
            raise unknown_argument(call, name)
    if "entries" in others:
        if records is not MISSING:
            raise errors.InvalidInput(
                "entries and records are two names of one argument: give only one of them"
            )
        return others["entries"]
    if records is MISSING:
        raise errors.InvalidInput(f"{call}() has no records: give a list of bytes")
    return records


MAX_METADATA_BYTES = 1024 * 1024
"""Largest metadata of a call, in bytes. Each append rewrites it while it is in the queue."""


def check_interpreter() -> None:
    """Refuse a Python that runs without its global interpreter lock.

    Accepting a record takes no lock. It relies on the interpreter's lock: no other thread runs
    between reading and writing the number of free bytes (decision 0025).

    Raises:
        InvalidInput: This is a free-threaded build, and the lock is off.
    """
    # Python 3.13 added the function. Earlier versions always have the lock.
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    if is_enabled is not None and not is_enabled():
        raise errors.InvalidInput(
            f"this Python ({sys.executable}) runs without the global interpreter lock, which a "
            "producer relies on. Start it with PYTHON_GIL=1 in the environment or with "
            "'python -X gil=1', or use a build of Python that has the lock."
        )


class Producer(FamiliarNames, Closeable):
    """Accepts records, batches them and puts them into the queue. Thread-safe, not fork-safe.

    ::

        with Producer("s3://bucket/orders", compression="zstd") as producer:
            producer.produce([b"one", b"two"]).result()

    The producers that one process has for a queue append together, with the deadlines and the
    manifest limit of the first one.

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

    _instead = OF_PRODUCERS

    @checked
    def __init__(
        self,
        config: ProducerConfig | str | PathLike[str],
        **settings: Unpack[ProducerSettings],
    ) -> None:
        check_interpreter()
        given, parts = take_parts(settings, "store", "runtime", "open_committer")
        config = ProducerConfig.of(config, given)
        self._config = config
        self._pid = os.getpid()
        self._closed = False
        runtime: Runtime = parts.runtime or SystemRuntime()
        store: Store = parts.store or open_store(config.store, config.store_options)
        open_committer = parts.open_committer or self._default_committer()
        self._sender = Sender(config, store, runtime, open_committer)
        # Cached here because send() and produce() read them on every call.
        self._accumulator = self._sender.accumulator
        self._batcher = self._accumulator.batcher
        self._monotonic = runtime.monotonic
        where = {"queue": metrics.queue_label(store.url, config.manifest_path)}
        metrics.producer_buffered_bytes.watch(self, lambda producer: producer.buffered_bytes, where)
        if isinstance(runtime, SystemRuntime):
            lifecycle.register(self._sender)

    def _default_committer(self) -> OpenCommitter:
        """Return what opens the committer if the caller names none.

        Here: the committer of this process, without a broker. The public class overrides it; see
        :mod:`opendata_buffer.assembly`.
        """
        return shared_committer

    def send(
        self,
        record: bytes | bytearray | memoryview,
        metadata: BytesLike = NO_METADATA,
        key: None = None,
    ) -> WriteHandle:
        """Accept one record. Without metadata, this takes half a microsecond.

        ::

            for record in records:
                handle = producer.send(record)

        In all other respects it is ``produce([record])``. The calls of one millisecond share a
        handle.

        Args:
            record: Bytes. Another bytes-like object is copied, so the caller may reuse it at once.
            metadata: As for :meth:`produce`.
            key: Refused, because a queue has no keys; see :meth:`.TopicProducer.send`.

        Returns:
            A handle that waits until the record is durable.

        Raises:
            InvalidInput: As :meth:`produce`.
            Closed: As :meth:`produce`.
            KeyboardInterrupt: As :meth:`produce`.
        """
        if type(record) is bytes and metadata is NO_METADATA and key is None:
            handle = self._add_record(record)
            if handle is not None:
                return handle
        if key is not None:
            raise wrong_type("key", key, "TopicProducer.send(); a queue has no keys, leave it out")
        return self._accept(self._prepare([record], metadata))

    def _add_record(self, record: bytes) -> WriteHandle | None:
        """Add a record to the open buffer, without a lock; see :mod:`.batching`.

        Args:
            record: The record.

        Returns:
            The handle; None if the record is too large for a batch.
        """
        # No function is called between reading `buffer.left` and writing it, so no other thread can
        # subtract in between. The variable `append` saves 30 ns over calling `buffer.append(...)`.
        monotonic = self._monotonic
        now = monotonic()
        batcher = self._batcher
        buffer = batcher.buffer
        left = buffer.left - len(record) - RECORD_HELD
        if left >= 0 and now < buffer.until:
            buffer.left = left
            append = buffer.append
            append(record)
            if batcher.buffer is buffer:
                return buffer.handle
            return self._accumulator.add_item(record, buffer)
        return self._add_slowly(record)

    def _add_piece(self, piece: Piece) -> WriteHandle | None:
        """Add encoded records and their number to the open buffer, as :meth:`_add_record` does."""
        monotonic = self._monotonic
        now = monotonic()
        batcher = self._batcher
        buffer = batcher.buffer
        left = buffer.left - len(piece[0]) - PIECE_HELD
        if left >= 0 and now < buffer.until:
            buffer.left = left
            buffer.more += piece[1] - 1
            buffer.pieces += 1
            append = buffer.append
            append(piece)
            if batcher.buffer is buffer:
                return buffer.handle
            return self._accumulator.add_item(piece, buffer)
        return self._add_slowly(piece)

    def _add_slowly(self, item: Item) -> WriteHandle | None:
        """Add a record or a piece with the accumulator's lock."""
        self._check_process()
        if block_bytes(item) > self._config.max_batch_bytes:
            return None
        return self._accumulator.add_item(item)

    def produce(
        self,
        records: Records = MISSING,
        metadata: BytesLike = NO_METADATA,
        transaction: Transaction | None = None,
        message: UUID | None = None,
        on_delivery: OnDelivery[Durable] | None = None,
        **others: Unpack[NameOfRfc],
    ) -> WriteHandle:
        """Accept records. They keep their order. Blocks while the buffer is full.

        ::

            handle = producer.produce([b"one", b"two"], metadata=b"orders")  # accepted
            print(handle.result(timeout=30).sequence)                        # durable

        Args:
            records: Bytes-like objects, or one of them, or an Arrow array of binary or string type,
                which is encoded without a Python object per record. The caller may reuse them at
                once.
            metadata: Bytes that the consumer gets with exactly these records; at most 1 MiB.
            transaction: Gives the call a batch of its own with this identity. If it is produced
                again, by this process or by the one that takes over, a reader with a transaction
                filter drops the second batch. The batch numbers of one app must rise. Only one live
                producer may use an app: if two produce the same batch at the same moment, it can be
                queued twice in a row, which reads as one transaction.
            message: Gives the call a batch of its own that is this message: a version 1 UUID of
                producer, clock and flags, see :mod:`opendata_buffer.messages`. Messages enter the
                queue in the order of the calls. The clocks of one producer must rise from call to
                call, because readers take a lower one for a duplicate. With a message,
                ``transaction`` only names its writer. A :class:`.Publisher` does all this.
            on_delivery: Called once, with ``(None, durable)`` or ``(error, None)``. A thread of the
                producer calls it, as in :meth:`.Handle.add_done_callback`.
            **others: ``entries``, the RFC's name for ``records``.

        Returns:
            A handle that waits until the records are durable.

        Raises:
            InvalidInput: A record or the metadata is not ``bytes``, ``bytearray`` or
                ``memoryview``, the call exceeds ``max_batch_bytes``, or ``message`` is not a
                version 1 UUID. Nothing of the call was accepted.
            Closed: The producer was closed, or was made before this process was forked.
            KeyboardInterrupt: The call was interrupted. Its records may have been accepted. Earlier
                calls are not affected.
            FlushFailed: An earlier transaction failed. Later ones would be taken for repeats.
        """
        # A call of a few records takes half a microsecond, so it is told from all others first.
        # No argument is keyword-only, which saves 60 ns per call. `others`, which is there to name
        # the right keyword for a wrong one, costs 40 ns.
        # Compare by identity, so that a 0, an "" or a None is checked like any other value.
        given: Any = records
        kind = type(given)
        if (
            (kind is list or kind is tuple)
            and metadata is NO_METADATA
            and transaction is None
            and message is None
            and on_delivery is None
            and not others
        ):
            if len(given) == 1:
                record = given[0]
                if type(record) is bytes and (handle := self._add_record(record)) is not None:
                    return handle
            elif (piece := encode_list(given)) is not None:
                handle = self._add_piece(piece)
                if handle is not None:
                    return handle
        if others or records is MISSING:
            records = given_records("produce", records, others)  # type: ignore[arg-type]
        if on_delivery is not None:
            check_on_delivery(on_delivery)
            return self.produce(records, metadata, transaction, message)._report_to(on_delivery)
        return self._accept(
            self._prepare(records, metadata, transaction=transaction, message=message)
        )

    async def produce_async(
        self,
        records: Records = MISSING,
        metadata: BytesLike = NO_METADATA,
        *,
        transaction: Transaction | None = None,
        message: UUID | None = None,
        on_delivery: OnDelivery[Durable] | None = None,
        **others: Unpack[NameOfRfc],
    ) -> WriteHandle:
        """Accept records like :meth:`produce`, without blocking the event loop.

        ::

            handle = await producer.produce_async([record])  # accepted
            await handle                                     # durable

        While the buffer is full, the call waits. Calls that wait at the same time are accepted in
        any order; if order matters, await each call before you make the next one. A call that is
        cancelled while it waits is not accepted.

        Args:
            records: As for :meth:`produce`.
            metadata: As for :meth:`produce`.
            transaction: As for :meth:`produce`.
            message: As for :meth:`produce`.
            on_delivery: As for :meth:`produce`.
            **others: As for :meth:`produce`.

        Returns:
            A handle that waits until the records are durable.

        Raises:
            OpenDataBufferError: As :meth:`produce`.
        """
        records = given_records("produce_async", records, others)  # type: ignore[arg-type]
        check_on_delivery(on_delivery)
        handle = await self._accept_async(
            self._prepare(records, metadata, transaction=transaction, message=message)
        )
        return handle._report_to(on_delivery)

    async def _accept_async(self, request: ProduceRequest) -> WriteHandle:
        """Accept a prepared request as :meth:`_accept` does, without blocking the event loop."""
        while True:
            room, wake = wakeable()
            handle = self._accumulator.accept_now(request, wake)
            if handle is not None:
                return handle
            await room

    def _prepare(
        self,
        records: Records,
        metadata: BytesLike = NO_METADATA,
        *,
        transaction: Transaction | None = None,
        message: UUID | None = None,
    ) -> ProduceRequest:
        """Check and encode a call; the first half of :meth:`produce`. Nothing is accepted yet.

        Args:
            records: As for :meth:`produce`.
            metadata: As for :meth:`produce`.
            transaction: As for :meth:`produce`.
            message: As for :meth:`produce`.

        Returns:
            The encoded call, to pass to :meth:`_accept`.

        Raises:
            InvalidInput: As :meth:`produce`.
            Closed: The producer was made before this process was forked.
        """
        self._check_process()
        metadata = take_bytes("metadata", metadata)
        if not isinstance(transaction, Transaction | None):
            raise wrong_type("transaction", transaction, "a Transaction")
        if not isinstance(message, UUID | None):
            raise wrong_type("message", message, "a UUID")
        if len(metadata) > MAX_METADATA_BYTES:
            raise errors.InvalidInput(
                f"metadata has {len(metadata)} bytes: use at most {MAX_METADATA_BYTES}; it is "
                "rewritten with every append. Put large data into the records."
            )
        block, count = encode_entries(records)
        most = self._config.max_batch_bytes
        if len(block) > most:
            what, fix = f"{count} records of one call take", "split the call"
            if count == 1:
                what, fix = "a record takes", "store it elsewhere and produce its name, or split it"
            raise errors.InvalidInput(
                f"{what} {len(block)} bytes in a batch, and a batch has at most {most}: {fix}"
            )
        if message is not None:
            parse_uuid(message)
        return ProduceRequest(block, count, metadata, 0, transaction, message)

    def _accept(self, request: ProduceRequest) -> WriteHandle:
        """Accept a prepared request; the second half of :meth:`produce`.

        Blocks while the buffer is full.

        Args:
            request: The result of :meth:`_prepare`.

        Returns:
            The handle of the call.

        Raises:
            OpenDataBufferError: As :meth:`produce`.
        """
        return self._accumulator.accept(request)

    @checked
    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything produced so far is durable.

        Args:
            timeout: Seconds to wait. None (default) waits until each batch is durable or was given
                up. This takes at most ``delivery_timeout_ms`` and, if an append has begun by then,
                the time that the append may take.

        Raises:
            FlushFailed: A batch was given up, in this flush or earlier. A producer that has lost a
                batch raises it at every flush and at close (failures F29, F30).
            TimeoutError: Something is not durable after ``timeout`` seconds. The producer goes on
                trying.
            Closed: The producer was made before this process was forked.
        """
        self._check_process()
        self._accumulator.flush(timeout)
        self._accumulator.check()

    @checked
    def close(self, timeout: float | None = None) -> None:
        """Flush, then end the threads.

        A second call does nothing, and neither does a call in a forked child. If the call is
        interrupted (Ctrl-C), the threads upload and append the accepted records, and then end.
        Call it again to wait for them.

        Args:
            timeout: Seconds until everything that is not durable is given up: its handles raise
                ``Closed``, or ``CommitStateUnknown`` if its append has begun. The call returns
                within a second after that. None (default) waits as long as :meth:`flush`.

        Raises:
            FlushFailed: As in :meth:`flush`. The producer is closed anyway.
        """
        if self._pid != os.getpid() or self._closed:
            return
        self._sender.close(timeout)
        self._closed = True
        metrics.producer_buffered_bytes.unwatch(self)
        lifecycle.forget(self._sender)
        self._accumulator.check()

    @property
    def buffered_bytes(self) -> int:
        """How many of ``max_buffered_bytes`` are taken by batches without an outcome."""
        return self._accumulator.held_bytes()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise errors.Closed(
                f"this producer belongs to process {self._pid}, which forked this one: its "
                "threads are not here. Make a producer in each process, after the fork."
            )
