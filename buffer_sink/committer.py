"""Commit writes: to a queue by one compare-and-swap, to all partitions of a topic or to none.

The problem: the tasks of a write upload batches one by one, but the write must become visible as a
whole. It must also become visible only once, however often Spark commits it (decision 0008).

The idea: tasks only upload objects. No manifest names these objects until the driver appends their
entries: with one compare-and-swap for a queue, with a transaction for a topic. A write may carry an
identity (app, batch), by which a repeated commit is recognised.

What can go wrong: until the append, the uploads look like orphans to a garbage collector, which
deletes them after its grace period (failure F5, decision 0012). :class:`UploadAges` therefore
checks their age before the append and, if the process was suspended in between, after it.
"""

from __future__ import annotations

import logging
import os.path
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import TypeVar

from buffer_sink.options import SinkOptions
from opendata_buffer import errors, metrics, outcomes
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS, QueueConfig
from opendata_buffer.formats.batch import (
    Transaction,
    batch_key,
    encode_batch,
    location_timestamp_ms,
    parse_location,
)
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.hints import Action, Hint
from opendata_buffer.messages import CONTINUE_TXN, build_uuid, new_producer_id
from opendata_buffer.option_reader import in_options
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.neighbours import check_manifest_path
from opendata_buffer.queue.ownership import check_owner, claim_for_writing
from opendata_buffer.queue.queue import OpenPause, Queue
from opendata_buffer.runtime import Moment, Runtime, in_parallel
from opendata_buffer.stores.base import List, Store
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.topic.topic import partition_config
from opendata_buffer.transactions import (
    Attempt,
    CommitRecord,
    TransactionCoordinator,
    claimed,
    record_key,
    record_object,
)

log = logging.getLogger(__name__)

_PAGE = 10_000
_RECORD_DEADLINE_MS = 10_000  # For one change of a record; a micro-batch waits for it.

T = TypeVar("T")

FIRST_CLOCK = 2  # The first message of a write; an acknowledgement with clock 1 rolls it back.
_TASK_BITS = 32


