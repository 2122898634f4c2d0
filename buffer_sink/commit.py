"""What the commit to a queue and the commit to a topic share: the age of uploads, and repeats.

No manifest names a write's uploads before the driver appends them. Until then they are safe from
a garbage collector only for a time (failure F5): it deletes an object once both the time in its
name and the time of its upload are older than the grace period. Tasks therefore name their batches
ahead of time, by the longest time that a write may take: the object itself tells every collector
how long to wait, also one of another version or of another client. See decision 0012.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from buffer_sink.messages import Group
from buffer_sink.options import SinkOptions
from opendata_buffer import metrics
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import OpenDataBufferError, TransientStorageError
from opendata_buffer.formats.entries import NewEntry
from opendata_buffer.formats.keys import Transaction, location_timestamp_ms
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import OpenPause, Queue, broker_pause
from opendata_buffer.runtime import Moment, Runtime
from opendata_buffer.stores.base import List, Store

log = logging.getLogger(__name__)

_PAGE = 10_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Expiry:
    """A moment after which uploads must not be appended without another look at them.

    Attributes:
        since: When it was set.
        left_ms: How long after that, milliseconds.
    """

    since: Moment
    left_ms: float

    def is_over(self, runtime: Runtime) -> bool:
        """By both clocks: a machine that is suspended stops its monotonic one."""
        return self.since.age_ms(Moment.now(runtime)) > self.left_ms


class UploadAges:
    """Tells how long uploads are safe, from the plan of their write or by a listing.

    Args:
        store: Where they lie.
        grace_ms: The collector's grace period, milliseconds.
        max_write_ms: How far names are ahead of time; for messages.
        runtime: Clocks.
    """

    def __init__(self, store: List, grace_ms: int, max_write_ms: int, runtime: Runtime) -> None:
        self._store = store
        self._grace_ms = grace_ms
        self._max_write_ms = max_write_ms
        self._runtime = runtime

    def expiry(self, group: Group) -> Expiry:
        """Until when the uploads of a group are surely there.

        No upload is older than the write's plan, and the driver's clocks tell how old that is; so
        most writes are young without asking the store. Of an older write a listing tells the ages,
        by the store's own clock: each upload must exist, and must not look older than half of the
        grace period. The other half is the time that the append may take.

        Raises:
            TransientStorageError: Uploads are too old, or gone.
        """
        now = Moment.now(self._runtime)
        age_ms: float | None = None
        if group.planned.precedes(now):
            age_ms = group.planned.age_ms(now)
        if age_ms is None or age_ms > self._grace_ms / 2:
            age_ms = self.oldest_ms(group.locations)
            if age_ms is None or age_ms > self._grace_ms / 2:
                raise self.too_old()
        return Expiry(now, self._grace_ms - age_ms)

    def oldest_ms(self, locations: Iterable[str]) -> float | None:
        """Age of the oldest object as a collector sees it, milliseconds; None when one is gone.

        It is counted from the later of name and upload, by the store's clock, and is below 0 for
        a name that is ahead of time.
        """
        missing = set(locations)
        folder = _common_folder(missing)
        after, last = min(missing)[:-1], max(missing)
        oldest: float | None = None
        while True:
            page = self._store.list(folder, start_after=after, limit=_PAGE)
            for each in page.objects:
                if each.key in missing:
                    missing.remove(each.key)
                    named_ms = location_timestamp_ms(each.key) or 0
                    age_ms = float(page.now_ms - max(named_ms, each.last_modified_ms))
                    oldest = age_ms if oldest is None else max(oldest, age_ms)
            if not missing:
                return oldest
            if not page.truncated or page.objects[-1].key >= last:
                return None
            after = page.objects[-1].key

    def outlived_collector(self, locations: Iterable[str]) -> bool:
        """Whether all objects are there once no collector deletes by a manifest read before now.

        A collector that has read the manifest deletes by it for another quarter of the grace
        period; this waits for that long.
        """
        wait_s = self._grace_ms / 4000 + 1
        log.warning(
            "objects are older than the collector's grace period: waiting %.0f s to see that none "
            "of them is deleted",
            wait_s,
        )
        self._runtime.sleep(wait_s)
        return self.oldest_ms(locations) is not None

    def too_old(self) -> TransientStorageError:
        """The error for uploads that may be deleted before they are queued, or are gone."""
        return TransientStorageError(
            f"the write took so long that its first batches may be deleted as orphans, or are "
            f"gone: it may take {self._max_write_ms / 1000:.0f} s from its plan to its commit "
            "(maxWriteDurationMs). Nothing was appended; write again, with a larger "
            "maxWriteDurationMs, smaller writes (maxBytesPerTrigger), or more partitions."
        )


def _common_folder(locations: Iterable[str]) -> str:
    """The longest text ending in a slash that all locations begin with."""
    first, last = min(locations), max(locations)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[:same].rpartition("/")[0] + "/"


class UploadCommitter:
    """Makes the uploads of a write visible. :meth:`append` depends on where they go.

    Args:
        store: Where queue, or topic, and batches live.
        options: The sink's options.
        runtime: Clocks, names and threads.
        open_pause: Has a broker pause while this process appends, unless ``broker`` is ``off``.
    """

    def __init__(
        self,
        store: Store,
        options: SinkOptions,
        runtime: Runtime,
        open_pause: OpenPause = broker_pause,
    ) -> None:
        self._store = store
        self._config = options.queue
        self._runtime = runtime
        self._ages = UploadAges(
            store, options.gc_grace_period_ms, options.max_write_duration_ms, runtime
        )
        self._open_pause = None if options.broker == "off" else open_pause
        self._queues: dict[str, Queue] = {}

    def append(self, group: Group | None) -> bool:
        """Append a group, unless it was committed before; False when nothing was appended."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """End connections that outlive an append; the next one makes what it needs."""
        for queue in self._queues.values():
            queue.disconnect()

    def _queue(self, config: QueueConfig) -> Queue:
        # First use in this process: refused are a store without compare-and-swap (failure F12), a
        # prefix of another queue, whose collector would delete our batches (failure F7), and a
        # manifest that was lost or restored from an old copy (failure F4).
        queue = self._queues.get(config.manifest_path)
        if queue is None:
            claim = claim_for_writing(self._store, config, runtime=self._runtime)
            queue = Queue(
                self._store,
                config,
                runtime=self._runtime,
                role="producer",
                claim=claim,
                open_pause=self._open_pause,
            )
            self._queues[config.manifest_path] = queue
        return queue

    def _close_after(self, group: Group) -> None:
        """Save now how far the queues got (failure F4), where the process may be about to end.

        A write outside of a query may be all that its process does. In a query the marker is
        written within the next minute.
        """
        if group.query is None:
            for queue in self._queues.values():
                queue.close()

    def _append_unexpired(
        self,
        queue: Queue,
        group: Group,
        entries: Sequence[NewEntry],
        guard: Callable[[Manifest], T | None],
        objects_missing: Callable[[int], OpenDataBufferError],
    ) -> int | T:
        """Append entries while the uploads that they name are safe (failure F5).

        Args:
            queue: Where to.
            group: Has the uploads.
            entries: The entries.
            guard: Asked of the manifest that is about to be replaced; anything but None stops the
                append.
            objects_missing: Makes the error for an append that landed after the uploads had
                expired and some of them were gone, from its first sequence. That takes a process
                that is frozen between the last look at the clock and the write, for long, while
                no other process writes the manifest.

        Returns:
            The first sequence, or the guard's answer.

        Raises:
            TransientStorageError: Uploads are too old, or gone.
            OpenDataBufferError: As :meth:`.Queue.append`.
        """
        while True:
            expiry = self._ages.expiry(group)

            def unexpired(before: Manifest, expiry: Expiry = expiry) -> T | Expiry | None:
                # Asked on each attempt: the process may have been paused since the last one.
                return expiry if expiry.is_over(self._runtime) else guard(before)

            outcome: int | T | Expiry = queue.append(entries, guard=unexpired)
            if isinstance(outcome, Expiry):
                continue
            # Uploads that are there when a collector can have missed the append no more are queued
            # and stay.
            if (
                isinstance(outcome, int)
                and expiry.is_over(self._runtime)
                and not self._ages.outlived_collector(group.locations)
            ):
                raise objects_missing(outcome)
            return outcome

    def _drop_repeat(self, group: Group, txn: Transaction) -> bool:
        """Report a write that was committed before; False, as nothing is appended."""
        metrics.write_repeats_dropped.add(len(group.uploads))
        log.warning(
            "batch %d of app %s was committed before: %d records in %d batches are not appended "
            "again. After a restart of its query this is right; otherwise two writers share the "
            "txnAppId.",
            txn.batch, txn.app, group.records, len(group.uploads),
        )  # fmt: skip
        return False
