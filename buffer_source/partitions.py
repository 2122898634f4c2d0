"""The partitions of a source: their positions in Spark's offsets, their queues, their starts.

An offset maps each partition to a position in that partition's queue. A source that reads one queue
has the single partition :data:`ONLY`. Spark compares offsets as JSON text, so the keys have a fixed
order. The initial offset is a fixed sentinel, because Spark asks for it twice and does not store
it. The position that it resolves to is part of the end offset of the first micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from buffer_source.options import EARLIEST, LATEST, SourceOptions
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import DataLoss, InvalidInput, OpenDataBufferError
from opendata_buffer.formats.batch import location_timestamp_ms
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest
from opendata_buffer.hints import Action, Hint
from opendata_buffer.option_reader import in_options
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.neighbours import check_manifest_path, missing_topic_hint
from opendata_buffer.queue.ownership import QueueClaim, check_owner, claim_for_writing
from opendata_buffer.queue.reader_admin import enable_readers, unknown_reader
from opendata_buffer.queue.reader_positions import stored_position
from opendata_buffer.queue.unaccounted import refusal
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.topic.cached_topic import REFRESH_S
from opendata_buffer.topic.topic import Topic

log = logging.getLogger(__name__)

VERSION = 2
_READABLE = (1, 2)

ONLY = "0"
"""The partition of a source that reads one queue."""

_OF_ANOTHER = (
    "the checkpoint belongs to another query. Give this query a checkpointLocation of its own"
)

INITIAL: dict[str, Any] = {"v": VERSION, "at": "start"}
"""The offset of a query that has read nothing: ``startingOffsets`` decides where it begins."""


@dataclass(frozen=True, slots=True)
class PartitionOffset:
    """How far one queue was read: everything below sequence ``next``.

    Attributes:
        next: The first sequence that was not read.
        base: Where reading began: the resolved ``startingOffsets``, or the sequence where reading
            continued after a loss that ``failOnDataLoss`` allowed.
        transactions: The state of the rule of transactions, small JSON.
        queue: The queue's id, without which sequences mean nothing; empty if the queue has no id.
        missing: Sequences of the micro-batch ending here that it skips, because their objects were
            gone when it was planned. A replay that looked again might find the objects. Sequences
            of earlier micro-batches stay while an open transaction begins before them.
    """

    next: int
    base: int
    transactions: dict[str, Any] = field(default_factory=dict)  # State of the rule.
    queue: str = ""  # The queue's id; empty if it has none.
    missing: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the position as Spark stores it, with the keys in this order.

        ``{"queue":"01..","next":7,"base":0,"txn":{},"missing":[5]}``; ``missing`` is left out if no
        batch was missing.
        """
        missing = {"missing": list(self.missing)} if self.missing else {}
        return {
            "queue": self.queue,
            "next": self.next,
            "base": self.base,
            "txn": self.transactions,
            **missing,
        }

    @classmethod
    def from_json(cls, position: Mapping[str, Any]) -> PartitionOffset:
        """Read back what :meth:`to_json` wrote.

        Args:
            position: The position in Spark's checkpoint.

        Returns:
            The position.

        Raises:
            InvalidInput: The position is damaged.
        """
        following, base, transactions = (position.get(key) for key in ("next", "base", "txn"))
        queue, missing = position.get("queue", ""), position.get("missing", [])
        if not (
            isinstance(transactions, dict)
            and isinstance(queue, str)
            and isinstance(missing, list)
            and all(map(_is_sequence, (following, base, *missing)))
        ):
            raise InvalidInput(
                f"offset {position!r} is damaged: next, base and missing must be sequences, txn an "
                "object and queue a text"
            )
        return cls(following, base, transactions, queue, tuple(missing))  # type: ignore[arg-type]

    def begin_of(self, start: PartitionOffset | None) -> int:
        """Return the first sequence of the micro-batch from ``start`` to here; pure."""
        if start is None or self.base != start.base or self.next < start.next:
            return self.base
        return start.next


