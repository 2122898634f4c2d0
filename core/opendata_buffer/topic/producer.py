"""Produces into a topic: each record into the partition that its key is mapped to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from opendata_buffer import mapping
from opendata_buffer.broker.network import Network
from opendata_buffer.closing import ClosedAtEnd
from opendata_buffer.commit.durability import WriteHandle
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.mapping import Keys, Mapping
from opendata_buffer.producer.call import Call
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores import Store
from opendata_buffer.topic.current import CurrentTopic
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.topic.handle import TopicHandle, TopicWatcher
from opendata_buffer.topic.pool import ProducerPool
from opendata_buffer.topic.split import split
from opendata_buffer.topic.topic import Topic

if TYPE_CHECKING:
    from opendata_buffer.topic.split import Entries

__all__ = ["TopicProducer"]

REFRESH_S = 2.0
"""Age of the list of partitions at which it is read again."""


class TopicProducer(ClosedAtEnd):
    """Accepts entries and puts them into the partitions of a topic. Thread-safe, not fork-safe.

    ::

        with TopicProducer(ProducerConfig(store="s3://bucket/orders")) as producer:
            handle = producer.produce(payloads, keys=customers)
            handle.watcher.await_durable()

    Each partition has a :class:`Producer` of its own, and a broker of its own where brokers are
    used. Partitions that are added while it runs are written within seconds, those that drain no
    more.

    Args:
        config: Settings of each partition's producer, of which the partitions share
            ``max_buffered_bytes`` and ``max_buffered_inputs``.
        store: Use this store instead of opening ``config.store``.
        runtime: Clock and threads; the system's by default.
        network: How brokers are reached; WebSockets by default.
        refresh_s: Seconds after which the list of partitions is read again, in the background.

    Raises:
        InvalidInput: There is no topic; a setting or the URL is wrong.
        CorruptData: The topic's description cannot be read.
        StorageError: The store cannot be reached, or did not answer within ``cas_deadline_ms``.
    """

    def __init__(
        self,
        config: ProducerConfig,
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
        network: Network | None = None,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._config = config
        self._runtime = runtime or SystemRuntime()
        self._network = network
        topic = Topic.open(config, store=store, runtime=self._runtime)
        self._store = topic.store
        self._current = CurrentTopic(topic, self._runtime, refresh_s)
        self._pool = ProducerPool(self._open, self._runtime)
        # Any start, so that processes that begin together do not all begin at one partition.
        self._turn = int(self._runtime.random() * (1 << 20))

    def send(
        self,
        record: bytes | bytearray | memoryview,
        *,
        key: bytes | str | None = None,
        partitioner: Mapping | None = None,
        partition: str | None = None,
    ) -> WriteHandle:
        """Accept one record without metadata: the way to produce records one by one.

        ::

            for customer, record in orders:
                handle = producer.send(record, key=customer)

        Args:
            record: Bytes. Another bytes-like object is copied and may be reused at once.
            key: Records of one key go to one partition, in the order in which they are sent.
                Without one they go to the partitions in turn.
            partitioner: As for :meth:`produce`.
            partition: Its name or its number, whatever the key.

        Returns:
            The handle of the one partition that it went to, durable as
            :meth:`.Producer.send`'s.

        Raises:
            OpenDataBufferError, KeyboardInterrupt: As :meth:`produce`.
        """
        active = self._current.get().active
        self._pool.keep(active)
        keys = None if key is None else [key]
        (name,) = self._parted([record], keys, partitioner, partition, active)
        with self._pool.using([name]) as producers:
            return producers[name].send(record)

    def produce(
        self,
        entries: Entries,
        *,
        keys: Keys | None = None,
        partitioner: Mapping | None = None,
        partition: str | None = None,
        metadata: bytes = b"",
    ) -> TopicHandle:
        """Accept entries; those of one key keep their order while the partitions stay the same.

        Args:
            entries: Bytes-like objects, or an Arrow array of binary or string type, which is
                divided and encoded without a Python object per entry. They may be reused at once.
            keys: One for each entry: an Arrow column of binary or string type, or bytes and text.
                Without keys a call stays together and calls go to the partitions in turn.
            partitioner: From keys and names to indices into the names: ``modulo`` (default, the
                even one), ``rendezvous`` or ``random`` of :mod:`opendata_buffer.mapping`, or a
                function of your own. Use the same one for every call, in every process: order
                per key depends on it.
            partition: Put all entries into this partition, whatever their keys: its name or its
                number.
            metadata: Payload that the consumer gets with the entries, in each partition.

        Returns:
            One handle, durable when all parts are.

        Raises:
            InvalidInput: An entry or a key is null or of another type, there are not as many
                keys as entries, a part exceeds ``max_batch_bytes``, ``partition`` is none that
                is written, or the partitioner gave no indices. Nothing was accepted.
            StorageError: A partition that is written for the first time could not be reached.
                Nothing was accepted.
            Closed: The producer was closed, or made before this process was forked.
            KeyboardInterrupt: Parts of the call may have been accepted or not.
        """
        return self.produce_by(
            lambda _, producer, call: producer.accept(call),
            entries,
            keys=keys,
            partitioner=partitioner,
            partition=partition,
            metadata=metadata,
        )

    async def produce_async(
        self,
        entries: Entries,
        *,
        keys: Keys | None = None,
        partitioner: Mapping | None = None,
        partition: str | None = None,
        metadata: bytes = b"",
    ) -> TopicHandle:
        """As :meth:`produce`; while a partition's buffer is full, or a partition is written for
        the first time, it waits without blocking the event loop.

        ::

            handle = await producer.produce_async(payloads, keys=customers)  # accepted
            await handle                                                     # durable

        Calls that wait at the same time are accepted in any order: await one before the next
        where order matters. Of one that is cancelled while it waits, some partitions may have
        accepted their part.

        Raises:
            OpenDataBufferError: As :meth:`produce`.
        """
        if self._current.is_outdated:
            await asyncio.to_thread(self._current.get)
        active = self._current.get().active
        self._pool.keep(active)
        parts = self._parted(entries, keys, partitioner, partition, active)
        names = list(parts)
        if not self._pool.has(names):
            await asyncio.to_thread(self._pool.open_all, names)
        with self._pool.using(names) as producers:
            calls = {name: producers[name].prepare(part, metadata) for name, part in parts.items()}
            handles = {}
            for name, call in calls.items():
                handles[name] = await producers[name].accept_async(call)
        return self._joined(handles)

    def produce_by(
        self,
        accept: Callable[[str, Producer, Call], WriteHandle],
        entries: Entries,
        *,
        keys: Keys | None = None,
        partitioner: Mapping | None = None,
        partition: str | None = None,
        metadata: bytes = b"",
    ) -> TopicHandle:
        """As :meth:`produce`, for a caller who gives each part an identity.

        Args:
            accept: Called for each part, after all checks: with its partition, the producer of
                that, and the prepared call, which it has the producer accept.
            entries, keys, partitioner, partition, metadata: As for :meth:`produce`.

        Raises:
            OpenDataBufferError: As :meth:`produce`.
        """
        active = self._current.get().active
        self._pool.keep(active)
        parts = self._parted(entries, keys, partitioner, partition, active)
        with self._pool.using(list(parts)) as producers:
            # First all checks, then all parts: what is wrong is refused as a whole.
            calls = {name: producers[name].prepare(part, metadata) for name, part in parts.items()}
            handles = {name: accept(name, producers[name], call) for name, call in calls.items()}
        return self._joined(handles)

    def _joined(self, handles: dict[str, WriteHandle]) -> TopicHandle:
        times = [each.ingestion_time_ms for each in handles.values()]
        return TopicHandle(TopicWatcher(handles, self._runtime), min(times, default=0))

    def flush(self, timeout: float | None = None) -> None:
        """Make everything produced so far durable, in all partitions at once.

        Args:
            timeout: Seconds for all of them. Default: as :meth:`.Producer.flush`.

        Raises:
            FlushFailed: This or an earlier batch was given up, in whichever partition.
            TimeoutError: Not done after ``timeout`` seconds; the producer goes on trying.
            Closed: The producer was made before this process was forked.
        """
        self._pool.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Flush, then end the threads of all partitions. Free to repeat.

        Args:
            timeout: Seconds until what is not durable is given up. Default: as in :meth:`flush`.

        Raises:
            FlushFailed: As in :meth:`flush`. The producer is closed all the same.
        """
        self._pool.close(timeout)

    @property
    def description(self) -> TopicDescription:
        """The topic as this producer knows it; read again when it is older than ``refresh_s``."""
        return self._current.get()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of ``max_buffered_bytes`` that are taken by what is not yet settled."""
        return self._pool.buffered_bytes

    def _open(self, partition: str) -> Producer:
        config = Topic.config_of(partition, self._config)
        share = max(1, len(self._current.get().active))
        inputs = config.max_buffered_inputs
        config = replace(
            config,
            max_buffered_bytes=max(1, config.max_buffered_bytes // share),
            max_buffered_inputs=None if inputs is None else max(1, inputs // share),
        )
        return Producer(config, store=self._store, runtime=self._runtime, network=self._network)

    def _parted(
        self,
        entries: Entries,
        keys: Keys | None,
        partitioner: Mapping | None,
        partition: str | None,
        active: Sequence[str],
    ) -> dict[str, Entries]:
        if isinstance(entries, bytes | bytearray | memoryview | str):
            raise InvalidInput(
                f"entries is one {type(entries).__name__}: give a list of entries, [entry]"
            )
        if partition is not None:
            if partition not in active:
                partition = self._current.get().resolved(partition)
            if partition not in active:
                raise InvalidInput(
                    f"partition is {partition!r}: the topic's partitions that are written are "
                    f"{', '.join(active[:3])}{', ...' if len(active) > 3 else ''}"
                )
            return {partition: entries} if len(entries) else {}
        if keys is not None:
            return split(entries, keys, active, partitioner or mapping.modulo)
        if partitioner is not None and partitioner is not mapping.random:
            name = getattr(partitioner, "__name__", repr(partitioner))
            raise InvalidInput(f"partitioner {name} maps keys: give keys=, one for each entry")
        if not len(entries):
            return {}
        self._turn += 1  # two threads that take the same turn do no harm
        return {active[self._turn % len(active)]: entries}
