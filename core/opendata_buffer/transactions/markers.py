"""How an undecided transaction of one queue is ended: by an acknowledgement, exactly once.

What a producer wrote as CONTINUE_TXN messages stays undecided until an ACK_TXN message of it
follows: one beyond their clocks commits them, one before them rolls them back. The entry is
appended only where the very manifest that it goes into shows the producer undecided. Undecided
entries do not leave a manifest before they are decided, so this tells for sure, and whoever
ends the same transaction again, after a crash or beside somebody else, does nothing (failure
F39).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key, later_ulid
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages.message_ids import ACK_TXN, FINAL, build_uuid
from opendata_buffer.messages.sequencer import Undecided, undecided
from opendata_buffer.queue.queue import Queue
from opendata_buffer.retry import BackoffSettings, queue_retry
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Put

__all__ = [
    "TransactionMarker",
    "PatientPut",
    "ROLL_BACK",
    "acknowledgement",
    "open_endings",
    "settle",
    "undecided_of",
]


ROLL_BACK = 1
"""Clock of an acknowledgement that rolls back; clocks of transactions begin beyond it."""


@dataclass(frozen=True, slots=True)
class TransactionMarker:
    """How one producer's transaction is to end in one queue.

    Attributes:
        producer: 6 bytes; it writes nothing afterwards.
        clock: Of the acknowledgement: beyond the last message, or :data:`ROLL_BACK`.
        txn: Whose transaction it is; part of the entry's name.
        since: A sequence before which the producer wrote nothing; saves decoding those entries.
    """

    producer: bytes
    clock: int
    txn: Transaction | None = None
    since: int = 0


def undecided_of(
    manifest: Manifest, prefix: str, app: str, since: int = 0
) -> dict[bytes, Undecided]:
    """An app's undecided transactions by producer, as far as they began at ``since`` or later.

    Args:
        manifest: Of the queue.
        prefix: Its data prefix.
        app: The app id.
        since: Earlier entries are not decoded.

    Raises:
        CorruptManifest: Entries break the format.
    """
    if f"{prefix}/app={app}/".encode() not in manifest.raw:
        return {}
    found = _undecided(manifest, prefix, since)
    return {
        who: each for who, each in found.items() if each.txn is not None and each.txn.app == app
    }


def open_endings(
    manifest: Manifest, prefix: str, endings: Sequence[TransactionMarker]
) -> tuple[TransactionMarker, ...]:
    """Those whose producer the manifest shows undecided.

    Raises:
        CorruptManifest: Entries break the format.
    """
    # The last part of the text of a message's UUID is its producer: one search of bytes tells
    # most manifests without it apart, and decodes nothing.
    raw = manifest.raw
    named = [each for each in endings if f"-{each.producer.hex()}/".encode() in raw]
    if not named:
        return ()
    found = _undecided(manifest, prefix, min(each.since for each in named))
    return tuple(each for each in named if each.producer in found)


class PatientPut:
    """A store whose puts are tried as long as a change of a manifest is.

    What is committed and cannot be acknowledged keeps a writer from going on, so a store that is
    down for some seconds must not end it here when it would not at the append.

    Args:
        store: Where objects are put.
        settings: Deadline and backoff.
        runtime: Clock and jitter.
    """

    def __init__(self, store: Put, settings: BackoffSettings, runtime: Runtime) -> None:
        self._store = store
        self._settings = settings
        self._runtime = runtime

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :class:`.Put`."""
        queue_retry(self._runtime, self._settings)(self._store.put, key, data)


def settle(
    queue: Queue,
    prefix: str,
    endings: Sequence[TransactionMarker],
    *,
    store: Put,
    runtime: Runtime,
    ahead_ms: int,
    stored: Mapping[tuple[bytes, int], NewEntry] | None = None,
) -> int:
    """End transactions in one queue, in one write; those that are decided there already are not.

    Free to repeat at any time and from any process.

    Args:
        queue: Which; it begins with the manifest it remembers.
        prefix: Its data prefix.
        endings: How to end them.
        store: Where the acknowledgements' batches go; they are empty.
        runtime: Clock and names.
        ahead_ms: How far the names of these batches are ahead of time: the collector's grace
            period, so that a process that is paused here does not lose them.
        stored: By producer and clock, acknowledgements whose batches are stored already; see
            :func:`acknowledgement`. Those of the others are stored first.

    Returns:
        How many were undecided, and are ended now by this call.

    Raises:
        CommitStateUnknown: It may have landed. Repeat it.
        QueueReset, CorruptManifest, Conflict, StorageError: As :meth:`Queue.append`.
    """
    wanted = tuple(endings)
    while wanted:
        todo = wanted
        entries = [
            (stored or {}).get((each.producer, each.clock))
            or acknowledgement(prefix, each, store, runtime, ahead_ms)
            for each in todo
        ]

        def guard(
            before: Manifest, todo: tuple[TransactionMarker, ...] = todo
        ) -> tuple[TransactionMarker, ...] | None:
            left = open_endings(before, prefix, todo)
            return None if left == todo else left

        # Refused by a full manifest, it would keep it full (failure F35).
        outcome = queue.append(entries, guard=guard, makes_room=True)
        if isinstance(outcome, int):
            return len(todo)
        wanted = outcome
    return 0


def _undecided(manifest: Manifest, prefix: str, since: int) -> dict[bytes, Undecided]:
    first = max(since, manifest.first_sequence)
    if first == manifest.first_sequence:
        locations = manifest.locations()  # several times faster than the entries
    else:
        locations = [entry.location for entry in manifest.entries(first)]
    return undecided(enumerate(locations, first), prefix)


def acknowledgement(
    prefix: str, ending: TransactionMarker, store: Put, runtime: Runtime, ahead_ms: int
) -> NewEntry:
    """The entry that ends a transaction. Its batch is stored; that decides nothing yet.

    Args:
        prefix, store, runtime, ahead_ms: As for :func:`settle`.
        ending: How it is to end.

    Raises:
        StorageError: The batch could not be stored.
    """
    message = build_uuid(ending.producer, ending.clock, ACK_TXN | FINAL)
    name = later_ulid(runtime.ulid(), ahead_ms)
    location = batch_key(prefix, name, ending.txn, message)
    store.put(location, encode_batch([]))
    return NewEntry(location)
