"""Encode and check the messages between clients and brokers, and the handshake before them.

Clients of a broker send it entries to append, ask it for pauses, and claim batches. The broker has
to know that a client may read and write the queue, and the client has to know that it talks to the
announced broker. Both trust only the store: a process that may read and write the queue's objects
may use the broker. A connection begins with a handshake that shows this, inside TLS::

    broker  hello     {"v": 3, "term": 7, "name": N, "nonce": A}
    client  prove     {"v": 3, "secret": S}
    then, both ways, messages

**The broker is authentic.** TLS encrypts and authenticates (:mod:`opendata_buffer.broker.tls`). The
discovery record announces the fingerprint of the broker's certificate, and a client sends nothing
to a process that shows another one. So no one on the way can read, change, repeat, reorder or leave
out messages. This module has no network, and no cryptography except one hash.

**The client may read.** The secret S is in the discovery record, so a client that sends it can read
the queue.

**The client may write.** The client puts the object ``<manifest>._clients/N``, with a hash of the
nonce A, the name N and the certificate that it has checked. The broker reads and deletes it
(decision 0032). Because of the nonce, the bytes are useless on any other connection. Because of the
certificate, they are also useless to a process that announces itself and forwards the messages of
the real broker.

Input that does not verify raises ProtocolError, and its connection is closed with nothing done.

**Messages** are JSON objects. They are untrusted input: the functions that read them raise
ProtocolError if a field is missing, has another type, or is out of bounds.

=========  =====================================================================================
client     ``written``: the object that shows that it may write is there; then ``append``: entries
           to append in one piece; ``renew``: it is still waiting; ``pause``: it will write the
           manifest itself; ``claim``, ``finish`` and ``beat`` of a worker; at any time ``ping``
           and ``stats``
broker     ``granted``: it may write; ``done``: appended at a sequence; ``refused``: certainly not
           appended, ask again; ``lost``: storage gave no answer, search for it; ``failed``: the
           error that the queue raised; ``given``: a pause begins; ``claimed``, ``finished`` and
           ``beaten`` to a worker; ``pong``; ``stats``
=========  =====================================================================================

**How long a broker may append** (decision 0015). A client that gets no answer asks another broker,
and the first one must not write the entries later. So each message of a broker carries the broker's
clock, and each request carries the last clock that its client received. The broker begins no write
for a request that is too old by its own clock. The client waits as long by its clock before it asks
another broker. While it waits and still receives messages, it renews the request. Two clocks are
never compared. For example, with 2 seconds::

    broker's clock    100.0 sends a message         102.1 the request of clock 100.0 is refused
    client's clock      7.0 receives it               9.0 asks another broker
"""

from __future__ import annotations

