"""What a commit has to do: pure decisions on a manifest and a commit record.

A write with an identity (app, batch) has to enter the queue once, however often Spark commits
it. Where a repeat is recognised, in this order:

1. In the **commit record**, ``<prefix>/app=<id>/_commit.json``: the highest batch of the app
   known to be committed, and the queue's next sequence just after. It is written after the
   append, so it may lag; it never runs ahead.
2. In the **manifest**: a queued entry of the app with this batch number or a higher one. This
   is decided on the very manifest the compare-and-swap replaces, so of two drivers that commit
   the same batch at once one wins and the other finds it.
3. What both cannot see is a commit whose record is missing (a crash in between) and whose
   entries a consumer has dequeued already. Such a batch is appended again, and the reader's
   :class:`~opendata_buffer.consumer.transactions.TransactionFilter` drops it: the entries of a
   batch are contiguous, so a second group of the same batch is a repeat.

The filter tells two groups apart by the gap between them. There is none when the queue ran
empty and nobody else appended; then the commit puts an empty batch in between (``Separate``).
It is needed only if an entry of ours can have been dequeued unseen, that is if the manifest's
first sequence is beyond the one in the record: every commit of a later batch came after that.
An idle queue with one writer has first == next == the record's sequence, so it never pays.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from opendata_buffer.errors import CorruptData, QueueReset
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.formats.manifest import Manifest

__all__ = [
    "ALREADY_DONE",
    "APPEND",
    "SEPARATE",
    "AlreadyDone",
    "Append",
    "CommitRecord",
    "Decision",
    "Separate",
    "decide",
    "is_queued",
    "record_key",
    "transaction_prefix",
]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """What is surely committed of one app.

    Attributes:
        batch: Highest committed batch.
        next_sequence: The queue's next sequence just after that batch.
    """

    batch: int
    next_sequence: int

    def to_json(self) -> bytes:
        """The object's bytes."""
        return json.dumps({"version": _VERSION, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, key: str, raw: bytes) -> CommitRecord:
        """Read the object's bytes; ``key`` is for messages.

        Raises:
            CorruptData: They are no commit record of this version.
        """
        try:
            fields = json.loads(raw)
            version, batch, next_sequence = (
                fields[name] for name in ("version", "batch", "next_sequence")
            )
            if version == _VERSION and all(
                type(each) is int and each >= 0 for each in (batch, next_sequence)
            ):
                return cls(batch, next_sequence)
        except (ValueError, KeyError, TypeError):
            pass
        raise CorruptData(
            f"commit record {key!r} is not readable: {raw[:100]!r}. It remembers which batch of "
            "a query was written last. If you delete it, the manifest and the reader's filter "
            "still recognise repeats."
        )


@dataclass(frozen=True, slots=True)
class Append:
    """Append the group."""


@dataclass(frozen=True, slots=True)
class Separate:
    """Append an empty batch and the group: the filter needs a gap to recognise a repeat."""


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """The batch is committed; there is nothing to append."""


APPEND = Append()
SEPARATE = Separate()
ALREADY_DONE = AlreadyDone()

Decision = Append | Separate | AlreadyDone


def transaction_prefix(prefix: str, transaction: Transaction) -> str:
    """The directory of a transaction's batches, with a slash at the end."""
    return f"{prefix}/app={transaction.app}/batch={transaction.batch}/"


def record_key(prefix: str, app: str) -> str:
    """Key of an app's commit record; no batch has such a name, so the collector spares it."""
    return f"{prefix}/app={app}/_commit.json"


def decide(
    manifest: Manifest,
    record: CommitRecord | None,
    transaction: Transaction,
    *,
    prefix: str,
    key: str,
) -> Decision:
    """What a commit does to a manifest.

    Args:
        manifest: The manifest that the compare-and-swap will replace.
        record: The app's commit record, read before the manifest.
        transaction: Identity of the write.
        prefix: The queue's data prefix.
        key: The manifest's key; for messages.

    Raises:
        QueueReset: The record knows of sequences the queue has not reached (failure F4).
    """
    # "At least" and not "equal", as Delta's txnVersion rule: a driver that lost its place may
    # come back with a batch older than the last one.
    if record is not None and record.batch >= transaction.batch:
        return ALREADY_DONE
    if record is not None and record.next_sequence > manifest.next_sequence:
        raise QueueReset(
            f"app {transaction.app!r} committed batch {record.batch} up to sequence "
            f"{record.next_sequence - 1}, but manifest {key!r} ends at "
            f"{manifest.next_sequence - 1}: it was deleted, recreated or restored from an old "
            "copy. Restore it (bucket versioning). If the queue was emptied on purpose, delete "
            f"{record_key(prefix, transaction.app)!r} as well."
        )
    if is_queued(manifest, prefix, transaction):
        return ALREADY_DONE
    unseen = manifest.first_sequence > (record.next_sequence if record is not None else 0)
    if unseen and manifest.entry_count == 0:
        return SEPARATE
    return APPEND


def is_queued(manifest: Manifest, prefix: str, transaction: Transaction) -> bool:
    """Whether the queue has an entry of this batch, or of a later one, of the same app.

    Batches of an app enter in rising order, so its last entry tells. That is found from the end
    as bytes: decoding 100,000 queued entries on each commit would dominate it.
    """
    raw = manifest.raw
    start = f"{prefix}/app={transaction.app}/batch=".encode()
    position = raw.rfind(start)
    while position >= 0:
        # The payload of a range may hold the same text; but only a location has its own length
        # in the two bytes before it, and a positive answer is confirmed by walking the entries.
        found = _location_at(raw, position, prefix)
        if found is not None and found.txn is not None:
            if found.txn.batch < transaction.batch:
                return False
            if manifest.find(found.location) is not None:
                return True
        position = raw.rfind(start, 0, position)
    return False


def _location_at(raw: bytes, position: int, prefix: str) -> _Found | None:
    length = int.from_bytes(raw[max(0, position - 2) : position], "little")
    try:
        location = raw[position : position + length].decode()
    except UnicodeDecodeError:
        return None
    parts = parse_location(location, prefix)
    return None if parts is None else _Found(location, parts.txn)


@dataclass(frozen=True, slots=True)
class _Found:
    location: str
    txn: Transaction | None
