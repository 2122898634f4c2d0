"""What ``TopicProducer.produce()`` returns: one handle for the parts in all partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

from opendata_buffer.commit.durability import Durable, WriteHandle
from opendata_buffer.locks import locked
from opendata_buffer.runtime import Runtime

__all__ = ["TopicHandle", "TopicWatcher"]


class TopicWatcher:
    """Tells whether the entries of one call are durable in all partitions they went to.

    Attributes:
        parts: The handle of each partition that got some.
    """

    def __init__(self, parts: Mapping[str, WriteHandle], runtime: Runtime) -> None:
        self.parts = parts
        self._runtime = runtime

    def result(self) -> dict[str, Durable] | None:
        """None while a part waits; where each part is once all are durable.

        Raises:
            OpenDataBufferError: A part was given up, and all others have ended. Which, and which
                are durable all the same, is told by :attr:`parts`.
        """
        found: dict[str, Durable] = {}
        failure: BaseException | None = None
        for name, part in self.parts.items():
            try:
                durable = part.watcher.result()
            except Exception as error:
                failure = failure or error
                continue
            if durable is None:
                return None
            found[name] = durable
        if failure is not None:
            raise failure
        return found

    def await_durable(self, timeout: float | None = None) -> dict[str, Durable]:
        """Block until all parts are stored and queued.

        Args:
            timeout: Seconds for all of them; None waits until the delivery timeout.

        Raises:
            TimeoutError: Not yet; the producer goes on trying.
            OpenDataBufferError: As in :meth:`result`.
        """
        until = None if timeout is None else self._runtime.monotonic() + timeout
        failure: Exception | None = None
        for part in self.parts.values():
            left = None if until is None else max(0.0, until - self._runtime.monotonic())
            try:
                part.watcher.await_durable(left)
            except TimeoutError:
                raise
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        result = self.result()
        assert result is not None
        return result

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once every part has ended, at once if they have already.

        It is called from a thread of the producer, which waits for it: it must not block.
        """
        if not self.parts:
            callback()
            return
        missing = _Countdown(len(self.parts), callback, self._runtime)
        for part in self.parts.values():
            part.watcher.add_done_callback(missing.one_less)

    def __await__(self) -> Generator[None, None, dict[str, Durable]]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> dict[str, Durable]:
        async def ended(part: WriteHandle) -> None:
            await part

        outcomes = await asyncio.gather(*map(ended, self.parts.values()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        result = self.result()
        assert result is not None
        return result


class _Countdown:
    def __init__(self, count: int, callback: Callable[[], None], runtime: Runtime) -> None:
        self._left = count
        self._callback = callback
        self._condition = runtime.condition()

    def one_less(self) -> None:
        if self._take():
            self._callback()

    @locked
    def _take(self) -> bool:
        self._left -= 1
        return self._left == 0


@dataclass(frozen=True, slots=True)
class TopicHandle:
    """``await handle`` waits for durability in asyncio.

    Attributes:
        watcher: Tells when the entries are durable.
        ingestion_time_ms: The earliest time recorded for them, milliseconds since the Unix
            epoch; 0 for a call without entries.
    """

    watcher: TopicWatcher
    ingestion_time_ms: int

    def __await__(self) -> Generator[None, None, dict[str, Durable]]:
        return self.watcher.__await__()