import hmac
import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from opendata_buffer import errors
from opendata_buffer.config import check_reader_name
from opendata_buffer.formats.batch import MAX_KEY_BYTES, is_confined, is_ulid
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.hints import Action, Hint, Part, QueueName, Setting, Surface, render
from opendata_buffer.runtime import Moment, Runtime, deadline
from opendata_buffer.stores.base import Store, read_bytes

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest message in either direction, in bytes. A client appends larger requests directly."""

MAX_HANDSHAKE_BYTES = 1_024

NONCE_BYTES = 32

_VERSION = 3

MAX_UNDER_WAY = 256
"""Most objects that are read at the same time: a store that hangs must not take all threads."""

CHECK_S = 3.0
"""Seconds for reading one object; its client does not wait longer."""

_SUFFIX_BYTES = len("._clients/") + 26


class ProtocolError(errors.OpenDataBufferError):
    """The other side is not a broker or client of this queue, or speaks another version."""


class _End:
    """The part that both ends of a connection share: the secret, the term, and the messages.

    Args:
        secret: The secret in the discovery record.
        term: The term in the discovery record.
        certificate: Fingerprint of the broker's certificate on this connection, as the client has
            checked it; empty for a connection within one process.
    """

    def __init__(self, secret: bytes, term: int, certificate: str) -> None:
        self._secret = secret
        self._term = term
        self._certificate = certificate
        self._nonce = b""
        self.is_ready = False
        """Whether the handshake is over, so that messages may follow."""
        self.proof_name = ""
        """Name of the object that shows that the client may write: a ULID."""

    def write_proof(self) -> bytes:
        """Return the content of the object ``proof_name``, in hexadecimal digits."""
        parts = (b"may write", self.proof_name.encode(), self._certificate.encode())
        return hmac.digest(self._nonce, b" ".join(parts), "sha256").hex().encode()

    def encode(self, body: Mapping[str, Any]) -> bytes:
        """Write a message to send.

        Args:
            body: The body of the message.

        Returns:
            The bytes of the message.

        Raises:
            ProtocolError: It has more bytes than the other side reads.
        """
        data = json.dumps(body, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}: send less "
                "metadata, or append without a broker"
            )
        return data

    def decode(self, message: bytes) -> dict[str, Any]:
        """Read a message that was received.

        Args:
            message: The bytes of the message.

        Returns:
            The body of the message.

        Raises:
            ProtocolError: It is not a JSON object, or came before the handshake was over.
        """
        if not self.is_ready:
            raise ProtocolError("a message came before the handshake was over")
        return _object(message)


class BrokerEnd(_End):
    """The broker's end of one connection.

    Args:
        secret: The secret in the discovery record.
        term: The term in the discovery record.
        certificate: Fingerprint of the broker's certificate.
        nonce: Random bytes, new for each connection.
        proof_name: A new ULID.
    """

    def __init__(
        self, secret: bytes, term: int, certificate: str, nonce: bytes, proof_name: str
    ) -> None:
        super().__init__(secret, term, certificate)
        self._nonce = nonce
        self.proof_name = proof_name

    def hello(self) -> bytes:
        """Return the first message, which the broker sends."""
        hello = {
            "v": _VERSION,
            "term": self._term,
            "name": self.proof_name,
            "nonce": self._nonce.hex(),
        }
        return json.dumps(hello).encode()

    def admit(self, prove: bytes) -> None:
        """Check the client's first message, which shows that it knows the secret.

        Args:
            prove: The client's first message.

        Raises:
            ProtocolError: It does not know the secret, or speaks another version.
        """
        shown = _bytes(_handshake(prove), "secret")
        if not hmac.compare_digest(shown, self._secret):
            raise ProtocolError("a client does not know this term's secret")
        self.is_ready = True


class ClientEnd(_End):
    """The client's end of one connection."""

    def prove(self, hello: bytes) -> bytes:
        """Answer the broker's first message. Other messages can be sent after the answer.

        Args:
            hello: The broker's first message.

        Returns:
            The bytes of the answer.

        Raises:
            ProtocolError: The broker speaks another version, serves another term, or names no
                object that a client would write.
        """
        message = _handshake(hello)
        if message.get("term") != self._term:
            raise ProtocolError(
                f"the broker serves in term {message.get('term')!r}, and term {self._term} is "
                "announced"
            )
        nonce, name = _bytes(message, "nonce"), message.get("name")
        if len(nonce) != NONCE_BYTES:
            raise ProtocolError(f"the broker's nonce is not {NONCE_BYTES} bytes")
        if not isinstance(name, str) or not is_ulid(name):
            raise ProtocolError("the broker names no object to write")
        self._nonce = nonce
        self.proof_name = name
        self.is_ready = True
        return json.dumps({"v": _VERSION, "secret": self._secret.hex()}).encode()


