"""Collect notes for the operator of a queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from opendata_buffer import errors
from opendata_buffer.hints import Surface

T = TypeVar("T")


class Notes(list[str]):
    """Notes for the operator of a queue, next to its numbers."""

    def add(self, error: errors.OpenDataBufferError) -> None:
        """Note an error, in the words of a command line."""
        self.append(error.text(Surface.SHELL))

    def result_of(self, read: Callable[[], T | None]) -> T | None:
        """Call a function. If it cannot read its object, note the error and return None.

        The status still shows a queue if an object next to the manifest is damaged, or if this
        user may not read it.
        """
        try:
            return read()
        except (errors.CorruptData, errors.PermanentStorageError) as error:
            self.add(error)
            return None
