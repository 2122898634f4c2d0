"""Where ``consume`` takes batches from: as the owner of a queue or a topic, or only looking."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.start import EARLIEST, Start
from opendata_buffer.cli.pipe import Written
from opendata_buffer.concurrency import together
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.fetch import ArrowBatch, BatchDescriptor, FetchHandle, PooledBatch
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.consumer.read_ahead import fetch_many, read_ahead
from opendata_buffer.errors import DataLoss, PoisonBatch, QueueReset
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.runtime import Runtime
from opendata_buffer.topic.consumer import TopicArrowBatch, TopicConsumer, round_robin

__all__ = ["ObservedPartition", "ObservingReader", "ObservingTopic", "OwningReader", "OwningTopic"]

READ_AHEAD_BYTES = 64 * 1024 * 1024
"""Stored batches that are held while one is written out."""

LOOK = 256
"""Entries of a partition that one look takes at most."""

_TAKEN = "The queue's consumer took them. Start with --from earliest to look at what is left."


class OwningReader:
    """Reads as the queue's consumer: what was written out leaves the queue."""

    def __init__(self, consumer: Consumer, runtime: Runtime) -> None:
        self._consumer = consumer
        self._handle = consumer.fetch_handle()
        self._runtime = runtime

    def read(self, limit: int) -> Iterable[ArrowBatch]:
        """The consumer's next batches; raises as ``Consumer.next_batch``."""
        group = self._consumer.next_descriptors(limit)
        return _fetch(self._handle.fetch_arrow, group, self._runtime)

    def acknowledge(self, written: Sequence[Written]) -> None:
        """Raises as ``Consumer.ack_through``."""
        self._consumer.ack_through(written[-1].sequence)


class OwningTopic:
    """Reads as the topic's consumer: what was written out leaves its partition."""

    def __init__(self, consumer: TopicConsumer) -> None:
        self._consumer = consumer

    def read(self, limit: int) -> Iterator[ArrowBatch]:
        """The next batches, partition by partition; raises as ``TopicConsumer.next_batch``."""
        count = 0
        while count < limit and (batch := self._consumer.next_arrow_batch()) is not None:
            count += 1
            yield batch
        if not count:
            # Nothing to do but to let everything go that was written out.
            self._consumer.flush()

    def acknowledge(self, written: Sequence[Written]) -> None:
        """Raises as ``TopicConsumer.ack``."""
        for each in written:
            self._consumer.ack(each)


class ObservingReader:
    """Reads without owning the queue: takes no epoch over and acknowledges nothing.

    Args:
        read: The manifest as it is now.
        key: Its name, for messages.
        handle: Fetches batches.
        runtime: Threads of the read-ahead.
        last_acked_sequence: Start after it; None starts at the oldest entry.
        start: Start at this sequence instead.
    """

    def __init__(
        self,
        read: Callable[[], Manifest],
        key: str,
        handle: FetchHandle,
        runtime: Runtime,
        last_acked_sequence: int | None,
        *,
        start: int | None = None,
    ) -> None:
        self._read = read
        self._key = key
        self._handle = handle
        self._runtime = runtime
        self._next = start if last_acked_sequence is None else last_acked_sequence + 1

    def read(self, limit: int) -> Iterable[ArrowBatch]:
        """The next batches, at most ``limit``; none when there are none yet.

        Raises:
            DataLoss: The next one was dequeued by the queue's consumer meanwhile.
            QueueReset: The queue ends before the start.
        """
        manifest = self._read()
        start = manifest.first_sequence if self._next is None else self._next
        if start < manifest.first_sequence:
            raise DataLoss(self._key, start, manifest.first_sequence, _TAKEN)
        if start > manifest.next_sequence:
            raise QueueReset(
                f"cannot start after sequence {start - 1}: manifest {self._key!r} ends at "
                f"{manifest.next_sequence - 1}. The position belongs to another queue; start "
                "without --last-acked-sequence."
            )
        entries = manifest.entries(start=start, limit=limit)
        self._next = start + len(entries)
        group = [BatchDescriptor.of(entry) for entry in entries]
        return _fetch(self._handle.fetch_arrow, group, self._runtime)

    def acknowledge(self, written: Sequence[Written]) -> None:
        """Does nothing: the batches stay in the queue."""


