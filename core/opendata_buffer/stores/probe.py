"""Does a store honour conditional writes? Asked once, with a few real ones (failure F12)."""

from __future__ import annotations

import logging
from typing import Protocol

from opendata_buffer.errors import TransientStorageError, UnsafeStore
from opendata_buffer.formats.keys import MAX_KEY_BYTES
from opendata_buffer.retry import full_jitter
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import (
    ABSENT,
    Absent,
    Applied,
    ConditionalPut,
    Delete,
    DeleteFailure,
    IfVersion,
    PutOutcome,
    Unknown,
    Vanished,
    VersionConflict,
)

__all__ = ["probe_conditional_writes"]

log = logging.getLogger(__name__)

_SUFFIX_BYTES = len(".probe-") + 26
_WRONG = IfVersion('"00000000000000000000000000000000"')
_Step = tuple[str, Absent | IfVersion, tuple[type[PutOutcome], ...]]
_STEPS: tuple[_Step, ...] = (
    ("If-Match on a missing object", _WRONG, (Vanished, VersionConflict)),
    ("If-None-Match: * on a missing object", ABSENT, (Applied,)),
    ("If-None-Match: * on an existing object", ABSENT, (VersionConflict,)),
    ("If-Match with another ETag", _WRONG, (VersionConflict,)),
)


class _Probed(ConditionalPut, Delete, Protocol):
    """What the probe needs of a store."""


def probe_conditional_writes(
    store: _Probed, near: str, runtime: Runtime, *, name: str, room: int, deadline_ms: int
) -> None:
    """Put an object named ``near`` + ``.probe-<ULID>`` in ways of which three must fail.

    Args:
        store: The store.
        near: Where the probe object may lie.
        runtime: Backoff and the object's name.
        name: What to call the store in an error.
        room: Bytes of a key that the store's root takes.
        deadline_ms: How long lost answers are tried again.

    Raises:
        UnsafeStore: The store ignores or refuses a condition.
        TransientStorageError: No round was answered until the deadline.
        PermanentStorageError: The store refuses writes.
    """
    # Cut, so that the longest manifest path still leaves room for the suffix.
    stem = near.encode()[: MAX_KEY_BYTES - _SUFFIX_BYTES - room].decode(errors="ignore")

    left: list[DeleteFailure] = []

    def once() -> None:
        key = f"{stem}.probe-{runtime.ulid()}"
        answered = False
        try:
            for step, condition, right in _STEPS:
                outcome = store.put_if(key, b"probe", condition)
                answered = True
                if isinstance(outcome, Unknown):
                    raise TransientStorageError(outcome.reason)
                if not isinstance(outcome, right):
                    raise UnsafeStore(
                        f"store {name} does not honour conditional writes: {step} was answered "
                        f"as {type(outcome).__name__}. Writers of one manifest would overwrite "
                        "each other. Use a store that has them (AWS S3, Cloudflare R2, a recent "
                        "MinIO or Ceph) or a local directory."
                    )
        finally:
            if answered:  # a put that raised wrote nothing
                left.extend(store.delete_many([key]))

    policy = full_jitter(
        runtime,
        base_ms=100,
        max_ms=2_000,
        deadline_ms=deadline_ms,
        retry_on=(TransientStorageError,),
    )
    policy(once)
    # Not when it failed: a store that is not reached is told of once, by the error.
    if left:
        log.warning(
            "%d probe objects may be left behind, the first is %r: %s",
            len(left),
            left[0].key,
            left[0].reason,
        )
