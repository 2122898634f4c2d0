"""Check that every queued batch exists and can be read; repair problems, and keep copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum

from opendata_buffer import errors
from opendata_buffer.admin.broker_status import read_claims
from opendata_buffer.admin.rebuild import (
    RebuildPlan,
    check_accounted,
    compare,
    rebuild,
    rebuild_index,
)
from opendata_buffer.admin.target import Target, read_raw
from opendata_buffer.admin.trimming import skip_batch
from opendata_buffer.broker.claims import claims_key
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.fetch import FetchHandle, fetch_many
from opendata_buffer.formats.arrow import value_bytes
from opendata_buffer.formats.batch import key_fault, parse_location
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.hints import Action, Hint, Message, QueueName, Surface
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log import Log, OldIndex
from opendata_buffer.queue.log_index import LogIndex, index_key
from opendata_buffer.queue.log_parts import MAX_SEGMENT_BYTES, parts_folder
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import PrefixOwner, owner_key, owner_object
from opendata_buffer.queue.ownership import QueueClaim, misplaced
from opendata_buffer.queue.reader_positions import read_positions
from opendata_buffer.queue.stored_manifest import read_manifest
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store, exists, read_bytes

_INDEX_NAME = "index of the log"

CONCURRENCY = 8  # batches that are decoded in memory at once


class Kind(StrEnum):
    """The kind of a problem or note, as in ``fsck --json``."""

    MANIFEST = "manifest"  # the manifest is gone, damaged, or older than it once was
    MISSING = "missing"  # the object of a batch is gone
    UNREADABLE = "unreadable"  # a batch does not decode
    TOO_LARGE = "too large"  # a batch is larger than readers accept
    FOREIGN = "foreign"  # a batch lies outside the data prefix
    REPEATED = "repeated"  # an object is queued more than once
    UNREAD = "unread"  # no entry names an object
    PREFIX = "prefix"  # no batch of the queue lies in the data prefix
    OWNER = "owner"  # an owner marker keeps this queue out for no reason
    INDEX = "index"  # the index of a log is gone or damaged
    OLD_INDEX = "old index"  # the index of a log was restored from an old copy
    OTHER_INDEX = "other index"  # the index of a log belongs to another queue
    SEGMENT = "segment"  # a segment of a log, or a page of its index, is gone or damaged
    CLAIMS = "claims"  # the record of workers' claims cannot be read


REPAIRED_BY = {
    Kind.MANIFEST: "is rebuilt from the batches that are there, and its bytes are saved next to it",
    Kind.MISSING: "is skipped: its object is gone, and a report of it goes to the quarantine",
    Kind.UNREADABLE: "is copied to the quarantine and skipped",
    Kind.OWNER: "is saved next to it, and the data prefix is given to this queue",
    Kind.REPEATED: "is copied to the quarantine and skipped: the first entry delivers the object",
    Kind.INDEX: "is built again from the existing segments, and keeps everything for 100 years",
    Kind.OLD_INDEX: "is rebuilt from the segments and positions that are there, with the settings "
    "of the old copy, which is saved next to it",
    Kind.CLAIMS: "is saved next to it and removed: every batch in the queue is handed out again",
}
"""The effect of a repair on a problem, by its kind."""

NOT_REPAIRED = {
    Kind.OTHER_INDEX: "it and the segments are of a queue that was started over: delete them when "
    "the old log is given up",
    Kind.SEGMENT: "restore the object (bucket versioning), or move readers past what it names",
    Kind.TOO_LARGE: "no reader decodes that much",
    Kind.PREFIX: "check again with the data prefix that is named there",
    Kind.FOREIGN: "no reader fetches it",
}
"""Why a repair leaves a problem, by its kind."""

_BY_HAND = {Kind.TOO_LARGE: Action.SKIP_TOO_LARGE, Kind.FOREIGN: Action.SKIP_FOREIGN}
"""What the operator can do about a problem that a repair leaves."""


@dataclass(frozen=True)
class Finding:
    """A problem or a note about one entry, the manifest, or a batch that no entry names."""

    sequence: int | None  # None if the finding is not about an entry
    location: str  # the key of the object
    problem: str
    kind: Kind
    what: str = "entry"  # or another subject, such as "manifest" or "unread batch"
    last_sequence: int | None = None  # the last one, if several batches of a log are gone
    count: int = 1  # how many batches are gone
    next_sequence: int | None = None  # the next sequence that a log still has after it

    @property
    def name(self) -> str:
        """The subject of the finding, in words."""
        where = self.what if self.sequence is None else f"sequence {self.sequence}"
        if self.last_sequence is not None:
            return f"sequences {self.sequence} to {self.last_sequence}"
        return f"{where} {self.location!r}"

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


@dataclass
class Report:
    """The outcome of a check."""

    batches: int = 0
    records: int = 0  # in the readable batches
    bytes: int = 0  # size of these records
    stored_bytes: int = 0  # size of their objects
    problems: list[Finding] = field(default_factory=list)  # these make a consumer fail
    notes: list[Finding] = field(default_factory=list)  # further effects of a repair
    is_log: bool = False
    positions: Mapping[str, int] = field(default_factory=dict)  # next sequence of each log reader

    @property
    def ok(self) -> bool:
        """Whether a consumer can read the queue to its end."""
        return not self.problems


def check_queue(queue: Target) -> Report:
    """Check the manifest, then fetch and decode every batch that it names.

    If the manifest is damaged, gone, or older than the owner marker shows, that is the only problem
    in the report. A note then lists each batch that no entry names and that may not have been read.

    Args:
        queue: The queue.

    Returns:
        The problems and the notes.

    Raises:
        InvalidInput: The queue does not exist.
        PrefixConflict: The data prefix belongs to the queue of another manifest.
    """
    store, config, runtime = queue.store, queue.config, queue.runtime
    reader = queue.reader()
    claim, conflict = None, None
    try:
        claim = queue.owner()
    except errors.PrefixConflict as error:
        conflict = error
    seen = None if claim is None else claim.watermark
    report = Report(is_log=claim is not None and claim.is_log)
    raw, plan = compare(queue, claim)
    if plan.fault is not None and conflict is not None:
        raise conflict
    # Without manifest, marker and batches there never was a queue. reader.manifest() then raises.
    if plan.fault is not None and (raw is not None or seen is not None or plan.found):
        check_accounted(queue)
        _add_manifest_fault(report, plan, queue)
        return report
    manifest = reader.manifest()
    report.problems += _prefix_problems(queue, claim, conflict, manifest)
    handle = FetchHandle.of(config, store=store, runtime=runtime)
    if claim is not None and claim.is_log:
        log = Log(store, config, runtime, claim.queue_id)
        if (index_fault := _index_fault(store, log, manifest)) is not None:
            report.problems.append(index_fault)
            return report
        _check_log(report, queue, handle, log, manifest)
    else:
        _check_batches(report, handle, manifest.entries(), runtime)
        if report.problems:
            _drop_problems_before(report, reader.manifest().first_sequence)
    try:
        read_claims(queue)
    except errors.CorruptData as error:
        key = claims_key(config.data_path_prefix)
        report.problems.append(
            Finding(None, key, error.text(Surface.SHELL), Kind.CLAIMS, "record of claims")
        )
    return report


def _prefix_problems(
    queue: Target,
    claim: QueueClaim | None,
    conflict: errors.PrefixConflict | None,
    manifest: Manifest,
) -> Iterator[Finding]:
    """Find owner markers and entries that contradict the queue's data prefix.

    Raises:
        PrefixConflict: The prefix belongs to another queue, which has batches there.
    """
    if claim is None and (wrong := _wrong_marker(queue, manifest)) is not None:
        text = "it keeps this queue out, and the queue that it names has no batch in its folder"
        yield Finding(None, owner_key(wrong), text, Kind.OWNER, "owner marker")
    elif conflict is not None:
        raise conflict
    seen = None if claim is None else claim.watermark
    acked = "" if seen is None else seen.acked_location
    if fault := misplaced(manifest, queue.config, queue.store.url, acked):
        text = fault.text(Surface.SHELL)
        yield Finding(None, queue.config.manifest_path, text, Kind.PREFIX, "manifest")


def _check_log(
    report: Report, queue: Target, handle: FetchHandle, log: Log, manifest: Manifest
) -> None:
    """Check the segments of a log, all batches that it keeps, and the positions of its readers."""
    index = log.need(marked=True)
    report.problems += _hidden(log, index)
    for entries in _entries_of(report, queue.config, log, index, manifest):
        _check_batches(report, handle, entries, queue.runtime)
    # The manifest first: an entry that leaves it in between is in the index.
    now = queue.reader().manifest()
    index = log.need(marked=True)
    _drop_problems_before(report, index.floor)
    report.problems = _joined(report.problems, LogView.of(log, index, now))
    # Ignore positions that cannot be read, because status reports them.
    positions = read_positions(log, index, unreadable=lambda _: None)
    report.positions = {name: each.next for name, each in positions.items()}


def _drop_problems_before(report: Report, first: int) -> None:
    """Drop the problems of batches that left the queue during the check.

    A consumer may have dequeued them, and a collector may have deleted their objects.
    """
    report.problems = [
        each for each in report.problems if each.sequence is None or each.sequence >= first
    ]


def _index_fault(store: Store, log: Log, manifest: Manifest) -> Finding | None:
    """Return the fault of a log's index; None if it is sound."""
    key = index_key(log.config)
    try:
        log.check_gap(log.need(marked=True), manifest)
    except OldIndex as error:
        return Finding(None, key, error.text(Surface.SHELL), Kind.OLD_INDEX, _INDEX_NAME)
    except errors.CorruptData as error:
        kind = Kind.INDEX
        with suppress(errors.CorruptData):
            if (raw := read_raw(store, key)) is not None and LogIndex.from_json(raw):
                kind = Kind.OTHER_INDEX
        return Finding(None, key, error.text(Surface.SHELL), kind, _INDEX_NAME)
    return None


