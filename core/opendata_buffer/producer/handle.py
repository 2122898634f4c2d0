"""What ``produce()`` returns: a handle that tells when the entries are durable.

Durable means stored and queued (OpenData RFC 0001). All calls whose entries went into one batch
share one :class:`DurabilityWatcher`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

from opendata_buffer.concurrency import locked
from opendata_buffer.runtime import Runtime

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Durable:
    """Where durable entries are: the batch's sequence in the queue and its location."""

    sequence: int
    location: str


class DurabilityWatcher:
    """Tells whether the entries of a ``produce()`` call are durable. Thread-safe.

    Made by the producer, one for each batch.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._condition = runtime.condition()
        self._outcome: Durable | BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def result(self) -> Durable | None:
        """None while the entries wait; where they are once they are durable.

        Raises:
            OpenDataBufferError: The entries were given up; ``CommitStateUnknown`` says that they
                may be in the queue all the same.
        """
        outcome = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def await_durable(self, timeout: float | None = None) -> Durable:
        """Block until the entries are stored and their batch is queued.

        Args:
            timeout: Seconds; None waits until the producer's delivery timeout.

        Raises:
            TimeoutError: Not yet; the producer goes on trying.
            OpenDataBufferError: The entries were given up, as in :meth:`result`.
        """
        self._await_outcome(timeout)
        return self._durable()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the outcome is known, at once if it is already.

        It is called from a thread of the producer, which waits for it: it must not block, so
        neither produce nor flush. What it raises is logged.
        """
        if self._add_callback(callback):
            return
        try:
            callback()
        except Exception:
            log.exception("a callback of a write handle failed")

    def __await__(self) -> Generator[None, None, Durable]:
        return self._wait_async().__await__()

    @property
    def is_set(self) -> bool:
        """Whether the outcome is known."""
        return self._outcome is not None

    def complete(self, outcome: Durable | BaseException) -> None:
        """Set the outcome and call the callbacks. For the producer; only the first call counts."""
        for callback in self._set(outcome):
            try:
                callback()
            except BaseException:
                # This is a thread of the producer. sys.exit() in a callback would end that thread
                # and not the process, and all other handles would wait for ever.
                log.exception("a callback of a write handle failed")

    @locked
    def _set(self, outcome: Durable | BaseException) -> list[Callable[[], None]]:
        if self._outcome is not None:
            return []
        self._outcome = outcome
        self._condition.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    @locked
    def _add_callback(self, callback: Callable[[], None]) -> bool:
        if self._outcome is not None:
            return False
        self._callbacks.append(callback)
        return True

    @locked
    def _await_outcome(self, timeout: float | None) -> None:
        deadline = None if timeout is None else self._runtime.monotonic() + timeout
        while self._outcome is None:
            left = None if deadline is None else deadline - self._runtime.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"not durable after {timeout} s; the producer goes on trying: wait again"
                )
            self._condition.wait(left)

    async def _wait_async(self) -> Durable:
        done, wake = wakeable()
        self.add_done_callback(wake)
        await done
        return self._durable()

    def _durable(self) -> Durable:
        result = self.result()
        assert result is not None
        return result


@dataclass(frozen=True, slots=True)
class WriteHandle:
    """What ``produce()`` returns. ``await handle`` waits for durability in asyncio.

    Attributes:
        watcher: Tells when the entries are durable.
        ingestion_time_ms: The time recorded for them, milliseconds since the Unix epoch.
    """

    watcher: DurabilityWatcher
    ingestion_time_ms: int

    def __await__(self) -> Generator[None, None, Durable]:
        return self.watcher.__await__()


def wakeable() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future of the running event loop, and a function for any thread that sets its result."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    def wake_from_thread() -> None:
        # RuntimeError: the loop was closed meanwhile, so nothing waits for the future. A check
        # of loop.is_closed() before the call would race with the closing.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(wake)

    return future, wake_from_thread
