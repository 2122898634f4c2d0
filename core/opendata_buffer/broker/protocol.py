"""The messages of clients and brokers after the handshake. Pure.

=========  =====================================================================================
client     ``written``: the object that shows that it may write is there; then ``append``: entries
           to append in one piece; ``renew``: it waits on; ``pause``: it will write the manifest
           itself; ``claim``, ``finish`` and ``beat`` of a worker; at any time ``ping``; ``stats``
broker     ``granted``: it may write; ``done``: appended at a sequence; ``refused``: surely not
           appended, ask again; ``lost``: storage gave no answer, search for it; ``failed``: what
           the queue raised; ``given``: a pause begins; ``claimed``, ``finished`` and ``beaten``
           to a worker; ``pong``; ``stats``
=========  =====================================================================================

Messages are input: what reads them raises ProtocolError where a field is missing, of another type
or out of bounds.

**Until when a broker may append.** A client that gets no answer asks another broker, which appends
what has not landed. The first one, if it was only slow, must not append it after that. So each
message of a broker carries its clock, and a request carries the last one that its client received,
and for how long it holds: the broker does not begin a write for a request that is older than that
by its own clock. The client waits as long on its own clock before it asks another broker. While it
waits and receives messages, it renews the request by the newest clock, and counts from then itself.
No two clocks are ever compared, they only have to run equally fast.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from opendata_buffer import errors
from opendata_buffer.broker.secure_channel import ProtocolError
from opendata_buffer.config import check_reader_name
from opendata_buffer.errors import InvalidInput, OpenDataBufferError
from opendata_buffer.formats.batch import is_confined
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.runtime import Moment

VALID_MS = 2_000
"""Seconds that a request holds at most, and a client waits before it asks another broker."""

MAX_ENTRIES = 10_000
"""Entries of one append; a client appends by itself what has more."""

MAX_OPEN_REQUESTS = 64
"""Unanswered requests of one connection; a client that sends more is disconnected."""

MAX_LOCATION_CHARS = 2_048

Body: TypeAlias = dict[str, Any]
"""Of a message: a JSON object."""

Responder: TypeAlias = Callable[[Body], None]
"""Takes the answer to a request; called once, by any thread."""

MAX_CLAIMED = 1_000

MAX_WAIT_MS = 60_000

MAX_REST_MS = 3_600_000

MAX_NAME_CHARS = 256

MAX_REASON_CHARS = 4_096


@dataclass(slots=True, eq=False)
class Request:
    """What a client asks for, by its number on the client's connection."""

    number: int
    answer: Responder

    def respond(self, op: str, **body: Any) -> None:
        """Answer it."""
        self.answer({"op": op, "n": self.number, **body})


@dataclass(slots=True, eq=False)
class AppendRequest(Request):
    """Entries to append, contiguous and in order, all or none.

    Attributes:
        heard: The broker's own clock, as the client last received it. Renewed while it waits.
        valid_ms: For how long after that a write may begin.
        since: An earlier attempt may have landed at this sequence or later; None for no attempt.
    """

    entries: tuple[NewEntry, ...]
    heard: Moment
    valid_ms: int
    since: int | None = None

    def is_late(self, now: Moment) -> bool:
        """Whether no write of it may begin any more."""
        # A clock that ran backwards gives no age: the client sends the request again.
        return not self.heard.precedes(now) or self.heard.age_ms(now) > self.valid_ms


@dataclass(slots=True, eq=False)
class PauseRequest(Request):
    """A client asks for a pause, to write the manifest itself.

    Attributes:
        writes: For how many of the broker's reads and writes: one more after each lost race of
            the client, which may be slower than the broker.
    """

    writes: int


def append_body(
    number: int, entries: Sequence[NewEntry], clock: Any, valid_ms: int, since: int | None
) -> Body:
    """The message of an append; ``clock`` is what the broker's last message had."""
    return {
        "op": "append",
        "n": number,
        "clock": clock,
        "valid_ms": valid_ms,
        "since": since,
        "entries": [[entry.location, metadata_body(entry.metadata)] for entry in entries],
    }


def metadata_body(metadata: Sequence[Metadata]) -> list[list[Any]]:
    """Ranges of metadata as messages carry them."""
    return [
        [each.start_index, each.ingestion_time_ms, b64encode(each.payload).decode()]
        for each in metadata
    ]


def parse_append(
    body: Mapping[str, Any], data_path_prefix: str, answer: Responder
) -> AppendRequest:
    """An append out of a message."""
    number, valid_ms = whole(body, "n"), whole(body, "valid_ms")
    since = None if body.get("since") is None else whole(body, "since")
    rows = body.get("entries")
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_ENTRIES:
        raise ProtocolError(f"an append has no list of 1 to {MAX_ENTRIES} entries")
    return AppendRequest(
        number,
        answer,
        tuple(_entry(row, data_path_prefix) for row in rows),
        moment_of(body.get("clock")),
        min(valid_ms, VALID_MS),
        since,
    )


