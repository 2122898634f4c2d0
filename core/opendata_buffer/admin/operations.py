"""Administer queues, logs and topics from Python.

The command line calls the same code. But these functions ask no questions, and return values::

    from opendata_buffer import admin

    admin.enable_log("s3://bucket/orders", retention=timedelta(days=7))
    admin.reset_reader("s3://bucket/orders", "billing", to=datetime.now(UTC) - timedelta(hours=3))
    for reader in admin.list_readers("s3://bucket/orders"):
        print(reader.name, reader.lag, reader.oldest_unread_seconds)

Every function takes the URL of a queue or a topic, or a :class:`.QueueConfig`, and the fields of
:class:`.QueueConfig` as keywords, such as ``store_options``. For a topic it works on all
partitions. ``partition`` names one of them, by name or number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from os import PathLike
from typing import Any, Final

from opendata_buffer.admin import readers, target
from opendata_buffer.admin.queue_status import Status, read_status
from opendata_buffer.admin.readers import LogSettings, ReaderStatus, ResetPlan
from opendata_buffer.admin.target import Target, partition_named
from opendata_buffer.admin.topic_status import TopicStatus, read_topic
from opendata_buffer.admin.trimming import plan_trim
from opendata_buffer.admin.trimming import trim_queue as trim
from opendata_buffer.admin.units import duration_ms, size_bytes
from opendata_buffer.arguments import checked, wrong_type
from opendata_buffer.config import QueueConfig
from opendata_buffer.consumer.place import Place, PlaceLike
from opendata_buffer.errors import InvalidInput
from opendata_buffer.hints import Action, Hint
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.description import Partition
from opendata_buffer.topic.places import TopicPlaces
from opendata_buffer.topic.topic import Topic, partition_config

Where = QueueConfig | str | PathLike[str]
"""A queue or a topic: its URL, a path, or a configuration."""


class Unchanged(Enum):
    """The type of :data:`UNCHANGED`."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED
"""Leaves a setting of a log as it is."""

Duration = timedelta | str
"""A ``timedelta``, or a text such as ``7d`` or ``12h``."""


@checked
def describe(
    url: Where, *, partition: str | int | None = None, **settings: Any
) -> Status | TopicStatus:
    """Read the state of a queue or a topic, as ``opendata-buffer status --json`` shows it.

    Nothing is changed, and the consumer is not disturbed. The cost does not grow with the length of
    the queue. A broker is shown as it announced itself, and is not asked.

    Args:
        url: The queue or the topic.
        partition: Describe one partition of a topic as a queue.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        A frozen dataclass; ``dataclasses.asdict`` makes a dict of it. For a queue: its length, age,
        consumer, readers, transactions, and notes for an operator. For a topic: its partitions.

    Raises:
        InvalidInput: The queue does not exist.
        CorruptData, QueueReset, StorageError: The queue cannot be read.
    """
    found = _target(url, settings, partition)
    if found.topic is not None:
        return read_topic(found, found.topic)
    return read_status(found.reader())


@checked
def list_readers(
    url: Where, *, partition: str | int | None = None, **settings: Any
) -> list[ReaderStatus]:
    """List the named readers of a log, and how far each is behind.

    Args:
        url: The log, or a topic of logs.
        partition: Only this partition of a topic.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        The readers, one for each partition.

    Raises:
        InvalidInput: The queue does not exist, or is not a log.
        CorruptData: A position cannot be read.
        StorageError: The store did not answer.
    """
    found, _ = readers.readers_in(_target(url, settings, partition))
    return found


