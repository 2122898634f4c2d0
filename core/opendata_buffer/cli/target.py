"""The queue, or the topic with all its partitions, that a command's STORE and options name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from opendata_buffer.admin.rebuild import read_raw
from opendata_buffer.cli.options import (
    NAMES_ONE_QUEUE,
    SOON_MS,
    remember_flags,
    remember_queue,
)
from opendata_buffer.concurrency import in_parallel
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, QueueConfig, StoreOptions
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.queue.ownership import check_owner, has_letters
from opendata_buffer.runtime import Runtime, deadline
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic

if TYPE_CHECKING:  # It imports Arrow, and a probe that runs every few seconds does not need it.
    from opendata_buffer.admin.trim import Start

Config = TypeVar("Config", bound=QueueConfig)


@dataclass(frozen=True)
class Target:
    """An opened store, and the queues in it that a command works on.

    Attributes:
        store: The store.
        config: Settings of the queue, or of the topic's root; of the class that the command uses.
        topic: The topic; None for one queue.
    """

    store: Store
    config: Any
    topic: Topic | None = None

    def configs(self) -> list[Any]:
        """Settings of each queue: of a topic's partitions as they are listed now."""
        if self.topic is None:
            return [self.config]
        return [self.topic.config_of(name, self.config) for name in self.topic.read().names]

    def written(self, runtime: Runtime) -> list[Any]:
        """As :meth:`configs`, but of a topic only the partitions that were ever used."""

        def exists(config: QueueConfig) -> bool:
            # A partition that lost its manifest still has its marker, and needs repair.
            if check_owner(self.store, config, runtime=runtime) is not None:
                return True
            return read_raw(self.store, config.manifest_path) is not None

        if self.topic is None:
            return [self.config]
        configs = self.configs()
        found = in_parallel(runtime, exists, configs)
        return [config for config, is_there in zip(configs, found, strict=True) if is_there]

    def check_start(self, start: Start, option: str) -> None:
        """Raises UsageError for a sequence as the start of a whole topic."""
        if self.topic is not None and start.sequence is not None:
            raise click.UsageError(
                f"{option} {start.text} is a sequence, and partitions count separately: name one "
                "with --partition, or give a time, or 'latest'"
            )


def target_of(
    runtime: Runtime,
    options: dict[str, Any],
    make: Callable[..., QueueConfig] = QueueConfig,
    *,
    topic_deadline_ms: int | None = None,
    **settings: Any,
) -> Target:
    """Open the store that a command's options name, and look for a topic there.

    Costs a small read where neither partition, data prefix nor manifest was named.

    Args:
        topic_deadline_ms: Limit for finding the topic, if that is below the settings' own.
        settings: More fields of it.
    """
    if any(options[name] is not None for name in NAMES_ONE_QUEUE):
        return one_queue(options, make, **settings)
    target = one_queue(options, make, **settings)
    config, store = target.config, target.store
    limit_ms = min(config.cas_deadline_ms, topic_deadline_ms or config.cas_deadline_ms)
    try:
        with deadline(runtime, limit_ms / 1000):
            return replace(target, topic=Topic.find(config, store=store, runtime=runtime))
    except PermanentStorageError:
        return target  # A role that may read only the prefix may still have a queue there.


def one_queue(
    options: dict[str, Any], make: Callable[..., QueueConfig] = QueueConfig, **settings: Any
) -> Target:
    """Open the store that a command's options name, for a command about a single queue."""
    config = make(**_queue_fields(options), **settings)
    return Target(open_store(config.store, config.store_options), config)


def soon(config: Config) -> Config:
    """The settings with a short deadline: a mistyped path or a dead store is reported soon."""
    return replace(config, cas_deadline_ms=min(config.cas_deadline_ms, SOON_MS))


def require_queue(target: Target, runtime: Runtime) -> None:
    """Raises InvalidInput where there is no queue, before a command would create one."""
    ReadOnlyReader(soon(target.config), store=target.store, runtime=runtime).manifest()


def store_options_of(options: dict[str, Any]) -> StoreOptions:
    """StoreOptions from the values of ``store_options``; takes ``timeout_ms`` out of them.

    The attempts of one request share the deadline, so a store that accepts connections and never
    answers is given up at the deadline, and not after five times 30 seconds.
    """
    remember_flags()
    timeout_ms = options.pop("timeout_ms")
    attempts = 2 if timeout_ms < 30_000 else 3
    share_ms = max(1, timeout_ms // attempts)
    return StoreOptions(
        **options,
        connect_timeout_ms=min(share_ms, StoreOptions.connect_timeout_ms),
        read_timeout_ms=min(share_ms, StoreOptions.read_timeout_ms),
        max_attempts=attempts,
    )


def _queue_fields(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a QueueConfig from the values of ``queue_options``."""
    options = dict(options)
    remember_queue(options)
    prefix, partition = options.pop("data_path_prefix"), options.pop("partition")
    if partition is not None and (prefix is not None or options["manifest_path"] is not None):
        raise click.UsageError(
            "--partition says where the queue is: leave --data-path-prefix and --manifest-path out"
        )
    fields = {
        "store": options.pop("store"),
        # The configuration refuses an empty prefix.
        "data_path_prefix": DEFAULT_DATA_PATH_PREFIX if prefix is None else prefix,
        "manifest_path": options.pop("manifest_path") or "",
        "cas_deadline_ms": options["timeout_ms"],
        "store_options": store_options_of(options),
    }
    if partition is not None:
        fields["data_path_prefix"] = _partition(partition, fields)
    return fields


def _partition(given: str, fields: dict[str, Any]) -> str:
    """The whole name of a partition. Only an abbreviation takes a read of the topic."""
    if has_letters(given):
        return given
    topic = Topic.open(QueueConfig(**fields), runtime=click.get_current_context().obj)
    # A partition that has left the topic keeps its unacknowledged batches until they are collected.
    known = topic.description
    return known.left_name(given) if known.has_left(given) else known.resolved(given)
