"""Mending what a check found, with what each fault has: rebuild, skip and the quarantine.

Nothing is given up without a copy: a manifest that is replaced is saved beside the new one, and
what stands in the place of a batch that cannot be read lies in the quarantine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from opendata_buffer.admin.fsck import Finding, Kind, Report
from opendata_buffer.admin.rebuild import rebuild
from opendata_buffer.admin.skip import skip_batch
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["MENDED_BY", "Mended", "RepairPlan", "plan_repair", "repair"]

MENDED_BY = {
    Kind.MANIFEST: "is rebuilt from the batches that are there, and its bytes are saved beside it",
    Kind.MISSING: "is passed by: its object is gone, and a report of it goes to the quarantine",
    Kind.UNREADABLE: "is copied to the quarantine and passed by",
    Kind.REPEATED: "is copied to the quarantine and passed by: the first entry delivers the object",
}
"""What repair does about a kind of problem; the others are not damage."""

LEFT = {
    Kind.TOO_LARGE: "it may be sound: check again with a larger --max-batch-bytes",
    Kind.FOREIGN: "it may be sound: check again with --allow-foreign-locations, or skip it",
}


@dataclass(frozen=True)
class RepairPlan:
    """What is to be done about the problems of one queue.

    Attributes:
        mend: Those that repair mends, in the order of their sequences.
        leave: Those that somebody has to decide about, and why.
    """

    mend: tuple[Finding, ...]
    leave: tuple[tuple[Finding, str], ...]


@dataclass(frozen=True, kw_only=True)
class Mended:
    """One thing that repair did.

    Attributes:
        sequence: Of the batch that was passed by; None for the manifest.
        location: Its object, or the manifest's key.
        kind: What was wrong.
        copy: Id in the quarantine, or where the old manifest was saved; None where there was
            nothing to keep.
    """

    sequence: int | None
    location: str
    kind: Kind
    copy: str | None

    def as_json(self) -> dict[str, Any]:
        """All fields, by name."""
        return asdict(self)


def plan_repair(report: Report) -> RepairPlan:
    """What to do about a check's problems; pure.

    Of an object that is queued more than once the first entry stays.
    """
    mend: list[Finding] = []
    leave: list[tuple[Finding, str]] = []
    delivered: set[str] = set()
    for finding in report.problems:
        if finding.kind is Kind.REPEATED and finding.location not in delivered:
            delivered.add(finding.location)
        elif finding.kind in MENDED_BY:
            mend.append(finding)
        else:
            leave.append((finding, LEFT[finding.kind]))
    return RepairPlan(tuple(mend), tuple(leave))


def repair(
    store: Store,
    config: ConsumerConfig,
    plan: Sequence[Finding],
    runtime: Runtime,
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[Mended]:
    """Mend what a plan names. When this fails half way, check again and repair what is left.

    Stop the queue's producers and consumers first; a consumer that still runs is fenced.

    Args:
        store: Where the queue lives.
        config: Its manifest and prefix, and the largest batch that counts as readable.
        plan: ``RepairPlan.mend``.
        runtime: Clock and names.
        advance: Told how much is done, and of how much.

    Raises:
        InvalidInput: A batch can be read by now: check again.
        PrefixConflict, UnsafeStore, StorageError, Conflict: What is left was not mended.
    """
    done = []
    for finding in plan:
        if finding.kind is Kind.MANIFEST:
            _, copy = rebuild(store, config, runtime)
        else:
            assert finding.sequence is not None
            force = finding.kind is Kind.REPEATED
            skipped = skip_batch(store, config, finding.sequence, runtime, force=force)
            copy = skipped.report.id
        done.append(
            Mended(
                sequence=finding.sequence,
                location=finding.location,
                kind=finding.kind,
                copy=copy,
            )
        )
        advance(len(done), len(plan))
    return done
