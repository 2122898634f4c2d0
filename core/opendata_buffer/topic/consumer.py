"""Reads a topic: several partitions in one process, each of them owned like a queue."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

from opendata_buffer.concurrency import ClosedAtEnd, together
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.fetch import (
    AdaptiveConcurrency,
    ArrowBatch,
    BatchDescriptor,
    ConsumedBatch,
)
from opendata_buffer.consumer.isolation import READ_COMMITTED
from opendata_buffer.consumer.read_ahead import read_ahead
from opendata_buffer.errors import Closed, DataLoss, Drained, InvalidInput, OpenDataBufferError
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.queue.queue import OpenPause, broker_pause
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import Store
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.topic.partition_consumer import PartitionPosition, PartitionReader
from opendata_buffer.topic.topic import CurrentTopic, Topic

__all__ = ["Delivered", "Group", "TopicArrowBatch", "TopicBatch", "TopicConsumer", "in_turn"]


# ---- Whose turn it is: one of each, round after round, so that no backlog holds others up. ----


T = TypeVar("T")


def in_turn(
    waiting: Mapping[str, Sequence[T]], after: str | None, limit: int
) -> list[tuple[str, T]]:
    """The first of each partition, then the second of each, and so on, with their partitions.

    Args:
        waiting: What waits, by partition, in order.
        after: The partition that had the last turn: the one behind it begins.
        limit: Most that are given out.
    """
    names = list(waiting)
    begin = names.index(after) + 1 if after is not None and after in waiting else 0
    return list(islice(_rounds({n: waiting[n] for n in names[begin:] + names[:begin]}), limit))


def _rounds(waiting: Mapping[str, Sequence[T]]) -> Iterator[tuple[str, T]]:
    for turn in range(max(map(len, waiting.values()), default=0)):
        for name, items in waiting.items():
            if turn < len(items):
                yield name, items[turn]


# ---- What a topic's consumer hands out: a batch, and the partition that it is of. ----


class Delivered(Protocol):
    """A batch that was handed out, or what is kept of it: its records need not be."""

    @property
    def partition(self) -> str:
        """Which one."""
        ...

    @property
    def sequence(self) -> int:
        """Position in the partition's queue."""
        ...


