"""Finds out whether a store honors conditional writes by making a few real ones (failure F12).

There are two checks (decision 0048):

* :func:`probe_conditional_writes` makes about forty requests. Writers first write one after another
  and then several at once. Some stores honor a single condition but let two concurrent writers both
  win, because they compare first and write later.
* :func:`check_refusal` makes one request: a write whose condition does not hold. A store or a proxy
  that ignores conditions accepts it. A sound store refuses it, and nothing is written.

The first process that uses a queue makes the probe, and its :class:`~.probed.Probed` goes into the
queue's owner marker. Later processes that reach the same place only check the refusal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from opendata_buffer import outcomes
from opendata_buffer.errors import ObjectNotFound, TransientStorageError, UnsafeStore
from opendata_buffer.formats.batch import MAX_KEY_BYTES
from opendata_buffer.runtime import Retries, Runtime, deadline, in_parallel
from opendata_buffer.stores.base import Blob, ConditionalPut, Delete, DeleteFailure, Get, PutOutcome

log = logging.getLogger(__name__)

_ANSWERS: dict[type, str] = {
    outcomes.Applied: "success",
    outcomes.LostRace: "'precondition failed'",
    outcomes.Vanished: "'not found'",
}
"""The store's answers, for an error."""

PROBE_DEADLINE_MS = 10_000  # short, so that a producer with a wrong endpoint fails soon
RACES = 3  # number of objects that writers race for, twice each
_RACERS = 6
"""Writers in one race. The more there are, the likelier two of them compare before either writes.
"""

_SUFFIX_BYTES = len(".probe-") + 26
_CLEAN_UP_S = 2.0
_PROBE = b"probe"
_WRONG = '"00000000000000000000000000000000"'


class _Store(Get, ConditionalPut, Delete, Protocol): ...


def probe_conditional_writes(
    store: _Store,
    near: str,
    runtime: Runtime,
    *,
    name: str,
    room: int,
    deadline_ms: int,
    races: int = RACES,
) -> None:
    """Write objects named ``near`` + ``.probe-<ULID>`` in ways most of which must fail.

    Removing them may take two seconds more than ``deadline_ms``.

    Args:
        store: The store to test.
        near: A key below which the objects are named.
        runtime: Clock and threads.
        name: The store's name for errors.
        room: Bytes of a key that the store's root takes.
        deadline_ms: Time for all attempts together, in milliseconds.
        races: Number of objects that writers race for.

    Raises:
        UnsafeStore: The store does not honor conditional writes.
        StorageError: The store did not answer.
    """
    made: list[str] = []

    def key() -> str:
        return _probe_key(near, room, runtime)

    def once() -> None:
        _try_each(store, key(), name, made)
        for _ in range(races):
            made.append(key())
            _race(store, made[-1], name, runtime)

    _within(store, runtime, deadline_ms, once, made)


def check_refusal(
    store: _Store, near: str, runtime: Runtime, *, name: str, room: int, deadline_ms: int
) -> None:
    """Send one conditional write that must be refused. A sound store writes nothing.

    The arguments are those of :func:`probe_conditional_writes`.

    Args:
        store: The store to test.
        near: A key below which the object would be named.
        runtime: Clock and threads.
        name: The store's name for errors.
        room: Bytes of a key that the store's root takes.
        deadline_ms: Time for all attempts together, in milliseconds.

    Raises:
        UnsafeStore: The store accepted the write.
        StorageError: The store did not answer.
    """
    made: list[str] = []

    def once() -> None:
        _try_wrong(_Attempts(store, _probe_key(near, room, runtime), name, made))
        made.clear()  # Nothing was written.

    _within(store, runtime, deadline_ms, once, made)


def _probe_key(near: str, room: int, runtime: Runtime) -> str:
    # Cut the name, so that the longest manifest path still leaves room for the suffix.
    stem = near.encode()[: MAX_KEY_BYTES - _SUFFIX_BYTES - room].decode(errors="ignore")
    return f"{stem}.probe-{runtime.ulid()}"


def _within(
    store: _Store, runtime: Runtime, deadline_ms: int, once: Callable[[], None], made: list[str]
) -> None:
    """Call a function, again after transient errors, and then delete what it has made."""
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
    # Log only after success. After a failure, the error says that the store cannot be reached.
    if left:
        message = "%d probe objects may be left behind, the first is %r: %s"
        log.warning(message, len(left), left[0].key, left[0].reason)


