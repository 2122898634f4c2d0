"""Create, read and change topics.

One queue has one manifest, so its throughput is limited. A topic is a list of queues that are used
as one stream. Each of them is a *partition*: an ordinary v1 queue in the same store, whose data
prefix is the partition's name. The list is one small object at the store's root, the *description*
(:mod:`opendata_buffer.topic.description`)::

    _topic.json            p-00000-04pn active, p-00001-05mv draining
    p-00000-04pn/manifest  a queue
    p-00001-05mv/manifest  a queue

Every change of the description is a compare-and-swap. Producers and consumers read it again every
two seconds (:mod:`opendata_buffer.topic.cached_topic`), so they follow a change within seconds, and
may work with an older list until then.

**Adding partitions.** The new partitions are active as soon as the description names them. If the
partitions are logs, the new ones are made logs with all readers of the topic first. Otherwise
producers could write entries that a reader never gets (failure F47).

**Draining a partition.** It is marked as draining, so that producers stop and consumers read the
rest. Once it is empty it is sealed, which makes later appends fail, and then it leaves the topic.
A reader of a log that has expired is not waited for. If it has not read the partition to its end,
the description names it under ``unread``. The partition is then still there for this one reader,
which opens it when it returns and gets ``DataLoss`` (failure F53, decision 0039).

**Things that can go wrong:**

* A producer has an older list and writes to a partition that has left. The partition is sealed, so
  the append fails, and no unread entry is left in it.
* A reader is registered while partitions are added. Each of the two prepares the partitions first
  and then replaces the description it has read. If the other one was faster, that fails, and it
  prepares again (:meth:`Topic._settle`).
* The description is deleted, or restored from an old copy. New partitions would get the names of
  old ones. Each read compares the description with the last one and raises ``QueueReset``.
* A process has no right to read the store's root. It cannot see whether there is a topic, and uses
  its own prefix as a queue (:meth:`Topic.find`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from os import PathLike
from typing import TypeVar

from opendata_buffer import errors, outcomes
from opendata_buffer.arguments import checked
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig
from opendata_buffer.familiar_names import OF_TOPICS, FamiliarNames
from opendata_buffer.hints import Action, Hint, QueueName
from opendata_buffer.queue.cas import sidecar_object
from opendata_buffer.queue.hints import queue_name, topic_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.marker import OWNER_NAME
from opendata_buffer.queue.neighbours import LISTED_BELOW, TOPIC_KEY, check_not_within_queue
from opendata_buffer.queue.ownership import check_owner, claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import enable_readers, register_readers
from opendata_buffer.queue.reader_positions import (
    read_positions,
    stored_position,
    stored_readers,
)
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline, in_parallel
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import (
    DESCRIPTION,
    DRAIN_S,
    MAX_UNREAD,
    Partition,
    TopicDescription,
    is_topic,
)
from opendata_buffer.transactions import TOPIC_FOLDER

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=QueueConfig)

_PROGRAM = "opendata-buffer"
"""The program in the position of a reader until a consumer claims it."""

_MOST_CHANGES = 20
"""Most attempts of a change that prepares partitions first. An attempt fails only if another change
was faster."""


class Topic(FamiliarNames):
    """A topic: several queues as one stream. Not thread-safe. Use :meth:`create` or :meth:`open`.

    ::

        topic = Topic.create("s3://bucket/orders", partitions=16)
        topic.expand(32)
        topic.drain("3")

    Each partition is an ordinary queue in the same store, with its name as data prefix. Producers
    and consumers follow a change of the partitions within seconds.

    Args:
        store: The opened store of the topic.
        settings: Settings of the partitions, without a prefix and a manifest.
        runtime: Clock and threads.

    Attributes:
        store: Where the topic and all its partitions are.
        url: The URL of the topic's store.
        description: The description as this object last read or wrote it.
        records: Folder of the commit records of its writers.
    """

    _instead = OF_TOPICS

    @checked
    def __init__(self, store: Store, settings: QueueConfig, runtime: Runtime) -> None:
        self.store = store
        self.url = store.url
        self.description = TopicDescription("", (), 0)
        self.records = TOPIC_FOLDER
        self._settings = settings
        self._runtime = runtime
        self._object = sidecar_object(
            DESCRIPTION,
            TopicDescription,
            store,
            TOPIC_KEY,
            runtime,
            settings,
            check_read=self._check_same,
        )

    @property
    def _name(self) -> QueueName:
        """The name of the topic, for hints."""
        return queue_name(self.url, self._settings)

    @classmethod
    @checked
    def create(
        cls,
        config: QueueConfig | str | PathLike[str],
        partitions: int,
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
    ) -> Topic:
        """Create a topic at a store's root.

        Args:
            config: The store's URL, or settings that include it, with deadline and backoff.
            partitions: How many it begins with, 1 to 1,000; each queue is created when it is first
                used.
            store: Use this store instead of opening ``config.store``.
            runtime: Clock, jitter and the topic's id. Default: those of the system.

        Returns:
            The topic.

        Raises:
            InvalidInput: The root has a topic already, or a queue below it; or ``partitions`` is
                out of bounds.
            UnsafeStore: The store has no compare-and-swap.
            StorageError: The store did not answer.
        """
        topic = cls._at(config, store, runtime)
        fresh = TopicDescription.new(topic._runtime.ulid(), partitions)
        with deadline(topic._runtime, topic._settings.timeout_ms / 1000):
            topic.store.check_conditional_writes(TOPIC_KEY)
            found = topic._object.read()
            if found is None:
                check_not_within_queue(topic.store, topic._settings)
                _refuse_queues(topic.store)
            known = topic._remember(found or topic._object.update(lambda before: before or fresh))
        if found is not None or known.topic_id != fresh.topic_id:
            count = len(known.active)
            raise errors.InvalidInput(
                f"there is a topic at {topic.url} already, with {count} partitions",
                Hint(Action.EXPAND_TOPIC, topic._name, count=count + 1),
            )
        return topic

    @classmethod
    @checked
    def open(
        cls,
        config: QueueConfig | str | PathLike[str],
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
    ) -> Topic:
        """Open the topic at a store's root, with one read.

        Args:
            config: The store's URL, or settings that include it.
            store: Use this store instead of opening ``config.store``.
            runtime: Clock and threads; the system's by default.

        Returns:
            The topic.

        Raises:
            InvalidInput: The root has no topic.
            CorruptData: The description cannot be read.
            StorageError: The store did not answer within ``timeout_ms``.
        """
        topic = cls._at(config, store, runtime)
        topic.read()
        return topic

    @classmethod
    @checked
    def of(cls, config: QueueConfig, *, store: Store, runtime: Runtime) -> Topic:
        """Open the topic at a store's root, or else the queue there as a topic of one partition.

        Args:
            config: Settings of the partitions, or of the queue.
            store: The opened store.
            runtime: Clock and threads.

        Returns:
            The topic.

        Raises:
            InvalidInput: The root has neither, or the settings name one partition of a topic.
        """
        if is_topic(store):
            return cls.open(config, store=store, runtime=runtime)
        claim = check_owner(store, config, runtime=runtime)
        if claim is None:
            raise errors.InvalidInput(
                f"there is no topic at {store.url}, and no queue below "
                f"{config.data_path_prefix!r}. Produce to the queue first, or make a topic",
                Hint(Action.CREATE_TOPIC, topic_name(store.url, config)),
            )
        prefix = config.data_path_prefix
        queue = cls(store, config, runtime)
        queue.records = prefix
        queue.description = TopicDescription(claim.queue_id, (Partition(prefix),), 1)
        return queue

    @classmethod
    @checked
    def find(
        cls, config: QueueConfig, *, store: Store, runtime: Runtime | None = None
    ) -> Topic | None:
        """Open the topic at a store's root if there is one.

        Args:
            config: Settings of the partitions.
            store: The opened store.
            runtime: Clock and threads. Default: those of the system.

        Returns:
            The topic. None if the root has no topic, or if this process has no right to read the
            description. A process that may only use the objects below one prefix has a queue there.

        Raises:
            CorruptData, StorageError: As :meth:`open`.
        """
        topic = cls._at(config, store, runtime)
        try:
            found = topic._object.read()
        except errors.PermanentStorageError as error:
            # Without the right to list, S3 refuses the read instead of answering "not found".
            log.info("taken for a queue, as a topic's description may not be read: %s", error)
            return None
        if found is None:
            return None
        topic._remember(found)
        return topic

    @classmethod
    def _at(
        cls,
        config: QueueConfig | str | PathLike[str],
        store: Store | None,
        runtime: Runtime | None,
    ) -> Topic:
        settings = config if isinstance(config, QueueConfig) else QueueConfig.of(config, {})
        _check_config(settings)
        opened = store if store is not None else open_store(settings.store, settings.store_options)
        return cls(opened, settings, runtime or SystemRuntime())

    def read(self) -> TopicDescription:
        """Read the description, with one conditional GET. For a queue, read nothing.

        Returns:
            The description as it is now.

        Raises:
            InvalidInput: The root has no topic.
            QueueReset: The topic was deleted since the last read, or another one took its place.
            CorruptData: The description cannot be read.
            StorageError: The store did not answer within ``timeout_ms``.
        """
        if self.records != TOPIC_FOLDER:
            return self.description  # a queue that is used as a topic
        found = self._object.read()
        if found is None:
            raise errors.InvalidInput(
                f"there is no topic at {self.url}", Hint(Action.CREATE_TOPIC, self._name)
            )
        return self._remember(found)

    @checked
    def expand(self, partitions: int) -> TopicDescription:
        """Add partitions until this number of partitions is active. May be repeated.

        Keys that move to another partition lose the order of their records once. With
        ``rendezvous`` these are the keys that the new partitions take over; with ``modulo`` they
        are most keys.

        Args:
            partitions: Total number of active partitions, at most 1,000.

        Returns:
            The new description.

        Raises:
            InvalidInput: The topic has more already, or ``partitions`` is out of bounds.
            QueueReset, CorruptData, StorageError: As :meth:`read`; nothing was changed.
        """

        def prepare(before: TopicDescription) -> TopicDescription:
            after = self._changed(lambda known: known.expanded(partitions), before)
            new = sorted({*after.names}.difference(before.names))
            return self._with_logs(before, after, new) if new else before

        return self._settle(prepare)

    def register_reader(self, name: str) -> TopicDescription:
        """Register a reader in all active partitions that lack it, and then on the topic.

        In a partition that lacks it, the reader begins at the oldest batch that is kept there. A
        reader calls this when it starts for the first time, before it hands out a record. For a
        queue that is used as a topic this does nothing. Without the right to change the description
        it logs a warning.

        Args:
            name: The reader.

        Returns:
            The new description.

        Raises:
            InvalidInput: A partition would have too many readers.
            QueueReset, CorruptData, StorageError: As :meth:`read`, for the topic or a partition.
        """
        if self.records != TOPIC_FOLDER:
            return self.description

        def prepare(before: TopicDescription) -> TopicDescription:
            self._register([name], self._indexes(before.active))
            return before.with_reader(name, self._runtime.now_ms())

        try:
            return self._settle(prepare)
        except errors.PermanentStorageError as error:
            # A reader may have the right to write only the partitions. An expansion finds it there,
            # unless the expansion began before the reader did.
            log.warning(
                "reader %r is not named in the description of the topic at %s: %s. It may miss "
                "batches if partitions are added at this moment.",
                name,
                self.url,
                error,
            )
            return self.description

    def register_missing(self) -> dict[str, dict[str, int]]:
        """Register every reader of some partition in all active partitions that lack it.

        Returns:
            By partition and reader, the sequence at which the reader begins there. A reader that
            has expired in a partition and lost batches there is not registered.

        Raises:
            InvalidInput, QueueReset, CorruptData, StorageError: As :meth:`register_reader`.
        """
        registered: dict[str, dict[str, int]] = {}

        def prepare(before: TopicDescription) -> TopicDescription:
            indexes = self._indexes(before.active)
            if not indexes:
                return before
            names = _readers_of(indexes)
            for partition, begins in self._register(names, indexes).items():
                registered[partition] = {**registered.get(partition, {}), **begins}
            return before.with_readers(names, self._runtime.now_ms())

        self._settle(prepare)
        return registered

    def forget_reader(self, name: str) -> TopicDescription:
        """Remove a reader from the topic, but not from its partitions. May be repeated.

        Partitions that have left are then no longer there for this reader.

        Args:
            name: The reader.

        Returns:
            The new description.

        Raises:
            QueueReset, CorruptData, StorageError: As :meth:`read`; nothing was changed.
        """
        return self._change(lambda before: before.without_reader(name))

    def _settle(self, prepare: Callable[[TopicDescription], TopicDescription]) -> TopicDescription:
        """Write a description that ``prepare`` has already made true in the partitions.

        Args:
            prepare: Takes the current description, changes the partitions, and returns the new
                description. If another process changes the description before ours is written, the
                partitions may lack a reader, or a partition may be missing. So ``prepare`` is
                called again.

        Returns:
            The description that was written.

        Raises:
            TransientStorageError: Other processes were faster :data:`_MOST_CHANGES` times.
        """
        for _ in range(_MOST_CHANGES):
            before = self.read()
            after = prepare(before)
            if after is before or self._change(partial(_replaced, before, after)) == after:
                return after
        raise errors.TransientStorageError(
            f"{TOPIC_KEY!r} in {self.url} was not written: other processes changed it "
            f"{_MOST_CHANGES} times meanwhile. Try again."
        )

    def _with_logs(
        self, before: TopicDescription, after: TopicDescription, new: Sequence[str]
    ) -> TopicDescription:
        """Make new partitions logs with all readers of the topic, if the others are logs.

        This happens before a producer writes them (failure F47).

        The readers are those that any partition has. This includes readers that only a partition
        knows: those of earlier releases, and those that open one partition as a queue. A reader
        that is in none of the partitions has expired everywhere, and is dropped.

        Args:
            before: The current description.
            after: The description with the new partitions.
            new: Names of the new partitions.

        Returns:
            ``after`` with these readers.
        """
        indexes = self._indexes(before.names)
        if not indexes:
            return after
        like, readers = next(iter(indexes.values())), _readers_of(indexes)

        def make(name: str) -> None:
            config = partition_config(name, self._settings)
            claim = claim_for_writing(self.store, config, runtime=self._runtime)
            enable_readers(
                self.store,
                config,
                claim,
                self._runtime,
                retention_ms=like.retention_ms,
                retention_bytes=like.retention_bytes,
                reader_expiry_ms=like.reader_expiry_ms,
            )
            log_ = Log(self.store, config, self._runtime, claim.queue_id)
            register_readers(log_, readers, _PROGRAM)

        in_parallel(self._runtime, make, new)
        return after.with_readers(readers, self._runtime.now_ms())

    def _indexes(self, names: Iterable[str]) -> dict[str, LogIndex]:
        """Return the indexes of those partitions that are logs, by name."""

        def read(name: str) -> LogIndex | None:
            config = partition_config(name, self._settings)
            return Log(self.store, config, self._runtime).read_unclaimed()

        names = [*names]
        found = zip(names, in_parallel(self._runtime, read, names), strict=True)
        return {name: index for name, index in found if index is not None}

    def _register(
        self, readers: Collection[str], indexes: Mapping[str, LogIndex]
    ) -> dict[str, dict[str, int]]:
        """Register readers in the partitions that lack them; see :func:`.register_readers`."""
        lacking = [name for name, index in indexes.items() if {*readers} - {*index.readers}]

        def register(name: str) -> dict[str, int]:
            config = partition_config(name, self._settings)
            log_ = Log(self.store, config, self._runtime, indexes[name].queue_id)
            return register_readers(log_, readers, _PROGRAM)

        found = zip(lacking, in_parallel(self._runtime, register, lacking), strict=True)
        return {name: begins for name, begins in found if begins}

    @checked
    def drain(self, partition: str | int) -> TopicDescription:
        """Stop writing to a partition. May be repeated.

        Producers stop within seconds. The partition leaves the topic once everything in it is
        acknowledged; see :meth:`remove_drained`.

        Args:
            partition: Its name or its number, such as 3.

        Returns:
            The new description.

        Raises:
            InvalidInput: The topic has no such partition, or it is the last one that is written.
            QueueReset, CorruptData, StorageError: As :meth:`read`; nothing was changed.
        """
        now_ms = self._runtime.now_ms()
        return self._change(lambda before: before.drained(partition, now_ms))

    @checked
    def remove_drained(self, after_s: float = DRAIN_S) -> list[str]:
        """Remove the draining partitions that are empty from the topic.

        Each of them is sealed first, so the appends of a producer with an older list of partitions
        fail, and no unread entry is left in it.

        Args:
            after_s: Least seconds for which a partition has drained, by the clocks of this process
                and of the one that called :meth:`drain`. Default 60.

        Returns:
            The names of the removed partitions.

        Raises:
            QueueReset, CorruptData, StorageError: As :meth:`read`, for the topic or a partition.
        """
        empty: list[str] = []
        dropped: list[str] = []

        def prepare(before: TopicDescription) -> TopicDescription:
            due = before.may_leave(self._runtime.now_ms(), after_s)
            empty[:] = [name for name in due if seal_partition(self, name)]
            # Look only now that nothing can be appended. A reader that returns meanwhile and is
            # new to the partition changes the description, and then this is repeated.
            unread = {name: self._unread_in(name) for name in empty}
            readers = chain(*before.unread.values(), *unread.values())
            dropped[:] = [*readers][:-MAX_UNREAD]
            return before.without(empty, unread)

        self._settle(prepare)
        if dropped:
            log.warning(
                "the topic at %s remembers %d expired readers of partitions that have left. The "
                "oldest %d are dropped, and get no error about their losses there if they return.",
                self.url,
                MAX_UNREAD,
                len(dropped),
            )
        if empty:
            log.info("left the topic at %s, drained: %s", self.url, ", ".join(empty))
        return empty

    def _unread_in(self, partition: str) -> list[str]:
        """Return the readers that have not read a sealed partition to its end.

        These are readers that have expired, because :func:`seal_partition` waits for all others.
        The one that moved last is at the end of the list.
        """
        config = partition_config(partition, self._settings)
        claim = check_owner(self.store, config, runtime=self._runtime)
        if claim is None or not claim.is_log:
            return []
        log_ = Log(self.store, config, self._runtime)
        manifest = Queue(self.store, config, runtime=self._runtime, role="topic").read()
        end = 0 if manifest is None else manifest.next_sequence
        moved_ms: dict[str, int] = {}

        def look(name: str) -> None:
            try:
                position = stored_position(log_, name, claim.queue_id)
            except errors.CorruptData:
                moved_ms[name] = 0  # It gets this error when it opens the partition.
                return
            if position is not None and position.next < end:
                moved_ms[name] = position.moved_ms

        in_parallel(self._runtime, look, stored_readers(log_))
        return sorted(moved_ms, key=lambda name: (moved_ms[name], name))

    @checked
    def forget_read(self, reader: str) -> TopicDescription:
        """Note which of its unread partitions a reader has read by now. May be repeated.

        A partition also counts as read if the reader has no position there any more: an operator
        has deleted the reader or the partition's objects.

        Args:
            reader: The reader.

        Returns:
            The new description. Without the right to write it, only the returned value changes, and
            a warning is logged.

        Raises:
            QueueReset, CorruptData, StorageError: As :meth:`read`, for the topic or a partition.
        """
        known = self.read()
        done = [name for name in known.unread_by(reader) if not self._unread_count(name, reader)]
        if not done:
            return known
        try:
            return self._change(lambda before: before.without_unread(reader, done))
        except errors.PermanentStorageError as error:
            log.warning(
                "the topic at %s still names partitions that reader %r has read: %s",
                self.url,
                reader,
                error,
            )
            return known.without_unread(reader, done)

    @checked
    def has_read(self, partition: str, reader: str) -> bool:
        """Check whether a reader has acknowledged everything in a partition.

        Args:
            partition: Name of the partition.
            reader: The reader.

        Returns:
            Whether it has. False if it has no position there.

        Raises:
            QueueReset: The partition's manifest was lost or restored from an old copy.
            CorruptData, StorageError: The partition could not be read.
        """
        return self._unread_count(partition, reader) == 0

    def _unread_count(self, partition: str, reader: str) -> int | None:
        """Return how many sequences of a partition a reader has not acknowledged.

        Returns:
            None if it has no position there.
        """
        config = partition_config(partition, self._settings)
        claim = check_owner(self.store, config, runtime=self._runtime)
        if claim is None:
            return None
        log_ = Log(self.store, config, self._runtime)
        position = stored_position(log_, reader, claim.queue_id)
        if position is None:
            return None
        manifest = Queue(self.store, config, runtime=self._runtime, role="topic").read()
        claim.check(manifest)
        return max(0, (0 if manifest is None else manifest.next_sequence) - position.next)

    def _change(self, change: Callable[[TopicDescription], TopicDescription]) -> TopicDescription:
        # Every change may be applied twice, so it does not matter if an answer is lost.
        def decide(before: TopicDescription | None) -> TopicDescription | None:
            return None if before is None else self._changed(change, before)

        return self._remember(self._object.update(decide))

    def _changed(
        self, change: Callable[[TopicDescription], TopicDescription], before: TopicDescription
    ) -> TopicDescription:
        try:
            return change(before)
        except errors.InvalidInput as error:  # A description does not know its store's URL.
            error.at(self._name)
            raise

    def _remember(
        self, outcome: TopicDescription | outcomes.Outcome[TopicDescription | None]
    ) -> TopicDescription:
        now = outcome.value if isinstance(outcome, outcomes.Applied) else outcome
        if isinstance(now, TopicDescription):
            self.description = now
            return now
        if isinstance(outcome, outcomes.Vanished | outcomes.Applied):
            raise errors.QueueReset(
                f"{TOPIC_KEY!r} vanished from {self.url} while in use. It is not made again: "
                "partitions would get the names of others. Put its latest version back (bucket "
                "versioning)."
            )
        raise errors.TransientStorageError(
            f"{TOPIC_KEY!r} in {self.url} could not be written: {outcome}. It may have been "
            "written; try again."
        )

    def _check_same(self, known: TopicDescription, now: TopicDescription) -> None:
        if now.topic_id != known.topic_id or now.next_number < known.next_number:
            raise errors.QueueReset(
                f"the topic at {self.url} is another one than before (id {known.topic_id} -> "
                f"{now.topic_id}, next partition {known.next_number} -> {now.next_number}): "
                f"{TOPIC_KEY!r} was deleted and made again, or restored from an old copy. Stop "
                "its producers and readers, and put its latest version back."
            )


def _replaced(
    before: TopicDescription, after: TopicDescription, now: TopicDescription
) -> TopicDescription:
    return after if now == before else now


def _readers_of(indexes: Mapping[str, LogIndex]) -> set[str]:
    return {name for index in indexes.values() for name in index.readers}


def _check_config(config: QueueConfig) -> None:
    default = DEFAULT_DATA_PATH_PREFIX
    for name, expected in (("data_path_prefix", default), ("manifest_path", f"{default}/manifest")):
        value = getattr(config, name)
        if value != expected:
            raise errors.InvalidInput(
                f"{name} is {value!r}, but the partitions of a topic have names of their own: "
                "leave it out, or use the queue of one partition"
            )


# Consumers and commands use these. They are not methods, because users of a topic do not need them.


@checked
def partition_config(partition: str, config: Config) -> Config:
    """Make the settings for one partition from those for all partitions.

    Args:
        partition: Name of the partition.
        config: Settings that name no prefix and no manifest.

    Returns:
        The settings, with the partition's name as the data prefix.

    Raises:
        InvalidInput: The settings name a prefix or a manifest.
    """
    if partition == config.data_path_prefix:
        return config  # a queue that is used as a topic; partitions do not have such names
    _check_config(config)
    return replace(config, data_path_prefix=partition, manifest_path="")


@checked
def forget_partitions(topic: Topic, partitions: Iterable[str]) -> TopicDescription:
    """Remove partitions that have left from the list, once their batches are deleted.

    Args:
        topic: The topic.
        partitions: Names of the partitions.

    Returns:
        The new description.
    """
    return topic._change(lambda before: before.collected(partitions))


@checked
def seal_partition(topic: Topic, partition: str) -> bool:
    """Close a partition if it is empty, so that later appends fail.

    Args:
        topic: The topic.
        partition: Name of the partition.

    Returns:
        False while the partition has entries. A log is not closed while a reader has not
        acknowledged all entries, or while it has entries and no reader.

    Raises:
        QueueReset: Its manifest was lost or restored from an old copy.
        CorruptData, StorageError: It could not be read or written.
    """
    config = partition_config(partition, topic._settings)
    claim = check_owner(topic.store, config, runtime=topic._runtime)
    queue = Queue(topic.store, config, runtime=topic._runtime, role="topic")
    manifest = queue.read()
    if claim is not None:
        # If the manifest was lost, it would be created again, empty and closed. The collector
        # would then delete the partition's batches (failure F4).
        claim.check(manifest)
    read_to = None
    if claim is not None and claim.is_log:
        log_ = Log(topic.store, config, topic._runtime)
        positions = read_positions(log_, log_.need())
        read_to = min((each.next for each in positions.values()), default=None)
        behind = [name for name, each in positions.items() if each.next == read_to]
        if manifest is not None and (read_to or 0) < manifest.next_sequence:
            why = f"its reader {behind[0]!r} is at {read_to}" if behind else "it has no reader"
            log.info("partition %s is not closed yet: %s", partition, why)
            return False
    return queue.seal(read_to)


def _refuse_queues(store: Store) -> None:
    """Refuse a root with a queue below it: a partition of a lost topic, or an ordinary queue.

    Raises:
        InvalidInput: There is such a queue.
    """
    for found in store.list("", limit=LISTED_BELOW).objects:
        folder, _, name = found.key.rpartition("/")
        if name == OWNER_NAME:
            raise errors.InvalidInput(
                f"there is a queue at {folder!r} in {store.url}: a topic wants a root of its own, "
                "and its first partitions must be new. Take another root."
            )
