"""What is closed at the end of a ``with`` block, and may fail to."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from opendata_buffer.errors import OpenDataBufferError

__all__ = ["ClosedAtEnd"]

log = logging.getLogger(__name__)


class ClosedAtEnd(ABC):
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

    def _note_failed_close(self, error: OpenDataBufferError) -> None:
        """Say that closing failed after the block had; called while the error is handled."""
        log.exception("closing the %s failed", type(self).__name__)
