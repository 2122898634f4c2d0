"""Commands for the named readers of a log: turn a queue into a log, list readers, reset them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from opendata_buffer.admin.target import Target
from opendata_buffer.broker.claims import claims_key
from opendata_buffer.config import check_reader_name
from opendata_buffer.consumer.place import Place
from opendata_buffer.errors import CorruptData, DataLoss, Drained, InvalidInput
from opendata_buffer.hints import Action, Hint, QueueName
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_parts import parts_folder
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.reader_admin import (
    enable_readers,
    reset_reader,
    unknown_reader,
    unregister,
)
from opendata_buffer.queue.reader_positions import (
    ReaderPosition,
    not_for_v1,
    position_key,
    read_positions,
    readers_folder,
)
from opendata_buffer.queue.v1_admin import add_v1_reader
from opendata_buffer.queue.v1_feed import Feeder, Feeders
from opendata_buffer.runtime import in_parallel
from opendata_buffer.topic.description import TopicDescription

LEAST_EXPIRY_MS = 10 * 60 * 1000
"""The shortest expiry. A reader with nothing to read writes its position at most once a minute."""

_MOST_PLANS = 5

_SHOWN = 3

SOON = 0.25  # warn an operator below this share of the expiry


def view_of(queue: Target) -> LogView:
    """Read everything that a log keeps.

    Args:
        queue: The queue.

    Returns:
        The view of the log.

    Raises:
        InvalidInput: The queue does not exist, or is not a log.
    """
    claim = queue.owner()
    # Read the manifest after the marker and before the index. Entries that leave the manifest in
    # between are then in the index.
    manifest = queue.reader().manifest()
    queue_id = "" if claim is None else claim.queue_id
    found = Log(queue.store, queue.config, queue.runtime, queue_id)
    index = found.need(marked=claim is not None and claim.is_log)
    return LogView.of(found, index, manifest)


def check_limits(**given: int | None) -> None:
    """Check how long a log is to keep batches.

    Args:
        **given: Values as for :func:`enable_log`.

    Raises:
        InvalidInput: A retention is 0, or the expiry is less than 10 minutes.
    """
    if 0 in (given.get("retention_ms"), given.get("retention_bytes")):
        raise InvalidInput("a retention of 0 keeps nothing", Hint(Action.CORRECT_RETENTION))
    if (given.get("reader_expiry_ms") or LEAST_EXPIRY_MS) < LEAST_EXPIRY_MS:
        raise InvalidInput(
            "the reader expiry is 10 minutes at least: a reader that has nothing to read writes "
            "its position only now and then"
        )


def enable_log(queue: Target, **given: int | None) -> tuple[LogIndex, bool]:
    """Turn a queue into a log, or change the settings of a log.

    This fences a running consumer, because it would take batches off the log.

    Args:
        queue: The queue.
        **given: New values of ``retention_ms``, ``retention_bytes`` and ``reader_expiry_ms``.
            Settings that are not given stay, or get the default.

    Returns:
        The index, and whether the queue became a log by this call.

    Raises:
        InvalidInput: A retention is 0, or the expiry is less than 10 minutes.
        Drained: The partition was sealed.
    """
    check_limits(**given)
    store, config, runtime = queue.store, queue.config, queue.runtime
    claim = claim_for_writing(store, config, runtime=runtime)
    found = Log(store, config, runtime, claim.queue_id)
    index = found.read()
    folders = (parts_folder(config), readers_folder(config))
    if index is None and any(store.list(each, limit=1).objects for each in folders):
        # A new index would not name the existing segments (failure F45).
        index = found.need(marked=True)
    manifest = queue.reader().find()
    if manifest is not None and manifest.sealed:
        raise Drained(config.manifest_path)
    # This fences a running consumer (failure F42).
    return enable_readers(store, config, claim, runtime, **given), index is None


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """A log, with its settings as they are now.

    Attributes:
        partition: The data prefix of the queue.
        made: Whether the queue became a log by this call.
        first_sequence: The oldest batch that is kept.
        retention_ms: Batches are kept for this time, in milliseconds, even after every reader has
            acknowledged them; None to keep them no longer than that.
        retention_bytes: The same as a size, in bytes.
        reader_expiry_ms: If a reader does not move for this time, in milliseconds, no batches are
            kept for it any more.
        registered: Readers of other partitions that this call registered here, and the sequences at
            which they begin.
        readers: All readers of the log.
    """

    partition: str
    made: bool
    first_sequence: int
    retention_ms: int | None
    retention_bytes: int | None
    reader_expiry_ms: int
    registered: Mapping[str, int]
    readers: tuple[str, ...]


def enable_logs(target: Target, given: Mapping[str, int | None]) -> list[LogSettings]:
    """Make logs of a queue, or of all partitions of a topic, including any added meanwhile.

    Args:
        target: The queue or the topic.
        given: As for :func:`enable_log`.

    Returns:
        The logs. Readers that some partitions lacked are registered there.
    """
    indexes = dict[str, tuple[LogIndex, bool]]()
    done, registered = set[str](), dict[str, dict[str, int]]()
    while new := [queue for queue in target.queues() if queue.prefix not in done]:
        for queue in new:
            done.add(queue.prefix)
            with suppress(Drained):  # A partition that leaves the topic is empty.
                indexes[queue.prefix] = enable_log(queue, **given)
        if target.topic is not None:
            for name, begins in target.topic.register_missing().items():
                registered[name] = {**registered.get(name, {}), **begins}
    return [
        LogSettings(
            partition=name,
            made=made,
            first_sequence=index.floor,
            retention_ms=index.retention_ms,
            retention_bytes=index.retention_bytes,
            reader_expiry_ms=index.reader_expiry_ms,
            registered=registered.get(name, {}),
            readers=tuple(sorted({*index.readers, *registered.get(name, {})})),
        )
        for name, (index, made) in indexes.items()
    ]


def expired_notes(target: Target, logs: Sequence[LogSettings]) -> list[str]:
    """Describe the readers that have expired in some partitions and lost batches there.

    Args:
        target: The topic; without one there is nothing to describe.
        logs: Its partitions, as :func:`enable_logs` returned them.

    Returns:
        A sentence for each reader and partition.
    """
    if target.topic is None:
        return []
    active = target.topic.description.active
    known = {log.partition: log.readers for log in logs if log.partition in active}
    return [
        f"reader {name!r} has expired in {lacking}, and batches that it had not read were deleted. "
        + str(Hint(Action.RESET_READER_TO_OLDEST, target.name, partition=lacking, readers=(name,)))
        for name, partitions in missing_readers(known).items()
        for lacking in partitions
    ]


@dataclass(frozen=True, kw_only=True)
class ReaderStatus:
    """A reader at one moment. ``lag`` is in batches; ages are in seconds."""

    partition: str
    name: str
    next_sequence: int  # all earlier ones are acknowledged
    lag: int
    lag_bytes: int | None = None  # None if the sizes are not known
    oldest_unread_seconds: float | None  # None if nothing waits for it
    runs: bool  # whether a consumer seems to run with this name
    program: str
    host: str
    process: int
    epoch: int
    moved_ms: int  # time of its last position write, since the Unix epoch
    expires_seconds: float  # after this time it holds nothing, unless it moves
    expires_soon: bool
    position_missing: bool = False  # if so, it holds everything from the floor on
    v1: str | None = None  # the prefix of a v1 consumer's queue; None for other readers
    fed: int | None = None  # the sequence up to which that queue is fed
    unfed: int = 0  # batches of the log that are not in that queue yet
    stopped: str = ""  # why that queue is not fed any more; empty if it is

    @property
    def who(self) -> str:
        """The consumer that runs with this name, or the last one that did, in words."""
        if self.position_missing:
            return "unknown, its position is missing"
        if not self.program:
            return "unknown"
        if self.v1 is not None:
            return f"{self.program} of {self.v1}/manifest"
        process = f", process {self.process}" if self.process else ""
        return f"{self.program} on {self.host}{process}"


def readers_of(
    queue: Target,
    view: LogView,
    name: str | None = None,
    unreadable: Callable[[CorruptData], None] | None = None,
) -> list[ReaderStatus]:
    """Describe the readers of a log, with one small read for each.

    Args:
        queue: The queue.
        view: The view of the log.
        name: Return only the reader of this name. Default: all readers.
        unreadable: Called with the error for a position that cannot be read; see
            :func:`.read_positions`.

    Returns:
        The readers, in the order of the index.
    """
    index, now_ms = view.index, queue.runtime.now_ms()
    names = sorted({*index.readers, *index.v1})
    index = replace(index, readers=tuple(each for each in names if name in (None, each)))
    found = []
    for each, position in read_positions(view.log, index, unreadable).items():
        prefix, v1 = view.index.v1.get(each), dict[str, Any]()
        if prefix is not None:
            position, v1 = _v1_status(view, each, prefix, position)
        left_ms = position.moved_ms + index.reader_expiry_ms - now_ms
        status = ReaderStatus(
            partition=queue.prefix,
            name=each,
            next_sequence=position.next,
            lag=view.starting_at(position.waits_from).entry_count,
            oldest_unread_seconds=view.starting_at(position.waits_from).age_s(now_ms),
            runs=position.may_run(now_ms),
            program=position.program,
            host=position.host,
            process=position.process,
            epoch=position.epoch,
            moved_ms=position.moved_ms,
            expires_seconds=left_ms / 1000,
            expires_soon=left_ms < index.reader_expiry_ms * SOON,
            position_missing=position.is_missing,
            **v1,
        )
        found.append(status)
    return found


def _v1_status(
    view: LogView, name: str, prefix: str, position: ReaderPosition
) -> tuple[ReaderPosition, dict[str, Any]]:
    """Read the queue of a v1 consumer, and compare it with the log.

    Returns:
        The position by the front of the queue, and more fields of the status.
    """
    feeder = Feeder(view.log, name, prefix)
    feeder.look(view.manifest)
    queue, stopped = feeder.queue, feeder.fault
    if queue is not None and feeder.is_sound:
        position = replace(position, next=queue.first_sequence, epoch=queue.epoch)
    end = position.fed if queue is None else queue.next_sequence
    gone = 0
    if name not in view.index.readers:
        stopped = f"reader {name!r} did not move for too long, and has expired"
        if queue is not None:
            gone = min(view.first_sequence, queue.next_sequence) - queue.first_sequence
    if gone > 0:
        stopped += f": the batches of {gone} entries of {feeder.key!r} were deleted"
    unfed = view.count(end or 0, view.next_sequence)
    return position, {"v1": prefix, "fed": end, "unfed": unfed, "stopped": stopped}


def reader_of(queue: Target, view: LogView, name: str) -> ReaderStatus:
    """Describe one reader.

    Args:
        queue: The queue.
        view: The view of the log.
        name: The name of the reader.

    Returns:
        The reader.

    Raises:
        InvalidInput: The log has no reader of this name. The error lists the known ones.
    """
    for each in readers_of(queue, view, name):
        return each
    raise unknown_reader(name, view.index)


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """The effect that a reset would have. ``before`` is None for a new reader."""

    partition: str
    reader: str
    before: int | None
    after: int
    again: int  # batches that are read again
    passed: int  # batches that are skipped
    runs: str  # the consumer that is fenced, in words; empty if none seems to run


def plan_reset(queue: Target, name: str, where: Place | int) -> tuple[ResetPlan, LogView]:
    """Return where a reader would be set, without changing anything.

    Args:
        queue: The queue.
        name: The reader. With a place, a name without a reader is a new reader.
        where: A place, or a number of batches to move by. A number needs an existing reader,
            because it counts from that reader's position.

    Returns:
        The plan, and the view of the log that it was made with.

    Raises:
        InvalidInput: The queue is not a log, or does not have the place or the reader.
    """
    view = view_of(queue)
    if name in view.index.v1:
        raise not_for_v1(name)
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


def apply_reset(queue: Target, plan: ResetPlan, view: LogView, where: Place | int) -> ResetPlan:
    """Set the reader as planned.

    The oldest batch may be deleted between the plan and the write. A reset to the oldest batch is
    then planned again, up to five times.

    Args:
        queue: The queue.
        plan: The plan that :func:`plan_reset` returned.
        view: The view of the log that came with the plan.
        where: The place that was planned for.

    Returns:
        The plan that was carried out.

    Raises:
        DataLoss: The log no longer keeps the place.
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


