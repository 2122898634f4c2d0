"""Read the content of a queue or log, its consumer, and what an operator should know about it.

Everything here reads manifests and the small objects next to them, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from opendata_buffer import errors
from opendata_buffer.admin.broker_status import (
    BrokerStatus,
    ClaimsStatus,
    ask_broker,
    read_claims,
)
from opendata_buffer.admin.log_status import LogStatus, missing_of, read_log, without_missing
from opendata_buffer.admin.notes import Notes
from opendata_buffer.admin.readers import readers_of
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.transactions import STALE_AFTER_S, OpenTransaction, open_among
from opendata_buffer.broker.client import Connection, DiscoveryRecord, Lease
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS, QueueConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.formats.batch import FOOTER_SIZE, is_confined, parse_footer, parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.gc import Queued
from opendata_buffer.hints import Action, Hint, Surface
from opendata_buffer.quarantine import list_quarantine, quarantined_names
from opendata_buffer.queue.consumer_note import ConsumerInfo, read_consumer_info
from opendata_buffer.queue.hints import topic_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_parts import name_ms
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import fullness
from opendata_buffer.queue.unaccounted import Batches, OtherManifests, hold_reason
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.stores.base import Blob, Listing, Store

SHOWN = 20  # reports of skipped batches to read; more are only counted
SAMPLED = 20  # batches whose records a status counts, with one small request each

LISTED = 20_000
"""Most objects that a status lists, 1,000 per request. Listing 200,000 would take ten seconds."""

LISTED_OF_LOG = 2_000  # like :data:`LISTED`, for a log, which may keep millions of objects


@dataclass(frozen=True, kw_only=True)
class Status:
    """A queue at one moment.

    An age is the time since a batch was produced, by its producer's clock and ours. ``notes`` list
    problems that an operator should check: a marker that makes producers and consumers fail, a
    transaction that is undecided for long, a damaged object next to the manifest.
    """

    store: str
    manifest: str
    data_path_prefix: str
    queue_length: int  # batches that wait for the consumer; for a log, batches that it keeps
    oldest_sequence: int | None  # None if the queue is empty, like the next three
    newest_sequence: int | None
    oldest_age_seconds: float | None
    newest_age_seconds: float | None
    next_sequence: int
    epoch: int  # how often a consumer claimed the queue
    grace_period_ms: int | None = None  # of the collector, in ms; None without an owner marker
    records: int | None = None  # waiting records; None if no batch could be read
    records_exact: bool = False  # False: estimated from 20 batches, or from readable ones
    bytes_queued: int  # stored size of the waiting objects
    manifest_bytes: int
    missing: int  # waiting batches whose object is gone; fsck lists them
    # Orphans are batch objects that no entry names: consumed, or being uploaded right now. For a
    # log only those count that are older than everything that the log keeps.
    orphans: int
    orphan_bytes: int
    listed_all: bool = True  # False: only the first 20,000 objects were checked
    log: LogStatus | None = None  # None if the queue is not a log
    consumer: ConsumerInfo | None = None  # of this epoch; if it left no record, an earlier one
    broker: BrokerStatus | None = None
    claims: ClaimsStatus | None = None
    undecided: int = 0  # transactions that are neither committed nor aborted
    oldest_undecided_seconds: float | None = None
    transactions: tuple[OpenTransaction, ...] = ()  # the undecided ones
    quarantined: int = 0  # copies of skipped or trimmed batches
    quarantine: tuple[Mapping[str, Any], ...] = ()  # reports of the newest SHOWN of them
    notes: tuple[str, ...] = ()
    refused: str = ""  # why producers and consumers fail: the marker, or a damaged manifest


def read_status(
    reader: ReadOnlyReader, connect: Callable[[DiscoveryRecord], Connection] | None = None
) -> Status:
    """Read the manifest, list up to :data:`LISTED` objects, and ask the broker.

    The cost does not grow with the length of the queue.

    Args:
        reader: The queue.
        connect: Opens a connection to the broker; see :func:`ask_broker`.

    Returns:
        The status of the queue.
    """
    store, config, runtime = reader.store, reader.config, reader.runtime
    queue, notes = Target(store, config, runtime), Notes()
    # Read it before the manifest, so that the consumer's record is not the newer one.
    consumer = notes.result_of(lambda: read_consumer_info(store, config, runtime))
    claim = claim_of(queue)
    before = reader.manifest()
    most = LISTED_OF_LOG if isinstance(claim, QueueClaim) and claim.is_log else LISTED
    listing = store.list(f"{queue.prefix}/", limit=most)
    # Read the manifest again (an unchanged one is not transferred). A batch that was enqueued while
    # the listing ran is not an orphan, and one that was dequeued and collected is not missing.
    after, view, refused, grace_ms = see_queue(queue, claim, reader.manifest())
    missing = None if view is None else missing_of(view, consumer, after)
    if view is not None:
        view = without_missing(view, missing)
    found = summarise(before, after, listing, store.url, config, runtime.now_ms(), view)
    notes += [each for each in (refused, fullness(after.size, config.max_manifest_bytes)) if each]
    if held := _unaccounted(queue, after, view, listing, grace_ms):
        notes.append(held)
    sizes = {each.key: each.size for each in listing.objects}
    log_status, records = None, dict[str, Any]()
    if view is not None:
        known_sizes = None if listing.truncated else sizes
        log_status, faults = read_log(queue, view, missing, known_sizes, notes)
        refused = refused or faults
    else:  # in a log, each reader has its own number of waiting records
        records = count_records(store, runtime, {queue.prefix: after}, sizes)
    transactions = open_among(queue, {queue.prefix: after})
    notes += stale_transactions(transactions, store.url, config)
    announced = notes.result_of(lambda: Lease(store, config, runtime).read())
    if announced is not None and announced.fault:
        notes.append(announced.fault)
        announced = None
    names = quarantined_names(store, queue.prefix)
    reports = list_quarantine(
        store, queue.prefix, runtime, names=names[-SHOWN:], unreadable=notes.add
    )
    return replace(
        found,
        grace_period_ms=grace_ms,
        **records,
        log=log_status,
        consumer=consumer,
        broker=None if announced is None else ask_broker(announced, connect),
        claims=notes.result_of(lambda: read_claims(queue)),
        undecided=len(transactions),
        oldest_undecided_seconds=max(
            (each.age_seconds or 0.0 for each in transactions), default=None
        ),
        transactions=tuple(transactions),
        quarantined=len(names),
        quarantine=tuple(each.as_json() for each in reports),
        notes=tuple(notes),
        refused=refused,
    )


def _unaccounted(
    queue: Target,
    manifest: Manifest,
    log: LogView | None,
    listing: Listing,
    grace_ms: int | None,
) -> str | None:
    """Return why the collector deletes nothing: another queue's batches may be there; or None."""
    last_ms = queue.runtime.now_ms() - (grace_ms or DEFAULT_GRACE_PERIOD_MS)
    named = frozenset(manifest.locations()) if log is None else frozenset[str]()
    old = (
        found.key
        for found in listing.objects
        if found.last_modified_ms < last_ms and found.key not in named
    )
    batches = Batches.among(old, queue.prefix, more=listing.truncated)
    other = OtherManifests(queue.store, queue.config).naming()
    if log is not None and other is None:
        return None  # segments name the other batches
    held = hold_reason(queue.config, manifest, batches, other)
    return held and f"the garbage collector deletes nothing: {held.text(Surface.SHELL)}"