@checked
def reset_reader(
    url: Where,
    name: str,
    to: PlaceLike | Mapping[str | int, PlaceLike],
    *,
    force: bool = False,
    dry_run: bool = False,
    partition: str | int | None = None,
    **settings: Any,
) -> list[ResetPlan]:
    """Move a reader to another place, or create a reader at a place.

    Use it to replay, or to skip. Nothing is deleted, and other readers are not affected. Batches
    that this reader skips can be deleted once all other readers have acknowledged them and the
    retention is over. A reader that runs can move itself with :meth:`.Consumer.seek`.

    Args:
        url: The log, or a topic of logs.
        name: The reader.
        to: ``"earliest"``, ``"latest"``, a sequence, a time (a ``datetime`` with a time zone), or a
            :class:`.Position`. For a topic, a word or a time, or a dict of places by the
            partition's name or number.
        force: Move the reader even if a consumer seems to run under this name. It is fenced.
        dry_run: Only return the plans.
        partition: Only this partition of a topic.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        What was done in each queue: the places before and after, and how many batches are read
        again or skipped.

    Raises:
        InvalidInput: The queue is not a log, or does not have the place; or a consumer runs under
            the name, and ``force`` is off.
        DataLoss: The collector has just deleted the batches at this place.
        StorageError: The store did not answer.
    """
    found = _target(url, settings, partition)
    if found.topic is None:
        place = Place.of(_single(to), "to")
        plans = readers.reset_readers(found, name, lambda _: place, force=force, dry_run=dry_run)
    else:
        places = TopicPlaces(to, found.topic.description.names_for(name), "to")
        plans = readers.reset_readers(
            found, name, lambda queue: places.at(queue.prefix), force=force, dry_run=dry_run
        )
    return [plan for plan, _ in plans]


@checked
def add_v1_reader(
    url: Where,
    name: str,
    prefix: str,
    *,
    start: PlaceLike = "earliest",
    **settings: Any,
) -> int:
    """Make a consumer of another language (v1) a reader of a log.

    The reader gets a queue with the manifest ``<prefix>/manifest``, to which the processes of the
    log append the same batches. Start the consumer afterwards, with this manifest path, with
    ``prefix`` as its data path prefix, and with the same store. Never give it the data path prefix
    of the log: its collector would delete the log's batches.

    Args:
        url: The log. It must not be a topic.
        name: The name of the reader.
        prefix: The prefix of its queue. There must be no object below it.
        start: Where it begins, as for :func:`reset_reader`.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        The sequence at which it begins.

    Raises:
        InvalidInput: The queue is not a log, or is a topic; or the name, the prefix or the place
            cannot be used.
        StorageError: The store did not answer.
    """
    found = _target(url, settings, None)
    return readers.add_v1(found, name, prefix, Place.of(start, "start"))[1]


@checked
def delete_reader(
    url: Where,
    name: str,
    *,
    force: bool = False,
    partition: str | int | None = None,
    **settings: Any,
) -> list[str]:
    """Delete a reader, so that no batches are kept for it.

    A consumer that starts with the name again is a new reader.

    Args:
        url: The log, or a topic of logs.
        name: The reader.
        force: Delete the reader even if a consumer seems to run under this name. It ends with an
            error.
        partition: Only in this partition of a topic. It stays a reader of the topic.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        The data prefixes of the queues that had the reader.

    Raises:
        InvalidInput: There is no such reader; or a consumer runs under the name, and ``force`` is
            off.
        StorageError: The store did not answer.
    """
    return readers.delete_reader(_target(url, settings, partition), name, force=force)


@checked
def enable_log(
    url: Where,
    *,
    retention: Duration | Unchanged | None = UNCHANGED,
    retention_bytes: int | str | Unchanged | None = UNCHANGED,
    reader_expiry: Duration | None = None,
    partition: str | int | None = None,
    **settings: Any,
) -> list[LogSettings]:
    """Make a log of a queue, or of all partitions of a topic. It cannot be undone.

    Nothing that is queued is lost: a new reader begins with the oldest batch. Producers continue. A
    consumer without a reader's name is fenced, and refused from then on. If the queue is a log
    already, only the settings that are given change.

    Stop the consumers of other libraries and of older releases first: they would take batches from
    all readers, and their collectors would delete batches of the log.

    Args:
        url: The queue or the topic. It must exist.
        retention: Keep batches for at least this time, even after every reader has acknowledged
            them: a ``timedelta``, or a text such as ``"7d"``. None does not keep them longer.
            Default: None for a new log, unchanged for an existing one.
        retention_bytes: Keep at least this many bytes of batches: a number, or a text such as
            ``"500GB"``. If ``retention`` is set, too, the one that keeps less applies. None does
            not keep them longer. Default: None for a new log, unchanged for an existing one.
        reader_expiry: If a reader does not move for this time, no batches are kept for it any more.
            At least 10 minutes. Default: 7 days for a new log, unchanged for an existing one.
        partition: Only this partition of a topic.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        The logs with their settings.

    Raises:
        InvalidInput: The queue does not exist, or a value cannot be used.
        StorageError: The store did not answer.
    """
    given = _limits(retention, retention_bytes, reader_expiry)
    found = _target(url, settings, partition)
    if found.topic is None:
        found.reader().manifest()
    return readers.enable_logs(found, given)


