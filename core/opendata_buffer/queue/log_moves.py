"""Move the oldest entries of a log from its manifest into segments.

Any writer of the queue may move entries, and several may try at the same time. The order of the
three writes is what makes that safe::

    1. store a segment with the entries
    2. name it in the index, with compare-and-swap
    3. remove the entries from the manifest, with compare-and-swap

A writer that is killed after step 1 leaves a segment that no index names, which the collector
deletes. One that is killed after step 2 leaves entries in both places, and the next writer removes
them. So no entry is ever in neither place (failure F43). Two writers store two segments, and the
index names the one of the faster.

This module has steps 1 and 2. Step 3 is :meth:`.Queue.shorten`.
"""

from __future__ import annotations

import logging

from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.messages import undecided
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.marker import is_rebuilt_at, skipped_ranges

logger = logging.getLogger(__name__)


def move_entries(log: Log, manifest: Manifest) -> LogIndex | None:
    """Move the oldest entries of a long manifest into segments.

    Args:
        log: The log. Nothing is moved if the queue is not a log.
        manifest: The manifest as it was just read.

    Returns:
        The index, whose ``end`` says which entries may leave the manifest. None if the queue is
        not a log.

    Raises:
        OldIndex: The index was restored from an old copy.
        CorruptData: The index cannot be read.
        StorageError: The store did not answer, or refused a write.
    """
    if (index := log.read()) is None:
        return None
    log.check_gap(index, manifest)
    while True:
        first = max(index.end, manifest.first_sequence)
        if manifest.next_sequence - first <= log.most_entries:
            break
        end = min(
            manifest.next_sequence - log.left_entries,
            first + log.segments.most_entries,
            _first_open(manifest, first, log.config.data_path_prefix),
        )
        if end == first:
            break
        # Store the object first, so that the index never names a missing segment (failure F43).
        part = log.segments.add(manifest.part(first, end))
        skipped = skipped_ranges(log.store, log.config, log.runtime) if first > index.end else ()
        if is_rebuilt_at(first, skipped):
            logger.warning(
                "manifest %r was rebuilt: the log continues at sequence %d after %d",
                log.config.manifest_path,
                first,
                index.end - 1,
            )
        elif first > index.end:  # failure F42
            logger.error(
                "sequences %d to %d were removed from manifest %r by a consumer that does not "
                "know logs (the manifest has epoch %d). Readers have lost them. Stop that "
                "consumer. It can continue as a named reader.",
                index.end,
                first - 1,
                log.config.manifest_path,
                manifest.epoch,
            )
        index = log.replace(index, index.with_segment(part))
    paged = log.segments.with_pages(index)
    return index if paged is index else log.replace(index, paged)


def _first_open(manifest: Manifest, first: int, data_path_prefix: str) -> int:
    """Return the first sequence of an open transaction, or the end of the manifest.

    Nothing is moved from there on: the process that ends a transaction looks for it in the
    manifest (:mod:`opendata_buffer.transactions`).
    """
    if b"/message=" not in manifest.raw:
        return manifest.next_sequence
    names = enumerate(manifest.locations(), manifest.first_sequence)
    found = undecided(names, data_path_prefix).values()
    begins = (txn.first_sequence for txn in found if txn.first_sequence >= first)
    return min(begins, default=manifest.next_sequence)