def _hidden(log: Log, index: LogIndex) -> Iterator[Finding]:
    """Find entries that an index calls lost although a segment has them (failure F46).

    This happens when an old copy of the index was restored. It hid the segment from the program
    that noted the loss.
    """
    for first, end in index.lost:
        stored = log.segments.stored_between(first, end)
        if stored and _is_kept(log, stored[-1][2], end):
            text = (
                f"it says that sequences {first} to {end - 1} were lost, and there is a segment "
                f"with sequences {stored[0][0]} to {stored[-1][1] - 1}: an older copy of the index "
                "was used for a while"
            )
            positions = read_positions(log, index, unreadable=lambda _: None)
            if past := [name for name, each in positions.items() if each.next > first]:
                queue = queue_name(log.store.url, log.config)
                hint = Hint(Action.RESET_AFTER_REPAIR, queue, first, readers=(past[0],))
                text += f". {hint} These are past them: {', '.join(past)}"
            yield Finding(None, index_key(log.config), text, Kind.OLD_INDEX, _INDEX_NAME)
            return  # one repair brings back all of them


def _joined(problems: Iterable[Finding], view: LogView) -> list[Finding]:
    """Return the findings of a log, with a run of adjacent missing batches as one finding.

    A collector that does not know logs deletes thousands of batches (failure F42).
    """
    found: list[Finding] = []
    for each in problems:
        last = found[-1] if found else None
        if last is not None and last.sequence is not None and each.sequence is not None:
            end = last.sequence if last.last_sequence is None else last.last_sequence
            missing = last.kind is each.kind is Kind.MISSING
            if missing and view.available_from(end + 1) == each.sequence:
                count = last.count + 1
                found[-1] = replace(
                    last,
                    problem=f"the objects of {count:,} batches are gone; the first is "
                    f"{last.location!r}",
                    last_sequence=each.sequence,
                    count=count,
                )
                continue
        found.append(each)
    return [_with_next(each, view) for each in found]


