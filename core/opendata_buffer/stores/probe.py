"""Whether a store honours conditional writes, tried by a few real ones (failure F12).

Writers first write one after the other, then several at once: some stores honour a single
condition, and let two concurrent writers both win, because they compare first and write later.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from opendata_buffer import outcomes
from opendata_buffer.errors import ObjectNotFound, TransientStorageError, UnsafeStore
from opendata_buffer.formats.batch import MAX_KEY_BYTES
from opendata_buffer.runtime import Retries, Runtime, deadline, in_parallel
from opendata_buffer.stores.base import Blob, ConditionalPut, Delete, DeleteFailure, Get, PutOutcome

log = logging.getLogger(__name__)

PROBE_DEADLINE_MS = 10_000  # short: a producer that starts with a wrong endpoint fails soon
SAFE: set[str] = set()  # endpoints with their buckets that this process knows to be safe
RACES = 3  # objects that writers race for, twice each
_RACERS = 6
"""Writers of one race: the more, the likelier that two compare before either of them writes."""

_SUFFIX_BYTES = len(".probe-") + 26
_CLEAN_UP_S = 2.0
_PROBE = b"probe"
_WRONG = '"00000000000000000000000000000000"'


class _Probed(Get, ConditionalPut, Delete, Protocol): ...


def probe_conditional_writes(
    store: _Probed,
    near: str,
    runtime: Runtime,
    *,
    name: str,
    room: int,
    deadline_ms: int,
    races: int = RACES,
) -> None:
    """Put objects named ``near`` + ``.probe-<ULID>`` in ways of which most must fail.

    ``name`` is the store's, for errors, ``room`` the bytes of a key that its root takes. Writers
    race for ``races`` objects. Removing them may take two seconds more than ``deadline_ms``.
    """
    # Cut, so that the longest manifest path still leaves room for the suffix.
    stem = near.encode()[: MAX_KEY_BYTES - _SUFFIX_BYTES - room].decode(errors="ignore")
    made: list[str] = []

    def key() -> str:
        return f"{stem}.probe-{runtime.ulid()}"

    def once() -> None:
        _try_each(store, key(), name, made)
        for _ in range(races):
            made.append(key())
            _race(store, made[-1], name, runtime)

    policy = Retries(
        runtime,
        base_ms=100,
        max_ms=2_000,
        deadline_ms=deadline_ms,
        retry_on=(TransientStorageError,),
    )
    left: tuple[DeleteFailure, ...] = ()
    try:
        with deadline(runtime, deadline_ms / 1000):
            policy(once)
    finally:
        if made:
            with deadline(runtime, _CLEAN_UP_S):
                left = store.delete_many(made)
    # Logged after success only: otherwise the error says that the store cannot be reached.
    if left:
        message = "%d probe objects may be left behind, the first is %r: %s"
        log.warning(message, len(left), left[0].key, left[0].reason)


def _try_each(store: _Probed, key: str, name: str, made: list[str]) -> None:
    """Try each condition alone; ``made`` takes the key once an object may exist."""

    def put(step: str, version: str | None, *right: type[PutOutcome]) -> PutOutcome:
        outcome = store.put_if(key, _PROBE, version)
        if key not in made:
            made.append(key)  # a put that raised wrote nothing
        if isinstance(outcome, outcomes.Unknown):
            # If the store's responses have no versions, the read raises that and ends the probe.
            with suppress(ObjectNotFound, TransientStorageError):
                store.get(key)
            raise TransientStorageError(outcome.reason)
        if not isinstance(outcome, right):
            raise UnsafeStore(
                f"store {name} does not honour conditional writes: {step} was answered as "
                f"{type(outcome).__name__}. Writers of one manifest would overwrite each other, "
                "or wait for each other for ever. Use a store that has them (AWS S3, Cloudflare "
                "R2, a recent MinIO or Ceph) or a local directory."
            )
        return outcome

    put("If-Match on a missing object", _WRONG, outcomes.Vanished, outcomes.Conflict)
    created = put("If-None-Match: * on a missing object", None, outcomes.Applied)
    put("If-None-Match: * on an existing object", None, outcomes.Conflict)
    put("If-Match with another ETag", _WRONG, outcomes.Conflict)
    assert isinstance(created, outcomes.Applied)
    found = store.get(key)
    if not isinstance(found, Blob) or found.version != created.value or found.data != _PROBE:
        version = found.version if isinstance(found, Blob) else "none"
        raise UnsafeStore(
            f"store {name} gives an object the ETag {version} when it is read and "
            f"{created.value} when it was written: no writer would know whether the manifest is "
            "still the one it has read. Take away what changes answers on their way (a proxy "
            "that compresses them?), or use another store."
        )
    put("If-Match with the object's ETag", created.value, outcomes.Applied)


def _race(store: _Probed, key: str, name: str, runtime: Runtime) -> None:
    """Let writers create an object together, and then replace it together."""
    version: str | None = None
    for what in ("created", "replaced"):
        # No two write the same bytes: S3's version is their hash, and a write of the same bytes
        # leaves it valid for the next writer.
        datas = [f"{what} by {number}".encode() for number in range(_RACERS)]
        results = _put_together(runtime, store, key, version, datas)
        won = [each for each in results if isinstance(each, outcomes.Applied)]
        if len(won) > 1:
            raise UnsafeStore(
                f"store {name} honours conditional writes only one by one: {len(won)} of "
                f"{_RACERS} concurrent writers were answered that they {what} one object. "
                "Writers of one manifest would overwrite each other, and batches be lost. Use a "
                "store whose conditions are atomic (AWS S3, Google Cloud Storage, Azure, "
                "Cloudflare R2, a recent MinIO or Ceph) or a local directory."
            )
        if not won:
            return  # responses were lost, or all were refused for their rate: it shows nothing
        version = won[0].value


def _put_together(
    runtime: Runtime, store: _Probed, key: str, version: str | None, datas: Sequence[bytes]
) -> list[PutOutcome]:
    """Put all of them at once, by threads that wait until the last one has begun."""
    changed = runtime.condition()
    begun: list[bytes] = []

    def put(data: bytes) -> PutOutcome:
        with changed:
            begun.append(data)
            changed.notify_all()
            while len(begun) < len(datas):
                changed.wait()
        return store.put_if(key, data, version)

    return in_parallel(runtime, put, datas)
