"""The target of an operator's command: one queue, or a topic with all its partitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import ObjectNotFound
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES
from opendata_buffer.hints import QueueName
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.ownership import QueueClaim, check_owner, claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.stores.base import Store, read_bytes
from opendata_buffer.topic.topic import Topic, partition_config


@dataclass(frozen=True)
class Target:
    """An opened store, and the queue or the topic in it.

    ``config`` has the settings of the queue. If ``topic`` is not None, they are those of the
    topic's root. Commands that decode batches need the settings of a consumer.
    """

    store: Store
    config: Any
    runtime: Runtime
    topic: Topic | None = None

    @property
    def prefix(self) -> str:
        """The data prefix of the queue."""
        return str(self.config.data_path_prefix)

    @property
    def name(self) -> QueueName:
        """The name of the queue or topic, for messages and commands."""
        return queue_name(self.store.url, self.config)

    @property
    def hint(self) -> str:
        """The arguments by which commands name the queue."""
        return self.name.words()

    def queue(self, name: str) -> Target:
        """Return one partition of the topic; without a topic, return the queue itself."""
        if self.topic is None:
            return self
        return Target(self.store, partition_config(name, self.config), self.runtime)

    def queues(self) -> list[Target]:
        """Return the queue, or the partitions of the topic as they are listed now."""
        if self.topic is None:
            return [self]
        return [self.queue(name) for name in self.topic.read().names]

    def written(self) -> list[Target]:
        """Return the queue, or the partitions of the topic that were ever used."""

        def exists(queue: Target) -> bool:
            # A partition that lost its manifest still has its marker, and needs repair.
            if queue.owner() is not None:
                return True
            return read_raw(self.store, queue.config.manifest_path) is not None

        queues = self.queues()
        found = [True] if self.topic is None else in_parallel(self.runtime, exists, queues)
        return [queue for queue, is_there in zip(queues, found, strict=True) if is_there]

    def owner(self) -> QueueClaim | None:
        """Read the owner marker.

        Returns:
            The marker; None if it does not exist.

        Raises:
            PrefixConflict: The data prefix belongs to another queue.
            StorageError: The store did not answer.
        """
        return check_owner(self.store, self.config, runtime=self.runtime)

    def is_log(self) -> bool:
        """Return whether the queue has named readers."""
        claim = self.owner()
        return claim is not None and claim.is_log

    def reader(self, advice: str = "") -> ReadOnlyReader:
        """Return a reader of the queue that changes nothing."""
        return ReadOnlyReader(self.config, store=self.store, runtime=self.runtime, advice=advice)

    def open_for_repair(self) -> Queue:
        """Open the queue for writing by an operator.

        Returns:
            The queue.

        Raises:
            OpenDataBufferError: As :func:`.claim_for_writing`.
        """
        claim = claim_for_writing(self.store, self.config, runtime=self.runtime)
        return Queue(self.store, self.config, runtime=self.runtime, role="operator", claim=claim)


def read_raw(store: Store, key: str) -> bytes | None:
    """Read a manifest's bytes without parsing them.

    Args:
        store: The opened store of the queue.
        key: The key of the manifest.

    Returns:
        The bytes; None if the object does not exist.

    Raises:
        CorruptData: The object is larger than a manifest can be.
    """
    try:
        return read_bytes(store, key, MAX_MANIFEST_BYTES)
    except ObjectNotFound:
        return None


def partition_named(given: str | int, topic: Topic) -> str:
    """Return the full name of a partition, from its name or number.

    This includes a partition that has left the topic: it keeps its unacknowledged batches until
    they are collected.
    """
    known = topic.description
    return known.left_name(given) if known.has_left(given) else known.resolved(given)


def drain_partition(topic: Topic, partition: str | int) -> tuple[str, bool]:
    """Stop writes to a partition, and remove it from the topic if it is empty. May be repeated.

    Args:
        topic: The topic.
        partition: Its name or number.

    Returns:
        The name of the partition, and whether it has left the topic.
    """
    name = partition_named(partition, topic)
    topic.drain(name)
    topic.remove_drained()
    return name, name not in topic.description.names
