"""Whether every queued batch is there and readable. Reads only, and goes on after a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow.compute as pc

from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.rebuild import RebuildPlan, plan_rebuild, read_raw
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.fetch import BatchDescriptor, FetchHandle
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.errors import BatchMissing, ForeignLocation, PoisonBatch
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["Finding", "Kind", "Report", "check_queue"]

CONCURRENCY = 8
GROUP = 16
"""Batches that one thread looks at in a row: handing each over would take longer than the look."""

SMALL_BYTES = 16 * 1024
"""Up to here a batch is read quicker without Arrow, which takes its time to begin."""


class Kind(StrEnum):
    """What is wrong, as ``fsck --json`` says it."""

    MANIFEST = "manifest"
    """The manifest is gone, damaged or went backwards."""
    MISSING = "missing"
    """A batch's object is gone."""
    UNREADABLE = "unreadable"
    """A batch does not decode."""
    TOO_LARGE = "too large"
    """A batch is larger than this reader takes; another one may take it."""
    FOREIGN = "foreign"
    """A batch lies outside the data prefix."""
    REPEATED = "repeated"
    """An object is queued more than once."""
    UNREAD = "unread"
    """An object that no entry names."""
    METADATA = "metadata"
    """Metadata of no record."""


@dataclass(frozen=True)
class Finding:
    """Something worth telling about one entry, the manifest, or a batch that no entry names.

    Attributes:
        sequence: The entry; None for the others.
        location: Its object; the manifest's key for the manifest.
        problem: What is wrong.
        what: ``entry``, ``manifest``, or ``unread batch`` for one that no entry names.
        kind: The same problems have the same one.
    """

    sequence: int | None
    location: str
    problem: str
    kind: Kind
    what: str = "entry"

    def __str__(self) -> str:
        where = self.what if self.sequence is None else f"sequence {self.sequence}"
        return f"{where} {self.location!r}: {self.problem}"


@dataclass
class Report:
    """The outcome of a check.

    Attributes:
        batches: Entries checked.
        records: Records in the readable ones.
        bytes: Bytes of these records.
        stored_bytes: Bytes of their objects.
        problems: What a consumer will stumble over.
        notes: What is legal but odd.
    """

    batches: int = 0
    records: int = 0
    bytes: int = 0
    stored_bytes: int = 0
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether a consumer can read the queue to its end."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """All fields and ``ok``."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True)
class _Outcome:
    """What one batch turned out to be; ``fault`` None means readable."""

    descriptor: BatchDescriptor
    records: int = 0
    size: int = 0
    stored: int = 0
    fault: str | None = None
    kind: Kind = Kind.UNREADABLE


@dataclass(frozen=True)
class _Group:
    """Batches that are looked at in a row, and what they turned out to be."""

    batches: Sequence[BatchDescriptor]
    outcomes: Sequence[_Outcome] = ()
    nbytes: int = 0
    size: int | None = None


