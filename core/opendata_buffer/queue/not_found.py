"""Explain that a queue does not exist, and name the nearest thing that does.

Most often the data prefix or the manifest path is mistyped, the queue is a partition of a topic, or
it was never created. The error names the nearest thing that exists, and the setting to change.
"""

from __future__ import annotations

from opendata_buffer import errors
from opendata_buffer.config import PARTITION_NAME, QueueConfig
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue import unaccounted
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.neighbours import TOPIC_KEY, hint_to_parent, missing_topic_hint
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.queue.stored_manifest import read_manifest
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store, exists


def require_queue(store: Store, config: QueueConfig, runtime: Runtime) -> None:
    """Check that the queue exists, for a worker that must not create one at a mistyped path.

    Args:
        store: The opened store of the queue.
        config: The queue.
        runtime: Clock and sleep.

    Raises:
        InvalidInput: The queue does not exist.
        QueueReset: The queue exists, but has lost its manifest.
        StorageError: The store did not answer.
    """
    if read_manifest(store, config, runtime) is None:
        claim = check_owner(store, config, runtime=runtime)
        if claim is None:
            raise no_such_queue(store, config, creates=True)
        claim.check(None)


def no_such_queue(
    store: Store, config: QueueConfig, *, creates: bool = False
) -> errors.InvalidInput:
    """Make the error of a program that found no manifest. It names the nearest thing that is there.

    Args:
        store: Where the program looked.
        config: The queue that it looked for.
        creates: Whether the caller has an option that creates a queue.

    Returns:
        The error, to be raised by the caller.
    """
    prefix = config.data_path_prefix
    if hint := hint_to_parent(store, config):
        return errors.InvalidInput(
            f"there is no queue at {store.url}: this is the data prefix of one", hint
        )
    if exists(store, TOPIC_KEY):
        root = QueueConfig(store=store.url, store_options=config.store_options)
        lists = Hint(Action.LIST_PARTITIONS, queue_name(store.url, root))
        if PARTITION_NAME.fullmatch(prefix) is None:
            return errors.InvalidInput(
                f"there is a topic at {store.url}, and one queue is needed",
                Hint(Action.NAME_PARTITION),
                lists,
            )
        return errors.InvalidInput(
            f"partition {prefix!r} of the topic at {store.url} was never written", lists
        )
    if lost := missing_topic_hint(store):
        return errors.InvalidInput(lost)
    if error := unaccounted.refusal(store, config, None):
        return error
    return errors.InvalidInput(
        f"there is no queue: no manifest {config.manifest_path!r} in {store.url}",
        Hint(Action.CREATE_QUEUE if creates else Action.FIND_QUEUE),
    )
