"""Operate the named readers of a log: enable, register, reset, and delete them.

These are the operations behind ``opendata-buffer readers``. Each one changes several objects, one
after another, and may be killed after any of them. The order is chosen so that the state in between
is safe, and so that running the operation again completes it:

* :func:`enable_readers` turns a queue into a log. The owner marker comes first, so that no consumer
  without a name can start any more. Then a new epoch fences the running consumer. The index comes
  last.
* :func:`register_readers` writes the positions and then the names in the index. A collector that
  finds a name always finds its position (decision 0038).
* :func:`reset_reader` writes the position and then changes the index. A collector that had read the
  old position loses its race for the index.
* :func:`unregister` deletes the position and then the name. While the name is there without a
  position, the consumer of this reader gets the error that the reader was deleted, and does not
  register it again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from opendata_buffer import errors
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.consumer_note import ENABLE, write_consumer_info
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import MOST_READERS, LogIndex
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import IS_LOG, PrefixOwner, owner_object
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_positions import ReaderPosition, position_object
from opendata_buffer.queue.reader_queue import ReaderQueue, too_many_readers
from opendata_buffer.queue.v1_admin import close_v1_queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Delete


def enable_readers(
    store: CasStore,
    config: QueueConfig,
    claim: QueueClaim,
    runtime: Runtime,
    **settings: int | None,
) -> LogIndex:
    """Turn a queue into a log that starts at its oldest entry, or change the settings of a log.

    Args:
        store: Where the queue is.
        config: The queue.
        claim: The claim of the caller.
        runtime: Clock and sleep.
        **settings: Fields of the index by name. The others keep their values, or get the default.

    Returns:
        The index.

    Raises:
        CorruptData: The index cannot be read.
        StorageError: The store did not answer, or refused a write.
    """

    def marked(before: PrefixOwner | None) -> PrefixOwner | None:
        return before and replace(before, others={**before.others, IS_LOG: True})

    log_ = Log(store, config, runtime, claim.queue_id)
    first = log_.read()
    if first is None:
        owner_object(store, config, runtime).change(marked)
        queue = Queue(store, config, runtime=runtime, role="operator", claim=claim)
        claimed = queue.claim_epoch(None)
        write_consumer_info(store, config, runtime, claimed.epoch, program=ENABLE)
        begin = claimed.first_sequence
        first = LogIndex(claim.queue_id, begin, begin)
    return log_.change(lambda before: (before or first).changed(**settings))


def reset_reader(view: LogView, name: str, sequence: int) -> ReaderPosition:
    """Set a reader, which may be new, to a sequence. A running consumer of it is fenced.

    Args:
        view: The log as it was just read.
        name: The reader.
        sequence: The first sequence that it will read.

    Returns:
        The new position.

    Raises:
        InvalidInput: The log does not keep this sequence, or has too many readers.
        DataLoss: The collector has just deleted batches from this sequence on.
    """
    if not view.first_sequence <= sequence <= view.next_sequence:
        raise errors.InvalidInput(
            f"sequence {sequence} is not kept: the log has {view.first_sequence} to "
            f"{view.next_sequence - 1}, and ends at {view.next_sequence}"
        )
    log_, program = view.log, "opendata-buffer readers reset"
    reader = ReaderQueue(
        log_.store, log_.config, name, runtime=log_.runtime, claim=None, program=program
    )
    return reader.reset(sequence)


def register_readers(
    log_: Log, names: Collection[str], program: str, *, begin: int = 0
) -> dict[str, int]:
    """Register readers that a log does not know yet, without starting a consumer.

    A reader that has a position in this log keeps it. Any other reader begins at ``begin``, and its
    position has epoch 0 until a consumer claims it. A reader is left
    out if it has expired here and its next batch was deleted: it has lost batches, and must learn
    that when it starts.

    Args:
        log_: The log; it must exist.
        names: Readers that the log should have.
        program: The program that registers them, as operators know it.
        begin: The sequence at which a reader without a position begins. Default: the oldest batch.
            If the log no longer keeps this sequence, the reader begins at the oldest batch, too.

    Returns:
        For each reader that was registered now, the sequence at which it begins.

    Raises:
        InvalidInput: The log would have more than 1,000 readers.
        StorageError: The store did not answer, or refused a write.
    """
    made = set[str]()
    while True:
        index = log_.need()
        new = sorted({*names} - {*index.readers})
        if len(index.readers) + len(new) > MOST_READERS:
            raise too_many_readers(log_)
        begins = {name: _prepare_position(log_, index, name, made, program, begin) for name in new}
        begins = {name: begin for name, begin in begins.items() if begin >= index.floor}
        if not begins:
            return {}
        # Positions come first: a collector that sees a name must find its position (decision 0038).
        now = log_.change(partial(_with_readers, begins))
        if now.floor <= min(begins.values()):
            return begins
        # The collector did not know these readers yet and has raised the floor past one of them.


def _with_readers(begins: Mapping[str, int], before: LogIndex | None) -> LogIndex | None:
    if before is None or before.floor > min(begins.values()):
        return before
    for name in begins:
        before = before.with_reader(name)
    return before


def _prepare_position(
    log_: Log, index: LogIndex, name: str, made: set[str], program: str, begin: int
) -> int:
    """Write a position for a reader that is not in the index, and return its next sequence.

    ``made`` has the readers whose positions this caller created. It may move those when the floor
    has risen; it never moves the position of an existing reader.
    """
    now_ms = log_.runtime.now_ms()
    first = max(begin, index.floor)
    fresh = ReaderPosition(
        index.queue_id, first, 0, program=program, since_ms=now_ms, moved_ms=now_ms
    )

    def decide(before: ReaderPosition | None) -> ReaderPosition:
        if before is None or before.queue_id != index.queue_id:
            made.add(name)
            return fresh
        if before.epoch == 0 and name in made:
            return fresh
        # With the old time it would expire immediately.
        return replace(before, moved_ms=now_ms)

    return position_object(log_, name).change(decide).next


def unregister(store: Delete, log_: Log, name: str) -> LogIndex:
    """Delete a reader: first its position, then its name.

    The queue of a v1 consumer is closed before that.

    Args:
        store: Deletes the position.
        log_: The log.
        name: The reader.

    Returns:
        The index without the reader.

    Raises:
        InvalidInput: The log has no such reader.
        StorageError: The store did not answer, or refused a write.
    """
    index = log_.need()
    if name not in index.readers and name not in index.v1:
        raise unknown_reader(name, index)
    if name in index.v1:
        close_v1_queue(log_, index.v1[name])
    for failure in store.delete_many([position_object(log_, name).key]):
        # With its name gone, a position that is left would let a new reader of this name continue.
        raise errors.TransientStorageError(
            f"{failure.key!r} in {log_.store.url} was not deleted: {failure.reason}. Try again."
        )
    return log_.change(lambda before: before and before.without_v1_reader(name))


def unknown_reader(name: str, index: LogIndex) -> errors.InvalidInput:
    """Return the error for a name that is not in the index, with the names that are."""
    known = ", ".join(sorted({*index.readers, *index.v1})) or "none yet"
    return errors.InvalidInput(f"there is no reader {name!r}; readers of this log: {known}")