def _with_next(finding: Finding, view: LogView) -> Finding:
    if finding.sequence is None:
        return finding
    last = finding.sequence if finding.last_sequence is None else finding.last_sequence
    return replace(finding, next_sequence=view.available_from(last + 1))


def _is_kept(log: Log, segment: str, end: int) -> bool:
    """Return whether the last batch of a segment before sequence ``end`` exists.

    If that one is gone, all are: a collector deletes the oldest batches first.
    """
    try:
        found = Manifest.parse(read_bytes(log.store, segment, MAX_SEGMENT_BYTES))
    except (errors.CorruptData, errors.ObjectNotFound):
        return False
    last = min(found.next_sequence, end) - 1
    return any(exists(log.store, each.location) for each in found.entries(last, 1))


def _check_batches(
    report: Report, handle: FetchHandle, entries: Sequence[BatchDescriptor], runtime: Runtime
) -> None:
    times_queued = Counter(each.location for each in entries)
    checked = fetch_many(
        lambda each: _check_batch(handle, each),
        entries,
        concurrency=CONCURRENCY,
        runtime=runtime,
        size_of=lambda each: 0 if isinstance(each, Finding) else each[2],
    )
    for entry, found in zip(entries, checked, strict=True):
        report.batches += 1
        if isinstance(found, Finding):
            report.problems.append(found)
            continue
        records, size, stored = found
        report.records += records
        report.bytes += size
        report.stored_bytes += stored
        if not report.is_log and (times := times_queued[entry.location]) > 1:
            text = (
                f"its object is queued {times} times, as a writer does that got no answer: this "
                "library delivers it once, other readers each time"
            )
            report.problems.append(Finding(entry.sequence, entry.location, text, Kind.REPEATED))