def summarise(
    before: Manifest,
    after: Manifest,
    listing: Listing,
    url: str,
    config: QueueConfig,
    now_ms: int,
    log: LogView | None = None,
) -> Status:
    """Return the status by a listing and the manifests read before and after it. No I/O.

    In a ``log`` most batches are not in the manifest. Such a batch is an orphan if the time in its
    name is before everything that the log keeps; the collector uses the same rule.
    """
    sizes = Counter({found.key: found.size for found in listing.objects})
    # Parse only two entries whole, because metadata can be most of a manifest. Use sets, because a
    # queue may have a million entries.
    view = after if log is None else log
    oldest, newest = None, None
    if view.entry_count:
        oldest, newest = view.available_from(view.first_sequence), view.next_sequence - 1
    kept = max(0, view.first_sequence - after.first_sequence)
    locations = set(after.locations()[kept:])
    known = locations if after is before else set(before.locations())
    unnamed = sizes.keys() - locations - (known if log is None else set())
    orphaned = [key for key in unnamed if parse_location(key, config.data_path_prefix) is not None]
    if log is not None:
        # Use the parts that the index itself names, so that no page of the index is read for this.
        times = (part.named_ms for part in log.index.parts() if part.end > log.index.floor)
        oldest_ms = Queued.of_log(log.index, after, min(times, default=None)).oldest_ms
        orphaned = [each for each in orphaned if oldest_ms is None or name_ms(each) < oldest_ms]
        kept_keys = sizes.keys() - set(orphaned)
        queued = {each for each in kept_keys if parse_location(each, config.data_path_prefix)}
    else:
        queued = locations
    unlisted = listing.truncated and listing.objects[-1].key
    return Status(
        store=url,
        manifest=config.manifest_path,
        data_path_prefix=config.data_path_prefix,
        queue_length=view.entry_count,
        oldest_sequence=oldest,
        newest_sequence=newest,
        oldest_age_seconds=view.age_s(now_ms),
        newest_age_seconds=view.age_s(now_ms, newest),
        next_sequence=after.next_sequence,
        epoch=epoch_of(after),
        bytes_queued=sum(sizes[each] for each in queued),
        manifest_bytes=after.size,
        missing=sum(
            not unlisted or each <= unlisted for each in (locations & known) - sizes.keys()
        ),
        listed_all=not unlisted,
        orphans=len(orphaned),
        orphan_bytes=sum(sizes[each] for each in orphaned),
    )


