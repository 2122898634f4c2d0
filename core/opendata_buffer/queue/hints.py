"""Name a queue, a topic or a reader in a command that an operator can run.

An error often ends with the command that helps, such as ``opendata-buffer fsck s3://bucket
--repair``. To work as printed, the command needs the store, every option that is not at its
default, and how to reach the store, quoted for a shell. The functions here return these words. They
never contain a credential.
"""

from __future__ import annotations

from dataclasses import replace

from opendata_buffer.config import (
    DEFAULT_DATA_PATH_PREFIX,
    PARTITION_NAME,
    QueueConfig,
)
from opendata_buffer.hints import QueueName


def queue_name(url: str, config: QueueConfig) -> QueueName:
    """Name a queue for its errors.

    Args:
        url: The URL of the store.
        config: The queue. Settings with their default value are left out, and so are secrets.

    Returns:
        The name.
    """
    prefix, manifest = config.data_path_prefix, config.manifest_path
    options: list[tuple[str, str | bool]] = []
    if prefix != DEFAULT_DATA_PATH_PREFIX:
        options.append(("data_path_prefix", prefix))
    if manifest != f"{prefix}/manifest":
        options.append(("manifest_path", manifest))
    return QueueName(url, manifest, (*options, *config.store_options.for_commands()))


def topic_name(url: str, config: QueueConfig) -> QueueName:
    """Return the name of a queue as :func:`queue_name` does, or of its topic for a partition."""
    if PARTITION_NAME.fullmatch(config.data_path_prefix) is not None:
        config = replace(config, data_path_prefix=DEFAULT_DATA_PATH_PREFIX, manifest_path="")
    return queue_name(url, config)


def queue_hint(url: str, config: QueueConfig) -> str:
    """Write a queue as the command line takes it, quoted for a shell.

    Args:
        url: The URL of the store.
        config: The queue. Options with their default value are left out, and so are secrets.

    Returns:
        The arguments of a command, such as ``s3://bucket --data-path-prefix orders``.
    """
    return queue_name(url, config).words()


def reset_command(url: str, config: QueueConfig, reader: str, sequence: int) -> str:
    """Write the command that sets a reader of a log to a sequence.

    Args:
        url: The URL of the store.
        config: The log.
        reader: The reader.
        sequence: The first sequence that it will read.

    Returns:
        The command, in single quotes.
    """
    words = queue_hint(url, config)
    return f"'opendata-buffer readers reset {words} {reader} --to-sequence {sequence}'"


def topic_hint(url: str, config: QueueConfig) -> str:
    """Return a queue as :func:`queue_hint` does, or its whole topic if it is a partition."""
    return topic_name(url, config).words()


def wrong_marker_hint(url: str, config: QueueConfig) -> str:
    """Write advice for a prefix that has another owner.

    Args:
        url: The URL of the store.
        config: The queue that was refused.

    Returns:
        A sentence with a space in front.
    """
    hint = queue_hint(url, config)
    return (
        " If nothing but a wrong option made its owner marker, 'opendata-buffer fsck "
        f"{hint} --repair' gives the prefix to this queue."
    )


def removed_before(count: int, url: str, config: QueueConfig, who: str) -> str:
    """Write a warning for a program that starts at the earliest, but not the first, batch.

    Users who know Kafka expect that starting at the earliest position reads everything again.

    Args:
        count: Batches that left the queue before, in all partitions of a topic.
        url: The URL of the store.
        config: The queue, or one partition.
        who: The program that starts to read, such as ``this query``.

    Returns:
        The warning.
    """
    what = "1 batch was" if count == 1 else f"{count} batches were"
    return (
        f"{what} read and removed before {who} and will not be read: reading a queue removes its "
        "records. To keep them for other readers and for replays, make a log: 'opendata-buffer "
        f"readers enable {topic_hint(url, config)} --retention 7d'"
    )
