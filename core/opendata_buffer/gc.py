"""The garbage collector: which objects it may delete, and its cycles, once or in the background.

The problem: a batch that was uploaded but not yet appended looks exactly like a batch that was
consumed. Neither is in the manifest. Deleting the wrong one loses records silently.

The idea: a cycle lists a page of objects *first* and reads the manifest *afterwards*, so that a
batch that was appended in between is in the manifest (failure F5, decision 0007). It then deletes
the objects that :func:`plan` names: unreferenced, older than every queued batch, and older than the
grace period by every clock. It saves its cursor after each page, so that many short runs together
see all objects.

For example, the listing shows batches 1 to 5, and the manifest names 4 and 5. Batches 1 to 3 were
consumed if they are older than batch 4; a younger one may be an upload that is still to be
appended.

What can go wrong: clocks differ, a manifest was restored from an old copy, two queues share a
prefix, or another client's batches lie here. In each of these cases the collector holds: it deletes
nothing and says why.
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from opendata_buffer import errors, metrics, outcomes
from opendata_buffer.arguments import checked
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS, ConsumerConfig, QueueConfig
from opendata_buffer.formats.batch import (
    MAX_KEY_BYTES,
    BatchLocation,
    name_time_ms,
    parse_location,
)
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.hints import Action, Hint, Message
from opendata_buffer.queue import unaccounted
from opendata_buffer.queue.cas import CasObject, CasStore
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import REMEMBERED, LogIndex
from opendata_buffer.queue.log_parts import end_of_part, name_ms, parts_folder
from opendata_buffer.queue.log_segments import SegmentGone
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import OWNER_NAME, Watermark, owner_key
from opendata_buffer.queue.ownership import QueueClaim, check_owner, claim_queue, misplaced
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_positions import (
    ReaderPosition,
    read_positions,
    stored_position,
    stored_readers,
)
from opendata_buffer.queue.retention import floor_of, full_since, kept_since
from opendata_buffer.queue.sidecar import Sidecar
from opendata_buffer.queue.stored_manifest import check_reached, manifest_object
from opendata_buffer.queue.v1_feed import Feeders
from opendata_buffer.runtime import Runtime, SystemRuntime, Task, remaining, wait_for
from opendata_buffer.stores.base import DeleteFailure, Listing, ObjectInfo, Store, exists

log = logging.getLogger(__name__)

_CURSOR = Sidecar(
    "the garbage collector's cursor",
    "Nothing depends on it: delete the object, and the collector writes a new one.",
)
_PAGE = 10_000  # objects listed, compared with one reading of the manifest, and deleted
_BULK = 1_000  # the most keys one S3 bulk delete takes; the age of the manifest is checked between
_LEAST_WINDOW_S = 1.0  # so that a collector without a grace period may delete, too
_LEAST_TOLERANCE_MS = 5_000  # S3's times are whole seconds, and answers take some
_STOP_TIMEOUT_S = 60.0


class GcCursor:
    """The key after which the collectors of a queue resume, at ``<prefix>/_gc.json``.

    It is a hint: a lost or wrong cursor only makes some objects wait for one more round.
    """

    def __init__(self, store: CasStore, config: QueueConfig, runtime: Runtime) -> None:
        self._prefix = f"{config.data_path_prefix}/"
        self._object = CasObject(
            store,
            f"{self._prefix}_gc.json",
            decode=lambda data: _CURSOR.decode(data).text("after"),
            encode=lambda after: json.dumps({"version": _CURSOR.version, "after": after}).encode(),
            runtime=runtime,
            settings=config,
            sidecar=_CURSOR,
            if_unreadable=self._begin_anew,
        )
        self._known = ""

    def load(self) -> str:
        """Return the key after which to list; empty for the beginning."""
        found = self._object.read()
        self._known = found if isinstance(found, str) else ""
        # Another prefix's key would skip everything, and text that is not a key fails a listing.
        with suppress(UnicodeEncodeError):
            if self._known.startswith(self._prefix) and len(self._known.encode()) <= MAX_KEY_BYTES:
                return self._known
        return ""

    def save(self, after: str) -> None:
        """Remember a key. The last one saved counts, and a failure is only logged."""
        if after == self._known:
            return
        try:
            outcome = self._object.update(lambda _: after, from_memory=True)
        except errors.StorageError as error:
            log.warning("the collector's cursor was not saved: %s", error)
            return
        if isinstance(outcome, outcomes.Applied):
            self._known = after

    def _begin_anew(self, error: errors.CorruptData, version: str) -> str:
        log.warning("the collector begins at the first object: %s", error)
        return ""


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What to delete, and why the rest stays.

    Attributes:
        delete: Orphans that no reader can need any more, oldest first within a page.
        referenced: Batches that the manifest names.
        waiting: Orphans that are too young, or newer than the oldest queued batch.
        ignored: Objects that are not a batch of this queue.
        held: Why nothing may be deleted at all, or None.
    """

    delete: tuple[ObjectInfo, ...] = ()
    referenced: int = 0
    waiting: int = 0
    ignored: int = 0
    held: Message | None = None

    @property
    def delete_bytes(self) -> int:
        """Bytes of the objects to delete."""
        return sum(each.size for each in self.delete)

    def __add__(self, other: GcPlan) -> GcPlan:
        """Return the plan of two pages."""
        return GcPlan(
            self.delete + other.delete,
            self.referenced + other.referenced,
            self.waiting + other.waiting,
            self.ignored + other.ignored,
            other.held or self.held,
        )


