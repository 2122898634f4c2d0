"""One item ahead: the next batch is decoded while Spark takes the rows of this one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from opendata_buffer.runtime import Runtime

__all__ = ["AHEAD_BYTES", "ahead"]

T = TypeVar("T")

AHEAD_BYTES = 1024 * 1024
"""Small items are made ahead up to this many bytes; a larger one is made ahead alone."""


def ahead(
    items: Generator[T, None, None], size_of: Callable[[T], int], runtime: Runtime
) -> Generator[T, None, None]:
    """The same items in the same order, made by a thread of their own.

    Items that wait have less than :data:`AHEAD_BYTES`, or are a single one; with the one that
    the caller has, two large items live at a time. An error is raised at its place. Closing
    this generator closes ``items`` and ends the thread.

    Args:
        items: Runs in the thread, from the first item asked for.
        size_of: Bytes of an item.
        runtime: Threads.
    """
    return _Ahead(items, size_of, runtime).results()


class _Ahead(Generic[T]):
    def __init__(
        self, items: Generator[T, None, None], size_of: Callable[[T], int], runtime: Runtime
    ) -> None:
        self._items = items
        self._size_of = size_of
        self._runtime = runtime
        self._changed = runtime.condition()
        self._made: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self._ended = False
        self._stopped = False
        self._error: BaseException | None = None

    def results(self) -> Generator[T, None, None]:
        thread = self._runtime.spawn(self._work, "opendata-buffer-decode")
        try:
            while (found := self._take()) is not None:
                yield found.pop()
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            thread.join()

    def _take(self) -> list[T] | None:
        """The next item, in a list that the caller empties; None at the end."""
        with self._changed:
            while not self._made and not self._ended:
                self._changed.wait()
            if self._made:
                item, size = self._made.popleft()
                self._bytes -= size
                self._changed.notify_all()
                return [item]
            if self._error is not None:
                raise self._error
            return None

    def _work(self) -> None:
        try:
            while self._has_room():
                item = next(self._items, None)
                if item is None:
                    break
                self._put(item)
                del item  # or it would live here while the next one is made
        except BaseException as error:
            self._error = error
        finally:
            self._items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: T) -> None:
        size = self._size_of(item)
        with self._changed:
            self._made.append((item, size))
            self._bytes += size
            self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait for room; false when nobody wants more."""
        with self._changed:
            while self._bytes >= AHEAD_BYTES and not self._stopped:
                self._changed.wait()
            return not self._stopped
