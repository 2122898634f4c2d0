"""A topic on storage: create, read and change its description, and cache it for producers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TypeVar

from opendata_buffer import errors, outcomes
from opendata_buffer.arguments import checked
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig
from opendata_buffer.queue.cas import sidecar_object
from opendata_buffer.queue.hints import queue_hint
from opendata_buffer.queue.log import Log, LogIndex
from opendata_buffer.queue.marker import OWNER_NAME
from opendata_buffer.queue.neighbours import LISTED_BELOW, TOPIC_KEY
from opendata_buffer.queue.ownership import check_owner, claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import enable_readers, register_readers
from opendata_buffer.queue.reader_positions import read_positions
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline, in_parallel
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import (
    DESCRIPTION,
    DRAIN_S,
    Partition,
    TopicDescription,
    is_topic,
)
from opendata_buffer.transactions import TOPIC_FOLDER

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=QueueConfig)

_PROGRAM = "opendata-buffer"
"""What the position of a reader names as its program until a consumer claims it."""

_MOST_CHANGES = 20
"""Attempts of a change that prepares partitions first. One fails only where another change wins."""


class Topic:
    """A topic: many queues as one stream. Made by :meth:`create` or :meth:`open`. Not thread-safe.

    ::

        topic = Topic.create("s3://bucket/orders", partitions=16)
        topic.expand(32)
        topic.drain("3")

    Each partition is an ordinary queue in the same store, with its name as data prefix. Producers
    and consumers follow a change of the partitions within seconds.

    Attributes:
        store: Where the topic and all its partitions are.
        url: The URL of the topic's store.
        description: As last read or written by this object.
        records: Folder of the commit records of its writers.
    """

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
            config: The store's URL, or settings with it: deadline and backoff.
            partitions: How many it begins with; each queue is created when it is first used.
            store: Use this store instead of opening ``config.store``.
            runtime: Clock, jitter and the topic's id; the system's by default.

        Raises:
            InvalidInput: There is a topic, or a queue below the root; or too many partitions.
            UnsafeStore: The store has no compare-and-swap.
            StorageError: It did not answer.
        """
        topic = cls._at(config, store, runtime)
        fresh = TopicDescription.new(topic._runtime.ulid(), partitions)
        with deadline(topic._runtime, topic._settings.timeout_ms / 1000):
            topic.store.check_conditional_writes(TOPIC_KEY)
            found = topic._object.read()
            if found is None:
                _refuse_queues(topic.store)
            known = topic._remember(found or topic._object.update(lambda before: before or fresh))
        if found is not None or known.topic_id != fresh.topic_id:
            count, words = len(known.active), queue_hint(topic.url, topic._settings)
            raise errors.InvalidInput(
                f"there is a topic at {topic.url} already, with {count} partitions: use it, add "
                f"partitions with 'opendata-buffer topic expand {words} --partitions {count + 1}', "
                "or take another root for the new one"
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
        """The topic at a store's root, by one read. Raises as :meth:`read`."""
        topic = cls._at(config, store, runtime)
        topic.read()
        return topic

    @classmethod
    @checked
    def of(cls, config: QueueConfig, *, store: Store, runtime: Runtime) -> Topic:
        """The topic at a store's root; or else the queue there, as a topic of one partition.

        Raises:
            InvalidInput: There is neither, or the settings name one partition of a topic.
        """
        if is_topic(store):
            return cls.open(config, store=store, runtime=runtime)
        claim = check_owner(store, config, runtime=runtime)
        if claim is None:
            raise errors.InvalidInput(
                f"there is no topic at {store.url}, and no queue below "
                f"{config.data_path_prefix!r}: make a topic with 'opendata-buffer topic create "
                f"{store.url} --partitions 4', or produce to the queue first"
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
        """As :meth:`open`; None where there is no topic, or no right to read its description: a
        process that may only use what is below one prefix has a queue there."""
        topic = cls._at(config, store, runtime)
        try:
            found = topic._object.read()
        except errors.PermanentStorageError as error:
            # Without the right to list, S3 refuses where it would answer "not found".
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
        """The description as it is now. One conditional GET; of a queue none.

        Raises:
            InvalidInput: There is no topic.
            QueueReset: It was there, and was deleted since, or another one took its place.
            CorruptData: It cannot be read.
            StorageError: The store did not answer within ``timeout_ms``.
        """
        if self.records != TOPIC_FOLDER:
            return self.description  # of a queue, which stands for a topic
        found = self._object.read()
        if found is None:
            raise errors.InvalidInput(
                f"there is no topic at {self.url}: make one with 'opendata-buffer topic create "
                f"{queue_hint(self.url, self._settings)} --partitions 4'"
            )
        return self._remember(found)

    @checked
    def expand(self, partitions: int) -> TopicDescription:
        """Add partitions until so many are active. May be repeated.

        The keys that move to another partition lose the order of their records once: with
        ``rendezvous`` those that the new partitions take over, with ``modulo`` most of them.

        Raises:
            InvalidInput: Fewer than there are, or more than a topic can have.
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
        reader calls this when it starts for the first time, before it hands out a record. Does
        nothing for a queue that stands for a topic. Logs a warning where this process does not have
        the right to do this.

        Raises:
            InvalidInput: A partition would have too many readers.
            QueueReset, CorruptData, StorageError: As :meth:`read`, of the topic or a partition.
        """
        if self.records != TOPIC_FOLDER:
            return self.description

        def prepare(before: TopicDescription) -> TopicDescription:
            self._register([name], self._indexes(before.active))
            return before.with_reader(name, self._runtime.now_ms())

        try:
            return self._settle(prepare)
        except errors.PermanentStorageError as error:
            # A reader may have the right to write its partitions only. An expansion finds it there,
            # unless it began before the reader did.
            log.warning(
                "reader %r is not named in the description of the topic at %s: %s. It may miss "
                "batches if partitions are added at this moment.",
                name,
                self.url,
                error,
            )
            return self.description

    def register_missing(self) -> dict[str, dict[str, int]]:
        """Register every reader that some partitions have in those active partitions that lack it.

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
        """Remove a reader from the topic; what the partitions know of it stays. May be repeated.

        Raises:
            QueueReset, CorruptData, StorageError: As :meth:`read`; nothing was changed.
        """
        return self._change(lambda before: before.without_reader(name))

    def _settle(self, prepare: Callable[[TopicDescription], TopicDescription]) -> TopicDescription:
        """Change the description to one that ``prepare`` has made true in the partitions.

        ``prepare`` gets the description as it is. Where another process changes it before ours is
        written, what was prepared may lack a reader or a partition, so ``prepare`` is called again.
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
        """Where the partitions are logs, make logs of new ones with all readers of the topic,
        before a producer writes them (failure F47). Returns the description with these readers.

        The readers are those that any partition has. This covers readers that only a partition
        knows: those of earlier releases, and those that open one partition as a queue. A reader
        that no partition has any more has expired everywhere, and is dropped.
        """
        indexes = self._indexes(before.names)
        if not indexes:
            return after
        like, readers = next(iter(indexes.values())), _readers_of(indexes)

        def make(name: str) -> None:
            config = self.config_of(name, self._settings)
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
        """The indexes of those partitions that are logs."""

        def read(name: str) -> LogIndex | None:
            config = self.config_of(name, self._settings)
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
            config = self.config_of(name, self._settings)
            log_ = Log(self.store, config, self._runtime, indexes[name].queue_id)
            return register_readers(log_, readers, _PROGRAM)

        found = zip(lacking, in_parallel(self._runtime, register, lacking), strict=True)
        return {name: begins for name, begins in found if begins}

    @checked
    def drain(self, partition: str | int) -> TopicDescription:
        """End the writing of a partition, by its name or its number, such as 3. May be repeated.

        Producers stop within seconds. The partition leaves the topic once everything in it is
        acknowledged: see :meth:`remove_drained`.

        Raises:
            InvalidInput: There is no such partition, or it is the last one that is written.
            QueueReset, CorruptData, StorageError: As :meth:`read`; nothing was changed.
        """
        now_ms = self._runtime.now_ms()
        return self._change(lambda before: before.drained(partition, now_ms))

    @checked
    def remove_drained(self, after_s: float = DRAIN_S) -> list[str]:
        """Remove the draining partitions that are empty from the topic. Returns their names.

        Each has drained for ``after_s`` seconds, by the clocks of this process and of the one that
        called :meth:`drain`, and is sealed first: the appends of a producer with an older list of
        partitions fail, and no unread entry is left in it.

        Raises:
            QueueReset, CorruptData, StorageError: As :meth:`read`, of the topic or a partition.
        """
        now_ms, description = self._runtime.now_ms(), self.read()
        due = description.may_leave(now_ms, after_s)
        empty = [name for name in due if self.seal(name)]
        if empty:
            self._change(lambda before: before.without(empty))
            log.info("left the topic at %s, drained: %s", self.url, ", ".join(empty))
        return empty

    @checked
    def forget_left(self, partitions: Iterable[str]) -> TopicDescription:
        """Remove partitions from the list of those that have left: their batches are deleted."""
        return self._change(lambda before: before.collected(partitions))

    @checked
    def seal(self, partition: str) -> bool:
        """Close a partition if it is empty. False while it has entries; of a log, while it has a
        reader that has not acknowledged all, or none that says so.

        Raises:
            QueueReset: Its manifest was lost or restored from an old copy.
            CorruptData, StorageError: It could not be read or written.
        """
        config = self.config_of(partition, self._settings)
        claim = check_owner(self.store, config, runtime=self._runtime)
        queue = Queue(self.store, config, runtime=self._runtime, role="topic")
        manifest = queue.read()
        if claim is not None:
            # A lost manifest would be created again, empty and closed, and the collector would
            # delete the partition's batches (failure F4).
            claim.check(manifest)
        read_to = None
        if claim is not None and claim.is_log:
            log_ = Log(self.store, config, self._runtime)
            positions = read_positions(log_, log_.need())
            read_to = min((each.next for each in positions.values()), default=None)
            behind = [name for name, each in positions.items() if each.next == read_to]
            if manifest is not None and (read_to or 0) < manifest.next_sequence:
                why = f"its reader {behind[0]!r} is at {read_to}" if behind else "it has no reader"
                log.info("partition %s is not closed yet: %s", partition, why)
                return False
        return queue.seal(read_to)

    @staticmethod
    @checked
    def config_of(partition: str, config: Config) -> Config:
        """Settings for one partition, from those for all; they name no prefix and no manifest."""
        if partition == config.data_path_prefix:
            return config  # a queue that stands for a topic; no partition has such a name
        _check_config(config)
        return replace(config, data_path_prefix=partition, manifest_path="")

    def _change(self, change: Callable[[TopicDescription], TopicDescription]) -> TopicDescription:
        # Every change may be applied twice, so a lost answer needs no proof.
        def decide(before: TopicDescription | None) -> TopicDescription | None:
            return None if before is None else self._changed(change, before)

        return self._remember(self._object.update(decide))

    def _changed(
        self, change: Callable[[TopicDescription], TopicDescription], before: TopicDescription
    ) -> TopicDescription:
        try:
            return change(before)
        except errors.InvalidInput as error:  # A description does not know where it is.
            words = queue_hint(self.url, self._settings)
            raise errors.InvalidInput(str(error).replace("STORE", words)) from None

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


def _refuse_queues(store: Store) -> None:
    """Refuse a root with a queue below it: a partition of a lost topic, or an ordinary queue."""
    for found in store.list("", limit=LISTED_BELOW).objects:
        folder, _, name = found.key.rpartition("/")
        if name == OWNER_NAME:
            raise errors.InvalidInput(
                f"there is a queue at {folder!r} in {store.url}: a topic wants a root of its own, "
                "and its first partitions must be new. Take another root."
            )


REFRESH_S = 2.0
"""Age of a description at which producers and consumers read it again."""

WAIT_AFTER = 5
"""Multiple of the maximum age at which :meth:`CachedTopic.get` waits for the read."""

READ_S = 10.0
"""Seconds that a read may take. After that the cached description is used."""


class CachedTopic:
    """A topic's description, read again in the background when it is ``max_age_s`` old.
    Thread-safe; the topic that is given is used by this object alone."""

    def __init__(self, topic: Topic, runtime: Runtime, max_age_s: float) -> None:
        self._topic = topic
        self._runtime = runtime
        self._max_age_s = max_age_s
        self._condition = runtime.condition()
        self._known = topic.description
        self._known_at = runtime.monotonic()
        self._reading = False

    def get(self) -> TopicDescription:
        """The description as far as it is known; raises nothing. It waits if it is outdated."""
        waits = self.is_outdated
        with self._condition:
            begins = not self._reading and self._age_s() >= self._max_age_s
            self._reading = self._reading or begins
        if begins:
            try:
                if waits:
                    self._read()
                else:
                    self._runtime.spawn(self._read, "opendata-buffer-topic")
            except RuntimeError:
                self._read()  # the process cannot start a thread
        return self._known

    @property
    def is_outdated(self) -> bool:
        """Whether the next :meth:`get` waits for a read."""
        return not self._reading and self._age_s() >= WAIT_AFTER * self._max_age_s

    def _age_s(self) -> float:
        return self._runtime.monotonic() - self._known_at

    def _read(self) -> None:
        found = None
        try:
            with deadline(self._runtime, READ_S):
                found = self._topic.read()
        except errors.OpenDataBufferError as error:
            log.warning("the topic at %s could not be read: %s", self._topic.url, error)
        finally:
            with self._condition:
                self._reading = False
                self._known_at = self._runtime.monotonic()  # also after a failure: not each call
                self._known = found or self._known
