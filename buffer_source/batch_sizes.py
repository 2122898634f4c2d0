"""Sizes and record counts of batches that wait, without a request for each where possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from buffer_source.options import SourceOptions
from opendata_buffer.consumer.cursors import BatchDescriptor
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.errors import CorruptBatch, CorruptData, InvalidInput, ObjectNotFound
from opendata_buffer.formats.batch import FOOTER_SIZE, parse_footer
from opendata_buffer.formats.keys import is_confined
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Blob, Get, List

LIST_INTERVAL_S = 30.0
"""Least time between two listings that are made for estimates only."""

PAGE = 1000
"""Objects asked for in one listing: what S3 gives in one answer."""

KEEP = 50_000
"""Sizes remembered of objects that a listing showed and that were not asked for yet."""

WORTH_LISTING = 16
"""From so many batches of unknown size on, a listing is worth its price for planning tasks."""

UNKNOWN_SIZE = 1024 * 1024
"""Size that a batch is taken to have while nothing is known."""


class SizedStore(Get, List, Protocol):
    """The part of a store that measuring needs."""


class BatchSizes:
    """Cache of stored sizes (bytes) and record counts of batches that wait.

    A size is listed once, from the first batch whose size is unknown to the last: what lies
    before and behind them, which may be much, costs nothing.

    Args:
        store: Where the batches are.
        options: What the query asked for, with the queue of these batches. Batches outside of its
            data prefix count as average, unless foreign locations are allowed.
        runtime: Clock.
    """

    def __init__(self, store: SizedStore, options: SourceOptions, runtime: Runtime) -> None:
        self._store = store
        self._prefix = options.queue.data_path_prefix
        self._allow_foreign = options.allow_foreign_locations
        self._concurrency = options.fetch_concurrency
        self._tasks = options.parallelism_asked
        self._runtime = runtime
        self._sizes: dict[str, int | None] = {}  # By location; None: no listing shows it.
        self._asked: dict[int, str] = {}  # Locations that were asked for, by sequence.
        self._records: dict[int, int] = {}
        self._listed_at: float | None = None
        self._average = UNKNOWN_SIZE

    def sizes(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Stored bytes of each; lists those that are unknown.

        A batch that no listing shows, because it was deleted, counts as average.
        """
        self._measure(batches)
        return self._known(batches)

    def total(self, batches: Sequence[BatchDescriptor]) -> int | None:
        """Stored bytes of all, where the size of each is known; makes no request."""
        total = 0
        for each in batches:
            size = self._sizes.get(each.location)
            if size is None:
                return None
            total += size
        return total

    def estimates(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """As :meth:`sizes`, but lists only when that is cheap beside reading the batches."""
        unknown = sum(1 for each in batches if each.location not in self._sizes)
        # With fewer batches than tasks that the user asked for, it is worth a listing to see
        # whether tasks can share one.
        idle_tasks = self._tasks is not None and len(batches) < self._tasks
        worth = 1 if idle_tasks else WORTH_LISTING
        if unknown >= worth and (
            self._listed_at is None
            or self._runtime.monotonic() - self._listed_at >= LIST_INTERVAL_S
        ):
            self._listed_at = self._runtime.monotonic()
            self._measure(batches)
        return self._known(batches)

    def records(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Records of each, from the footers: no listing tells them."""
        unknown = [each for each in batches if each.sequence not in self._records]
        if unknown:
            self.sizes(unknown)
            counts = fetch_many(
                self._footer,
                unknown,
                concurrency=self._concurrency,
                max_in_flight_bytes=UNKNOWN_SIZE,
                runtime=self._runtime,
            )
            for each, count in zip(unknown, counts, strict=True):
                self._records[each.sequence] = count
        return [self._records[each.sequence] for each in batches]

    def missing(self, batches: Sequence[BatchDescriptor]) -> list[BatchDescriptor]:
        """Those whose object does not exist, by a request for each."""
        exists = fetch_many(
            self._exists,
            batches,
            concurrency=self._concurrency,
            max_in_flight_bytes=UNKNOWN_SIZE,
            runtime=self._runtime,
            size_of=lambda _: 1,
        )
        return [each for each, found in zip(batches, exists, strict=True) if not found]

    def forget_before(self, sequence: int) -> None:
        """Drop what is known of batches that were read."""
        for known in [each for each in self._records if each < sequence]:
            del self._records[known]
        for known in [each for each in self._asked if each < sequence]:
            self._sizes.pop(self._asked.pop(known), None)

    def _known(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        sizes = (self._sizes.get(each.location) for each in batches)
        return [self._average if size is None else size for size in sizes]

    def _measure(self, batches: Sequence[BatchDescriptor]) -> None:
        """List the sizes of those batches that are unknown."""
        self._asked.update((each.sequence, each.location) for each in batches)
        unknown: dict[str, list[str]] = {}
        for each in batches:
            if each.location not in self._sizes:
                folder = self._folder(each.location)
                # Listing is reading: a manifest must not make us look elsewhere (failure F23).
                if folder is not None:
                    unknown.setdefault(folder, []).append(each.location)
        for folder, locations in unknown.items():
            self._list(folder, min(locations), max(locations))
            for location in locations:
                self._sizes.setdefault(location, None)
        if unknown:
            self._update_average()

    def _folder(self, location: str) -> str | None:
        """What to list for a location: the data prefix, or one writer's folder below it."""
        root = f"{self._prefix}/"
        if is_confined(location, self._prefix):
            inner, slash, _ = location[len(root) :].partition("/")
            return f"{root}{inner}/" if slash else root
        return f"{location.rpartition('/')[0]}/" if self._allow_foreign else None

    def _list(self, folder: str, first: str, last: str) -> None:
        after = first[:-1]  # Sorts before `first`, and behind all that is before it.
        while True:
            listing = self._store.list(folder, start_after=after, limit=PAGE)
            self._sizes.update((each.key, each.size) for each in listing.objects)
            if not listing.truncated or listing.objects[-1].key >= last:
                return
            after = listing.objects[-1].key

    def _update_average(self) -> None:
        """Compute the average of the known sizes; forget those not asked for if they are many."""
        if len(self._sizes) > KEEP + len(self._asked):
            kept = {location: self._sizes.get(location) for location in self._asked.values()}
            self._sizes = kept
        sizes = [size for size in self._sizes.values() if size is not None]
        if sizes:
            self._average = sum(sizes) // len(sizes)

    def _footer(self, batch: BatchDescriptor) -> int:
        size = self._sizes.get(batch.location)
        if size is None or size < FOOTER_SIZE:
            return 0  # The task that reads it says what is wrong, and what to do about it.
        try:
            got = self._store.get(batch.location, byte_range=(size - FOOTER_SIZE, size))
            return parse_footer(got.data).record_count if isinstance(got, Blob) else 0
        except (ObjectNotFound, CorruptBatch):
            return 0

    def _exists(self, batch: BatchDescriptor) -> bool:
        try:
            self._store.get(batch.location, byte_range=(0, 1))
        except ObjectNotFound:
            return False
        except (InvalidInput, CorruptData):
            pass  # Foreign or damaged: the task that reads it says what is wrong.
        return True
