"""Rebuild a manifest that was lost, damaged or restored, from the batch objects in the store.

A record is delivered twice rather than lost (``core/decisions/0011``). The entries that the old
manifest still has are kept. Every other batch that may not have been read is enqueued after them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from opendata_buffer import errors
from opendata_buffer.admin.target import Target, read_raw
from opendata_buffer.config import DEFAULT_GRACE_PERIOD_MS, QueueConfig
from opendata_buffer.formats.batch import (
    BatchLocation,
    Transaction,
    batch_key,
    is_confined,
    parse_location,
)
from opendata_buffer.formats.manifest import (
    MAX_MANIFEST_BYTES,
    BatchDescriptor,
    Manifest,
    NewEntry,
    salvage_entries,
)
from opendata_buffer.hints import Message
from opendata_buffer.messages import ACK_TXN, FINAL, MessageId, parse_uuid
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.queue.consumer_note import REPAIR, write_consumer_info
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex, index_key
from opendata_buffer.queue.log_parts import (
    MAX_SEGMENT_BYTES,
    Part,
    chain_of,
    parts_folder,
    span_of_segment,
)
from opendata_buffer.queue.marker import OWNER_NAME, IndexMark, Watermark
from opendata_buffer.queue.not_found import no_such_queue
from opendata_buffer.queue.ownership import QueueClaim, claim_for_writing
from opendata_buffer.queue.reader_positions import stored_position, stored_readers
from opendata_buffer.queue.sidecar import LARGEST
from opendata_buffer.queue.unaccounted import OtherManifests
from opendata_buffer.runtime import in_parallel
from opendata_buffer.stores.base import Listing, exists, read_bytes
from opendata_buffer.transactions import CommitRecord, record_key, record_object

logger = logging.getLogger(__name__)

SEQUENCES_AHEAD = 1_000_000
EPOCHS_AHEAD = 1_000
"""How far a rebuilt manifest is ahead of the marker, in sequences and in epochs. The marker lags
behind the lost manifest, and no saved position may point into the new entries."""
KEEP_ALL_MS = 100 * 365 * 24 * 60 * 60 * 1000
"""The retention of a log whose index was lost: 100 years."""
CHANGES_AHEAD = 1_000
"""How many changes a rebuilt index counts beyond the highest known number: its marker may lag."""


@dataclass(frozen=True)
class RebuildPlan:
    """The fault of a manifest, and the manifest to put in its place."""

    fault: Message | None  # None if the manifest is sound
    manifest: Manifest  # the manifest to write
    found: tuple[str, ...] = ()  # batches that no entry named, in the order of enqueueing
    missing: tuple[str, ...] = ()  # locations of old entries whose object is gone
    # The batches to copy before the manifest is written: the new location, and the old one.
    copies: Mapping[str, str] = field(default_factory=dict)


def plan_rebuild(
    raw: bytes | None,
    listing: Listing,
    seen: Watermark | None,
    segments_end: int = 0,
    in_segments: frozenset[str] = frozenset(),
    *,
    committed: Mapping[str, int] | None = None,
    config: QueueConfig,
    grace_ms: int = DEFAULT_GRACE_PERIOD_MS,
) -> RebuildPlan:
    """Compare a manifest's bytes with the objects below the data prefix. No I/O.

    Args:
        raw: The manifest's bytes; None if it does not exist.
        listing: The objects below the data prefix.
        seen: The highest position and epoch that the owner marker remembers.
        segments_end: The end of the segments of a log; 0 for a queue.
        in_segments: The locations that the segments of a log name.
        committed: The number of the last committed batch of each app that has a commit record.
        config: The queue.
        grace_ms: The queue's grace period, in milliseconds.

    Returns:
        The fault of the manifest, the manifest to write in its place, and the batches that differ.
    """
    fault, entries, reached = _examine(raw, seen)
    if fault is None:
        assert raw is not None
        return RebuildPlan(None, Manifest.parse(raw))
    entries = [each for each in entries if each.sequence >= segments_end]
    reached = reached.joined(Watermark(segments_end, 0))
    prefix = config.data_path_prefix
    objects = {info.key for info in listing.objects}
    kept: list[NewEntry] = []
    missing: list[str] = []
    read_ms = read_before_ms(listing, seen, prefix, grace_ms)
    for entry in _unread(entries, seen, read_ms, prefix):
        if entry.location not in objects and is_confined(entry.location, prefix):
            missing.append(entry.location)
        else:
            kept.append(NewEntry(entry.location, entry.metadata))
    named = in_segments.union(each.location for each in entries)
    found = _ordered(_unnamed(listing, named, read_ms, prefix))
    unfinished = _unfinished(found, named, committed or {}, prefix)
    copied = {
        each.location: batch_key(prefix, each.ulid) for each in found if each.txn in unfinished
    }
    # Copies of an earlier repair that was interrupted: they are found as batches of their own.
    copied_before = {old for old, new in copied.items() if new in objects}
    finished = _finished_producers(kept, prefix)
    before: list[NewEntry] = []
    after: list[NewEntry] = []
    for batch in found:
        if batch.location not in copied_before:
            new = NewEntry(copied.get(batch.location, batch.location))
            (before if batch.producer in finished else after).append(new)
    manifest = Manifest.starting_at(
        reached.next_sequence + SEQUENCES_AHEAD, reached.epoch + EPOCHS_AHEAD
    ).append([*before, *kept, *after])
    return RebuildPlan(
        fault,
        manifest,
        found=tuple(batch.location for batch in found),
        missing=tuple(missing),
        copies={new: old for old, new in copied.items() if old not in copied_before},
    )


def _unfinished(
    found: Sequence[_Found], named: frozenset[str], committed: Mapping[str, int], prefix: str
) -> set[Transaction]:
    """Return the transactions whose objects may be a part of a write that was never committed.

    An app writes its batches one after another, so only its newest one may be unfinished. If an
    entry names one of its objects, or the app's commit record covers it, it was committed.
    """
    newest: dict[str, int] = {}
    for batch in found:
        if batch.txn is not None:
            newest[batch.txn.app] = max(batch.txn.batch, newest.get(batch.txn.app, -1))
    for location in named:
        parsed = parse_location(location, prefix)
        if parsed is not None and parsed.txn is not None:
            app, number = parsed.txn.app, parsed.txn.batch
            if app in newest and number >= newest[app]:
                del newest[app]
    return {
        Transaction(app, number)
        for app, number in newest.items()
        if number > committed.get(app, -1)
    }


def read_before_ms(
    listing: Listing, seen: Watermark | None, data_path_prefix: str, grace_ms: int
) -> int:
    """Return a time in milliseconds: batches with older names were surely read. 0 if not known.

    A producer does not enqueue a batch that is older than half of the grace period. So a batch
    whose name is that much older than the object of a read batch was before that one in the queue.
    The name of the read batch alone proves nothing, because the Spark sink and acknowledgements
    make names ahead of time, the sink by hours. So the time at which the object was stored counts
    too.
    """
    if seen is None or not seen.acked_location:
        return 0
    acked = parse_location(seen.acked_location, data_path_prefix)
    stored = (each for each in listing.objects if each.key == seen.acked_location)
    info = next(stored, None)
    # OpenData's Go producer names a directory by a ULID that is older than the batches in it.
    if acked is None or info is None or f"/{acked.ulid}/" in seen.acked_location:
        return 0
    # The time of storage bounds a name made ahead of time; the name bounds a restored object.
    return min(acked.timestamp_ms, info.last_modified_ms) - grace_ms // 2


def _examine(
    raw: bytes | None, seen: Watermark | None
) -> tuple[Message | None, Sequence[BatchDescriptor], Watermark]:
    """Return the fault, the entries that can be read, and the highest known position and epoch."""
    reached = seen if seen is not None else Watermark(0, 0)
    if raw is None:
        return Message("it is gone"), (), reached
    try:
        manifest = Manifest.parse(raw)
        entries: Sequence[BatchDescriptor] = manifest.entries()
    except errors.CorruptManifest as error:
        entries = salvage_entries(raw)
        after = entries[-1].sequence + 1 if entries else 0
        fault = Message("it is damaged: ", *error.args)
        return fault, entries, reached.joined(Watermark(after, 0))
    if seen is None or Watermark.of(manifest).covers(seen):
        return None, entries, reached
    text = (
        f"it went backwards: next sequence {seen.next_sequence} -> {manifest.next_sequence}, "
        f"epoch {seen.epoch} -> {manifest.epoch}"
    )
    fault = Message(text)
    return fault, entries, reached.joined(Watermark.of(manifest))


def _unread(
    entries: Sequence[BatchDescriptor], seen: Watermark | None, read_ms: int, prefix: str
) -> list[BatchDescriptor]:
    """Return the old manifest's entries without those that were surely read.

    The marker's acknowledged sequence counts only if the manifest has the marker's entry at that
    sequence. A client that does not know the marker creates a lost manifest again, and counts
    unread batches from 0 again.
    """
    acked = -1 if seen is None or seen.acked is None else seen.acked
    shared = seen is not None and any(
        each.sequence == acked and each.location == seen.acked_location for each in entries
    )
    unread = []
    for each in entries:
        parsed = parse_location(each.location, prefix)
        known = shared or (parsed is not None and parsed.timestamp_ms < read_ms)
        if each.sequence > acked or not known:
            unread.append(each)
    return unread


def _finished_producers(kept: Sequence[NewEntry], prefix: str) -> set[bytes]:
    """Return the producers whose final acknowledgement is kept.

    Their earlier messages must not be enqueued after it. A reader forgets the producer there, and
    would wait forever for another acknowledgement.
    """
    messages = (_message(parse_location(each.location, prefix)) for each in kept)
    return {each.producer for each in messages if each and each.flags == ACK_TXN | FINAL}


def _message(parsed: BatchLocation | None) -> MessageId | None:
    return None if parsed is None or parsed.message is None else parse_uuid(parsed.message)


class _Found(NamedTuple):
    """A batch that no entry names, split into the parts of its name."""

    ulid: str
    location: str
    txn: Transaction | None  # keeps batches together; None for a message, which is ordered alone
    message: MessageId | None

    @property
    def producer(self) -> bytes | None:
        return None if self.message is None else self.message.producer


def _unnamed(
    listing: Listing, named: frozenset[str], read_ms: int, prefix: str
) -> Iterator[_Found]:
    """Yield the batches that no entry names, without those that were surely read."""
    nested = tuple(
        info.key.removesuffix(OWNER_NAME)
        for info in listing.objects
        if info.key.endswith(f"/{OWNER_NAME}") and info.key != f"{prefix}/{OWNER_NAME}"
    )
    for info in listing.objects:
        parsed = parse_location(info.key, prefix)
        if parsed is None or info.key in named or info.key.startswith(nested):
            continue
        if parsed.timestamp_ms >= read_ms:
            txn = parsed.txn if parsed.message is None else None
            yield _Found(parsed.ulid, info.key, txn, _message(parsed))


T = TypeVar("T")


def _ordered(found: Iterable[_Found]) -> list[_Found]:
    """Order by ULID, with each transaction in one piece and an app's transactions by number."""
    by_name = sorted(found, key=lambda each: (each.ulid, each.location))
    groups: dict[object, list[_Found]] = {}
    for each in _within_positions(by_name, lambda each: each.producer, _by_clock):
        groups.setdefault(each.txn or each.location, []).append(each)
    # Groups are in insertion order, which is the order of each group's first ULID.
    ordered = _within_positions(
        list(groups.values()),
        lambda group: group[0].txn and group[0].txn.app,
        lambda own: sorted(own, key=lambda group: group[0].txn.batch if group[0].txn else 0),
    )
    return [each for group in ordered for each in group]