def count_records(
    store: Store, runtime: Runtime, manifests: Mapping[str, Manifest], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Count the waiting records by the footers of up to :data:`SAMPLED` batches.

    If more batches wait, the sample is spread evenly over them, and the others count as its mean.
    An object of unknown size needs one more request.

    Args:
        store: The store.
        runtime: Threads.
        manifests: The manifests, by data prefix.
        sizes: Known sizes of objects in bytes, by key.

    Returns:
        Two fields of a status; empty if no batch could be read.
    """
    waiting = [(each, location) for each in manifests for location in manifests[each].locations()]
    total, count = len(waiting), min(len(waiting), SAMPLED)
    chosen = [waiting[(2 * each + 1) * total // (2 * count)] for each in range(count)]

    def ask(batch: tuple[str, str]) -> int | None:
        prefix, location = batch
        if not is_confined(location, prefix):
            return None  # read nothing outside the prefix (failure F23)
        try:
            size = sizes.get(location)
            if size is None:
                (size,) = (each.size for each in store.list(location, limit=1).objects)
            got = store.get(location, byte_range=(max(0, size - FOOTER_SIZE), size))
            return parse_footer(got.data).record_count if isinstance(got, Blob) else None
        except (errors.OpenDataBufferError, ValueError):
            return None  # a consumer reports the fault when it reads the batch

    found = [each for each in in_parallel(runtime, ask, chosen) if each is not None]
    if not found and total:
        return {}
    mean = sum(found) / max(1, len(found))
    return {"records": round(mean * total), "records_exact": len(found) == total}


def claim_of(queue: Target) -> QueueClaim | errors.CorruptData | errors.PrefixConflict | None:
    """Return the owner marker, or the error with which it refuses every client.

    Read it before the manifest. A marker that was read later may be ahead of the manifest.
    """
    try:
        return queue.owner()
    except (errors.CorruptData, errors.PrefixConflict) as error:
        return error


def see_queue(
    queue: Target, found: QueueClaim | Exception | None, manifest: Manifest | None
) -> tuple[Manifest, LogView | None, str, int | None]:
    """Describe a queue by its owner marker and its manifest.

    Args:
        queue: The queue.
        found: The owner marker, or the error that :func:`claim_of` returned.
        manifest: The manifest, read after the marker; None if there is none.

    Returns:
        The manifest, empty if the queue was never written; the view of a log, None for a queue or
        if readers fail; why producers, consumers or readers fail although the manifest can be read;
        and the grace period in milliseconds, None without an owner marker.
    """
    claim, refused = (found, "") if isinstance(found, QueueClaim) else (None, str(found or ""))
    if manifest is not None:
        try:
            if claim is not None:
                claim.check(manifest)
            manifest.check()
        except (errors.CorruptManifest, errors.QueueReset) as error:
            refused = error.text(Surface.SHELL)
    manifest, view = manifest or Manifest.empty(), None
    if refused:
        refused = f"producers and consumers are refused: {refused}"
    if claim is not None and claim.is_log:
        log = Log(queue.store, queue.config, queue.runtime, claim.queue_id)
        try:
            view = LogView.of(log, log.need(marked=True), manifest)
        except errors.CorruptData as fault:
            refused = refused or f"readers are refused: {fault.text(Surface.SHELL)}"
    return manifest, view, refused, None if claim is None else claim.grace_ms


def stale_transactions(
    undecided: Sequence[OpenTransaction], url: str, config: QueueConfig
) -> tuple[str, ...]:
    """Warn of the first transaction that is open for too long (failure F40).

    Args:
        undecided: The open transactions of a queue or topic, the oldest first.
        url: The URL of its store.
        config: Its settings.

    Returns:
        The warning; nothing if there is none.
    """
    for each in undecided:
        age_s = each.age_seconds or 0.0
        if age_s >= STALE_AFTER_S:
            hint = Hint(
                Action.RESTART_OR_END_TRANSACTION,
                topic_name(url, config),
                producer=each.producer,
            )
            writer = "a publisher without a name" if each.app is None else f"app {each.app!r}"
            return (
                f"a transaction of {writer} (producer {each.producer}) is open for "
                f"{age_s / 60:,.0f} min: nothing past sequence {each.first_sequence} leaves the "
                f"queue. {hint}",
            )
    return ()


def epoch_of(manifest: Manifest) -> int:
    """Return how often a consumer has claimed a queue; 0 for a partition that was sealed."""
    return 0 if manifest.sealed else manifest.epoch  # a seal is an epoch above all others


def running_consumer(queue: Target) -> str:
    """Return the consumer that owns a queue and may run, in words; empty if none is known."""
    with suppress(errors.CorruptData):
        found = read_consumer_info(queue.store, queue.config, queue.runtime)
        manifest = queue.reader().find()
        epoch = None if manifest is None else epoch_of(manifest)
        if found is not None and found.epoch == epoch and found.may_run():
            return (
                f"the consumer of {queue.prefix!r} ({found.program}, process {found.process} on "
                f"{found.host})"
            )
    return ""


def read_backlog(target: Target) -> tuple[int, float, int, str]:
    """Measure the backlog of a queue or a topic.

    A probe asks every few seconds, so this reads only manifests and owner markers. For a log it
    also reads the positions of the readers, and the backlog is the part that the last reader has
    not read. Partitions of a topic may be unwritten.

    Args:
        target: The queue or the topic.

    Returns:
        The number of waiting batches, the age of the oldest one in seconds, the size of the largest
        manifest in bytes, and why producers and consumers of one queue fail (empty if they do not).
    """

    def read(queue: Target) -> tuple[int, float, int, str]:
        claim, reader = claim_of(queue), queue.reader()
        found = reader.manifest() if target.topic is None else reader.find()
        manifest, log, refused, _ = see_queue(queue, claim, found)
        batches, oldest_s = manifest.entry_count, manifest.age_s(queue.runtime.now_ms())
        if log is not None:
            readers = readers_of(queue, log)
            batches = max((each.lag for each in readers), default=0)
            oldest_s = max((each.oldest_unread_seconds or 0.0 for each in readers), default=0.0)
        return batches, oldest_s or 0.0, manifest.size, refused

    found = in_parallel(target.runtime, read, target.queues())
    batches, ages, sizes, refused = zip(*found, strict=True)
    return sum(batches), max(ages), max(sizes), max(refused)
