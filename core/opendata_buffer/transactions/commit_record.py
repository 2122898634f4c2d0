"""The commit record of an app: which of its batches are committed.

A writer with an identity (app, batch) keeps one small object, changed by compare-and-swap only.
Of a single queue it is ``<prefix>/app=<id>/_commit.json`` and follows what the manifest shows.
Of a topic it is ``_topic/app=<id>/_commit.json`` and **decides**: a write to several partitions
is committed if and only if the record names its producer.

Only the run that the record's field ``run`` names may decide. A run claims the record once, before
it appends anything; from then on the decisions of earlier runs are refused, so their undecided
entries can be rolled back, except those of the producer that the record names. A later run may
have appended entries meanwhile: a run notes what is undecided in a manifest *before* it reads or
writes the record, and rolls it back only if the record still names the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from opendata_buffer import outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.cas import (
    LARGEST,
    CasObject,
    CasStore,
    OutcomeUnknown,
    Sidecar,
    is_number,
)
from opendata_buffer.runtime import Runtime
from opendata_buffer.transactions.markers import ROLL_BACK, TransactionMarker, undecided_of_app

TOPIC_FOLDER = "_topic"
"""Folder of the records of a topic's writers; no partition has such a name."""

RECORD = Sidecar(
    "the commit record",
    "It has the last batch that a query wrote. Restore its latest version (bucket "
    "versioning). That of a single queue may also be deleted: the manifest and the reader's filter "
    "still recognise repeats. That of a topic (below '_topic/') may not while its query has a "
    "batch to repeat.",
    max_bytes=1024 * 1024,  # the intents of a thousand partitions have 30 KiB
)


class Verdict(Enum):
    """The meaning of a topic's record for one attempt at a batch."""

    COMMITTED = "committed"
    """It names the attempt's producer."""
    REPEATED = "repeated"
    """It names another attempt at this batch, or a later batch."""
    OPEN = "open"
    """It names neither."""


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The committed batches of one app.

    Attributes:
        batch: Highest committed batch; -1 when the app id is only claimed.
        next_sequence: The queue's next sequence just after that batch; 0 in a topic's record.
        query: Id of the streaming query the app id belongs to, if it is known.
        others: Fields of later versions, kept when the record is written again.
        run: The run that may decide the next batch of a topic's writer; None for a single queue.
        producer: The producer id that wrote the batch into a topic, as hexadecimal digits.
        intents: The clock of the marker that commits the batch, by partition.
        positions: What a publisher has processed, by queue: text of a :class:`.Position`.
    """

    batch: int
    next_sequence: int
    query: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)
    run: str | None = None
    producer: str | None = None
    intents: Mapping[str, int] = field(default_factory=dict)
    positions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The object's bytes, without the fields that have no value."""
        fields: dict[str, Any] = {"version": RECORD.version, "batch": self.batch}
        fields["next_sequence"] = self.next_sequence
        for name, value in (("query", self.query), ("run", self.run), ("producer", self.producer)):
            if value is not None:
                fields[name] = value
        if self.intents:
            fields["intents"] = dict(sorted(self.intents.items()))
        if self.positions:
            fields["positions"] = dict(sorted(self.positions.items()))
        return json.dumps({**fields, **self.others}).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> CommitRecord:
        """Read the object's bytes. ``CorruptData`` if they are no record of this version."""
        fields = RECORD.decode(raw)
        batch, next_sequence = fields.number("batch", least=-1), fields.number("next_sequence")
        query, run, producer = (fields.text(name, None) for name in ("query", "run", "producer"))
        if producer is not None and not re.fullmatch("[0-9a-fA-F]{12}", producer):
            raise fields.wrong("producer", "a producer id of 12 hexadecimal digits")
        intents = fields.mapping("intents", {})
        if not all(is_number(clock, least=1) for clock in intents.values()):
            raise fields.wrong("intents", f"a clock from 1 to {LARGEST} for each partition")
        positions = fields.mapping("positions", {})
        if not all(isinstance(text, str) for text in positions.values()):
            raise fields.wrong("positions", "a text for each queue")
        return cls(batch, next_sequence, query, fields.others(), run, producer, intents, positions)

    def raised(self, batch: int, next_sequence: int, query: str | None) -> CommitRecord:
        """The record after one more batch; unchanged for an older batch or another query."""
        if self.batch >= batch or (query is not None and self.query not in (None, query)):
            return self
        return replace(self, batch=batch, next_sequence=next_sequence, query=self.query or query)


def record_key(prefix: str, app: str) -> str:
    """Key of an app's commit record. It is no batch's name, so the collector does not delete it."""
    return f"{prefix}/app={app}/_commit.json"


