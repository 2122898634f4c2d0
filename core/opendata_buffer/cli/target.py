"""Find the queue or the topic that a command's STORE and options name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click

from opendata_buffer.admin.target import Target, partition_named, read_raw
from opendata_buffer.cli.options import (
    NAMES_ONE_QUEUE,
    REACH_STORE,
    remember_opened,
    remember_queue,
)
from opendata_buffer.config import QueueConfig, StoreOptions
from opendata_buffer.consumer.place import Place
from opendata_buffer.errors import CorruptData, PermanentStorageError
from opendata_buffer.formats.batch import is_confined, prefix_of
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.marker import OWNER_NAME
from opendata_buffer.queue.neighbours import LISTED_BELOW, has_letters
from opendata_buffer.runtime import Runtime, deadline
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic, partition_config


def check_start(target: Target, start: Place, option: str) -> None:
    """Refuse a sequence as the start of a whole topic.

    Args:
        target: The queue or the topic.
        start: The start.
        option: The option that names it.

    Raises:
        click.UsageError: The target is a topic, and the start is a sequence.
    """
    if target.topic is not None and start.sequence is not None:
        raise click.UsageError(
            f"{option} {start.text} is a sequence, and partitions count separately: name one with "
            "--partition, or give a time, or 'latest'"
        )


def target_of(
    runtime: Runtime,
    options: dict[str, Any],
    make: Callable[..., QueueConfig] = QueueConfig,
    *,
    topic_deadline_ms: int | None = None,
    **settings: Any,
) -> Target:
    """Open the store like :func:`one_queue`, for a command that also works on a topic.

    Makes a small read unless a partition, a data prefix or a manifest is named.

    Args:
        runtime: Clock and threads.
        options: The values of the command's options.
        make: The class of the configuration.
        topic_deadline_ms: A shorter limit for that read than the settings have, in milliseconds.
        **settings: Other settings.

    Returns:
        The queue, or the topic with its description.
    """
    target = one_queue(runtime, options, make, **settings)
    return with_topic(target, options, topic_deadline_ms=topic_deadline_ms)


def with_topic(
    target: Target, options: dict[str, Any], *, topic_deadline_ms: int | None = None
) -> Target:
    """Add the topic of a store to a target, unless the options name one queue.

    Args:
        target: The queue at the options' place.
        options: The values of the command's options.
        topic_deadline_ms: A shorter limit than the settings have, in milliseconds.

    Returns:
        The queue, or the topic with its description.
    """
    if any(options[name] is not None for name in NAMES_ONE_QUEUE):
        return target
    config = target.config
    limit_ms = min(config.timeout_ms, topic_deadline_ms or config.timeout_ms)
    with deadline(target.runtime, limit_ms / 1000):
        topic = Topic.find(config, store=target.store, runtime=target.runtime)
        return replace(target, topic=topic)


def one_queue(
    runtime: Runtime,
    options: dict[str, Any],
    make: Callable[..., QueueConfig] = QueueConfig,
    **settings: Any,
) -> Target:
    """Open the store that a command's options name, for a command about a single queue.

    Args:
        runtime: Clock and threads.
        options: The values of :data:`.options.queue`, and of options that are named after a setting
            of ``make``.
        make: The class of the configuration.
        **settings: Other settings.

    Returns:
        The queue.

    Raises:
        click.UsageError: Options contradict each other.
    """
    store_options = reach_store(options)
    remember_queue(options, store_options)
    config = config_of(options, store_options, make, **settings)
    store = open_store(config.store, config.store_options)
    remember_opened()
    return find_queue(store, config, options, runtime)


def reach_store(options: dict[str, Any]) -> StoreOptions:
    """Return how to reach the store, from the values of a command's options."""
    given = {name: options[name] for name in REACH_STORE if name in options}
    # The attempts of one request share the timeout. Otherwise a command would wait five times 30
    # seconds for a store that accepts connections but never answers.
    timeout_ms = given["timeout_ms"]
    attempts = 2 if timeout_ms < 30_000 else 3
    share_ms = max(1, timeout_ms // attempts)
    return StoreOptions(
        **given,
        connect_timeout_ms=min(share_ms, StoreOptions.connect_timeout_ms),
        read_timeout_ms=min(share_ms, StoreOptions.read_timeout_ms),
        max_attempts=attempts,
    )


def config_of(
    options: dict[str, Any],
    store_options: StoreOptions,
    make: Callable[..., QueueConfig] = QueueConfig,
    **settings: Any,
) -> QueueConfig:
    """Return the settings that a command's options name. Makes no request.

    Args:
        options: As for :func:`one_queue`.
        store_options: How to reach the store.
        make: The class of the configuration.
        **settings: Other settings.

    Returns:
        The settings, without the partition that the options may name.

    Raises:
        click.UsageError: Options contradict each other.
    """
    given = {name: value for name, value in options.items() if name not in REACH_STORE}
    prefix, partition = given.pop("data_path_prefix"), given.pop("partition")
    if partition is not None and (prefix is not None or given["manifest_path"] is not None):
        raise click.UsageError(
            "--partition names the queue: leave --data-path-prefix and --manifest-path out"
        )
    if prefix is not None:  # The configuration refuses an empty prefix.
        given["data_path_prefix"] = prefix
    given["manifest_path"] = given["manifest_path"] or ""
    return make(**given, **settings, store_options=store_options)


def find_queue(
    store: Store, config: QueueConfig, options: dict[str, Any], runtime: Runtime
) -> Target:
    """Find the data prefix of a queue whose manifest or abbreviated partition was given.

    Args:
        store: The opened store.
        config: The settings that :func:`config_of` returned.
        options: The values of the command's options.
        runtime: Clock and threads.

    Returns:
        The queue.
    """
    partition = options["partition"]
    if config.manifest_path == options["manifest_path"] and options["data_path_prefix"] is None:
        used = _prefix_in_use(store, config.manifest_path)
        config = replace(config, data_path_prefix=used or config.data_path_prefix)
    if partition is not None:
        if not has_letters(partition):  # Only an abbreviation has to read the topic.
            partition = partition_named(partition, Topic.open(config, store=store, runtime=runtime))
        config = partition_config(partition, config)
    return Target(store, config, runtime)


def _prefix_in_use(store: Store, manifest_path: str) -> str | None:
    """Return the data prefix of the first queued batch, or else the only existing data prefix.

    Looks only below the manifest's folder: a manifest must not lead anywhere else (failure F23).

    Returns:
        The prefix; None if it cannot be found.
    """
    folder = manifest_path.rpartition("/")[0]
    raw = read_raw(store, manifest_path) if folder else None
    if raw is None:
        return None
    try:
        keys = [entry.location for entry in Manifest.parse(raw).entries(0, 1)]
    except CorruptData:
        keys = []  # The command itself reports this.
    with suppress(PermanentStorageError):  # Without permission to list, use the default.
        keys = keys or [each.key for each in store.list(f"{folder}/", limit=LISTED_BELOW).objects]
    marked = {each.removesuffix(f"/{OWNER_NAME}") for each in keys if each.endswith(OWNER_NAME)}
    found = {prefix_of(each) for each in keys if is_confined(each, folder)} | marked
    found.discard(None)
    return found.pop() if len(found) == 1 else None