class _Attempts:
    """Conditional writes to one probe object.

    Args:
        store: The store to test.
        key: The object.
        name: The store's name for errors.
        made: The key is added to it once an object may exist.
    """

    def __init__(self, store: _Store, key: str, name: str, made: list[str]) -> None:
        self.store, self.key, self.name = store, key, name
        self._made = made

    def put(self, step: str, version: str | None, *right: type[PutOutcome]) -> PutOutcome:
        """Send one write.

        Args:
            step: The attempt, for the error.
            version: The version that the object must have; None if it must not exist.
            *right: The outcomes of a sound store.

        Returns:
            The outcome.

        Raises:
            UnsafeStore: The store gave another answer.
            TransientStorageError: The answer was lost.
        """
        outcome = self.store.put_if(self.key, _PROBE, version)
        if self.key not in self._made:
            self._made.append(self.key)  # a put that raised wrote nothing
        if isinstance(outcome, outcomes.Unknown):
            # If the store's responses have no versions, this read raises that and ends the probe.
            with suppress(ObjectNotFound, TransientStorageError):
                self.store.get(self.key)
            raise TransientStorageError(outcome.reason)
        if not isinstance(outcome, right):
            raise UnsafeStore(
                f"store {self.name} does not honor conditional writes: it answered {step} with "
                f"{_ANSWERS[type(outcome)]}. Writers of one manifest would overwrite each other, "
                "or wait for each other forever. Use a store that supports them (AWS S3, "
                "Cloudflare R2, a recent MinIO or Ceph) or a local directory."
            )
        return outcome


def _try_wrong(attempts: _Attempts) -> None:
    """Try to replace an object that does not exist."""
    attempts.put("If-Match on a missing object", _WRONG, outcomes.Vanished, outcomes.LostRace)


def _try_each(store: _Store, key: str, name: str, made: list[str]) -> None:
    """Try each condition alone; add the key to ``made`` once an object may exist."""
    attempts = _Attempts(store, key, name, made)
    put = attempts.put
    _try_wrong(attempts)
    created = put("If-None-Match: * on a missing object", None, outcomes.Applied)
    put("If-None-Match: * on an existing object", None, outcomes.LostRace)
    put("If-Match with another ETag", _WRONG, outcomes.LostRace)
    assert isinstance(created, outcomes.Applied)
    found = store.get(key)
    if not isinstance(found, Blob) or found.version != created.value or found.data != _PROBE:
        version = found.version if isinstance(found, Blob) else "none"
        raise UnsafeStore(
            f"store {name} returns the ETag {version} when an object is read and {created.value} "
            "when it was written, so no writer could tell whether the manifest is still the one "
            "it has read. Remove anything that changes answers (a proxy that compresses them?), "
            "or use another store."
        )
    put("If-Match with the object's ETag", created.value, outcomes.Applied)


def _race(store: _Store, key: str, name: str, runtime: Runtime) -> None:
    """Let writers create an object concurrently and then replace it concurrently."""
    version: str | None = None
    for what in ("created", "replaced"):
        # All writers write different bytes. S3's version is a hash of the bytes, so writing the
        # same bytes would leave the version valid for the next writer.
        datas = [f"{what} by {number}".encode() for number in range(_RACERS)]
        results = _put_together(runtime, store, key, version, datas)
        won = [outcome for outcome in results if isinstance(outcome, outcomes.Applied)]
        if len(won) > 1:
            raise UnsafeStore(
                f"store {name} honors conditional writes only one at a time: it told {len(won)} "
                f"of {_RACERS} concurrent writers that they {what} one object. Writers of one "
                "manifest would overwrite each other, and batches would be lost. Use a store "
                "whose conditions are atomic (AWS S3, Google Cloud Storage, Azure, Cloudflare R2, "
                "a recent MinIO or Ceph) or a local directory."
            )
        if not won:
            return  # responses were lost or refused because of their rate: this proves nothing
        version = won[0].value


def _put_together(
    runtime: Runtime, store: _Store, key: str, version: str | None, datas: Sequence[bytes]
) -> list[PutOutcome]:
    """Put all of them at once, from threads that wait until the last one is ready."""
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