@dataclass(frozen=True, slots=True)
class Queued:
    """All queued batches.

    Attributes:
        locations: Their locations.
        oldest_ms: When the oldest one was written, milliseconds since the Unix epoch; None if the
            queue is empty.
    """

    locations: frozenset[str] = frozenset()
    oldest_ms: int | None = None

    @classmethod
    def of_log(cls, index: LogIndex, manifest: Manifest, named_ms: int | None) -> Queued:
        """Return the batches that a log keeps, from its log start offset (``floor``) on.

        Batches in segments, perhaps millions, are not looked up. Instead nothing is deleted whose
        name is later than ``named_ms``, the oldest name among them, and nothing at all if a name
        contains no time.
        """
        first = max(index.floor, manifest.first_sequence)
        locations = manifest.locations()[first - manifest.first_sequence :]
        times = [name_ms(each) for each in locations]
        times += [] if named_ms is None else [named_ms]
        return cls(frozenset(locations), min(times, default=None))


def plan(
    queued: Queued, page: Listing, *, own_ms: int, data_path_prefix: str, grace_ms: int
) -> GcPlan:
    """Decide which objects of a page to delete (OpenData RFC 0001, Garbage Collection).

    Args:
        queued: The entries of a manifest that was read *after* the page was listed.
        page: The listing.
        own_ms: The collector's clock before the listing, in milliseconds since the Unix epoch.
        data_path_prefix: The queue's data prefix.
        grace_ms: The queue's grace period in milliseconds.

    Returns:
        The objects to delete, and counts of the others.
    """
    newest_ms = min(page.now_ms, own_ms) - grace_ms
    referenced = waiting = ignored = 0
    delete: list[tuple[int, str, ObjectInfo]] = []
    for info in page.objects:
        if info.key in queued.locations:
            referenced += 1
        elif (parsed := parse_location(info.key, data_path_prefix)) is None:
            ignored += 1
        else:
            # The later of the two times gives the smaller age (failure F6).
            written_ms = max(parsed.timestamp_ms, info.last_modified_ms)
            compared_ms = _written_ms(info, parsed)
            if written_ms >= newest_ms or (
                queued.oldest_ms is not None and compared_ms >= queued.oldest_ms
            ):
                waiting += 1
            else:
                delete.append((compared_ms, info.key, info))
    orphans = tuple(info for _, _, info in sorted(delete, key=lambda each: each[:2]))
    nested = [  # folders below the prefix that another queue has claimed for itself
        posixpath.dirname(info.key) + "/"
        for info in page.objects
        if info.key.endswith(f"/{OWNER_NAME}") and info.key != owner_key(data_path_prefix)
    ]
    return without_nested(GcPlan(orphans, referenced, waiting, ignored), nested)


def _written_ms(info: ObjectInfo, name: BatchLocation) -> int:
    """Return when a batch was written, by its name (:func:`.name_time_ms`) or else by the store."""
    return name.timestamp_ms if info.key.endswith(".batch") else info.last_modified_ms


