"""Find batches of a log whose objects are gone, and the place where a reader can continue.

A garbage collector of v1 does not know logs. It deletes each batch that the manifest does not name,
and after entries have moved into segments, the manifest does not name them any more (failure F42).
The index of the log still does::

    segment      0 to 1023     batches deleted
    segment   1024 to 2047     batches up to 1158 deleted
    manifest  2048 to 2300     all there

The collector deletes the oldest batches first. So a binary search over the sequences finds the
first batch that is still there, here 1159. It takes about twenty small requests for a million
batches.

If objects in the middle were deleted, the search finds one of several places from which a batch
is there. ``fsck`` looks at every object.
"""

from __future__ import annotations

from dataclasses import dataclass

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import is_confined
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.queue.stored_manifest import read_manifest
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import exists


@dataclass(frozen=True, slots=True)
class Missing:
    """A range of batches that are gone.

    Attributes:
        first: The first sequence that was looked for.
        end: The first sequence after it that can be read, or the end of the log.
        count: Number of batches that are gone.
    """

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
    """Return the batches that are gone from a sequence on.

    Args:
        view: The log.
        needed: The sequence that a reader needs.

    Returns:
        None if the batch of that sequence is there.

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
            high = middle  # Everything from here to there was removed from the log.
        elif _is_stored(view, at):
            high, found = middle, at
        else:
            low = at
    return Missing(first, found, view.count(first, found))


def look_for_missing(
    store: CasStore, config: QueueConfig, runtime: Runtime, needed: int
) -> Missing | None:
    """Read the log as it is now, and return the batches that are gone from a sequence on.

    Args:
        store: The opened store of the queue.
        config: The queue.
        runtime: Clock and sleep.
        needed: Sequence of the first batch that the caller needs.

    Returns:
        The missing batches. None if the batch of that sequence is there, or if the queue is not a
        log.

    Raises:
        CorruptData: The index or a segment cannot be read.
        StorageError: The store did not answer.
    """
    claim = check_owner(store, config, runtime=runtime)
    manifest = read_manifest(store, config, runtime) or Manifest.empty()
    log = Log(store, config, runtime, "" if claim is None else claim.queue_id)
    index = log.read()
    return None if index is None else find_missing(LogView.of(log, index, manifest), needed)


def _is_stored(view: LogView, sequence: int) -> bool:
    """Return whether the object of a batch is there. Reads nothing outside the data prefix."""
    (entry,) = view.entries(sequence, 1)
    config = view.log.config
    confined = is_confined(entry.location, config.data_path_prefix)
    return not confined or exists(view.log.store, entry.location)
