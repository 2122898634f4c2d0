"""Batches of a log whose objects are gone, and where a reader continues.

A collector that knows no log deletes each batch that the manifest does not name, and so the batches
of segments (failure F42). It deletes the oldest ones first. So a binary search over the sequences
finds the first batch that is still there, with some twenty small requests in a million batches.
Where objects in the middle were deleted, it finds one of the places from which on a batch is there;
``fsck`` looks at each object.
"""

from __future__ import annotations

from dataclasses import dataclass

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import is_confined
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.log import Log, LogView
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.queue.stored_manifest import read_manifest
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import exists


@dataclass(frozen=True, slots=True)
class Missing:
    """Batches of a log that are gone: ``count`` of those from ``first`` up to, not including,
    ``end``, which is the first one that can be read, or the end of the log."""

    first: int
    end: int
    count: int

    def __str__(self) -> str:
        which = f"sequences {self.first} to {self.end - 1}"
        return (
            f"the objects of {self.count:,} batches ({which}) are gone, and the first sequence "
            f"that can be read is {self.end}"
        )


def find_missing(view: LogView, needed: int) -> Missing | None:
    """Return the batches from ``needed`` on that are gone; None where that one can be read.

    Raises:
        CorruptData: A segment on the way cannot be read.
        StorageError: The store did not answer.
    """
    first = view.available_from(needed)
    if first >= view.next_sequence or _is_stored(view, first):
        return None
    low, high, found = first, view.next_sequence, view.next_sequence
    while high - low > 1:
        middle = (low + high) // 2
        at = view.available_from(middle)
        if at >= high:
            high = middle  # All from here to there was taken off the log.
        elif _is_stored(view, at):
            high, found = middle, at
        else:
            low = at
    return Missing(first, found, view.count(first, found))


def look_for_missing(
    store: CasStore, config: QueueConfig, runtime: Runtime, needed: int
) -> Missing | None:
    """As :func:`find_missing`, in the log as it is now; None also where the queue is not a log."""
    claim = check_owner(store, config, runtime=runtime)
    manifest = read_manifest(store, config, runtime) or Manifest.empty()
    log = Log(store, config, runtime, "" if claim is None else claim.queue_id)
    index = log.read()
    return None if index is None else find_missing(log.view(index, manifest), needed)


def _is_stored(view: LogView, sequence: int) -> bool:
    """Whether the object of a batch is there; nothing outside of the data prefix is read."""
    (entry,) = view.entries(sequence, 1)
    config = view.log.config
    confined = is_confined(entry.location, config.data_path_prefix)
    return not confined or exists(view.log.store, entry.location)