def _handshake(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise ProtocolError(f"a handshake has {len(data)} bytes: more than {MAX_HANDSHAKE_BYTES}")
    message = _object(data)
    if message.get("v") != _VERSION:
        raise other_version(message.get("v"))
    return message


def other_version(version: object) -> ProtocolError:
    """Return the error for a client or a broker of another release."""
    return ProtocolError(
        f"the other side speaks version {version!r} of the broker's protocol, and "
        f"this library version {_VERSION}: run one version of opendata-buffer everywhere"
    )


def _object(data: bytes) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        message = json.loads(data)
        if isinstance(message, dict):
            return message
    raise ProtocolError("a message is not a JSON object")


def _bytes(message: Mapping[str, Any], name: str) -> bytes:
    value = message.get(name)
    try:
        return bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return b""


def write_proof_folder(manifest_path: str) -> str:
    """Return the folder where clients put their objects.

    It is next to the manifest, because that is where clients have the right to write.
    """
    stem = manifest_path.encode()[: MAX_KEY_BYTES - _SUFFIX_BYTES].decode(errors="ignore")
    return f"{stem}._clients/"


class WriteProofs:
    """Checks the objects that a broker's clients put next to the manifest. Thread-safe."""

    def __init__(self, store: Store, manifest_path: str, runtime: Runtime) -> None:
        self._store = store
        self._folder = write_proof_folder(manifest_path)
        self._runtime = runtime
        self._lock = runtime.condition()
        self._under_way = 0

    def clear(self) -> None:
        """Delete the objects that killed clients and brokers left, without raising an error.

        Each has a few bytes. One that cannot be deleted stays.
        """
        try:
            if left := self._store.list(self._folder, limit=1_000).objects:
                self._store.delete_many([each.key for each in left])
        except errors.StorageError as error:
            log.info("what is left in %s stays there: %s", self._folder, error)

    def check(self, name: str, expected: bytes, answer: Callable[[Exception | None], None]) -> None:
        """Read and delete an object in a thread, and call ``answer`` once with the result.

        Args:
            name: Name of the object.
            expected: Its content if the client may write.
            answer: Gets None if the object holds the expected bytes, and the error otherwise.
        """
        key = self._folder + name
        with self._lock:
            self._under_way += 1
            is_busy = self._under_way > MAX_UNDER_WAY

        def run() -> None:
            error: Exception | None = None
            try:
                with deadline(self._runtime, CHECK_S):
                    found = read_bytes(self._store, key, 2 * len(expected))
                if not hmac.compare_digest(found, expected):
                    error = errors.PermanentStorageError(
                        f"{key!r} was not written for this connection"
                    )
            except Exception as failed:  # Even for a bug: the client waits for an answer.
                error = failed
            with self._lock:
                self._under_way -= 1
            answer(error)
            with suppress(errors.StorageError):  # The next broker deletes it.
                self._store.delete_many([key])

        try:
            if is_busy:
                raise RuntimeError("the broker checks too many clients at once")
            self._runtime.spawn(run, "opendata-buffer-write-proof")
        except RuntimeError as failed:  # Also raised when no thread is left.
            with self._lock:
                self._under_way -= 1
            answer(errors.TransientStorageError(f"{failed}. Try again."))


VALID_MS = 2_000
"""Most milliseconds for which a request is valid, and a client waits before it asks another broker.
"""

MAX_ENTRIES = 10_000
"""Most entries of one append; a client appends larger ones directly."""

MAX_OPEN_REQUESTS = 64
"""Most unanswered requests of one connection; a client that sends more is disconnected."""

MAX_LOCATION_CHARS = 2_048

Body: TypeAlias = dict[str, Any]
"""The body of a message: a JSON object."""

Responder: TypeAlias = Callable[[Body], None]
"""A function that takes the answer to a request; called once, by any thread."""

MAX_CLAIMED = 1_000

MAX_WAIT_MS = 60_000

MAX_REST_MS = 3_600_000

MAX_NAME_CHARS = 256

MAX_REASON_CHARS = 4_096


@dataclass(slots=True, eq=False)
class Request:
    """A request of a client, with its number on the client's connection."""

    number: int
    answer: Responder

    def respond(self, op: str, **body: Any) -> None:
        """Answer the request."""
        self.answer({"op": op, "n": self.number, **body})


@dataclass(slots=True, eq=False)
class AppendRequest(Request):
    """A request to append entries, contiguous and in order, all or none.

    Attributes:
        entries: The entries.
        heard: The broker's own clock, as the client last received it.
        valid_ms: Milliseconds after ``heard`` in which a write may begin.
        since: First sequence at which an earlier attempt may have landed; None without one.
    """

    entries: tuple[NewEntry, ...]
    heard: Moment
    valid_ms: int
    since: int | None = None

    def is_late(self, now: Moment) -> bool:
        """Return whether no write of the request may begin any more."""
        # If the clock ran backwards, the age is not known: the client sends the request again.
        return not self.heard.precedes(now) or self.heard.age_ms(now) > self.valid_ms


@dataclass(slots=True, eq=False)
class PauseRequest(Request):
    """A request for a pause, so that the client can write the manifest itself.

    Attributes:
        writes: How many of its reads and writes the broker should skip. A client asks for more
            after each lost race, because it may be slower than the broker.
    """

    writes: int


def append_body(
    number: int, entries: Sequence[NewEntry], clock: Any, valid_ms: int, since: int | None
) -> Body:
    """Write the message of an append.

    Args:
        number: Number of the request on this connection.
        entries: The entries.
        clock: The clock in the broker's last message.
        valid_ms: Milliseconds for which the request is valid.
        since: First sequence at which an earlier attempt may have landed, or None.

    Returns:
        The body of the message.
    """
    return {
        "op": "append",
        "n": number,
        "clock": clock,
        "valid_ms": valid_ms,
        "since": since,
        "entries": [[entry.location, metadata_body(entry.metadata)] for entry in entries],
    }


def metadata_body(metadata: Sequence[Metadata]) -> list[list[Any]]:
    """Return ranges of metadata as messages carry them."""
    return [
        [each.start_index, each.ingestion_time_ms, b64encode(each.payload).decode()]
        for each in metadata
    ]


def parse_append(
    body: Mapping[str, Any], data_path_prefix: str, answer: Responder
) -> AppendRequest:
    """Read the append in a message.

    Args:
        body: The message.
        data_path_prefix: The prefix that all locations must be below.
        answer: Called with the answer.

    Returns:
        The request.

    Raises:
        ProtocolError: The message is not valid.
    """
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
    """Read the ranges of metadata in a message.

    Args:
        rows: The ranges, as JSON has them.

    Returns:
        The ranges, in their order.

    Raises:
        ProtocolError: A range is not valid.
    """
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
    """Read the numbers of the requests to renew.

    Args:
        body: The message.

    Returns:
        The numbers.

    Raises:
        ProtocolError: The list is missing or too long.
    """
    numbers = body.get("n")
    if isinstance(numbers, list) and len(numbers) <= MAX_OPEN_REQUESTS:
        return [each for each in numbers if isinstance(each, int)]
    raise ProtocolError(f"a renewal has no list of up to {MAX_OPEN_REQUESTS} requests")


def clock_body(now: Moment) -> list[float]:
    """Return a broker's clock as its messages carry it; only the broker reads it."""
    return [now.monotonic, now.wall_ms]


def moment_of(clock: Any) -> Moment:
    """Read a broker's clock that a client sent back.

    Args:
        clock: The clock, as JSON has it.

    Returns:
        The time.

    Raises:
        ProtocolError: The message has no clock, or one out of bounds.
    """
    match clock:
        # Check the bounds here: the age is computed in the middle of a write for all clients, which
        # must not fail.
        case [int() | float() as monotonic, int(wall_ms)] if (
            -(1 << 63) <= monotonic < 1 << 63 and -(1 << 63) <= wall_ms < 1 << 63
        ):
            return Moment(wall_ms, float(monotonic))
    raise ProtocolError("a message carries no clock of the broker's")


def error_body(error: BaseException) -> Body:
    """Return an error as a message carries it: its name, text and values, and its text in parts."""
    name = type(error).__name__
    if not isinstance(error, errors.OpenDataBufferError) or name not in errors.__all__:
        return {"name": "OpenDataBufferError", "text": f"{name}: {error}", "values": {}}
    values = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in vars(error).items()
        if not key.startswith("_") and _plain(value)
    }
    parts = [_part_body(part) for part in error.args]
    return {"name": name, "text": str(error), "values": values, "parts": parts}


