"""Which threads a producer has, and what each of them is at. Pure.

A worker uploads, tells callers what became of their records, or is idle: one idle worker keeps the
time, so there is one more than upload at once. Another thread appends.
"""

from __future__ import annotations

__all__ = ["Crew"]


class Crew:
    """Counts the threads. Not thread-safe: it belongs to the backlog, under its lock.

    Args:
        uploads_at_once: Most uploads at a time.

    Attributes:
        threads: How many have not ended.
    """

    def __init__(self, uploads_at_once: int) -> None:
        self._uploads_at_once = uploads_at_once
        self.threads = 0
        self._workers = 0
        self._idle = 0
        self._uploading = 0
        self._appending = 0

    @property
    def in_store(self) -> int:
        """Threads that wait for the store, which may never answer."""
        return self._uploading + self._appending

    @property
    def may_upload(self) -> bool:
        """Whether one more upload may begin."""
        return self._uploading < self._uploads_at_once

    def begin(self) -> None:
        """One more thread, which is no worker."""
        self.threads += 1

    def end(self) -> None:
        """A thread ends."""
        self.threads -= 1

    def hire(self, count: int) -> None:
        """Workers begin, all idle; a negative count takes back one that did not start."""
        self.threads += count
        self._workers += count
        self._idle += count

    def send_off(self) -> bool:
        """An idle worker leaves with work. Whether one more was hired, because no other is idle."""
        self._idle -= 1
        if self._idle or self._workers > self._uploads_at_once:
            return False
        self.hire(1)
        return True

    def take_back(self) -> None:
        """A worker is idle again."""
        self._idle += 1

    def begin_upload(self) -> None:
        """The work that a worker leaves with is an upload."""
        self._uploading += 1

    def end_upload(self) -> None:
        """It has ended, and its worker is idle again."""
        self._uploading -= 1
        self.take_back()

    def begin_append(self) -> None:
        """The appender goes to the store."""
        self._appending += 1

    def end_append(self) -> None:
        """It is back."""
        self._appending -= 1