def _entry(row: Any, data_path_prefix: str) -> NewEntry:
    match row:
        case [str(location), [*ranges]] if len(location) <= MAX_LOCATION_CHARS and is_confined(
            location, data_path_prefix
        ):
            return NewEntry(location, parse_metadata(ranges))
    raise ProtocolError(
        f"an entry is no location below {data_path_prefix!r} with its metadata: {str(row)[:200]}"
    )


def parse_metadata(rows: Sequence[Any]) -> tuple[Metadata, ...]:
    """Ranges of metadata out of a message."""
    found = []
    for row in rows:
        match row:
            case [int(start), int(time_ms), str(payload)] if (
                0 <= start < 1 << 32 and -(1 << 63) <= time_ms < 1 << 63
            ):
                with suppress(ValueError):
                    found.append(Metadata(start, time_ms, b64decode(payload, validate=True)))
                    continue
        raise ProtocolError("a range of metadata is no index, time and payload")
    return tuple(found)


def parse_renewal(body: Mapping[str, Any]) -> list[int]:
    """The numbers of the requests to renew."""
    numbers = body.get("n")
    if isinstance(numbers, list) and len(numbers) <= MAX_OPEN_REQUESTS:
        return [each for each in numbers if isinstance(each, int)]
    raise ProtocolError(f"a renewal has no list of up to {MAX_OPEN_REQUESTS} requests")


def clock_body(now: Moment) -> list[float]:
    """A broker's clock as its messages carry it; only the broker reads it."""
    return [now.monotonic, now.wall_ms]


def moment_of(clock: Any) -> Moment:
    """A broker's clock as it comes back to it."""
    match clock:
        # Within bounds: an age is computed from it in the middle of a write for all clients.
        case [int() | float() as monotonic, int(wall_ms)] if (
            -(1 << 63) <= monotonic < 1 << 63 and -(1 << 63) <= wall_ms < 1 << 63
        ):
            return Moment(wall_ms, float(monotonic))
    raise ProtocolError("a message carries no clock of the broker's")


def error_body(error: BaseException) -> Body:
    """An error as a message carries it: its name, its text, and the values it names."""
    name = type(error).__name__
    if not isinstance(error, OpenDataBufferError) or name not in errors.__all__:
        return {"name": "OpenDataBufferError", "text": f"{name}: {error}", "values": {}}
    values = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in vars(error).items()
        if not key.startswith("_") and _plain(value)
    }
    return {"name": name, "text": str(error), "values": values}


def error_of(body: Any) -> OpenDataBufferError:
    """The error that a broker raised, for the caller of the client."""
    match body:
        case {"name": str(name), "text": str(text), "values": dict(values)} if (
            name in errors.__all__
        ):
            kind: type[OpenDataBufferError] = getattr(errors, name)
            error = kind.__new__(kind)
            error.args = (text,)
            for key, value in values.items():
                error.__dict__[key] = tuple(value) if isinstance(value, list) else value
            return error
    raise ProtocolError("a broker reports an error in an unknown form")


def _plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(each, str | int | float) for each in value)
    return value is None or isinstance(value, str | int | float)


def whole(body: Mapping[str, Any], name: str) -> int:
    """A field that is a whole number and not negative."""
    value = body.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    raise ProtocolError(f"a message has no whole number {name!r}")


@dataclass(slots=True, eq=False)
class ClaimRequest(Request):
    """A worker asks for batches.

    Attributes:
        most: Batches, at most.
        until: When to answer with none, monotonic seconds.
        timeout_ms: Without a heartbeat for so long, its batches go to another worker.
        max_deliveries: A batch that was handed out so often goes to the quarantine instead.
        waits: Whether the worker still waits for the answer.
    """

    most: int
    until: float
    worker: str
    timeout_ms: int
    max_deliveries: int
    waits: Callable[[], bool] = lambda: True


@dataclass(slots=True, eq=False)
class FinishRequest(Request):
    """A worker has done a batch, releases it, or rejects it.

    Attributes:
        how: ``done``, ``release`` or ``reject``.
        token: Of the claim.
        reason: Of a rejection.
        rest_ms: Of a release: not to be handed out again before.
    """

    how: str
    sequence: int
    token: int
    reason: str
    rest_ms: int


def parse_claim(
    body: Mapping[str, Any], now: float, answer: Responder, waits: Callable[[], bool] = lambda: True
) -> ClaimRequest:
    """A claim out of a message."""
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


def parse_finish(body: Mapping[str, Any], answer: Responder) -> FinishRequest:
    """The end of a claim out of a message."""
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


def parse_reader(body: Mapping[str, Any]) -> str:
    """The reader whose batches a worker asks for; empty where the queue is no log."""
    reader = body.get("reader", "")
    try:
        if reader != "":
            check_reader_name(reader)
    except InvalidInput as error:
        raise ProtocolError(str(error)) from None
    return str(reader)


def parse_beat(body: Mapping[str, Any]) -> list[int]:
    """The tokens of a heartbeat."""
    match body.get("tokens"):
        case [*tokens] if all(type(each) is int for each in tokens):
            return tokens
    raise ProtocolError("a heartbeat names no tokens")