def _within_positions(
    items: Sequence[T], owner: Callable[[T], object], arrange: Callable[[list[T]], list[T]]
) -> list[T]:
    """Rearrange each owner's items within the positions that they have among the others."""
    positions: dict[object, list[int]] = {}
    for position, item in enumerate(items):
        if (own := owner(item)) is not None:
            positions.setdefault(own, []).append(position)
    ordered = list(items)
    for taken in positions.values():
        for position, item in zip(taken, arrange([items[each] for each in taken]), strict=True):
            ordered[position] = item
    return ordered


def _by_clock(own: Sequence[_Found]) -> list[_Found]:
    """Sort one producer's messages by its clock.

    Names may be made ahead of time, and a message after a later one would look like a duplicate.
    Acknowledgements stay where their names are, because a roll-back has an earlier clock. The final
    one goes last, so that no message after it stays undecided.
    """
    messages = [(each.message, each) for each in own if each.message is not None]
    final = [each for message, each in messages if message.flags & FINAL]
    others = [(message, each) for message, each in messages if not message.flags & FINAL]
    written = [(message.clock, each) for message, each in others if message.flags != ACK_TXN]
    by_clock = iter(sorted(written, key=lambda each: each[0]))
    return [
        each if message.flags == ACK_TXN else next(by_clock)[1] for message, each in others
    ] + final