def check_queue(
    store: Store,
    config: ConsumerConfig,
    runtime: Runtime,
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Check the manifest, then fetch and decode every batch it names.

    A manifest that is damaged, gone, or behind what the owner marker has seen is the one problem
    told then; each batch that no entry names and no consumer is known to have read is a note.

    Args:
        store: Where the queue lives.
        config: Its manifest and prefix, and the largest batch to decode.
        runtime: Threads, and the time of retries.
        advance: Told the entries done, and their number.

    Raises:
        InvalidInput: There is no manifest.
        TransientStorageError, PermanentStorageError: The store does not answer; nothing is
            said about the queue then.
    """
    report = Report()
    observer = Observer(store, config, runtime)
    claim = check_owner(store, config, runtime=runtime)
    seen = None if claim is None else claim.watermark
    # Before the manifest: what is enqueued between the two is named by it.
    listing = store.list(f"{config.data_path_prefix}/")
    raw = read_raw(store, config.manifest_path)
    plan = plan_rebuild(raw, listing, seen, config=config)
    # Where neither a manifest nor a marker was ever, there is no queue: the next read says so.
    if plan.fault is not None and (raw is not None or seen is not None):
        _add_lost(report, plan, config)
        return report
    manifest = observer.manifest()
    handle = FetchHandle.of(config, store=store, runtime=runtime)
    descriptors = [BatchDescriptor.of(entry) for entry in manifest.entries()]
    times_queued = Counter(each.location for each in descriptors)
    groups = [
        _Group(descriptors[start : start + GROUP]) for start in range(0, len(descriptors), GROUP)
    ]

    def look(group: _Group) -> _Group:
        found = [_look(handle, each) for each in group.batches]
        return _Group(group.batches, found, sum(each.stored for each in found))

    looked: Iterable[_Group] = fetch_many(look, groups, concurrency=CONCURRENCY, runtime=runtime)
    for group in looked:
        for outcome in group.outcomes:
            _add(report, outcome, times_queued[outcome.descriptor.location])
            advance(report.batches, len(descriptors))
    if report.problems:
        # A consumer may have taken entries, and its collector their objects, while we looked.
        first = observer.manifest().first_sequence
        report.problems = [
            each for each in report.problems if each.sequence is None or each.sequence >= first
        ]
    return report


def _look(handle: FetchHandle, descriptor: BatchDescriptor) -> _Outcome:
    # A value, not an error: fetch_many ends at the first error.
    stored: int | None = None
    try:
        raw = handle.fetch_raw(descriptor)
        stored = raw.nbytes
        if stored <= SMALL_BYTES:
            batch = handle.decode(raw)
            return _Outcome(descriptor, len(batch.entries), batch.nbytes, stored)
        values = handle.decode_arrow(raw).values
        size = pc.sum(pc.binary_length(values)).as_py() or 0
        return _Outcome(descriptor, len(values), size, stored)
    except PoisonBatch as error:
        return _Outcome(descriptor, fault=error.reason, kind=_kind(error, stored))


def _kind(error: PoisonBatch, stored: int | None) -> Kind:
    if isinstance(error, BatchMissing):
        return Kind.MISSING
    if isinstance(error, ForeignLocation):
        return Kind.FOREIGN
    # Of a limit, the reason names the setting; an object beyond all limits was not even read.
    return (
        Kind.TOO_LARGE if stored is None or "max_batch_bytes" in error.reason else Kind.UNREADABLE
    )


def _add_lost(report: Report, plan: RebuildPlan, config: ConsumerConfig) -> None:
    """A manifest that does not name what it should: nothing below it can be trusted."""
    text = f"{plan.fault}".rstrip(".")
    if "manifest rebuild" not in text:
        text += ". Stop everything and mend it with 'opendata-buffer manifest rebuild'"
    report.problems.append(Finding(None, config.manifest_path, text, Kind.MANIFEST, "manifest"))
    for location in plan.found:
        text = "no entry names it, and no consumer of this queue is known to have read it"
        report.notes.append(Finding(None, location, text, Kind.UNREAD, "unread batch"))


def _add(report: Report, outcome: _Outcome, times_queued: int) -> None:
    entry = outcome.descriptor

    def finding(text: str, kind: Kind) -> Finding:
        return Finding(entry.sequence, entry.location, text, kind)

    report.batches += 1
    report.records += outcome.records
    report.bytes += outcome.size
    report.stored_bytes += outcome.stored
    if outcome.fault is not None:
        report.problems.append(finding(outcome.fault, outcome.kind))
        return
    if times_queued > 1:
        text = f"its object is queued {times_queued} times: so often its records are delivered"
        report.problems.append(finding(text, Kind.REPEATED))
    for each in entry.metadata:
        if each.start_index > outcome.records:
            text = (
                f"metadata starts at record {each.start_index}, after the last, {outcome.records}"
            )
            report.notes.append(finding(text + "; legal, and describes no record", Kind.METADATA))
            return
