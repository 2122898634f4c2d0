"""How long uploads that no manifest names yet are safe from the collector (failure F5).

It deletes an object once both the time in its name and the time of its upload are older than
the grace period. Tasks therefore name their batches ahead of time, by the longest time a write
may take: the object itself tells every collector how long to wait, also one of another version
or of another client. See the decision on slow writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from buffer_sink.messages import Group
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.formats.keys import location_timestamp_ms
from opendata_buffer.runtime import Moment, Runtime
from opendata_buffer.stores.base import List

__all__ = ["Expiry", "Lifetimes"]


log = logging.getLogger(__name__)

_PAGE = 10_000


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


class Lifetimes:
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

        No upload is older than the write's plan, and both that and the present are told by the
        driver's clocks; so most writes are young without asking the store. An older write is
        settled by a listing, on the store's own clock: each upload must exist, and must not
        look older than half of the grace period. The other half is what the append may take.

        Raises:
            TransientStorageError: Uploads are too old, or gone.
        """
        now = Moment.now(self._runtime)
        age_ms: float | None = None
        if group.planned.precedes(now):
            age_ms = group.planned.age_ms(now)
        if age_ms is None or age_ms > self._grace_ms / 2:
            age_ms = self.oldest_ms(each.location for each in group.uploads)
            if age_ms is None or age_ms > self._grace_ms / 2:
                raise self.too_old()
        return Expiry(now, self._grace_ms - age_ms)

    def oldest_ms(self, locations: Iterable[str]) -> float | None:
        """Age of the oldest object as a collector sees it, milliseconds; None when one is gone.

        It is counted from the later of name and upload, by the store's clock, and below 0 for
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

    def outwait_collector(self) -> None:
        """Wait until no collector deletes by a manifest it read before now."""
        wait_s = self._grace_ms / 4000 + 1
        log.warning(
            "objects are older than the collector's grace period: waiting %.0f s to see that none "
            "of them is deleted",
            wait_s,
        )
        self._runtime.sleep(wait_s)

    def too_old(self) -> TransientStorageError:
        """What to raise for uploads that may be deleted before they are queued, or are gone."""
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