def reset_readers(
    target: Target,
    name: str,
    where: Callable[[Target], Place | int | None],
    *,
    force: bool = False,
    dry_run: bool = False,
) -> Iterator[tuple[ResetPlan, LogView]]:
    """Set a reader, which may be new, in a queue or in all partitions of a topic.

    All partitions are planned before the first is set. A reader that is new to a topic is
    registered in the partitions where it is not set.

    Args:
        target: The queue or the topic.
        name: The reader.
        where: Returns the place in a queue, or a number of batches to move by. None leaves the
            reader of that queue alone.
        force: Set the reader even if it seems to run. Its consumer is fenced.
        dry_run: Only plan.

    Yields:
        The plan that was carried out in each queue, and the log as it was then.

    Raises:
        InvalidInput: The reader seems to run, and ``force`` and ``dry_run`` are off; or a queue
            does not have its place.
    """
    check_reader_name(name)
    places = [(queue, where(queue)) for queue in existing(target, name)]
    plans = [
        (queue, place, *plan_reset(queue, name, place))
        for queue, place in places
        if place is not None
    ]
    for _, _, plan, _ in plans:
        if plan.runs and not (force or dry_run):
            raise InvalidInput(
                f"reader {name!r} runs: {plan.runs}. Stop it, because a reset fences it: it ends "
                "with an error.",
                Hint(Action.FORCE),
            )
    for queue, place, plan, view in plans:
        yield (plan if dry_run else apply_reset(queue, plan, view, place)), view
    is_new = any(plan.before is None for _, _, plan, _ in plans)
    if target.topic is not None and is_new and not dry_run:
        target.topic.register_reader(name)