@dataclass(frozen=True, slots=True)
class SourceOffset:
    """A position for each partition of the source, by the partition's name."""

    partitions: Mapping[str, PartitionOffset]

    @property
    def only(self) -> PartitionOffset:
        """The position of a source that reads one queue.

        Raises:
            InvalidInput: The offset is about other partitions.
        """
        if set(self.partitions) != {ONLY}:
            raise InvalidInput(
                f"the checkpoint is about partitions {sorted(self.partitions)}, and this source "
                f"reads one queue, partition {ONLY!r}: {_OF_ANOTHER}."
            )
        return self.partitions[ONLY]

    def to_json(self) -> dict[str, Any]:
        """Return the offset as Spark stores it, names in order.

        ``{"v":2,"partitions":{"0":{...}}}``
        """
        return {
            "v": VERSION,
            "partitions": {
                name: self.partitions[name].to_json() for name in sorted(self.partitions)
            },
        }

    @classmethod
    def from_json(cls, offset: Mapping[str, Any] | None) -> SourceOffset | None:
        """Read an offset of version 1 or 2.

        Args:
            offset: The offset in Spark's checkpoint.

        Returns:
            The offset; None stands for :data:`INITIAL`.

        Raises:
            InvalidInput: It is not an offset of this source, or one of a newer version.
        """
        if not isinstance(offset, Mapping) or "v" not in offset:
            raise InvalidInput(
                f"offset {offset!r} was not written by the opendata-buffer source: {_OF_ANOTHER}."
            )
        version = offset["v"]
        if version not in _READABLE or isinstance(version, bool):
            raise InvalidInput(
                f"offset {offset!r} has version {version!r} and this release reads versions "
                f"up to {VERSION}: the checkpoint was written by a newer release. Upgrade "
                "opendata-buffer."
            )
        if offset == {"v": version, "at": "start"}:
            return None
        if version == 1:
            return cls({ONLY: PartitionOffset.from_json(offset)})
        partitions = offset.get("partitions")
        if (
            not isinstance(partitions, Mapping)
            or not partitions
            or not all(isinstance(each, Mapping) for each in partitions.values())
        ):
            raise InvalidInput(
                f"offset {offset!r} is damaged: partitions must be an object of positions"
            )
        return cls({name: PartitionOffset.from_json(each) for name, each in partitions.items()})


