"""Which objects the collector may delete: pure decisions on a manifest and a page of a listing.

What keeps them from naming a batch that may still be read:

* A batch between its upload and its append is in no manifest. It is not deleted before it is
  older than the grace period, and its age is the *smallest* of what three clocks say: the
  writer's, in its name; the store's; and the collector's own. One clock that is wrong makes
  nothing old (failure F6), and its writer does not append what is older than half of the grace
  period (failure F5).
* Clocks that are far apart stop the collection: one of them is wrong, and nobody knows which.
* The manifest is read after the listing, so what was appended in between is in the manifest
  (failure F5). That order is the caller's part.
* Only names that producers give to batches are looked at, and none below a queue that lies
  inside the prefix (failure F7).
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from opendata_buffer.formats.keys import location_timestamp_ms, parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.marker import MARKER_NAME
from opendata_buffer.stores import Listing, ObjectInfo

__all__ = ["GcPlan", "Queued", "clock_fault", "name_time_ms", "plan", "spare", "unknown_markers"]

_LEAST_TOLERANCE_MS = 5_000  # S3 tells its time in whole seconds, and answers take some


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What to delete, and why the rest stays.

    Attributes:
        delete: Orphans that nobody can come to need, oldest first within a page of the listing.
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

    def __add__(self, other: GcPlan) -> GcPlan:
        """The plan of two pages."""
        return GcPlan(
            self.delete + other.delete,
            self.referenced + other.referenced,
            self.waiting + other.waiting,
            self.ignored + other.ignored,
            other.held or self.held,
        )


@dataclass(frozen=True, slots=True)
class Queued:
    """What the queue holds, as the collector needs it.

    Attributes:
        locations: Of all queued batches.
        oldest_ms: When the first of them was written, milliseconds since the Unix epoch; None
            when the queue is empty.
    """

    locations: frozenset[str] = frozenset()
    oldest_ms: int | None = None

    @classmethod
    def of(cls, manifest: Manifest, oldest_ms: int | None) -> Queued:
        """What a manifest names.

        Raises:
            CorruptManifest: The manifest's entries break the format.
        """
        return cls(frozenset(entry.location for entry in manifest.entries()), oldest_ms)


def plan(
    queued: Queued, page: Listing, *, own_ms: int, data_path_prefix: str, grace_ms: int
) -> GcPlan:
    """Which objects of a page to delete (OpenData RFC 0001, Garbage Collection, Mechanism).

    Args:
        queued: What a manifest names that was read *after* the page was listed.
        page: Objects below the data prefix, and the store's own clock.
        own_ms: The collector's clock before it listed them; milliseconds since the Unix epoch.
        data_path_prefix: The queue's data prefix.
        grace_ms: Least age of a deleted object, milliseconds.
    """
    newest_ms = min(page.now_ms, own_ms) - grace_ms
    referenced = waiting = ignored = 0
    delete: list[tuple[int, str, ObjectInfo]] = []
    for info in page.objects:
        parsed = parse_location(info.key, data_path_prefix)
        if info.key in queued.locations:
            referenced += 1
        elif parsed is None:
            ignored += 1
        else:
            # The later of both times makes for the smaller age (failure F6).
            written_ms = max(parsed.timestamp_ms, info.last_modified_ms)
            named_ms = name_time_ms(info.key)
            compared_ms = info.last_modified_ms if named_ms is None else named_ms
            if written_ms >= newest_ms or (
                queued.oldest_ms is not None and compared_ms >= queued.oldest_ms
            ):
                waiting += 1
            else:
                delete.append((compared_ms, info.key, info))
    made = GcPlan(
        tuple(info for _, _, info in sorted(delete, key=lambda each: each[:2])),
        referenced,
        waiting,
        ignored,
    )
    return spare(made, _nested_queues(page.objects, data_path_prefix))


def name_time_ms(location: str) -> int | None:
    """When a batch was named, by its ULID; None for a name that does not tell.

    OpenData's Go producer names the run and not the batch: batches of a run that lasts for
    weeks would all look as old as its first one, and as new as each other.
    """
    return location_timestamp_ms(location) if location.endswith(".batch") else None


def clock_fault(store_ms: int, own_ms: int, grace_ms: int) -> str | None:
    """Why the clocks do not allow to collect, or None.

    Args:
        store_ms: The store's clock, milliseconds since the Unix epoch.
        own_ms: The collector's, at the same moment.
        grace_ms: The grace period, milliseconds. A quarter of it is tolerated.
    """
    apart_ms = abs(store_ms - own_ms)
    if apart_ms <= max(grace_ms / 4, _LEAST_TOLERANCE_MS):
        return None
    ahead = "ahead of" if store_ms > own_ms else "behind"
    return (
        f"the store's clock is {apart_ms / 1000:.0f} s {ahead} this machine's, which is more than "
        f"a quarter of the grace period of {grace_ms / 1000:.0f} s. One of them is wrong, and no "
        "object's age can be told. Set this machine's clock (NTP), or mend the store's."
    )


def spare(made: GcPlan, nested: Collection[str]) -> GcPlan:
    """The plan without what lies in the folders of ``nested``, each with a slash at its end."""
    if not nested:
        return made
    kept = tuple(
        info for info in made.delete if not any(info.key.startswith(folder) for folder in nested)
    )
    return replace(made, delete=kept, ignored=made.ignored + len(made.delete) - len(kept))


def unknown_markers(
    made: GcPlan, page: Listing, start_after: str, data_path_prefix: str
) -> list[str]:
    """Keys of owner markers that would spare a planned object, and that the page cannot show.

    A queue inside the prefix has a marker in its folder. The page shows it if its key lies
    within the page; the first and the last folder of a page may go on in its neighbours.

    Args:
        made: What is planned for the page.
        page: The page.
        start_after: Where it began.
        data_path_prefix: The queue's data prefix.
    """
    end = page.objects[-1].key if page.truncated and page.objects else None
    wanted: set[str] = set()
    for info in made.delete:
        folder = posixpath.dirname(info.key)
        while folder != data_path_prefix:
            marker = f"{folder}/{MARKER_NAME}"
            if marker <= start_after or (end is not None and marker > end):
                wanted.add(marker)
            folder = posixpath.dirname(folder)
    return sorted(wanted)


def _nested_queues(objects: Iterable[ObjectInfo], data_path_prefix: str) -> tuple[str, ...]:
    """Folders below the prefix that another queue has claimed for itself."""
    return tuple(
        posixpath.dirname(info.key) + "/"
        for info in objects
        if posixpath.basename(info.key) == MARKER_NAME
        and info.key != f"{data_path_prefix}/{MARKER_NAME}"
    )
