"""TODO: what opendata_buffer.broker.dispatcher_term is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

from opendata_buffer import outcomes
from opendata_buffer.broker.claims import CLAIMS, Claims, claims_key, decode, encode
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.errors import Fenced, TransientStorageError
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.quarantine import Entry
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["OpenConsumer", "QueueConsumer", "SharedQueue", "DispatcherTerm", "stored_epoch"]


# ---- The queue as two threads of a broker use it: one appends for producers, one acknowledges ----
#
# With a queue each, every acknowledgement would be a race between the two: who acknowledges reads
# first, and would lose against who has the manifest in memory. With one they take turns, and both
# write from memory.


T = TypeVar("T")

FRESH_S = 0.2
"""A manifest that was written so recently is not read again to see what is new in it."""


class SharedQueue(Queue):
    """A :class:`Queue` for several threads: each call waits for its turn.

    Args:
        store: Where it lives.
        config: The queue.
        runtime: Clock and threads.
        claim: Of the prefix.
    """

    # Nobody else writes it as often as this process: what it remembers is seldom out of date.
    _changes_from_memory = True

    def __init__(
        self,
        store: Store,
        config: QueueConfig,
        *,
        runtime: Runtime,
        claim: QueueClaim | None = None,
    ) -> None:
        super().__init__(store, config, runtime=runtime, role="broker", claim=claim)
        self._turn = _Turn(runtime)
        self._written_at = float("-inf")

    def append(
        self,
        entries: Sequence[NewEntry],
        *,
        guard: Callable[[Manifest], T | None] | None = None,
        read_first: bool = False,
        makes_room: bool = False,
    ) -> int | T:
        """See :meth:`Queue.append`."""
        with self._turn:
            found = super().append(
                entries, guard=guard, read_first=read_first, makes_room=makes_room
            )
            self._written_at = self._runtime.monotonic()
            return found

    def claim_epoch(
        self, last_acked_sequence: int | None, *, allow_data_loss: bool = False
    ) -> Manifest:
        """See :meth:`Queue.claim_epoch`."""
        with self._turn:
            return super().claim_epoch(last_acked_sequence, allow_data_loss=allow_data_loss)

    def dequeue(self, through_sequence: int, epoch: int) -> Manifest:
        """See :meth:`Queue.dequeue`."""
        with self._turn:
            return super().dequeue(through_sequence, epoch)

    def read(self) -> Manifest | None:
        """See :meth:`Queue.read`; what this process wrote just now is not read again."""
        if self._runtime.monotonic() - self._written_at < FRESH_S:
            return self.last_seen
        with self._turn:
            return super().read()

    def close(self) -> None:
        """See :meth:`Queue.close`."""
        with self._turn:
            super().close()


class _Turn:
    """A lock that is given to who waits longest: who comes back at once waits behind the others."""

    def __init__(self, runtime: Runtime) -> None:
        self._condition = runtime.condition()
        self._line: deque[object] = deque()

    def __enter__(self) -> None:
        me = object()
        with self._condition:
            self._line.append(me)
            try:
                while self._line[0] is not me:
                    self._condition.wait()
            except BaseException:
                self._line.remove(me)
                self._condition.notify_all()
                raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._condition:
            self._line.popleft()
            self._condition.notify_all()


# ---- A foreman's time in office: it is the queue's consumer, and the claims are its own. ----
#
# It begins with the claims of its predecessor, whatever that one last wrote, and ends when another
# consumer, or another foreman, has the queue.


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


class DispatcherTerm:
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
        if not isinstance(outcome, outcomes.Applied) or outcome.value is None:
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
            if not isinstance(outcome, outcomes.Applied):
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
    return found.epoch if isinstance(found, Claims) else None


def _register(store: Store, config: ConsumerConfig, runtime: Runtime) -> CasObject[Claims]:
    return CasObject(
        store,
        claims_key(config.data_path_prefix),
        decode=decode,
        encode=encode,
        runtime=runtime,
        settings=config,
        max_bytes=CLAIMS.max_bytes,
        unreadable=CLAIMS.unreadable,
    )
