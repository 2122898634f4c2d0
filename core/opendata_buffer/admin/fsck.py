"""Whether every queued batch is there and readable. Reads only, and goes on after a finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.rebuild import RebuildPlan, plan_rebuild, read_raw
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.errors import PoisonBatch
from opendata_buffer.queue.owner import check_owner
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Store

__all__ = ["Finding", "Report", "check_queue"]

CONCURRENCY = 8


@dataclass(frozen=True)
class Finding:
    """Something worth telling about one entry, the manifest, or a batch that no entry names.

    Attributes:
        sequence: The entry; None for the others.
        location: Its object; the manifest's key for the manifest.
        problem: What is wrong.
        what: ``entry``, ``manifest``, or ``unread batch`` for one that no entry names.
    """

    sequence: int | None
    location: str
    problem: str
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
        bytes: Bytes of their objects.
        problems: What a consumer will stumble over.
        notes: What is legal but odd.
    """

    batches: int = 0
    records: int = 0
    bytes: int = 0
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
    nbytes: int = 0
    fault: str | None = None


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

    def look(descriptor: BatchDescriptor) -> _Outcome:
        # A value, not an error: fetch_many ends at the first error.
        try:
            raw = handle.fetch_raw(descriptor)
            values = handle.decode_arrow(raw).values
            return _Outcome(descriptor, len(values), raw.nbytes, values.nbytes + raw.nbytes)
        except PoisonBatch as error:
            return _Outcome(descriptor, fault=error.reason)

    for outcome in fetch_many(look, descriptors, concurrency=CONCURRENCY, runtime=runtime):
        _add(report, outcome, times_queued[outcome.descriptor.location])
        advance(report.batches, len(descriptors))
    if report.problems:
        # A consumer may have taken entries, and its collector their objects, while we looked.
        first = observer.manifest().first_sequence
        report.problems = [
            each for each in report.problems if each.sequence is None or each.sequence >= first
        ]
    return report


def _add_lost(report: Report, plan: RebuildPlan, config: ConsumerConfig) -> None:
    """A manifest that does not name what it should: nothing below it can be trusted."""
    text = f"{plan.fault}. Stop everything and mend it with 'opendata-buffer manifest rebuild'"
    report.problems.append(Finding(None, config.manifest_path, text, "manifest"))
    for location in plan.found:
        text = "no entry names it, and no consumer of this queue is known to have read it"
        report.notes.append(Finding(None, location, text, "unread batch"))


def _add(report: Report, outcome: _Outcome, times_queued: int) -> None:
    entry = outcome.descriptor

    def finding(text: str) -> Finding:
        return Finding(entry.sequence, entry.location, text)

    report.batches += 1
    report.records += outcome.records
    report.bytes += outcome.size
    if outcome.fault is not None:
        report.problems.append(finding(outcome.fault))
        return
    if times_queued > 1:
        text = f"its object is queued {times_queued} times: so often its records are delivered"
        report.problems.append(finding(text))
    for each in entry.metadata:
        if each.start_index > outcome.records:
            text = (
                f"metadata starts at record {each.start_index}, after the last, {outcome.records}"
            )
            report.notes.append(finding(text + "; legal, and describes no record"))
            return
