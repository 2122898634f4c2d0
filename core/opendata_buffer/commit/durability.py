"""What ``produce()`` returns: a promise that the entries are stored and queued (OpenData RFC 0001).

One :class:`Completion` is shared by all calls whose entries went into one batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass

from opendata_buffer.runtime import Runtime

__all__ = ["Completion", "Durable", "DurabilityWatcher", "WriteHandle"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Durable:
    """Where durable entries are: the batch's sequence in the queue and its location."""

    sequence: int
    location: str


class Completion:
    """Set once, to a success or a failure; many may wait."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._condition = runtime.condition()
        self._outcome: Durable | BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []

    def set(self, outcome: Durable | BaseException) -> None:
        """Settle it; only the first call counts."""
        with self._condition:
            if self._outcome is not None:
                return
            self._outcome = outcome
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            try:
                callback()
            except Exception:
                # It runs in the committer's thread: the other handles of the group are still
                # to be told, and their outcome is not this caller's.
                log.exception("a callback of a write handle failed")

    def add_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when settled, at once if it is already. It must not block."""
        with self._condition:
            if self._outcome is None:
                self._callbacks.append(callback)
                return
        callback()

    def result(self) -> Durable | None:
        """None while pending; the success; or raises the failure."""
        outcome = self._outcome
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def wait(self, timeout: float | None) -> Durable:
        """Block until settled."""
        deadline = None if timeout is None else self._runtime.monotonic() + timeout
        with self._condition:
            while self._outcome is None:
                left = None if deadline is None else deadline - self._runtime.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"not durable after {timeout} s; the producer goes on trying: wait again"
                    )
                self._condition.wait(left)
        result = self.result()
        assert result is not None
        return result


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
        loop = asyncio.get_running_loop()
        settled = loop.create_future()

        def wake() -> None:
            if not settled.done():
                settled.set_result(None)

        def wake_from_thread() -> None:
            # RuntimeError: the loop was closed before the batch landed. Nobody waits then, and
            # asking it first would race with its closing.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(wake)

        self._completion.add_callback(wake_from_thread)
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
