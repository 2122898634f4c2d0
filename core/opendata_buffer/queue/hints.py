"""Name a queue or topic for the hints of errors, and warn of records that are gone.

A hint often contains a command, such as ``opendata-buffer fsck s3://bucket --repair``. To work as
printed, the command needs the store, every option that is not at its default, and how to reach the
store. The functions here collect these settings from a configuration, without its secrets.
"""

from __future__ import annotations

from dataclasses import replace

from opendata_buffer.config import (
    DEFAULT_DATA_PATH_PREFIX,
    PARTITION_NAME,
    QueueConfig,
)
from opendata_buffer.hints import Action, Hint, QueueName


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
    is_default = manifest == f"{prefix}/manifest"
    partition = PARTITION_NAME.fullmatch(prefix)
    if is_default and partition is not None and partition["letters"]:
        options.append(("partition", prefix))
    elif prefix != DEFAULT_DATA_PATH_PREFIX:
        options.append(("data_path_prefix", prefix))
    if not is_default:
        options.append(("manifest_path", manifest))
    return QueueName(url, manifest, (*options, *config.store_options.for_commands()))


def topic_name(url: str, config: QueueConfig) -> QueueName:
    """Return the name of a queue as :func:`queue_name` does, or of its topic for a partition."""
    if PARTITION_NAME.fullmatch(config.data_path_prefix) is not None:
        config = replace(config, data_path_prefix=DEFAULT_DATA_PATH_PREFIX, manifest_path="")
    return queue_name(url, config)


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
    hint = Hint(Action.KEEP_RECORDS, topic_name(url, config))
    return (
        f"{what} read and removed before {who} and will not be read: reading a queue removes its "
        f"records. {hint}"
    )
