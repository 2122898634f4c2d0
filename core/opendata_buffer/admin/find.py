"""Which queues and topics lie below a place in a store.

A queue shows by its marker, a topic by its description; a queue of a client that leaves no marker
by an object called ``manifest``. A queue may hold millions of batches, so what is found is passed
over: the walk asks for pages of the listing, and where one ends inside a queue or a topic it goes
on behind that. So it makes about as many requests as there are queues.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from opendata_buffer.admin.observe import Observer
from opendata_buffer.concurrency import together
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    PermanentStorageError,
    QueueReset,
)
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.ownership import OWNER_NAME, TOPIC_KEY, PrefixOwner, exists, read_owner
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.rollback_checks import queue_arguments
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Get, List, Store, read_sidecar
from opendata_buffer.topic.description import DESCRIPTION, TopicDescription

__all__ = ["Found", "find", "find_folders"]

PAGE = 1_000
"""Objects of one request of a listing."""

_MANIFEST = "manifest"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A queue or a topic.

    Attributes:
        kind: ``queue`` or ``topic``.
        store: URL to open it with.
        data_path_prefix: Of a queue below that; None for a topic.
        manifest_path: Of a queue below that; None for a topic.
        partitions: Of a topic; None for a queue.
        batches: How many wait; None where that could not be read.
        oldest_age_seconds: Since the oldest of them was produced; None without any.
        error: Why it could not be read; None when it could.
    """

    kind: str
    store: str
    data_path_prefix: str | None = None
    manifest_path: str | None = None
    partitions: int | None = None
    batches: int | None = None
    oldest_age_seconds: float | None = None
    error: str | None = None

    @property
    def words(self) -> list[str]:
        """How a command names it."""
        if self.kind == "topic" or self.data_path_prefix is None:
            return [self.store]
        return queue_arguments(self.store, self.data_path_prefix, self.manifest_path)

    def as_json(self) -> dict[str, Any]:
        """All fields, by name."""
        return asdict(self)


class ReadList(Get, List, Protocol):
    """What the walk needs of a store."""


def find_folders(store: ReadList) -> tuple[list[str], list[str]]:
    """The folders of topics, and those of queues that are no partitions, in order.

    A folder without a marker counts as a queue's where an object ``manifest`` lies in it; what
    that is, is not looked at.

    Raises:
        StorageError: The store did not answer.
    """
    walk = _Walk(store)
    for folder, name in walk.names():
        if name == TOPIC_KEY:
            walk.topics.add(folder)
        elif name in (OWNER_NAME, _MANIFEST) and folder:
            walk.queues.add(folder)
    queues = sorted(each for each in walk.queues if not walk.in_topic(each))
    return sorted(walk.topics), queues


class _Walk:
    """One walk over a listing, and what it has found so far."""

    def __init__(self, store: ReadList) -> None:
        self._store = store
        self._known: dict[str, bool] = {}
        self.topics: set[str] = set()
        self.queues: set[str] = set()

    def names(self) -> Iterator[tuple[str, str]]:
        """Folder and name of the objects, of each queue or topic at least the first page."""
        after = ""
        while True:
            page = self._store.list("", start_after=after, limit=PAGE)
            for info in page.objects:
                folder, _, name = info.key.rpartition("/")
                yield folder, name
            if not page.truncated or not page.objects:
                return
            last = page.objects[-1].key
            around = self._around(last)
            if around == "":
                return  # the store's root is a topic, and all below is its
            # "0" follows "/": behind all keys of the folder, before any of another one.
            after = last if around is None else f"{around}0"

    def in_topic(self, folder: str) -> bool:
        """Whether a folder lies in a topic: as one of its partitions, or by accident."""
        return any(root == "" or folder.startswith(f"{root}/") for root in self.topics)

    def _around(self, key: str) -> str | None:
        """The outermost topic or queue that an object lies in."""
        parts = key.split("/")[:-1]
        for length in range(len(parts) + 1):
            folder = "/".join(parts[:length])
            if self._has(folder, TOPIC_KEY):
                self.topics.add(folder)
                return folder
            if folder and self._has(folder, OWNER_NAME):
                self.queues.add(folder)
                return folder
        return None

    def _has(self, folder: str, name: str) -> bool:
        key = f"{folder}/{name}" if folder else name
        if key not in self._known:
            try:
                self._known[key] = exists(self._store, key)
            except PermanentStorageError:
                self._known[key] = False  # Who may list it, and not read it, walks through it.
        return self._known[key]


