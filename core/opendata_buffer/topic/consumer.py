"""Read a topic: several partitions in one process, each of them owned like a queue."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice, repeat, zip_longest
from os import PathLike
from typing import Any, NamedTuple, TypeVar, Unpack

from opendata_buffer import errors
from opendata_buffer.arguments import checked
from opendata_buffer.config import ConsumerConfig, ConsumerSettings
from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch, DeliveredBatch
from opendata_buffer.consumer.entries import EntryConsumer
from opendata_buffer.consumer.fetch import AdaptiveConcurrency, FetchHandle, ReadAhead
from opendata_buffer.consumer.isolation import READ_COMMITTED
from opendata_buffer.consumer.lag import TopicLag, topic_lag_of
from opendata_buffer.consumer.loop import BatchLoop
from opendata_buffer.consumer.opening import check_start
from opendata_buffer.consumer.pace import PollPace
from opendata_buffer.consumer.place import PlaceLike
from opendata_buffer.consumer.position import Position
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.internal_parts import take_parts
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.queue import OpenPause
from opendata_buffer.queue.reader_admin import register_readers
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline, in_parallel
from opendata_buffer.stores.listed import with_looks
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.cached_topic import REFRESH_S, CachedTopic
from opendata_buffer.topic.description import TopicDescription, is_abbreviated, resolve
from opendata_buffer.topic.places import TopicPlaces
from opendata_buffer.topic.topic import Topic, partition_config, seal_partition

log = logging.getLogger(__name__)

QUIET_S = 0.5
"""Seconds of a pause from which on the partitions are polled by a listing."""

MAX_PREFETCH = 64
"""Most batches that are prefetched between two polls."""

T = TypeVar("T")


def round_robin(
    waiting: Mapping[str, Sequence[T]], after: str | None, limit: int
) -> list[tuple[str, T]]:
    """Return waiting items in turn: the first of each partition, then the second, and so on.

    Args:
        waiting: The items of each partition, in order.
        after: The partition that was served last; the one after it comes first.
        limit: Most items.

    Returns:
        The items, each with its partition.
    """
    names = list(waiting)
    begin = names.index(after) + 1 if after is not None and after in waiting else 0
    rows = zip_longest(
        *(zip(repeat(name), waiting[name]) for name in names[begin:] + names[:begin])
    )
    return list(islice((each for row in rows for each in row if each is not None), limit))


class Written(NamedTuple):
    """A delivered batch whose records are written out, and need not be kept."""

    partition: str
    sequence: int


class PartitionConsumer(EntryConsumer):
    """The consumer of one partition."""

    def close(self, timeout: float | None = None) -> None:
        """Write acknowledgements and end; a sealed partition has none to write."""
        with suppress(errors.Drained):
            super().close(timeout)


class TopicConsumer(BatchLoop):
    """The one reader of a topic, or of some of its partitions. A context manager.

    ::

        with TopicConsumer(config, positions=load()) as consumer:
            for batch in consumer:
                with database.transaction():
                    write(batch.values)
                    save(batch.partition, str(batch.position))
                batch.ack()

    Batches of a partition are delivered in order, and partitions round robin. The batches of a
    transaction are delivered when it is committed, each of them once. Without ``partitions`` the
    consumer reads all partitions, follows added ones, and removes drained ones from the topic. With
    ``config.reader`` it is that reader of each partition, which is a log. A partition that left the
    topic while the reader had expired is read to its end, or raises ``DataLoss``. Not thread-safe.

    Args:
        config: The topic's URL, or settings of each partition's consumer.
        positions: By partition, the :meth:`position_of` the last batch that was processed, or its
            text; or :attr:`.Publisher.positions`. A partition without a position begins at
            ``start``.
        start: Where to begin in partitions without a position: ``"earliest"``, ``"latest"``, or a
            time (a ``datetime`` with a time zone), for all partitions; or a dict of such places or
            sequences by the partition's name or number. See :class:`.Consumer`. A reader that the
            topic does not know yet is registered at this place in all partitions, also in those
            that other processes read. Partitions that are added later are read from their first
            batch. Default: ``"earliest"``.
        partitions: Names or numbers of the only partitions to read, so that several processes can
            share a topic. Default: all partitions.
        isolation: ``read_committed`` (default), or ``read_uncommitted``, which also delivers
            undecided and repeated batches.
        allow_data_loss: Go on after lost entries, with a warning, instead of raising ``DataLoss``.
            Default false.
        refresh_s: Seconds after which the list of partitions is read again, in the background.
            Default 2.
        program: Name of the program, shown by ``opendata-buffer status``. Default ``Python``.
        **settings: Fields of the configuration, by name.

    Raises:
        InvalidInput: The topic does not exist, or lacks a given partition; or a text is not a
            position; or ``start`` is not in a partition, or unread batches lie before it.
        QueueReset: A position belongs to another queue, or is past the end.
        OpenDataBufferError: A partition could not be taken over, as :class:`.Consumer`.
    """

    @checked
    def __init__(
        self,
        config: ConsumerConfig | str | PathLike[str],
        positions: Mapping[str, Position | str] | None = None,
        *,
        start: PlaceLike | Mapping[str | int, PlaceLike] | None = None,
        partitions: Sequence[str | int] | None = None,
        isolation: str = READ_COMMITTED,
        allow_data_loss: bool = False,
        refresh_s: float = REFRESH_S,
        program: str = "Python",
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        super().__init__()
        given, parts = take_parts(settings, "store", "runtime", "open_pause")
        config = ConsumerConfig.of(config, given)
        # The topic exists, so a missing queue is a partition that was never written, and not a
        # wrong path.
        self._config = replace(config, create_if_missing=True)
        self._runtime: Runtime = parts.runtime or SystemRuntime()
        self._lock = self._runtime.condition()
        self._poll_pace = PollPace(config.idle_poll_ms)
        self._closed = False
        self._interrupted = False
        opened = parts.store or open_store(config.store, config.store_options)
        store, self._look = with_looks(opened, self._runtime)
        topic = Topic.open(config, store=store, runtime=self._runtime)
        self._open_reader = partial(
            PartitionConsumer,
            isolation=isolation,
            store=topic.store,
            runtime=self._runtime,
            allow_data_loss=allow_data_loss,
            program=program,
            open_pause=parts.open_pause or self._default_pause(),
        )
        self._assigned = _assigned(partitions, topic.description.names_for(config.reader))
        self._positions = {name: Position.of(each) for name, each in (positions or {}).items()}
        self._program = program
        self._cached = CachedTopic(topic, self._runtime, refresh_s)
        self._topic = Topic.open(config, store=topic.store, runtime=self._runtime)
        """Removes drained partitions. Another thread uses the cached topic."""
        self._readers: dict[str, PartitionConsumer] = {}
        self._drain_at = 0.0
        self._sealed: set[str] = set()
        """Sealed partitions that are not yet removed from the topic."""
        self._pace = AdaptiveConcurrency(topic.store)
        self._fetched: Generator[ConsumedBatch | ArrowBatch] | None = None
        """The batches that are fetched ahead, in the order of delivery."""
        self._as_arrow = False
        self._last: str | None = None
        self._errors: deque[errors.OpenDataBufferError] = deque()
        if start is not None:
            self._begin_at(TopicPlaces(start, topic.description.names), allow_data_loss)
        try:
            self._open_missing(topic.description)
            if config.reader:
                self._register(config.reader)
        except BaseException:
            self._close_all()
            raise

    def _default_pause(self) -> OpenPause | None:
        """Return the function that makes a broker pause if the caller names none.

        Here it is None, so no broker is asked. The public class overrides it; see
        :mod:`opendata_buffer.assembly`.
        """
        return None

    @property
    def partitions(self) -> list[str]:
        """The partitions that it reads now."""
        return list(self._readers)

    @property
    def positions(self) -> dict[str, Position]:
        """By partition, the position after all acknowledged batches, for the next consumer."""
        found = {name: reader.position for name, reader in self._readers.items()}
        return {name: position for name, position in found.items() if position is not None}

    @checked
    def position_of(self, batch: DeliveredBatch) -> Position:
        """Return the position to save with a delivered batch.

        It is after this batch and all earlier batches of the partition.

        Args:
            batch: A delivered batch.

        Returns:
            The position. Its ``str`` can be saved, by partition, and passed to a new consumer.

        Raises:
            InvalidInput: The batch is not waiting for acknowledgement, or its partition is not
                read.
        """
        return self._reader(batch.partition).position_of(batch.sequence)

    @checked
    def ack(self, batch: DeliveredBatch | Written) -> None:
        """Acknowledge a batch: the next one of its partition, in the order of delivery.

        The partition's manifest is written every ``config.ack_interval`` entries. Batches that an
        open transaction needs stay in it.

        Args:
            batch: The batch. Only its partition and sequence are used.

        Raises:
            InvalidInput: Another batch is next. Nothing changed.
            Fenced: Another consumer owns the partition.
            Conflict, QueueReset, CorruptManifest, StorageError: The manifest was due to be written
                and was not; the next acknowledgement tries again.
            Closed: The consumer was closed, or interrupted in a call before.
        """
        self._check_open()
        reader = self._reader(batch.partition)
        self._uninterrupted(lambda: reader.ack(batch.sequence))

    @checked
    def skip(self, partition: str | int, sequence: int) -> None:
        """Skip a batch that cannot be delivered, for ever (failure F25), and log it.

        Args:
            partition: Name or number of the partition.
            sequence: The batch.

        Raises:
            InvalidInput: The batch does not wait for delivery or acknowledgement.
            Fenced, DataLoss, QueueReset, CorruptManifest, StorageError: As :meth:`.Consumer.skip`.
            Closed: The consumer was closed, or interrupted in a call before.
        """
        self._check_open()
        self._drop_prefetched()
        reader = self._reader(self._name_of(partition))
        self._uninterrupted(lambda: reader.skip(sequence))

    @checked
    def seek(self, place: PlaceLike | Mapping[str | int, PlaceLike]) -> None:
        """Move a reader of logs to a place in each partition; see :meth:`.Consumer.seek`.

        Args:
            place: ``"earliest"``, ``"latest"``, or a time, for all partitions that this consumer
                reads; or a dict of such places or sequences by the partition's name or number. The
                other partitions stay where they are.

        Raises:
            InvalidInput: The partitions are not logs. Or a partition does not have the place.
            OpenDataBufferError: The error of the first partition that was not moved, as
                :meth:`.Consumer.seek`. Others may have been: seek again.
            Closed: The consumer was closed, or interrupted in a call before.
        """
        self._check_open()
        places = TopicPlaces(place, list(self._readers), "place")
        self._drop_prefetched()
        self._errors.clear()

        def move(name: str) -> None:
            if (given := places.at(name)) is not None:
                self._readers[name].seek(given)

        self._uninterrupted(lambda: in_parallel(self._runtime, move, list(self._readers)))

    def lag(self) -> TopicLag:
        """Return how much is not acknowledged, with one read of each partition's manifest.

        Returns:
            The lag of each partition that this consumer reads, and their sum.

        Raises:
            OpenDataBufferError: A partition could not be read, as :meth:`.Consumer.lag`.
            Closed: The consumer was closed, or interrupted in a call before.
        """
        self._check_open()
        readers = dict(self._readers)
        found = in_parallel(self._runtime, EntryConsumer.lag, readers.values())
        return topic_lag_of(dict(zip(readers, found, strict=True)))

    def flush(self) -> None:
        """Dequeue all acknowledged batches, in all partitions at once.

        Raises:
            OpenDataBufferError: The error of the first partition that was not written; the others
                were.
            Closed: The consumer was closed, or interrupted in a call before.
        """
        self._check_open()
        readers = self._readers.values()
        self._uninterrupted(lambda: in_parallel(self._runtime, EntryConsumer.flush, readers))

    @checked
    def close(self, timeout: float | None = None) -> None:
        """Dequeue all acknowledged batches, and end. May be repeated.

        Args:
            timeout: Seconds for all partitions together. None (default) takes up to the
                ``timeout_ms`` of the store options.

        Raises:
            OpenDataBufferError: A partition was not written. The consumer is closed anyway.
        """
        if self._closed:
            return
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        with nullcontext() if timeout is None else deadline(self._runtime, timeout):
            self._close_all()

    def _next_now(self, *, arrow: bool) -> Any:
        """Return the next batch in one of its forms, or None when none is ready.

        After each poll, the batches of healthy partitions are returned first, and then the error of
        a partition is raised.
        """
        self._check_open()
        if arrow is not self._as_arrow:
            self._drop_prefetched()
            self._as_arrow = arrow
        while True:
            if self._fetched is not None:
                try:
                    return next(self._fetched)
                except StopIteration:
                    self._fetched = None
                except BaseException:
                    self._drop_prefetched()
                    raise
            if self._errors:
                raise self._errors.popleft()
            has_new = self._uninterrupted(self._poll)
            waiting = {name: reader.ready for name, reader in self._readers.items()}
            batches = round_robin(waiting, self._last, MAX_PREFETCH)
            if batches:
                self._fetched = self._prefetch(batches, arrow)
            elif not self._errors and not has_new:
                return None

    def _prefetch(
        self, batches: Sequence[tuple[str, BatchDescriptor]], arrow: bool
    ) -> Generator[ConsumedBatch | ArrowBatch]:
        """Fetch batches ahead; they stay in ``ready`` until they are delivered."""
        handles = {
            id(descriptor): self._readers[name].fetch_handle()._within(name)
            for name, descriptor in batches
        }
        decode = FetchHandle._decode_arrow if arrow else FetchHandle._decode
        fetched = ReadAhead(
            lambda descriptor: handles[id(descriptor)]._fetch_pooled(descriptor),
            [descriptor for _, descriptor in batches],
            lambda descriptor, stored: decode(handles[id(descriptor)], stored),
            runtime=self._runtime,
            adaptive=self._pace,
        ).results()
        with closing(fetched):
            for name, _ in batches:
                self._last = name  # set first: after an error the other partitions are next
                found = next(fetched)
                self._readers[name].ready.popleft()
                yield replace(found, _owner=self)

    def _drop_prefetched(self) -> None:
        """Stop fetching. Batches that were not delivered are still ready, and are fetched again."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            fetched.close()

    def _poll(self) -> bool:
        """Poll all partitions at once; return whether there was anything new."""
        idle = self._poll_pace.pause_s > QUIET_S
        with self._look(len(self._readers), idle=idle):
            # In this thread, the listing of the look may answer the read.
            return self._poll_all(self._cached.get(waits=idle))

    def _poll_all(self, description: TopicDescription) -> bool:
        with self._noting_error():
            self._open_missing(description)
        names = description.names_for(self._config.reader)
        for name in [name for name in self._readers if name not in names]:
            self._close_drained(name)

        def poll(name: str) -> bool | errors.OpenDataBufferError:
            try:
                return self._readers[name].poll()
            except errors.OpenDataBufferError as error:
                return error

        has_new = False
        names = list(self._readers)
        for name, outcome in zip(names, in_parallel(self._runtime, poll, names), strict=True):
            if isinstance(outcome, errors.Drained):
                self._sealed.add(name)
                self._close_drained(name)
            elif isinstance(outcome, errors.OpenDataBufferError):
                self._errors.append(outcome)
            else:
                has_new = has_new or outcome
        with self._noting_error():
            self._remove_drained(description)
        return has_new

    @contextmanager
    def _noting_error(self) -> Iterator[None]:
        """Keep an error of the block, to raise it after the batches that are ready."""
        try:
            yield
        except errors.OpenDataBufferError as error:
            self._errors.append(error)

    def _open_missing(self, description: TopicDescription) -> None:
        self._sealed.intersection_update(description.names)
        missing = self._missing(description)
        if not {*missing}.issubset(description.names):
            # The reader may have read the partitions that have left since this was cached.
            missing = self._missing(self._topic.forget_read(self._config.reader))
        now_ms = self._runtime.now_ms()

        def open_one(name: str) -> None:
            try:
                config = partition_config(name, self._config)
                opened[name] = self._open_reader(config, self._position_for(name))
            except errors.DataLoss:
                # An earlier consumer may have emptied the partition to seal it, and been killed.
                if name not in description.may_leave(now_ms) or not seal_partition(
                    self._topic, name
                ):
                    raise
                reader = self._config.reader
                if reader and not self._topic.has_read(name, reader):  # failure F53
                    raise
                self._sealed.add(name)
            except errors.Drained:
                self._sealed.add(name)

        opened: dict[str, PartitionConsumer] = {}
        try:
            in_parallel(self._runtime, open_one, missing)
        finally:
            self._readers = dict(sorted((self._readers | opened).items()))
        if self._config.reader in (description.readers or {}):
            for name, reader in opened.items():
                if reader.begins_after:
                    log.warning(
                        "reader %r was not registered in partition %s, and begins there at "
                        "sequence %d: the %d batches before it were not kept for it. An earlier "
                        "release may have added the partition.",
                        self._config.reader,
                        name,
                        reader.begins_after,
                        reader.begins_after,
                    )

    def _begin_at(self, places: TopicPlaces, allow_data_loss: bool) -> None:
        """Apply ``start`` to the partitions as they are now, before any of them is taken over.

        A queue is only checked: its consumer begins at the oldest batch. For a log, a reader that
        is new to the topic is registered at its place in every partition, and begins there when it
        is opened.
        """
        names, reader = self._topic.description.names, self._config.reader
        if reader in (self._topic.description.readers or {}):
            if any(not (each.is_earliest or each.is_latest) for each in places.given):
                log.warning(
                    "reader %r continues at its positions: start applies only to a new reader. "
                    "Move this one with admin.reset_reader()",
                    reader,
                )
            return
        if not reader and self._assigned is not None:
            names = [name for name in names if name in self._assigned]

        def begin(name: str) -> None:
            place = places.at(name)
            if place is None or self._position_for(name) is not None:
                return
            if place.position is not None:
                self._positions[name] = place.position
                return
            config = partition_config(name, self._config)
            view = ReadOnlyReader(config, store=self._topic.store, runtime=self._runtime).view()
            if not reader and not isinstance(view, Manifest):
                return  # Opening it fails, and says that it needs a reader.
            url = self._topic.url
            at = check_start(place, view, config, url, allow_data_loss=allow_data_loss)
            if isinstance(view, LogView):
                register_readers(view.log, [reader], self._program, begin=at)

        in_parallel(self._runtime, begin, names)

    def _missing(self, description: TopicDescription) -> list[str]:
        """Return the partitions that this consumer reads and has not opened."""
        names = description.names_for(self._config.reader)
        if self._assigned is not None:
            names = [name for name in self._assigned if name in names]
        return [name for name in names if name not in self._readers and name not in self._sealed]

    def _register(self, reader: str) -> None:
        """Register a reader on the topic if it is new to the topic or to a partition.

        It then misses nothing in partitions that it does not read yet (failure F47).
        """
        known = self._topic.description.readers or {}
        is_new = any(each.newly_registered for each in self._readers.values())
        if is_new or reader not in known:
            self._topic.register_reader(reader)

    def _position_for(self, name: str) -> Position | None:
        return self._positions.get(name) or self._positions.get(f"{self._topic.url}/{name}")

    def _remove_drained(self, description: TopicDescription) -> None:
        """Remove partitions that are draining or have left, and are read to their end."""
        reader_name = self._config.reader
        left = description.unread_by(reader_name)
        due = [*description.may_leave(self._runtime.now_ms()), *left]
        readers = [self._readers[name] for name in due if name in self._readers]
        done = [reader for reader in readers if reader.finished]
        for reader in done:
            reader.flush_all()
        if self._runtime.monotonic() < self._drain_at:
            return
        if done or not self._sealed.isdisjoint(due):
            removed = self._topic.remove_drained()
            if left:
                now = self._topic.forget_read(reader_name)
                removed += [name for name in left if name not in now.unread_by(reader_name)]
            for name in removed:
                self._close_drained(name)
            if not removed:  # Other readers of a log may take a long time: try again later.
                self._drain_at = self._runtime.monotonic() + REFRESH_S

    def _close_drained(self, name: str) -> None:
        reader = self._readers.pop(name, None)
        if reader is not None:
            log.info("partition %s was drained and has left the topic", name)
            reader.close()

    # A publisher calls these methods on the consumer whose batches its transaction acknowledges.

    def _is_waiting(self, batch: ConsumedBatch) -> bool:
        reader = self._readers.get(batch.partition)
        return reader is not None and reader.is_waiting(batch.sequence)

    def _source_of(self, batch: DeliveredBatch) -> str:
        """Return the partition's place, under which a transaction keeps the position."""
        return self._reader(batch.partition).source

    def _check_next(self, batches: Sequence[Any]) -> None:
        """Check that these batches of one partition are the next to acknowledge, in this order.

        Raises:
            InvalidInput: Other batches come first.
        """
        self._check_open()
        reader = self._reader(batches[0].partition)
        reader.check_next([batch.sequence for batch in batches])

    def _name_of(self, partition: str | int) -> str:
        """Return the name of a partition that this consumer reads, from its name or number."""
        given = str(partition)
        return next((name for name in self._readers if is_abbreviated(given, name)), given)

    def _reader(self, name: str) -> PartitionConsumer:
        found = self._readers.get(name)
        if found is None:
            raise errors.InvalidInput(
                f"partition is {name!r}: this consumer reads {', '.join(self._readers) or 'none'}"
            )
        return found

    def _close_all(self) -> None:
        self._drop_prefetched()
        readers, self._readers = self._readers, {}
        in_parallel(self._runtime, PartitionConsumer.close, readers.values())

    def _uninterrupted(self, work: Callable[[], T]) -> T:
        """Call ``work``, and return its result.

        After an interruption (Ctrl-C) the consumer cannot be used any more. An entry that was taken
        and not noted would not be delivered, but would be acknowledged with the next one.
        """
        self._interrupted = True
        try:
            result = work()
        except Exception:
            self._interrupted = False
            raise
        self._interrupted = False
        return result

    def _check_open(self) -> None:
        if self._interrupted:
            raise errors.Closed(
                "this consumer of the topic was interrupted while it polled or acknowledged a "
                "batch: close it and make a new one, with the positions that were saved. What was "
                "not acknowledged is delivered again."
            )
        if self._closed:
            raise errors.Closed(
                "the consumer of the topic is closed: make a new one, with its positions"
            )


def _assigned(
    partitions: Sequence[str | int] | None, names: Sequence[str]
) -> tuple[str, ...] | None:
    if partitions is None:
        return None
    if isinstance(partitions, str) or not partitions:
        raise errors.InvalidInput(
            f"partitions is {partitions!r}: give a list of names, or leave it out to read all"
        )
    return tuple(dict.fromkeys(resolve(partition, names) for partition in partitions))
