"""Where a query without a checkpoint begins in one queue: what its starting options mean. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from buffer_source.options import EARLIEST, LATEST, SourceOptions
from buffer_source.times import newest_ms
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.errors import DataLoss, InvalidInput

__all__ = ["first_of_offset", "first_since", "within"]

log = logging.getLogger(__name__)


def first_of_offset(options: SourceOptions, first: int, end: int, target: int | None) -> int:
    """The sequence that ``startingOffsets`` means.

    Args:
        options: What the query asked for.
        first: The first sequence that is queued.
        end: The queue's next sequence.
        target: Where this run ends, if that is decided.

    Raises:
        InvalidInput: The wanted sequence is beyond the end.
        DataLoss: It is not queued any more, unless a loss is allowed.
    """
    wanted = options.starting_offsets
    assert not isinstance(wanted, tuple), "of_partition() picks one"
    if wanted == EARLIEST:
        return first
    if wanted == LATEST:
        return within(end, first, target)
    position, manifest_path = int(wanted), options.consumer.manifest_path
    if position > end:
        raise InvalidInput(
            f"option startingOffsets is {position} and manifest "
            f"{manifest_path!r} ends at {end - 1}: use a sequence up to {end}, "
            "'earliest' or 'latest'"
        )
    if position >= first:
        return position
    if options.fail_on_data_loss:
        raise DataLoss(
            manifest_path,
            position,
            first,
            "Start at 'earliest' or at a sequence that is still queued.",
        )
    log.warning("data loss allowed: starting at %d, not at %d", first, position)
    return first


def first_since(queued: Iterable[BatchDescriptor], since_ms: int, end: int) -> int:
    """The first batch with a record taken in at that time or later; the end if none has."""
    for each in queued:
        taken_in_ms = newest_ms(each)
        # One of which nobody knows when it came rather comes too often than never.
        if taken_in_ms is None or taken_in_ms >= since_ms:
            return each.sequence
    return end


def within(sequence: int, first: int, target: int | None) -> int:
    """The sequence, not beyond where this run ends and not before what is queued."""
    return sequence if target is None else max(first, min(sequence, target))
