"""What was asked on a connection to a broker and is not answered yet, and what answers mean. Pure.

No lock, no thread and no socket: whoever uses it holds a lock, and says what time it is. Times are
monotonic seconds of this process; the broker's own clock goes back to it as it came.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from opendata_buffer.broker.messages import MAX_OPEN_REQUESTS, VALID_MS, error_of
from opendata_buffer.broker.wire import ProtocolError
from opendata_buffer.errors import OpenDataBufferError

__all__ = ["Answer", "Appended", "Lost", "OpenCall", "OpenCalls", "Refused", "Reply"]

RENEW_S = 0.5
"""An append whose broker was last heard so long before the last word of it is renewed."""


@dataclass(frozen=True, slots=True)
class Appended:
    """It is in the queue."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Surely not appended, nor will be: ``expired``, ``moved``, ``busy``, ``unsent``,
    ``late`` for its own deadline, or ``large``: no broker takes it."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer: it may be in the queue.

    Attributes:
        since: If it is, then at this sequence or later.
        safe_at: From when on this broker begins no write of it, monotonic seconds.
    """

    since: int
    safe_at: float


Answer = Appended | Refused | Lost

Reply = dict[str, Any]
"""The body of an answer that is not about an append."""

_ANSWERS = {"done", "refused", "lost", "failed", "claimed", "finished", "beaten", "given"}


@dataclass(slots=True, eq=False)
class OpenCall:
    """One request that waits for its answer.

    Attributes:
        lost: Its answer where none will come.
        heard_at: When the broker was heard whose clock the request holds by.
        valid_s: For how long from then on the broker may begin to write it.
        begin_by: No write of it begins after this.
        posted: Nobody waits for its answer.
        answer: Once there is one; an error is raised.
    """

    lost: Lost
    heard_at: float = 0.0
    valid_s: float = 0.0
    begin_by: float = float("-inf")
    posted: bool = False
    answer: Answer | Reply | OpenDataBufferError | None = None


class OpenCalls:
    """The open requests of one connection, by their numbers.

    Attributes:
        clock: The broker's, as it was last heard; every append carries it.
        heard_at: When that was.
    """

    def __init__(self) -> None:
        self.clock: Any = None
        self.heard_at = 0.0
        self._calls: dict[int, OpenCall] = {}
        self._number = 0
        self._next = 0  # sequence of the queue's next entry, as far as was heard

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(self._calls.values())

    @property
    def is_full(self) -> bool:
        """Whether a broker would end the connection of who asks for more at once."""
        return len(self._calls) >= MAX_OPEN_REQUESTS

    def begin(self, *, posted: bool = False) -> tuple[int, OpenCall]:
        """A request that is not an append: its number, and where its answer will be."""
        return self._open(OpenCall(Lost(self._next, self.heard_at), posted=posted))

    def begin_append(self, since: int | None, begin_by: float) -> tuple[int, OpenCall]:
        """An append: its number, and where its answer will be.

        Args:
            since: Where an earlier attempt may have landed, or None when there was none.
            begin_by: No write of it begins after this.
        """
        valid_s = min(VALID_MS / 1000, begin_by - self.heard_at)
        lost = Lost(self._next if since is None else since, self.heard_at + valid_s)
        return self._open(OpenCall(lost, self.heard_at, valid_s, begin_by))

    def end(self, number: int) -> None:
        """Whoever waited has the answer, or waits no longer."""
        del self._calls[number]

    def hear(self, body: Reply, now: float) -> bool:
        """Take what the broker says.

        Returns:
            Whether somebody may go on now.

        Raises:
            ProtocolError: A broker says no such thing.
        """
        # The clock first: an answer that is waited for lets the next append begin at once.
        self.clock, self.heard_at = body.get("clock"), now
        if isinstance(following := body.get("next"), int):
            self._next = max(self._next, following)
        call = self._calls.get(body["n"]) if isinstance(body.get("n"), int) else None
        match body:
            case {"op": "done", "sequence": int(sequence)} if call is not None:
                call.answer = Appended(sequence)
            case {"op": "refused", "why": str(why)} if call is not None:
                call.answer = Refused(why)
            case {"op": "lost", "since": int(since)} if call is not None:
                # The broker has begun its last write of it; what that one did shows later.
                call.answer = Lost(since, now)
            case {"op": "failed", "error": error} if call is not None:
                call.answer = error_of(error)
            case {"op": "claimed" | "finished" | "beaten" | "given"} if call is not None:
                call.answer = body
            case {"op": "stats"}:
                return True
            case {"op": "pong"}:
                return False
            case {"op": str(op)} if call is None and op in _ANSWERS:
                return False  # Of something that was told, and not asked.
            case _:
                raise ProtocolError(f"the broker says {str(body.get('op'))[:50]!r}: unknown")
        if call is not None and call.posted:
            self.end(body["n"])
        return True

    def renew(self) -> list[int]:
        """Appends that wait for a slow write hold on, by the clock that was just heard.

        Otherwise what came while a write took longer than a request holds would be refused, be
        asked for again as the next write begins, and never have its turn.

        Returns:
            The numbers of those that the broker is to be told of.
        """
        renewed = []
        for number, call in self._calls.items():
            is_old = self.heard_at - call.heard_at >= RENEW_S
            if call.answer is None and is_old and self.heard_at + call.valid_s <= call.begin_by:
                # First here: nobody else is asked while the broker may still write it.
                call.heard_at = self.heard_at
                call.lost = Lost(call.lost.since, self.heard_at + call.valid_s)
                renewed.append(number)
        return renewed

    def lose(self) -> None:
        """The connection has ended: no answer comes any more."""
        for call in self._calls.values():
            if call.answer is None:
                call.answer = call.lost

    def _open(self, call: OpenCall) -> tuple[int, OpenCall]:
        self._number += 1
        self._calls[self._number] = call
        return self._number, call
