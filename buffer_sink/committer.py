"""The commits of writes: to a queue by one compare-and-swap, to all partitions of a topic or none.

No manifest names the uploads of a write before that, so a garbage collector deletes them after a
time (failure F5, decision 0012). A write with an identity (app, batch) has to enter the queue once,
however often Spark commits it (decision 0008).
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
from opendata_buffer.messages import CONTINUE_TXN, build_uuid, new_producer_id
from opendata_buffer.option_reader import in_options
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.queue.hints import queue_hint
from opendata_buffer.queue.neighbours import check_manifest_path
from opendata_buffer.queue.ownership import check_owner, claim_for_writing
from opendata_buffer.queue.queue import OpenPause, Queue
from opendata_buffer.runtime import Moment, Runtime, in_parallel
from opendata_buffer.stores.base import List, Store
from opendata_buffer.topic.description import TopicDescription
from opendata_buffer.topic.topic import Topic
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
_RECORD_DEADLINE_MS = 10_000  # of one change of a record; a micro-batch waits for it

T = TypeVar("T")

FIRST_CLOCK = 2  # of a write's first message; an acknowledgement with clock 1 rolls it back
_TASK_BITS = 32


@dataclass(frozen=True, slots=True)
class TopicWrite:
    """One attempt at a write to the partitions that the driver found in a topic: names of the
    ``active`` ones, in the topic's order, and of the ``draining`` ones, which are written no more.
    ``producer`` is the attempt's own id, 6 bytes; ``app`` is for a write that was given none."""

    active: tuple[str, ...]
    draining: tuple[str, ...]
    producer: bytes
    app: str

    @classmethod
    def planned(cls, description: TopicDescription, runtime: Runtime) -> TopicWrite:
        """An attempt that writes to the topic as it is now."""
        chance = sha256(runtime.ulid().encode()).digest()  # 80 bits of a ULID are random
        producer = new_producer_id(lambda count: chance[:count])
        app = f"write-{runtime.ulid()}"
        return cls(tuple(description.active), tuple(description.draining), producer, app)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all partitions of the topic."""
        return (*self.active, *self.draining)

    def transaction(self, given: Transaction | None) -> Transaction:
        """The write's identity: the given one, or one of its own."""
        return given or Transaction(self.app, 0)

    def clock(self, task: int, index: int) -> int:
        """Clock of a batch, rising in the order in which a partition gets them.

        Each task has a range of its own, in which ``index`` counts its earlier batches for the
        same partition; Spark's numbers of tasks are below 2^31.
        """
        return FIRST_CLOCK + (task << _TASK_BITS) + index

    def location(self, partition: str, ulid: str, txn: Transaction, clock: int) -> str:
        """Key of a batch of this attempt."""
        return batch_key(partition, ulid, txn, build_uuid(self.producer, clock, CONTINUE_TXN))