@checked
def set_retention(
    url: Where,
    *,
    retention: Duration | Unchanged | None = UNCHANGED,
    retention_bytes: int | str | Unchanged | None = UNCHANGED,
    reader_expiry: Duration | None = None,
    partition: str | int | None = None,
    **settings: Any,
) -> list[LogSettings]:
    """Change how long a log keeps batches. Refuses a queue that is not a log.

    Args:
        url: The log, or a topic of logs.
        retention: As for :func:`enable_log`. Default: unchanged.
        retention_bytes: As for :func:`enable_log`. Default: unchanged.
        reader_expiry: As for :func:`enable_log`. Default: unchanged.
        partition: Only this partition of a topic.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        The logs with their settings.

    Raises:
        InvalidInput: The queue is not a log, or a value cannot be used.
        StorageError: The store did not answer.
    """
    given = _limits(retention, retention_bytes, reader_expiry)
    if not given:
        raise InvalidInput("nothing to change: give retention, retention_bytes or reader_expiry")
    found = _target(url, settings, partition)
    for queue in found.queues():
        if not queue.is_log():
            raise InvalidInput(
                f"the queue with manifest {queue.config.manifest_path!r} in {found.store.url} is "
                "not a log, so it keeps nothing that was read.",
                Hint(Action.ENABLE_READERS, found.name),
            )
    return readers.enable_logs(found, given)


@dataclass(frozen=True, kw_only=True)
class TrimResult:
    """The effect of a trim on one queue.

    Attributes:
        partition: The data prefix of the queue.
        trimmed: How many batches were discarded.
        first_sequence: The first sequence of the queue now.
        copies: The ids of the copies in the quarantine.
    """

    partition: str
    trimmed: int
    first_sequence: int
    copies: tuple[str, ...]


@checked
def trim_queue(
    url: Where,
    to: PlaceLike | Mapping[str | int, PlaceLike],
    *,
    copy: bool = True,
    partition: str | int | None = None,
    **settings: Any,
) -> list[TrimResult]:
    """Discard the unread batches of a queue that lie before a place.

    The batches are copied to the quarantine first; ``opendata-buffer restore`` produces one again.
    A consumer that still runs is fenced.

    Args:
        url: The queue, or a topic of queues.
        to: The new beginning of the queue: ``"latest"`` discards everything. As for
            :func:`reset_reader`.
        copy: Copy the batches before they are discarded.
        partition: Only this partition of a topic.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        What was done in each queue that was ever used.

    Raises:
        InvalidInput: The queue is a log, or does not have the place; or an undecided transaction
            begins before it.
        StorageError: The store did not answer.
    """
    found = _target(url, settings, partition)
    if found.topic is None:
        places = {found.prefix: Place.of(_single(to), "to")}
    else:
        given = TopicPlaces(to, found.topic.description.names, "to")
        named = ((queue.prefix, given.at(queue.prefix)) for queue in found.written())
        places = {prefix: place for prefix, place in named if place is not None}
    plans = [
        (queue, plan_trim(queue, places[queue.prefix]))
        for queue in found.written()
        if queue.prefix in places
    ]
    results = []
    for queue, plan in plans:
        first, copies = plan.target, list[str]()
        if plan.dropped:
            first, _, copies = trim(queue, plan, copy=copy)
        result = TrimResult(
            partition=queue.prefix,
            trimmed=len(plan.dropped),
            first_sequence=first,
            copies=tuple(copies),
        )
        results.append(result)
    return results