def _read_segments(queue: Target) -> tuple[int, frozenset[str]]:
    """Return where the segments of a log end, and the locations that they name.

    Raises:
        CorruptData: A segment cannot be read. Without it, its batches would be queued again.
    """
    log = Log(queue.store, queue.config, queue.runtime)
    locations: set[str] = set()
    end = 0
    try:
        index = log.need(marked=True)
    except errors.CorruptData:
        pass  # The index is old, damaged or gone too. Trust the stored segments instead.
    else:
        # Include segments before the floor, because their batches may still exist.
        for _, segment in log.segments.each(replace(index, floor=0)):
            if isinstance(segment, errors.CorruptData):
                raise segment
            locations.update(segment.locations())
        end = index.end
    # A killed mover may have stored a segment that no index names. The repair of the index, which
    # comes next, adds it.
    for _, last, key in log.segments.stored_between(end, LARGEST):
        stored = Manifest.parse(read_bytes(queue.store, key, MAX_SEGMENT_BYTES))
        locations.update(stored.locations())
        end = max(end, last)
    return end, frozenset(locations)


def rebuild_index(queue: Target) -> str | None:
    """Rebuild the index of a log from its segments and from the positions of its readers.

    This reads all segments (failures F45, F46). It claims the manifest, which fences the consumer.
    If the existing index can be read, which means that it is an old copy, its settings are kept.
    Otherwise everything is kept until ``readers enable --retention``. The floor is at the first
    batch that still exists, but not before the old floor, unless the index has lost segments that
    are stored.

    Args:
        queue: The log.

    Returns:
        The key of the copy of the old index; None if there was no index.

    Raises:
        CorruptManifest: A segment that is needed cannot be read. No index was written.
        TransientStorageError: The index was changed meanwhile.
    """
    store, config, runtime = queue.store, queue.config, queue.runtime
    opened = queue.open_for_repair()
    manifest, queue_id = opened.claim_epoch(None), opened.queue_id
    write_consumer_info(store, config, runtime, manifest.epoch, program=REPAIR)
    raw = read_raw(store, index_key(config))
    old = _index_in(raw, queue_id)
    log = Log(store, config, runtime, queue_id)
    keep_from = 0
    if old is not None:
        hidden = (first for first, end in old.lost if log.segments.stored_between(first, end))
        keep_from = min([old.floor, *hidden])
    new = log.segments.with_pages(_index_of_segments(log, manifest.first_sequence, keep_from))
    v1 = _v1_readers_from(log, {} if old is None else old.v1)
    new = replace(new, readers=_readers_from(log, new.floor), v1=v1, retention_ms=KEEP_ALL_MS)
    if old is not None:
        new = replace(
            new,
            retention_ms=old.retention_ms,
            retention_bytes=old.retention_bytes,
            reader_expiry_ms=old.reader_expiry_ms,
            others=old.others,
        )
    marker = IndexMark(store, config, runtime).read()
    known = (marker.index_changes or 0) if marker is not None else 0
    changes = max(known, 0 if old is None else old.changes, new.changes)
    new = replace(new, changes=changes + CHANGES_AHEAD)
    saved = None
    if raw is not None:
        saved = f"{index_key(config)}.broken-{runtime.ulid()}"
        store.put(saved, raw)
        if old is None:
            store.delete_many([index_key(config)])
    log.put_back(old, new)
    return saved


