"""Keep a new queue away from the other queues and topics in its store.

The data prefix of a queue may be anywhere in a store, and several queues may share the store.
Before a new queue is created, its place is checked, because some places lead to lost data later
(failure F7):

* **Inside another queue's prefix, or around it.** The collector of the outer queue lists everything
  below its prefix and deletes what its manifest does not name, and that includes the batches of the
  inner queue::

      lake/orders/_owner.json          a queue at lake/orders
      lake/orders/eu/_owner.json       refused: its batches would be deleted

  The same happens if the store itself is the data prefix of a queue, because someone wrote
  ``s3://bucket/orders/ingest`` and meant ``s3://bucket/orders``.
* **Next to the partitions of a topic.** The readers of the topic read only the partitions that its
  description ``_topic.json`` lists. They would never see this queue. The usual cause is a
  ``Producer`` where a ``TopicProducer`` was meant, or a partition name that was abbreviated from
  ``p-00000-04pn`` to ``p-00000``.
* **Next to partitions whose description is gone.** The topic must be repaired first (failure F4).

A full name such as ``p-00000-04pn`` contains random letters, so it cannot be guessed. A process
that uses such a name has read it in the description.

These checks cost a few small reads and one page of a listing, and only when a queue is created. A
process that may not read outside its prefix gets no answer and is allowed to continue.
"""

from __future__ import annotations

import json
from urllib.parse import urlsplit

from opendata_buffer import errors
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX, PARTITION_NAME, QueueConfig
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.marker import OWNER_NAME, owner_key
from opendata_buffer.stores.base import Get, Store, exists, read_bytes

TOPIC_KEY = "_topic.json"
"""The description of a topic, relative to the topic's root."""

LISTED_BELOW = 1_000
"""Number of objects below a new prefix that are searched for markers: one page of a listing."""


def check_manifest_path(store: Store, config: QueueConfig) -> None:
    """Refuse a queue with an explicit manifest path in a store that holds a topic.

    Costs one small read if the manifest is not at its default place, and nothing otherwise.

    Args:
        store: The opened store of the queue.
        config: The queue.

    Raises:
        InvalidInput: There is a topic. All its partitions have their manifests at the default
            place.
        TransientStorageError: The store did not answer.
    """
    if config.manifest_path == f"{config.data_path_prefix}/manifest":
        return
    try:
        is_topic = exists(store, TOPIC_KEY)
    except errors.PermanentStorageError:
        return  # A process that may not read outside its prefix may still have a queue.
    if is_topic:
        raise errors.InvalidInput(
            f"there is a topic at {store.url}, and each of its partitions has its manifest at "
            "'<partition>/manifest'",
            Hint(Action.USE_DEFAULT_MANIFEST, path=config.manifest_path),
        )


def check_prefix_is_free(store: Store, config: QueueConfig) -> None:
    """Refuse a new queue whose data prefix conflicts with another queue or with a topic.

    Args:
        store: The opened store of the queue.
        config: The new queue.

    Raises:
        InvalidInput: The prefix is inside or around that of another queue, or at, in or around a
            topic; or the store is the data prefix of a queue.
        TransientStorageError: The store did not answer.
    """
    check_not_within_queue(store, config)
    data_path_prefix = config.data_path_prefix
    parts = data_path_prefix.split("/")
    outer = ["/".join(parts[:length]) for length in range(len(parts))]
    for root in (*outer, data_path_prefix):
        inner = data_path_prefix[len(root) :].lstrip("/")
        if _is_beside_partitions(store, root, inner):
            raise errors.InvalidInput(
                f"there is a topic at {_root_text(root)}, and {data_path_prefix!r} is not one of "
                "its partitions: readers of the topic would not see this queue",
                Hint(Action.USE_TOPIC),
            )
    if PARTITION_NAME.fullmatch(parts[-1]) is None:
        for root in outer:
            if hint := missing_topic_hint(store, root):
                raise errors.InvalidInput(hint)
    for root in outer[1:]:
        if exists(store, owner_key(root)):
            other = _nested(data_path_prefix, root, f"inside the data prefix {root!r} of another")
            raise other.add(Hint(Action.CORRECT_OWNER, queue_name(store.url, config)))
    below = store.list(f"{data_path_prefix}/", limit=LISTED_BELOW)
    for found in below.objects:
        folder, _, name = found.key.rpartition("/")
        if name == OWNER_NAME and folder != data_path_prefix:
            raise _nested(data_path_prefix, folder, f"around the data prefix {folder!r} of another")
        if name == TOPIC_KEY:
            raise errors.InvalidInput(
                f"data prefix {data_path_prefix!r} lies around the topic at {folder!r}: a garbage "
                f"collector may delete the topic's batches. Use a prefix beside {folder!r}."
            )