def _entries_of(
    report: Report, config: ConsumerConfig, log: Log, index: LogIndex, manifest: Manifest
) -> Iterator[Sequence[BatchDescriptor]]:
    """Yield the entries of a log from its floor on, one segment at a time.

    Adds a problem to the report for each segment that cannot be read.
    """
    for part, found in log.segments.each(index):
        if isinstance(found, errors.CorruptData):
            what = "segment" if part.name.endswith(".segment") else "page of the index"
            key = parts_folder(config) + part.name
            report.problems.append(
                Finding(None, key, found.text(Surface.SHELL), Kind.SEGMENT, what)
            )
        else:
            yield found.entries(max(part.first, index.floor))
    yield manifest.entries(max(manifest.first_sequence, index.end, index.floor))


def _check_batch(
    handle: FetchHandle, descriptor: BatchDescriptor
) -> tuple[int, int, int] | Finding:
    """Fetch and decode one batch.

    Returns:
        The number of records, their bytes, and the bytes of the object; or the problem. A problem
        is returned and not raised, because :func:`.fetch_many` ends at the first error.
    """
    try:
        raw = handle._fetch_pooled(descriptor)
        values = handle._decode_arrow(raw).values
        return len(values), value_bytes(values), raw.nbytes
    except errors.PoisonBatch as error:
        kind = _kind(error)
        return Finding(descriptor.sequence, descriptor.location, error.reason, kind)


def _kind(error: errors.PoisonBatch) -> Kind:
    if isinstance(error, errors.BatchMissing) or key_fault(error.location):
        return Kind.MISSING
    if isinstance(error, errors.ForeignLocation):
        return Kind.FOREIGN
    cause = error.__cause__
    if isinstance(cause, errors.CorruptData) and cause.limit is not None:
        return Kind.TOO_LARGE
    return Kind.UNREADABLE


def _add_manifest_fault(report: Report, plan: RebuildPlan, queue: Target) -> None:
    fault = plan.fault or Message()
    if not fault.hints:
        fault = Message(*fault.parts, Hint(Action.REPAIR))
    text, path = fault.at(queue.name).text(Surface.SHELL), queue.config.manifest_path
    report.problems.append(Finding(None, path, text, Kind.MANIFEST, "manifest"))
    for location in plan.found:
        text = "no entry names it, and no consumer of this queue is known to have read it"
        report.notes.append(Finding(None, location, text, Kind.UNREAD, "unread batch"))
    for location in plan.missing:
        text = "it was queued, and its object is gone"
        report.notes.append(Finding(None, location, text, Kind.MISSING, "batch"))


def _wrong_marker(queue: Target, own: Manifest) -> str | None:
    """Return the folder of an owner marker that keeps this queue out without a reason; or None.

    The folder is the prefix or one around it. This queue has batches in the prefix, and the queue
    that the marker names has none in the folder.
    """
    store, runtime = queue.store, queue.runtime
    folder = prefix = queue.prefix
    while folder:
        there = replace(queue.config, data_path_prefix=folder)
        try:
            owner = owner_object(store, there, runtime).read()
        except errors.PermanentStorageError:
            return None  # A role may be limited to the prefix. It may still check its queue.
        if isinstance(owner, PrefixOwner):
            seen = owner.watermark
            named = read_manifest(store, replace(there, manifest_path=owner.manifest_path), runtime)
            if named is None and seen is not None:
                return None  # Its manifest was lost (failure F4), and its batches may wait there.
            acked = "" if seen is None else seen.acked_location
            known = [each for each in (acked, *(named or Manifest.empty()).locations()) if each]
            if not known and named is not None and named.next_sequence:
                return None  # The places of its former batches are not known.
            has_any = any(parse_location(each, folder) for each in known)
            is_own = any(parse_location(each, prefix) for each in (acked, *own.locations()))
            return folder if is_own and not has_any else None
        folder = folder.rpartition("/")[0]
    return None


