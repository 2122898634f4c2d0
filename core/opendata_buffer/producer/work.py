"""What a producer's workers do next, and the line of what is to be uploaded. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from opendata_buffer.commit.upload import Stage, Upload
from opendata_buffer.producer.batch import Batch

__all__ = ["UploadLine", "Work"]


@dataclass(slots=True, eq=False)
class Work:
    """What a worker does next: upload, or tell what was settled.

    Attributes:
        upload: To be stored; None when there is something to tell.
        batch: What the upload is encoded from; None when it has its bytes from before.
        settled: Uploads whose callers are to be told.
        hire: Whether to start one more worker first: no other one is idle.
    """

    upload: Upload | None = None
    batch: Batch | None = None
    settled: Sequence[Upload] = ()
    hire: bool = False


class UploadLine:
    """Uploads that no worker has taken yet, in the order they are to be stored."""

    def __init__(self) -> None:
        self._line: deque[tuple[Upload, Batch | None]] = deque()

    def __len__(self) -> int:
        """How many."""
        return len(self._line)

    def enter(self, upload: Upload, batch: Batch) -> None:
        """One that was not stored yet, behind all others."""
        self._line.append((upload, batch))

    def enter_again(self, uploads: Sequence[Upload]) -> None:
        """Those that grew too old, in order and before all others.

        At the end of a long line they would grow too old again (failure F5).
        """
        self._line.extendleft((upload, None) for upload in reversed(uploads))

    def drop_settled(self) -> None:
        """What was given up must not wait here, out of the budget, for an upload to end."""
        self._line = deque(each for each in self._line if each[0].stage is not Stage.SETTLED)

    def take(self) -> Work:
        """The first one; there must be one."""
        return Work(*self._line.popleft())
