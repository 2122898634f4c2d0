"""``<prefix>/_broker.json``: which broker serves a queue and how to reach it, changed by
compare-and-swap."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from opendata_buffer import outcomes
from opendata_buffer.config import (
    QueueConfig,
)
from opendata_buffer.formats.sidecar import Sidecar
from opendata_buffer.queue.cas import CasObject, CasStore
from opendata_buffer.runtime import Runtime

__all__ = [
    "ANNOUNCEMENT",
    "DiscoveryRecord",
    "FILE_NAME",
    "Lease",
    "Watch",
    "announcement_key",
    "decode",
    "encode",
]


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
class DiscoveryRecord:
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

    def same_broker(self, other: DiscoveryRecord | None) -> bool:
        """Whether both are of one broker in one term."""
        return other is not None and (self.term, self.id) == (other.term, other.id)

    def beaten(self, now_ms: int) -> DiscoveryRecord:
        """With one more sign of life."""
        return replace(self, beat=self.beat + 1, seen_ms=now_ms)

    def left(self, now_ms: int) -> DiscoveryRecord:
        """Of a broker that serves no more."""
        return replace(self, address="", secret=b"", beat=self.beat + 1, seen_ms=now_ms)


def encode(announcement: DiscoveryRecord) -> bytes:
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


def decode(data: bytes) -> DiscoveryRecord:
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
    return DiscoveryRecord(
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


# ---- Who serves: ``_broker.json``, read and changed by compare-and-swap. ----


_Decide: TypeAlias = Callable[[DiscoveryRecord | None], DiscoveryRecord | None]


class Lease:
    """The announcement of a queue's broker. Not thread-safe.

    Args:
        store: Where the queue lives.
        config: The queue.
        runtime: Clock and jitter.
        deadline_ms: How long a read or a change may take, milliseconds.
    """

    def __init__(
        self, store: CasStore, config: QueueConfig, runtime: Runtime, *, deadline_ms: int = 5_000
    ) -> None:
        self._runtime = runtime
        self._store = store
        self._key = announcement_key(config.data_path_prefix)
        self._settings = replace(config, cas_deadline_ms=min(deadline_ms, config.cas_deadline_ms))
        self._register = self._made()

    @property
    def key(self) -> str:
        """The announcement's key."""
        return self._key

    def read(self) -> DiscoveryRecord | None:
        """What is announced; None where nobody ever served, or somebody deleted it.

        Raises:
            StorageError: The store did not answer.
            CorruptData: The object is no announcement.
        """
        found = self._register.read()
        if not isinstance(found, outcomes.Vanished):
            return found
        # Deleted while it was watched. It is a hint and may be made anew, unlike a manifest.
        self._register = self._made()
        return None

    def take(self, mine: DiscoveryRecord, over: DiscoveryRecord | None) -> DiscoveryRecord | None:
        """Announce oneself in place of ``over``, with the next term.

        Returns:
            The announcement as it was written; None when somebody else was faster.
        """
        wanted = replace(mine, term=1 if over is None else over.term + 1)

        def decide(before: DiscoveryRecord | None) -> DiscoveryRecord | None:
            if before is not None and wanted.same_broker(before):
                return before  # A write of ours whose answer was lost.
            same = before is None if over is None else over.same_broker(before)
            return wanted if same else before

        return self._change(decide, wanted)

    def beat(self, mine: DiscoveryRecord) -> DiscoveryRecord | None:
        """Give a sign of life; None when another broker was announced, or none is."""
        now_ms = self._runtime.now_ms()

        def decide(before: DiscoveryRecord | None) -> DiscoveryRecord | None:
            ours = before is not None and mine.same_broker(before)
            return mine.beaten(now_ms) if ours else before

        return self._change(decide, mine)

    def leave(self, mine: DiscoveryRecord) -> None:
        """Say that one serves no more, unless somebody else does by now."""
        now_ms = self._runtime.now_ms()

        def decide(before: DiscoveryRecord | None) -> DiscoveryRecord | None:
            ours = before is not None and mine.same_broker(before)
            return mine.left(now_ms) if ours else before

        self._register.update(decide)

    def _change(self, decide: _Decide, mine: DiscoveryRecord) -> DiscoveryRecord | None:
        outcome = self._register.update(decide)
        if not isinstance(outcome, outcomes.Applied):
            self._register = self._made()
            return None
        value = outcome.value
        return value if value is not None and mine.same_broker(value) and value.serves else None

    def _made(self) -> CasObject[DiscoveryRecord]:
        return CasObject(
            self._store,
            self._key,
            decode=decode,
            encode=encode,
            runtime=self._runtime,
            settings=self._settings,
            max_bytes=ANNOUNCEMENT.max_bytes,
            unreadable=ANNOUNCEMENT.unreadable,
        )


@dataclass(slots=True)
class Watch:
    """How long an announced broker has given no sign of life, by the watcher's own clock. Pure.

    Attributes:
        seen: The announcement as last seen.
        since: When it was first seen so, monotonic seconds.
    """

    seen: DiscoveryRecord | None = None
    since: float = 0.0

    def look(self, now: DiscoveryRecord | None, at: float) -> float:
        """Note what is announced; returns for how many seconds that has not changed."""
        if now != self.seen:
            self.seen, self.since = now, at
        return at - self.since