@dataclass(frozen=True, slots=True)
class TopicBatch:
    """A decoded batch of one partition.

    Attributes:
        partition: Which one.
        entries: The records, in ingestion order.
        sequence: Position in the partition's queue.
        location: Key of the batch object.
        metadata: Ranges of records with their ingestion time and payload.
    """

    partition: str
    entries: list[bytes]
    sequence: int
    location: str
    metadata: tuple[Metadata, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicArrowBatch(ArrowBatch):
    """A decoded batch of one partition whose records are one ``pa.binary()`` array.

    Attributes:
        partition: Which one. All else is as in :class:`.ArrowBatch`, also ``to_table()``.
    """

    partition: str


# ---- Batches of several partitions that are ready: fetched ahead, and delivered in turn. ----


class Group:
    """What is fetched between two looks at the partitions. Not thread-safe.

    Args:
        batches: At least one, each with the name of its partition, in the order of delivery;
            those of a partition are the first that wait in its reader.
        readers: By partition.
        arrow: Decode to Arrow arrays.
        runtime: Threads.
        pace: How long fetches of this store wait.
    """

    def __init__(
        self,
        batches: Sequence[tuple[str, BatchDescriptor]],
        readers: Mapping[str, PartitionReader],
        *,
        arrow: bool,
        runtime: Runtime,
        pace: AdaptiveConcurrency,
    ) -> None:
        self._left = deque((name, readers[name]) for name, _ in batches)
        owners = {id(descriptor): readers[name] for name, descriptor in batches}
        self._fetched = read_ahead(
            lambda descriptor: owners[id(descriptor)].read(descriptor),
            [descriptor for _, descriptor in batches],
            lambda descriptor, stored: owners[id(descriptor)].decode(stored, arrow=arrow),
            runtime=runtime,
            pace=pace,
        )

    @property
    def is_over(self) -> bool:
        """Whether all are taken."""
        return not self._left

    @property
    def partition(self) -> str:
        """Of the batch that comes next."""
        return self._left[0][0]

    def take(self) -> ConsumedBatch | ArrowBatch:
        """The next batch, which waits in its reader no more. After an error nothing more comes.

        Raises:
            OpenDataBufferError: It could not be fetched or decoded, and waits in its reader.
        """
        found = next(self._fetched)
        _, reader = self._left.popleft()
        reader.ready.popleft()
        return found

    def close(self) -> None:
        """End the fetching; what was not taken still waits in its reader."""
        self._fetched.close()


log = logging.getLogger(__name__)

REFRESH_S = 2.0
"""Age of the list of partitions at which it is read again."""

GROUP = 64
"""Batches fetched between two looks, at most: so long a new one in another partition waits."""

PRUNE_S = 3_600.0


class TopicConsumer(ClosedAtEnd):
    """The one reader of a topic, or of some of its partitions. A context manager.

    ::

        with TopicConsumer(config, positions=load()) as consumer:
            while (batch := consumer.next_batch()) is not None:
                with database.transaction():
                    write(batch.entries)
                    save(batch.partition, str(consumer.position_of(batch)))
                consumer.ack(batch)

    Batches of a partition come in order, partitions take turns. Transactions are delivered when
    they are committed, each batch once. Without ``partitions`` it reads all, takes up those that
    are added, and lets drained ones go. Not thread-safe: one thread reads and acknowledges.

    Args:
        config: Settings of each partition's consumer.
        positions: By partition, what :meth:`position_of` gave for the last batch that is surely
            processed, or its text. Partitions without one are read from the oldest queued batch.
        partitions: Read these and no others, so that several processes share a topic: names or
            numbers.
        isolation: ``read_uncommitted`` delivers undecided and repeated batches, too.
        store: Instead of the one ``config.store`` names.
        runtime: Clock and threads.
        allow_data_loss: Go on behind a gap, with a warning, instead of raising ``DataLoss``.
        refresh_s: Seconds after which the list of partitions is read again, in the background.
        program: What reads the topic, for the person who asks ``opendata-buffer owner``.
        open_pause: See :class:`.Consumer`.

    Raises:
        InvalidInput: There is no topic, or it has no such partition; a position is none.
        QueueReset: A position is of another queue, or beyond the end.
        OpenDataBufferError: A partition could not be taken over, as :class:`.Consumer`.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        positions: Mapping[str, PartitionPosition | str] | None = None,
        *,
        partitions: Sequence[str] | None = None,
        isolation: str = READ_COMMITTED,
        store: Store | None = None,
        runtime: Runtime | None = None,
        allow_data_loss: bool = False,
        refresh_s: float = REFRESH_S,
        program: str = "Python",
        open_pause: OpenPause = broker_pause,
    ) -> None:
        self._config = config
        self._program = program
        self._open_pause = open_pause
        self._isolation = isolation
        self._allow_data_loss = allow_data_loss
        self._runtime = runtime or SystemRuntime()
        self._closed = False
        self._unsure = False
        topic = Topic.open(config, store=store, runtime=self._runtime)
        self._store = topic.store
        self._assigned = _assigned(partitions, topic.description)
        self._positions = {
            name: PartitionPosition.of(each) for name, each in (positions or {}).items()
        }
        self._current = CurrentTopic(topic, self._runtime, refresh_s)
        self._drained = Topic.open(config, store=topic.store, runtime=self._runtime)
        self._readers: dict[str, PartitionReader] = {}
        self._sealed: set[str] = set()  # Closed for good, and not taken out of the topic yet.
        self._group: Group | None = None
        self._as_arrow = False
        self._pace = AdaptiveConcurrency.of(self._store)
        self._last: str | None = None
        self._errors: deque[OpenDataBufferError] = deque()
        self._pruned_at = self._runtime.monotonic()
        try:
            self._open_missing(topic.description)
        except BaseException:
            self._close_all()
            raise

    @property
    def partitions(self) -> list[str]:
        """Those that it reads now."""
        return list(self._readers)

    @property
    def positions(self) -> dict[str, PartitionPosition]:
        """By partition, what to start the next consumer with: all that is acknowledged."""
        found = {name: reader.position for name, reader in self._readers.items()}
        return {name: position for name, position in found.items() if position is not None}

    def position_of(self, batch: Delivered) -> PartitionPosition:
        """What to save with a batch: it and all delivered before it in its partition are done.

        Raises:
            InvalidInput: It was not delivered by this consumer, or is acknowledged already.
        """
        return self._reader(batch.partition).position_after(batch.sequence)

    def next_batch(self) -> TopicBatch | None:
        """The next batch of the partition whose turn it is, or None when nothing is ready.

        An error of one partition does not keep the others from being read: it is raised in its
        turn, and again in the next round while it lasts.

        Raises:
            PoisonBatch: A batch is missing, unreadable or foreign. :meth:`skip` passes it by.
            Fenced: Another consumer owns one of the partitions.
            DataLoss, QueueReset, CorruptManifest: A partition does not continue where it was.
            TransientStorageError, PermanentStorageError: The store did not answer.
            Closed: The consumer was closed, or interrupted in a call before.
        """
        taken = self._next(arrow=False)
        if taken is None:
            return None
        name, found = taken
        assert isinstance(found, ConsumedBatch)
        return TopicBatch(name, found.entries, found.sequence, found.location, found.metadata)

    def next_arrow_batch(self) -> TopicArrowBatch | None:
        """As :meth:`next_batch`, with the records as an Arrow array, without an object for each.

        Both may be called in turn, over the same place in the topic; what was fetched ahead for
        the one is fetched again for the other.
        """
        taken = self._next(arrow=True)
        if taken is None:
            return None
        name, found = taken
        assert isinstance(found, ArrowBatch)
        return TopicArrowBatch(
            found.values, found.sequence, found.location, found.metadata, partition=name
        )

    def ack(self, batch: Delivered) -> None:
        """Acknowledge a batch: the next one of its partition, in the order of delivery.

        Only ``partition`` and ``sequence`` of it are looked at, so its records may be given up.

        Every ``config.ack_interval`` entries the partition's manifest is written; what an open
        transaction needs stays in it.

        Raises:
            InvalidInput: Another one is next. Nothing changed.
            Fenced: Another consumer owns the partition.
            Conflict, QueueReset, CorruptManifest, StorageError: The manifest was due to be
                written and was not; the next acknowledgement tries again.
            Closed: The consumer was closed, or interrupted in a call before.
        """
        self._check_open()
        reader = self._reader(batch.partition)
        self._whole(lambda: reader.ack(batch.sequence))

    def skip(self, partition: str, sequence: int) -> None:
        """Give up a batch for ever that cannot be delivered (failure F25); it is logged.

        Raises:
            InvalidInput: It is not one that waits for delivery or acknowledgement.
            Fenced, DataLoss, QueueReset, CorruptManifest, StorageError: As :meth:`.Consumer.skip`.
            Closed: The consumer was closed, or interrupted in a call before.
        """
        self._check_open()
        self._end_group()
        reader = self._reader(partition)
        self._whole(lambda: reader.skip(sequence))

    def flush(self) -> None:
        """Take everything acknowledged out of the manifests, all at once.

        Raises:
            Fenced, Conflict, QueueReset, CorruptManifest, StorageError: Of the first partition
                whose manifest was not written; the others were.
            Closed: The consumer was closed, or interrupted in a call before.
        """
        self._check_open()
        readers = self._readers.values()
        self._whole(lambda: together(self._runtime, PartitionReader.let_go, readers))

    def close(self) -> None:
        """Write out acknowledgements and end. Free to repeat; closed also when it raises.

        Raises:
            Fenced, Conflict, QueueReset, CorruptManifest, StorageError: Of the first partition
                whose manifest was not written.
        """
        if self._closed:
            return
        self._closed = True
        self._close_all()

    def _note_failed_close(self, error: OpenDataBufferError) -> None:
        log.warning("closing after an error failed too: %s", error)

    # What was found, and is fetched in turn.

    def _next(self, *, arrow: bool) -> tuple[str, ConsumedBatch | ArrowBatch] | None:
        """The next batch in one of its forms, and its partition; None when nothing is ready."""
        self._check_open()
        if arrow is not self._as_arrow:
            self._end_group()
            self._as_arrow = arrow
        while True:
            if self._group is not None:
                return self._take(self._group)
            if self._errors:
                raise self._errors.popleft()
            found = self._whole(self._look)
            if not self._begin_group() and not self._errors and not found:
                return None

    def _begin_group(self) -> bool:
        """Let what is ready be fetched ahead, in turn; whether there is any."""
        waiting = {name: reader.ready for name, reader in self._readers.items()}
        batches = in_turn(waiting, self._last, GROUP)
        if not batches:
            return False
        self._group = Group(
            batches, self._readers, arrow=self._as_arrow, runtime=self._runtime, pace=self._pace
        )
        return True

    def _take(self, group: Group) -> tuple[str, ConsumedBatch | ArrowBatch]:
        name = group.partition
        self._last = name  # also after an error: the others have their turn first
        try:
            found = group.take()
        except BaseException:
            self._end_group()
            raise
        if group.is_over:
            self._end_group()
        return name, found

    def _end_group(self) -> None:
        """What was fetched and not delivered is fetched again: it is still ready."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    # Looking.

    def _look(self) -> bool:
        """Look at all partitions at once; whether there was anything new."""
        description = self._current.get()
        try:
            self._open_missing(description)
        except OpenDataBufferError as error:
            self._errors.append(error)
        for name in [name for name in self._readers if name not in description.names]:
            self._leave(name)

        def look(reader: PartitionReader) -> bool | OpenDataBufferError:
            try:
                return reader.look()
            except OpenDataBufferError as error:
                return error

        found = False
        readers = list(self._readers.values())
        for reader, outcome in zip(readers, together(self._runtime, look, readers), strict=True):
            if isinstance(outcome, Drained):
                self._sealed.add(reader.name)
                self._leave(reader.name)
            elif isinstance(outcome, OpenDataBufferError):
                self._errors.append(outcome)
            else:
                found = found or outcome
        try:
            self._let_leave(description)
        except OpenDataBufferError as error:
            self._errors.append(error)
        self._prune()
        return found

    def _open_missing(self, description: TopicDescription) -> None:
        names = description.names if self._assigned is None else self._assigned
        self._sealed.intersection_update(description.names)
        known = {*self._readers, *self._sealed}
        now_ms = self._runtime.now_ms()
        missing = [n for n in names if n in description.names and n not in known]

        def opened(name: str) -> PartitionReader | None:
            try:
                return PartitionReader(
                    name,
                    Topic.config_of(name, self._config),
                    self._positions.get(name),
                    self._isolation,
                    store=self._store,
                    runtime=self._runtime,
                    allow_data_loss=self._allow_data_loss,
                    program=self._program,
                    open_pause=self._open_pause,
                )
            except DataLoss:
                # Perhaps it was emptied to be closed, by one who was killed in between.
                if not description.may_leave(name, now_ms) or not self._drained.seal(name):
                    raise
            except Drained:
                pass
            self._sealed.add(name)
            return None

        def noted(name: str) -> None:
            reader = opened(name)
            if reader is not None:
                found[name] = reader

        found: dict[str, PartitionReader] = {}
        try:
            together(self._runtime, noted, missing)
        finally:
            everyone = self._readers | found
            self._readers = {name: everyone[name] for name in sorted(everyone)}

    def _let_leave(self, description: TopicDescription) -> None:
        """Take draining partitions out of the topic that are read to their end."""
        readers = [self._readers[name] for name in description.draining if name in self._readers]
        now_ms = self._runtime.now_ms()
        done = [
            each for each in readers if each.finished and description.may_leave(each.name, now_ms)
        ]
        for reader in done:
            reader.let_all_go()
        if done or any(description.may_leave(name, now_ms) for name in self._sealed):
            for name in self._drained.remove_drained():
                self._leave(name)

    def _leave(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is not None:
            log.info("partition %s was drained and has left the topic", name)
            with suppress(Drained):
                reader.close()

    def _prune(self) -> None:
        now = self._runtime.monotonic()
        if now - self._pruned_at >= PRUNE_S:
            self._pruned_at = now
            for reader in self._readers.values():
                reader.prune()

    def _reader(self, name: str) -> PartitionReader:
        found = self._readers.get(name)
        if found is None:
            raise InvalidInput(
                f"partition is {name!r}: this consumer reads {', '.join(self._readers) or 'none'}"
            )
        return found

    def _close_all(self) -> None:
        self._end_group()
        readers, self._readers = self._readers, {}
        together(self._runtime, PartitionReader.close, readers.values())

    def _whole(self, work: Callable[[], T]) -> T:
        """What ``work`` returns. Interrupted (Ctrl-C) it leaves a consumer that does not go on.

        An entry may be taken off the manifest's end and be noted nowhere yet, and other threads
        may still look: who went on would pass that batch by, and acknowledge it with the next.
        """
        self._unsure = True
        try:
            result = work()
        except Exception:
            self._unsure = False
            raise
        self._unsure = False
        return result

    def _check_open(self) -> None:
        if self._unsure:
            raise Closed(
                "this consumer of the topic was interrupted while it looked for batches or "
                "acknowledged one: close it and make a new one, with the positions that were "
                "saved. What was not acknowledged is delivered again."
            )
        if self._closed:
            raise Closed("the consumer of the topic is closed: make a new one, with its positions")


def _assigned(
    partitions: Sequence[str] | None, description: TopicDescription
) -> tuple[str, ...] | None:
    if partitions is None:
        return None
    if isinstance(partitions, str) or not partitions:
        raise InvalidInput(
            f"partitions is {partitions!r}: give a list of names, or leave it out to read all"
        )
    return tuple(dict.fromkeys(map(description.resolved, partitions)))
