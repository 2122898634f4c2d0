"""Shows who may talk to a broker: handshake, authenticated messages, and the right to write.

::

    broker  hello     {"v": 2, "term": 7, "nonce": A}
    client  prove     {"v": 2, "share": Y, "proof": HMAC(secret, "client", A, Y)}
    broker  welcome   {"name": N, "proof": HMAC(key, "broker", N)}
    then, both ways   16 bytes of HMAC(key, direction, count, body), body

``secret`` is in the discovery record: it shows that a client can read the queue, and no more. The
key of the messages is agreed by Diffie-Hellman: ``key = HMAC(secret, "messages", Z, A, Y)``, where
Z follows from the client's share Y and the broker's share, which the record announces. Only who may
write in the queue could put that share there.

So that reading is not enough to append or to take batches, the client puts the object
``<manifest>._clients/N`` with ``HMAC(key, "may write", N)``, and the broker reads and deletes it
(:class:`WriteProofs`). ``count`` numbers the messages of one direction: one that is changed, left
out, repeated or moved does not verify. Whatever does not verify raises ProtocolError, and its
connection is closed with nothing done.

Bodies are JSON objects. Without TLS they can be read on the way; they hold locations of batches and
metadata of producers, no records.
"""

from __future__ import annotations

import hmac
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from opendata_buffer.errors import (
    OpenDataBufferError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.formats.batch import MAX_KEY_BYTES, is_ulid
from opendata_buffer.runtime import Runtime, deadline
from opendata_buffer.stores.base import Store, read_bytes

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest message, either way. A client appends by itself what does not fit."""

MAX_HANDSHAKE_BYTES = 1_024

NONCE_BYTES = 32
"""Of a broker's nonce, and of the random bytes of a :class:`KeyPair`."""

SHARE_BYTES = 256

_VERSION = 2
_TAG_BYTES = 16

PRIME = int(
    "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1D8B9C583CE2D3695A9E13641146433FBCC939DCE249B"
    "3EF97D2FE363630C75D8F681B202AEC4617AD3DF1ED5D5FD65612433F51F5F066ED0856365553DED1AF3B557135E"
    "7F57C935984F0C70E0E68B77E2A689DAF3EFE8721DF158A136ADE73530ACCA4F483A797ABC0AB182B324FB61D108"
    "A94BB2C8E3FBB96ADAB760D7F4681D4F42A3DE394DF4AE56EDE76372BB190B07A7C8EE0A6D709E02FCE1CDF7E2EC"
    "C03404CD28342F619172FE9CE98583FF8E4F1232EEF28183C3FE3B1B4C6FAD733BB5FCBC2EC22005C58EF1837D16"
    "83B2C6F34A26C1B2EFFA886B423861285C97FFFFFFFFFFFFFFFF",
    16,
)
"""Of the group ffdhe2048 of RFC 7919, appendix A.1; its generator is 2."""

MAX_UNDER_WAY = 256
"""Objects that are read at the same time: a store that stalls must not take all threads."""

CHECK_S = 3.0
"""Seconds for reading one: its client waits no longer."""

_SUFFIX_BYTES = len("._clients/") + 26


class ProtocolError(OpenDataBufferError):
    """The other side is no broker or client of this queue, or speaks another version."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """One side of a Diffie-Hellman exchange. A broker makes one for a term, a client one for a
    connection; ``share`` is sent, ``private`` is not."""

    private: int = field(repr=False)
    share: bytes

    @classmethod
    def of(cls, random: bytes) -> Self:
        """The pair of :data:`NONCE_BYTES` random bytes."""
        private = int.from_bytes(random, "big")
        return cls(private, pow(2, private, PRIME).to_bytes(SHARE_BYTES, "big"))

    def agree(self, theirs: bytes) -> bytes:
        """What both sides compute, and nobody else can, from the other side's share."""
        share = int.from_bytes(theirs, "big")
        # 0, 1 and -1 would make a result that everybody knows.
        if len(theirs) != SHARE_BYTES or not 1 < share < PRIME - 1:
            raise ProtocolError("the other side's share is none")
        return pow(share, self.private, PRIME).to_bytes(SHARE_BYTES, "big")


class _End:
    """What both ends share: the discovery record's secret and term, and the messages."""

    _sends: bytes
    _receives: bytes

    def __init__(self, secret: bytes, term: int, keys: KeyPair) -> None:
        self._secret, self._term, self._keys = secret, term, keys
        self._key = b""
        self._sent = self._received = 0
        self.proof_name = ""
        """Of the object that shows that the client may write: a ULID."""

    @property
    def ready(self) -> bool:
        """Whether both sides have shown that they know the secret, and have agreed on a key."""
        return bool(self._key)

    def write_proof(self) -> bytes:
        """What the object of the name ``proof_name`` holds, as text in hexadecimal digits."""
        return proof(self._key, b"may write", self.proof_name.encode()).hex().encode()

    def _agree(self, theirs: bytes, nonce: bytes, client_share: bytes) -> bytes:
        """Make the key; returns the broker's proof that it has the same."""
        agreed = self._keys.agree(theirs)
        self._key = proof(self._secret, b"messages", agreed, nonce, client_share)
        return proof(self._key, b"broker", self.proof_name.encode())

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
    """The broker's end of one connection. ``proof_name`` is a new ULID, ``nonce`` is random."""

    _sends, _receives = b"broker", b"client"

    def __init__(
        self, secret: bytes, term: int, keys: KeyPair, nonce: bytes, proof_name: str
    ) -> None:
        super().__init__(secret, term, keys)
        self._nonce = nonce
        self.proof_name = proof_name

    def hello(self) -> bytes:
        """The first message, the broker's."""
        return _line({"v": _VERSION, "term": self._term, "nonce": self._nonce.hex()})

    def welcome(self, prove: bytes) -> bytes:
        """The answer to the client's message, which shows that it knows the secret."""
        message = _handshake(prove)
        theirs, shown = _bytes(message, "share"), _bytes(message, "proof")
        # Before anything is computed for it: a stranger must not cost the broker time.
        expected = proof(self._secret, b"client", self._nonce, theirs)
        if not hmac.compare_digest(shown, expected):
            raise ProtocolError("a client does not know this term's secret")
        own = self._agree(theirs, self._nonce, theirs)
        return _line({"name": self.proof_name, "proof": own.hex()})


class ClientEnd(_End):
    """The client's end of one connection. ``broker_share`` is what the record announces."""

    _sends, _receives = b"client", b"broker"
    _nonce = b""

    def __init__(self, secret: bytes, term: int, keys: KeyPair, broker_share: bytes) -> None:
        super().__init__(secret, term, keys)
        self._broker_share = broker_share

    def prove(self, hello: bytes) -> bytes:
        """The answer to the broker's first message."""
        message = _handshake(hello)
        if message.get("term") != self._term:
            raise ProtocolError(
                f"the broker serves in term {message.get('term')!r}, and term {self._term} is "
                "announced"
            )
        self._nonce = _bytes(message, "nonce")
        if len(self._nonce) != NONCE_BYTES:
            raise ProtocolError(f"the broker's nonce is not {NONCE_BYTES} bytes")
        shown = proof(self._secret, b"client", self._nonce, self._keys.share)
        return _line({"v": _VERSION, "share": self._keys.share.hex(), "proof": shown.hex()})

    def finish(self, welcome: bytes) -> None:
        """Check the broker's answer; messages can be sent after it."""
        message = _object(welcome[:MAX_HANDSHAKE_BYTES])
        name = message.get("name")
        if not isinstance(name, str) or not is_ulid(name):
            raise ProtocolError("the broker names no object to write")
        self.proof_name = name
        expected = self._agree(self._broker_share, self._nonce, self._keys.share)
        if not hmac.compare_digest(_bytes(message, "proof"), expected):
            self._key = b""
            raise ProtocolError("the process at the broker's address is not the announced broker")


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
    with suppress(ValueError, RecursionError):
        message = json.loads(data)
        if isinstance(message, dict):
            return message
    raise ProtocolError("a message is no JSON object")


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


def write_proof_folder(manifest_path: str) -> str:
    """Where clients put their objects: beside the manifest, because that is what they may write."""
    stem = manifest_path.encode()[: MAX_KEY_BYTES - _SUFFIX_BYTES].decode(errors="ignore")
    return f"{stem}._clients/"


class WriteProofs:
    """Checks the objects of a broker's clients. Thread-safe."""

    def __init__(self, store: Store, manifest_path: str, runtime: Runtime) -> None:
        self._store = store
        self._folder = write_proof_folder(manifest_path)
        self._runtime = runtime
        self._lock = runtime.condition()
        self._under_way = 0

    def clear(self) -> None:
        """Delete what killed clients and brokers left, some bytes each. Raises nothing."""
        try:
            if left := self._store.list(self._folder, limit=1_000).objects:
                self._store.delete_many([each.key for each in left])
        except StorageError as error:
            log.info("what is left in %s stays there: %s", self._folder, error)

    def check(self, name: str, expected: bytes, answer: Callable[[Exception | None], None]) -> None:
        """Have the object of that name read and deleted, by a thread, which calls ``answer`` once:
        with None where it holds the expected bytes, or with the error."""
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
                    error = PermanentStorageError(f"{key!r} was not written for this connection")
            except Exception as failed:  # Also a bug's: the client waits for an answer.
                error = failed
            with self._lock:
                self._under_way -= 1
            answer(error)
            with suppress(StorageError):  # The next broker deletes what is left.
                self._store.delete_many([key])

        try:
            if is_busy:
                raise RuntimeError("the broker checks too many clients at once")
            self._runtime.spawn(run, "opendata-buffer-write-proof")
        except RuntimeError as failed:  # Also where no thread is left.
            with self._lock:
                self._under_way -= 1
            answer(TransientStorageError(f"{failed}. Try again."))
