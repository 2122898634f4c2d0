"""What ``<prefix>/_broker.json`` says: who appends for everybody, and how to reach it. Pure.

The announcement is a hint and no permission. A broker whose announcement was replaced may still
append, and a client that finds none appends by itself: the manifest's compare-and-swap keeps
both right. All the announcement does is to bring everybody to one place.

Whether the announced broker still lives is told without comparing clocks of two machines: who
watches looks whether ``beat`` changes within a time on its own clock.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass, replace
from typing import Any

from opendata_buffer.errors import CorruptData

__all__ = ["FILE_NAME", "Announcement", "announcement_key", "decode", "encode"]

FILE_NAME = "_broker.json"
MAX_BYTES = 64 * 1024
SECRET_BYTES = 32

_VERSION = 1


def announcement_key(data_path_prefix: str) -> str:
    """The key of the announcement of a queue."""
    return f"{data_path_prefix}/{FILE_NAME}"


@dataclass(frozen=True, slots=True)
class Announcement:
    """A broker that serves, or the last one that did.

    Attributes:
        term: Rises with each broker; the larger one is right.
        id: Of the broker, a ULID drawn at its start.
        address: ``host:port`` for clients; empty once the broker has left.
        secret: Known to whoever can read the queue's bucket; a new one for each term.
        certificate: SHA-256 of the certificate its port shows, in hex; empty without TLS. Clients
            trust this one and no other, so it needs no authority's signature.
        beat: Counts the broker's signs of life.
        seen_ms: When it gave the last one, by its own clock, milliseconds since the Unix epoch.
            For people to read; no program compares it with its own clock.
    """

    term: int
    id: str
    address: str
    secret: bytes
    certificate: str = ""
    beat: int = 0
    seen_ms: int = 0

    @property
    def serves(self) -> bool:
        """Whether it is to be asked at all; it may be dead all the same."""
        return bool(self.address)

    def __repr__(self) -> str:
        # Without the secret: announcements turn up in logs and in errors.
        return (
            f"Announcement(term={self.term}, id={self.id!r}, address={self.address!r}, "
            f"tls={bool(self.certificate)}, beat={self.beat}, seen_ms={self.seen_ms})"
        )

    def same_broker(self, other: Announcement | None) -> bool:
        """Whether both are of one broker in one term."""
        return other is not None and (self.term, self.id) == (other.term, other.id)

    def beaten(self, now_ms: int) -> Announcement:
        """With one more sign of life."""
        return replace(self, beat=self.beat + 1, seen_ms=now_ms)

    def left(self, now_ms: int) -> Announcement:
        """Of a broker that serves no more."""
        return replace(self, address="", secret=b"", beat=self.beat + 1, seen_ms=now_ms)


def encode(announcement: Announcement) -> bytes:
    """The object's bytes."""
    document = {
        "version": _VERSION,
        "term": announcement.term,
        "id": announcement.id,
        "address": announcement.address,
        "secret": announcement.secret.hex(),
        "certificate": announcement.certificate,
        "beat": announcement.beat,
        "seen_ms": announcement.seen_ms,
    }
    return json.dumps(document).encode() + b"\n"


def decode(data: bytes) -> Announcement:
    """The announcement of an object's bytes.

    Raises:
        CorruptData: They are no announcement of this version.
    """
    try:
        document: Any = json.loads(data.decode())
    except (ValueError, RecursionError):
        document = None
    match document:
        case {
            "version": 1,
            "term": int(term),
            "id": str(name),
            "address": str(address),
            "secret": str(secret),
        } if term >= 0:
            try:
                key = bytes.fromhex(secret)
            except ValueError:
                key = b""
            if not address or len(key) == SECRET_BYTES:
                return Announcement(
                    term,
                    name,
                    address,
                    key,
                    certificate=str(document.get("certificate") or ""),
                    beat=_number(document.get("beat")),
                    seen_ms=_number(document.get("seen_ms")),
                )
    raise CorruptData(
        f"a broker's announcement holds {len(data)} bytes that are none of version {_VERSION}: a "
        "later version of this library or somebody else wrote it. Nothing depends on it: delete "
        "the object, and the next broker writes a new one."
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def proof(secret: bytes, *parts: bytes) -> bytes:
    """What only who knows the secret can say about some bytes."""
    message = b""
    for part in parts:
        message += len(part).to_bytes(4, "big") + part
    return hmac.digest(secret, message, "sha256")