def clock_fault(store_ms: int, own_ms: int, grace_ms: int) -> str | None:
    """Return why the clocks of store and collector, in milliseconds, forbid collecting; or None."""
    apart_ms = abs(store_ms - own_ms)
    if apart_ms <= max(grace_ms / 4, _LEAST_TOLERANCE_MS):
        return None
    ahead = "ahead of" if store_ms > own_ms else "behind"
    return (
        f"the store's clock is {apart_ms / 1000:.0f} s {ahead} this machine's, which is more than "
        f"a quarter of the grace period of {grace_ms / 1000:.0f} s. One of them is wrong, and the "
        "age of an object is not known. Set this machine's clock (NTP), or mend the store's."
    )


def without_nested(made: GcPlan, nested: Collection[str]) -> GcPlan:
    """Return the plan without objects in these folders, each of which ends with a slash."""
    if not nested:
        return made
    kept = tuple(
        info for info in made.delete if not any(info.key.startswith(folder) for folder in nested)
    )
    return replace(made, delete=kept, ignored=made.ignored + len(made.delete) - len(kept))


def unlisted_markers(
    made: GcPlan, page: Listing, start_after: str, data_path_prefix: str
) -> list[str]:
    """Return keys of owner markers, maybe on another page, that would protect an object."""
    end = page.objects[-1].key if page.truncated and page.objects else None
    wanted: set[str] = set()
    for info in made.delete:
        folder = posixpath.dirname(info.key)
        while folder != data_path_prefix:
            marker = owner_key(folder)
            if marker <= start_after or (end is not None and marker > end):
                wanted.add(marker)
            folder = posixpath.dirname(folder)
    return sorted(wanted)


@dataclass(frozen=True, slots=True)
class GcReport:
    """The result of one cycle.

    Attributes:
        plan: The objects that were to be deleted.
        deleted: Number of objects deleted.
        failed: Objects that could not be deleted; the next cycle tries again.
        abandoned: Number of objects left because a page took too long or the collector was stopped.
    """

    plan: GcPlan = field(default_factory=GcPlan)
    deleted: int = 0
    failed: tuple[DeleteFailure, ...] = ()
    abandoned: int = 0

    def __add__(self, other: GcReport) -> GcReport:
        """Return the report of two pages."""
        return GcReport(
            self.plan + other.plan,
            self.deleted + other.deleted,
            self.failed + other.failed,
            self.abandoned + other.abandoned,
        )


