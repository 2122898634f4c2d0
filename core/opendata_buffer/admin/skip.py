"""Passing a batch by that stops a queue, and bringing it back, without losing any other.

The entry stays in the queue under its sequence, and names an empty batch from then on. So every
reader passes it, also one of another language that knows nothing of this, and the entries
around it keep their sequences. See the decision on skipping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from opendata_buffer.admin.observe import Observer
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.fetch import BatchDescriptor, FetchHandle
from opendata_buffer.errors import (
    CommitStateUnknown,
    CorruptBatch,
    InvalidInput,
    ObjectNotFound,
    PoisonBatch,
)
from opendata_buffer.formats.batch import decode_batch, encode_batch
from opendata_buffer.formats.keys import batch_key, parse_location
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.quarantine import (
    QuarantineReport,
    quarantine,
    read_copy,
    read_report,
    write_report,
)
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["Skipped", "restore_batch", "skip_batch"]


@dataclass(frozen=True)
class Skipped:
    """What a skip did.

    Attributes:
        report: Of the batch, as it lies in the quarantine.
        epoch: That the queue was taken over with; its consumer is fenced.
    """

    report: QuarantineReport
    epoch: int


def skip_batch(
    store: Store, config: ConsumerConfig, sequence: int, runtime: Runtime, *, force: bool = False
) -> Skipped:
    """Copy a queued batch to the quarantine, then put an empty batch in its place.

    Stop the queue's consumer first; one that still runs is fenced. It may be anywhere in the
    queue. When this fails half way, call it again.

    Args:
        store: Where the queue lives.
        config: Its manifest and prefix, and the largest batch that counts as readable.
        sequence: The batch.
        runtime: Clock and names.
        force: Also when the batch can be read.

    Raises:
        InvalidInput: There is no queue, the sequence is not queued, or the batch can be read
            and ``force`` was not given; nothing was changed.
        PrefixConflict, UnsafeStore: As for a consumer; nothing was changed.
        StorageError, Conflict: The store did not answer; the batch is still queued.
    """
    manifest = Observer(store, config, runtime).manifest()
    if not manifest.first_sequence <= sequence < manifest.next_sequence:
        held = (
            f"it holds {manifest.first_sequence} to {manifest.next_sequence - 1}"
            if manifest.entry_count
            else "it is empty"
        )
        raise InvalidInput(
            f"sequence {sequence} is not in the queue with manifest {config.manifest_path!r}: "
            f"{held}"
        )
    (entry,) = manifest.entries(sequence, 1)
    fault = _fault(FetchHandle.of(config, store=store, runtime=runtime), BatchDescriptor.of(entry))
    if fault is None and not force:
        raise InvalidInput(
            f"batch {sequence} at {entry.location!r} can be read: a consumer delivers it. To skip "
            "it all the same, pass force=True"
        )
    claim = claim_for_writing(store, config, runtime=runtime)
    report = quarantine(
        store,
        config.data_path_prefix,
        entry,
        fault or "skipped on request although it can be read",
        runtime=runtime,
        allow_foreign_locations=config.allow_foreign_locations,
    )
    # The transaction stays in the name: without it the entries behind it would look like a
    # repeat of the same transaction, and readers would drop them. So does the message: without
    # an acknowledgement what it decides would stay undecided.
    parsed = parse_location(entry.location, config.data_path_prefix)
    txn, message = (parsed.txn, parsed.message) if parsed else (None, None)
    location = batch_key(config.data_path_prefix, runtime.ulid(), txn, message)
    store.put(location, encode_batch([]))
    queue = Queue(store, config, runtime=runtime, role="operator", claim=claim)
    after = queue.replace(sequence, entry.location, NewEntry(location))
    queue.close()
    return Skipped(report, after.epoch)


def _fault(handle: FetchHandle, descriptor: BatchDescriptor) -> str | None:
    """Why a batch cannot be delivered; None when it can."""
    try:
        handle.fetch_arrow(descriptor)
    except PoisonBatch as error:
        return error.reason
    return None


def restore_batch(
    store: Store, config: ConsumerConfig, name: str, runtime: Runtime
) -> QuarantineReport:
    """Produce a batch from the quarantine again, behind all that is queued.

    The copy must be readable: replace ``<prefix>/_quarantine/<id>.object`` by a repaired one
    first if it is not. The copy and its report stay. Of two calls the second does nothing; also
    when the first one was killed.

    It is a batch of its own then, outside of the transaction or message that it was: readers have
    counted that one as delivered when they passed it by, and would drop it as a repeat.

    Args:
        store: Where the queue lives.
        config: Its manifest and prefix, and the largest batch to decode.
        name: The id of the report.
        runtime: Clock and names.

    Returns:
        The report, with ``restored_sequence``.

    Raises:
        InvalidInput: There is no such report or no copy, the copy cannot be read, or the batch
            is still queued.
        CommitStateUnknown: An earlier call may have restored it, and a consumer has read on.
        StorageError, Conflict, QueueFull: It was not restored; call it again.
    """
    prefix = config.data_path_prefix
    manifest = Observer(store, config, runtime).manifest()
    try:
        report = read_report(store, prefix, name)
    except ObjectNotFound:
        raise InvalidInput(
            f"there is no batch {name!r} in the quarantine of {prefix!r}: list what is there first"
        ) from None
    if report.restored_sequence is not None:
        return report
    _refuse_queued(report, manifest)
    data = _readable_copy(store, config, report)
    claim = claim_for_writing(store, config, runtime=runtime)
    queue = Queue(store, config, runtime=runtime, role="operator", claim=claim)
    if report.restored_location is None:
        # Noted before the append, so that a call after this one finds what this one did.
        location = batch_key(prefix, runtime.ulid())
        after = manifest.next_sequence
        report = replace(report, restored_location=location, restored_after=after)
        write_report(store, prefix, report)
    assert report.restored_location is not None
    assert report.restored_after is not None
    sequence = manifest.find(report.restored_location)
    if sequence is None:
        if manifest.first_sequence > report.restored_after:
            raise CommitStateUnknown(
                config.manifest_path,
                report.restored_after,
                (report.restored_location,),
                manifest.next_sequence,
                "an earlier restore was interrupted, and a consumer has read on since",
            )
        store.put(report.restored_location, data)
        sequence = queue.append([NewEntry(report.restored_location, report.metadata)])
    queue.close()
    report = replace(report, restored_sequence=sequence)
    write_report(store, prefix, report)
    return report


def _refuse_queued(report: QuarantineReport, manifest: Manifest) -> None:
    """A command that was killed between its copy and its write has dropped nothing."""
    # A query or a worker has passed its batch by, although that waits to leave the queue.
    if report.query or not manifest.first_sequence <= report.sequence < manifest.next_sequence:
        return
    (entry,) = manifest.entries(report.sequence, 1)
    if entry.location == report.location:
        raise InvalidInput(
            f"batch {report.id!r} is still queued as sequence {report.sequence}, and is delivered "
            "from there: the command that copied it to the quarantine did not come to its end. "
            "Run that again, or leave the copy alone"
        )


def _readable_copy(store: Store, config: ConsumerConfig, report: QuarantineReport) -> bytes:
    try:
        data = read_copy(store, config.data_path_prefix, report)
        decode_batch(data, config.max_batch_bytes)
    except ObjectNotFound:
        raise InvalidInput(
            f"batch {report.id!r} has no copy in the quarantine: there was none to make "
            f"({report.error})"
        ) from None
    except CorruptBatch as error:
        raise InvalidInput(
            f"the copy of batch {report.id!r} cannot be read: {error} Repair the object "
            f"'{config.data_path_prefix}/_quarantine/{report.id}.object' first"
        ) from error
    return data
