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
    def close(self, timeout: float | None = None) -> None:
        """Flush and end; free to repeat."""

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
        except OpenDataBufferError:
            if exc is None:
                raise
            log.exception("closing the %s failed", type(self).__name__)