class ObservedPartition:
    """What a topic's consumer would be given of one partition, without owning it.

    Args:
        observer: Looks at its manifest.
        handle: Fetches its batches.
        start: Where to begin.
    """

    def __init__(self, observer: Observer, handle: FetchHandle, start: Start) -> None:
        config = observer.config
        self.name = config.data_path_prefix
        self.ready: deque[BatchDescriptor] = deque()
        self._key = config.manifest_path
        self._observer = observer
        self.pace = handle.pace()
        self._handle = handle
        self._start = start
        self._rule = ReadCommitted(self.name)
        self._begin = 0
        self._next: int | None = None

    def look(self) -> bool:
        """Put what is to be delivered into :attr:`ready`; whether anything was new.

        Raises:
            DataLoss: The topic's consumer took what comes next.
            InvalidInput: It does not have the sequence to begin with.
        """
        if self.ready:
            return True
        manifest = self._observer.find()
        if manifest is None:
            self._start = Start(EARLIEST)  # what it will have came after this look
            return False
        if manifest.sealed:
            return False
        if self._next is None:
            # All that is queued is offered to the rule, also what lies before the start: of a
            # transaction the acknowledgement alone does not say which batches it lets through.
            self._next = manifest.first_sequence
            self._begin = self._start.sequence_in(manifest, self._key)
        needed = self._rule.floor(self._next)
        if manifest.first_sequence > needed:
            raise DataLoss(self._key, needed, manifest.first_sequence, _TAKEN)

        def replay(begin: int, end: int) -> list[tuple[int, str]]:
            return [(each.sequence, each.location) for each in manifest.entries(begin, end - begin)]

        entries = manifest.entries(self._next, LOOK)
        for entry in entries:
            for sequence in self._rule.offer(entry.sequence, entry.location, replay):
                if sequence >= self._begin:
                    self.ready += map(BatchDescriptor.of, manifest.entries(sequence, 1))
        self._next += len(entries)
        return bool(entries)

    def fetch(self, descriptor: BatchDescriptor) -> PooledBatch:
        """Fetch one batch as it is stored; from any thread. Its errors name the partition."""
        try:
            return self._handle.fetch_pooled(descriptor)
        except PoisonBatch as error:
            raise error.of(self.name) from error

    def decode(self, stored: PooledBatch) -> TopicArrowBatch:
        """What :meth:`fetch` gave; its errors name the partition, too."""
        try:
            found = self._handle.decode_arrow(stored)
        except PoisonBatch as error:
            raise error.of(self.name) from error
        return TopicArrowBatch(
            found.values, found.sequence, found.location, found.metadata, partition=self.name
        )


class ObservingTopic:
    """Reads a topic without owning any of it, partitions in turn.

    Args:
        listed: The topic's partitions as they are now.
        opened: Makes what looks at one of them; told whether it was added after the first look.
        runtime: Threads.
    """

    def __init__(
        self,
        listed: Callable[[], Sequence[str]],
        opened: Callable[[str, bool], ObservedPartition],
        runtime: Runtime,
    ) -> None:
        self._listed = listed
        self._opened = opened
        self._runtime = runtime
        self._partitions: dict[str, ObservedPartition] = {}
        self._last: str | None = None

    def read(self, limit: int) -> Iterable[ArrowBatch]:
        """The next batches; raises as :meth:`ObservedPartition.look`."""
        partitions = self._partitions
        added = bool(partitions)
        for name in self._listed():
            if name not in partitions:
                partitions[name] = self._opened(name, added)
        while any(together(self._runtime, ObservedPartition.look, partitions.values())):
            ready = {name: each.ready for name, each in partitions.items() if each.ready}
            if ready:
                break
        else:
            return []
        group = round_robin(ready, self._last, limit)
        owners = {id(descriptor): partitions[name] for name, descriptor in group}
        for name, _ in group:
            partitions[name].ready.popleft()
            self._last = name
        return read_ahead(
            lambda descriptor: owners[id(descriptor)].fetch(descriptor),
            [descriptor for _, descriptor in group],
            lambda descriptor, stored: owners[id(descriptor)].decode(stored),
            max_in_flight_bytes=READ_AHEAD_BYTES,
            runtime=self._runtime,
            pace=partitions[group[0][0]].pace,  # one store has them all
        )

    def acknowledge(self, written: Sequence[Written]) -> None:
        """Does nothing: the batches stay in the topic."""


def _fetch(
    fetch: Callable[[BatchDescriptor], ArrowBatch],
    group: Sequence[BatchDescriptor],
    runtime: Runtime,
) -> Iterable[ArrowBatch]:
    return fetch_many(fetch, group, max_in_flight_bytes=READ_AHEAD_BYTES, runtime=runtime)
