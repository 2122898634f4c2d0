"""What workers ask the broker for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from opendata_buffer.broker.messages import whole
from opendata_buffer.broker.wire import ProtocolError

__all__ = [
    "ClaimRequest",
    "FinishRequest",
    "Responder",
    "parse_beat",
    "parse_claim",
    "parse_finish",
]

Responder: TypeAlias = Callable[[dict[str, Any]], None]
"""Takes the answer to a request, as a message's body."""

MAX_CLAIMED = 1_000
MAX_WAIT_MS = 60_000
MAX_REST_MS = 3_600_000
MAX_NAME_CHARS = 256
MAX_REASON_CHARS = 4_096


@dataclass(slots=True, eq=False)
class ClaimRequest:
    """A worker asks for batches.

    Attributes:
        number: Of the request.
        most: Batches, at most.
        until: When to answer with none, monotonic seconds.
        worker: Its name.
        timeout_ms: Without a heartbeat for so long, its batches go to somebody else.
        max_deliveries: A batch that was handed out so often goes to the quarantine instead.
        answer: Takes the answer.
        waits: Whether somebody still waits for it.
    """

    number: int
    most: int
    until: float
    worker: str
    timeout_ms: int
    max_deliveries: int
    answer: Responder
    waits: Callable[[], bool] = lambda: True


@dataclass(slots=True, eq=False)
class FinishRequest:
    """A worker is done with a batch, gives it back, or rejects it.

    Attributes:
        number: Of the request.
        how: ``done``, ``release`` or ``reject``.
        sequence: Which batch.
        token: Of the claim.
        reason: Of a rejection.
        rest_ms: Of a release: not to be handed out again before.
        answer: Takes the answer.
    """

    number: int
    how: str
    sequence: int
    token: int
    reason: str
    rest_ms: int
    answer: Responder


def parse_claim(
    body: Mapping[str, Any], now: float, answer: Responder, waits: Callable[[], bool] = lambda: True
) -> ClaimRequest:
    """A claim out of a message.

    Raises:
        ProtocolError: A field is missing or out of bounds.
    """
    match body:
        case {"worker": str(worker)} if len(worker) <= MAX_NAME_CHARS:
            return ClaimRequest(
                number=whole(body, "n"),
                most=min(max(1, whole(body, "max")), MAX_CLAIMED),
                until=now + min(whole(body, "wait_ms"), MAX_WAIT_MS) / 1000,
                worker=worker,
                timeout_ms=max(1, whole(body, "timeout_ms")),
                max_deliveries=whole(body, "max_deliveries"),
                answer=answer,
                waits=waits,
            )
    raise ProtocolError("a claim does not name its worker")


def parse_finish(body: Mapping[str, Any], now: float, answer: Responder) -> FinishRequest:
    """The end of a claim out of a message.

    Raises:
        ProtocolError: A field is missing or out of bounds.
    """
    match body:
        case {"how": "done" | "release" | "reject" as how, "reason": str(reason)}:
            return FinishRequest(
                number=whole(body, "n"),
                how=how,
                sequence=whole(body, "sequence"),
                token=whole(body, "token"),
                reason=reason[:MAX_REASON_CHARS],
                rest_ms=min(whole(body, "rest_ms"), MAX_REST_MS),
                answer=answer,
            )
    raise ProtocolError("the end of a claim does not say how it ended")


def parse_beat(body: Mapping[str, Any]) -> list[int]:
    """The tokens of a heartbeat.

    Raises:
        ProtocolError: They are none.
    """
    match body.get("tokens"):
        case [*tokens] if all(type(each) is int for each in tokens):
            return tokens
    raise ProtocolError("a heartbeat names no tokens")
