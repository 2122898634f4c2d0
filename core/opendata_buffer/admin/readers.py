"""Named readers of a log, for an operator: make a log of a queue, look at readers, set them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opendata_buffer.admin.target import Target
from opendata_buffer.broker.claims import claims_key
from opendata_buffer.errors import CorruptData, DataLoss, Drained, InvalidInput
from opendata_buffer.queue.log import Log, LogIndex, LogView, parts_folder
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.reader_admin import (
    enable_readers,
    reset_reader,
    unknown_reader,
    unregister,
)
from opendata_buffer.queue.reader_positions import read_positions, readers_folder
from opendata_buffer.runtime import in_parallel

if TYPE_CHECKING:  # It imports Arrow, and a probe that runs every few seconds does not need it.
    from opendata_buffer.admin.trim import Start

LEAST_EXPIRY_MS = 10 * 60 * 1000
"""A reader that has nothing to read writes its position once a minute at most."""

_MOST_PLANS = 5

SOON = 0.25  # share of the expiry below which an operator is warned


def view_of(queue: Target) -> LogView:
    """All that a log keeps; ``InvalidInput`` where there is no queue, or one that is no log."""
    claim = queue.owner()
    # Behind the marker, and before the index: what left the manifest in between is in the index.
    manifest = queue.reader().manifest()
    queue_id = "" if claim is None else claim.queue_id
    found = Log(queue.store, queue.config, queue.runtime, queue_id)
    index = found.need(marked=claim is not None and claim.is_log)
    return found.view(index, manifest)


def enable_log(queue: Target, **given: int | None) -> tuple[LogIndex, bool]:
    """Make a log of a queue, or change what one keeps: ``retention_ms``, ``retention_bytes``,
    ``reader_expiry_ms``. What is not given stays, or is the default.

    A consumer that runs is fenced, because it would take batches off the log. Returns the index,
    and whether the queue was none before. Drained for a partition that was sealed.
    """
    if 0 in (given.get("retention_ms"), given.get("retention_bytes")):
        raise InvalidInput(
            "a retention of 0 is none: use 'none', which keeps a batch until all readers have "
            "acknowledged it, or a time such as 7d, or a size such as 500GB"
        )
    if (given.get("reader_expiry_ms") or LEAST_EXPIRY_MS) < LEAST_EXPIRY_MS:
        raise InvalidInput(
            "the reader expiry is 10 minutes at least: a reader that has nothing to read writes "
            "its position only now and then"
        )
    store, config, runtime = queue.store, queue.config, queue.runtime
    claim = claim_for_writing(store, config, runtime=runtime)
    found = Log(store, config, runtime, claim.queue_id)
    index = found.read()
    folders = (parts_folder(config), readers_folder(config))
    if index is None and any(store.list(each, limit=1).objects for each in folders):
        # Made anew, it would not name the segments that there are (failure F45).
        index = found.need(marked=True)
    manifest = queue.reader().find()
    if manifest is not None and manifest.sealed:
        raise Drained(config.manifest_path)
    # It fences the consumer that runs (failure F42).
    return enable_readers(store, config, claim, runtime, **given), index is None


@dataclass(frozen=True, kw_only=True)
class ReaderStatus:
    """A reader at one moment. ``lag`` in batches; ages in seconds."""

    partition: str
    name: str
    next_sequence: int  # everything before it is acknowledged
    lag: int
    lag_bytes: int | None = None  # None where the sizes are not known
    oldest_unread_seconds: float | None  # None where nothing waits for it
    runs: bool  # whether a consumer seems to run with this name
    program: str
    host: str
    process: int
    epoch: int
    moved_ms: int  # when its position was written last, since the Unix epoch
    expires_seconds: float  # from then on it holds nothing, unless it moves
    expires_soon: bool
    position_missing: bool = False  # then it holds everything from the floor on

    @property
    def who(self) -> str:
        """The consumer with this name that runs or was the last to run, in words."""
        if self.position_missing:
            return "unknown, its position is missing"
        if not self.program:
            return "unknown"
        process = f", process {self.process}" if self.process else ""
        return f"{self.program} on {self.host}{process}"


def readers_of(
    queue: Target,
    view: LogView,
    name: str | None = None,
    unreadable: Callable[[CorruptData], None] | None = None,
) -> list[ReaderStatus]:
    """All readers of a log, by name, or only the one of a ``name``; one small read for each.
    ``unreadable`` as for :func:`.read_positions`."""
    index, now_ms = view.index, queue.runtime.now_ms()
    if name is not None:
        index = replace(index, readers=tuple(each for each in index.readers if each == name))
    found = []
    for each, position in read_positions(view.log, index, unreadable).items():
        left_ms = position.moved_ms + index.reader_expiry_ms - now_ms
        status = ReaderStatus(
            partition=queue.prefix,
            name=each,
            next_sequence=position.next,
            lag=view.starting_at(position.next).entry_count,
            oldest_unread_seconds=view.starting_at(position.next).age_s(now_ms),
            runs=position.may_run(now_ms),
            program=position.program,
            host=position.host,
            process=position.process,
            epoch=position.epoch,
            moved_ms=position.moved_ms,
            expires_seconds=left_ms / 1000,
            expires_soon=left_ms < index.reader_expiry_ms * SOON,
            position_missing=position.is_missing,
        )
        found.append(status)
    return found


def reader_of(queue: Target, view: LogView, name: str) -> ReaderStatus:
    """One reader; ``InvalidInput`` with the known ones where there is none of this name."""
    for each in readers_of(queue, view, name):
        return each
    raise unknown_reader(name, view.index)


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """What a reset would do. ``before`` is None for a new reader."""

    partition: str
    reader: str
    before: int | None
    after: int
    again: int  # batches that are read again
    passed: int  # batches that are passed by
    runs: str  # the consumer that is fenced, in words; empty where none seems to run


def plan_reset(queue: Target, name: str, where: Start | int) -> tuple[ResetPlan, LogView]:
    """Where a reader would be set: to a place, or by a number of batches; changes nothing. A name
    without a reader is a new one, but for a number: there is nothing that it would count from."""
    view = view_of(queue)
    before, runs = None, ""
    if name in view.index.readers or isinstance(where, int):
        found = reader_of(queue, view, name)
        before = max(found.next_sequence, view.first_sequence)
        runs = found.who if found.runs else ""
    at = view.first_sequence if before is None else before
    if isinstance(where, int):
        after = min(max(at + where, view.first_sequence), view.next_sequence)
    else:
        after = where.sequence_in(view, queue.config, queue.store.url)
    again = passed = 0
    if before is not None:
        again, passed = view.count(after, at), view.count(at, after)
    return ResetPlan(queue.prefix, name, before, after, again, passed, runs), view


def apply_reset(queue: Target, plan: ResetPlan, view: LogView, where: Start | int) -> ResetPlan:
    """Set the reader as planned, and return what was done.

    The oldest batch may be deleted between the plan and the write. A reset to the oldest batch is
    then planned again, up to five times.

    Raises:
        DataLoss: The place is not kept any more.
    """
    planned = plan
    for _ in range(_MOST_PLANS - 1):
        try:
            reset_reader(view, plan.reader, planned.after)
            return planned
        except DataLoss:
            if isinstance(where, int) or not where.is_earliest:
                raise
        now, view = plan_reset(queue, plan.reader, where)
        again = 0 if plan.before is None else view.count(now.after, plan.before)
        planned = replace(plan, after=now.after, again=again)
    reset_reader(view, plan.reader, planned.after)
    return planned


def missing_readers(known: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """The partitions of a topic that lack a reader which other partitions have.

    Args:
        known: The readers of each active partition that is a log, by the partition's name.

    Returns:
        The partitions that lack it by the name of the reader. A reader that no partition has any
        more has expired everywhere, and is not missing.
    """
    everyone = sorted({name for readers in known.values() for name in readers})
    found = {
        name: [partition for partition, readers in known.items() if name not in readers]
        for name in everyone
    }
    return {name: partitions for name, partitions in found.items() if partitions}


def missing_notes(known: Mapping[str, Collection[str]], words: str) -> list[str]:
    """A sentence for each reader that some partitions lack (failure F47); ``words`` are the topic
    as commands take it. See :func:`missing_readers`."""
    return [
        f"reader {name!r} is missing from {', '.join(partitions)}: batches there can be deleted "
        f"before it reads them. Register it with 'opendata-buffer readers enable {words}'."
        for name, partitions in missing_readers(known).items()
    ]


def delete_reader(target: Target, name: str, *, force: bool = False) -> list[str]:
    """Delete a reader of a queue, of one partition, or of a whole topic; it then holds nothing.

    The topic's description forgets the reader first. Where the command is killed after that, the
    partitions that still have the reader show it, and the command can be repeated. An expansion at
    the same time may give the reader to the new partitions, so all are looked at again.

    Returns:
        The data prefixes of the queues that had the reader.

    Raises:
        InvalidInput: No queue has the reader; or it runs, and ``force`` is off.
    """
    views = _views(target)
    held = _with_reader(views, name)
    if not held:
        if target.topic is not None:
            target.topic.forget_reader(name)
        raise unknown_reader(name, views[-1][1].index)
    for queue, view in held:
        found = reader_of(queue, view, name)
        if found.runs and not force:
            raise InvalidInput(
                f"reader {name!r} runs: {found.who}. Stop it first, or give --force: it ends with "
                "an error"
            )
    deleted = []
    while held:
        if target.topic is not None:
            target.topic.forget_reader(name)
        for queue, view in held:
            unregister(queue.store, view.log, name)
            queue.store.delete_many([claims_key(queue.prefix, name)])  # of its workers
            deleted.append(queue.prefix)
        held = [] if target.topic is None else _with_reader(_views(target), name)
    return deleted


def _views(target: Target) -> list[tuple[Target, LogView]]:
    """What the log keeps, or each partition of a topic that was ever used."""
    queues = existing(target)
    return [*zip(queues, in_parallel(target.runtime, view_of, queues), strict=True)]


def _with_reader(
    views: Sequence[tuple[Target, LogView]], name: str
) -> list[tuple[Target, LogView]]:
    return [(queue, view) for queue, view in views if name in view.index.readers]


def existing(target: Target) -> list[Target]:
    """The queue, or each partition of a topic that was ever used; ``InvalidInput`` without any."""
    found = [target] if target.topic is None else target.written()
    if not found:
        raise InvalidInput(f"no partition of the topic at {target.store.url} was ever written")
    return found
