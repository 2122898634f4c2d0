"""What an append has to do: pure decisions on a manifest and a commit record.

A write with an identity (app, batch) has to enter the queue once, however often Spark commits
it. Where a repeat is recognised, in this order:

1. In the **commit record**, ``<prefix>/app=<id>/_commit.json``: the highest batch of the app
   known to be committed, and the queue's next sequence just after. It is written after the
   append, so it may lag; it never runs ahead.
2. In the **manifest**: a queued entry of the app with this batch number or a higher one. This
   is decided on the very manifest the compare-and-swap replaces, so of two drivers that append
   the same batch at once one wins and the other finds it.
3. What both cannot see is a commit whose record is missing (a crash in between) and whose
   entries a consumer has dequeued already. Such a batch is appended again, and the reader's
   :class:`~opendata_buffer.consumer.isolation.TransactionFilter` drops it: the entries of a
   batch are contiguous, so a second group of the same batch is a repeat.

The filter tells two groups apart by the gap between them. There is none when the queue ran
empty and nobody else appended; then an empty batch is put in between (``Separate``). It is
needed only if an entry of ours can have been dequeued unseen, that is if the manifest's first
sequence is beyond the one in the record: every commit of a later batch came after that. An idle
queue with one writer has first == next == the record's sequence, so it never pays.

All of that holds within one query. Another query counts its batches from 0 as well, and each of
them would be taken for a repeat and be lost. So the record names the query that an app id
belongs to, from before its first append, and any other one is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from opendata_buffer.errors import QueueReset
from opendata_buffer.formats.keys import Transaction, parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.transactions.commit_record import CommitRecord, record_key

__all__ = [
    "ALREADY_DONE",
    "APPEND",
    "SEPARATE",
    "AlreadyDone",
    "Append",
    "Decision",
    "Expired",
    "Kind",
    "Separate",
    "decide",
    "is_queued",
    "transaction_prefix",
]


@dataclass(frozen=True, slots=True)
class Append:
    """Append the group."""


@dataclass(frozen=True, slots=True)
class Separate:
    """Append an empty batch and the group: the filter needs a gap to recognise a repeat."""


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """The batch is committed; there is nothing to append.

    Attributes:
        queued: Locations of the batch that the manifest shows; empty where the record tells,
            or a later batch of the app.
    """

    queued: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Expired:
    """The uploads may be too old by now: look at them again before they are appended."""


APPEND = Append()
SEPARATE = Separate()
ALREADY_DONE = AlreadyDone()

Decision = Append | Separate | AlreadyDone | Expired
Kind = type[Append] | type[Separate] | type[AlreadyDone] | type[Expired]


def transaction_prefix(prefix: str, transaction: Transaction) -> str:
    """The directory of a transaction's batches, with a slash at the end."""
    return f"{prefix}/app={transaction.app}/batch={transaction.batch}/"


def decide(
    manifest: Manifest,
    record: CommitRecord | None,
    transaction: Transaction,
    *,
    prefix: str,
    key: str,
) -> Decision:
    """What an append does to a manifest.

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
        folder = transaction_prefix(prefix, transaction)
        locations = (entry.location for entry in manifest.entries())
        return AlreadyDone(tuple(each for each in locations if each.startswith(folder)))
    unseen = manifest.first_sequence > (record.next_sequence if record is not None else 0)
    if unseen and manifest.entry_count == 0:
        return SEPARATE
    return APPEND


def is_queued(manifest: Manifest, prefix: str, transaction: Transaction) -> bool:
    """Whether the queue has an entry of this batch, or of a later one, of the same app.

    Batches of an app enter in rising order, so its last entry tells. That is found from the end
    as bytes: decoding 100,000 queued entries on each append would dominate it.
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
