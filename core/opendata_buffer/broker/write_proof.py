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
from typing import Protocol

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


class WriteProofs:
    """Checks the objects of a broker's clients. Thread-safe."""

    def __init__(self, store: ProofStore, manifest_path: str, runtime: Runtime) -> None:
        self._store = store
        self._folder = write_proof_folder(manifest_path)
        self._runtime = runtime

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
        """Have the object of that name read and deleted, by a thread, which then calls ``answer``
        once: with None where it holds the expected bytes, or with the error."""

        def run() -> None:
            try:
                error = self._check(self._folder + name, expected)
            except Exception as failed:  # Also after a bug: the client waits for an answer.
                log.exception("a client's object is not checked")
                error = TransientStorageError(f"{name!r} is not checked: {failed}. Try again.")
            answer(error)

        try:
            self._runtime.spawn(run, "opendata-buffer-write-proof")
        except RuntimeError as error:
            answer(TransientStorageError(f"no thread is left: {error}. Try again."))

    def _check(self, key: str, expected: bytes) -> OpenDataBufferError | None:
        try:
            found = read_bytes(self._store, key, 2 * len(expected))
        except ObjectNotFound:
            return TransientStorageError(f"the broker finds no object {key!r}. Try again.")
        except OpenDataBufferError as error:
            return error
        for failed in self._store.delete_many([key]):
            log.info("%s stays there: %s", failed.key, failed.reason)
        if hmac.compare_digest(found, expected):
            return None
        return PermanentStorageError(
            f"{key!r} was not written by the client that the broker named it to"
        )
