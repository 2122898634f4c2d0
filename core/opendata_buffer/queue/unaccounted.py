"""Find batches that no manifest of this queue accounts for (failure F51, decision 0040).

The data prefix and the manifest of a v1 queue are independent settings. This library keeps the
manifest at ``<prefix>/manifest``, a Rust program keeps it at ``ingest/manifest``, and the exporter
for OpenTelemetry keeps it next to the prefix::

    ingest/otel/logs/manifest                              names two batches
    ingest/otel/logs/data/01J5.../0000000000000001         one of them
    ingest/otel/logs/data/01J5.../0000000000000002         the other one

A program that knows only the prefix ``ingest/otel/logs/data`` finds batches and no manifest. If it
created a queue there, that queue's manifest would name nothing, and its collector would treat every
batch of the exporter as garbage. The owner marker (failure F7) does not help, because other clients
do not write one. Hence one rule, for the library, the commands, Spark's source and its sink:

    Create no queue, and delete no object, in a data prefix with batches that no manifest of
    this queue has ever named.

The path of the other manifest is not written down anywhere, so :func:`well_known` lists the places
to search. The rule does not depend on finding it. The search only serves to tell the user which
manifest to use.

The batches of a topic's partition are the exception. The name of the partition is drawn at random
and is listed in the topic's description, and a sink uploads batches there before it claims the
partition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from opendata_buffer import errors
from opendata_buffer.config import DEFAULT_MANIFEST_PATH, PARTITION_NAME, QueueConfig
from opendata_buffer.formats.batch import parse_location
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest, salvage_entries
from opendata_buffer.hints import Action, Hint, Message
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.stores.base import Get, List, Store

LISTED = 1_000
"""The number of objects below a prefix that are examined: one page of a listing."""


def well_known(config: QueueConfig) -> tuple[str, ...]:
    """Return the paths, except the queue's own, at which clients keep a manifest."""
    prefix = config.data_path_prefix
    beside = f"{prefix.rpartition('/')[0]}/manifest".lstrip("/")
    places = dict.fromkeys((DEFAULT_MANIFEST_PATH, beside, f"{prefix}/manifest"))
    return tuple(place for place in places if place != config.manifest_path)


class OtherManifests:
    """The manifests at the well-known paths. Each is read again only after it has changed.

    Costs one request for each path, at most three, and transfers only manifests that have changed.
    Not thread-safe.

    Args:
        store: Where the queue is.
        config: The queue.
    """

    def __init__(self, store: Get, config: QueueConfig) -> None:
        self._store = store
        self._prefix = config.data_path_prefix
        self._seen: dict[str, tuple[str | None, bool]] = dict.fromkeys(
            well_known(config), (None, False)
        )

    def naming(self) -> str | None:
        """Look for another manifest that names a batch in the data prefix.

        Returns:
            Its path; None if there is no such manifest.

        Raises:
            TransientStorageError: The store did not answer.
        """
        for path in self._seen:
            if self._names(path):
                return path
        return None

    def _names(self, path: str) -> bool:
        version, names = self._seen[path]
        try:
            found = self._store.get(path, if_changed=version, max_bytes=MAX_MANIFEST_BYTES)
        except (errors.ObjectNotFound, errors.PermanentStorageError, errors.CorruptData):
            # Not there, not readable with these rights, or too large for a manifest.
            self._seen[path] = None, False
            return False
        if found is not None:
            names = _names_batch_in(found.data, self._prefix)
            self._seen[path] = found.version, names
        return names


