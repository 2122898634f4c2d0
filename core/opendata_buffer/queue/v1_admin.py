"""Add and delete v1 consumers as readers of a log.

See :mod:`opendata_buffer.queue.v1_feed` for their queues. Each operation changes several objects,
one after another, and may be killed after any of them. Running it again completes it.

:func:`add_v1_reader` claims the prefix, creates the empty queue, writes the position, and then
writes the name into the index. The name is the last, so a collector that finds it finds the
position, and a feeder finds the queue. If the collector has raised the floor meanwhile, the reader
begins later.

:func:`close_v1_queue` empties the queue and seals it in one write. After that no consumer gets
anything from it, and no feeder appends to it, however old its memory is. The queue is not deleted:
a v1 consumer would create a new one.
"""

from __future__ import annotations

from collections.abc import Callable

from opendata_buffer import errors
from opendata_buffer.config import PARTITION_NAME, QueueConfig, check_reader_name
from opendata_buffer.formats.batch import check_key, is_confined
from opendata_buffer.formats.manifest import SEALED_EPOCH, Manifest
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import MOST_READERS, LogIndex
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import PrefixOwner, owner_key, owner_object
from opendata_buffer.queue.neighbours import check_prefix_is_free
from opendata_buffer.queue.reader_positions import ReaderPosition, position_object
from opendata_buffer.queue.reader_queue import too_many_readers
from opendata_buffer.queue.stored_manifest import manifest_object
from opendata_buffer.queue.unaccounted import well_known
from opendata_buffer.queue.v1_feed import v1_config
from opendata_buffer.stores.base import Store

_PROGRAM = "v1 consumer"


def check_v1_place(store: Store, config: QueueConfig, prefix: str) -> QueueConfig:
    """Refuse a prefix that a v1 consumer of a log must not have.

    The collector of a v1 consumer deletes batches below its prefix that its queue does not name.

    Args:
        store: The opened store of the log.
        config: The settings of the log.
        prefix: The prefix.

    Returns:
        The settings of the queue at this prefix.

    Raises:
        InvalidInput: The prefix overlaps the log, another queue, or a topic, or has objects of
            another program; or the log is a partition of a topic.
        StorageError: The store did not answer.
    """
    own = config.data_path_prefix
    if PARTITION_NAME.fullmatch(own):
        raise errors.InvalidInput(
            f"{own!r} is a partition of a topic: a v1 consumer reads one queue, and cannot follow "
            "partitions that are added or leave. Use a log that is not part of a topic."
        )
    check_key("prefix", prefix)
    queue = v1_config(config, prefix)
    if is_confined(prefix, own) or is_confined(own, prefix) or prefix == own:
        raise errors.InvalidInput(
            f"prefix {prefix!r} overlaps the data prefix {own!r} of the log: the collector of the "
            "v1 consumer would delete batches of the log. Use a prefix next to it."
        )
    if is_confined(config.manifest_path, prefix) or queue.manifest_path in well_known(config):
        raise errors.InvalidInput(
            f"prefix {prefix!r} is where clients look for the manifest of {own!r}. Use another "
            "prefix."
        )
    check_prefix_is_free(store, queue)
    expected = {queue.manifest_path, owner_key(prefix)}
    found = [each.key for each in store.list(f"{prefix}/", limit=3).objects]
    if strange := [key for key in found if key not in expected]:
        raise errors.InvalidInput(
            f"prefix {prefix!r} is in use: there is {strange[0]!r}. Use a prefix without objects."
        )
    if found and owner_key(prefix) not in found:
        raise errors.InvalidInput(
            f"prefix {prefix!r} has a queue already, which may be that of a v1 consumer which was "
            "started too early. Use a prefix without objects, and start the consumer afterwards."
        )
    return queue


