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
from contextlib import suppress

from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.formats.keys import MAX_KEY_BYTES
from opendata_buffer.runtime import Runtime, deadline
from opendata_buffer.stores.base import Store, read_bytes

log = logging.getLogger(__name__)

MAX_UNDER_WAY = 256
"""Objects that are read at the same time: a store that stalls must not take all threads."""

CHECK_S = 3.0
"""Seconds for reading one: its client waits no longer."""

_SUFFIX_BYTES = len("._clients/") + 26


def write_proof_folder(manifest_path: str) -> str:
    """Where clients put their objects: beside the manifest, because that is what they may write."""
    stem = manifest_path.encode()[: MAX_KEY_BYTES - _SUFFIX_BYTES].decode(errors="ignore")
    return f"{stem}._clients/"


class WriteProofs:
    """Checks the objects of a broker's clients. Thread-safe."""

    def __init__(self, store: Store, manifest_path: str, runtime: Runtime) -> None:
        self._store = store
        self._folder = write_proof_folder(manifest_path)
        self._runtime = runtime
        self._lock = runtime.condition()
        self._under_way = 0

    def clear(self) -> None:
        """Delete what killed clients and brokers left, some bytes each. Raises nothing."""
        try:
            if left := self._store.list(self._folder, limit=1_000).objects:
                self._store.delete_many([each.key for each in left])
        except StorageError as error:
            log.info("what is left in %s stays there: %s", self._folder, error)

    def check(self, name: str, expected: bytes, answer: Callable[[Exception | None], None]) -> None:
        """Have the object of that name read and deleted, by a thread, which calls ``answer`` once:
        with None where it holds the expected bytes, or with the error."""
        key = self._folder + name
        with self._lock:
            self._under_way += 1
            is_busy = self._under_way > MAX_UNDER_WAY

        def run() -> None:
            error: Exception | None = None
            try:
                with deadline(self._runtime, CHECK_S):
                    found = read_bytes(self._store, key, 2 * len(expected))
                if not hmac.compare_digest(found, expected):
                    error = PermanentStorageError(f"{key!r} was not written for this connection")
            except Exception as failed:  # Also a bug's: the client waits for an answer.
                error = failed
            with self._lock:
                self._under_way -= 1
            answer(error)
            with suppress(StorageError):  # The next broker deletes what is left.
                self._store.delete_many([key])

        try:
            if is_busy:
                raise RuntimeError("the broker checks too many clients at once")
            self._runtime.spawn(run, "opendata-buffer-write-proof")
        except RuntimeError as failed:  # Also where no thread is left.
            with self._lock:
                self._under_way -= 1
            answer(TransientStorageError(f"{failed}. Try again."))
