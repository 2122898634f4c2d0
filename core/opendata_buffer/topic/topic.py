"""A topic on storage: its description, and what changes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from opendata_buffer import outcomes
from opendata_buffer.concurrency import locked
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig
from opendata_buffer.errors import (
    Drained,
    InvalidInput,
    OpenDataBufferError,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.queue.ownership import LISTED_BELOW, OWNER_NAME, TOPIC_KEY, check_owner
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, SystemRuntime, deadline
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import DESCRIPTION, DRAIN_S, TopicDescription, is_topic

__all__ = ["CurrentTopic", "Topic", "is_topic"]


log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=QueueConfig)


class Topic:
    """Many queues as one stream: made with :meth:`create` or :meth:`open`. Not thread-safe.

    ::

        topic = Topic.create("s3://bucket/orders", partitions=16)
        topic.expand(32)
        topic.drain("3")

    Each partition is an ordinary queue in the same store, with its name as data prefix. Topics
    are changed while they are in use: producers and readers notice within seconds.

    Attributes:
        store: Where the topic and all its partitions are.
    """

    def __init__(
        self, store: Store, settings: QueueConfig, runtime: Runtime, description: TopicDescription
    ) -> None:
        self.store = store
        self._settings = settings
        self._runtime = runtime
        self._register = _register(store, settings, runtime)
        self._description = description

    @classmethod
    def create(
        cls,
        config: QueueConfig | str,
        partitions: int,
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
    ) -> Topic:
        """Make a topic at a store's root.

        Args:
            config: The store's URL, or settings with it: deadline and backoff.
            partitions: How many it begins with; each is made when it is first used.
            store: Use this store instead of opening ``config.store``.
            runtime: Clock, jitter and the topic's id; the system's by default.

        Raises:
            InvalidInput: There is a topic, or a queue lies below the root; a number of
                partitions that no topic can have.
            UnsafeStore: The store has no compare-and-swap.
            StorageError: It did not answer.
        """
        settings, opened, runtime = _taken(config, store, runtime)
        fresh = TopicDescription.new(runtime.ulid(), partitions)
        with deadline(runtime, settings.cas_deadline_ms / 1000):
            opened.check_conditional_writes(TOPIC_KEY)
            found = _register(opened, settings, runtime).read()
            if isinstance(found, TopicDescription):
                raise _exists(opened.url, found)
            _refuse_queues(opened)
            outcome = _register(opened, settings, runtime).update(lambda before: before or fresh)
            description = _settled(outcome, opened.url)
        if description.topic_id != fresh.topic_id:
            raise _exists(opened.url, description)
        return cls.open(settings, store=opened, runtime=runtime)

    @classmethod
    def open(
        cls,
        config: QueueConfig | str,
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
    ) -> Topic:
        """The topic at a store's root, by one read.

        Raises:
            InvalidInput: There is none.
            CorruptData: Its description cannot be read.
            StorageError: The store did not answer.
        """
        settings, opened, runtime = _taken(config, store, runtime)
        found = cls.find(settings, store=opened, runtime=runtime)
        if found is None:
            raise _none_at(opened.url)
        return found

    @classmethod
    def find(
        cls, config: QueueConfig, *, store: Store, runtime: Runtime | None = None
    ) -> Topic | None:
        """As :meth:`open`; None where there is no topic."""
        settings, opened, runtime = _taken(config, store, runtime)
        topic = cls(opened, settings, runtime, TopicDescription("", (), 0))
        found = topic._register.read()
        if found is None:
            return None
        topic._description = _settled(found, opened.url)
        return topic

    @property
    def url(self) -> str:
        """The URL of the topic's store."""
        return self.store.url

    @property
    def description(self) -> TopicDescription:
        """As last read or written by this object."""
        return self._description

    def read(self) -> TopicDescription:
        """The description as it is now. One conditional GET.

        Raises:
            InvalidInput: There is no topic.
            QueueReset: It was there, and was deleted since, or another one took its place.
            CorruptData: It cannot be read.
            StorageError: The store did not answer within ``cas_deadline_ms``.
        """
        found = self._register.read()
        if found is None:
            raise _none_at(self.url)
        self._description = _settled(found, self.url)
        return self._description

    def expand(self, partitions: int) -> TopicDescription:
        """Add partitions until so many are written. Repeatable.

        Adding changes which partition a key goes to, and so breaks the order of records per key
        once, for the keys that move: with ``rendezvous`` those that the new partitions take
        over, with ``modulo`` most of them.

        Raises:
            InvalidInput: Fewer than there are, or more than a topic can have.
            QueueReset, CorruptData, StorageError: As :meth:`read`; nothing was changed.
        """
        return self._change(lambda before: before.expanded(partitions))

    def drain(self, partition: str) -> TopicDescription:
        """Let nothing more be written to a partition. Repeatable.

        Producers notice within seconds. It leaves the topic once everything in it is read and
        acknowledged: see :meth:`remove_drained`.

        Args:
            partition: Its name, or its number: ``"3"``.

        Raises:
            InvalidInput: There is no such partition, or it is the last one that is written.
            QueueReset, CorruptData, StorageError: As :meth:`read`; nothing was changed.
        """
        now_ms = self._runtime.now_ms()
        return self._change(lambda before: before.drained(partition, now_ms))

    def remove_drained(self, after_s: float = DRAIN_S) -> list[str]:
        """Take those draining partitions out of the topic that are empty. Returns their names.

        Each is sealed first (:meth:`.Queue.seal`): a producer that has not noticed yet that it
        drains is refused from then on, and nothing is left behind unread.

        Args:
            after_s: Seconds that a partition drains at least, by the clocks of this process and
                of the one that let it drain.

        Raises:
            QueueReset, CorruptData, StorageError: As :meth:`read`, of the topic or a partition.
        """
        now_ms, description = self._runtime.now_ms(), self.read()
        due = [n for n in description.draining if description.may_leave(n, now_ms, after_s)]
        empty = [name for name in due if self.seal(name)]
        if empty:
            self._change(lambda before: before.without(empty))
            log.info("left the topic at %s, drained: %s", self.url, ", ".join(empty))
        return empty

    def forget_left(self, partitions: Iterable[str]) -> TopicDescription:
        """Remember these partitions no more, that have left: all their batches are collected.

        Raises:
            QueueReset, CorruptData, StorageError: As :meth:`read`; nothing was changed.
        """
        return self._change(lambda before: before.collected(partitions))

    def seal(self, partition: str) -> bool:
        """Close a partition if it is empty. False while it has entries.

        Raises:
            QueueReset: Its manifest was lost or restored from an old copy: it only looks empty.
            CorruptData, StorageError: It could not be read or written.
        """
        config = self.config_of(partition, self._settings)
        claim = check_owner(self.store, config, runtime=self._runtime)
        queue = Queue(self.store, config, runtime=self._runtime, role="topic")
        manifest = queue.read()
        if claim is not None:
            # A manifest that was lost would be made anew, empty and closed, and what waits with it
            # be collected (failure F4).
            claim.check(manifest)
        try:
            return queue.seal()
        except Drained:
            return True

    @staticmethod
    def config_of(partition: str, config: Config) -> Config:
        """Settings for one partition of the topic from those for all of them.

        Raises:
            InvalidInput: ``config`` names a data prefix or a manifest: partitions have their own.
        """
        _check_config(config)
        return replace(config, data_path_prefix=partition, manifest_path="")

    def _change(self, change: Callable[[TopicDescription], TopicDescription]) -> TopicDescription:
        # Every change may be applied twice, so a lost answer needs no proof.
        def decide(before: TopicDescription | None) -> TopicDescription | None:
            return None if before is None else change(before)

        self._description = _settled(self._register.update(decide), self.url)
        return self._description


