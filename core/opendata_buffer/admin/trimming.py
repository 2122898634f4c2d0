"""Take batches out of a queue that its consumer does not read: skip, restore, trim and collect.

A batch that is skipped or trimmed is copied to the quarantine first. The write that changes the
queue also claims its epoch. This fences a consumer that still runs, so it cannot acknowledge past
the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from opendata_buffer.admin.target import Target
from opendata_buffer.admin.transactions import open_in
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.consumer.place import Place, range_of
from opendata_buffer.errors import (
    CommitStateUnknown,
    CorruptBatch,
    InvalidInput,
    ObjectNotFound,
    PoisonBatch,
)
from opendata_buffer.formats.batch import (
    batch_key,
    decode_batch,
    encode_batch,
    is_confined,
    parse_location,
)
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest, NewEntry
from opendata_buffer.gc import GarbageCollector, GcReport
from opendata_buffer.hints import Action, Hint
from opendata_buffer.quarantine import (
    MAX_OBJECT_BYTES,
    QuarantineReport,
    list_quarantine,
    quarantine,
    read_copy,
    read_report,
    write_report,
)
from opendata_buffer.queue.consumer_note import SKIP, TRIM, write_consumer_info
from opendata_buffer.queue.hints import topic_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.reader_positions import read_positions
from opendata_buffer.runtime import in_parallel
from opendata_buffer.stores.base import read_bytes
from opendata_buffer.topic.topic import forget_partitions


def skip_batch(
    queue: Target, sequence: int, *, force: bool = False
) -> tuple[QuarantineReport, int]:
    """Copy a queued batch to the quarantine, then put an empty batch in its place.

    All entries keep their sequences (``core/decisions/0010``). After an error call it again. After
    ``InvalidInput`` nothing was changed.

    Args:
        queue: The queue.
        sequence: The batch's sequence.
        force: Also skip a batch that can be read.

    Returns:
        The batch's report, and the epoch that the queue was claimed with.

    Raises:
        InvalidInput: The queue is a log, does not have the sequence, or the batch can be read and
            ``force`` is off.
    """
    if queue.is_log():
        _refuse_log(queue, "an entry of a log never changes.", _past(queue, sequence))
    store, config, runtime = queue.store, queue.config, queue.runtime
    manifest = queue.reader().manifest()
    if not manifest.first_sequence <= sequence < manifest.next_sequence:
        raise InvalidInput(
            f"sequence {sequence} is not in the queue with manifest {config.manifest_path!r}: "
            f"{range_of(manifest)}"
        )
    (entry,) = manifest.entries(sequence, 1)
    fault = None
    try:
        handle = FetchHandle.of(config, store=store, runtime=runtime)
        handle.fetch_arrow(entry)
    except PoisonBatch as error:
        fault = error.reason
    if fault is None and not force:
        raise InvalidInput(
            f"batch {sequence} at {entry.location!r} can be read: a consumer delivers it",
            Hint(Action.FORCE),
        )
    opened = queue.open_for_repair()
    report = _copy(queue, entry, fault or "skipped on request although it can be read")
    # The empty batch keeps the transaction and the message in its name. Without the transaction,
    # readers would take the entries after it for a repeat of the same one and drop them. Without an
    # acknowledgement, the transaction that it decides would stay undecided.
    parsed = parse_location(entry.location, config.data_path_prefix)
    txn, message = (parsed.txn, parsed.message) if parsed else (None, None)
    location = batch_key(config.data_path_prefix, runtime.ulid(), txn, message)
    store.put(location, encode_batch([]))
    after = opened.replace(sequence, entry.location, NewEntry(location))
    write_consumer_info(store, config, runtime, after.epoch, program=SKIP)
    opened.close()
    return report, after.epoch


def _refuse_log(queue: Target, why: str, hint: str | Hint) -> None:
    """Raise ``InvalidInput`` if the queue is a log. The hint says how to continue."""
    if queue.is_log():
        raise InvalidInput(
            f"the queue with manifest {queue.config.manifest_path!r} is a log with named readers: "
            f"{why} ",
            hint,
        )


def _past(queue: Target, sequence: int) -> str | Hint:
    """Return the hint that moves each reader of a log past a sequence.

    Readers that have already passed it are left out. If all have, return a sentence instead.
    """
    log = Log(queue.store, queue.config, queue.runtime)
    positions = read_positions(log, log.need(), unreadable=lambda _: None)
    readers = [name for name, position in positions.items() if position.next <= sequence]
    if not readers:
        return "No reader of this log has it still to read."
    return Hint(Action.RESET_FAILING_READERS, queue.name, sequence + 1, readers=tuple(readers))


def _view(queue: Target) -> Manifest | LogView:
    """Return the queue as it is now; for a log, everything that it keeps.

    Raises:
        InvalidInput: The queue does not exist.
    """
    reader = queue.reader()
    reader.manifest()
    return reader.view()


def _copy(queue: Target, entry: BatchDescriptor, why: str) -> QuarantineReport:
    return quarantine(queue.store, queue.prefix, entry, why, runtime=queue.runtime)


class Restored(NamedTuple):
    """The outcome of a restore."""

    id: str  # of the report
    sequence: int
    is_new: bool  # False if an earlier call restored the batch


def restore_batch(queue: Target, name: str) -> Restored:
    """Produce the batch of a report again, at the end of the queue. Idempotent.

    The copy and the report stay. If the batch was restored already, nothing changes. The restored
    batch has no transaction or message in its name. Readers have passed that identity, and would
    drop the batch as a repeat.

    Args:
        queue: The queue.
        name: The id of the report.

    Returns:
        The sequence of the restored batch.

    Raises:
        InvalidInput: The report or the copy does not exist, the copy cannot be read, or the batch
            is still queued.
        CommitStateUnknown: An earlier call may have restored it, and a consumer has read on since.
    """
    store, prefix = queue.store, queue.prefix
    manifest = _view(queue)
    try:
        report = read_report(store, prefix, name)
    except ObjectNotFound:
        raise InvalidInput(
            f"there is no batch {name!r} in the quarantine of {prefix!r}",
            Hint(Action.LIST_QUARANTINE, queue.name),
        ) from None
    if report.restored_sequence is not None:
        return Restored(name, report.restored_sequence, is_new=False)
    _refuse_queued(report, manifest)
    data = _readable_copy(queue, report)
    opened = queue.open_for_repair()
    if report.restored_location is None:
        # Write the report before the append, so that the next call can find out whether this one
        # appended.
        location = batch_key(prefix, queue.runtime.ulid())
        after = manifest.next_sequence
        report = replace(report, restored_location=location, restored_after=after)
        write_report(store, prefix, report)
    assert report.restored_location is not None
    assert report.restored_after is not None
    sequence = _find(manifest, report.restored_location, report.restored_after)
    if sequence is None:
        if manifest.available_from(report.restored_after) > report.restored_after:
            raise CommitStateUnknown(
                queue.config.manifest_path,
                report.restored_after,
                (report.restored_location,),
                manifest.next_sequence,
                "an earlier restore was interrupted, and a consumer has read on since",
            )
        store.put(report.restored_location, data)
        sequence = opened.append([NewEntry(report.restored_location, report.metadata)])
    opened.close()
    report = replace(report, restored_sequence=sequence)
    write_report(store, prefix, report)
    return Restored(name, sequence, is_new=True)


def check_unqueued(queue: Target, location: str) -> str:
    """Check that :func:`restore_object` can enqueue an object. Change nothing.

    Args:
        queue: The queue.
        location: The key of the object.

    Returns:
        The effect of the restore, as a sentence for a question.

    Raises:
        InvalidInput: The object is not a batch of this queue, is queued, does not exist, cannot be
            read, or is so young that its producer may still enqueue it.
    """
    prefix, runtime = queue.prefix, queue.runtime
    parsed = parse_location(location, prefix)
    manifest = _view(queue)
    if parsed is None:
        raise InvalidInput(
            f"{location!r} is not the name of a batch in {prefix!r}: give the whole key"
        )
    if (sequence := _find(manifest, location, manifest.first_sequence)) is not None:
        raise InvalidInput(f"{location!r} is queued as sequence {sequence}, and delivered from it")
    handle = FetchHandle.of(queue.config, store=queue.store, runtime=runtime)
    try:
        batch = handle.fetch_arrow(BatchDescriptor(0, location))
    except PoisonBatch as error:
        raise InvalidInput(f"{location!r} cannot be enqueued: {error.reason}") from error
    claim = queue.owner()
    grace_ms = DEFAULT_GRACE_PERIOD_MS if claim is None else claim.grace_ms
    if runtime.now_ms() - parsed.timestamp_ms < grace_ms:
        raise InvalidInput(
            f"{location!r} is younger than the grace period of {grace_ms / 60_000:g} minutes: its "
            "producer may still enqueue it. Wait that long"
        )
    acked = "" if claim is None or claim.watermark is None else claim.watermark.acked_location
    last_read = parse_location(acked, prefix)
    question = (
        f"batch {location!r} (records: {len(batch.values):,}), which no entry names, will be "
        "enqueued behind all that waits"
    )
    if last_read is not None and parsed.timestamp_ms <= last_read.timestamp_ms:
        question += ". Later ones were read: if it was read, too, its records come twice"
    return question


def restore_object(queue: Target, location: str) -> Restored:
    """Enqueue an object that :func:`check_unqueued` accepts; see :func:`restore_batch`."""
    reports = list_quarantine(queue.store, queue.prefix, queue.runtime)
    known = [each for each in reports if each.location == location]
    if not known:
        why = "no entry named it, and it was enqueued on request"
        known = [_copy(queue, BatchDescriptor(0, location), why)]
    return restore_batch(queue, known[-1].id)


def _find(queue: Manifest | LogView, location: str, since: int) -> int | None:
    """Return the sequence of a location; None if no entry names it.

    For a log all segments from sequence ``since`` on are read.
    """
    return queue.find(location, since) if isinstance(queue, LogView) else queue.find(location)


def _refuse_queued(report: QuarantineReport, manifest: Manifest | LogView) -> None:
    """Raise ``InvalidInput`` if the batch of a report is still queued.

    This happens when a command was killed between its copy and its write, so it dropped nothing.
    """
    # A query or worker that skips a batch writes the report before the batch leaves the queue.
    if report.query or not manifest.first_sequence <= report.sequence < manifest.next_sequence:
        return
    (entry,) = manifest.entries(report.sequence, 1)
    if entry.location == report.location:
        raise InvalidInput(
            f"batch {report.id!r} is still queued as sequence {report.sequence}, and is delivered "
            "from there: the command that copied it to the quarantine was interrupted. "
            "Run that again, or leave the copy alone"
        )


def _readable_copy(queue: Target, report: QuarantineReport) -> bytes:
    try:
        if report.copied_bytes is None and is_confined(report.location, queue.prefix):
            # Its object was gone, and may have been restored since.
            data = read_bytes(queue.store, report.location, MAX_OBJECT_BYTES)
        else:
            data = read_copy(queue.store, queue.prefix, report)
        decode_batch(data, queue.config.max_batch_bytes)
    except ObjectNotFound:
        raise InvalidInput(
            f"batch {report.id!r} has no copy in the quarantine: there was no object to copy "
            f"({report.error}). Bring {report.location!r} back first"
        ) from None
    except CorruptBatch as error:
        raise InvalidInput(
            f"the copy of batch {report.id!r} cannot be read: {error.problem}. Repair the object "
            f"'{queue.prefix}/_quarantine/{report.id}.object' first"
        ) from error
    return data


CONCURRENCY = 8  # copies at once; each passes through this process's memory


class TrimPlan(NamedTuple):
    """The effect that a trim would have."""

    target: int  # new first sequence of the queue
    dropped: Sequence[BatchDescriptor]


def plan_trim(queue: Target, start: Place) -> TrimPlan:
    """Find the entries that lie before ``start``, without changing anything.

    If a committed transaction lies on both sides of ``start``, its batches after ``start`` stay, as
    in Kafka.

    Args:
        queue: The queue.
        start: The place at which the queue will begin.

    Returns:
        The plan, to pass to :func:`trim_queue`.

    Raises:
        InvalidInput: The queue does not exist, is a log, or does not have that sequence; or an
            undecided transaction begins before it.
    """
    _refuse_log(
        queue,
        "what its readers have acknowledged is deleted when the retention is over.",
        Hint(Action.KEEP_LESS, queue.name),
    )
    manifest = queue.reader().manifest()
    target = start.sequence_in(manifest, queue.config, queue.store.url)
    dropped = manifest.entries(limit=target - manifest.first_sequence)
    for each in open_in(manifest, queue.prefix, queue.runtime.now_ms()):
        if each.first_sequence < target:
            raise InvalidInput(
                f"the transaction of producer {each.producer} begins at sequence "
                f"{each.first_sequence} and is open: a trim past that would delete a part of it. "
                f"Trim up to {each.first_sequence} at the most, or end the transaction",
                Hint(
                    Action.END_TRANSACTION,
                    topic_name(queue.store.url, queue.config),
                    producer=each.producer,
                ),
            )
    return TrimPlan(target, dropped)


def trim_queue(queue: Target, plan: TrimPlan, *, copy: bool = True) -> tuple[int, int, list[str]]:
    """Copy the entries that a plan drops, then drop them and claim the queue. Idempotent.

    Entries that were appended since the plan stay. After an error nothing was dropped.

    Args:
        queue: The queue.
        plan: The plan.
        copy: Copy the batches to the quarantine. Without it, a batch is lost once the collector has
            deleted its object.

    Returns:
        The new first sequence of the queue, the epoch of the claim, and the ids of the copies.
    """
    opened = queue.open_for_repair()
    why = f"trimmed up to {plan.target}, not for a fault of its own"

    def save(entry: BatchDescriptor) -> str:
        return _copy(queue, entry, why).id

    copies = in_parallel(queue.runtime, save, plan.dropped if copy else (), most=CONCURRENCY)
    # A consumer may have dequeued past the target meanwhile. Then nothing is left to drop.
    last = plan.target - 1 if plan.target else None
    after = opened.claim_epoch(last, allow_data_loss=True)
    write_consumer_info(queue.store, queue.config, queue.runtime, after.epoch, program=TRIM)
    opened.close()
    return after.first_sequence, after.epoch, copies


def collect(target: Target, *, dry_run: bool = False) -> GcReport:
    """Run one cycle of the garbage collector in a queue, or in each partition of a topic.

    A partition that has left its topic has no consumer whose collector would run. When it has
    nothing left to collect, it is removed from the topic's description.

    Args:
        target: The queue or the topic.
        dry_run: Only report; write and delete nothing.

    Returns:
        The report; for a topic, the sum of its partitions.
    """

    def run(queue: Target) -> GcReport:
        collector = GarbageCollector(queue.store, queue.config, runtime=queue.runtime)
        return collector.run_once(dry_run=dry_run)

    topic = target.topic
    if topic is None:
        # Check that the queue exists. The collector would claim the prefix even for a mistyped
        # manifest.
        target.reader().manifest()
        return run(target)
    description = topic.read()
    report, finished = GcReport(), list[str]()
    for name in (*description.names, *description.left):
        queue = target.queue(name)
        if queue.reader().find() is None:
            continue  # never written; a leaving partition gets a manifest when it is sealed
        found = run(queue)
        report += found
        something_left = found.plan.waiting or found.plan.held or found.failed or found.abandoned
        if name in description.left and not something_left:
            finished.append(name)
    if finished and not dry_run:
        forget_partitions(topic, finished)
    return report
