"""Transaction markers: the entries that commit or roll back a transaction in one queue, once.

The CONTINUE_TXN messages of a producer are undecided until a marker follows them: an ACK_TXN
message with a clock beyond theirs commits them, one with a clock before them rolls them back. A
marker is appended only where the very manifest that it goes into shows the producer undecided.
Undecided entries do not leave a manifest, so that check is reliable, and writing the same marker
again, after a crash or in another process, does nothing (failure F39).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from opendata_buffer.concurrency import together
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
    "MarkerWriter",
    "ROLL_BACK",
    "TransactionMarker",
    "undecided_markers",
    "undecided_of_app",
    "write_markers",
]

ROLL_BACK = 1
"""Clock of a marker that rolls back; clocks of transactions begin beyond it."""


@dataclass(frozen=True, slots=True)
class TransactionMarker:
    """How one producer's transaction ends in one queue.

    Attributes:
        producer: 6 bytes; it writes nothing afterwards.
        clock: Of the marker: beyond the last message, or :data:`ROLL_BACK`.
        txn: App and batch number, part of the entry's name.
        since: A sequence before which the producer wrote nothing; those entries are not decoded.
    """

    producer: bytes
    clock: int
    txn: Transaction | None = None
    since: int = 0


def undecided_of_app(
    manifest: Manifest, prefix: str, app: str, since: int = 0
) -> dict[bytes, Undecided]:
    """An app's undecided transactions by producer, those that began at ``since`` or later."""
    if f"{prefix}/app={app}/".encode() not in manifest.raw:
        return {}
    return {
        producer: each
        for producer, each in _undecided(manifest, prefix, since).items()
        if each.txn is not None and each.txn.app == app
    }


def undecided_markers(
    manifest: Manifest, prefix: str, markers: Sequence[TransactionMarker]
) -> tuple[TransactionMarker, ...]:
    """Those of the markers whose producer the manifest shows undecided."""
    # A message's UUID ends with its producer: where the manifest's bytes do not contain it,
    # nothing has to be decoded.
    raw = manifest.raw
    named = [each for each in markers if f"-{each.producer.hex()}/".encode() in raw]
    if not named:
        return ()
    found = _undecided(manifest, prefix, min(each.since for each in named))
    return tuple(each for each in named if each.producer in found)


def _undecided(manifest: Manifest, prefix: str, since: int) -> dict[bytes, Undecided]:
    first = max(since, manifest.first_sequence)
    if first == manifest.first_sequence:
        locations = manifest.locations()  # several times faster than the entries
    else:
        locations = [entry.location for entry in manifest.entries(first)]
    return undecided(enumerate(locations, first), prefix)


def write_markers(
    queue: Queue,
    prefix: str,
    markers: Sequence[TransactionMarker],
    *,
    store: Put,
    runtime: Runtime,
    ahead_ms: int,
    stored: Mapping[tuple[bytes, int], NewEntry] | None = None,
) -> int:
    """End transactions in one queue, in one write, except those that have ended there.

    May be repeated at any time and from any process.

    Args:
        queue: Which; it begins with the manifest it remembers.
        prefix: Its data prefix.
        markers: How to end them.
        store: Where the markers' batches go; they are empty.
        runtime: Clock and names.
        ahead_ms: How far the names of these batches are ahead of time: the collector's grace
            period, so that they outlive a pause of this process before they are appended.
        stored: By producer and clock, entries whose batches are stored already.

    Returns:
        How many were undecided, and were ended by this call.

    Raises:
        CommitStateUnknown: They may have been written. Repeat it.
        QueueReset, CorruptManifest, Conflict, StorageError: As :meth:`Queue.append`.
    """
    wanted = tuple(markers)
    while wanted:
        todo = wanted
        entries = [
            (stored or {}).get((each.producer, each.clock))
            or _store_marker(prefix, each, store, runtime, ahead_ms)
            for each in todo
        ]

        def guard(
            before: Manifest, todo: tuple[TransactionMarker, ...] = todo
        ) -> tuple[TransactionMarker, ...] | None:
            left = undecided_markers(before, prefix, todo)
            return None if left == todo else left

        # A full manifest takes them, because without them it cannot be emptied (failure F35).
        outcome = queue.append(entries, guard=guard, makes_room=True)
        if isinstance(outcome, int):
            return len(todo)
        wanted = outcome
    return 0


def _store_marker(
    prefix: str, marker: TransactionMarker, store: Put, runtime: Runtime, ahead_ms: int
) -> NewEntry:
    """The entry of a marker. Its empty batch is stored; the entry is not appended."""
    name = later_ulid(runtime.ulid(), ahead_ms)
    message = build_uuid(marker.producer, marker.clock, ACK_TXN | FINAL)
    location = batch_key(prefix, name, marker.txn, message)
    store.put(location, encode_batch([]))
    return NewEntry(location)


class MarkerWriter:
    """Writes markers into the queues of a topic, several queues at once. Not thread-safe.

    Batches are put with the retries of a manifest's change: a committed transaction without its
    markers blocks its writer, so an outage of some seconds must not end the attempt.

    Args:
        queue_of: The queue of a partition, by its name; each is used by one thread at a time.
        store, config, runtime: Of the topic.
        ahead_ms: As for :func:`write_markers`.
    """

    def __init__(
        self,
        store: Put,
        config: BackoffSettings,
        queue_of: Callable[[str], Queue],
        runtime: Runtime,
        *,
        ahead_ms: int,
    ) -> None:
        self._store = store
        self._config = config
        self._queue_of = queue_of
        self._runtime = runtime
        self._ahead_ms = ahead_ms
        self._prepared: defaultdict[str, dict[tuple[bytes, int], NewEntry]] = defaultdict(dict)
        """By partition, then producer and clock."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :class:`.Put`; transient errors are retried until the deadline."""
        queue_retry(self._runtime, self._config)(self._store.put, key, data)

    def prepare(self, name: str, marker: TransactionMarker) -> None:
        """Store a marker's batch, so that :meth:`write` does not have to. It decides nothing."""
        entry = _store_marker(name, marker, self, self._runtime, self._ahead_ms)
        self._prepared[name][marker.producer, marker.clock] = entry

    def drop_prepared(self, producer: bytes, clocks: Mapping[str, int]) -> None:
        """Do not append the prepared markers of a producer, given by partition, any more."""
        for name, clock in clocks.items():
            self._prepared[name].pop((producer, clock), None)

    def write(self, markers: Mapping[str, Collection[TransactionMarker]]) -> int:
        """:func:`write_markers` in all of these partitions at once.

        Returns:
            How many transactions were ended, counted per partition.

        Raises:
            OpenDataBufferError: Of the first partition that failed; the others were written.
        """

        def write(name: str) -> int:
            return write_markers(
                self._queue_of(name),
                name,
                tuple(markers[name]),
                store=self,
                runtime=self._runtime,
                ahead_ms=self._ahead_ms,
                stored=self._prepared.get(name),
            )

        return sum(together(self._runtime, write, markers))

    def expire_producer(self, producer: bytes, clock: int, names: Collection[str]) -> None:
        """Let readers forget a producer that has nothing undecided and writes nothing more.

        Raises:
            OpenDataBufferError: In some partitions they keep it for :data:`.HORIZON_DAYS` days.
        """

        def expire(name: str) -> None:
            marker = TransactionMarker(producer, clock)
            entry = _store_marker(name, marker, self, self._runtime, 0)
            self._queue_of(name).append([entry])

        together(self._runtime, expire, names)
