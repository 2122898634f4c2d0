"""How much a producer may hold at a time, and how much it holds. Pure."""

from __future__ import annotations

from typing import Protocol

from opendata_buffer.commit.upload import Upload

__all__ = ["Budget"]


class Waiting(Protocol):
    """What is not uploaded yet: a :class:`~.batcher.Batcher`."""

    @property
    def held(self) -> int: ...
    @property
    def calls(self) -> int: ...


class Budget:
    """The buffer of a producer, in bytes and in calls (failure F33).

    Args:
        waiting: Knows what its batches hold; the rest is counted here.
        most_bytes: Most bytes at a time.
        most_calls: Most calls at a time; None: any number.
    """

    def __init__(self, waiting: Waiting, most_bytes: int, most_calls: int | None) -> None:
        self._waiting = waiting
        self._most_bytes = most_bytes
        self._most_calls = most_calls
        self._held = 0
        self._calls = 0

    @property
    def held(self) -> int:
        """Bytes in use."""
        return self._held + self._waiting.held

    @property
    def calls(self) -> int:
        """Calls that are not settled."""
        return self._calls + self._waiting.calls

    @property
    def room_for_run(self) -> int:
        """Bytes that a run may take without asking; where calls are counted each has to ask."""
        return 0 if self._most_calls is not None else self._most_bytes - self.held

    def has_room(self, size: int) -> bool:
        """Whether one more call with so many bytes may come in."""
        held = self.held
        # A call larger than the whole budget is let in alone, or it would wait for ever.
        if held and held + size > self._most_bytes:
            return False
        return self._most_calls is None or self.calls < self._most_calls

    def take(self, upload: Upload) -> None:
        """A batch is waiting no more, and goes on as this upload."""
        self._held += upload.held
        self._calls += upload.calls

    def give_back(self, upload: Upload) -> None:
        """Its callers were told."""
        self._held -= upload.held
        self._calls -= upload.calls
