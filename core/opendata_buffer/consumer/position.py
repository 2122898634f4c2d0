"""Where a reader is in a queue, as a value to be saved beside what it wrote."""

from __future__ import annotations

import re
from dataclasses import dataclass

from opendata_buffer.errors import InvalidInput

__all__ = ["Position"]

_FORM = re.compile(r"(?:([^\s:]+):)?([0-9]{1,20})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Position:
    """The last batch of one queue that is surely processed.

    A sequence alone says nothing about a queue that was deleted and made again at the same
    place: its first batches would pass for read (failure F4). So save this, in the transaction
    that writes the records, and start the next consumer with it. It pickles, and
    ``Position.parse(str(position)) == position``::

        01JD5T4R3KXBMZ7QV9N2WG8Y00:41

    Attributes:
        queue_id: Of the queue; empty for one whose owner marker has none.
        sequence: Of the batch.
    """

    queue_id: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.queue_id}:{self.sequence}" if self.queue_id else str(self.sequence)

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read what ``str`` printed. A bare sequence is a position in whatever queue is there.

        Raises:
            InvalidInput: It is no position.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise InvalidInput(
                f"position is {text!r}: use '<queue id>:<sequence>', as Consumer.position prints it"
            )
        return cls(found[1] or "", int(found[2]))

    @classmethod
    def of(cls, given: Position | int | str) -> Position:
        """A position from any of its forms; an int is a sequence in whatever queue is there.

        Raises:
            InvalidInput: It is none.
        """
        if isinstance(given, Position):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise InvalidInput(
                f"last_acked_sequence is {given!r}: use a sequence, a Position, or None to start "
                "at the oldest queued batch"
            )
        return cls("", given)
