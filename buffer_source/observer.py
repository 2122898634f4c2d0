"""Reading a queue beside its consumer: no claim, no acknowledgement, no collector, no marker."""

from __future__ import annotations

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.cursors import Cursors, check_data_loss
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.errors import QueueReset
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.rollback_checks import ends_before
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["Observer"]


class Observer:
    """Hands out queue entries as a consumer does, and writes nothing anywhere.

    The queue's consumer does not know of it and takes entries away when it is done with them.
    What was handed out here stays readable until the collector deletes the objects; what was not
    is lost to this reader.

    Args:
        config: Where the queue is.
        last_acked_sequence: Reading starts behind it; None: at the oldest queued batch.
        store: The opened store.
        runtime: Clock.
        allow_data_loss: Go on behind a gap, with a warning, instead of raising ``DataLoss``.

    Raises:
        QueueReset: The queue ends before ``last_acked_sequence``.
        DataLoss: The queue begins behind it, and no loss is allowed.
        CorruptManifest, StorageError: The manifest could not be read.
    """

    def __init__(
        self,
        config: ConsumerConfig,
        last_acked_sequence: int | None = None,
        *,
        store: Store,
        runtime: Runtime,
        allow_data_loss: bool = False,
    ) -> None:
        self._queue = Queue(store, config, runtime=runtime, role="reader")
        self._allow_data_loss = allow_data_loss
        manifest = self._queue.read() or Manifest.empty()
        begin = manifest.first_sequence
        if last_acked_sequence is not None:
            begin = last_acked_sequence + 1
            if begin > manifest.next_sequence:
                raise QueueReset(
                    ends_before(
                        last_acked_sequence, manifest.next_sequence, self._queue.key, store.url
                    )
                )
        self._frontier = self._continued(Cursors.at(begin), manifest)
        self._next_sequence = manifest.next_sequence

    @property
    def last_acked_sequence(self) -> int | None:
        """The last sequence that is done with here; the queue does not learn of it."""
        return self._frontier.last_acked

    @property
    def last_handed_out_sequence(self) -> int | None:
        """The last sequence handed out; None before the queue's first batch."""
        return self._frontier.last_handed_out

    @property
    def next_sequence(self) -> int:
        """What the next appended batch will get, as of the last look at the manifest."""
        return self._next_sequence

    def next_descriptors(self, max: int) -> list[BatchDescriptor]:  # noqa: A002
        """Up to so many next entries, from one look at the manifest; nothing is fetched.

        Raises:
            DataLoss: The consumer took entries that were not handed out here, and no loss is
                allowed.
            QueueReset, CorruptManifest, StorageError: The manifest could not be read.
        """
        manifest = self._queue.read() or Manifest.empty()
        self._frontier = self._continued(self._frontier, manifest)
        self._next_sequence = manifest.next_sequence
        found = manifest.entries(self._frontier.next_hand_out, max)
        if found:
            self._frontier = self._frontier.hand_out(found[-1].sequence)
        return [BatchDescriptor.of(entry) for entry in found]

    def ack_through(self, sequence: int) -> None:
        """Nothing up to and including ``sequence`` is asked for again. Makes no request."""
        self._frontier = self._frontier.ack_through(sequence)

    def close(self) -> None:
        """There is nothing to let go."""

    def _continued(self, frontier: Cursors, manifest: Manifest) -> Cursors:
        return check_data_loss(
            frontier,
            manifest,
            self._queue.key,
            allowed=self._allow_data_loss,
            cause="The queue's consumer was faster than this query, which reads beside it.",
        )