class GarbageCollector:
    """Deletes batches that were consumed and batches that were never appended.

    A consumer runs one itself, unless ``gc`` is off in its configuration. To run one alone::

        config = ConsumerConfig(store="s3://bucket/orders")
        collector = GarbageCollector(open_store(config.store), config)
        print(collector.run_once(dry_run=True).plan.delete_bytes)

    Args:
        store: The store of the queue.
        config: Prefix, manifest and, in ``config.collector``, the interval. The grace period is the
            queue's.
        runtime: Clock and threads.
        epoch: Epoch of the consumer that the collector runs for; another epoch in the manifest ends
            it (failure F9). None collects under any consumer.
    """

    @checked
    def __init__(
        self,
        store: Store,
        config: ConsumerConfig,
        *,
        runtime: Runtime | None = None,
        epoch: int | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._prefix = config.data_path_prefix
        self._grace_ms = DEFAULT_GRACE_PERIOD_MS  # until it is read from the owner marker
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._epoch = epoch
        self._condition = self._runtime.condition()
        self._stopping = False
        self._delay_s = 0.0
        """Seconds that the first cycle waits; 0 once it may begin."""
        self._task: Task | None = None
        self._seen = 0  # highest next sequence of the manifest so far
        self._labels = {"queue": metrics.queue_label(store.url, config.manifest_path)}
        self._cursor = GcCursor(store, config, self._runtime)
        self._manifest = manifest_object(store, config, self._runtime)
        self._queued: tuple[Manifest, Queued] | None = None
        self._log = Log(store, config, self._runtime)
        self._view: LogView | None = None  # by which this cycle has raised the floor
        self._v1 = Feeders(self._log)
        self._others = unaccounted.OtherManifests(store, config)
        self._looked_for_others = False  # whether this cycle has read them
        self._other: str | None = None  # one that names batches in the data prefix
        self._parts_deleted = 0  # all parts that end before this sequence are deleted
        self._full_since_ms: int | None = None  # since when the batches suffice for the retention

    @checked
    def run_once(self, *, dry_run: bool = False) -> GcReport:
        """Run one cycle over all objects, page by page, from the saved cursor and around to it.

        Args:
            dry_run: Only read and plan; write nothing.

        Returns:
            What was planned and deleted. An object that could not be deleted does not raise an
            error.

        Raises:
            PrefixConflict: The data prefix belongs to another queue (failure F7). Nothing was
                deleted.
            Fenced: Another consumer owns the queue. Nothing more was deleted.
            QueueReset: The manifest went backwards. Nothing more was deleted.
            CorruptData: Manifest or owner marker cannot be read. Nothing more was deleted.
            StorageError: The store did not answer. Nothing more was deleted.
        """
        report = GcReport()
        for page in self._cycle(dry_run):
            report += page
        return report

    def _cycle(self, dry_run: bool) -> Iterator[GcReport]:
        """Yield the report of each page as soon as it is done."""
        started = self._runtime.monotonic()
        deleted = abandoned = 0
        try:
            for report in self._pages(dry_run):
                deleted, abandoned = deleted + report.deleted, abandoned + report.abandoned
                yield report
        finally:
            metrics.gc_duration_seconds.record(self._runtime.monotonic() - started)
            if deleted:
                log.info("deleted %d orphans below %s", deleted, self._prefix)
            if abandoned and not self._stopping:
                log.warning(
                    "deleting below %s was too slow: %d orphans wait for the next cycle",
                    self._prefix,
                    abandoned,
                )

    def _pages(self, dry_run: bool) -> Iterator[GcReport]:
        claim_now = check_owner if dry_run else claim_queue
        start = "" if dry_run else self._cursor.load()
        size, self._view, self._looked_for_others = 0, None, False
        minutes = Counter[int]()  # bytes by the minute in which a batch was written
        for begin, end in ((start, ""), ("", start)) if start else (("", ""),):
            after = begin
            while not self._stopping:
                # Read the marker before each page, because the grace period may have been raised.
                claim = claim_now(
                    self._store,
                    self._config,
                    runtime=self._runtime,
                    grace_ms=self._config.collector.grace_period_ms,
                )
                if claim is not None:
                    self._grace_ms = claim.grace_ms
                own_ms = self._runtime.now_ms()
                found = self._store.list(f"{self._prefix}/", start_after=after, limit=_PAGE)
                page = _until(found, end) if end else found
                report = self._page(page, own_ms, after, claim, dry_run)
                size += sum(each.size for each in page.objects)
                for each in page.objects if self._bytes_to_keep is not None else ():
                    if (name := parse_location(each.key, self._prefix)) is not None:
                        minutes[_written_ms(each, name) // 60_000] += each.size
                size -= report.plan.delete_bytes if report.deleted else 0
                yield report
                if report.plan.held or report.abandoned:
                    return  # the next cycle lists this page again
                ended = len(page.objects) < len(found.objects) or not page.truncated
                after = "" if ended else page.objects[-1].key
                if not dry_run:
                    self._cursor.save(after)
                if not after:
                    break
        if not self._stopping:  # All pages were listed: nothing was held and nothing too slow.
            metrics.stored_bytes.set(size, self._labels)
            if self._view is not None and self._bytes_to_keep is not None:
                self._full_since_ms = full_since(minutes, self._bytes_to_keep)
                self._raise_floor(self._view, self._runtime.now_ms(), dry_run)

    @property
    def _bytes_to_keep(self) -> int | None:
        return None if self._view is None else self._view.index.retention_bytes

    def _page(
        self, page: Listing, own_ms: int, start_after: str, claim: QueueClaim | None, dry_run: bool
    ) -> GcReport:
        """Compare a page with a manifest that was read after it, and delete (failure F5)."""
        metrics.gc_clock_difference_seconds.set((page.now_ms - own_ms) / 1000, self._labels)
        read_at = self._runtime.monotonic()
        found = self._manifest.read()
        manifest = None if isinstance(found, outcomes.Vanished) else found
        # Read the index after the manifest, for each page. Entries that left the manifest are in
        # the index, and without it the batches of segments would look like garbage (failure F45).
        is_log = claim is not None and claim.is_log
        self._log.queue_id = "" if claim is None else claim.queue_id
        index = self._log.need(marked=True) if is_log else self._log.read()
        if claim is not None:
            claim.check(manifest)
        if index is not None and manifest is not None:
            self._log.check_gap(index, manifest)  # failure F46
        acked = "" if claim is None or claim.watermark is None else claim.watermark.acked_location
        held = self._hold_reason(manifest, index, page, own_ms) or misplaced(
            manifest, self._config, self._store.url, acked
        )
        if held is not None or manifest is None:
            log.warning("nothing collected below %s: %s", self._prefix, held)
            metrics.gc_cycles_held.add(1)
            return GcReport(GcPlan(held=held))
        if claim is not None and not dry_run:
            claim.note(manifest, now=True)
        if index is not None and self._view is None:
            if not dry_run:
                index = self._moved(index, manifest, claim)
            self._view = LogView.of(self._log, index, manifest)
            if not dry_run:
                self._v1.find(index)
                self._v1.feed(manifest, check=True, note=True)
            index = self._raise_floor(self._view, min(page.now_ms, own_ms), dry_run)
        if index is None:
            queued = self._queued_in(manifest)
        else:
            try:
                queued = Queued.of_log(index, manifest, self._log.segments.oldest_name_ms(index))
            except SegmentGone as error:
                if self._log.read() == index:
                    raise
                why = "another collector has shortened the log since it was read: try again"
                raise errors.TransientStorageError(why) from error
        prefix, grace_ms = self._prefix, self._grace_ms
        made = plan(queued, page, own_ms=own_ms, data_path_prefix=prefix, grace_ms=grace_ms)
        markers = unlisted_markers(made, page, start_after, prefix)
        nested = [each.removesuffix(OWNER_NAME) for each in markers if exists(self._store, each)]
        made = without_nested(made, nested)
        if (held := self._unaccounted(manifest, made)) is not None:
            log.warning("nothing collected below %s: %s", self._prefix, held)
            metrics.gc_cycles_held.add(1)
            return GcReport(replace(made, delete=(), held=held))
        return GcReport(made) if dry_run else self._delete(made, read_at)

    def _hold_reason(
        self, manifest: Manifest | None, index: LogIndex | None, page: Listing, own_ms: int
    ) -> Message | None:
        """Return why nothing of this page may be deleted, or None."""
        path = self._config.manifest_path
        if manifest is None:
            return Message(f"manifest {path!r} does not exist: there is no queue to compare with")
        if self._epoch is not None and manifest.epoch != self._epoch:
            queue = queue_name(self._store.url, self._config)
            raise errors.Fenced(path, self._epoch, manifest.epoch).at(queue)
        # failure F4: a recreated manifest names no batch of the old one and may carry the same
        # epoch. Those batches may be all that is left of the old queue.
        seen = Watermark(self._seen, manifest.epoch)
        check_reached(seen, manifest, self._config, self._store.url)
        self._seen = manifest.next_sequence
        fault = clock_fault(page.now_ms, own_ms, self._grace_ms)
        if fault is not None:
            return Message(fault)
        if index is None and manifest.entry_count and self._queued_in(manifest).oldest_ms is None:
            oldest = manifest.entries(limit=1)[0]
            queue = queue_name(self._store.url, self._config)
            text = (
                f"the object of the oldest queued batch {oldest.sequence} at {oldest.location!r} "
                "is gone, and its name has no time to compare others with"
            )
            return Message(text, Hint(Action.SKIP_FOR_COLLECTOR, queue, oldest.sequence))
        return None

    def _unaccounted(self, manifest: Manifest, made: GcPlan) -> Message | None:
        """Return why the planned objects may be another queue's, or None (failure F51).

        Only the first page of a cycle on which something is to be deleted costs requests.
        """
        if not made.delete:
            return None
        if not self._looked_for_others:
            # After the listing: a batch that was on the page is in its manifest by now.
            self._other, self._looked_for_others = self._others.naming(), True
        batches = unaccounted.Batches(len(made.delete), example=made.delete[0].key)
        return unaccounted.hold_reason(self._config, manifest, batches, self._other)

    def _moved(self, index: LogIndex, manifest: Manifest, claim: QueueClaim | None) -> LogIndex:
        """Return the index after the oldest entries of a long manifest have moved into segments."""
        length = manifest.next_sequence - max(index.end, manifest.first_sequence)
        if length <= self._log.most_entries:
            return index
        queue = Queue(
            self._store, self._config, runtime=self._runtime, role="collector", claim=claim
        )
        return queue.shorten(lambda: self._log, manifest) or index

    def _raise_floor(self, view: LogView, now_ms: int, dry_run: bool) -> LogIndex:
        """Raise the log start offset, and return the index. Entries before it may be deleted.

        The index is written only if it is still the one that was read before the positions, so that
        a reader that registered or was reset since is not passed over.
        """
        index = view.index
        positions = read_positions(self._log, index)
        moved_ms = self._moved_ms(positions, now_ms - index.reader_expiry_ms)
        held, expired, fronts = dict[str, int](), list[str](), self._v1.fronts()
        for name, each in positions.items():
            left_ms = index.reader_expiry_ms - (now_ms - moved_ms[name])
            if left_ms < 0:  # failure F44
                expired.append(name)
            else:
                # Another program may have raised the position of a v1 consumer.
                held[name] = min(each.next, fronts.get(name, each.next))
            labels = {**self._labels, "reader": name}
            behind = view.starting_at(each.waits_from)
            metrics.reader_lag.set(behind.entry_count, labels)
            metrics.reader_lag_seconds.set(behind.age_s(now_ms) or 0.0, labels)
            metrics.reader_expires_seconds.set(max(0, left_ms) / 1000, labels)
        retained_from = self._retained_from(view, now_ms)
        floor = floor_of(index, held, view.next_sequence, retained_from)
        if floor > index.floor:
            held |= self._unnamed_readers(index, now_ms - index.reader_expiry_ms)
            floor = floor_of(index, held, view.next_sequence, retained_from)
        # Noted, so that a reader whose position stays away expires.
        missing = {n: index.missing.get(n, now_ms) for n, p in positions.items() if p.is_missing}
        changed = replace(index, missing=missing)
        new = changed.without_readers(expired).with_floor(floor)
        if dry_run:
            return new
        if floor == index.floor and not expired and missing == index.missing:
            self._delete_parts(index.floor - REMEMBERED)
            return index
        for name in expired:
            log.warning(
                "reader %r of %s has expired: it was last heard of %.1f days ago, at sequence %d",
                name,
                self._config.manifest_path,
                (now_ms - moved_ms[name]) / 86_400_000,
                positions[name].next,
            )
        now = self._log.change(lambda before: new if before == index else before)
        self._delete_parts(now.floor - REMEMBERED)
        return now

    def _unnamed_readers(self, index: LogIndex, expired_ms: int) -> dict[str, int]:
        """Return the next sequence of each reader that has a position and is not in the index.

        The start of such a reader was interrupted, or the index and the owner marker were restored
        from one backup that is older than the reader (failure F46). It keeps what it needs until it
        expires or returns. Readers that have expired or lost batches are left out.
        """
        found: dict[str, int] = {}
        for name, stored_ms in stored_readers(self._log).items():
            if name in index.readers or stored_ms < expired_ms:
                continue
            try:
                position = stored_position(self._log, name, index.queue_id)
            except errors.CorruptData:
                continue  # Whose position it was cannot be known.
            if position is not None and position.next >= index.floor:
                found[name] = position.next
        return found

    def _moved_ms(self, positions: Mapping[str, ReaderPosition], expired_ms: int) -> dict[str, int]:
        """Return when each reader moved last, by the later of its own and the store's clock.

        A clock that is far behind must not make a running reader expire.
        """
        found = {name: each.moved_ms for name, each in positions.items()}
        if any(each < expired_ms for each in found.values()):
            for name, stored_ms in stored_readers(self._log).items():
                found[name] = max(found.get(name, 0), stored_ms)
        return found

    def _retained_from(self, view: LogView, now_ms: int) -> int | None:
        """Return the first sequence within the retention; None without a retention.

        If both a time and a size are set, the one that keeps less counts, as in Kafka.
        """
        bounds = []
        if view.index.retention_ms is not None:
            bounds.append(kept_since(view, now_ms - view.index.retention_ms, now_ms))
        if view.index.retention_bytes is not None:
            known_ms = self._full_since_ms
            bounds.append(
                view.index.floor if known_ms is None else kept_since(view, known_ms, now_ms)
            )
        return max(bounds, default=None)

    def _delete_parts(self, before: int) -> None:
        """Delete segments and pages that end before a sequence.

        No index names them any more, or ever will. A mover that is about to name one has read an
        older index and loses its race.

        It lists once for each sequence, because a collector may have been killed after it raised
        the floor, and again if something is left: a deletion failed, or the page was full.
        """
        if before <= self._parts_deleted:
            return
        folder = parts_folder(self._config)
        found = self._store.list(folder, limit=_PAGE)
        keys = [each.key for each in found.objects if end_of_part(each.key) <= before]
        # Parts are listed from the oldest on. So a page with none to delete is the last one that
        # matters, also if more follow.
        if not keys or not (self._store.delete_many(keys) or found.truncated):
            self._parts_deleted = before

    def _queued_in(self, manifest: Manifest) -> Queued:
        """Return the queued batches of this manifest; pages with the same one share them."""
        if self._queued is None or self._queued[0] is not manifest:
            oldest_ms = None
            if manifest.entry_count:
                location = manifest.entries(limit=1)[0].location
                named_ms = name_time_ms(location)
                oldest_ms = self._stored_ms(location) if named_ms is None else named_ms
            self._queued = (manifest, Queued(frozenset(manifest.locations()), oldest_ms))
        return self._queued[1]

    def _stored_ms(self, location: str) -> int | None:
        """Return when the store wrote an object; None if it does not exist."""
        try:
            got = self._store.get(location, byte_range=(0, 1))
        except errors.ObjectNotFound:
            return None
        assert got is not None
        return got.last_modified_ms

    def _delete(self, made: GcPlan, read_at: float) -> GcReport:
        window_s = max(self._grace_ms / 4 / 1000, _LEAST_WINDOW_S)
        failed: list[DeleteFailure] = []
        tried = 0
        while tried < len(made.delete):
            if self._stopping or self._runtime.monotonic() - read_at > window_s:
                break
            chunk = made.delete[tried : tried + _BULK]
            failed += self._store.delete_many([info.key for info in chunk])
            tried += len(chunk)
        deleted, abandoned = tried - len(failed), len(made.delete) - tried
        metrics.gc_files_deleted.add(deleted)
        metrics.gc_files_failed.add(len(failed))
        for each in failed[:10]:
            log.warning("could not delete %s, next cycle tries again: %s", each.key, each.reason)
        return GcReport(made, deleted, tuple(failed), abandoned)

    @checked
    def start(self, delay_s: float = 0.0) -> None:
        """Run a cycle and then one after every interval, in a thread, until :meth:`stop`.

        Args:
            delay_s: Seconds before the first cycle, unless :meth:`begin` is called earlier.

        Raises:
            InvalidInput: ``delay_s`` is not a number.
        """
        if self._task is None:
            self._delay_s = delay_s
            self._task = self._runtime.spawn(self._loop, "opendata-buffer-gc")

    def begin(self) -> None:
        """Begin the first cycle now, if it waits for its delay."""
        if self._delay_s:
            with self._condition:
                self._delay_s = 0.0
                self._condition.notify_all()

    def stop(self) -> None:
        """End the thread. No delete begins after this returns. May be called again.

        Waits for a running request until the caller's deadline, and at most a minute.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._task is not None:
            left = remaining()
            most = _STOP_TIMEOUT_S if left is None else max(0.0, left)
            self._task.join(min(most, _STOP_TIMEOUT_S))
            if self._task.is_alive():
                log.warning("the store still holds a request of the stopped collector")

    def abandon(self) -> None:
        """End the thread when it next wakes, without taking a lock or waiting."""
        self._stopping = True

    def _loop(self) -> None:
        if delay_s := self._delay_s:
            with self._condition:
                wait_for(
                    self._runtime,
                    self._condition,
                    lambda: self._stopping or not self._delay_s,
                    delay_s,
                )
                self._delay_s = 0.0
        while not self._stopping:
            try:
                for _ in self._cycle(dry_run=False):  # reports of long cycles add up to much
                    pass
            except errors.Fenced as error:
                log.info("collector ends: %s", error)
                return
            except (errors.PrefixConflict, errors.QueueReset) as error:
                log.error("collector ends: %s", error)
                return
            except errors.OpenDataBufferError as error:
                log.warning("collection failed, next cycle tries again: %s", error)
            except Exception:
                # The consumer beside it must go on after any error.
                log.exception("collection failed unexpectedly, next cycle tries again")
            interval_ms = self._config.collector.interval_ms or max(50, self._grace_ms / 2)
            with self._condition:
                if not self._stopping:
                    self._condition.wait(interval_ms / 1000)


def _until(page: Listing, last: str) -> Listing:
    """Return the page without the objects after ``last``."""
    kept = tuple(each for each in page.objects if each.key <= last)
    # A cut page is truncated, too: the owner marker of a queue inside the prefix may have been cut
    # off, and the collector asks for it only where more follows (failure F7).
    return Listing(kept, page.now_ms, page.truncated or len(kept) < len(page.objects))
