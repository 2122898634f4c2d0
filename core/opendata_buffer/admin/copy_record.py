"""How far a copy of one queue to another has got: a small object beside the target. Pure.

``<prefix>/app=<id>/_copy.json``, where ``<id>`` says which queue is copied::

    {"version": 1, "source": "s3://bucket/orders ingest/manifest", "run": "01J5...", "next": 42,
     "transactions": {...}}

``next`` is the source's first sequence that was not looked at, and ``transactions`` what the rule
for readers remembers of those before it. The record follows what was appended, so it may lag by
one append; the target's manifest, or else the identity in its batches' names, shows the rest.
``run`` is whoever copies now: a process that finds another one there ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from opendata_buffer.formats.sidecar import Sidecar

__all__ = ["RECORD", "CopyRecord", "copy_app", "copy_record_key"]

RECORD = Sidecar(
    "the record of a copy",
    "Restore its latest version (bucket versioning), or delete it: the copy begins anew then. What "
    "still waits in the target is not copied twice; what its reader has taken is, unless it has "
    "left the source.",
    max_bytes=16 * 1024 * 1024,
)


def copy_app(queue_id: str, url: str, manifest_path: str) -> str:
    """The app id of copies of one queue: the same from run to run, another one's is another.

    Args:
        queue_id: The source's id; empty for one without a marker, which its place must identify.
        url: The source's store.
        manifest_path: The source's manifest.
    """
    if queue_id:
        return f"copy-{queue_id}"
    place = f"{url}\n{manifest_path}".encode(errors="surrogatepass")
    return f"copy-{hashlib.sha256(place).hexdigest()[:26]}"


def copy_record_key(data_path_prefix: str, app: str) -> str:
    """Key of the record; no batch has such a name, so the collector spares it."""
    return f"{data_path_prefix}/app={app}/_copy.json"


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """How far a copy is.

    Attributes:
        source: What is copied, for people.
        run: Who copies, a ULID.
        next_sequence: First sequence of the source that was not looked at.
        transactions: State of the reader's rule before it.
        others: Fields of later versions, kept when the record is written again.
    """

    source: str
    run: str
    next_sequence: int
    transactions: Mapping[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The object's bytes."""
        own = {
            "source": self.source,
            "run": self.run,
            "next": self.next_sequence,
            "transactions": self.transactions,
        }
        return RECORD.encode(own, self.others)

    @classmethod
    def from_json(cls, data: bytes) -> CopyRecord:
        """Read the object's bytes.

        Raises:
            CorruptData: They are no record of this version.
        """
        fields = RECORD.decode(data)
        return cls(
            source=fields.text("source"),
            run=fields.text("run"),
            next_sequence=fields.number("next"),
            transactions=fields.mapping("transactions"),
            others=fields.others(),
        )