def error_of(body: Any) -> errors.OpenDataBufferError:
    """Read an error that a broker raised.

    Args:
        body: The error, as JSON has it.

    Returns:
        The error, to be raised at the client.

    Raises:
        ProtocolError: The message has another form.
    """
    match body:
        case {"name": str(name), "text": str(text), "values": dict(values)} if (
            name in errors.__all__
        ):
            kind: type[errors.OpenDataBufferError] = getattr(errors, name)
            error = kind.__new__(kind)
            error.args = _parts_of(body.get("parts")) or (text,)
            for key, value in values.items():
                error.__dict__[key] = tuple(value) if isinstance(value, list) else value
            return error
    raise ProtocolError("a broker reports an error in an unknown form")


def _part_body(part: object) -> str | Body:
    """Return a part of an error's text as a message carries it."""
    if isinstance(part, Setting):
        return {"setting": part.name}
    if isinstance(part, Hint):
        values = asdict(part)
        del values["action"]
        return {"hint": part.action.name, "values": values}
    return str(part)


def _parts_of(body: Any) -> tuple[Part, ...]:
    """Read the parts of an error's text; none if one of them is not known to this release."""
    try:
        parts = tuple(map(_part_of, body))
        for surface in Surface:
            render(parts, surface)  # fails if a value has another type than the texts expect
    except (TypeError, ValueError, LookupError, AttributeError):
        return ()
    return parts