def readers_in(
    target: Target,
    name: str | None = None,
    unreadable: Callable[[CorruptData], None] | None = None,
) -> tuple[list[ReaderStatus], list[str]]:
    """Describe the readers of a log, or of all partitions of a topic.

    Args:
        target: The queue or the topic.
        name: Return only the reader of this name. Default: all readers.
        unreadable: As for :func:`readers_of`.

    Returns:
        The readers, and notes about readers that some partitions lack or that had not read a
        partition to its end.

    Raises:
        InvalidInput: No reader has this name, or the queue is not a log.
    """
    found: list[ReaderStatus] = []
    known = dict[str, tuple[str, ...]]()
    is_known = name is None
    for queue in existing(target):
        view = view_of(queue)
        is_known = is_known or name in view.index.readers or name in view.index.v1
        found += readers_of(queue, view, name, unreadable)
        if target.topic is not None and queue.prefix in target.topic.description.active:
            known[queue.prefix] = view.index.readers
    if name is not None and not is_known:
        raise unknown_reader(name, view.index)
    notes = missing_notes(known, target.name)
    if target.topic is not None:
        notes += unread_notes(target.topic.description, target.name)
    return found, notes


def missing_readers(known: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Find the partitions of a topic that lack a reader which other partitions have.

    Args:
        known: The readers of each active partition that is a log, by the partition's name.

    Returns:
        For each such reader, the partitions without it. A reader that no partition has any more has
        expired everywhere, and is not missing.
    """
    everyone = sorted({name for readers in known.values() for name in readers})
    found = {
        name: [partition for partition, readers in known.items() if name not in readers]
        for name in everyone
    }
    return {name: partitions for name, partitions in found.items() if partitions}


def missing_notes(known: Mapping[str, Collection[str]], topic: QueueName) -> list[str]:
    """Describe the readers that some partitions lack (failure F47).

    Args:
        known: See :func:`missing_readers`.
        topic: The name of the topic.

    Returns:
        A sentence for each such reader.
    """
    return [
        f"reader {name!r} is missing from {', '.join(partitions)}: batches there can be deleted "
        f"before it reads them. {Hint(Action.REGISTER_READER, topic)}"
        for name, partitions in missing_readers(known).items()
    ]


def unread_notes(description: TopicDescription, topic: QueueName) -> list[str]:
    """Describe the readers that had not read a partition that left (failure F53).

    Args:
        description: The description of the topic.
        topic: The name of the topic.

    Returns:
        A sentence for each of the first readers, and one that counts the others.
    """
    readers = sorted({name for readers in description.unread.values() for name in readers})
    notes = [
        f"reader {name!r} had expired and had not read {', '.join(description.unread_by(name))} to "
        "the end when that left the topic. When the reader returns, it gets an error if batches "
        f"were deleted. {Hint(Action.FORGET_READER, topic, readers=(name,))}"
        for name in readers[:_SHOWN]
    ]
    if len(readers) > _SHOWN:
        notes.append(f"{len(readers) - _SHOWN} other readers had not read a partition that left.")
    return notes


def delete_reader(target: Target, name: str, *, force: bool = False) -> list[str]:
    """Delete a reader of a queue, of one partition, or of a whole topic. It then holds nothing.

    The topic's description forgets the reader first. If the command is killed after that, some
    partitions still show the reader, and the command can be repeated. An expansion at the same time
    may give the reader to the new partitions, so all partitions are checked again at the end.

    Args:
        target: The queue, the partition or the topic.
        name: The reader.
        force: Delete the reader even if it seems to run.

    Returns:
        The data prefixes of the queues that had the reader.

    Raises:
        InvalidInput: No queue has the reader; or it seems to run, and ``force`` is off.
    """
    views = _views(target, name)
    held = _with_reader(views, name)
    unread = _unread_by(target, name)
    if not held and not unread:
        if target.topic is not None:
            target.topic.forget_reader(name)
        raise unknown_reader(name, views[-1][1].index)
    for queue, view in held:
        found = reader_of(queue, view, name)
        if found.runs and not force:
            raise InvalidInput(
                f"reader {name!r} runs: {found.who}. Stop it first, because it ends with an error "
                "then.",
                Hint(Action.FORCE),
            )
    deleted = []
    while held or unread:
        if target.topic is not None:
            target.topic.forget_reader(name)
        for queue, view in held:
            unregister(queue.store, view.log, name)
            queue.store.delete_many([claims_key(queue.prefix, name)])  # claims of its workers
            deleted.append(queue.prefix)
        for queue in unread:
            if queue.prefix not in deleted:  # The reader has expired there.
                position = position_key(queue.config, name)
                queue.store.delete_many([position, claims_key(queue.prefix, name)])
                deleted.append(queue.prefix)
        held = [] if target.topic is None else _with_reader(_views(target, name), name)
        unread = []
    return deleted


def add_v1(target: Target, name: str, prefix: str, start: Place) -> tuple[str, int]:
    """Make a v1 consumer a reader of a log, with a queue below a prefix of its own.

    Args:
        target: The log.
        name: The name of the reader.
        prefix: The prefix of its queue.
        start: Where it begins.

    Returns:
        The key of the queue, and the sequence at which it begins.

    Raises:
        InvalidInput: The queue is not a log, or is a topic; or the name, the prefix or the place
            cannot be used.
    """
    if target.topic is not None:
        raise InvalidInput(
            f"{target.store.url} is a topic: a v1 consumer reads one queue, and cannot follow "
            "partitions that are added or leave. Use a log that is not part of a topic."
        )

    def place(view: LogView) -> int:
        return start.sequence_in(view, target.config, target.store.url)

    begin = add_v1_reader(target.store, lambda: view_of(target), name, prefix, place)
    return f"{prefix}/manifest", begin


class V1Feeding:
    """Feeds the v1 consumers of a log, again and again. Not thread-safe.

    Args:
        target: The log.
    """

    def __init__(self, target: Target) -> None:
        claim = target.owner()
        queue_id = "" if claim is None else claim.queue_id
        self._log = Log(target.store, target.config, target.runtime, queue_id)
        self._feeders = Feeders(self._log)
        self._reader = target.reader()

    def feed(self) -> list[Feeder]:
        """Feed all queues once.

        Returns:
            The feeders of the queues, which know their state, by the name of the reader.

        Raises:
            InvalidInput: The queue does not exist, or is not a log.
            CorruptData: The index of the log cannot be read.
            StorageError: The store did not answer.
        """
        manifest = self._reader.manifest()
        self._feeders.find(self._log.need())
        found = [feeder for _, feeder in sorted(self._feeders.feeders.items())]
        for feeder in found:
            feeder.feed(manifest, check=True)
            feeder.note(manifest.next_sequence)
        return found


def _views(target: Target, reader: str) -> list[tuple[Target, LogView]]:
    """Return the view of the log, or of each partition that was ever used."""
    queues = existing(target, reader)
    return [*zip(queues, in_parallel(target.runtime, view_of, queues), strict=True)]


def _with_reader(
    views: Sequence[tuple[Target, LogView]], name: str
) -> list[tuple[Target, LogView]]:
    return [
        (queue, view)
        for queue, view in views
        if name in view.index.readers or name in view.index.v1
    ]


def _unread_by(target: Target, reader: str) -> list[Target]:
    """Return the partitions that left the topic before a reader had read them to their end."""
    if target.topic is None:
        return []
    return [target.queue(name) for name in target.topic.description.unread_by(reader)]


def existing(target: Target, reader: str = "") -> list[Target]:
    """Find the queues that were ever used.

    Args:
        target: A queue or a topic.
        reader: Also return partitions that left the topic before this reader had read them.

    Returns:
        The queue itself, or the partitions of the topic that were ever written.

    Raises:
        InvalidInput: No partition was ever used.
    """
    found = [target] if target.topic is None else target.written() + _unread_by(target, reader)
    if not found:
        raise InvalidInput(f"no partition of the topic at {target.store.url} was ever written")
    return found
