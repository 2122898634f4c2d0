"""Read the content of a queue or topic, its consumer, and the state of its broker and workers.

Everything here reads manifests and the small objects next to them, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from opendata_buffer import errors
from opendata_buffer.admin.readers import (
    ReaderStatus,
    missing_notes,
    readers_of,
    unread_notes,
)
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.transactions import STALE_AFTER_S, OpenTransaction, open_among
from opendata_buffer.broker.claims import claims_key, claims_kind, decode
from opendata_buffer.broker.client import ChannelClosed, Connection, DiscoveryRecord, Lease
from opendata_buffer.broker.protocol import ProtocolError
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS, QueueConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.formats.batch import FOOTER_SIZE, is_confined, parse_footer, parse_location
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.gc import Queued
from opendata_buffer.hints import Action, Hint, QueueName, Surface
from opendata_buffer.quarantine import list_quarantine, quarantined_names
from opendata_buffer.queue.consumer_note import ConsumerInfo, read_consumer_info
from opendata_buffer.queue.hints import queue_name, topic_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_parts import name_ms
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import skipped_ranges
from opendata_buffer.queue.missing import Missing, find_missing
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import fullness
from opendata_buffer.queue.sidecar import read_sidecar
from opendata_buffer.queue.unaccounted import Batches, OtherManifests, hold_reason
from opendata_buffer.runtime import Runtime, in_parallel
from opendata_buffer.stores.base import Blob, Listing, Store
from opendata_buffer.topic.description import Partition, State
from opendata_buffer.topic.topic import Topic

T = TypeVar("T")

_MESSAGE = b"/message="

SHOWN = 20  # reports of skipped batches to read; more are only counted
SAMPLED = 20  # batches whose records a status counts, with one small request each

LISTED = 20_000
"""Most objects that a status lists, 1,000 per request. Listing 200,000 would take ten seconds."""

LISTED_OF_LOG = 2_000  # like :data:`LISTED`, for a log, which may keep millions of objects

CHECKED_SEGMENTS = 16
"""Most segments that a status reads: the next ones of the readers that are furthest back."""

STATS_S = 1.0  # seconds to wait for a broker's answer; a running broker answers sooner


@dataclass(frozen=True, kw_only=True)
class BrokerStatus:
    """The broker that the queue's discovery record names.

    Counters are those of its term. They are None if it did not answer.
    """

    term: int
    id: str
    address: str  # where clients reach it; empty if it has stopped without a successor
    seen_ms: int  # last renewal of the record, by its clock, since the Unix epoch
    alive: bool | None = None  # whether it answered; None if it was not asked
    reason: str = ""  # why it gave no answer
    clients: int | None = None  # connections, including the one that asked
    waiting: int | None = None  # entries that wait for the next write
    commits: int | None = None  # manifest writes that were applied
    appended: int | None = None  # entries appended by them
    conflicts: int | None = None  # writes that lost a race against a writer without the broker
    pauses: int | None = None  # pauses for writers that append without it, such as Spark's sink
    serving_seconds: float | None = None
    group_size: float | None = None  # entries per write
    commit_rate: float | None = None  # writes per second


@dataclass(frozen=True, kw_only=True)
class ClaimsStatus:
    """The batches that workers hold."""

    frontier: int  # sequence of the first unfinished batch
    held: int
    done: int  # finished batches that wait for an older one
    oldest_held: int | None  # sequence of the oldest held batch
    oldest_worker: str | None  # the worker that holds it
    oldest_deliveries: int | None  # how often it was delivered


def ask_broker(
    announced: DiscoveryRecord, connect: Callable[[DiscoveryRecord], Connection] | None
) -> BrokerStatus:
    """Ask the announced broker for its statistics, for up to two seconds.

    Args:
        announced: The broker's discovery record.
        connect: Opens a connection to the broker; None to ask no broker.

    Returns:
        The broker as it answered, or as it is announced.
    """
    known = BrokerStatus(
        term=announced.term, id=announced.id, address=announced.address, seen_ms=announced.seen_ms
    )
    if connect is None or not announced.serves:
        return known
    try:
        connection = connect(announced)
    except (ChannelClosed, ProtocolError) as error:
        return replace(known, alive=False, reason=str(error))
    try:
        stats = connection.stats(STATS_S)
    finally:
        connection.close()
    if stats is None:
        return replace(known, alive=False, reason=f"no answer within {STATS_S:g} s")
    names = ("clients", "waiting", "commits", "appended", "conflicts", "pauses")
    counters: dict[str, Any] = {name: stats.get(name) for name in names}
    commits, appended = counters["commits"] or 0, counters["appended"]
    if seconds := stats.get("serving_s"):
        counters |= {"serving_seconds": seconds, "commit_rate": commits / seconds}
    if commits and appended:
        counters["group_size"] = appended / commits
    return replace(known, alive=True, **counters)


def read_claims(queue: Target) -> ClaimsStatus | None:
    """Read the claims of workers.

    Args:
        queue: The queue.

    Returns:
        The claims; None if the queue never had any.

    Raises:
        CorruptData: The object cannot be read. The error contains the command that replaces it.
    """
    kind = claims_kind(queue.name)
    key = claims_key(queue.prefix)
    try:
        claims = read_sidecar(queue.store, key, kind, lambda data: decode(data, kind))
    except errors.ObjectNotFound:
        return None
    oldest = min(claims.held, default=None)
    return ClaimsStatus(
        frontier=claims.frontier,
        held=len(claims.held),
        done=len(claims.done),
        oldest_held=oldest,
        oldest_worker=None if oldest is None else claims.held[oldest].worker,
        oldest_deliveries=None if oldest is None else claims.deliveries.get(oldest),
    )


@dataclass(frozen=True, kw_only=True)
class LogStatus:
    """The content and the readers of a log. Fields are sequences or counts of batches."""

    floor: int  # the first sequence that is kept
    first: int  # the first one from the floor on whose batch still exists
    end: int  # sequence of the next batch
    kept: int
    in_segments: int  # how many of them are in segments
    missing: int = 0  # batches whose objects are gone, if the status had a reason to look
    first_readable: int | None = None  # the first sequence after them
    retention_ms: int | None
    retention_bytes: int | None
    reader_expiry_ms: int
    readers: tuple[ReaderStatus, ...] = ()


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
    queue, notes = Target(store, config, runtime), _Notes()
    # Read it before the manifest, so that the consumer's record is not the newer one.
    consumer = notes.result_of(lambda: read_consumer_info(store, config, runtime))
    claim = claim_of(queue)
    before = reader.manifest()
    most = LISTED_OF_LOG if isinstance(claim, QueueClaim) and claim.is_log else LISTED
    listing = store.list(f"{queue.prefix}/", limit=most)
    # Read the manifest again (an unchanged one is not transferred). A batch that was enqueued while
    # the listing ran is not an orphan, and one that was dequeued and collected is not missing.
    after, view, refused, grace_ms = see_queue(queue, claim, reader.manifest())
    missing = None if view is None else _missing_of(view, consumer, after)
    if view is not None:
        view = _without(view, missing)
    found = summarise(before, after, listing, store.url, config, runtime.now_ms(), view)
    notes += [each for each in (refused, fullness(after.size, config.max_manifest_bytes)) if each]
    if held := _unaccounted(queue, after, view, listing, grace_ms):
        notes.append(held)
    sizes = {each.key: each.size for each in listing.objects}
    log_status, records = None, dict[str, Any]()
    if view is not None:
        known_sizes = None if listing.truncated else sizes
        log_status, faults = _read_log(queue, view, missing, known_sizes, notes)
        refused = refused or faults
    else:  # in a log, each reader has its own number of waiting records
        records = _records(store, runtime, {queue.prefix: after}, sizes)
    transactions = open_among(queue, {queue.prefix: after})
    notes += _stale(transactions, store.url, config)
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


class _Notes(list[str]):
    """Notes for the operator of a queue, next to its numbers."""

    def add(self, error: errors.OpenDataBufferError) -> None:
        """Note an error, in the words of a command line."""
        self.append(error.text(Surface.SHELL))

    def result_of(self, read: Callable[[], T | None]) -> T | None:
        """Call a function. If it cannot read its object, note the error and return None.

        The status still shows a queue if an object next to the manifest is damaged, or if this
        user may not read it.
        """
        try:
            return read()
        except (errors.CorruptData, errors.PermanentStorageError) as error:
            self.add(error)
            return None


def _read_log(
    queue: Target,
    view: LogView,
    missing: Missing | None,
    sizes: Mapping[str, int] | None,
    notes: _Notes,
) -> tuple[LogStatus, str]:
    """Read the positions of a log's readers, and the segments that they read next.

    Args:
        queue: The log.
        view: All that it keeps.
        missing: The batches whose objects are gone.
        sizes: Bytes of the batches, by key; None if some are not known.
        notes: Gets the problems that were found.

    Returns:
        The status of the log; and why its readers fail, empty if they do not.
    """
    readers = notes.result_of(lambda: readers_of(queue, view, unreadable=notes.add)) or []
    if sizes is not None:
        readers = [_with_bytes(reader, view, sizes) for reader in readers]
    notes += [*_log_notes(view, readers), *_missing_positions(readers, queue.name)]
    gone, stuck = _gone(view, readers, missing)
    damage = "" if gone else _first_damage(view, readers)
    notes += [note for note in (gone, damage) if note]
    return _log_status(view, readers, missing), gone if stuck else damage


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
        epoch=_epoch(after),
        bytes_queued=sum(sizes[each] for each in queued),
        manifest_bytes=after.size,
        missing=sum(
            not unlisted or each <= unlisted for each in (locations & known) - sizes.keys()
        ),
        listed_all=not unlisted,
        orphans=len(orphaned),
        orphan_bytes=sum(sizes[each] for each in orphaned),
    )


def _records(
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


def _log_status(
    view: LogView, readers: Sequence[ReaderStatus], missing: Missing | None
) -> LogStatus:
    index, floor = view.index, view.first_sequence
    return LogStatus(
        floor=floor,
        first=min(view.available_from(floor), view.next_sequence),
        end=view.next_sequence,
        kept=view.entry_count,
        in_segments=view.count(floor, min(index.end, view.manifest.first_sequence)),
        missing=0 if missing is None else missing.count,
        first_readable=None if missing is None else missing.end,
        retention_ms=index.retention_ms,
        retention_bytes=index.retention_bytes,
        reader_expiry_ms=index.reader_expiry_ms,
        readers=tuple(readers),
    )


def _missing_of(view: LogView, consumer: ConsumerInfo | None, manifest: Manifest) -> Missing | None:
    """Search a log for batches whose objects are gone.

    The search is only made if a consumer that does not know logs seems to have run, because the
    collector of such a consumer deletes objects.
    """
    known = consumer is not None and consumer.epoch == manifest.epoch
    if (known and not view.lost) or manifest.sealed:
        return None
    try:
        return find_missing(view, view.first_sequence)
    except (errors.CorruptData, errors.StorageError):
        return None  # another note reports parts that cannot be read


def _without(view: LogView, missing: Missing | None) -> LogView:
    """Return the view of a log that knows which objects are gone."""
    if missing is None:
        return view
    return replace(view, missing=((missing.first, missing.end),))


def _gone(
    view: LogView, readers: Sequence[ReaderStatus], missing: Missing | None
) -> tuple[str, bool]:
    """Return advice about batches that are gone, and whether a reader is stuck there."""
    if missing is None:
        return "", False
    stuck = [each for each in readers if each.next_sequence < missing.end]
    go_on: str | Hint = "No reader needs them."
    if stuck:
        readers_stuck = tuple(reader.name for reader in stuck[:SHOWN])
        queue = queue_name(view.log.store.url, view.log.config)
        go_on = Hint(Action.RESET_READERS_PAST, queue, missing.end, readers=readers_stuck)
    return (
        f"{missing}. The collector of a consumer that knows no log (v1) deletes what segments "
        f"name: stop it first. {go_on}"
    ), bool(stuck)


def _with_bytes(reader: ReaderStatus, view: LogView, sizes: Mapping[str, int]) -> ReaderStatus:
    """Return the status with the bytes that wait, if the manifest names all of their batches."""
    behind = max(reader.next_sequence, view.first_sequence) - view.manifest.first_sequence
    if behind < 0:
        return reader
    waiting = view.manifest.locations()[behind:]
    return replace(reader, lag_bytes=sum(sizes.get(each, 0) for each in waiting))


def _first_damage(view: LogView, readers: Sequence[ReaderStatus]) -> str:
    """Return why the readers that are furthest back fail; read the next segment of each."""
    begins = {max(each.next_sequence, view.first_sequence) for each in readers}
    for begin in sorted({view.first_sequence, *begins})[:CHECKED_SEGMENTS]:
        try:
            view.entries(begin, 1)
        except errors.CorruptData as error:
            return f"readers are refused at sequence {begin}: {error.text(Surface.SHELL)}"
    return ""


def _log_notes(view: LogView, readers: Sequence[ReaderStatus]) -> Iterator[str]:
    """Yield the notes about a log (failure F42)."""
    for each in readers:
        if each.stopped:
            yield f"{each.stopped}. To continue, delete it and add it again with another prefix"
        elif each.expires_soon:
            yield (
                f"reader {each.name!r} expires in {each.expires_seconds / 3600:,.1f} h: then what "
                "only it has not read is deleted. Start it, or delete it"
            )
    log = view.log
    skipped = skipped_ranges(log.store, log.config, log.runtime) if view.lost else ()
    for first, end in view.lost:
        begin = next((begin for begin, after in skipped if first <= begin and after == end), None)
        if end > view.first_sequence and begin is not None:
            lost = (
                f"sequences {first} to {begin - 1} are gone from the log" if first < begin else ""
            )
            yield (
                f"the manifest was rebuilt: {lost}{', and ' if lost else ''}sequences {begin} to "
                f"{end - 1} never held batches. The batches of the old manifest were queued again "
                f"from {end} on, unless they had been read or their objects were gone"
            )
        elif end > view.first_sequence:
            yield (
                f"sequences {first} to {end - 1} are gone: a consumer that knows no readers (v1) "
                "took them off the log, or the manifest was rebuilt. Stop such a consumer, or let "
                "it continue as a reader"
            )
    if view.first_sequence < view.manifest.first_sequence and _MESSAGE in view.manifest.raw:
        yield (
            f"open transactions are those that begin in the last {view.manifest.entry_count:,} "
            "batches, which are in the manifest"
        )


def _missing_positions(readers: Sequence[ReaderStatus], queue: QueueName) -> Iterator[str]:
    """Yield a sentence for each reader whose position is gone.

    Args:
        readers: The readers.
        queue: The name of the queue.
    """
    for reader in readers:
        if reader.position_missing:
            hint = Hint(Action.KEEP_OR_DELETE_READER, queue, readers=(reader.name,))
            yield (
                f"the position of reader {reader.name!r} is missing: it was deleted, or 'readers "
                "delete' was interrupted. The reader keeps everything from sequence "
                f"{reader.next_sequence} on, and expires in {reader.expires_seconds / 3600:,.1f} h "
                f"if a collector runs. {hint}"
            )


def _stale(undecided: Sequence[OpenTransaction], url: str, config: QueueConfig) -> tuple[str, ...]:
    """Return a warning about the first transaction that is open for too long (failure F40)."""
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


def _epoch(manifest: Manifest) -> int:
    return 0 if manifest.sealed else manifest.epoch  # a seal is an epoch above all others


@dataclass(frozen=True, kw_only=True)
class PartitionStatus:
    """One partition at one moment. Its fields have the meaning of those of :class:`Status`."""

    name: str
    state: str
    queue_length: int
    oldest_age_seconds: float | None
    next_sequence: int  # 0 if it was never written
    epoch: int
    manifest_bytes: int
    grace_period_ms: int | None = None
    undecided: int = 0
    quarantined: int = 0
    consumer: ConsumerInfo | None = None
    log: LogStatus | None = None
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class TopicStatus:
    """A topic at one moment, with its partitions in the order of their numbers."""

    store: str
    id: str
    partitions: tuple[PartitionStatus, ...]
    queue_length: int
    records: int | None = None
    records_exact: bool = False
    oldest_age_seconds: float | None
    undecided: int
    quarantined: int
    transactions: tuple[OpenTransaction, ...]  # one part per transaction and partition
    notes: tuple[str, ...]


def read_topic(target: Target, topic: Topic) -> TopicStatus:
    """Read the description, then all manifests and records of consumers in parallel."""
    description, runtime, notes = topic.read(), target.runtime, _Notes()
    known = dict[str, Sequence[str]]()  # the readers of each active partition
    read_all = in_parallel(
        runtime,
        lambda partition: _read_partition(target, partition, known, notes),
        description.partitions,
    )
    manifests = {each.name: manifest for each, manifest in read_all}
    transactions = open_among(target, manifests)
    undecided = Counter(each.partition for each in transactions)
    found = tuple(replace(each, undecided=undecided[each.name]) for each, _ in read_all)
    topic_ = queue_name(topic.url, target.config)
    notes += missing_notes(dict(sorted(known.items())), topic_)
    notes += unread_notes(description, topic_)
    ages = [each.oldest_age_seconds for each in found if each.oldest_age_seconds is not None]
    return TopicStatus(
        store=topic.url,
        id=description.topic_id,
        partitions=found,
        queue_length=sum(each.queue_length for each in found),
        **_records(target.store, runtime, manifests, {}),
        oldest_age_seconds=max(ages, default=None),
        undecided=len({each.producer for each in transactions}),
        quarantined=sum(each.quarantined for each in found),
        transactions=tuple(transactions),
        notes=(*sorted(notes), *_stale(transactions, topic.url, target.config)),
    )


def _read_partition(
    target: Target, partition: Partition, known: dict[str, Sequence[str]], notes: _Notes
) -> tuple[PartitionStatus, Manifest]:
    """Read one partition of a topic.

    Args:
        target: The topic.
        partition: The partition.
        known: Gets the readers of the partition if it is an active one of a log.
        notes: Gets the problems that were found.

    Returns:
        The status, without open transactions; and the manifest.
    """
    queue = target.queue(partition.name)
    consumer = None
    with suppress(errors.CorruptData):
        consumer = read_consumer_info(queue.store, queue.config, queue.runtime)
    claim = claim_of(queue)
    manifest, log, refused, grace_ms = see_queue(queue, claim, queue.reader().find())
    log_status = None
    if log is not None:
        missing = _missing_of(log, consumer, manifest)
        log = _without(log, missing)
        readers = readers_of(queue, log, unreadable=notes.add)
        notes += _missing_positions(readers, queue.name)
        if partition.state is State.ACTIVE:
            known[partition.name] = log.index.readers
        log_status = _log_status(log, readers, missing)
        gone, stuck = _gone(log, readers, missing)
        notes += [gone] if gone else []
        refused = refused or (gone if stuck else _first_damage(log, readers))
    view = log or manifest
    status = PartitionStatus(
        name=partition.name,
        state=str(partition.state),
        queue_length=view.entry_count,
        oldest_age_seconds=view.age_s(queue.runtime.now_ms()),
        next_sequence=manifest.next_sequence,
        epoch=_epoch(manifest),
        manifest_bytes=manifest.size,
        grace_period_ms=grace_ms,
        quarantined=len(quarantined_names(queue.store, partition.name)),
        consumer=consumer,
        log=log_status,
        refused=refused,
    )
    return status, manifest


def running_consumer(queue: Target) -> str:
    """Return the consumer that owns a queue and may run, in words; empty if none is known."""
    with suppress(errors.CorruptData):
        found = read_consumer_info(queue.store, queue.config, queue.runtime)
        manifest = queue.reader().find()
        epoch = None if manifest is None else _epoch(manifest)
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