def _index_of_segments(log: Log, end: int, keep_from: int) -> LogIndex:
    """Build an index of the stored segments that follow one another.

    Args:
        log: The log. Its index is not read.
        end: The first sequence of the manifest.
        keep_from: The first sequence to keep.

    Returns:
        An index without readers and pages. Its floor is at the first batch that exists, from
        ``keep_from`` on.

    Raises:
        CorruptManifest: A segment cannot be read.
    """
    store, folder = log.store, parts_folder(log.config)
    keys = {}
    for info in store.list(folder).objects:
        if (span := span_of_segment(info.key)) is not None:
            keys[span] = info.key
    index, floor = None, end
    for span in chain_of(keys, end):
        segment = Manifest.parse(read_bytes(store, keys[span], MAX_SEGMENT_BYTES))
        if index is None or floor == index.end:
            kept = segment.entries(max(keep_from, segment.first_sequence))
            there = (entry.sequence for entry in kept if exists(store, entry.location))
            floor = next(there, segment.next_sequence)
        index = index or LogIndex(log.queue_id, span[0], 0)
        index = index.with_segment(Part.of(segment, keys[span].removeprefix(folder)))
    return replace(index or LogIndex(log.queue_id, end, 0), floor=max(floor, keep_from))


def _readers_from(log: Log, floor: int) -> tuple[str, ...]:
    """Return the names of the readers with a stored position, in order; see :func:`_reads`."""
    return tuple(sorted(name for name in stored_readers(log) if _reads(log, name, floor)))


