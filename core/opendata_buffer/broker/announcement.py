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

from opendata_buffer.formats.sidecar import Sidecar

__all__ = ["ANNOUNCEMENT", "FILE_NAME", "Announcement", "announcement_key", "decode", "encode"]

FILE_NAME = "_broker.json"
SECRET_BYTES = 32

ANNOUNCEMENT = Sidecar(
    "a broker's announcement",
    "Nothing depends on it: delete the object, and the next broker writes a new one.",
    confidential=True,
)


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
        "version": ANNOUNCEMENT.version,
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
    fields = ANNOUNCEMENT.decode(data)
    address, secret = fields.text("address"), fields.text("secret")
    try:
        key = bytes.fromhex(secret)
    except ValueError:
        key = b""
    if address and len(key) != SECRET_BYTES:
        raise fields.wrong("secret", f"{SECRET_BYTES} bytes in hexadecimal digits")
    return Announcement(
        fields.number("term"),
        fields.text("id"),
        address,
        key,
        certificate=fields.text("certificate", ""),
        beat=fields.number("beat", 0),
        seen_ms=fields.number("seen_ms", 0),
    )


def proof(secret: bytes, *parts: bytes) -> bytes:
    """What only who knows the secret can say about some bytes."""
    message = b""
    for part in parts:
        message += len(part).to_bytes(4, "big") + part
    return hmac.digest(secret, message, "sha256")
