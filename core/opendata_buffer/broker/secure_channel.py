"""Handshake and authenticated messages between a client and a broker, as bytes. Pure.

::

    broker  hello     {"v": 1, "term": 7, "nonce": A}
    client  prove     {"v": 1, "nonce": B, "proof": HMAC(secret, "client", A, B)}
    broker  welcome   {"proof": HMAC(secret, "broker", A, B)}
    then, both ways   16 bytes of HMAC(key, direction, count, body), body

The secret never travels: each side shows that it knows it by answering the other's nonce, and the
key of the messages is made from both nonces, so nothing recorded from one connection is good for
another. ``count`` numbers the messages of one direction: one that is changed, left out, repeated or
moved does not verify. Whatever does not verify raises ProtocolError, and its connection is closed
with nothing done.

Bodies are JSON objects. Without TLS they can be read on the way; they hold locations of batches and
metadata of producers, no records.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

from opendata_buffer.errors import OpenDataBufferError

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest message, either way. A client appends by itself what does not fit."""

MAX_HANDSHAKE_BYTES = 1024
NONCE_BYTES = 32

_VERSION = 1
_TAG_BYTES = 16


class ProtocolError(OpenDataBufferError):
    """The other side is no broker or client of this queue, or speaks another version."""


class _End:
    """What both ends share: the discovery record's secret and term, and the messages."""

    _sends: bytes
    _receives: bytes

    def __init__(self, secret: bytes, term: int, nonce: bytes) -> None:
        self._secret, self._term, self._nonce = secret, term, nonce
        self._key = b""
        self._sent = self._received = 0

    @property
    def ready(self) -> bool:
        """Whether both sides have shown that they know the secret."""
        return bool(self._key)

    def seal(self, body: Mapping[str, Any]) -> bytes:
        """The next message to send. Raises ProtocolError where it has more bytes than are read."""
        data = json.dumps(body, separators=(",", ":")).encode()
        if _TAG_BYTES + len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a message of {len(data)} bytes is larger than {MAX_MESSAGE_BYTES}: send less "
                "metadata, or append without a broker"
            )
        tag = self._tag(self._sends, self._sent, data)
        self._sent += 1
        return tag + data

    def open(self, message: bytes) -> dict[str, Any]:
        """The body of the next message received."""
        tag, data = message[:_TAG_BYTES], message[_TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(self._receives, self._received, data)):
            raise ProtocolError(
                "a message was not made by the process that shook hands, or came twice"
            )
        self._received += 1
        return _object(data)

    def _tag(self, direction: bytes, count: int, data: bytes) -> bytes:
        if not self._key:
            raise ProtocolError("a message came before the handshake was over")
        return proof(self._key, direction, count.to_bytes(8, "big"), data)[:_TAG_BYTES]


class BrokerEnd(_End):
    """The broker's end of one connection."""

    _sends, _receives = b"broker", b"client"

    def hello(self) -> bytes:
        """The first message, the broker's."""
        return _line({"v": _VERSION, "term": self._term, "nonce": self._nonce.hex()})

    def welcome(self, prove: bytes) -> bytes:
        """The answer to the client's message, which shows that it knows the secret."""
        message = _handshake(prove)
        theirs, shown = _bytes(message, "nonce"), _bytes(message, "proof")
        expected = proof(self._secret, b"client", self._nonce, theirs)
        if len(theirs) != NONCE_BYTES or not hmac.compare_digest(shown, expected):
            raise ProtocolError("a client does not know this term's secret")
        self._key = proof(self._secret, b"messages", self._nonce, theirs)
        return _line({"proof": proof(self._secret, b"broker", self._nonce, theirs).hex()})


class ClientEnd(_End):
    """The client's end of one connection."""

    _sends, _receives = b"client", b"broker"
    _theirs = b""

    def prove(self, hello: bytes) -> bytes:
        """The answer to the broker's first message."""
        message = _handshake(hello)
        if message.get("term") != self._term:
            raise ProtocolError(
                f"the broker serves in term {message.get('term')!r}, and term {self._term} is "
                "announced"
            )
        self._theirs = _bytes(message, "nonce")
        if len(self._theirs) != NONCE_BYTES or self._theirs == self._nonce:
            raise ProtocolError(f"the broker's nonce is not {NONCE_BYTES} new bytes")
        shown = proof(self._secret, b"client", self._theirs, self._nonce)
        return _line({"v": _VERSION, "nonce": self._nonce.hex(), "proof": shown.hex()})

    def finish(self, welcome: bytes) -> None:
        """Check the broker's answer; messages can be sent after it."""
        shown = _bytes(_object(welcome[:MAX_HANDSHAKE_BYTES]), "proof")
        expected = proof(self._secret, b"broker", self._theirs, self._nonce)
        if not hmac.compare_digest(shown, expected):
            raise ProtocolError("the process at the broker's address does not know the secret")
        self._key = proof(self._secret, b"messages", self._theirs, self._nonce)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _handshake(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_HANDSHAKE_BYTES:
        raise ProtocolError(f"a handshake has {len(data)} bytes: more than {MAX_HANDSHAKE_BYTES}")
    message = _object(data)
    if message.get("v") != _VERSION:
        raise ProtocolError(
            f"the other side speaks version {message.get('v')!r} of the broker's protocol, and "
            f"this library version {_VERSION}: run one version of opendata-buffer everywhere"
        )
    return message


def _object(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise ProtocolError("a message is no JSON object")
    return message


def _bytes(message: Mapping[str, Any], name: str) -> bytes:
    value = message.get(name)
    try:
        return bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        return b""


def proof(secret: bytes, *parts: bytes) -> bytes:
    """The HMAC of some bytes, which only a holder of the secret can make."""
    message = b""
    for part in parts:
        message += len(part).to_bytes(4, "big") + part
    return hmac.digest(secret, message, "sha256")
