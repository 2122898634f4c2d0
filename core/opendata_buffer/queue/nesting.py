"""Queues inside each other's data prefix: refused where that can be seen (failure F7).

The collector of a v1 client deletes everything under its prefix that its manifest does not name:
a whole queue, if one lies there. Each queue's marker shows where a queue is, so who makes a new
one looks for markers above it, and among the first objects below it.

A topic's root shows by the topic's description. Below it lie its partitions and nothing else: a
queue beside them is one that its readers do not see, most likely made by a producer that took
the topic for a queue.
"""

from __future__ import annotations

import json
import re
from typing import Protocol

from opendata_buffer.errors import CorruptData, InvalidInput, ObjectNotFound, PermanentStorageError
from opendata_buffer.stores import Blob, Get, List

__all__ = ["PARTITION_NAME", "TOPIC_KEY", "lost_topic", "refuse_nesting"]

TOPIC_KEY = "_topic.json"
"""The description of a topic, below its root."""

PARTITION_NAME = re.compile(r"p-(?P<number>[0-9]{5})(?:-(?P<letters>[0-9a-z]{4}))?")
"""Names of partitions, which are their data prefixes below the topic's root. Topics that were made
before names had letters behind the number go on without."""

LOOKED_AT = 1_000
"""Objects below the new prefix that are looked at: one page of a listing."""

_MAX_MARKER_BYTES = 1024 * 1024


class ReadList(Get, List, Protocol):
    """What looking around needs of a store."""


def refuse_nesting(store: ReadList, data_path_prefix: str, marker_name: str) -> None:
    """Check a data prefix that is about to get its first queue.

    Raises:
        InvalidInput: It lies inside another queue's data prefix, or one lies inside it; or it
            lies at, in or around a topic, or beside what is left of one, and is no partition's.
        StorageError: The store did not answer.
    """
    parts = data_path_prefix.split("/")
    for length in range(len(parts) + 1):
        root, inner = "/".join(parts[:length]), "/".join(parts[length:])
        if _is_no_partition(store, root, inner):
            raise _in_topic(data_path_prefix, root)
    if PARTITION_NAME.fullmatch(parts[-1]) is None:
        for length in range(len(parts)):
            if lost := lost_topic(store, "/".join(parts[:length])):
                raise InvalidInput(lost)
    for length in range(1, len(parts)):
        outer = "/".join(parts[:length])
        if exists(store, f"{outer}/{marker_name}"):
            raise _nested(data_path_prefix, outer, f"inside the data prefix {outer!r} of another")
    below = store.list(f"{data_path_prefix}/", limit=LOOKED_AT)
    for found in below.objects:
        folder, _, name = found.key.rpartition("/")
        if name == marker_name and folder != data_path_prefix:
            raise _nested(data_path_prefix, folder, f"around the data prefix {folder!r} of another")
        if name == TOPIC_KEY:
            raise InvalidInput(
                f"data prefix {data_path_prefix!r} lies around the topic at {folder!r}: a garbage "
                f"collector may delete the topic's batches. Use a prefix beside {folder!r}."
            )


def lost_topic(store: ReadList, root: str = "") -> str | None:
    """What to tell who finds no topic at a root where the partitions of one lie; None otherwise.

    A queue made beside them would be read by nobody, once the description is back.

    Args:
        store: Where to look.
        root: A folder without a slash at its end; empty for the store's.
    """
    try:
        below = store.list(f"{root}/p-0".lstrip("/"), limit=1)
    except PermanentStorageError:
        return None  # who may not look outside of the prefix may still have a queue there
    for found in below.objects:
        name = found.key.removeprefix(f"{root}/").split("/")[0]
        if not _has_letters(name) or exists(store, f"{root}/{TOPIC_KEY}".lstrip("/")):
            break
        where = f"{root!r} in this store" if root else "the root of this store"
        return (
            f"there is partition {name!r} of a topic at {where}, and the topic's description "
            f"{TOPIC_KEY!r} is gone: who reads the topic would not see a queue beside it. Put its "
            "latest version back (bucket versioning). If the topic was given up, delete what is "
            "left of it, or use another store."
        )
    return None


def _is_no_partition(store: Get, root: str, inner: str) -> bool:
    """Whether a topic is at this root, and has no partition of this name."""
    try:
        found = store.get(f"{root}/{TOPIC_KEY}".lstrip("/"), max_bytes=_MAX_MARKER_BYTES)
    except ObjectNotFound:
        return False
    except PermanentStorageError:
        return False  # who may not look outside of the prefix may still have a queue there
    meant = PARTITION_NAME.fullmatch(inner)
    if meant is None or meant["letters"]:
        # A name with its letters nobody makes up. If it is not listed any more, what its writer
        # does next is refused by its manifest, which was closed.
        return meant is None
    names = _listed(found.data) if isinstance(found, Blob) else []
    return inner not in names and any(_has_letters(name) for name in names)


def _has_letters(name: str) -> bool:
    found = PARTITION_NAME.fullmatch(name)
    return found is not None and found["letters"] is not None


def _listed(description: bytes) -> list[str]:
    """The names in a topic's description; none if they cannot be read: others say so."""
    try:
        return [str(each["name"]) for each in json.loads(description)["partitions"]]
    except (ValueError, RecursionError, TypeError, KeyError):
        return []


def exists(store: Get, key: str) -> bool:
    """Whether a small object, such as a marker, is there; one read.

    Raises:
        StorageError: The store did not answer.
    """
    try:
        store.get(key, max_bytes=_MAX_MARKER_BYTES)
    except ObjectNotFound:
        return False
    except CorruptData:
        return True  # It is too large to be one; who reads it says so.
    return True


def _in_topic(data_path_prefix: str, root: str) -> InvalidInput:
    where = f"{root!r} in this store" if root else "the root of this store"
    return InvalidInput(
        f"there is a topic at {where}, and {data_path_prefix!r} is none of its partitions: readers "
        "of the topic would not see this queue. Use a TopicProducer or TopicConsumer, one "
        "partition (--partition 0, in Python Topic.config_of), or another store for a queue."
    )


def _nested(data_path_prefix: str, other: str, where: str) -> InvalidInput:
    return InvalidInput(
        f"data prefix {data_path_prefix!r} lies {where} queue: a garbage collector of the outer "
        f"one may delete the inner one's batches. Use a prefix beside {other!r}."
    )
