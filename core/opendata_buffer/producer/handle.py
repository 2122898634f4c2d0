"""What ``produce()`` returns: a handle that tells when the entries are durable.

Durable means stored and queued (OpenData RFC 0001). All calls whose entries went into one batch
share one :class:`Completion`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

from opendata_buffer.concurrency import locked
from opendata_buffer.runtime import Runtime

__all__ = ["Completion", "DurabilityWatcher", "Durable", "WriteHandle", "wakeable"]


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Durable:
    """Where durable entries are: the batch's sequence in the queue and its location."""

    sequence: int
    location: str


class Completion:
    """Thread-safe one-shot result, shared by all ``produce()`` calls of a batch."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._condition = runtime.condition()
        self._outcome: Durable | BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether the outcome is known."""
        return self._outcome is not None

    def set(self, outcome: Durable | BaseException) -> None:
        """Tell the outcome to all that wait; only the first call counts."""
        for callback in self._settle(outcome):
            _call(callback)

    @locked
    def _settle(self, outcome: Durable | BaseException) -> list[Callable[[], None]]:
        if self._outcome is not None:
            return []
        self._outcome = outcome
        self._condition.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when settled, at once if it is already. It must not block."""
        if self._keep(callback):
            return
        try:
            callback()
        except Exception:
            log.exception("a callback of a write handle failed")

    @locked
    def _keep(self, callback: Callable[[], None]) -> bool:
        if self._outcome is not None:
            return False
        self._callbacks.append(callback)
        return True

    def result(self) -> Durable | None:
        """None while pending; the success; or raises the failure."""
        outcome = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def wait(self, timeout: float | None) -> Durable:
        """Block until settled; ``timeout`` in seconds."""
        self._await_outcome(timeout)
        result = self.result()
        assert result is not None
        return result

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


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except BaseException:
        # It runs in a thread of the producer, where sys.exit() would end neither the process
        # nor anything but that thread: every other handle would then wait for ever.
        log.exception("a callback of a write handle failed")


def wakeable() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future of the running event loop, and what sets its result from any thread."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    def wake_from_thread() -> None:
        # RuntimeError: the loop was closed before it came to it. Nobody waits then, and asking
        # it first would race with its closing.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(wake)

    return future, wake_from_thread


class DurabilityWatcher:
    """Tells whether the entries of one ``produce()`` call are durable."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion

    def result(self) -> Durable | None:
        """None while the entries wait; where they are once they are durable.

        Raises:
            OpenDataBufferError: The entries were given up; ``CommitStateUnknown`` says that they
                may be in the queue all the same.
        """
        return self._completion.result()

    def await_durable(self, timeout: float | None = None) -> Durable:
        """Block until the entries are stored and their batch is queued.

        Args:
            timeout: Seconds; None waits until the producer's delivery timeout.

        Raises:
            TimeoutError: Not yet; the producer goes on trying.
            OpenDataBufferError: The entries were given up, as in :meth:`result`.
        """
        return self._completion.wait(timeout)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the outcome is known, at once if it is already.

        It is called from a thread of the producer, which waits for it: it must not block, so
        neither produce nor flush. What it raises is logged.
        """
        self._completion.add_callback(callback)

    def __await__(self) -> Generator[None, None, Durable]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Durable:
        settled, wake = wakeable()
        self._completion.add_callback(wake)
        await settled
        result = self._completion.result()
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