def _taken(
    config: QueueConfig | str, store: Store | None, runtime: Runtime | None
) -> tuple[QueueConfig, Store, Runtime]:
    settings = QueueConfig(store=config) if isinstance(config, str) else config
    _check_config(settings)
    opened = store if store is not None else open_store(settings.store, settings.store_options)
    return settings, opened, runtime if runtime is not None else SystemRuntime()


def _check_config(config: QueueConfig) -> None:
    default = f"{DEFAULT_DATA_PATH_PREFIX}/manifest"
    if config.data_path_prefix != DEFAULT_DATA_PATH_PREFIX:
        name, value = "data_path_prefix", config.data_path_prefix
    elif config.manifest_path != default:
        name, value = "manifest_path", config.manifest_path
    else:
        return
    raise InvalidInput(
        f"{name} is {value!r}, but the partitions of a topic have names of their own: leave it "
        "out, or use the queue of one partition"
    )


def _register(store: Store, settings: QueueConfig, runtime: Runtime) -> CasObject[TopicDescription]:
    return CasObject(
        store,
        TOPIC_KEY,
        decode=TopicDescription.from_json,
        encode=TopicDescription.to_json,
        runtime=runtime,
        settings=settings,
        max_bytes=DESCRIPTION.max_bytes,
        unreadable=DESCRIPTION.unreadable,
        check_read=lambda known, now: _check_same(known, now, store.url),
    )