def _replace_marker(queue: Target, folder: str) -> str:
    """Give the prefix to this queue in place of a wrong marker.

    Returns:
        The key of the copy of the wrong marker.
    """
    store, config, runtime = queue.store, queue.config, queue.runtime
    key, path = owner_key(folder), config.manifest_path
    saved = f"{key}.wrong-{runtime.ulid()}"
    wrong = read_bytes(store, key)
    store.put(saved, wrong)
    owner = PrefixOwner.from_json(wrong, folder)
    # If this queue made the marker itself, keep its id, because saved positions begin with it.
    mine = owner if owner.manifest_path == path else PrefixOwner(path, runtime.ulid())
    marker = owner_object(store, config, runtime)
    marker.change(lambda before: before if before and before.manifest_path == path else mine)
    if folder != config.data_path_prefix:
        store.delete_many([key])
    return saved


def plan_repair(
    report: Report, queue: QueueName | None = None
) -> tuple[list[Finding], list[tuple[Finding, str]]]:
    """Split the problems of a report into those that :func:`repair` repairs and the others.

    If an object is queued several times, its first entry is kept.

    Args:
        report: The result of a check.
        queue: The name of the queue, for commands.

    Returns:
        The problems to repair, by sequence; and the others, each with the reason why it is left.
    """
    to_repair: list[Finding] = []
    leave: list[tuple[Finding, str]] = []
    delivered: set[str] = set()
    for finding in report.problems:
        if finding.kind is Kind.REPEATED and finding.location not in delivered:
            delivered.add(finding.location)
        elif report.is_log and finding.next_sequence is not None:
            leave.append((finding, _passed_by(report, finding, queue)))
        elif finding.kind in REPAIRED_BY:
            to_repair.append(finding)
        else:
            reason = NOT_REPAIRED[finding.kind]
            if (action := _BY_HAND.get(finding.kind)) is not None:
                reason += f". {Hint(action, queue, finding.sequence)}"
            leave.append((finding, reason))
    return to_repair, leave


def _passed_by(report: Report, finding: Finding, queue: QueueName | None) -> str:
    """Return why repair leaves batches of a log, and the commands that move readers past them."""
    end = finding.next_sequence
    assert end is not None
    behind = sorted(name for name, at in report.positions.items() if at < end)
    why = f"an entry of a log never changes, and the next sequence is {end}."
    if not behind:
        return f"{why} Restore the objects for a new reader; all that there are have passed"
    return f"{why} {Hint(Action.RESET_READERS_PAST, queue, end, readers=tuple(behind))}"


def repair(queue: Target, plan: Sequence[Finding]) -> list[tuple[Finding, str | None]]:
    """Repair the problems that :func:`plan_repair` selected.

    Stop the queue's producers and consumers first. A consumer that still runs is fenced. After an
    error, check again and repair again.

    Args:
        queue: The queue.
        plan: The problems to repair.

    Returns:
        Each problem with the id of its copy in the quarantine or the key of the copy; None if
        nothing was copied.
    """
    done: list[tuple[Finding, str | None]] = []
    store = queue.store
    for finding in plan:
        if finding.kind is Kind.MANIFEST:
            copy = rebuild(queue)
        elif finding.kind is Kind.CLAIMS:
            copy = f"{finding.location}.broken-{queue.runtime.ulid()}"
            store.put(copy, read_raw(store, finding.location) or b"")
            store.delete_many([finding.location])
        elif finding.kind in (Kind.INDEX, Kind.OLD_INDEX):
            copy = rebuild_index(queue)
        elif finding.kind is Kind.OWNER:
            copy = _replace_marker(queue, finding.location.rpartition("/")[0])
        else:
            assert finding.sequence is not None
            force = finding.kind is Kind.REPEATED
            copy = skip_batch(queue, finding.sequence, force=force)[0].id
        done.append((finding, copy))
        if finding.kind is Kind.MANIFEST:
            done += _repair_revealed(queue)
    return done


def _repair_revealed(queue: Target) -> list[tuple[Finding, str | None]]:
    """Repair the index of a log after its manifest.

    The first check ended at the manifest. If a manifest and an index were lost together they are
    repaired together, because neither works without the other.
    """
    claim = queue.owner()
    if claim is None or not claim.is_log:
        return []
    log = Log(queue.store, queue.config, queue.runtime, claim.queue_id)
    fault = _index_fault(queue.store, log, queue.reader().manifest())
    if fault is None or fault.kind not in (Kind.INDEX, Kind.OLD_INDEX):
        return []
    return [(fault, rebuild_index(queue))]
