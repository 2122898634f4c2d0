"""Transaction markers: the entries that commit or roll back a transaction in one queue, once.

A marker is an ACK_TXN message: with a clock beyond those of the producer's CONTINUE_TXN messages
it commits them, with a clock before them it rolls them back. It is appended only where the very
manifest that it goes into shows the producer undecided. Undecided entries do not leave a manifest,
so writing the same marker again, after a crash or in another process, does nothing (failure F39).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch, later_ulid
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages import ACK_TXN, FINAL, Undecided, build_uuid, undecided
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, in_parallel, queue_retry
from opendata_buffer.stores.base import Put

ROLL_BACK = 1
"""Clock of a marker that rolls back; clocks of transactions begin beyond it."""


@dataclass(frozen=True, slots=True)
class TransactionMarker:
    """The end of one producer's transaction in one queue.

    Attributes:
        producer: 6 bytes; it writes nothing afterwards.
        clock: Beyond the last message, or :data:`ROLL_BACK`.
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
    first = manifest.first_sequence
    if since <= first:
        return undecided(enumerate(manifest.locations(), first), prefix)  # faster than entries
    entries = manifest.entries(since)
    return undecided(((each.sequence, each.location) for each in entries), prefix)


class MarkerWriter:
    """Writes markers into the queues of a topic, several queues at once. Not thread-safe.

    Args:
        store, config, runtime: Of the topic.
        queue_of: The queue of a partition, by its name; each is used by one thread at a time.
        ahead_ms: How far the names of the markers' batches are ahead of time: the collector's
            grace period, so that they outlive a pause of this process before they are appended.
    """

    def __init__(
        self,
        store: Put,
        config: QueueConfig,
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

    def prepare(self, name: str, marker: TransactionMarker) -> None:
        """Store a marker's batch, so that :meth:`write` does not have to. It decides nothing."""
        entry = self._store_batch(name, marker, self._ahead_ms)
        self._prepared[name][marker.producer, marker.clock] = entry

    def drop_prepared(self, producer: bytes, clocks: Mapping[str, int]) -> None:
        """Do not append the prepared markers of a producer, given by partition, any more."""
        for name, clock in clocks.items():
            self._prepared[name].pop((producer, clock), None)

    def write(self, markers: Mapping[str, Collection[TransactionMarker]]) -> int:
        """End transactions in these partitions at once, except those that have ended there.

        May be repeated at any time and from any process. Returns how many transactions this call
        ended, counted per partition.

        Raises:
            CommitStateUnknown: Markers may have been written. Repeat it.
            OpenDataBufferError: As :meth:`.Queue.append`, of the first partition that failed; the
                others were written.
        """
        ended = in_parallel(self._runtime, lambda name: self._write(name, markers[name]), markers)
        return sum(ended)

    def _write(self, name: str, markers: Collection[TransactionMarker]) -> int:
        queue, wanted = self._queue_of(name), tuple(markers)
        while wanted:
            todo = wanted
            entries = [
                self._prepared[name].get((each.producer, each.clock))
                or self._store_batch(name, each, self._ahead_ms)
                for each in todo
            ]

            def guard(
                before: Manifest, todo: tuple[TransactionMarker, ...] = todo
            ) -> tuple[TransactionMarker, ...] | None:
                left = undecided_markers(before, name, todo)
                return None if left == todo else left

            # A full manifest takes them, because without them it cannot be emptied (failure F35).
            outcome = queue.append(entries, guard=guard, makes_room=True)
            if isinstance(outcome, int):
                return len(todo)
            wanted = outcome
        return 0

    def expire_producer(self, producer: bytes, clock: int, names: Collection[str]) -> None:
        """Let readers forget a producer that has nothing undecided and writes nothing more.

        After an error some readers keep it for :data:`.HORIZON_DAYS` days.
        """

        def expire(name: str) -> None:
            marker = TransactionMarker(producer, clock)
            self._queue_of(name).append([self._store_batch(name, marker, 0)])

        in_parallel(self._runtime, expire, names)

    def _store_batch(self, name: str, marker: TransactionMarker, ahead_ms: int) -> NewEntry:
        """The entry of a marker. Its empty batch is stored; the entry is not appended."""
        ulid = later_ulid(self._runtime.ulid(), ahead_ms)
        message = build_uuid(marker.producer, marker.clock, ACK_TXN | FINAL)
        location = batch_key(name, ulid, marker.txn, message)
        # A committed transaction without its markers blocks its writer, so an outage of some
        # seconds must not end the attempt.
        queue_retry(self._runtime, self._config)(self._store.put, location, encode_batch([]))
        return NewEntry(location)
