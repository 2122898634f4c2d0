"""The commit record of an app: which of its batches is surely committed. Pure.

A writer with an identity (app, batch) keeps one small object, changed by compare-and-swap only.
Of a single queue it is ``<prefix>/app=<id>/_commit.json`` and follows what the manifest shows.
Of a topic it is ``_topic/app=<id>/_commit.json`` and **decides**: a write to several partitions
is committed if and only if the record names its producer.

Who may decide is told by ``run``. A run claims the record once, before it appends anything, and
each decision is refused from the moment another run has claimed it. So whatever undecided
entries a run finds after its claim, of any producer that the record does not name, can be rolled
back: nobody can commit them any more. The one exception are those of a run that claimed later
still; therefore a run must see that the record still names it *after* it has read the manifests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.sidecar import LARGEST, Sidecar, is_number

__all__ = [
    "RECORD",
    "TOPIC_FOLDER",
    "CommitRecord",
    "Verdict",
    "began",
    "claimed",
    "decided",
    "record_key",
    "verdict",
]

TOPIC_FOLDER = "_topic"
"""Where the records of a topic's writers lie; no partition has such a name."""

RECORD = Sidecar(
    "the commit record",
    "It remembers which batch of a query was written last. Restore its latest version (bucket "
    "versioning). That of a single queue may also be deleted: the manifest and the reader's filter "
    "still recognise repeats. That of a topic (below '_topic/') may not while its query has a "
    "batch to repeat.",
    max_bytes=1024 * 1024,  # the intents of a thousand partitions have 30 KiB
)


class Verdict(Enum):
    """What a topic's record says about one attempt at a batch."""

    COMMITTED = "committed"
    """It names the attempt's producer."""
    REPEATED = "repeated"
    """It names another attempt at this batch, or a later batch."""
    OPEN = "open"
    """It names neither; whether that can still change depends on who has claimed the record."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What is surely committed of one app.

    Attributes:
        batch: Highest committed batch; -1 when the app id is only claimed.
        next_sequence: The queue's next sequence just after that batch; 0 in a topic's record.
        query: Id of the streaming query the app id belongs to; None when no query was ever
            known, as in records of versions that did not keep it.
        others: Fields of later versions, kept when the record is written again.
        run: Who may decide the next batch of a topic's writer; None for a single queue.
        producer: The producer id that wrote the batch into a topic, as hexadecimal digits.
        intents: Of each partition that the batch went to, the clock of the acknowledgement that
            commits it there.
    """

    batch: int
    next_sequence: int
    query: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None
    producer: str | None = None
    intents: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The object's bytes; without the fields that have no value, as version 1 began."""
        fields: dict[str, Any] = {"version": RECORD.version, "batch": self.batch}
        fields["next_sequence"] = self.next_sequence
        for name, value in (("query", self.query), ("run", self.run), ("producer", self.producer)):
            if value is not None:
                fields[name] = value
        if self.intents:
            fields["intents"] = dict(sorted(self.intents.items()))
        return json.dumps({**fields, **self.others}).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> CommitRecord:
        """Read the object's bytes.

        Raises:
            CorruptData: They are no commit record of this version.
        """
        fields = RECORD.decode(raw)
        batch, next_sequence = fields.number("batch", least=-1), fields.number("next_sequence")
        query, run, producer = (fields.text(name, None) for name in ("query", "run", "producer"))
        if producer is not None and not _is_producer(producer):
            raise fields.wrong("producer", "a producer id of 12 hexadecimal digits")
        intents = fields.mapping("intents", {})
        if not all(is_number(clock, least=1) for clock in intents.values()):
            raise fields.wrong("intents", f"a clock from 1 to {LARGEST} for each partition")
        return cls(batch, next_sequence, query, fields.others(), run, producer, intents)

    def raised(self, batch: int, next_sequence: int, query: str | None) -> CommitRecord:
        """The record after one more batch; unchanged by a late writer of an older one."""
        if self.batch >= batch or (query is not None and self.query not in (None, query)):
            return self
        return replace(self, batch=batch, next_sequence=next_sequence, query=self.query or query)


def record_key(prefix: str, app: str) -> str:
    """Key of an app's commit record; no batch has such a name, so the collector spares it."""
    return f"{prefix}/app={app}/_commit.json"


def claimed(record: CommitRecord | None, app: str, query: str | None) -> CommitRecord | None:
    """The record of an app once a query is about to write under its id.

    Args:
        record: As it is; None when there is none.
        app: The app id.
        query: The query's id; None where Spark does not tell it: such a writer is let through.

    Raises:
        InvalidInput: The app id belongs to another query.
    """
    if query is None or query == app:
        return record  # an app id that is the query's own id cannot be taken by another one
    if record is None:
        return CommitRecord(-1, 0, query)
    if record.query is None:
        return replace(record, query=query)
    if record.query != query:
        done = f"its batches up to {record.batch}" if record.batch >= 0 else "nothing yet"
        raise InvalidInput(
            f"txnAppId {app!r} belongs to query {record.query}, which has written {done}; this is "
            f"query {query}. Both count their batches from 0, so batches of one would be taken "
            "for repeats of the other's and be lost. Give this query a txnAppId of its own. A "
            "query whose checkpoint was deleted is a new query, and needs a new one, too."
        )
    return record


def began(
    record: CommitRecord | None, app: str, batch: int, query: str | None, run: str
) -> CommitRecord:
    """A topic's record once a run is about to write a batch: claimed, unless that is committed.

    Raises:
        InvalidInput: The app id belongs to another query.
    """
    found = claimed(record, app, query) or CommitRecord(-1, 0, query)
    if found.batch >= batch or found.run == run:
        return found
    return replace(found, run=run)


def decided(
    record: CommitRecord | None, run: str, batch: int, producer: str, intents: Mapping[str, int]
) -> CommitRecord | None:
    """A topic's record with one more batch; unchanged when this run may not decide (any more).

    Asked again for an attempt that the record names already, it changes nothing either, so a
    lost answer is repeated without harm. :func:`verdict` tells the cases apart.
    """
    if record is None or record.run != run or record.batch >= batch:
        return record
    return replace(record, batch=batch, producer=producer, intents=dict(intents))


def verdict(record: CommitRecord | None, batch: int, producer: str) -> Verdict:
    """What a topic's record says about an attempt."""
    if record is None or record.batch < batch:
        return Verdict.OPEN
    named = record.batch == batch and record.producer == producer
    return Verdict.COMMITTED if named else Verdict.REPEATED


def _is_producer(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == 6 and len(text) == 12
    except ValueError:
        return False