def check_not_within_queue(store: Store, config: QueueConfig) -> None:
    """Refuse a new queue or topic in a store that is the data prefix of a queue.

    Args:
        store: The opened store.
        config: The new queue or topic.

    Raises:
        InvalidInput: The store is such a prefix.
        TransientStorageError: The store did not answer.
    """
    try:
        hint = hint_to_parent(store, config)
    except errors.PermanentStorageError:
        return  # A process that may not read outside its prefix may still have a queue.
    if hint is not None:
        raise errors.InvalidInput(
            f"{store.url} is the data prefix of a queue, and a garbage collector of that queue may "
            "delete what is created in it",
            hint,
        )


def hint_to_parent(store: Store, config: QueueConfig) -> Hint | None:
    """Look for a queue whose data prefix is the store itself, as in ``s3://bucket/orders/ingest``.

    Costs one or two small reads.

    Args:
        store: The opened store.
        config: The queue that was looked for or is to be created.

    Returns:
        The hint that names the queue; None if there is no such queue.

    Raises:
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    parent, _, folder = store.url.rpartition("/")
    if not urlsplit(store.url).path.strip("/"):
        return None
    # Other clients write no marker. They keep their manifest at ingest/manifest by default.
    is_prefix = exists(store, OWNER_NAME) or (
        folder == DEFAULT_DATA_PATH_PREFIX
        and config.manifest_path != "manifest"
        and exists(store, "manifest")
    )
    if not is_prefix:
        return None
    above = QueueConfig(store=parent, data_path_prefix=folder, store_options=config.store_options)
    return Hint(Action.USE_PARENT, queue_name(parent, above), path=parent, prefix=folder)


def missing_topic_hint(store: Store, root: str = "") -> str | None:
    """Look for partitions of a topic whose description is gone.

    Args:
        store: Where to look.
        root: A folder without a slash at its end, or empty for the store's root.

    Returns:
        The text of an error; None if there are no such partitions.

    Raises:
        TransientStorageError: The store did not answer.
    """
    try:
        below = store.list(f"{root}/p-0".lstrip("/"), limit=1)
    except errors.PermanentStorageError:
        return None  # A process that may not read outside its prefix may still have a queue.
    for found in below.objects:
        name = found.key.removeprefix(f"{root}/").split("/")[0]
        if not has_letters(name) or exists(store, _topic_key(root)):
            break
        return (
            f"there is partition {name!r} of a topic at {_root_text(root)}, and the topic's "
            f"description {TOPIC_KEY!r} is gone: readers of the topic would not see a queue beside "
            "it. Put its latest version back (bucket versioning). If the topic was given up, "
            "delete what is left of it, or use another store."
        )
    return None


def _is_beside_partitions(store: Get, root: str, inner: str) -> bool:
    """Return whether there is a topic at this root that has no partition of this name."""
    try:
        description = read_bytes(store, _topic_key(root), 1024 * 1024)
    except (errors.ObjectNotFound, errors.PermanentStorageError):
        # A process that may not read outside its prefix may still have a queue there.
        return False
    name = PARTITION_NAME.fullmatch(inner)
    if name is None or name["letters"]:
        # A name with letters cannot be guessed, so the topic has listed it at some time. If the
        # topic does not list it any more, its manifest is sealed and refuses every write.
        return name is None
    try:
        names = [str(each["name"]) for each in json.loads(description)["partitions"]]
    except (ValueError, RecursionError, TypeError, KeyError):
        return False  # Reading the topic raises the error about its description.
    return inner not in names and any(has_letters(name) for name in names)


def has_letters(name: str) -> bool:
    """Return whether this is the full name of a partition, with its random letters."""
    found = PARTITION_NAME.fullmatch(name)
    return found is not None and found["letters"] is not None


def _topic_key(root: str) -> str:
    return f"{root}/{TOPIC_KEY}".lstrip("/")


def _root_text(root: str) -> str:
    return f"{root!r} in this store" if root else "the root of this store"


def _nested(data_path_prefix: str, other: str, where: str) -> errors.InvalidInput:
    return errors.InvalidInput(
        f"data prefix {data_path_prefix!r} lies {where} queue: a garbage collector of the outer "
        f"one may delete the inner one's batches. Use a prefix beside {other!r}."
    )