def _names_batch_in(raw: bytes, prefix: str) -> bool:
    # Most manifests at these places belong to another prefix: one search in the bytes shows it.
    if f"{prefix}/".encode() not in raw:
        return False
    try:
        locations: Iterable[str] = Manifest.parse(raw).locations()
    except errors.CorruptManifest:
        locations = [entry.location for entry in salvage_entries(raw)]
    return any(parse_location(location, prefix) for location in locations)


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches that a listing found.

    Attributes:
        count: Number of batches.
        more: Whether there may be more.
        example: Location of the first one; empty without batches.
    """

    count: int = 0
    more: bool = False
    example: str = ""

    @classmethod
    def among(cls, keys: Iterable[str], prefix: str, *, more: bool = False) -> Batches:
        """Return the batches of a data prefix among these keys."""
        found = [key for key in keys if parse_location(key, prefix) is not None]
        return cls(len(found), more, found[0]) if found else cls()

    def __str__(self) -> str:
        least = "at least " if self.more else ""
        return f"{least}{self.count:,} batch{'' if self.count == 1 else 'es'}"


def batches_in(store: List, config: QueueConfig, uploaded: Collection[str] = ()) -> Batches:
    """Return the batches, without the ``uploaded`` ones, that one page of a listing finds."""
    prefix = config.data_path_prefix
    page = store.list(f"{prefix}/", limit=LISTED + len(uploaded))
    keys = (found.key for found in page.objects if found.key not in uploaded)
    return Batches.among(keys, prefix, more=page.truncated)


def refusal(
    store: Store,
    config: QueueConfig,
    manifest: Manifest | None,
    uploaded: Collection[str] = (),
) -> errors.InvalidInput | None:
    """Decide whether a queue without an owner marker may be claimed.

    Args:
        store: Where the queue is.
        config: Its data prefix and manifest.
        manifest: The manifest at the queue's path; None for a queue that would be created.
        uploaded: Locations of batches that the caller itself has just uploaded.

    Returns:
        The error to raise; None if the queue may be claimed.

    Raises:
        TransientStorageError: The store did not answer.
    """
    if PARTITION_NAME.fullmatch(config.data_path_prefix):
        return None
    batches = Batches()
    if manifest is None:
        try:
            batches = batches_in(store, config, uploaded)
        except errors.PermanentStorageError:
            return None  # Without the right to list, nothing can be collected either.
        if not batches.count:
            return None
    if (other := OtherManifests(store, config).naming()) is not None:
        seen = [f"{_seen(batches, config)}."] if batches.count else []
        return errors.PrefixConflict(config.data_path_prefix, config.manifest_path, other, *seen)
    if manifest is not None:
        return None
    return errors.InvalidInput(
        f"there is no queue: no manifest {config.manifest_path!r} in {store.url}. "
        f"But {_seen(batches, config)}: their queue has its manifest at another place, or has lost "
        "it",
        Hint(Action.FIND_LOST_QUEUE, queue_name(store.url, config)),
    )


def _seen(batches: Batches, config: QueueConfig) -> str:
    lie = "lies" if batches.count == 1 and not batches.more else "lie"
    return (
        f"{batches} {lie} in the data prefix {config.data_path_prefix!r}, for example "
        f"{batches.example!r}"
    )


def hold_reason(
    config: QueueConfig, manifest: Manifest, batches: Batches, other: str | None
) -> Message | None:
    """Decide whether batches that the manifest does not name may be deleted. Pure.

    Args:
        config: The data prefix and the manifest of the queue.
        manifest: The manifest at the queue's path.
        batches: The batches that it does not name and that are older than the grace period.
        other: The path of another manifest that names batches in the prefix: see
            :class:`OtherManifests`.

    Returns:
        The reason why they must be kept; None if they may be deleted.
    """
    prefix = config.data_path_prefix
    if not batches.count or PARTITION_NAME.fullmatch(prefix):
        return None
    if other is not None:
        text = (
            f"manifest {other!r} names batches in the data prefix {prefix!r}, too, so the batches "
            f"that {config.manifest_path!r} does not name may be queued there"
        )
        return Message(text, Hint(Action.USE_OTHER_MANIFEST, path=other))
    if manifest.next_sequence == 0:
        verb = "is" if batches.count == 1 else "are"
        text = (
            f"manifest {config.manifest_path!r} has never named a batch, and there {verb} "
            f"{batches} in the data prefix {prefix!r}, for example {batches.example!r}: a manifest "
            "at another place may name them"
        )
        later = (
            "If a producer was killed and left them, they are deleted once the queue has its first "
            "batch."
        )
        return Message(text, Hint(Action.FIND_MANIFEST), later)
    return None
