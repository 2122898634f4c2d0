"""From an upload to its object in the store: encoded, named, written with retries."""

from __future__ import annotations

from opendata_buffer import metrics
from opendata_buffer.commit.upload import Stage, Upload
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.keys import batch_key, tagged_ulid
from opendata_buffer.producer.batcher import Batch
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Moment, Runtime, deadline
from opendata_buffer.stores import Put

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
            encoded = batch.encode(config.compression, config.zstd_level)
            data = encoded.data
            upload.metadata, upload.count, upload.size = (
                encoded.metadata,
                encoded.count,
                encoded.size,
            )
            upload.data = data
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
        metrics.bytes_written.add(len(data))

    def repair(self, upload: Upload) -> None:
        """Write the object again under the name that its queue entry has; one attempt."""
        data = upload.data
        if upload.stage is not Stage.SETTLED:
            self._store.put(upload.location, data)

    def _attempt(self, upload: Upload, data: bytes) -> None:
        if upload.stage is Stage.SETTLED:
            return
        try:
            self._store.put(upload.location, data)
        except TransientStorageError as error:
            upload.trouble = error
            raise