@dataclass(frozen=True, slots=True)
class TopicWrite:
    """One attempt of a write to the partitions of a topic, as the driver found them.

    Attributes:
        active: Names of the active partitions, in the topic's order.
        draining: Names of the draining partitions, which get no more batches.
        producer: The id of this attempt, 6 bytes.
        app: The app id for a write that was not given one.
    """

    active: tuple[str, ...]
    draining: tuple[str, ...]
    producer: bytes
    app: str

    @classmethod
    def planned(cls, description: TopicDescription, runtime: Runtime) -> TopicWrite:
        """Return an attempt that writes to the topic in its current state."""
        chance = sha256(runtime.ulid().encode()).digest()  # 80 bits of a ULID are random
        producer = new_producer_id(lambda count: chance[:count])
        app = f"write-{runtime.ulid()}"
        return cls(tuple(description.active), tuple(description.draining), producer, app)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all partitions of the topic."""
        return (*self.active, *self.draining)

    def transaction(self, given: Transaction | None) -> Transaction:
        """Return the identity of the write: the given one, or one made for this attempt."""
        return given or Transaction(self.app, 0)

    def clock(self, task: int, index: int) -> int:
        """Compute the clock of a batch.

        Clocks rise in the order in which a partition gets batches.

        Args:
            task: Spark's number of the task, below 2^31. Each task has its own range of clocks.
            index: The number of earlier batches of this task for the same partition.

        Returns:
            The clock.
        """
        return FIRST_CLOCK + (task << _TASK_BITS) + index

    def location(self, partition: str, ulid: str, txn: Transaction, clock: int) -> str:
        """Return the object key of a batch of this attempt."""
        return batch_key(partition, ulid, txn, build_uuid(self.producer, clock, CONTINUE_TXN))


@dataclass(frozen=True, slots=True)
class UploadedBatch:
    """A batch object that is stored, but not queued yet.

    Attributes:
        location: The object's key.
        records: Records in the batch.
        metadata: The metadata ranges of its queue entry.
        partition: The name of its partition; None for a single queue.
        clock: The clock of its message in that partition; 0 for a single queue.
    """

    location: str
    records: int
    metadata: tuple[Metadata, ...]
    partition: str | None = None
    clock: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """All uploads of one write, in the order of tasks and rows: queued together or not at all.

    The other attributes are those of the write's tasks (:class:`~buffer_sink.writer.WriteTask`).
    """

    planned: Moment
    uploads: tuple[UploadedBatch, ...]
    transaction: Transaction | None = None
    query: str | None = None
    topic: TopicWrite | None = None

    @property
    def entries(self) -> list[NewEntry]:
        """The queue entries to append."""
        return [NewEntry(upload.location, upload.metadata) for upload in self.uploads]

    @property
    def locations(self) -> tuple[str, ...]:
        """The object keys of the uploads."""
        return tuple(upload.location for upload in self.uploads)


@in_options()
def claim(options: SinkOptions, store: Store, runtime: Runtime) -> None:
    """Claim the queue of a write before its first upload, unless it has an owner marker.

    A queue without a marker would take the uploads for another client's batches (failure F51).

    Args:
        options: The options of the write.
        store: The opened store.
        runtime: Clock and sleep.

    Raises:
        InvalidInput: The options name a manifest, but the store holds a topic. Or
            :func:`.claim_for_writing` refuses the queue.
    """
    queue = options.queue
    check_manifest_path(store, queue)
    if check_owner(store, queue, runtime=runtime) is None:
        claim_for_writing(store, queue, runtime=runtime, grace_ms=options.grace_ms)


class UploadAges:
    """Checks whether the uploads of a write are still safe from garbage collectors.

    A collector deletes an object once both the time in its name and the time of its upload are
    older than the grace period. The time when the write was planned, or a listing, shows the age of
    the uploads. Partitions may have different grace periods. Ages are then compared with the
    shortest one, and waits use the longest one.
    """

    def __init__(self, store: List, options: SinkOptions, runtime: Runtime) -> None:
        self._default_ms = options.grace_ms or DEFAULT_GRACE_PERIOD_MS
        self.known_ms: set[int] = set()
        """The grace periods of the queues that were claimed."""
        self._max_write_ms = options.max_write_duration_ms
        self._request_ms = options.queue.timeout_ms
        self._store = store
        self._runtime = runtime

    @property
    def grace_ms(self) -> int:
        """The grace period to compare ages with, milliseconds: the shortest of claimed queues."""
        return min(self.known_ms, default=self._default_ms)

    def oldest(self, group: Group) -> Moment:
        """Find the time of the group's oldest upload, as a collector may see it.

        An upload may be at most half of the grace period old. The other half is left for the
        append.

        Args:
            group: The uploads of a write.

        Returns:
            The time.

        Raises:
            TransientStorageError: An upload is older than that, or gone.
        """
        now = Moment.now(self._runtime)
        # No upload is older than the plan. So for most writes the driver's clocks show, without a
        # request, that all uploads are young. For an older write a listing has to show it, by the
        # store's clock.
        age_ms = group.planned.age_ms(now) if group.planned.precedes(now) else None
        if age_ms is None or age_ms > self.grace_ms / 2:
            age_ms = self.oldest_ms(group.locations)
            if age_ms is None or age_ms > self.grace_ms / 2:
                raise self.too_old()
        return Moment(now.wall_ms - round(age_ms), now.monotonic - age_ms / 1000)

    def has_expired(self, oldest: Moment) -> bool:
        """Return whether the grace period has passed since ``oldest``, by either clock.

        The monotonic clock alone would not do: it stops while a machine is suspended.
        """
        return oldest.age_ms(Moment.now(self._runtime)) > self.grace_ms

    def oldest_ms(self, locations: Collection[str]) -> float | None:
        """Measure the age of the oldest object, as a collector sees it.

        Args:
            locations: The keys of the objects.

        Returns:
            Milliseconds by the store's clock; negative if the time in a name is in the future. None
            if an object is gone.
        """
        missing = set(locations)
        shared = os.path.commonprefix(list(locations))  # noqa: RUF071 - up to any character
        folder = shared.rpartition("/")[0] + "/"
        after, last = min(missing)[:-1], max(missing)
        ages_ms: list[float] = []
        while True:
            page = self._store.list(folder, start_after=after, limit=_PAGE)
            for each in page.objects:
                if each.key in missing:
                    missing.remove(each.key)
                    named_ms = location_timestamp_ms(each.key) or 0
                    ages_ms.append(page.now_ms - max(named_ms, each.last_modified_ms))
            if not missing:
                return max(ages_ms)
            if not page.truncated or page.objects[-1].key >= last:
                return None
            after = page.objects[-1].key

    def outlived_collector(self, locations: Collection[str]) -> bool:
        """Wait until no collector can delete the objects; return whether all still exist.

        After the wait, a collector that read the manifest before this call has finished its
        deletes.
        """
        # After it has read a manifest, a collector starts deletes for a quarter of the grace
        # period. The last delete may then take as long as a request may take.
        wait_s = (max(self.known_ms) / 4 + self._request_ms) / 1000
        log.warning(
            "objects are older than the collector's grace period: waiting %.0f s to see that none "
            "of them is deleted",
            wait_s,
        )
        self._runtime.sleep(wait_s)
        return self.oldest_ms(locations) is not None

    def too_old(self) -> errors.TransientStorageError:
        """Return the error for uploads that are gone, or may be deleted before they are queued."""
        return errors.TransientStorageError(
            f"the write took so long that its first batches may be deleted as orphans, or are "
            f"gone: it may take {self._max_write_ms / 1000:.0f} s from its plan to its commit. "
            "Nothing was appended; write again, with smaller writes (maxBytesPerTrigger) or more "
            "partitions."
        )


class UploadCommitter:
    """Makes the uploads of a write visible; the common part of queue and topic commits.

    Args:
        store: The opened store.
        options: The options of the sink.
        runtime: Clock, threads and random numbers.
        open_pause: Makes a queue's broker pause while this process appends; None to append without
            asking a broker.
    """

    def __init__(
        self,
        store: Store,
        options: SinkOptions,
        runtime: Runtime,
        open_pause: OpenPause | None = None,
    ) -> None:
        self._store = store
        self._config = options.queue
        self._grace_ms = options.grace_ms
        self._runtime = runtime
        self._ages = UploadAges(store, options, runtime)
        self._open_pause = open_pause
        self._queues: dict[str, Queue] = {}

    def disconnect(self) -> None:
        """Close connections that outlive an append; the next append opens new ones."""
        for queue in self._queues.values():
            queue.disconnect()

    def _queue(self, config: QueueConfig, uploaded: Collection[str] = ()) -> Queue:
        # The first use in this process checks the queue. It refuses a store without
        # compare-and-swap (failure F12); the prefix of another queue, whose collector would delete
        # our batches (failure F7); and a manifest that was lost or restored from an old copy
        # (failure F4).
        if config.manifest_path not in self._queues:
            with in_options():
                claim = claim_for_writing(
                    self._store,
                    config,
                    runtime=self._runtime,
                    grace_ms=self._grace_ms,
                    uploaded=uploaded,
                )
            self._ages.known_ms.add(claim.grace_ms)
            # The append checks ages once, and may then compete with other writers until its
            # deadline. The age and the deadline together must stay below the grace period:
            # otherwise a collector may delete the uploads first (failure F5).
            config = config.with_timeout(max(1, min(config.timeout_ms, claim.grace_ms // 2)))
            self._queues[config.manifest_path] = Queue(
                self._store,
                config,
                runtime=self._runtime,
                role="producer",
                claim=claim,
                open_pause=self._open_pause,
            )
        return self._queues[config.manifest_path]

    def _close_after(self, group: Group) -> None:
        """Save how far the queues got (failure F4), unless a query will soon do so.

        A streaming query saves it again within a minute.
        """
        if group.query is None:  # Outside of a query, the process may end after this write.
            for queue in self._queues.values():
                queue.close()

    def _append_unexpired(
        self,
        queue: Queue,
        group: Group,
        entries: Sequence[NewEntry],
        guard: Callable[[Manifest], T | None],
        objects_missing: Callable[[int], errors.OpenDataBufferError],
    ) -> int | T:
        """Append entries while the uploads that they name are safe (failure F5).

        The entries name all uploads of the group.

        Args:
            queue: The queue to append to.
            group: The uploads.
            entries: The entries to append.
            guard: Gets the manifest that is about to be replaced. A result other than None stops
                the append.
            objects_missing: Makes an error from the first sequence that was appended. It is called
                if the append succeeded after the uploads had expired, and some of them are gone:
                the process was then suspended between its last look at the clock and the append.

        Returns:
            The first sequence, or the result of ``guard`` that stopped the append.

        Raises:
            TransientStorageError: Uploads are too old, or gone.
            OpenDataBufferError: The error of ``objects_missing``, or as :meth:`.Queue.append`.
        """
        while True:
            oldest = self._ages.oldest(group)

            def unexpired(before: Manifest, oldest: Moment = oldest) -> T | Moment | None:
                # Checked on every attempt: the process may have been paused since the last one.
                return oldest if self._ages.has_expired(oldest) else guard(before)

            outcome: int | T | Moment = queue.append(entries, guard=unexpired)
            # After the wait, every collector knows about the append. Uploads that still exist then
            # are queued, and stay.
            if (
                isinstance(outcome, int)
                and self._ages.has_expired(oldest)
                and not self._ages.outlived_collector(group.locations)
            ):
                raise objects_missing(outcome)
            if not isinstance(outcome, Moment):
                return outcome

    def _drop_repeat(self, group: Group, txn: Transaction) -> bool:
        """Log that a write was committed before; return False, because nothing is appended."""
        metrics.write_repeats_dropped.add(len(group.uploads))
        log.warning(
            "batch %d of app %s was committed before: %d records in %d batches are not appended "
            "again. After a restart of its query this is right; otherwise two writers share the "
            "txnAppId.",
            txn.batch, txn.app, sum(each.records for each in group.uploads), len(group.uploads),
        )  # fmt: skip
        return False


@dataclass(frozen=True, slots=True)
class Separate:
    """Append an empty batch before the group, so that the reader can recognise a repeat."""


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """The batch is committed: there is nothing to append.

    Attributes:
        queued: The batch's locations in the manifest. Empty if the commit record, or a later batch
            of the app, shows that it was committed.
    """

    queued: tuple[str, ...] = ()


Decision = Separate | AlreadyDone


def decide(
    manifest: Manifest,
    record: CommitRecord | None,
    transaction: Transaction,
    *,
    prefix: str,
    key: str,
) -> Decision | None:
    """Decide whether an append to a manifest would repeat a batch. A pure function.

    Args:
        manifest: The manifest that the append replaces.
        record: The app's commit record, read before the manifest; None if it does not exist.
        transaction: The batch to append.
        prefix: The queue's data path prefix.
        key: The manifest's key, for the error.

    Returns:
        None to append the group as it is; otherwise :class:`Separate` or :class:`AlreadyDone`.

    Raises:
        QueueReset: The record knows of sequences that the queue has not reached (failure F4).
    """
    # "At least" and not "equal", as in Delta's rule for txnVersion: a driver that was restored
    # from an older checkpoint may repeat a batch before the last one.
    if record is not None and record.batch >= transaction.batch:
        return AlreadyDone()
    if record is not None and record.next_sequence > manifest.next_sequence:
        raise errors.QueueReset(
            f"app {transaction.app!r} committed batch {record.batch} up to sequence "
            f"{record.next_sequence - 1}, but manifest {key!r} ends at "
            f"{manifest.next_sequence - 1}: it was deleted, recreated or restored from an old "
            "copy. Restore it (bucket versioning). If the queue was emptied on purpose, delete "
            f"{record_key(prefix, transaction.app)!r} as well."
        )
    if is_queued(manifest, prefix, transaction):
        folder = f"{prefix}/app={transaction.app}/batch={transaction.batch}/"
        locations = (entry.location for entry in manifest.entries())
        return AlreadyDone(tuple(each for each in locations if each.startswith(folder)))
    # The driver may have crashed before it wrote the record, and a consumer may have dequeued the
    # batch since. The batch is then appended again, and the reader's filter drops this second group
    # of entries. The filter tells two groups apart by the entries between them. An empty queue has
    # no such entries, so an empty batch is appended in between. It is not needed if all dequeued
    # entries came before the record.
    unseen = manifest.first_sequence > (record.next_sequence if record is not None else 0)
    return Separate() if unseen and manifest.entry_count == 0 else None


def is_queued(manifest: Manifest, prefix: str, transaction: Transaction) -> bool:
    """Return whether the queue has an entry of this batch, or of a later batch of the same app.

    Batches of an app are appended in rising order, so the app's last entry decides. The search for
    it goes through the manifest's bytes from the end. Decoding 100,000 queued entries would take
    longer than the rest of an append.
    """
    raw = manifest.raw
    start = f"{prefix}/app={transaction.app}/batch=".encode()
    position = raw.rfind(start)
    while position >= 0:
        # The payload of a metadata range may contain the same text. But only a location has its own
        # length in the two bytes before it. And before a positive answer, find() decodes the
        # entries to confirm it.
        length = int.from_bytes(raw[max(0, position - 2) : position], "little")
        location = raw[position : position + length].decode(errors="replace")
        parts = parse_location(location, prefix)
        if parts is not None and parts.txn is not None:
            if parts.txn.batch < transaction.batch:
                return False
            if manifest.find(location) is not None:
                return True
        position = raw.rfind(start, 0, position)
    return False


class QueueCommitter(UploadCommitter):
    """Appends groups of uploads to one queue."""

    _record: tuple[str, CasObject[CommitRecord]] | None = None
    """The app of the last group, and its commit record, which is sent only if it changed."""

    def append(self, group: Group | None) -> bool:
        """Append a group, unless it is in the queue or was in it before.

        Args:
            group: The uploads of a write; None if it has none.

        Returns:
            Whether anything was appended.

        Raises:
            InvalidInput: The app id belongs to another query.
            CommitStateUnknown: The group may or may not be in the queue: append it again.
            TransientStorageError: Uploads are too old, or gone: write all of them again.
            OpenDataBufferError: As :meth:`.Queue.append`; nothing was appended.
        """
        if group is None or not group.uploads:
            return False
        try:
            if group.transaction is not None:
                return self._append_once(group, group.transaction)
            self._append(group, group.entries, lambda before: None)
            return True
        except errors.CommitStateUnknown as error:
            # The batch may have been appended and read already. Only an append from the start,
            # which puts a separator in front, can continue safely.
            if group.transaction is not None:
                error.add_note(
                    f"Start the query again: Spark repeats the batch {group.transaction.batch} "
                    "under the same identity, and the Spark source of this library drops the "
                    "repeat."
                )
            raise
        finally:
            self._close_after(group)

    def _append_once(self, group: Group, transaction: Transaction) -> bool:
        queue = self._queue(self._config, frozenset(group.locations))
        record = self._claim_record(transaction.app, group.query)
        committed = record.last_seen
        entries = group.entries
        accepted: list[type[Decision]] = []

        def stop(before: Manifest) -> Decision | None:
            prefix = self._config.data_path_prefix
            decision = decide(before, committed, transaction, prefix=prefix, key=queue.key)
            return None if decision is None or type(decision) in accepted else decision

        while not isinstance(outcome := self._append(group, entries, stop), int):
            if isinstance(outcome, AlreadyDone):
                if not self._objects_missing(outcome.queued):
                    return self._drop_repeat(group, transaction)
                log.warning("%s is queued, but its objects are gone: again", transaction)
            accepted.append(type(outcome))
            # The separator: an empty batch without identity, between two groups of one batch.
            location = batch_key(self._config.data_path_prefix, self._runtime.ulid())
            self._store.put(location, encode_batch([]))
            entries = [NewEntry(location), *group.entries]
        self._raise_record(record, transaction.batch, outcome + len(entries), group.query)
        return True

    def _claim_record(self, app: str, query: str | None) -> CasObject[CommitRecord]:
        """Return the app's commit record, after claiming it for this query.

        Another query counts its batches from 0 as well, so its batches would all be taken for
        repeats. The claim is stored before the first append under the app id. Without it, two
        queries that start at the same time would both find the id unused.

        Raises:
            InvalidInput: The app id belongs to another query.
            TransientStorageError: The record could not be written.
        """
        if self._record is None or self._record[0] != app:
            config = self._config.with_timeout(min(_RECORD_DEADLINE_MS, self._config.timeout_ms))
            prefix = config.data_path_prefix
            self._record = app, record_object(self._store, prefix, app, self._runtime, config)
        record = self._record[1]
        outcome = record.update(lambda before: claimed(before, app, query))
        if isinstance(outcome, outcomes.Vanished):  # someone may delete it between two batches
            self._record = None
            return self._claim_record(app, query)
        if not isinstance(outcome, outcomes.Applied):
            raise errors.TransientStorageError(
                f"commit record {record.key!r} could not be written: {outcome}. Nothing was "
                "appended; start the query again."
            )
        return record

    def _raise_record(
        self, record: CasObject[CommitRecord], batch: int, next_sequence: int, query: str | None
    ) -> None:
        """Note a committed batch in the record.

        An error is only logged, because the batch is in the queue already. The batch in the record
        never decreases, even if a driver that was believed dead writes late.
        """
        empty = CommitRecord(-1, 0, query)
        try:
            record.change(
                lambda before: (before or empty).raised(batch, next_sequence, query),
                from_memory=True,
            )
        except errors.OpenDataBufferError as error:
            log.warning("commit record %s was not written: %s", record.key, error)

    def _append(
        self, group: Group, entries: list[NewEntry], stop: Callable[[Manifest], Decision | None]
    ) -> int | Decision:
        queue = self._queue(self._config, frozenset(group.locations))

        def objects_missing(sequence: int) -> errors.CommitStateUnknown:
            end = sequence + len(entries)
            return errors.CommitStateUnknown(
                queue.key,
                end - len(group.uploads),
                group.locations,
                end,
                "it landed later than the collector's grace period allows, and objects are gone",
            )

        return self._append_unexpired(queue, group, entries, stop, objects_missing)

    def _objects_missing(self, queued: tuple[str, ...]) -> bool:
        """Return whether queued batches lost their objects because the append came too late.

        Such batches must be written again; the reader's filter tells the two groups apart (decision
        0008). The listing is compared with the manifest that was read before it. A later manifest
        would no longer show entries that a reader skipped.
        """
        if not queued:  # The record is written only after all objects outlived the collector.
            return False
        oldest_ms = self._ages.oldest_ms(queued)
        if oldest_ms is not None and oldest_ms > self._ages.grace_ms:
            return not self._ages.outlived_collector(queued)
        return oldest_ms is None


class TopicCommitter(UploadCommitter):
    """Appends groups of uploads to the partitions of one topic."""

    @cached_property
    def _coordinator(self) -> TransactionCoordinator:
        ahead_ms = self._ages.grace_ms
        return TransactionCoordinator(
            self._store, self._config, self._queue_of, self._runtime, ahead_ms=ahead_ms
        )

    def append(self, group: Group | None) -> bool:
        """Append a group, unless it was committed before.

        A group without uploads only completes or rolls back whatever an earlier run of its app left
        undecided. After an error nothing is visible, unless the error's text says that the write is
        committed.

        Args:
            group: The uploads of a write; None if it has none.

        Returns:
            Whether anything was appended.

        Raises:
            InvalidInput: The app id belongs to another query.
            Superseded: Another run of the app has begun to write.
            Drained: A partition has left the topic since the write was planned. A repeated write
                goes to the others.
            TransientStorageError: Uploads are too old or gone, storage failed, or the outcome is
                unknown.
            OpenDataBufferError: As :meth:`.Queue.append`.
        """
        if group is None or group.topic is None:
            return False
        topic, txn = group.topic, group.topic.transaction(group.transaction)
        if not group.uploads:
            if group.transaction is not None:
                self._coordinator.recover(txn.app, group.query, topic.names)
            return False
        try:
            return self._append_once(group, topic, txn)
        finally:
            self._close_after(group)

    def _append_once(self, group: Group, topic: TopicWrite, txn: Transaction) -> bool:
        if not self._coordinator.begin(txn, group.query, topic.names):
            return self._drop_repeat(group, txn)
        uploads: defaultdict[str, list[UploadedBatch]] = defaultdict(list)
        for upload in group.uploads:
            assert upload.partition is not None
            uploads[upload.partition].append(upload)
        intents = {name: each[-1].clock + 1 for name, each in uploads.items()}
        attempt = Attempt(txn, topic.producer, intents)
        since = self._append_pending(group, attempt, uploads)
        if not self._coordinator.decide(attempt):
            return self._drop_repeat(group, txn)
        self._complete(attempt, since, group)
        if group.transaction is None:
            self._coordinator.forget(txn.app)  # This identity will not be used again.
        return True

    def _append_pending(
        self, group: Group, attempt: Attempt, uploads: dict[str, list[UploadedBatch]]
    ) -> dict[str, int]:
        """Append to all partitions at once; return the first sequence that was appended to each."""
        since: dict[str, int] = {}

        def append(name: str) -> None:
            part = replace(group, uploads=tuple(uploads[name]))
            since[name] = self._append_unexpired(
                self._queue_of(name),
                part,
                part.entries,
                lambda before: None,
                lambda sequence: self._ages.too_old(),
            )

        prepare = partial(self._coordinator.prepare, attempt)
        steps = [partial(step, name) for step in (append, prepare) for name in uploads]
        try:
            in_parallel(self._runtime, lambda step: step(), steps)
            return since
        except errors.OpenDataBufferError as error:
            # No commit record names the attempt, so no process will complete it.
            self._coordinator.abandon(attempt)
            if isinstance(error, errors.CommitStateUnknown):
                raise errors.TransientStorageError(
                    f"{attempt.txn} was not committed: it could not be written to all partitions "
                    f"({error.reason}, {error.key!r}). Nothing of it is visible; write it again."
                ) from error
            if isinstance(error, errors.Drained):
                error.add_note("Nothing is visible. Start the query again: it uses the others.")
            raise

    def _complete(self, attempt: Attempt, since: dict[str, int], group: Group) -> None:
        try:
            self._coordinator.complete(attempt, since)
        except errors.OpenDataBufferError as error:
            again = "Start the query again: that completes it."
            if group.transaction is None:
                queue = queue_name(self._config.store, self._config)
                producer = attempt.producer.hex()
                again = str(Hint(Action.COMPLETE_TRANSACTION, queue, producer=producer))
            error.add_note(
                f"{attempt.txn} is committed, and not visible in all partitions yet. {again} Do "
                "not write it again."
            )
            raise

    def _queue_of(self, name: str) -> Queue:
        return self._queue(partition_config(name, self._config))
