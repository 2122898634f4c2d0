"""Sizes and record counts of batches that wait, without a request for each where possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.errors import CorruptBatch, CorruptData, InvalidInput, ObjectNotFound
from opendata_buffer.formats.batch import FOOTER_SIZE, parse_footer
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Blob, Get, List

__all__ = ["Measures", "MeasuredStore"]

LIST_INTERVAL_S = 30.0
"""Least time between two listings that are made for estimates only."""

WORTH_LISTING = 16
"""Batches of unknown size that make a listing worth its price for packing tasks."""

UNKNOWN_SIZE = 1024 * 1024
"""What a batch is taken to weigh while nothing is known."""


class MeasuredStore(Get, List, Protocol):
    """What measuring needs of a store."""


class Measures:
    """Remembers what was listed, for batches that still wait.

    Args:
        store: Where the batches are.
        prefix: The data prefix; one listing of it tells all sizes.
        runtime: Clock.
        concurrency: Footers read at once.
    """

    def __init__(
        self, store: MeasuredStore, prefix: str, *, runtime: Runtime, concurrency: int
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._runtime = runtime
        self._concurrency = concurrency
        self._sizes: dict[str, int] = {}
        self._records: dict[int, int] = {}
        self._listed_at: float | None = None
        self._average = UNKNOWN_SIZE

    def sizes(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Stored bytes of each, from one listing when any is unknown.

        A batch that a listing does not show (deleted, or outside the prefix) counts as average.
        """
        if any(each.location not in self._sizes for each in batches):
            self._list()
        return self._known(batches)

    def estimates(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """As :meth:`sizes`, but lists only when that is cheap beside reading the batches."""
        unknown = sum(1 for each in batches if each.location not in self._sizes)
        if unknown >= WORTH_LISTING and (
            self._listed_at is None
            or self._runtime.monotonic() - self._listed_at >= LIST_INTERVAL_S
        ):
            self._list()
        return self._known(batches)

    def records(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        """Records of each, from the footers; the one thing no listing tells."""
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
        there = fetch_many(
            self._exists,
            batches,
            concurrency=self._concurrency,
            max_in_flight_bytes=UNKNOWN_SIZE,
            runtime=self._runtime,
            size_of=lambda _: 1,
        )
        return [each for each, exists in zip(batches, there, strict=True) if not exists]

    def forget_before(self, sequence: int) -> None:
        """Drop what is known of batches that were read."""
        for known in [each for each in self._records if each < sequence]:
            del self._records[known]

    def _known(self, batches: Sequence[BatchDescriptor]) -> list[int]:
        return [self._sizes.get(each.location, self._average) for each in batches]

    def _list(self) -> None:
        listing = self._store.list(f"{self._prefix}/")
        self._listed_at = self._runtime.monotonic()
        self._sizes = {
            each.key: each.size for each in listing.objects if each.key.endswith(".batch")
        }
        if self._sizes:
            self._average = sum(self._sizes.values()) // len(self._sizes)

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