def find(store: Store, config: QueueConfig, runtime: Runtime) -> list[Found]:
    """The topics and queues below a store's root, with what waits in them.

    What cannot be read is in the list as well, with its error. An object called ``manifest``
    that is none, without a marker beside it, is left out.

    Args:
        store: Where to look; its root may be a whole bucket.
        config: Deadline of each read.
        runtime: Clock and threads.

    Raises:
        StorageError: The store did not answer.
    """
    topics, queues = find_folders(store)
    found = together(runtime, lambda each: _topic(store, each, config, runtime), topics)
    looked = together(runtime, lambda each: _queue(store, each, config, runtime), queues)
    return found + [each for each in looked if each is not None]


def _topic(store: Store, folder: str, config: QueueConfig, runtime: Runtime) -> Found:
    url = f"{store.url}/{folder}".rstrip("/")
    try:
        key = f"{folder}/{TOPIC_KEY}".lstrip("/")
        names = read_sidecar(store, key, DESCRIPTION, TopicDescription.from_json).names
        waits = []
        for name in names:
            prefix = f"{folder}/{name}".lstrip("/")
            own = replace(config, data_path_prefix=prefix, manifest_path="")
            waits.append(Observer(store, own, runtime).find() or Manifest.empty())
    except (CorruptData, QueueReset, PermanentStorageError) as error:
        return Found(kind="topic", store=url, error=str(error))
    ages = [age for each in waits if (age := each.age_s(runtime.now_ms())) is not None]
    return Found(
        kind="topic",
        store=url,
        partitions=len(names),
        batches=sum(each.entry_count for each in waits),
        oldest_age_seconds=max(ages, default=None),
    )


def _queue(store: Store, folder: str, config: QueueConfig, runtime: Runtime) -> Found | None:
    own = replace(config, data_path_prefix=folder, manifest_path="")
    marker: PrefixOwner | None = None
    try:
        marker = read_owner(store, own, runtime)
        if marker is not None:
            own = replace(own, manifest_path=marker.manifest_path)
        manifest = Queue(store, own, runtime=runtime, role="observer").read()
        error = None if manifest is not None else "its manifest is gone"
    except (CorruptData, InvalidInput, PermanentStorageError) as fault:
        # Who may not read it cannot tell whether it is one.
        told = marker is not None or isinstance(fault, PermanentStorageError)
        if not told and not exists(store, f"{folder}/{OWNER_NAME}"):
            return None
        manifest, error = None, str(fault)
    root, prefix = _root_of(folder, manifest, marker)
    return Found(
        kind="queue",
        store=f"{store.url}/{root}".rstrip("/"),
        data_path_prefix=prefix,
        manifest_path=own.manifest_path.removeprefix(f"{root}/") if root else own.manifest_path,
        batches=None if manifest is None else manifest.entry_count,
        oldest_age_seconds=None if manifest is None else manifest.age_s(runtime.now_ms()),
        error=error,
    )


def _root_of(folder: str, manifest: Manifest | None, marker: PrefixOwner | None) -> tuple[str, str]:
    """Where a queue's store begins, and its data prefix: locations in it are relative to that."""
    location = ""
    if manifest is not None and manifest.entry_count:
        location = manifest.entries(limit=1)[0].location
    elif marker is not None and marker.watermark is not None:
        location = marker.watermark.acked_location
    parts = folder.split("/")
    for at in range(len(parts)):
        prefix = "/".join(parts[at:])
        if location.startswith(f"{prefix}/"):
            return "/".join(parts[:at]), prefix
    return "/".join(parts[:-1]), parts[-1]