@checked
def create_topic(url: Where, partitions: int, **settings: Any) -> Topic:
    """Create a topic at the root of a store; the same as :meth:`.Topic.create`.

    Args:
        url: The store.
        partitions: How many partitions it begins with, 1 to 1,000.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        The topic.

    Raises:
        InvalidInput: The root has a topic already, or a queue below it.
        StorageError: The store did not answer.
    """
    return Topic.create(QueueConfig.of(url, settings), partitions)


@checked
def list_partitions(url: Where, **settings: Any) -> tuple[Partition, ...]:
    """List the partitions of a topic, with those that are being drained.

    Args:
        url: The topic.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        The partitions, by number.

    Raises:
        InvalidInput: There is no topic.
        StorageError: The store did not answer.
    """
    return Topic.open(QueueConfig.of(url, settings)).description.partitions


@checked
def add_partitions(url: Where, *, total: int, **settings: Any) -> tuple[Partition, ...]:
    """Add partitions until a topic has this many that are written. May be repeated.

    Keys that move to a new partition lose their order once, against their older records.

    Args:
        url: The topic.
        total: The number of active partitions afterwards, at most 1,000.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        The partitions, by number.

    Raises:
        InvalidInput: There is no topic, or it has more active partitions.
        StorageError: The store did not answer.
    """
    return Topic.open(QueueConfig.of(url, settings)).expand(total).partitions


@checked
def drain_partition(url: Where, partition: str | int, **settings: Any) -> bool:
    """Stop writes to a partition. It leaves the topic when it is empty. May be repeated.

    Its consumer removes it after it has read everything, but not within the first minute, because
    producers finish their writes. If no consumer runs, call this again.

    Args:
        url: The topic.
        partition: The name or the number of the partition.
        **settings: Fields of :class:`.QueueConfig`.

    Returns:
        Whether it has left the topic.

    Raises:
        InvalidInput: There is no such partition, or it is the last one.
        StorageError: The store did not answer.
    """
    _, has_left = target.drain_partition(Topic.open(QueueConfig.of(url, settings)), partition)
    return has_left


def _target(url: Where, settings: dict[str, Any], partition: str | int | None) -> Target:
    """Open the store, and find the queue, the partition, or the topic."""
    config, runtime = QueueConfig.of(url, settings), SystemRuntime()
    opened = Target(open_store(config.store, config.store_options), config, runtime)
    if partition is not None:
        topic = Topic.open(config, store=opened.store, runtime=runtime)
        return replace(opened, config=partition_config(partition_named(partition, topic), config))
    default = QueueConfig(store=config.store)
    place = (config.data_path_prefix, config.manifest_path)
    if place != (default.data_path_prefix, default.manifest_path):
        return opened  # The settings name one queue.
    return replace(opened, topic=Topic.find(config, store=opened.store, runtime=runtime))


def _single(to: PlaceLike | Mapping[str | int, PlaceLike]) -> PlaceLike:
    if isinstance(to, Mapping):
        raise InvalidInput("to names partitions, and this is one queue: give one place")
    return to


def _limits(
    retention: Duration | Unchanged | None,
    retention_bytes: int | str | Unchanged | None,
    reader_expiry: Duration | None,
) -> dict[str, int | None]:
    given: dict[str, int | None] = {}
    if not isinstance(retention, Unchanged):
        given["retention_ms"] = _milliseconds("retention", retention)
    if not isinstance(retention_bytes, Unchanged):
        if isinstance(retention_bytes, str):
            retention_bytes = size_bytes(retention_bytes)
        given["retention_bytes"] = retention_bytes
    if reader_expiry is not None:
        given["reader_expiry_ms"] = _milliseconds("reader_expiry", reader_expiry)
    readers.check_limits(**given)
    return given


def _milliseconds(name: str, given: Duration | None) -> int | None:
    if given is None:
        return None
    if isinstance(given, str):
        return duration_ms(given)
    found = round(given / timedelta(milliseconds=1))
    if found < 0:
        raise wrong_type(name, given, "a timedelta that is not negative, such as timedelta(days=7)")
    return found
