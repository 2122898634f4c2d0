"""What a producer has given up: it is told with every flush, and keeps transactions out. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from opendata_buffer.commit.upload import Upload
from opendata_buffer.errors import FlushFailed

__all__ = ["Failures"]


class Failures:
    """Uploads that were not appended, or not surely; none is forgotten."""

    def __init__(self) -> None:
        self._first: BaseException | None = None
        self._calls = 0
        self._of_transaction = False

    def record(self, failed: Sequence[Upload]) -> None:
        """Remember them; before their callers are told, so that no later transaction gets in."""
        for upload in failed:
            assert isinstance(upload.outcome, BaseException)
            self._calls += upload.calls
            self._first = self._first or upload.outcome
            self._of_transaction |= upload.ordered

    def check(self) -> None:
        """Raise ``FlushFailed`` when there is any."""
        if self._first is not None:
            raise FlushFailed(self._calls, str(self._first)) from self._first

    def check_transaction(self) -> None:
        """Raise ``FlushFailed`` when one was of a transaction: a later one would pass it.

        The reader would then take the failed one for a repeat when it is produced again.
        """
        if self._of_transaction:
            raise FlushFailed(self._calls, f"an earlier batch failed: {self._first}")