def _check_same(known: TopicDescription, now: TopicDescription, url: str) -> None:
    if now.topic_id != known.topic_id or now.next_number < known.next_number:
        raise QueueReset(
            f"the topic at {url} is another one than before (id {known.topic_id} -> "
            f"{now.topic_id}, next partition {known.next_number} -> {now.next_number}): "
            f"{TOPIC_KEY!r} was deleted and made again, or restored from an old copy. Stop its "
            "producers and readers, and put its latest version back."
        )


def _settled(
    outcome: TopicDescription | outcomes.Outcome[TopicDescription | None], url: str
) -> TopicDescription:
    if isinstance(outcome, outcomes.Applied) and outcome.value is not None:
        return outcome.value
    if isinstance(outcome, TopicDescription):
        return outcome
    if isinstance(outcome, outcomes.Vanished | outcomes.Applied):
        raise QueueReset(
            f"{TOPIC_KEY!r} vanished from {url} while in use. It is not made again: partitions "
            "would get the names of others. Put its latest version back (bucket versioning)."
        )
    raise TransientStorageError(
        f"{TOPIC_KEY!r} in {url} could not be written: {outcome}. It may have been written; try "
        "again."
    )


def _none_at(url: str) -> InvalidInput:
    return InvalidInput(
        f"there is no topic at {url}: make one with 'opendata-buffer topic create {url} "
        "--partitions N'"
    )


def _exists(url: str, found: TopicDescription) -> InvalidInput:
    return InvalidInput(
        f"there is a topic at {url} already, with {len(found.active)} partitions: use it, add "
        f"partitions with 'opendata-buffer topic expand {url} --partitions N', or take another "
        "root for the new one"
    )


def _refuse_queues(store: Store) -> None:
    """A queue below the root is another one's: a partition of a lost topic, or no topic's."""
    for found in store.list("", limit=LISTED_BELOW).objects:
        folder, _, name = found.key.rpartition("/")
        if name == OWNER_NAME:
            raise InvalidInput(
                f"there is a queue at {folder!r} in {store.url}: a topic wants a root of its own, "
                "and its first partitions must be new. Take another root."
            )


# ---- The partitions of a topic as a producer needs them ----
#
# At once, and not older than some seconds.


OUTDATED = 5
"""Ages after which a caller waits for a look: nobody has asked for long."""

LOOK_S = 10.0
"""How long a look may take. Without an answer the caller goes on with what is known: a partition
that has left refuses what is appended."""


class CurrentTopic:
    """A topic's description, read again by age. Thread-safe.

    Args:
        topic: Opened; nobody else uses it.
        runtime: Clock and threads.
        max_age_s: Seconds after which the next question starts a look. The caller does not wait
            for it: the answer to the questions after it is new.
    """

    def __init__(self, topic: Topic, runtime: Runtime, max_age_s: float) -> None:
        self._topic = topic
        self._runtime = runtime
        self._max_age_s = max_age_s
        self._condition = runtime.condition()
        self._known = topic.description
        self._known_at = runtime.monotonic()
        self._looking = False

    def get(self) -> TopicDescription:
        """The description; raises nothing."""
        age_s, looks = self._ask()
        if looks and age_s >= OUTDATED * self._max_age_s:
            self._look()
        elif looks:
            try:
                self._runtime.spawn(self._look, "opendata-buffer-topic")
            except RuntimeError:
                self._look()  # the process has no thread left
        return self._known

    @property
    @locked
    def is_outdated(self) -> bool:
        """Whether the next :meth:`get` waits for a look."""
        age_s = self._runtime.monotonic() - self._known_at
        return not self._looking and age_s >= OUTDATED * self._max_age_s

    @locked
    def _ask(self) -> tuple[float, bool]:
        """How old the answer is, and whether the caller is the one who sees to a new one."""
        age_s = self._runtime.monotonic() - self._known_at
        looks = age_s >= self._max_age_s and not self._looking
        self._looking = self._looking or looks
        return age_s, looks

    def _look(self) -> None:
        found = None
        try:
            with deadline(self._runtime, LOOK_S):
                found = self._topic.read()
        except OpenDataBufferError as error:
            log.warning("the topic at %s could not be looked at: %s", self._topic.url, error)
        finally:
            self._looked(found)

    @locked
    def _looked(self, found: TopicDescription | None) -> None:
        self._looking = False
        self._known_at = self._runtime.monotonic()  # also after a failure: not at every call
        if found is not None:
            self._known = found
