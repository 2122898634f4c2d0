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
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from opendata_buffer import outcomes
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.formats.sidecar import LARGEST, Sidecar, is_number
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.transactions.markers import ROLL_BACK, TransactionMarker, undecided_of

__all__ = [
    "ClaimedRecord",
    "CommitRecord",
    "RECORD",
    "TOPIC_FOLDER",
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


# ---- An app's commit record as one run has claimed it, and what that run saw of earlier ones. ----
#
# A run claims once, and a new claim is a new run: what was appended under the old one cannot be
# decided any more.
#
# A run notes what is undecided in a manifest *before* it reads or writes the record. If the record
# still names the run then, all that it noted is of earlier runs, and none of it can be committed
# any
# more: it is rolled back. See :mod:`opendata_buffer.transactions.commit_record`.


log = logging.getLogger(__name__)


class ClaimedRecord:
    """One run of an app. Not thread-safe.

    Args:
        app: The app id.
        register: Its commit record.
        run: A name for this run that no other run has.
    """

    def __init__(self, app: str, register: CasObject[CommitRecord], run: str) -> None:
        self._app = app
        self._register = register
        self._run = run
        self._seen: dict[str, int] = {}
        """Per partition, the sequence up to which undecided transactions were looked for."""
        self._left: defaultdict[str, dict[bytes, Transaction | None]] = defaultdict(dict)
        """Per partition, producers of earlier runs that are to be rolled back."""

    @property
    def key(self) -> str:
        """The record's object."""
        return self._register.key

    @property
    def record(self) -> CommitRecord | None:
        """The record as last read or written."""
        return self._register.last_seen

    def claim(self, batch: int, query: str | None) -> CommitRecord:
        """Write this run into the record, unless the batch is committed. Once, before all else.

        Args:
            batch: Number of the batch that the run is about to write.
            query: Id of the query, if it is known.

        Raises:
            InvalidInput: The app id belongs to another query; nothing was written.
            TransientStorageError: The record could not be written.
        """
        outcome = self._register.update(
            lambda record: began(record, self._app, batch, query, self._run)
        )
        if not isinstance(outcome, outcomes.Applied) or outcome.value is None:
            raise TransientStorageError(
                f"commit record {self.key!r} could not be written: {outcome}. Nothing "
                "was appended; start the query again."
            )
        return outcome.value

    def belongs_to(self, query: str | None) -> bool:
        """Whether the record says already that the app is the query's.

        Raises:
            InvalidInput: The app id belongs to another query.
        """
        return claimed(self.record, self._app, query) is self.record

    def is_held(self) -> bool:
        """Whether no other run has begun since. Reads the record."""
        now = self._register.read()
        return isinstance(now, CommitRecord) and now.run == self._run

    def was_overtaken_before(self, batch: int) -> bool:
        """Whether other runs wrote the batches between the last one of this run and this one.

        Spark commits in any of its idle Python workers. Where there are several, because several
        queries commit, each batch of a query may follow one that another process wrote, as a run
        of its own. Without such a gap nobody did, and nothing is read.
        """
        record = self.record
        return record is not None and batch > record.batch + 1 and not self.is_held()

    def decide(
        self, batch: int, producer: str, intents: Mapping[str, int]
    ) -> outcomes.Outcome[CommitRecord | None]:
        """Write a batch into the record: it is committed with that, and not before.

        Args:
            batch: Its number.
            producer: Who wrote it, as hexadecimal digits.
            intents: Of each partition it went to, the clock of the acknowledgement.

        Returns:
            The record is unchanged where this run may not decide any more.

        Raises:
            TransientStorageError: The record could not be read; it may have been written.
        """
        return self._register.update(
            lambda record: decided(record, self._run, batch, producer, intents), from_memory=True
        )

    def note(self, name: str, manifest: Manifest | None, but: bytes | None) -> None:
        """Note what is undecided of the app in a partition, of any producer but one."""
        if manifest is None:
            return
        found = undecided_of(manifest, name, self._app, self._seen.get(name, 0))
        self._seen[name] = manifest.next_sequence
        self._left[name].update({who: each.txn for who, each in found.items() if who != but})

    @property
    def leaves(self) -> bool:
        """Whether anything that was noted is to be rolled back."""
        return any(self._left.values())

    def roll_backs(self) -> dict[str, list[TransactionMarker]]:
        """How to end what was noted, by partition."""
        found: defaultdict[str, list[TransactionMarker]] = defaultdict(list)
        for name, producers in self._left.items():
            for producer, txn in producers.items():
                log.warning(
                    "batch %s of app %s was given up in %s before it was committed: rolled back",
                    "?" if txn is None else txn.batch, self._app, name,
                )  # fmt: skip
                found[name].append(TransactionMarker(producer, ROLL_BACK, txn))
        return found

    def rolled_back(self) -> None:
        """It is done: nothing that was noted is left."""
        self._left.clear()
