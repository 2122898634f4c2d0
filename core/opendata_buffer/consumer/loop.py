"""Get the next batch: with a call that waits, by iteration, or with either of them in asyncio."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from opendata_buffer.arguments import checked
from opendata_buffer.errors import Closed
from opendata_buffer.familiar_names import OF_CONSUMERS, FamiliarNames
from opendata_buffer.runtime import Closeable, Condition, Runtime, wait_for

if TYPE_CHECKING:  # pyarrow takes 0.2 s to import, which a planner does not need
    import asyncio

    from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch
    from opendata_buffer.consumer.pace import PollPace


class BatchLoop(FamiliarNames, Closeable):
    """The methods that get the next batch, for any consumer that knows which batch is ready now."""

    _instead = OF_CONSUMERS

    _runtime: Runtime
    _lock: Condition
    _closed: bool
    _poll_pace: PollPace

    def __init__(self) -> None:
        self._returned: deque[ConsumedBatch] = deque()
        """Taken by a call that was cancelled meanwhile, and delivered next."""
        self._cancelled: asyncio.Future[ConsumedBatch | None] | None = None
        """A cancelled call whose thread is still at work."""

    @abstractmethod
    def _next_now(self, *, arrow: bool) -> Any:
        """Return the next batch, or None if none is ready."""

    @checked
    def next_batch(self, timeout: float | None = 0.0) -> ConsumedBatch | None:
        """Return the next batch, or None if none came in time.

        After an error the next call tries the same batch again.

        ::

            while (batch := consumer.next_batch(timeout=5.0)) is not None:
                for record in batch:
                    write(record.value)
                batch.ack()

        Args:
            timeout: Seconds to wait for a batch. 0 (default) asks once; None waits until there is
                one.

        Returns:
            The batch with its records; None if none came in time.

        Raises:
            PoisonBatch: The batch is missing, unreadable or foreign. :meth:`.Consumer.skip` it.
            Fenced: Another consumer owns the queue.
            DataLoss, QueueReset, CorruptManifest: The queue does not continue at the cursor.
            StorageError: The store did not answer.
            Closed: The consumer was closed, before the call or while it waited.
        """
        found: ConsumedBatch | None = self._next_within(timeout, arrow=False)
        return found

    @checked
    def next_arrow_batch(self, timeout: float | None = 0.0) -> ArrowBatch | None:
        """Return the next batch with its records in an Arrow array, without Python objects.

        After an error the next call tries the same batch again.

        Args:
            timeout: Seconds to wait for a batch. 0 (default) asks once; None waits until there is
                one.

        Returns:
            The batch; None if none came in time.

        Raises:
            OpenDataBufferError: As :meth:`next_batch`.
        """
        found: ArrowBatch | None = self._next_within(timeout, arrow=True)
        return found

    @checked
    async def next_batch_async(self, timeout: float | None = 0.0) -> ConsumedBatch | None:
        """Return the next batch as :meth:`next_batch` does, without blocking the event loop.

        The call may be cancelled. The next call then gets the batch that was being fetched.

        ::

            while (batch := await consumer.next_batch_async(timeout=None)) is not None:
                await write(batch.values)
                await batch.ack_async()

        Args:
            timeout: Seconds to wait for a batch. 0 (default) asks once; None waits until there is
                one.

        Returns:
            The batch with its records; None if none came in time.

        Raises:
            OpenDataBufferError: As :meth:`next_batch`.
        """
        import asyncio  # Imported late: it takes 20 ms.

        until = None if timeout is None else self._runtime.monotonic() + timeout
        while True:
            if self._cancelled is not None:  # its batch comes first
                await asyncio.wait([self._cancelled])
            began = self._runtime.monotonic()
            call = asyncio.ensure_future(asyncio.to_thread(self._take, arrow=False))
            try:
                batch: ConsumedBatch | None = await asyncio.shield(call)
            except asyncio.CancelledError:
                self._cancelled = call
                call.add_done_callback(self._put_back)
                raise
            left = self._pause(batch is not None, began, until)
            if batch is not None or left <= 0:
                return batch
            await asyncio.sleep(left)

    def __iter__(self) -> Self:
        """Return the consumer. Each ``next()`` waits for a batch, until the consumer is closed."""
        return self

    def __next__(self) -> ConsumedBatch:
        with self._until_closed():
            if (batch := self.next_batch(None)) is not None:
                return batch
        raise StopIteration

    def __aiter__(self) -> Self:
        """Return the consumer, which then waits for batches without blocking the event loop."""
        return self

    async def __anext__(self) -> ConsumedBatch:
        with self._until_closed():
            if (batch := await self.next_batch_async(None)) is not None:
                return batch
        raise StopAsyncIteration

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        try:
            yield
        except Closed:
            if not self._closed:
                raise

    def _next_within(self, timeout: float | None, *, arrow: bool) -> Any:
        until = None if timeout is None else self._runtime.monotonic() + timeout
        while True:
            began = self._runtime.monotonic()
            batch = self._take(arrow=arrow)
            left = self._pause(batch is not None, began, until)
            if batch is not None or left <= 0:
                return batch
            with self._lock:
                wait_for(self._runtime, self._lock, lambda: self._closed, left)

    def _pause(self, found: bool, began: float, until: float | None) -> float:
        """Return the seconds to the next look, after one that ended now.

        Args:
            found: Whether it found a batch.
            began: When it began.
            until: When the call has to return; None for never.
        """
        now = self._runtime.monotonic()
        self._poll_pace.looked(found, began, now)
        return (
            self._poll_pace.pause_s if until is None else min(self._poll_pace.pause_s, until - now)
        )

    def _take(self, *, arrow: bool) -> Any:
        while self._returned:
            batch = self._returned.popleft()
            if self._is_waiting(batch):
                return batch.as_arrow() if arrow else batch
        return self._next_now(arrow=arrow)

    @abstractmethod
    def _is_waiting(self, batch: ConsumedBatch) -> bool:
        """Return whether a batch that was fetched is still to be delivered.

        It is not if the consumer was moved to another place meanwhile.
        """

    def _put_back(self, call: asyncio.Future[ConsumedBatch | None]) -> None:
        self._cancelled = None
        if not call.cancelled() and call.exception() is None:
            batch = call.result()
            if batch is not None:
                self._returned.append(batch)