@dataclass(frozen=True, slots=True)
class UploadedBatch:
    """One batch object, stored and not yet queued; ``metadata`` are the ranges of its entry.

    For a topic with the partition's name, and the clock of its message in that partition.
    """

    location: str
    records: int
    metadata: tuple[Metadata, ...]
    partition: str | None = None
    clock: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """All uploads of one write in the order of tasks and rows: queued together or not at all.

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
        """Keys of the uploads."""
        return tuple(upload.location for upload in self.uploads)


@in_options()
def claim(options: SinkOptions, store: Store, runtime: Runtime) -> None:
    """Claim the queue of a write before its first upload, unless it has an owner marker.

    Uploads without a marker would pass for another client's batches (failure F51).

    Raises:
        InvalidInput: As :func:`.claim_for_writing`, or the manifest is not a topic's.
    """
    queue = options.queue
    check_manifest_path(store, queue)
    if check_owner(store, queue, runtime=runtime) is None:
        claim_for_writing(store, queue, runtime=runtime, grace_ms=options.grace_ms)


class UploadAges:
    """Checks how long uploads are safe, from the plan of their write or by a listing.

    A collector deletes an object once both the time in its name and that of its upload are older
    than the grace period. Where partitions have several, an age is compared with the shortest, and
    a wait is by the longest.
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
        """The grace period to go by."""
        return min(self.known_ms, default=self._default_ms)

    def oldest(self, group: Group) -> Moment:
        """When the oldest upload of a group was made, as a collector may see it.

        Each upload must be at most half of the grace period old; the other half is the time that
        the append may take. Raises TransientStorageError for uploads that are older, or gone.
        """
        now = Moment.now(self._runtime)
        # No upload is older than the plan, so the driver's clocks show without a request that those
        # of most writes are young. For an older write a listing shows it, by the store's clock.
        age_ms = group.planned.age_ms(now) if group.planned.precedes(now) else None
        if age_ms is None or age_ms > self.grace_ms / 2:
            age_ms = self.oldest_ms(group.locations)
            if age_ms is None or age_ms > self.grace_ms / 2:
                raise self.too_old()
        return Moment(now.wall_ms - round(age_ms), now.monotonic - age_ms / 1000)

    def has_expired(self, oldest: Moment) -> bool:
        """By both clocks: a machine that is suspended stops its monotonic one."""
        return oldest.age_ms(Moment.now(self._runtime)) > self.grace_ms

    def oldest_ms(self, locations: Collection[str]) -> float | None:
        """Age of the oldest object as a collector sees it, milliseconds; None when one is gone.

        By the store's clock; below 0 for a name that is ahead of time.
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
        """Whether all objects are there once no collector deletes by a manifest read before now."""
        # A collector starts deletes by one manifest for a quarter of the grace period, and the last
        # one may be on its way for as long as a request may take.
        wait_s = (max(self.known_ms) / 4 + self._request_ms) / 1000
        log.warning(
            "objects are older than the collector's grace period: waiting %.0f s to see that none "
            "of them is deleted",
            wait_s,
        )
        self._runtime.sleep(wait_s)
        return self.oldest_ms(locations) is not None

    def too_old(self) -> errors.TransientStorageError:
        """The error for uploads that may be deleted before they are queued, or are gone."""
        return errors.TransientStorageError(
            f"the write took so long that its first batches may be deleted as orphans, or are "
            f"gone: it may take {self._max_write_ms / 1000:.0f} s from its plan to its commit. "
            "Nothing was appended; write again, with smaller writes (maxBytesPerTrigger) or more "
            "partitions."
        )


class UploadCommitter:
    """Makes the uploads of a write visible; the common part of a commit to a queue and to a topic.

    ``open_pause`` makes a queue's broker pause while this process appends; None: no broker is
    asked.
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
        """End connections that outlive an append; the next one makes what it needs."""
        for queue in self._queues.values():
            queue.disconnect()

    def _queue(self, config: QueueConfig, uploaded: Collection[str] = ()) -> Queue:
        # First use in this process: refused are a store without compare-and-swap (failure F12), a
        # prefix of another queue, whose collector would delete our batches (failure F7), and a
        # manifest that was lost or restored from an old copy (failure F4).
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
            # The append checks ages once and may then race until its deadline: both together have
            # to stay below the grace period, or the collector wins (failure F5).
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
        """Save now how far the queues got (failure F4), unless a query does so within a minute."""
        if group.query is None:  # The process of a write outside of a query may end with it.
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
        """Append entries, which name all uploads of the group, while these are safe (failure F5).

        The answer of ``guard`` about the manifest that is about to be replaced, unless None, stops
        the append and is returned. ``objects_missing`` makes the error, from the first sequence,
        for an append that landed after the uploads had expired and some were gone: the process was
        suspended between its last reading of the clock and the write. Raises TransientStorageError
        for uploads that are too old or gone, and what :meth:`.Queue.append` raises.
        """
        while True:
            oldest = self._ages.oldest(group)

            def unexpired(before: Manifest, oldest: Moment = oldest) -> T | Moment | None:
                # Asked on each attempt: the process may have been paused since the last one.
                return oldest if self._ages.has_expired(oldest) else guard(before)

            outcome: int | T | Moment = queue.append(entries, guard=unexpired)
            # Uploads that are there when no collector can have missed the append any more are
            # queued and stay.
            if (
                isinstance(outcome, int)
                and self._ages.has_expired(oldest)
                and not self._ages.outlived_collector(group.locations)
            ):
                raise objects_missing(outcome)
            if not isinstance(outcome, Moment):
                return outcome

    def _drop_repeat(self, group: Group, txn: Transaction) -> bool:
        """Report a write that was committed before; False, as nothing is appended."""
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
    """Append an empty batch and the group, so that the reader can recognise a repeat."""


