"""Calls in parallel, and objects that a ``with`` block closes."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextvars import copy_context
from types import TracebackType
from typing import Any, Self, TypeVar

from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.runtime import Runtime

log = logging.getLogger(__name__)


class Closeable(ABC):
    """A context manager that closes itself, and does not hide the error that ended the block."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is pending and end; free to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except OpenDataBufferError as error:
            if exc is None:
                raise
            self._note_failed_close(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: Any) -> None:
        import asyncio  # not for those that do not use it

        await asyncio.to_thread(self.__exit__, *raised)

    def _note_failed_close(self, error: OpenDataBufferError) -> None:
        log.exception("closing the %s failed", type(self).__name__)


Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    runtime: Runtime,
    call: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    most: int = 32,  # a quarter of the connections that a store keeps by default
) -> list[Result]:
    """The results of ``call`` of each item, from threads that have the caller's deadline.

    Raises:
        Exception: The error of the first item whose call failed; all calls have ended by then. To
            get each outcome, let ``call`` return its error.
    """
    wanted = tuple(items)
    if len(wanted) <= 1:
        return [call(each) for each in wanted]  # a thread would only add cost
    changed = runtime.condition()
    waiting = list(enumerate(wanted))[::-1]
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while True:
            with changed:
                if not waiting:
                    return
                index, item = waiting.pop()
            try:
                results[index] = call(item)
            except BaseException as error:  # raised again in the caller's thread
                errors[index] = error
            with changed:
                changed.notify_all()

    for _ in range(min(most, len(wanted))):
        with changed:
            if not waiting:
                break  # a fast store has answered all calls before every thread was started
        context = copy_context()  # one context cannot be entered twice at once
        try:
            runtime.spawn(lambda context=context: context.run(work), "opendata-buffer-together")  # type: ignore[misc]
        except RuntimeError:
            # No thread can be started. The error would leave calls under way without a waiter.
            work()
            break
    with changed:
        while len(results) + len(errors) < len(wanted):
            changed.wait()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(wanted))]
