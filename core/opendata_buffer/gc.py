"""The garbage collector: deletes batch objects that no queue entry names (OpenData RFC 0001).

:func:`plan` decides and does no IO; :class:`GarbageCollector` reads, asks it, and deletes. What
keeps it from deleting a batch that may still be read:

* A batch between upload and enqueue is in no manifest. It is younger than the grace period by
  its name *and* by the store's own clock, so no client's clock can make it look old (failure
  F6), and its producer does not enqueue it once it is older than half of that (failure F5).
* Objects are listed *before* the manifest is read: what was enqueued in between is in the
  manifest. A cycle gives up its remaining deletes when its manifest is older than a quarter of
  the grace period (failure F5).
* The prefix belongs to this queue (failure F7), and only names this queue can make are looked
  at. A collector of a fenced consumer stops (failure F9).
* A manifest that is not there proves nothing: nothing is deleted (failure F4).
"""

from __future__ import annotations

import logging
import posixpath
from dataclasses import dataclass
from typing import Protocol

from opendata_buffer import metrics
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import (
    Fenced,
    ObjectNotFound,
    OpenDataBufferError,
    PrefixConflict,
    QueueReset,
)
from opendata_buffer.formats.keys import location_timestamp_ms, parse_location
from opendata_buffer.formats.manifest import MAX_MANIFEST_BYTES, Manifest
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.owner import MARKER_NAME, Claim, check_owner, claim_queue
from opendata_buffer.runtime import Runtime, SystemRuntime, Task
from opendata_buffer.stores import (
    Delete,
    DeleteFailure,
    List,
    Listing,
    NotModified,
    ObjectInfo,
)

__all__ = ["GarbageCollector", "GcPlan", "GcReport", "plan"]

log = logging.getLogger(__name__)

_BULK = 1_000  # the most keys one S3 bulk delete takes; the age of the manifest is checked between
_LEAST_WINDOW_S = 1.0  # a collector told to wait for nothing may still delete
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What to delete, and why the rest stays.

    Attributes:
        delete: Orphans that nobody can come to need, oldest name first.
        referenced: Batches the manifest names.
        waiting: Orphans that are too young, or newer than the oldest queued batch.
        ignored: Objects that are no batch of this queue.
        held: Why nothing may be deleted at all, or None.
    """

    delete: tuple[ObjectInfo, ...] = ()
    referenced: int = 0
    waiting: int = 0
    ignored: int = 0
    held: str | None = None

    @property
    def delete_bytes(self) -> int:
        """Bytes of the objects to delete."""
        return sum(each.size for each in self.delete)


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one cycle did.

    Attributes:
        plan: What it set out to do.
        deleted: Objects deleted.
        failed: Objects that could not be deleted; the next cycle tries again.
        abandoned: Objects left because the cycle took too long or was stopped.
    """

    plan: GcPlan
    deleted: int = 0
    failed: tuple[DeleteFailure, ...] = ()
    abandoned: int = 0


class GcStore(CasStore, List, Delete, Protocol):
    """What the collector needs of a store."""


def plan(
    manifest: Manifest, listing: Listing, now_ms: int, *, data_path_prefix: str, grace_ms: int
) -> GcPlan:
    """Which objects of a listing to delete (OpenData RFC 0001, Garbage Collection, Mechanism).

    Args:
        manifest: The queue, read *after* the listing.
        listing: The objects below the data prefix.
        now_ms: The store's own clock, ``listing.now_ms``; milliseconds since the Unix epoch.
        data_path_prefix: The queue's data prefix.
        grace_ms: Least age of a deleted object, milliseconds.

    Raises:
        CorruptManifest: The manifest's entries break the format.
    """
    entries = manifest.entries()
    locations = {entry.location for entry in entries}
    nested = _nested_queues(listing, data_path_prefix)
    referenced = ignored = 0
    orphans: list[tuple[int, ObjectInfo]] = []
    for info in listing.objects:
        parsed = parse_location(info.key, data_path_prefix)
        if info.key in locations:
            referenced += 1
        elif parsed is None or any(info.key.startswith(each) for each in nested):
            ignored += 1
        else:
            orphans.append((parsed.timestamp_ms, info))

    newest_ms = now_ms - grace_ms
    if entries:
        oldest_ms = location_timestamp_ms(entries[0].location)
        if oldest_ms is None:
            held = (
                f"the oldest queued batch {entries[0].sequence} at {entries[0].location!r} has no "
                "ULID name, so nothing tells what is older. It is delivered and dropped first."
            )
            return GcPlan((), referenced, len(orphans), ignored, held)
        newest_ms = min(newest_ms, oldest_ms)
    delete = sorted(
        (
            (named_ms, info)
            for named_ms, info in orphans
            # failure F6: the name tells the producer's clock, last_modified the store's. Both must
            # agree that the object is old.
            if named_ms < newest_ms and info.last_modified_ms < now_ms - grace_ms
        ),
        key=lambda each: (each[0], each[1].key),
    )
    return GcPlan(
        tuple(info for _, info in delete), referenced, len(orphans) - len(delete), ignored
    )


def _nested_queues(listing: Listing, data_path_prefix: str) -> tuple[str, ...]:
    """Directories below the prefix that another queue has claimed for itself."""
    return tuple(
        posixpath.dirname(info.key) + "/"
        for info in listing.objects
        if posixpath.basename(info.key) == MARKER_NAME
        and info.key != f"{data_path_prefix}/{MARKER_NAME}"
    )