def _is_sequence(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


class SourcePartitions:
    """The queues of a source by their names in its offsets; makes no request before it is asked."""

    def __init__(self, options: SourceOptions, store: Store, runtime: Runtime) -> None:
        self._options = options
        self._store = store
        self._runtime = runtime
        self._is_known = False  # Whether it is known if there is a topic or a queue.
        self._topic: Topic | None = None
        self._drain_at = 0.0
        self._registered = False  # Whether the query's reader is on the whole topic.

    @property
    def topic(self) -> Topic | None:
        """The topic, if the source reads one; the first access makes one small read."""
        if not self._is_known:
            if self._options.one_queue:
                with in_options():
                    check_manifest_path(self._store, self._options.queue)
            else:
                self._topic = Topic.find(
                    self._options.queue, store=self._store, runtime=self._runtime
                )
            self._check_options(self._topic)
            self._is_known = True
        return self._topic

    def names(self) -> list[str]:
        """Find the partitions to read. Read a topic's description once; write nothing.

        Returns:
            The names of the current partitions, and of those that left the topic before the given
            reader had read them to their end; for a queue, only :data:`ONLY`.

        Raises:
            QueueReset: The topic was replaced.
        """
        return [ONLY] if self.topic is None else self.topic.read().names_for(self._options.reader)

    def names_for_reader(self) -> list[str]:
        """Find all partitions that the query reads, with one read of a topic's description.

        Returns:
            The names of the current partitions, and of those that left the topic before the
            query's reader had read them to their end (failure F53).

        Raises:
            QueueReset: The topic was replaced.
        """
        topic, reader = self.topic, self._options.reader
        if topic is None:
            return [ONLY]
        description = topic.read()
        if description.unread_by(reader):
            description = topic.forget_read(reader)
        return description.names_for(reader)

    def register_reader(self, is_new: bool) -> None:
        """Register the query's reader on the whole topic, once in a run (failure F47).

        Args:
            is_new: Register it even if the topic already names it, because the reader is new to a
                partition.
        """
        if self.topic is None or self._registered:
            return
        if is_new or self._options.reader not in (self.topic.description.readers or {}):
            self.topic.register_reader(self._options.reader)
        self._registered = True

    def options_of(self, name: str) -> SourceOptions:
        """Return the query's options, with the queue of one partition."""
        return self._options if self.topic is None else self._options.of_partition(name)

    def check(self, offset: SourceOffset | None) -> None:
        """Refuse a queue's offset for a topic, and a topic's offset for a queue.

        Args:
            offset: The offset in Spark's checkpoint; None for the beginning of the query.

        Raises:
            InvalidInput: The offset is of the other kind.
        """
        if offset is None:
            return
        if self.topic is None:
            # A user who gave up the checkpoint because the topic's description is lost would also
            # lose the positions. So say that the description is missing.
            if ONLY not in offset.partitions and (lost := missing_topic_hint(self._store)):
                raise InvalidInput(lost)
            offset.only  # noqa: B018  # raises
        elif ONLY in offset.partitions:
            raise InvalidInput(
                f"the checkpoint is about one queue, and {self._store.url} is a topic with "
                f"{len(self.topic.description.names)} partitions: {_OF_ANOTHER}, or name the "
                "queue with the option dataPathPrefix."
            )

    def remove_drained(self, empty: Iterable[str]) -> None:
        """Take empty drained partitions out of the topic; log a failure, and retry later.

        Only the consumer of a partition knows that it has read everything.
        """
        topic = self._topic
        if (
            topic is None
            or not self._options.acknowledge
            or not set(empty).intersection(topic.description.draining)
            or self._runtime.monotonic() < self._drain_at
        ):
            return
        try:
            if not topic.remove_drained():  # Other readers of a log may be slow.
                self._drain_at = self._runtime.monotonic() + REFRESH_S
        except OpenDataBufferError as error:
            log.warning("drained partitions stay in the topic for now: %s", error)

    def _check_options(self, topic: Topic | None) -> None:
        for option, value in (
            ("startingOffsets", self._options.starting_offsets),
            ("endingOffsets", self._options.ending_offsets),
        ):
            if topic is not None and isinstance(value, int):
                raise InvalidInput(
                    f"option {option} is {value}, and {self._store.url} is a topic, each partition "
                    'of which counts for itself: use sequences by partition such as {"0": '
                    f"{value}}}, or name one partition with the option dataPathPrefix"
                )
            if isinstance(value, tuple):
                names = [name for name, _ in value]
                if topic is None:
                    raise InvalidInput(
                        f"option {option} has sequences by partition ({', '.join(names)}), and "
                        f"{self._store.url} with manifest {self._options.queue.manifest_path!r} is "
                        "one queue: use a sequence such as 42"
                    )
                # A query that has begun ignores the option, so it may name a partition that has
                # left the topic since.
                for name in names:
                    if not topic.description.has_left(name):
                        topic.description.resolved(name)


def read_only(options: SourceOptions, store: Store, runtime: Runtime) -> ReadOnlyReader:
    """Return a reader that takes nothing out of the queue and writes nothing."""
    return ReadOnlyReader(
        options.consumer,
        store=store,
        runtime=runtime,
        allow_data_loss=not options.fail_on_data_loss,
    )


@in_options()
def check_start(options: SourceOptions, store: Store, runtime: Runtime) -> None:
    """Refuse a new query that would acknowledge unread batches, before it fences a consumer."""
    if options.acknowledge and not options.starts_at_oldest:
        view = read_only(options, store, runtime).view()
        if options.reader or not isinstance(view, LogView):  # Else opening the log fails.
            wanted_start(options, view, view.first_sequence, store.url)


def wanted_start(options: SourceOptions, view: Manifest | LogView, first: int, url: str) -> int:
    """Find the sequence at which the options start.

    Args:
        options: The source's options, of one partition.
        view: The manifest, or everything that a log keeps.
        first: The first sequence of the queue.
        url: The URL of the store, for errors.

    Returns:
        The sequence, at least ``first``.

    Raises:
        InvalidInput: It is past the end, or a query would acknowledge unread batches before it.
        DataLoss: It is not queued any more.
    """
    wanted, since_ms = options.starting_offsets, options.starting_timestamp_ms
    key = options.queue.manifest_path
    assert not isinstance(wanted, tuple), "of_partition() picks one"
    end = view.next_sequence
    if since_ms is not None:
        begin = sequence_since(view, since_ms)
    else:
        begin = first if wanted == EARLIEST else end if wanted == LATEST else int(wanted)
    if begin > end:
        raise InvalidInput(
            f"option startingOffsets is {wanted} and manifest {key!r} ends at {end - 1}: use a "
            f"sequence up to {end}, 'earliest' or 'latest'"
        )
    if begin < first:
        hint = Hint(Action.START_AT_QUEUED)
        options.report_data_loss(DataLoss(key, begin, first, hint))
    elif options.acknowledge and not options.reader and begin > first:
        name = "startingOffsets" if since_ms is None else "startingTimestamp"
        raise InvalidInput(
            f"option {name} starts at sequence {begin} of manifest {key!r}, and {begin - first} "
            f"unread batches from {first} on would leave the queue",
            Hint(Action.TRIM_FIRST, queue_name(url, options.queue), sequence=begin),
        )
    return max(first, begin)


@in_options()
def view_of(options: SourceOptions, store: Store, runtime: Runtime) -> Manifest | LogView | None:
    """Read a queue, and for a log its index, too.

    Args:
        options: The source's options, of one partition.
        store: The opened store.
        runtime: Clock and threads.

    Returns:
        The manifest, or everything that a log keeps; None for a partition that was never written.

    Raises:
        InvalidInput: The queue does not exist.
        QueueReset: The manifest is lost, and the options do not allow that (failure F4).
    """
    manifest = read_only(options, store, runtime).find()
    if manifest is None:
        if not options.create_if_missing:
            raise _no_queue(options, store)
        return None
    log_ = Log(store, options.queue, runtime)
    index = log_.read_unclaimed()
    return manifest if index is None else LogView.of(log_, index, manifest)


def position_of_reader(
    options: SourceOptions, view: Manifest | LogView, store: Store, runtime: Runtime
) -> int:
    """Find where the reader that the options name would continue.

    Args:
        options: The source's options, of one partition.
        view: The manifest, or everything that a log keeps.
        store: The opened store.
        runtime: Clock and threads.

    Returns:
        The sequence, which the log still keeps. A reader whose position is missing may have read
        nothing, so it would continue at the oldest batch.

    Raises:
        InvalidInput: The queue is not a log, or has no such reader.
        CorruptData: The position cannot be read.
    """
    log_ = Log(store, options.queue, runtime)
    index = view.index if isinstance(view, LogView) else log_.need()
    if options.reader not in index.readers:
        raise unknown_reader(options.reader, index)
    found = stored_position(log_, options.reader, index.queue_id)
    begin = view.first_sequence if found is None else found.next
    return min(max(begin, view.first_sequence), view.next_sequence)


def _no_queue(options: SourceOptions, store: Store, *hints: Hint) -> InvalidInput:
    if lost := missing_topic_hint(store):
        return InvalidInput(lost)
    if error := refusal(store, options.queue, None):
        return error
    return InvalidInput(
        f"there is no queue with manifest {options.queue.manifest_path!r} in {store.url}: check "
        "the path and the options dataPathPrefix and manifestPath",
        *hints,
    )


def oldest_ms(batch: BatchDescriptor) -> int | None:
    """Return when the batch's oldest record was ingested, milliseconds since the Unix epoch.

    Without metadata, this is the time in the batch's name, which a Spark sink dates ahead. None
    without either.
    """
    times = [each.ingestion_time_ms for each in batch.metadata]
    return min(times) if times else location_timestamp_ms(batch.location)


def sequence_since(view: Manifest | LogView, since_ms: int) -> int:
    """Return the first batch with a record ingested at ``since_ms`` or later, or the end.

    Warns if the time is before all that is queued, and earlier batches have left the queue.
    """
    first = next(iter(view.entries(limit=1)), None) if isinstance(view, Manifest) else None
    oldest = oldest_ms(first) if first is not None and first.sequence > 0 else None
    if first is not None and oldest is not None and oldest > since_ms:
        log.warning(
            "startingTimestamp is %s, and the oldest batch that is still queued, %d at %r, begins "
            "at %s: what came between and was acknowledged has left the queue, and is not read",
            _utc(since_ms),
            first.sequence,
            first.location,
            _utc(oldest),
        )
    return view.since(since_ms)


def _utc(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"  # Other writers' times may exceed the years of datetime.


@in_options()
def check_exists(options: SourceOptions, store: Store, runtime: Runtime) -> None:
    """Refuse a path where a queue never existed.

    Args:
        options: The source's options, of one partition.
        store: The opened store.
        runtime: Clock and threads.

    Raises:
        InvalidInput: The queue does not exist, and never did.
        QueueReset: The queue has lost its manifest.
    """
    if read_only(options, store, runtime).find() is not None:
        return
    claim = check_owner(store, options.consumer, runtime=runtime)
    if claim is None or claim.watermark is None:
        raise _no_queue(options, store, Hint(Action.CREATE_IF_MISSING))


@in_options()
def create_log(options: SourceOptions, store: Store, runtime: Runtime) -> None:
    """Create a missing queue as a log if the query reads by a name (createIfMissing).

    An existing queue stays a queue: making it a log would lock its consumer out. An unwritten
    partition stays one, too, because the other partitions of its topic may be queues.

    Args:
        options: The source's options, of one partition.
        store: The opened store.
        runtime: Clock and threads.

    Raises:
        QueueReset: The queue has lost its manifest.
    """
    if not (options.reader and options.create_if_missing) or options.is_partition:
        return
    if read_only(options, store, runtime).find() is None:
        config = options.consumer
        claim = claim_for_writing(
            store, config, runtime=runtime, grace_ms=options.gc.grace_period_ms
        )
        log.info("%s in %s is created as a log", config.manifest_path, store.url)
        enable_readers(store, config, claim, runtime)


@in_options()
def claimed(options: SourceOptions, store: Store, runtime: Runtime) -> QueueClaim | None:
    """Return the queue's claim. With ``acknowledge``, claim the queue if it has no claim."""
    config, grace_ms = options.consumer, options.gc.grace_period_ms
    if options.acknowledge:
        return claim_for_writing(store, config, runtime=runtime, grace_ms=grace_ms)
    claim = check_owner(store, config, runtime=runtime)
    if claim is not None and options.fail_on_data_loss:
        claim.check(read_only(options, store, runtime).find())
    return claim