def _v1_readers_from(log: Log, known: Mapping[str, str]) -> dict[str, str]:
    """Return the prefixes of v1 consumers by their names, from an old index and the positions."""
    found = dict(known)
    for name in stored_readers(log):
        try:
            position = stored_position(log, name, log.queue_id)
        except errors.CorruptData:
            continue
        if position is not None and position.v1 is not None:
            found[name] = position.v1
    return found


def _index_in(raw: bytes | None, queue_id: str) -> LogIndex | None:
    """Return the index of a queue in these bytes; None if they do not contain it."""
    try:
        found = None if raw is None else LogIndex.from_json(raw)
    except errors.CorruptData:
        return None
    return found if found is not None and found.queue_id == queue_id else None


def _reads(log: Log, name: str, floor: int) -> bool:
    """Return whether a position belongs to a reader of this queue that the index may name.

    A position that cannot be read counts, so that it holds the floor. A reader that needs batches
    before the floor has expired, or its batches are gone. If the index named it, it would start at
    the floor without an error (failure F44). Left out, it gets ``DataLoss`` when it starts.
    """
    try:
        found = stored_position(log, name, log.queue_id)
    except errors.CorruptData:
        return True
    if found is None:
        return False
    if found.next < floor:
        logger.warning(
            "the new index of %s does not name reader %r: it needs sequence %d, and the log begins "
            "at %d. Start the reader soon, because nothing is kept for it until then. It gets an "
            "error that says how to continue.",
            log.config.data_path_prefix,
            name,
            found.next,
            floor,
        )
    return found.next >= floor


