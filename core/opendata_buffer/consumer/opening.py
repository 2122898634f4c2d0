"""Take a queue over: claim it, find where to resume, and load the names that show repeats.

The order of the steps keeps a failed start harmless:

1. Check the owner marker and the configuration. A consumer with the wrong configuration stops here,
   before it fences the running consumer.
2. Compare the position with the queue's id and its range. Without a position, find the place at
   which the caller wants to begin, and refuse a place that would discard unread batches (decision
   0045).
3. Note the names of the acknowledged batches. The claim takes these out of the manifest.
4. Claim the epoch. From here on the previous consumer is fenced.
5. Load the noted names of the batches that left the queue, and record the name of the new consumer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.consumer.isolation import Repeats
from opendata_buffer.consumer.place import Place
from opendata_buffer.consumer.position import Cursors, Position, QueueProgress
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.cas import LAST_READ_S
from opendata_buffer.queue.consumer_note import amend_consumer_info, write_consumer_info
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import is_rebuilt_at, owner_key
from opendata_buffer.queue.not_found import no_such_queue
from opendata_buffer.queue.ownership import QueueClaim, check_owner, claim_for_writing
from opendata_buffer.queue.queue import OpenPause, Queue
from opendata_buffer.queue.reader_queue import ReaderQueue
from opendata_buffer.runtime import Runtime, deadline, in_parallel
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TakenQueue:
    """A queue that this process has taken over.

    Attributes:
        queue: The queue, or the log as its named reader has it.
        manifest: The manifest or the view of the log, as the claim left it.
        progress: How far transactions are processed; None without an isolation level.
        repeats: The names of batches that were queued before.
        note: Adds fields to the stored information about the queue's consumer.
    """

    queue: Queue | ReaderQueue
    manifest: Manifest | LogView
    progress: QueueProgress | None
    repeats: Repeats
    note: Callable[..., None]


def take_over(
    store: Store,
    config: ConsumerConfig,
    runtime: Runtime,
    position: Position | None,
    *,
    isolation: str | None,
    allow_data_loss: bool,
    queue: Queue | ReaderQueue | None,
    program: str,
    open_pause: OpenPause | None,
    start: Place | None = None,
) -> TakenQueue:
    """Become the consumer of a queue, or the named reader of a log, after a position.

    Args:
        store: The opened store of the queue.
        config: The consumer's configuration.
        runtime: Clock and threads.
        position: The last processed position; None to start with the oldest queued batch.
        isolation: Which batches of transactions are delivered; None to ignore transactions.
        allow_data_loss: Log lost entries instead of raising ``DataLoss``.
        queue: The queue, if the caller has opened it; None to open it here.
        program: Name of the reading program.
        open_pause: Makes the queue's broker pause; None if no broker is asked.
        start: Where to begin if no position says so: neither ``position`` nor, for a reader of a
            log, the stored one.

    Returns:
        The queue, its manifest as the claim left it, and the progress to continue from.

    Raises:
        InvalidInput: The queue does not exist, or it is a log and no reader is named. Or ``start``
            is not in the queue, or unread batches of a queue lie before it.
        QueueReset: The position belongs to another queue, or is past the end of this one.
        DataLoss: Another program dequeued entries after the position.
        OpenDataBufferError: See :class:`.Consumer`.
    """
    resume = _claim_position(config, position, isolation)
    with start_deadline(config, runtime):
        if queue is None:
            queue = _claimed_queue(
                store,
                config,
                runtime,
                # A position says that the queue existed. A missing queue is then an error of its
                # own (QueueReset), so this does not refuse it as "no such queue".
                create=config.create_if_missing or resume is not None,
                program=program,
                open_pause=open_pause,
            )
        elif isinstance(queue, Queue) and queue.is_log:
            raise needs_reader(store, config)
        last_acked = None if resume is None else _sequence_of(resume, queue, config, store.url)
        repeats = Repeats(store, config, runtime, queue.queue_id)
        if last_acked is not None and isinstance(queue, Queue):
            _note_acknowledged(repeats, queue, last_acked)
        if start is not None and position is None:
            manifest = _claim_at(start, queue, config, store.url, allow_data_loss=allow_data_loss)
        else:
            manifest = _claim(queue, last_acked, allow_data_loss=allow_data_loss)
        note: Callable[..., None] = _note_nothing
        if isinstance(queue, ReaderQueue):
            # Acknowledged batches are still in the log, so new ones are compared with them there.
            repeats.described(queue.recent())
        else:
            # Load the notes after the claim. By now the fenced consumer has noted everything that
            # it dequeued. The three do not depend on each other.
            write_info = partial(
                write_consumer_info, store, config, runtime, manifest.epoch, program=program
            )
            steps: tuple[Callable[[], None], ...] = (repeats.load, write_info, queue.note)
            in_parallel(runtime, _call, steps)
            note = partial(amend_consumer_info, store, config, runtime, manifest.epoch)
    first = manifest.first_sequence
    progress = None
    if isolation is not None:
        if position is not None:
            _check_resumable(position, queue, config, store.url, manifest.next_sequence)
            if resume is None and first:
                _report_loss_of_first(config, first, queue.skipped, allowed=allow_data_loss)
        progress = QueueProgress(config.data_path_prefix, isolation, first, position)
    if last_acked is not None and first > last_acked + 1:
        warn_data_loss(config.manifest_path, last_acked + 1, first)
    return TakenQueue(queue, manifest, progress, repeats, note)


def open_queue(
    store: Store,
    config: ConsumerConfig,
    runtime: Runtime,
    claim: QueueClaim | None,
    *,
    program: str,
    open_pause: OpenPause | None = None,
    resettable: bool = True,
) -> Queue | ReaderQueue:
    """Open the queue for its only consumer; with ``config.reader``, the log for that reader.

    Args:
        store: The opened store of the queue.
        config: The consumer's configuration.
        runtime: Clock and threads.
        claim: The queue's owner marker as it was just read; None if it does not exist.
        program: Name of the reading program.
        open_pause: Makes the queue's broker pause; None if no broker is asked.
        resettable: Let errors advise to reset the reader. This helps a program that takes its
            position from the log, but not one that keeps its own.

    Returns:
        The queue or the reader's view of the log. Nothing was written yet.

    Raises:
        InvalidInput: The queue is a log, and no reader is named.
    """
    if config.reader:
        return ReaderQueue(
            store,
            config,
            config.reader,
            runtime=runtime,
            claim=claim,
            program=program,
            resettable=resettable,
        )
    if claim is not None and claim.is_log:
        raise needs_reader(store, config)
    return Queue(
        store, config, runtime=runtime, role="consumer", claim=claim, open_pause=open_pause
    )


def needs_reader(store: Store, config: QueueConfig) -> InvalidInput:
    """Return the error for a program that would take batches away from all readers of a log."""
    return InvalidInput(
        f"the queue with manifest {config.manifest_path!r} in {store.url} is a log with named "
        "readers",
        Hint(Action.NAME_READER, queue_name(store.url, config)),
    )


def check_reader(store: Store, config: ConsumerConfig, runtime: Runtime) -> None:
    """Check that the configuration names a reader exactly if the queue is a log.

    Args:
        store: The opened store of the queue.
        config: The consumer's configuration.
        runtime: Clock and threads.

    Raises:
        InvalidInput: The queue is a log and no reader is named, or it is not a log and one is.
    """
    claim = check_owner(store, config, runtime=runtime)
    if config.reader:
        Log(store, config, runtime).need()
    elif claim is not None and claim.is_log:
        raise needs_reader(store, config)


def check_data_loss(
    cursors: Cursors,
    manifest: Manifest | LogView,
    key: str,
    *,
    allowed: bool,
    cause: str,
    open_from: int | None = None,
    skipped: Callable[[], Sequence[tuple[int, int]]] = tuple,
) -> Cursors:
    """Check that a queue still has the entry that its reader hands out next (failure F28).

    Args:
        cursors: The reader's cursors.
        manifest: The manifest, or the view of the log, as it was just read.
        key: The key of the manifest or of the reader's position, for the error.
        allowed: Skip lost entries with a warning.
        cause: A sentence with the likely cause of a loss.
        open_from: The first sequence of an undecided transaction, for the error.
        skipped: Returns the ranges of sequences that never held batches, for the error.

    Returns:
        The cursors. If entries are lost and that is allowed, they are moved to the oldest entry.

    Raises:
        DataLoss: Entries are lost, and that is not allowed.
    """
    needed = cursors.next_hand_out
    oldest = manifest.available_from(needed)
    if oldest <= needed:
        return cursors
    if not allowed:
        hints = []
        if isinstance(manifest, LogView) and manifest.log.reader:
            if manifest.sealed:  # failure F53
                cause = "The partition was drained, which does not wait for expired readers."
            log_ = manifest.log
            queue = queue_name(log_.store.url, log_.config)
            hints.append(Hint(Action.RESET_READER, queue, oldest, readers=(log_.reader,)))
        ranges = skipped()
        if is_rebuilt_at(oldest, ranges):
            cause = ""  # A repair has made the gap, and the error says so.
        more: list[str | Hint] = [cause, *hints] if cause else [*hints]
        raise DataLoss(key, needed, oldest, *more, open_from=open_from, skipped=ranges)
    warn_data_loss(key, needed, oldest)
    return cursors.jump(oldest)


def count_between(begin: int, end: int, manifest: Manifest | LogView | None) -> int:
    """Return how many entries lie in [begin, end), by a manifest that was read.

    Entries that an old program took off a log, because it does not know logs, do not count.
    """
    if isinstance(manifest, LogView):
        return manifest.count(begin, end)
    return max(0, end - begin)


def warn_data_loss(key: str, needed: int, oldest: int) -> None:
    """Log that the entries from ``needed`` up to, not including, ``oldest`` are skipped."""
    log.warning(
        "data loss allowed: %s starts at %d, sequences %d to %d are gone unread",
        key,
        oldest,
        needed,
        oldest - 1,
    )


def start_deadline(config: QueueConfig, runtime: Runtime) -> AbstractContextManager[None]:
    """Limit all requests of a start or of a close together to the time that one change may take."""
    return deadline(runtime, config.timeout_ms / 1000 + LAST_READ_S)


def check_start(
    start: Place, view: Manifest | LogView, config: QueueConfig, url: str, *, allow_data_loss: bool
) -> int:
    """Find the sequence at which the only consumer of a queue or a new reader of a log begins.

    Args:
        start: The place.
        view: The manifest, or everything that the log keeps.
        config: The queue.
        url: The URL of its store.
        allow_data_loss: Begin at the oldest batch, with a warning, if ``start`` is before it.

    Returns:
        The sequence.

    Raises:
        InvalidInput: The place is not in the queue, or unread batches of a queue lie before it:
            reading from there would discard them.
    """
    first = view.first_sequence
    if allow_data_loss and start.sequence is not None and start.sequence < first:
        warn_data_loss(config.manifest_path, start.sequence, first)
        return first
    begin = start.sequence_in(view, config, url)
    if isinstance(view, Manifest) and begin > first:
        count = begin - first
        batches = "1 unread batch" if count == 1 else f"{count} unread batches"
        raise InvalidInput(
            f"start is {start.text}, which is sequence {begin} of the queue with manifest "
            f"{config.manifest_path!r} in {url}: {batches} from {first} on would be lost, because "
            "a queue keeps nothing before the place where its consumer reads",
            Hint(Action.DISCARD_BACKLOG, queue_name(url, config), begin),
        )
    return begin


def _call(function: Callable[[], None]) -> None:
    function()


def _claim(
    queue: Queue | ReaderQueue, last_acked: int | None, *, allow_data_loss: bool
) -> Manifest | LogView:
    """Claim a queue without its note, which the caller writes, or a log as a reader."""
    if isinstance(queue, Queue):
        return queue.claim_epoch(last_acked, allow_data_loss=allow_data_loss, note=False)
    return queue.claim_epoch(last_acked, allow_data_loss=allow_data_loss)


def _claim_at(
    start: Place,
    queue: Queue | ReaderQueue,
    config: ConsumerConfig,
    url: str,
    *,
    allow_data_loss: bool,
) -> Manifest | LogView:
    """Claim a queue at a place, or a log as a reader that begins there if it is new."""
    at = partial(check_start, start, config=config, url=url, allow_data_loss=allow_data_loss)
    if isinstance(queue, ReaderQueue):
        view = queue.claim_epoch(None, allow_data_loss=allow_data_loss, begin=at)
        if queue.began_at is None and not (start.is_earliest or start.is_latest):
            log.warning(
                "reader %r continues at sequence %d: start=%s applies only to a new reader. Move "
                "this one with seek(), or with admin.reset_reader()",
                queue.name,
                view.first_sequence,
                start.text,
            )
        return view
    begin = at(queue.read_once() or Manifest.empty())
    # Another consumer may dequeue more before the claim. A sequence was then lost; a word or a time
    # has moved.
    last_acked = begin - 1 if begin and start.sequence is not None else None
    return _claim(queue, last_acked, allow_data_loss=allow_data_loss)


def _claim_position(
    config: ConsumerConfig, position: Position | None, isolation: str | None
) -> Position | None:
    """Return the position to claim the queue at: before the entries of open transactions."""
    if isolation is None:
        return position
    # Do this even without a position, to refuse an unknown isolation level before the claim.
    progress = QueueProgress(config.data_path_prefix, isolation, position=position)
    if position is None or not progress.first_needed:
        return None
    return Position(position.queue_id, progress.first_needed - 1)


def _report_loss_of_first(
    config: ConsumerConfig, first: int, skipped: Sequence[tuple[int, int]], *, allowed: bool
) -> None:
    """Report that a position needs sequence 0, which is gone and which the claim did not check."""
    if not allowed:
        cause = "Another consumer read this queue."
        hint = Hint(Action.ACCEPT_LOSS)
        raise DataLoss(config.manifest_path, 0, first, cause, hint, skipped=skipped)
    warn_data_loss(config.manifest_path, 0, first)


def _claimed_queue(
    store: Store,
    config: ConsumerConfig,
    runtime: Runtime,
    *,
    create: bool,
    program: str,
    open_pause: OpenPause | None,
) -> Queue | ReaderQueue:
    claim = claim_for_writing(
        store,
        config,
        runtime=runtime,
        missing=None if create else lambda: no_such_queue(store, config, creates=True),
        grace_ms=config.collector.grace_period_ms,
    )
    return open_queue(store, config, runtime, claim, program=program, open_pause=open_pause)


def _note_acknowledged(repeats: Repeats, queue: Queue, last_acked: int) -> None:
    """Note the names of the acknowledged entries that the claim will take out of the manifest."""
    manifest = queue.read_once() or Manifest.empty()
    if manifest.first_sequence <= last_acked < manifest.next_sequence:
        entries = manifest.entries(limit=last_acked + 1 - manifest.first_sequence)
        repeats.described(entries)
        repeats.note(last_acked + 1)


def _note_nothing(**fields: object) -> None:
    """Do nothing. A log's reader has no such note, because its position names the reader."""


def _sequence_of(
    position: Position, queue: Queue | ReaderQueue, config: ConsumerConfig, url: str
) -> int:
    """Return the sequence of a position after checking that it belongs to this queue."""
    own = queue.queue_id
    if position.queue_id and own and position.queue_id != own:
        raise QueueReset(
            f"cannot resume after {position}: manifest {queue.key!r} in {url} belongs to queue "
            f"{own}. The store or the prefix was changed, or the queue was deleted and made "
            "again. Start without a position to read what is queued now. If only "
            f"{owner_key(config.data_path_prefix)!r} was lost, write the old id back into it."
        )
    return position.sequence


def _check_resumable(
    position: Position, queue: Queue | ReaderQueue, config: ConsumerConfig, url: str, end: int
) -> None:
    """Check the parts of a position after transactions that the claim did not check."""
    if _sequence_of(position, queue, config, url) >= end:
        raise QueueReset(
            f"cannot resume {queue.key!r} after {position}: the queue ends at {end - 1}. Start "
            "without the position to read what is queued now."
        )