def add_v1_reader(
    store: Store,
    read_view: Callable[[], LogView],
    name: str,
    prefix: str,
    place: Callable[[LogView], int],
) -> int:
    """Make a v1 consumer a reader of a log.

    Args:
        store: The opened store of the log.
        read_view: Reads the log.
        name: The name of the reader.
        prefix: The prefix of its queue, which gets the manifest ``<prefix>/manifest``.
        place: Returns the sequence at which it begins, given the log. It may refuse, and is called
            again if the collector was faster.

    Returns:
        The sequence at which it begins.

    Raises:
        InvalidInput: The name or the prefix cannot be used, or the log does not have the place.
        StorageError: The store did not answer, or refused a write.
    """
    check_reader_name(name)
    view = read_view()
    log_, index = view.log, view.index
    if name in index.readers or name in index.v1:
        raise errors.InvalidInput(
            f"there is a reader {name!r} already. Use another name, or delete it first."
        )
    if len(index.readers) >= MOST_READERS:
        raise too_many_readers(log_)
    queue = check_v1_place(store, log_.config, prefix)
    _claim(log_, queue, index.queue_id, name)
    while True:
        # The queue cannot have gaps, so it begins after one.
        begin = min(view.available_from(place(view)), view.next_sequence)
        begin = _create(log_, queue, begin)
        _write_position(log_, name, prefix, index.queue_id, begin)

        def named(before: LogIndex | None, begin: int = begin) -> LogIndex | None:
            if before is None or before.floor > begin or name in before.readers:
                return before
            return before.with_v1_reader(name, prefix)

        if log_.change(named).v1.get(name) == prefix:
            return begin
        # The collector did not know this reader yet and has raised the floor past it.
        view = read_view()


def _claim(log_: Log, queue: QueueConfig, queue_id: str, name: str) -> None:
    """Mark the prefix as that of a reader, so that no program of ours takes it for a queue."""
    fresh = PrefixOwner(log_.config.manifest_path, queue_id, reader=name)
    owner = owner_object(log_.store, queue, log_.runtime).change(lambda before: before or fresh)
    same = (owner.manifest_path, owner.queue_id) == (fresh.manifest_path, queue_id)
    if owner.reader != name or not same:
        whose = f"reader {owner.reader!r} of the log" if owner.reader else "the queue"
        raise errors.InvalidInput(
            f"prefix {queue.data_path_prefix!r} belongs to {whose} with manifest "
            f"{owner.manifest_path!r}. Use another prefix."
        )


def _create(log_: Log, queue: QueueConfig, begin: int) -> int:
    """Create the empty queue. One of an interrupted command is used again.

    Returns:
        The sequence at which it begins.
    """

    def created(before: Manifest | None) -> Manifest:
        if before is None:
            return Manifest.starting_at(begin, 0)
        if before.epoch >= SEALED_EPOCH or before.entry_count:
            raise errors.InvalidInput(
                f"prefix {queue.data_path_prefix!r} was used by a reader that was deleted, or by "
                "another program. Use another prefix."
            )
        if before.next_sequence > begin:
            raise errors.InvalidInput(
                f"{queue.manifest_path!r} begins at sequence {before.next_sequence}, from an "
                f"earlier attempt, and cannot begin at {begin}. Use another prefix."
            )
        if before.next_sequence == begin:
            return before
        return Manifest.starting_at(begin, before.epoch)

    return manifest_object(log_.store, queue, log_.runtime).change(created).next_sequence


def _write_position(log_: Log, name: str, prefix: str, queue_id: str, begin: int) -> None:
    now_ms = log_.runtime.now_ms()
    fresh = ReaderPosition(
        queue_id, begin, 0, program=_PROGRAM, since_ms=now_ms, moved_ms=now_ms, v1=prefix, fed=begin
    )

    def written(before: ReaderPosition | None) -> ReaderPosition:
        if before is not None and before.queue_id == queue_id and before.v1 != prefix:
            raise errors.InvalidInput(
                f"the name {name!r} was used by another reader of this log. Use another name."
            )
        return fresh

    position_object(log_, name).change(written)


def close_v1_queue(log_: Log, prefix: str) -> None:
    """Empty the queue of a v1 consumer and seal it, in one write. Repeatable.

    Args:
        log_: The log.
        prefix: The prefix of the queue.

    Raises:
        StorageError: The store did not answer, or it is not known whether it has written.
    """

    def closed(before: Manifest | None) -> Manifest:
        # A queue that is gone is created closed, because a v1 consumer would create an open one.
        # One that is damaged is replaced: no reader needs it, and a backup must not open it again.
        queue = Manifest.empty() if before is None else before
        if queue.epoch >= SEALED_EPOCH:
            return queue
        if queue.entry_count:
            queue = queue.drop_through(queue.next_sequence - 1)
        return queue.with_epoch(SEALED_EPOCH)

    queue = v1_config(log_.config, prefix)
    manifest_object(
        log_.store, queue, log_.runtime, if_unreadable=lambda error, version: Manifest.empty()
    ).change(closed)
