"""Uploads batches: encodes them, names their objects and writes these to the store."""

from __future__ import annotations

from opendata_buffer import errors, metrics
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.batch import batch_key, tagged_ulid
from opendata_buffer.producer.batching import Batch, Stage
from opendata_buffer.runtime import Moment, Runtime, deadline
from opendata_buffer.stores.base import Put, ZeroCopy


class Uploader:
    """Writes the objects of batches. Thread-safe, as long as each batch has one thread.

    Args:
        store: Where the objects go.
        config: The compression, and how often and how long to try.
        runtime: The clock and the random numbers.
    """

    def __init__(self, store: Put, config: ProducerConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime

    def upload(self, batch: Batch, tag: str) -> None:
        """Encode a batch, and try to write its object until the batch's deadline.

        Each call uses a new name, because the collector reads an object's age from it (failure F5).

        Args:
            batch: Gets its location and, the first time, its encoded bytes.
            tag: The tag of the committer that appends the batch.

        Raises:
            StorageError: The object could not be written in time, or not at all.
            InvalidInput: The store refuses the object or the settings.
        """
        config = self._config
        data = batch.data
        if data is None:
            pieces = batch.encode(config.codec, config.zstd_level)
            # Joining is a copy, so do it only for a store that needs one piece.
            data = pieces if isinstance(self._store, ZeroCopy) else b"".join(pieces)
            batch.data = data
            batch.parts = []
        if batch.stage is Stage.COMPLETED:
            # Another thread gave it an outcome, and perhaps took its parts before the encoding.
            return
        ulid = tagged_ulid(self._runtime.ulid(), tag)
        batch.named = Moment.now(self._runtime)
        batch.location = batch_key(config.data_path_prefix, ulid, batch.transaction, batch.message)
        started = self._runtime.monotonic()
        left = max(0.001, batch.deadline - started)
        retrying = config.retries(self._runtime, deadline_ms=int(left * 1000))
        with deadline(self._runtime, left):
            retrying(self._attempt, batch, data)
        metrics.flush_duration_seconds.record(self._runtime.monotonic() - started)
        metrics.bytes_written.add(len(data) if isinstance(data, bytes) else sum(map(len, data)))

    def repair(self, batch: Batch) -> None:
        """Try once to write the object again, under the name that the queue has.

        Args:
            batch: The batch, which has a name.

        Raises:
            StorageError: The object could not be written.
        """
        data = batch.data
        if data is not None and batch.stage is not Stage.COMPLETED:
            self._put(batch.location, data)

    def _attempt(self, batch: Batch, data: bytes | list[bytes | memoryview]) -> None:
        if batch.stage is Stage.COMPLETED:
            return
        try:
            self._put(batch.location, data)
        except errors.TransientStorageError as error:
            batch.last_error = error
            raise

    def _put(self, location: str, data: bytes | list[bytes | memoryview]) -> None:
        if isinstance(data, bytes):
            self._store.put(location, data)
        else:
            assert isinstance(self._store, ZeroCopy)
            self._store.put_pieces(location, data)
