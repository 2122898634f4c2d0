"""Write to a topic: each record goes to the partition that its key is mapped to."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import Any, TypeAlias, TypedDict, Unpack

import pyarrow as pa

from opendata_buffer.arguments import checked, take_bytes, wrong_type
from opendata_buffer.config import ProducerConfig, ProducerSettings
from opendata_buffer.errors import Closed, FlushFailed, InvalidInput, OpenDataBufferError
from opendata_buffer.familiar_names import OF_PRODUCERS, FamiliarNames
from opendata_buffer.formats import BytesLike
from opendata_buffer.formats.arrow import listed
from opendata_buffer.internal_parts import internals, take_parts
from opendata_buffer.producer.batching import ProduceRequest
from opendata_buffer.producer.committer import OpenCommitter
from opendata_buffer.producer.handles import (
    Durable,
    OnDelivery,
    TopicHandle,
    WriteHandle,
    check_on_delivery,
)
from opendata_buffer.producer.producer import (
    MISSING,
    NO_METADATA,
    NameOfRfc,
    Producer,
    check_interpreter,
    given_records,
)
from opendata_buffer.producer.sharing import shared_committer
from opendata_buffer.runtime import Closeable, Runtime, SystemRuntime, in_parallel, locked
from opendata_buffer.topic import partitioner as partitioners
from opendata_buffer.topic.cached_topic import REFRESH_S, CachedTopic
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.topic.partitioner import Keys, Partitioner, Records, split
from opendata_buffer.topic.topic import Topic, partition_config

log = logging.getLogger(__name__)

STICKY_BYTES = 1 << 20
"""Bytes of records without a key after which :meth:`TopicProducer.send` moves on to the next
partition."""


class ProducerPool:
    """The open producers of a topic, by partition. Thread-safe.

    A producer is not closed while a call uses it. A call with an older list of partitions does not
    open a second producer of a partition before the first one is closed. Otherwise its records
    could overtake those of the first.

    Args:
        open_producer: Opens the producer of a partition.
        runtime: Threads.
    """

    def __init__(self, open_producer: Callable[[str], Producer], runtime: Runtime) -> None:
        self._open_producer = open_producer
        self._runtime = runtime
        self._condition = runtime.condition()
        self._open: dict[str, Producer] = {}
        self._opening: set[str] = set()
        self._used: Counter[str] = Counter()  # calls that use a partition's producer
        self._leaving: set[str] = set()  # open producers to close once they are not in use
        self._closing: dict[str, Producer] = {}
        self._lost: list[FlushFailed] = []  # of closed producers
        self._closed = False

    @contextmanager
    def using(self, names: Sequence[str]) -> Iterator[dict[str, Producer]]:
        """Keep the producers of some partitions open in the block.

        Producers that are not open yet are opened.

        Args:
            names: Names of the partitions.

        Yields:
            The producers, by partition.

        Raises:
            Closed: The pool was closed.
            OpenDataBufferError: A producer could not be opened.
        """
        self._acquire(names)
        try:
            opened = {name: self._open[name] for name in names if name in self._open}
            missing = [name for name in names if name not in opened]
            opened |= zip(missing, in_parallel(self._runtime, self._open_one, missing), strict=True)
            yield opened
        finally:
            self._release(names)

    def has(self, names: Sequence[str]) -> bool:
        """Return whether all of these are open, so that :meth:`using` them does not block."""
        return all(name in self._open for name in names)

    def open_all(self, names: Sequence[str]) -> None:
        """Open those that are not open."""
        with self.using(names):
            pass

    def keep(self, active: Sequence[str]) -> None:
        """Close the producers of all other partitions, in the background."""
        for name in self._begin_leaving(active):
            self._runtime.spawn(
                lambda name=name: self._close_unused(name),  # type: ignore[misc]
                "opendata-buffer-drain",
            )

    def flush(self, timeout: float | None) -> None:
        """Flush all producers at once, and report earlier losses of closed producers.

        Args:
            timeout: Seconds for all of them together; None waits without a limit.

        Raises:
            FlushFailed: A batch was given up, in any partition.
            TimeoutError: Not done in time.
        """
        self._all(lambda producer: producer.flush(timeout))

    def close(self, timeout: float | None) -> None:
        """Close all producers at once. May be repeated.

        Args:
            timeout: Seconds to wait for the outcomes; None waits for all of them.

        Raises:
            FlushFailed, TimeoutError: As :meth:`flush`.
        """
        self._begin_closing()
        self._all(lambda producer: producer.close(timeout))

    def _all(self, call: Callable[[Producer], None]) -> None:
        failed: list[FlushFailed] = []
        others: list[Exception] = []

        def call_one(producer: Producer) -> None:
            try:
                call(producer)
            except FlushFailed as error:
                failed.append(error)
            except (OpenDataBufferError, TimeoutError) as error:
                others.append(error)

        producers = self.all_open()
        # Call all of them at once, whatever their number: the timeout applies to all together.
        in_parallel(self._runtime, call_one, producers, most=max(1, len(producers)))
        lost = self._lost + failed
        if lost:
            raise FlushFailed(
                sum(error.failed_calls for error in lost),
                lost[0].cause,
                sum(error.unknown_calls for error in lost),
                lost[0].hints[:-1],
            )
        if others:
            raise others[0]

    def _open_one(self, name: str) -> Producer:
        found = self._begin_opening(name)
        if found is not None:
            return found
        try:
            producer = self._open_producer(name)
            with self._condition:
                self._open[name] = producer
        finally:
            with self._condition:
                self._opening.discard(name)
                self._condition.notify_all()
        return producer

    def _close_unused(self, name: str) -> None:
        producer = self._await_unused(name)
        if producer is None:
            return
        lost: list[FlushFailed] = []
        try:
            producer.close()
        except FlushFailed as error:
            lost.append(error)
        finally:
            with self._condition:
                self._lost += lost
                del self._closing[name]
                self._condition.notify_all()
        log.info("partition %s drains: its producer has ended", name)

    @locked
    def _acquire(self, names: Sequence[str]) -> None:
        self._check_open()
        self._used.update(names)

    @locked
    def _release(self, names: Sequence[str]) -> None:
        self._used.subtract(names)
        self._condition.notify_all()

    @locked
    def _begin_opening(self, name: str) -> Producer | None:
        """Return the producer that another call has opened in the meantime.

        Returns:
            None if the caller has to open it.
        """
        while name in self._opening or name in self._closing:
            self._condition.wait()
        self._check_open()  # a producer opened after close() would never be closed
        if name not in self._open:
            self._opening.add(name)
        return self._open.get(name)

    @locked
    def _begin_leaving(self, active: Sequence[str]) -> list[str]:
        kept = set(active)
        if not self._leaving.isdisjoint(kept):
            # A call with an older list of partitions has told a newer partition to leave.
            self._leaving -= kept
            self._condition.notify_all()
        gone = [name for name in self._open if name not in kept and name not in self._leaving]
        self._leaving.update(gone)
        return gone

    @locked
    def _await_unused(self, name: str) -> Producer | None:
        """Wait until a leaving producer is unused, and return it for the caller to close.

        Returns:
            None if the partition is active again, so that its producer stays open.
        """
        while name in self._leaving and self._used[name]:
            self._condition.wait()
        if name not in self._leaving:
            return None
        self._leaving.discard(name)
        producer = self._closing[name] = self._open.pop(name)
        return producer

    @locked
    def _begin_closing(self) -> None:
        self._closed = True
        while self._opening:
            self._condition.wait()

    @locked
    def all_open(self) -> list[Producer]:
        """Return all producers that are open or about to be closed."""
        return [*self._open.values(), *self._closing.values()]

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("the producer of the topic is closed: make a new one")


OnDeliveries: TypeAlias = OnDelivery[dict[str, Durable]]


class ProduceOptions(TypedDict, total=False):
    """The options of a call, in addition to its records; see :meth:`TopicProducer.produce`."""

    entries: Records
    key: bytes | str | None
    keys: Keys | None
    partitioner: Partitioner | None
    partition: str | int | None
    metadata: BytesLike
    on_delivery: OnDeliveries | None


class TopicProducer(FamiliarNames, Closeable):
    """A producer that writes records to the partitions of a topic. Thread-safe, not fork-safe.

    ::

        with TopicProducer("s3://bucket/orders") as producer:
            handle = producer.produce(payloads, keys=customers)
            handle.result()

    Each partition has its own :class:`Producer`, and its own broker where brokers are used. The
    producer follows added and draining partitions within seconds.

    Args:
        config: The topic's URL, or the settings of each partition's producer. The partitions share
            its ``max_buffered_bytes``.
        refresh_s: Seconds after which the list of partitions is read again, in the background.
            Default 2.
        **settings: Fields of the configuration, by name.

    Raises:
        InvalidInput: The topic does not exist, or a setting or the URL is wrong.
        CorruptData, StorageError: The topic's description cannot be read.
    """

    _instead = OF_PRODUCERS

    @checked
    def __init__(
        self,
        config: ProducerConfig | str | PathLike[str],
        *,
        refresh_s: float = REFRESH_S,
        **settings: Unpack[ProducerSettings],
    ) -> None:
        check_interpreter()  # check now instead of when a partition is first written
        given, parts = take_parts(settings, "store", "runtime", "open_committer", "topic")
        config = ProducerConfig.of(config, given)
        self._config = config
        self._runtime: Runtime = parts.runtime or SystemRuntime()
        self._open_committer: OpenCommitter = parts.open_committer or self._default_committer()
        topic: Topic = parts.topic or Topic.open(config, store=parts.store, runtime=self._runtime)
        self._store = topic.store
        self._topic = CachedTopic(topic, self._runtime, refresh_s)
        self._pool = ProducerPool(self._open, self._runtime)
        # Begin at random, so that processes that start together write to different partitions.
        self._calls = int(self._runtime.random() * (1 << 20))
        self._sticky, self._sticky_until, self._sticky_left = "", 0.0, 0
        """The partition of single records without a key, its end time, and its remaining bytes."""

    def _default_committer(self) -> OpenCommitter:
        """Return the function that opens the committer if the caller names none.

        Here it is the committer of this process, without a broker. The public class overrides it;
        see :mod:`opendata_buffer.assembly`.
        """
        return shared_committer

    def send(
        self,
        record: bytes | bytearray | memoryview,
        *,
        key: bytes | str | None = None,
        partitioner: Partitioner | None = None,
        partition: str | int | None = None,
        metadata: BytesLike = NO_METADATA,
    ) -> WriteHandle:
        """Accept one record; for records that are produced one by one.

        Args:
            record: Bytes. Another bytes-like object is copied and may be reused at once.
            key: Records of one key go to one partition, in the order in which they are sent.
                Records without a key go to one partition for a flush interval or
                :data:`STICKY_BYTES` (1 MiB), and then to the next one, as with Kafka's sticky
                partitioner. If each of them went to another partition, each would become an object.
            partitioner: As for :meth:`produce`.
            partition: Its name or its number, such as 3, whatever the key.
            metadata: As for :meth:`produce`.

        Returns:
            A handle, durable when the record is.

        Raises:
            OpenDataBufferError, KeyboardInterrupt: As :meth:`produce`.
        """
        if key is not None and not isinstance(key, str):
            key = take_bytes("key", key)
        keys = None if key is None else [key]
        sticky = keys is None and partition is None and partitioner is None
        (name,) = self._parts([record], keys, partitioner, partition, sticky=sticky)
        with self._pool.using([name]) as producers:
            handle = producers[name].send(record, metadata)
        if sticky:
            self._sticky_left -= len(record)
        return handle

    def produce(
        self,
        records: Records = MISSING,
        *,
        key: bytes | str | None = None,
        keys: Keys | None = None,
        partitioner: Partitioner | None = None,
        partition: str | int | None = None,
        metadata: BytesLike = NO_METADATA,
        on_delivery: OnDeliveries | None = None,
        **others: Unpack[NameOfRfc],
    ) -> TopicHandle:
        """Accept records; those of one key keep their order while the partitions stay the same.

        ::

            producer.produce([b"a", b"b"], keys=["customer-1", "customer-2"])

        Args:
            records: Bytes-like objects, or one of them, or an Arrow array of binary or string type,
                which is divided and encoded without a Python object per record. They may be reused
                at once.
            key: One key for all records of the call.
            keys: One for each record: an Arrow column of binary or string type, or bytes and text.
                Without keys all records of a call go to one partition, and calls go round robin.
            partitioner: ``modulo`` (default, the most even), ``rendezvous`` or ``random`` of
                :mod:`opendata_buffer.topic.partitioner`, or a function of your own. Use the same
                one for every call, in every process, because the order per key depends on it.
            partition: Name or number of one partition for all records, whatever their keys.
            metadata: Bytes that the consumer gets with the records, in each partition; at most 1
                MiB.
            on_delivery: Called once, with None and one :class:`Durable` for each partition, or with
                the error and None. A thread of a producer calls it, as in
                :meth:`.Handle.add_done_callback`.
            **others: ``entries``, the RFC's name for ``records``.

        Returns:
            One handle, durable when all parts are.

        Raises:
            InvalidInput: Records, keys, the partition or the partitioner's indices are wrong, or a
                part exceeds ``max_batch_bytes``. Nothing was accepted.
            StorageError: A partition that is written for the first time could not be reached.
                Nothing was accepted.
            Closed: The producer was closed, or made before this process was forked.
            KeyboardInterrupt: It is not known which parts of the call were accepted.
        """
        return self._produce_by(
            lambda name, producer, call: producer._accept(call),
            given_records("produce", records, others),  # type: ignore[arg-type]
            key=key,
            keys=keys,
            partitioner=partitioner,
            partition=partition,
            metadata=metadata,
            on_delivery=on_delivery,
        )

    async def produce_async(
        self, records: Records = MISSING, **options: Unpack[ProduceOptions]
    ) -> TopicHandle:
        """Accept records as :meth:`produce` does, and wait without blocking the event loop.

        ::

            handle = await producer.produce_async(payloads, keys=customers)  # accepted
            await handle                                                     # durable

        Calls that wait at the same time are accepted in any order. If a call is cancelled while it
        waits, some partitions may have accepted their part of it.

        Args:
            records: As for :meth:`produce`.
            **options: As for :meth:`produce`.

        Returns:
            One handle, durable when all parts are.

        Raises:
            OpenDataBufferError: As :meth:`produce`.
        """
        if self._topic.is_outdated:
            await asyncio.to_thread(self._topic.get)
        on_delivery = options.pop("on_delivery", None)
        check_on_delivery(on_delivery)
        parts = self._parts(records, **options)
        names = list(parts)
        if not self._pool.has(names):
            await asyncio.to_thread(self._pool.open_all, names)
        with self._pool.using(names) as producers:
            calls = {name: producers[name]._prepare(*part) for name, part in parts.items()}
            handles = {name: await producers[name]._accept_async(calls[name]) for name in names}
        return TopicHandle(handles, self._runtime)._report_to(on_delivery)

    def _produce_by(
        self,
        accept: Callable[[str, Producer, ProduceRequest], WriteHandle],
        records: Records = MISSING,
        **options: Unpack[ProduceOptions],
    ) -> TopicHandle:
        """Accept records as :meth:`produce` does, with a function that accepts each part.

        Args:
            accept: Called with the partition, its producer and the prepared call, which it passes
                to :meth:`.Producer._accept`. Returns the handle.
            records: As for :meth:`produce`.
            **options: As for :meth:`produce`.

        Returns:
            One handle, durable when all parts are.

        Raises:
            OpenDataBufferError: As :meth:`produce`.
        """
        on_delivery = options.pop("on_delivery", None)
        check_on_delivery(on_delivery)
        parts = self._parts(records, **options)
        with self._pool.using(list(parts)) as producers:
            # Check all parts before the first one is accepted.
            calls = {name: producers[name]._prepare(*part) for name, part in parts.items()}
            handles = {name: accept(name, producers[name], call) for name, call in calls.items()}
        return TopicHandle(handles, self._runtime)._report_to(on_delivery)

    @checked
    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything produced so far is durable, as :meth:`.Producer.flush` does.

        Args:
            timeout: Seconds to wait. None (default) waits until each batch is durable or was given
                up.

        Raises:
            FlushFailed: This or an earlier batch was given up, in any partition.
            TimeoutError: Not done in time; the producer goes on trying.
            Closed: The producer was made before this process was forked.
        """
        self._pool.flush(timeout)

    @checked
    def close(self, timeout: float | None = None) -> None:
        """Flush, then end the threads of all partitions. May be repeated.

        Args:
            timeout: Seconds until everything that is not durable is given up. None (default) waits
                as long as :meth:`flush`.

        Raises:
            FlushFailed: As in :meth:`flush`. The producer is closed anyway.
        """
        self._pool.close(timeout)

    @property
    def description(self) -> TopicDescription:
        """The topic as this producer knows it; read again when it is older than ``refresh_s``."""
        return self._topic.get()

    @property
    def buffered_bytes(self) -> int:
        """Bytes that are accepted, and neither durable nor given up."""
        return sum(producer.buffered_bytes for producer in self._pool.all_open())

    def _open(self, partition: str) -> Producer:
        config = partition_config(partition, self._config)
        share = max(1, len(self._topic.get().active))
        config = replace(config, max_buffered_bytes=max(1, config.max_buffered_bytes // share))
        parts = internals(
            store=self._store, runtime=self._runtime, open_committer=self._open_committer
        )
        return Producer(config, **parts)

    def _next_partition(self, active: Sequence[str]) -> str:
        self._calls += 1  # not atomic, but harmless: two threads use one partition
        return active[self._calls % len(active)]

    def _sticky_partition(self, active: Sequence[str]) -> str:
        # Without a lock, two threads may use two partitions at the same time, which is harmless.
        now = self._runtime.monotonic()
        ended = now >= self._sticky_until or self._sticky_left <= 0
        if ended or self._sticky not in active:
            self._sticky_until = now + self._config.flush_interval_ms / 1000
            self._sticky_left = STICKY_BYTES
            self._sticky = self._next_partition(active)
        return self._sticky

    def _parts(
        self,
        records: Records = MISSING,
        keys: Keys | None = None,
        partitioner: Partitioner | None = None,
        partition: str | int | None = None,
        metadata: BytesLike = NO_METADATA,
        *,
        key: bytes | str | None = None,
        sticky: bool = False,
        **others: Any,
    ) -> dict[str, tuple[Records, BytesLike]]:
        """Return the records and the metadata of each partition that gets some records."""
        records = given_records("produce", records, others)
        if key is not None and keys is not None:
            raise InvalidInput(
                "key and keys are both given: use key for all records of the call, or keys with "
                "one for each record"
            )
        if key is not None and not isinstance(key, str):
            key = take_bytes("key", key)
        # Check here and not in the producer of each part, because a call may have no parts.
        metadata = take_bytes("metadata", metadata)
        if partitioner is not None and not callable(partitioner):
            raise wrong_type("partitioner", partitioner, "a function such as partitioner.modulo")
        active = self._topic.get().active
        self._pool.keep(active)
        if not isinstance(records, pa.RecordBatch):
            records = listed(records)
        if partition is not None:
            if not isinstance(partition, str) or partition not in active:
                partition = self._topic.get().resolved(partition)
            if partition not in active:
                raise InvalidInput(
                    f"partition is {partition!r}: the topic's partitions that are written are "
                    f"{', '.join(active[:3])}{', ...' if len(active) > 3 else ''}"
                )
            parts = {partition: records}
        elif keys is not None:
            parts = split(records, keys, active, partitioner or partitioners.modulo)
        elif key is not None:
            (name,) = split([b""], [key], active, partitioner or partitioners.modulo)
            parts = {name: records}
        elif partitioner is not None and partitioner is not partitioners.random:
            name = getattr(partitioner, "__name__", repr(partitioner))
            raise InvalidInput(f"partitioner {name} maps keys: give keys=, one for each record")
        else:
            choose = self._sticky_partition if sticky else self._next_partition
            parts = {choose(active): records}
        return {name: (part, metadata) for name, part in parts.items() if len(part)}
