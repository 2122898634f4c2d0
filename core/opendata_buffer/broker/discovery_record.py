"""``<prefix>/_broker.json``: which broker serves a queue and how to reach it.

The record is a hint and no permission. A broker whose record was replaced may still append, and a
client that finds none appends alone: the manifest's compare-and-swap keeps both right. Whether a
broker lives shows without comparing two machines' clocks: ``beat`` changes within a time on the
watcher's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from opendata_buffer import outcomes
from opendata_buffer.broker.protocol import SHARE_BYTES
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import BROKER_RECORD_NAME
from opendata_buffer.queue.cas import CasObject, CasStore, Sidecar
from opendata_buffer.runtime import Runtime

SECRET_BYTES = 32

DISCOVERY_RECORD = Sidecar(
    "a broker's discovery record",
    "Nothing depends on it: a broker that is started replaces it.",
    confidential=True,
)


def discovery_record_key(data_path_prefix: str) -> str:
    """The key of a queue's discovery record."""
    return f"{data_path_prefix}/{BROKER_RECORD_NAME}"


@dataclass(frozen=True, slots=True)
class DiscoveryRecord:
    """The broker that serves, or the last one that did.

    Attributes:
        term: Rises with each broker; the larger one is right.
        id: Of the broker, a ULID drawn at its start.
        address: ``host:port`` for clients; empty once the broker has left.
        secret: Known to every process that can read the queue's bucket; a new one for each term.
        certificate: SHA-256 of the certificate its port shows, in hex; empty without TLS.
        beat: Counts the broker's renewals of the record.
        seen_ms: When it last renewed it, milliseconds since the Unix epoch, for people.
        share: Of the broker's :class:`.KeyPair`; empty in the record of an earlier release.
        fault: Why the object is not readable; ``id`` is its version then, and ``term`` 0.
    """

    term: int
    id: str
    address: str
    secret: bytes = field(repr=False)  # records are logged and appear in errors
    certificate: str = field(default="", repr=False)
    beat: int = 0
    seen_ms: int = 0
    share: bytes = field(default=b"", repr=False)
    fault: str = ""

    @property
    def serves(self) -> bool:
        """Whether it names an address. The broker may have died since."""
        return bool(self.address)

    def same_broker(self, other: DiscoveryRecord | None) -> bool:
        """Whether both are of one broker in one term."""
        return other is not None and (self.term, self.id) == (other.term, other.id)


def encode(broker_record: DiscoveryRecord) -> bytes:
    """The object's bytes."""
    fields = {
        "term": broker_record.term,
        "id": broker_record.id,
        "address": broker_record.address,
        "secret": broker_record.secret.hex(),
        "share": broker_record.share.hex(),
        "certificate": broker_record.certificate,
        "beat": broker_record.beat,
        "seen_ms": broker_record.seen_ms,
    }
    return DISCOVERY_RECORD.encode(fields)


def decode(data: bytes) -> DiscoveryRecord:
    """The record in an object's bytes. Raises CorruptData where they are none of this version."""
    fields = DISCOVERY_RECORD.decode(data)
    address, share = fields.text("address"), fields.text("share", "")

    def read(name: str, size: int) -> bytes:
        try:
            found = bytes.fromhex(fields.text(name))
        except ValueError:
            found = b""
        if address and len(found) != size:
            raise fields.wrong(name, f"{size} bytes in hexadecimal digits")
        return found

    return DiscoveryRecord(
        fields.number("term"),
        fields.text("id"),
        address,
        read("secret", SECRET_BYTES),
        certificate=fields.text("certificate", ""),
        beat=fields.number("beat", 0),
        seen_ms=fields.number("seen_ms", 0),
        share=read("share", SHARE_BYTES) if share else b"",
    )


class Lease:
    """Reads and changes a queue's discovery record by compare-and-swap, each within ``deadline_ms``
    milliseconds. Not thread-safe."""

    def __init__(
        self, store: CasStore, config: QueueConfig, runtime: Runtime, *, deadline_ms: int = 5_000
    ) -> None:
        self._runtime = runtime
        self._object = CasObject(
            store,
            discovery_record_key(config.data_path_prefix),
            decode=decode,
            encode=encode,
            runtime=runtime,
            settings=config.with_timeout(min(deadline_ms, config.timeout_ms)),
            sidecar=DISCOVERY_RECORD,
            if_unreadable=lambda error, version: DiscoveryRecord(
                0, version, "", b"", fault=str(error)
            ),
        )

    def read(self) -> DiscoveryRecord | None:
        """The record; None where no broker ever served, or the object was deleted. One that is not
        readable serves nowhere and has a ``fault``, and can be replaced as any other."""
        found = self._object.read()
        return found if isinstance(found, DiscoveryRecord) else None

    def take(self, mine: DiscoveryRecord, over: DiscoveryRecord | None) -> DiscoveryRecord | None:
        """Replace the record ``over`` by one with the next term, and return it as it was written;
        None when another broker was faster."""
        wanted = replace(mine, term=1 if over is None else over.term + 1)

        def decide(before: DiscoveryRecord | None) -> DiscoveryRecord | None:
            if before is not None and wanted.same_broker(before):
                return before  # A write of ours whose answer was lost.
            same = before is None if over is None else over.same_broker(before)
            return wanted if same else before

        return self._change(decide, wanted)

    def beat(self, mine: DiscoveryRecord) -> DiscoveryRecord | None:
        """Raise ``beat``; None when another broker's record is there, or none."""
        after = replace(mine, beat=mine.beat + 1, seen_ms=self._runtime.now_ms())
        return self._change(lambda before: after if mine.same_broker(before) else before, mine)

    def leave(self, mine: DiscoveryRecord) -> None:
        """Take the address out of the record, unless it is another broker's by now."""
        self.beat(replace(mine, address="", secret=b"", share=b""))

    def _change(
        self,
        decide: Callable[[DiscoveryRecord | None], DiscoveryRecord | None],
        mine: DiscoveryRecord,
    ) -> DiscoveryRecord | None:
        outcome = self._object.update(decide)
        value = outcome.value if isinstance(outcome, outcomes.Applied) else None
        return value if value is not None and mine.same_broker(value) and value.serves else None