def record_object(
    store: CasStore, prefix: str, app: str, runtime: Runtime, settings: QueueConfig
) -> CasObject[CommitRecord]:
    """An app's commit record in the store; ``prefix`` is that of :func:`record_key`."""
    return CasObject(
        store,
        record_key(prefix, app),
        decode=CommitRecord.from_json,
        encode=CommitRecord.to_json,
        runtime=runtime,
        settings=settings,
        sidecar=RECORD,
    )


def claimed(record: CommitRecord | None, app: str, query: str | None) -> CommitRecord | None:
    """The record of an app, with the query that is about to write; unknown ones are not checked.

    ``InvalidInput`` if the app id belongs to another query.
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


@dataclass(frozen=True, slots=True)
class _BatchProof:
    """How the record shows that an attempt at a batch was committed."""

    batch: int
    producer: str
    key: str

    def mark(self) -> int:
        """A record has one place."""
        return 0

    def find(self, now: CommitRecord | None, marks: Sequence[int]) -> bool:
        """Whether the record names the attempt."""
        if marks and now is not None and now.batch > self.batch:
            # The answer was lost, and the next owner has committed a later batch since: it may have
            # found this one committed, or committed another attempt at it.
            raise OutcomeUnknown(f"{self.key!r} names batch {now.batch} by now")
        return now is not None and (now.batch, now.producer) == (self.batch, self.producer)


class OwnedRecord:
    """A topic's commit record as one run of an app, which has a unique name, owns it.

    A run claims once: what was appended under an earlier claim cannot be committed any more. Not
    thread-safe.
    """

    def __init__(self, app: str, record: CasObject[CommitRecord], run: str) -> None:
        self.key = record.key
        self.roll_backs: dict[str, dict[bytes, TransactionMarker]] = {}
        """By partition and producer, the markers that roll back earlier runs."""
        self._app = app
        self._object = record
        self._run = run
        self._searched: dict[str, int] = {}
        """Per partition, the sequence up to which its manifest was searched."""

    @property
    def record(self) -> CommitRecord | None:
        """The record as last read or written."""
        return self._object.last_seen

    def claim(self, batch: int, query: str | None) -> CommitRecord:
        """Write this run into the record, unless the batch is committed. Called once, first."""

        def change(record: CommitRecord | None) -> CommitRecord:
            found = claimed(record, self._app, query) or CommitRecord(-1, 0, query)
            if found.batch >= batch or found.run == self._run:
                return found
            return replace(found, run=self._run)

        outcome = self._object.update(change)
        if not isinstance(outcome, outcomes.Applied) or outcome.value is None:
            raise TransientStorageError(
                f"commit record {self.key!r} could not be written: {outcome}. Nothing "
                "was appended; start the query again."
            )
        return outcome.value

    def is_owned(self) -> bool:
        """Whether no other run has claimed the record since. Reads it."""
        now = self._object.read()
        return isinstance(now, CommitRecord) and now.run == self._run

    def continues(self, batch: int, query: str | None) -> bool:
        """Whether this run may go on with a batch without a claim.

        It may not if the record does not name the query yet; or if batches are missing since its
        last one and another run has claimed the record, because Spark commits in any of its idle
        Python workers. The record is read only if batches are missing.
        """
        record = self.record
        if claimed(record, self._app, query) is not record:
            return False
        return record is None or batch <= record.batch + 1 or self.is_owned()

    def decide(
        self,
        batch: int,
        producer: str,
        intents: Mapping[str, int],
        positions: Mapping[str, str],
    ) -> outcomes.Outcome[CommitRecord | None]:
        """Write a batch into the record, which commits it; see :meth:`verdict`."""

        def change(record: CommitRecord | None) -> CommitRecord | None:
            # Unchanged also where it names this attempt already: it may be applied twice.
            if record is None or record.run != self._run or record.batch >= batch:
                return record
            # What was read and what was written of it are committed by one write.
            return replace(
                record,
                batch=batch,
                producer=producer,
                intents=dict(intents),
                positions={**record.positions, **positions},
            )

        proof = _BatchProof(batch, producer, self.key)
        return self._object.update(change, proof=proof, from_memory=True)

    def verdict(self, batch: int, producer: str) -> Verdict:
        """The meaning of the record, as last read or written, for an attempt."""
        record = self.record
        if record is None or record.batch < batch:
            return Verdict.OPEN
        named = record.batch == batch and record.producer == producer
        return Verdict.COMMITTED if named else Verdict.REPEATED

    def note_undecided(self, name: str, manifest: Manifest | None, but: bytes | None) -> None:
        """Note the undecided producers of a partition, which are to be rolled back, but one."""
        if manifest is None:
            return
        found = undecided_of_app(manifest, name, self._app, self._searched.get(name, 0))
        self._searched[name] = manifest.next_sequence
        for producer, each in found.items():
            if producer != but:
                marker = TransactionMarker(producer, ROLL_BACK, each.txn)
                self.roll_backs.setdefault(name, {})[producer] = marker