def compare(queue: Target, claim: QueueClaim | None) -> tuple[bytes | None, RebuildPlan]:
    """Read the manifest and plan a rebuild from the objects in the store.

    A log may keep millions of objects, so they are listed only if its manifest has a fault.

    Args:
        queue: The queue.
        claim: The owner marker of the queue; None if it does not exist.

    Returns:
        The manifest's bytes, None if it is gone; and the plan.
    """
    store, config = queue.store, queue.config
    is_log = claim is not None and claim.is_log
    seen, grace_ms = (claim.watermark, claim.grace_ms) if claim else (None, DEFAULT_GRACE_PERIOD_MS)
    prefix = f"{queue.prefix}/"
    # List before reading the manifest. The manifest then names any batch enqueued in between.
    listing = Listing((), 0, False) if is_log else store.list(prefix)
    raw = read_raw(store, config.manifest_path)
    if _examine(raw, seen)[0] is None:
        assert raw is not None
        return raw, RebuildPlan(None, Manifest.parse(raw))
    segments = 0, frozenset[str]()
    if is_log:
        segments, listing = _read_segments(queue), store.list(prefix)
    committed = _committed(queue, listing)
    return raw, plan_rebuild(
        raw, listing, seen, *segments, committed=committed, config=config, grace_ms=grace_ms
    )


def _committed(queue: Target, listing: Listing) -> dict[str, int]:
    """Return the last committed batch of each app that has a commit record and listed batches."""
    keys = {info.key for info in listing.objects}
    parsed = (parse_location(key, queue.prefix) for key in keys)
    apps = {each.txn.app for each in parsed if each is not None and each.txn is not None}
    recorded = sorted(app for app in apps if record_key(queue.prefix, app) in keys)

    def read(app: str) -> int:
        try:
            record = record_object(queue.store, queue.prefix, app, queue.runtime, queue.config)
            found = record.read()
        except errors.CorruptData:
            found = None
        # Without a record, the newest batch is copied, which loses nothing.
        return found.batch if isinstance(found, CommitRecord) else -1

    return dict(zip(recorded, in_parallel(queue.runtime, read, recorded), strict=True))


def check_accounted(queue: Target) -> None:
    """Check that no other manifest names batches in the data prefix (failure F51).

    A manifest that is built from the objects there would queue those batches a second time.

    Args:
        queue: The queue whose manifest is to be built.

    Raises:
        PrefixConflict: Another manifest names batches in the data prefix.
    """
    other = OtherManifests(queue.store, queue.config).naming()
    if other is not None:
        raise errors.PrefixConflict(queue.prefix, queue.config.manifest_path, other)


def rebuild(queue: Target) -> str | None:
    """Replace a manifest that is gone, damaged or restored with a sound one.

    Stop producers, consumers and collectors first: a batch that a producer uploads right now would
    be enqueued twice.

    Args:
        queue: The queue.

    Returns:
        The key of the copy of the old manifest; None if nothing was saved.

    Raises:
        InvalidInput: The queue does not exist.
        PrefixConflict: Another manifest names batches in the prefix.
        Conflict: The manifest was written meanwhile.
        TransientStorageError: The outcome is not known. Call it again.
    """
    store, config, runtime = queue.store, queue.config, queue.runtime
    claim = queue.owner()
    raw, plan = compare(queue, claim)
    if raw is None and (claim is None or claim.watermark is None) and not plan.found:
        raise no_such_queue(store, config)
    if plan.fault is None:
        return None
    check_accounted(queue)
    store.check_conditional_writes(config.manifest_path)
    saved = None
    if raw is not None:
        saved = f"{config.manifest_path}.broken-{runtime.ulid()}"
        store.put(saved, raw)
    for new_location, old_location in plan.copies.items():
        # Without its identity: a query would take its own repeat for done (failure F52).
        store.put(new_location, read_bytes(store, old_location))
    cas_object = CasObject(
        store,
        config.manifest_path,
        decode=bytes,
        encode=bytes,
        runtime=runtime,
        settings=config,
        max_bytes=MAX_MANIFEST_BYTES,
    )
    new = plan.manifest.raw

    def decide(before: bytes | None) -> bytes | None:
        if before == new:  # an attempt of this call whose answer was lost
            return before
        if before != raw:
            raise errors.Conflict(config.manifest_path, 1, 0.0)
        return new

    cas_object.change(decide)
    claim = claim_for_writing(store, config, runtime=runtime)
    claim.note(plan.manifest, now=True)
    begin = plan.manifest.first_sequence
    claim.note_skipped(begin - SEQUENCES_AHEAD, begin)
    write_consumer_info(store, config, runtime, plan.manifest.epoch, program=REPAIR)
    return saved
