"""A client shows its broker that it may write in the queue, by an object that the broker names.

Who can read the queue can read the discovery record, and reach the broker. That must not be enough
to append, or to take batches. So the broker draws a name for each connection, the client puts
``<manifest>._clients/<ULID>``, and the broker reads and deletes it. Its bytes are good for that
connection alone (:mod:`opendata_buffer.broker.secure_channel`): a copy of them proves nothing.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from opendata_buffer.concurrency import in_parallel
from opendata_buffer.errors import (
    ObjectNotFound,
    OpenDataBufferError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.formats.keys import MAX_KEY_BYTES
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Delete, Get, List, read_bytes

log = logging.getLogger(__name__)

MAX_LEFT = 1_000
"""Left-over objects that one broker deletes as it begins."""

_SUFFIX_BYTES = len("._clients/") + 26


def write_proof_folder(manifest_path: str) -> str:
    """Where clients put their objects: beside the manifest, because that is what they may write."""
    stem = manifest_path.encode()[: MAX_KEY_BYTES - _SUFFIX_BYTES].decode(errors="ignore")
    return f"{stem}._clients/"


class ProofStore(Get, List, Delete, Protocol):
    """What a broker needs of a store to check that its clients may write."""


@dataclass(frozen=True, slots=True)
class _Claimed:
    key: str
    expected: bytes
    answer: Callable[[OpenDataBufferError | None], None]


class WriteProofs:
    """Checks the objects of a broker's clients. Thread-safe."""

    def __init__(self, store: ProofStore, manifest_path: str, runtime: Runtime) -> None:
        self._store = store
        self._folder = write_proof_folder(manifest_path)
        self._runtime = runtime
        self._condition = runtime.condition()
        self._waiting: list[_Claimed] = []
        self._runs = False

    def clear(self) -> None:
        """Delete what clients of earlier brokers left. Raises nothing: it is some bytes each."""
        try:
            left = self._store.list(self._folder, limit=MAX_LEFT).objects
            if left:
                self._store.delete_many([each.key for each in left])
        except StorageError as error:
            log.info("what is left in %s stays there: %s", self._folder, error)

    def check(
        self, name: str, expected: bytes, answer: Callable[[OpenDataBufferError | None], None]
    ) -> None:
        """Have the object of that name read and deleted, by another thread, which then calls
        ``answer`` once: with None where it holds the expected bytes, or with the error."""
        with self._condition:
            self._waiting.append(_Claimed(self._folder + name, expected, answer))
            if self._runs:
                return
            self._runs = True
        try:
            self._runtime.spawn(self._run, "opendata-buffer-write-proofs")
        except RuntimeError as error:
            with self._condition:
                refused, self._waiting, self._runs = self._waiting, [], False
            for each in refused:
                each.answer(TransientStorageError(f"no thread is left: {error}. Try again."))

    def _run(self) -> None:
        while True:
            with self._condition:
                claimed, self._waiting = self._waiting, []
                if not claimed:
                    self._runs = False
                    return
            # Of hundreds of clients at once each has its answer after a few reads.
            in_parallel(self._runtime, self._check, claimed)
            try:
                self._store.delete_many([each.key for each in claimed])
            except Exception as error:  # or later clients would wait for this thread for ever
                log.info("objects of clients stay in %s: %s", self._folder, error)

    def _check(self, claimed: _Claimed) -> None:
        error: OpenDataBufferError | None = None
        try:
            found = read_bytes(self._store, claimed.key, 2 * len(claimed.expected))
            if not hmac.compare_digest(found, claimed.expected):
                error = PermanentStorageError(
                    f"{claimed.key!r} was not written by the client that the broker named it to"
                )
        except ObjectNotFound:
            error = TransientStorageError(f"the broker finds no object {claimed.key!r}. Try again.")
        except OpenDataBufferError as failed:
            error = failed
        except Exception as failed:  # a bug must not leave the clients behind it unanswered
            log.exception("%s is not checked", claimed.key)
            error = TransientStorageError(f"{claimed.key!r} is not checked: {failed}. Try again.")
        claimed.answer(error)
