"""From an upload to its object in the store: encoded, named, written with retries."""

from __future__ import annotations

from opendata_buffer import metrics
from opendata_buffer.commit.upload import Stage, Upload
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.keys import batch_key, tagged_ulid
from opendata_buffer.producer.batch import Batch
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Moment, Runtime, deadline
from opendata_buffer.stores import Put, PutPieces

__all__ = ["Uploader"]


class Uploader:
    """Writes batch objects; called by several threads at once, with an upload each."""

    def __init__(self, store: Put, config: ProducerConfig, runtime: Runtime) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime

    def upload(self, upload: Upload, batch: Batch | None, tag: str) -> None:
        """Write the object under a new name; retried until the upload's deadline.

        A new name each time: the collector takes an object's age from its name (failure F5).

        Args:
            upload: Gets the name, and what was encoded.
            batch: Encoded first; None when the upload has its bytes from before.
            tag: Of who appends it, for its name.

        Raises:
            StorageError: The store refused it, or did not take it in time.
            InvalidInput: It cannot be encoded.
        """
        config = self._config
        data = upload.data
        if batch is not None:
            upload.data = data = self._encode(upload, batch)
        if upload.stage is Stage.SETTLED:
            # By another thread, which took its bytes away: they must not be written as they are.
            return
        ulid = tagged_ulid(self._runtime.ulid(), tag)
        upload.minted = Moment.now(self._runtime)
        upload.location = batch_key(
            config.data_path_prefix, ulid, upload.transaction, upload.message
        )
        started = self._runtime.monotonic()
        left = max(0.001, upload.deadline - started)
        retrying = queue_retry(self._runtime, config, deadline_ms=int(left * 1000))
        with deadline(self._runtime, left):
            retrying(self._attempt, upload, data)
        metrics.flush_duration_seconds.record(self._runtime.monotonic() - started)
        metrics.bytes_written.add(len(data) if isinstance(data, bytes) else sum(map(len, data)))

    def _encode(self, upload: Upload, batch: Batch) -> bytes | list[bytes | memoryview]:
        encoded = batch.encode(self._config.compression, self._config.zstd_level)
        upload.metadata, upload.count, upload.size = encoded.metadata, encoded.count, encoded.size
        # Joined only where the store needs it in one: that is a copy.
        return encoded.pieces if isinstance(self._store, PutPieces) else encoded.data

    def repair(self, upload: Upload) -> None:
        """Write the object again under the name that its queue entry has; one attempt."""
        data = upload.data
        if upload.stage is not Stage.SETTLED:
            self._put(upload.location, data)

    def _attempt(self, upload: Upload, data: bytes | list[bytes | memoryview]) -> None:
        if upload.stage is Stage.SETTLED:
            return
        try:
            self._put(upload.location, data)
        except TransientStorageError as error:
            upload.trouble = error
            raise

    def _put(self, location: str, data: bytes | list[bytes | memoryview]) -> None:
        if isinstance(data, bytes):
            self._store.put(location, data)
        else:
            assert isinstance(self._store, PutPieces)
            self._store.put_pieces(location, data)