def _part_of(body: Any) -> Part:
    match body:
        case str(text):
            return text
        case {"setting": str(name)}:
            return Setting(name)
        case {"hint": str(name), "values": {"queue": queue, "readers": readers, **values}}:
            if queue is not None:
                options = tuple((setting, value) for setting, value in queue["options"])
                queue = QueueName(queue["store"], queue["manifest_path"], options)
            others: dict[str, Any] = {str(field): value for field, value in values.items()}
            return Hint(Action[name], queue, readers=tuple(readers), **others)
    raise ValueError("a part of an error has an unknown form")


def _plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(each, str | int | float) for each in value)
    return value is None or isinstance(value, str | int | float)


def whole(body: Mapping[str, Any], name: str) -> int:
    """Read a field that is a whole number and not negative.

    Args:
        body: The message.
        name: The field.

    Returns:
        The number, 0 to 2^63 - 1.

    Raises:
        ProtocolError: It is something else.
    """
    value = body.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    raise ProtocolError(f"a message has no whole number {name!r}")


@dataclass(slots=True, eq=False)
class ClaimRequest(Request):
    """A worker's request for batches.

    Attributes:
        most: Most batches to assign.
        until: When to answer without batches, monotonic seconds.
        worker: Name of the worker.
        timeout_ms: Milliseconds without a heartbeat after which its batches go to another worker.
        max_deliveries: A batch that was handed out this often goes to the quarantine; 0 for no
            limit.
        waits: Returns whether the worker still waits.
    """

    most: int
    until: float
    worker: str
    timeout_ms: int
    max_deliveries: int
    waits: Callable[[], bool] = lambda: True


@dataclass(slots=True, eq=False)
class FinishRequest(Request):
    """A worker's request to end a claim.

    Attributes:
        how: ``done``, ``release`` or ``reject``.
        sequence: The batch.
        token: The claim.
        reason: Why it is rejected.
        rest_ms: Milliseconds for which a released batch is not handed out.
    """

    how: str
    sequence: int
    token: int
    reason: str
    rest_ms: int


def parse_claim(
    body: Mapping[str, Any], now: float, answer: Responder, waits: Callable[[], bool] = lambda: True
) -> ClaimRequest:
    """Read the claim in a message, and limit its values to their bounds.

    Args:
        body: The message.
        now: The current time, monotonic seconds.
        answer: Called with the answer.
        waits: Returns whether the worker still waits.

    Returns:
        The request.

    Raises:
        ProtocolError: The message is not valid.
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


def parse_finish(body: Mapping[str, Any], answer: Responder) -> FinishRequest:
    """Read the end of a claim in a message.

    Args:
        body: The message.
        answer: Called with the answer.

    Returns:
        The request.

    Raises:
        ProtocolError: The message is not valid.
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


def parse_reader(body: Mapping[str, Any]) -> str:
    """Read the reader for which a worker asks.

    Args:
        body: The message.

    Returns:
        The name of the reader; empty if the queue is not a log.

    Raises:
        ProtocolError: The name is not allowed.
    """
    reader = body.get("reader", "")
    try:
        if reader != "":
            check_reader_name(reader)
    except errors.InvalidInput as error:
        raise ProtocolError(str(error)) from None
    return str(reader)


def parse_beat(body: Mapping[str, Any]) -> list[int]:
    """Read the tokens of a heartbeat.

    Args:
        body: The message.

    Returns:
        The tokens.

    Raises:
        ProtocolError: The tokens are missing, or are not numbers.
    """
    match body.get("tokens"):
        case [*tokens] if all(type(each) is int for each in tokens):
            return tokens
    raise ProtocolError("a heartbeat names no tokens")
