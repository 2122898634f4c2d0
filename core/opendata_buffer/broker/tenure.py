"""A foreman's time in office: it is the queue's consumer, and the claims are its own.

It begins with the claims of its predecessor, whatever that one last wrote, and ends when another
consumer, or another foreman, has the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from opendata_buffer.broker.claims import CLAIMS, Claims, claims_key, decode, encode
from opendata_buffer.broker.shared_queue import SharedQueue
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import Fenced, TransientStorageError
from opendata_buffer.quarantine import Entry
from opendata_buffer.queue.cas import Done, Register
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Store

__all__ = ["OpenConsumer", "QueueConsumer", "Tenure", "stored_epoch"]


class _Position(Protocol):
    @property
    def queue_id(self) -> str: ...


class QueueConsumer(Protocol):
    """What a foreman needs of the queue's :class:`.Consumer`.

    That one may ask a broker for the floor, so the broker does not know it by name: whoever opens
    a broker says how a consumer is opened.
    """

    @property
    def epoch(self) -> int:
        """Its epoch."""
        ...

    @property
    def last_acked_sequence(self) -> int | None:
        """The last batch that is acknowledged."""
        ...

    @property
    def last_handed_out_sequence(self) -> int | None:
        """The read cursor."""
        ...

    def position_of(self, sequence: int) -> _Position:
        """Names the queue."""
        ...

    def next_descriptors(self, max: int) -> Sequence[Entry]:  # noqa: A002
        """The next entries."""
        ...

    def ack_through(self, sequence: int) -> None:
        """Acknowledge all up to this one."""
        ...

    def close(self) -> None:
        """Write out what is acknowledged, and end."""
        ...


class OpenConsumer(Protocol):
    """Takes a queue over; the class :class:`.Consumer` is one."""

    def __call__(
        self,
        config: ConsumerConfig,
        *,
        store: Store,
        runtime: Runtime,
        queue: Queue | None,
        program: str,
    ) -> QueueConsumer:
        """See the class."""
        ...


class Tenure:
    """The consumer and the claims of one foreman. Begins when made. Not thread-safe.

    Args:
        store: Where the queue lives.
        config: The consumer's settings.
        runtime: Clock and threads.
        open_consumer: Takes the queue over.
        queue: What the broker appends to; None for a queue of its own.

    Attributes:
        claims: As they are stored.
        consumer: The queue's.
        first: The first batch that is still queued.

    Raises:
        Fenced: Another foreman was faster.
        OpenDataBufferError: The queue, or the claims, could not be taken over.
    """

    def __init__(
        self,
        store: Store,
        config: ConsumerConfig,
        runtime: Runtime,
        open_consumer: OpenConsumer,
        queue: SharedQueue | None = None,
    ) -> None:
        self._config = config
        self.consumer = open_consumer(
            config, store=store, runtime=runtime, queue=queue, program="broker for workers"
        )
        try:
            last = self.consumer.last_handed_out_sequence
            self.first = 0 if last is None else last + 1
            self._register = _register(store, config, runtime)
            self.claims = self._adopt()
        except BaseException:
            self.consumer.close()
            raise

    @property
    def epoch(self) -> int:
        """Of the consumer, and of its claims."""
        return self.consumer.epoch

    def _adopt(self) -> Claims:
        """Take the claims over from a foreman with a lower epoch, whatever it last wrote."""
        queue, epoch = self.consumer.position_of(self.first).queue_id, self.epoch

        def decide(found: Claims | None) -> Claims:
            if found is None:
                return Claims(epoch, self.first, queue=queue)
            if found.queue == queue and found.epoch > epoch:
                return found
            return found.adopted(epoch, queue, self.first)

        outcome = self._register.update(decide)
        if not isinstance(outcome, Done) or outcome.value is None:
            raise TransientStorageError(
                f"claims {self._register.key!r} could not be taken over: {outcome}. Try again."
            )
        if outcome.value.epoch != epoch:
            raise Fenced(self._config.manifest_path, epoch, outcome.value.epoch)
        return outcome.value

    def write(self, after: Claims) -> None:
        """Store changed claims; returns once they are.

        Raises:
            Fenced: Another foreman has them; nothing was written.
            TransientStorageError: They may have been written or not.
        """
        before = self.claims

        def decide(found: Claims | None) -> Claims | None:
            # Our own write whose answer was lost, or somebody else's: then nothing is written.
            return after if found == before else found

        if after != before:
            outcome = self._register.update(decide, from_memory=True)
            if not isinstance(outcome, Done):
                raise TransientStorageError(
                    f"claims {self._register.key!r} could not be written: {outcome}. Try again."
                )
            if outcome.value != after:
                found = after.epoch if outcome.value is None else outcome.value.epoch
                raise Fenced(self._config.manifest_path, after.epoch, found)
        self.claims = after


def stored_epoch(store: Store, config: ConsumerConfig, runtime: Runtime) -> int | None:
    """Of the claims as they are now; None where there are none.

    Raises:
        CorruptData, StorageError: They cannot be read.
    """
    found = _register(store, config, runtime).read()
    return found.value.epoch if isinstance(found, Done) and found.value is not None else None


def _register(store: Store, config: ConsumerConfig, runtime: Runtime) -> Register[Claims]:
    return Register(
        store,
        claims_key(config.data_path_prefix),
        decode=decode,
        encode=encode,
        runtime=runtime,
        settings=config,
        max_bytes=CLAIMS.max_bytes,
        unreadable=CLAIMS.unreadable,
    )