class GarbageCollector:
    """Runs the plan, once or in the background.

    Args:
        store: Where the queue lives.
        config: Prefix, manifest and, in ``config.gc``, interval and grace period.
        runtime: Clock and threads.
        epoch: Of the consumer it runs beside; a manifest with another one ends it (failure
            F9). None: whoever owns the queue.
    """

    def __init__(
        self,
        store: GcStore,
        config: ConsumerConfig,
        *,
        runtime: Runtime | None = None,
        epoch: int | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._epoch = epoch
        self._condition = self._runtime.condition()
        self._stopping = False
        self._task: Task | None = None
        self._seen = 0  # highest next sequence of the manifest so far

    def run_once(self, *, dry_run: bool = False) -> GcReport:
        """One cycle: list, read the manifest, plan, delete.

        Args:
            dry_run: Only read and plan; nothing is written.

        Raises:
            PrefixConflict: The data prefix belongs to the queue of another manifest (failure
                F7); nothing was deleted.
            Fenced: Another consumer owns the queue; nothing was deleted.
            QueueReset: The manifest went backwards since the last cycle; nothing was deleted.
            CorruptData: The manifest or the owner marker cannot be read; nothing was deleted.
            StorageError: The store did not answer; nothing was deleted. A failed delete does
                not raise: it is in the report.
        """
        started = self._runtime.monotonic()
        try:
            return self._cycle(dry_run)
        finally:
            metrics.gc_duration_seconds.record(self._runtime.monotonic() - started)

    def _cycle(self, dry_run: bool) -> GcReport:
        prefix, manifest_path = self._config.data_path_prefix, self._config.manifest_path
        claim: Claim | None
        if dry_run:
            claim = check_owner(self._store, self._config, runtime=self._runtime)
        else:
            claim = claim_queue(self._store, self._config, runtime=self._runtime)
        # failure F5: the listing first. The other way round, a batch that is uploaded and enqueued
        # between the two is listed and in no manifest we know.
        listing = self._store.list(f"{prefix}/")
        read_at = self._runtime.monotonic()
        manifest = self._read_manifest()
        if claim is not None:
            claim.check(manifest)
        if manifest is None:
            held = f"manifest {manifest_path!r} does not exist: there is no queue to compare with"
            return GcReport(GcPlan(held=held))
        if self._epoch is not None and manifest.epoch != self._epoch:
            raise Fenced(manifest_path, self._epoch, manifest.epoch)
        # failure F4: a manifest that was recreated names nothing of what the old one had queued,
        # and may carry the same epoch. Those batches may be all that is left of the old queue.
        if manifest.next_sequence < self._seen:
            raise QueueReset(
                f"manifest {manifest_path!r} went backwards: next sequence {self._seen} -> "
                f"{manifest.next_sequence}. It was recreated or restored; nothing is collected."
            )
        self._seen = manifest.next_sequence
        if claim is not None and not dry_run:
            claim.note(manifest, now=True)
        grace_ms = self._config.gc.grace_period_ms
        made = plan(manifest, listing, listing.now_ms, data_path_prefix=prefix, grace_ms=grace_ms)
        if made.held:
            log.warning("nothing collected below %s: %s", prefix, made.held)
        return GcReport(made) if dry_run else self._delete(made, read_at)

    def _read_manifest(self) -> Manifest | None:
        try:
            got = self._store.get(self._config.manifest_path, max_bytes=MAX_MANIFEST_BYTES)
        except ObjectNotFound:
            return None
        assert not isinstance(got, NotModified)
        return Manifest.parse(got.data)

    def _delete(self, made: GcPlan, read_at: float) -> GcReport:
        window_s = max(self._config.gc.grace_period_ms / 4 / 1000, _LEAST_WINDOW_S)
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
        if abandoned and not self._stopping:
            log.warning(
                "cycle took longer than %.0f s: %d orphans wait for the next", window_s, abandoned
            )
        if deleted:
            log.info("deleted %d of %d orphans", deleted, len(made.delete))
        return GcReport(made, deleted, tuple(failed), abandoned)

    def start(self) -> None:
        """Run a cycle now and then every interval, in a thread, until :meth:`stop`."""
        if self._task is None:
            self._task = self._runtime.spawn(self._loop, "opendata-buffer-gc")

    def stop(self) -> None:
        """End the thread; no delete begins after this returns. Free to repeat."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        if self._task is not None:
            self._task.join(_STOP_TIMEOUT_S)
            if self._task.is_alive():
                log.warning("the store still holds a request of the stopped collector")

    def abandon(self) -> None:
        """End the thread when it next wakes; takes no lock and waits for nothing."""
        self._stopping = True

    def _loop(self) -> None:
        interval_s = self._config.gc.interval_ms / 1000
        while not self._stopping:
            try:
                self.run_once()
            except Fenced as error:
                log.info("collector ends: %s", error)
                return
            except (PrefixConflict, QueueReset) as error:
                log.error("collector ends: %s", error)
                return
            except OpenDataBufferError as error:
                log.warning("collection failed, next cycle tries again: %s", error)
            except Exception:
                # Whatever it is, the consumer beside must not die of it.
                log.exception("collection failed unexpectedly, next cycle tries again")
            with self._condition:
                if not self._stopping:
                    self._condition.wait(interval_s)
