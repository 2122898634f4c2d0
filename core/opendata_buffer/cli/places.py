"""What STORE names: one queue, or a topic with all its partitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.options import queue_fields_of, queue_words

if TYPE_CHECKING:
    from opendata_buffer.admin.start import Start, Starts
    from opendata_buffer.stores.base import Store
    from opendata_buffer.topic.topic import Topic

__all__ = ["Place", "open_place", "place_of"]

_NAMES_ONE_QUEUE = ("partition", "data_path_prefix", "manifest_path")


@dataclass(frozen=True)
class Place:
    """An opened store, and the queues in it that a command is about.

    Attributes:
        store: The store.
        config: Settings of the queue, or of the topic's root.
        topic: The topic; None for one queue.
    """

    store: Store
    config: Any
    topic: Topic | None

    def configs(self) -> list[Any]:
        """Settings of each queue: of a topic's partitions as they are listed now.

        Raises:
            InvalidInput, QueueReset, CorruptData, StorageError: The topic could not be read.
        """
        if self.topic is None:
            return [self.config]
        return [self.topic.config_of(name, self.config) for name in self.topic.read().names]

    def written(self, runtime: Any) -> list[Any]:
        """As :meth:`configs`, of a topic only those that were ever used.

        Raises:
            InvalidInput, QueueReset, CorruptData, StorageError: The topic could not be read.
        """
        from opendata_buffer.admin.rebuild import read_raw
        from opendata_buffer.concurrency import together
        from opendata_buffer.queue.ownership import check_owner

        def is_there(config: Any) -> bool:
            # By either: with the manifest lost there is a queue to be mended.
            if check_owner(self.store, config, runtime=runtime) is not None:
                return True
            return read_raw(self.store, config.manifest_path) is not None

        if self.topic is None:
            return [self.config]
        configs = self.configs()
        there = together(runtime, is_there, configs)
        return [config for config, found in zip(configs, there, strict=True) if found]

    def starts(self, starts: Starts, option: str) -> Callable[[str], Start]:
        """From a partition's name to the place that an option gave for it.

        Raises:
            click.UsageError: A sequence for a whole topic, or sequences by partition for a queue.
            InvalidInput: The topic has no such partition.
        """
        if self.topic is None:
            if starts.everywhere is None:
                raise click.UsageError(
                    f"{option} {starts.text} has sequences by partition, and one queue of "
                    f"{self.store.url} is meant: give a sequence such as 42"
                )
            return starts.resolved(str)
        if starts.everywhere is not None and starts.everywhere.sequence is not None:
            raise click.UsageError(
                f"{option} {starts.text} is a sequence, and each partition counts for itself: name "
                f'one with --partition, give sequences by partition such as \'{{"0": '
                f"{starts.text}}}', a time, or 'latest'"
            )
        return starts.resolved(self.topic.description.resolved)

    def words(self, config: Any) -> str:
        """How one of its queues is named in another command."""
        if self.topic is None:
            return queue_words()
        return f"{queue_words()} --partition {config.data_path_prefix}"


def place_of(
    runtime: Any,
    queue: dict[str, Any],
    make: Any = None,
    *,
    look_ms: int | None = None,
    **settings: Any,
) -> Place:
    """Open the store that a command's options name, and see whether there is a topic.

    Costs a small read where neither partition, data prefix nor manifest was named.

    Args:
        runtime: Clock.
        queue: Values of ``queue_options``.
        make: Class of the settings; ``QueueConfig`` by default.
        look_ms: Longest time to look for a topic, if that is less than the settings' own.
        settings: More fields of it.
    """
    from opendata_buffer.config import QueueConfig

    one = any(queue[name] is not None for name in _NAMES_ONE_QUEUE)
    config = (make or QueueConfig)(**queue_fields_of(queue), **settings)
    return open_place(runtime, config, one, look_ms)


def open_place(runtime: Any, config: Any, one: bool, look_ms: int | None = None) -> Place:
    """Open a store, and see whether there is a topic unless ``one`` queue is meant."""
    from opendata_buffer.errors import PermanentStorageError
    from opendata_buffer.runtime import deadline
    from opendata_buffer.stores.open import open_store
    from opendata_buffer.topic.topic import Topic

    store = open_store(config.store, config.store_options)
    if one:
        return Place(store, config, None)
    most_ms = min(config.cas_deadline_ms, look_ms or config.cas_deadline_ms)
    try:
        with deadline(runtime, most_ms / 1000):
            topic = Topic.find(config, store=store, runtime=runtime)
    except PermanentStorageError:
        topic = None  # who may not look outside of the prefix may still have a queue there
    return Place(store, config, topic)