@dataclass(frozen=True, slots=True)
class AlreadyDone:
    """The batch is committed: there is nothing to append.

    ``queued`` are its locations in the manifest; none where the record, or a later batch of the
    app, shows that it was committed.
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
    """What an append does to the ``manifest`` that it replaces; None to append the group. Pure.

    ``record`` is the app's commit record, read before the manifest. QueueReset if it knows of
    sequences that the queue, with the manifest ``key``, has not reached (failure F4).
    """
    # "At least" and not "equal", as Delta's txnVersion rule: a driver that was restored from
    # an older checkpoint may repeat a batch before the last one.
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
    # A crash before the record, and a consumer that has dequeued our entries: the batch is appended
    # again, and the reader's filter drops it, as the second group of its entries. It tells two
    # groups apart by the entries between them. In an empty queue there are none, so an empty batch
    # is put there; not where all that was dequeued came before the record.
    unseen = manifest.first_sequence > (record.next_sequence if record is not None else 0)
    return Separate() if unseen and manifest.entry_count == 0 else None


def is_queued(manifest: Manifest, prefix: str, transaction: Transaction) -> bool:
    """Whether the queue has an entry of this batch, or of a later one, of the same app.

    Batches of an app enter in rising order, so its last entry decides. It is found from the end
    as bytes: decoding 100,000 queued entries on each append would dominate it.
    """
    raw = manifest.raw
    start = f"{prefix}/app={transaction.app}/batch=".encode()
    position = raw.rfind(start)
    while position >= 0:
        # The payload of a range may hold the same text. But only a location has its own length in
        # the two bytes before it, and a positive answer is confirmed by decoding the entries.
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
    """The app of the last group, and its commit record: one that did not change is not sent."""

    def append(self, group: Group | None) -> bool:
        """Append a group, unless it is in the queue or was there; False for nothing to append.

        InvalidInput for an app id of another query. After CommitStateUnknown it may or may not be
        in the queue: append it again. After TransientStorageError uploads are too old, or gone:
        write all of them again. Else as :meth:`.Queue.append`; nothing was appended.
        """
        if group is None or not group.uploads:
            return False
        try:
            if group.transaction is not None:
                return self._append_once(group, group.transaction)
            self._append(group, group.entries, lambda before: None)
            return True
        except errors.CommitStateUnknown as error:
            # The batch may have landed and be gone again. Only an append from the start, with a
            # separator in front, can go on from here.
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
            # An empty batch without identity, to lie between two groups of one batch.
            location = batch_key(self._config.data_path_prefix, self._runtime.ulid())
            self._store.put(location, encode_batch([]))
            entries = [NewEntry(location), *group.entries]
        self._raise_record(record, transaction.batch, outcome + len(entries), group.query)
        return True

    def _claim_record(self, app: str, query: str | None) -> CasObject[CommitRecord]:
        """The app's commit record, which from now on belongs to this query.

        Another query counts its batches from 0 as well, and each of them would be taken for a
        repeat: it is refused by InvalidInput. The write has landed before the first append under
        the id: two queries that begin at once would otherwise both find nothing.
        """
        if self._record is None or self._record[0] != app:
            config = self._config.with_timeout(min(_RECORD_DEADLINE_MS, self._config.timeout_ms))
            prefix = config.data_path_prefix
            self._record = app, record_object(self._store, prefix, app, self._runtime, config)
        record = self._record[1]
        outcome = record.update(lambda before: claimed(before, app, query))
        if isinstance(outcome, outcomes.Vanished):  # it may be deleted between two batches
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
        """Note a committed batch, best effort: it is in the queue and must not fail any more.

        The record never falls when a driver that was thought dead writes late.
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
        """Whether queued batches of a transaction have lost their objects: it landed too late.

        Then they must be written again. The reader's filter tells the two apart (decision 0008). A
        listing is compared with the manifest that was read before it: a later manifest would not
        show skipped entries.
        """
        if not queued:  # a record is written only once all objects outlived the collector
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
        """Append a group, unless it was committed before; False when there was nothing to append.

        A group without uploads completes or rolls back what an earlier run of its app left
        undecided, and does nothing else. InvalidInput for an app id of another query; Superseded
        where another run of the app has begun to write; Drained for a partition that has left the
        topic since the write was planned: a repeated write goes to the others;
        TransientStorageError where uploads are too old or gone, storage failed, or the outcome is
        unknown. Else as :meth:`.Queue.append`. Nothing is visible then, unless the text says that
        it is committed.
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
            self._coordinator.forget(txn.app)  # this identity is never written again
        return True

    def _append_pending(
        self, group: Group, attempt: Attempt, uploads: dict[str, list[UploadedBatch]]
    ) -> dict[str, int]:
        """Append to all partitions at once; the first sequence of each partition's part."""
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
            # No record names the attempt, and none will.
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
            again = "Start the query again"
            if group.transaction is None:
                words = f"{queue_hint(self._config.store, self._config)} {attempt.producer.hex()}"
                again = f"Run 'opendata-buffer abort {words}'"
            error.add_note(
                f"{attempt.txn} is committed, and not visible in all partitions yet. {again}: "
                "that completes it. Do not write it again."
            )
            raise

    def _queue_of(self, name: str) -> Queue:
        return self._queue(Topic.config_of(name, self._config))
