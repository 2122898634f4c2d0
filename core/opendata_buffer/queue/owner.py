"""Which queue a data prefix belongs to: a marker object below the prefix (failure F7).

The garbage collector deletes what its manifest does not name. Two queues with one data prefix
would therefore delete each other's batches, even though both manifests are sound. The marker
``<prefix>/_owner.json`` names the one manifest the prefix belongs to; whoever comes with
another one is refused before it writes a batch or deletes one.

The marker holds the manifest's path relative to itself, as a link would: the same queue opened
as ``s3://bucket`` or as ``s3://bucket/root`` is the same owner. It also holds an id, drawn once:
positions in a queue are bare sequences, and only the id tells one queue's from another's, or
from those of a queue that was deleted and made anew (failure F4).
"""

from __future__ import annotations

import json
import posixpath
from dataclasses import dataclass
from typing import Protocol

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CorruptData,
    ObjectNotFound,
    PermanentStorageError,
    PrefixConflict,
    TransientStorageError,
)
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores import ABSENT, ConditionalPut, Get, NotModified, Unknown

__all__ = ["MARKER_NAME", "Claim", "check_owner", "claim_for_use", "claim_prefix", "marker_key"]

MARKER_NAME = "_owner.json"
_VERSION = 1
_MAX_BYTES = 64 * 1024
_ATTEMPTS = 5


class OwnerStore(Get, ConditionalPut, Protocol):
    """What claiming needs of a store."""


def marker_key(data_path_prefix: str) -> str:
    """The key of the marker of a data prefix."""
    return f"{data_path_prefix}/{MARKER_NAME}"


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to :func:`claim_for_use`.

    Attributes:
        queue_id: The queue's id, a ULID; empty for a marker that has none.
    """

    queue_id: str


def claim_for_use(store: OwnerStore, config: QueueConfig, *, runtime: Runtime) -> Claim:
    """What whoever writes to a queue does before the first write; free to repeat.

    Makes sure that the store honours conditional writes (failure F12) and that the data prefix
    belongs to this queue (failure F7).

    Raises:
        UnsafeStore: The store ignores or does not know conditional writes.
        PrefixConflict: The prefix belongs to the queue of another manifest.
        CorruptData: The marker cannot be read.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    store.check_conditional_writes(config.manifest_path)
    prefix, manifest_path = config.data_path_prefix, config.manifest_path
    return Claim(claim_prefix(store, prefix, manifest_path, runtime=runtime))


def claim_prefix(
    store: OwnerStore, data_path_prefix: str, manifest_path: str, *, runtime: Runtime | None = None
) -> str:
    """Make the prefix belong to the queue of this manifest; free to repeat.

    Costs one read when it does already, one more write when it belongs to nobody yet. Returns
    the queue's id; empty for a marker that has none.

    Raises:
        PrefixConflict: It belongs to the queue of another manifest; nothing was written.
        CorruptData: The marker cannot be read; nothing was written.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    reason = ""
    runtime = runtime if runtime is not None else SystemRuntime()
    for _ in range(_ATTEMPTS):
        queue_id = _read_marker(store, data_path_prefix, manifest_path)
        if queue_id is not None:
            return queue_id
        marker = _encode(data_path_prefix, manifest_path, runtime.ulid())
        outcome = store.put_if(marker_key(data_path_prefix), marker, ABSENT)
        # Whatever the answer says, also when it was lost: what counts is what a read finds. The
        # first marker stays, with its id, because nobody ever replaces one.
        reason = outcome.reason if isinstance(outcome, Unknown) else type(outcome).__name__
    queue_id = _read_marker(store, data_path_prefix, manifest_path)
    if queue_id is not None:
        return queue_id
    raise TransientStorageError(
        f"owner marker {marker_key(data_path_prefix)!r} could not be written in {_ATTEMPTS} "
        f"attempts: {reason}. Try again."
    )


def check_owner(store: Get, data_path_prefix: str, manifest_path: str) -> bool:
    """Whether the prefix belongs to the queue of this manifest; False when to nobody yet.

    Raises:
        PrefixConflict: It belongs to the queue of another manifest.
        CorruptData: The marker cannot be read.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    return _read_marker(store, data_path_prefix, manifest_path) is not None


def _read_marker(store: Get, data_path_prefix: str, manifest_path: str) -> str | None:
    """The id of the queue of this manifest; None when the prefix belongs to nobody yet."""
    key = marker_key(data_path_prefix)
    try:
        got = store.get(key, max_bytes=_MAX_BYTES)
    except ObjectNotFound:
        return None
    if isinstance(got, NotModified):
        raise PermanentStorageError(f"store answered 'not modified' to a plain read of {key!r}")
    owner, queue_id = _decode(key, data_path_prefix, got.data)
    if owner != manifest_path:
        raise PrefixConflict(data_path_prefix, manifest_path, owner)
    return queue_id


def _encode(data_path_prefix: str, manifest_path: str, queue_id: str) -> bytes:
    relative = posixpath.relpath("/" + manifest_path, "/" + data_path_prefix)
    marker = {"version": _VERSION, "manifest": relative, "id": queue_id}
    return json.dumps(marker, ensure_ascii=False).encode() + b"\n"


def _decode(key: str, data_path_prefix: str, data: bytes) -> tuple[str, str]:
    try:
        marker = json.loads(data.decode())
    except ValueError:
        marker = None
    match marker:
        case {"version": 1, "manifest": str(relative)} if relative:
            # No leading slash: '..' beyond the store's root stays visible and never matches.
            owner = posixpath.normpath(posixpath.join(data_path_prefix, relative))
            return owner, str(marker.get("id", ""))
    raise CorruptData(
        f"owner marker {key!r} holds {data[:100]!r} and not "
        f'{{"version": {_VERSION}, "manifest": "..."}}: a later version of this library or '
        "somebody else wrote it. If one queue alone uses this data prefix, delete the object."
    )
