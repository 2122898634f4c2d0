"""The driver's side of a stream: positions in, positions and plans out. No Spark in it.

One object lives for one run of one query and owns the queue's consumer. Every answer is a
function of the offsets Spark hands over and of the manifest; what is kept between calls only
saves requests. So a replay after a crash, which calls :meth:`StreamDriver.plan` first, needs
nothing.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import Any

from buffer_source.commit_log import CommitLog
from buffer_source.measures import Measures
from buffer_source.offsets import SourceOffset
from buffer_source.options import EARLIEST, LATEST, SourceOptions
from buffer_source.planner import Limits, admit, pack
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.transactions import TransactionFilter
from opendata_buffer.errors import (
    Conflict,
    DataLoss,
    InvalidInput,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.keys import location_timestamp_ms
from opendata_buffer.queue.owner import claim_for_use, marker_key
from opendata_buffer.queue.queue import Queue
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Store

__all__ = ["StreamDriver"]

log = logging.getLogger(__name__)

EVERYTHING = 1 << 62

READ_AHEAD = 10_000
"""Entries looked at for one trigger when only bytes or records limit it."""


class StreamDriver:
    """Positions of one run of one query.

    Args:
        options: What the query asked for.
        store: The opened store.
        runtime: Clock and sleep.
    """

    def __init__(self, options: SourceOptions, store: Store, runtime: Runtime) -> None:
        self._options = options
        self._config = options.consumer
        self._store = store
        self._runtime = runtime
        self._measures = Measures(
            store,
            self._config.data_path_prefix,
            runtime=runtime,
            concurrency=options.fetch_concurrency,
        )
        # An error in any call ends the query, so what may pass is waited for.
        self._patient = queue_retry(runtime, self._config)
        self._log = CommitLog()
        self._consumer: Consumer | None = None
        self._queue_id = ""
        self._waiting: list[BatchDescriptor] = []
        """Entries that were handed out and not acknowledged."""
        self._base: int | None = None
        self._rebased: tuple[SourceOffset, int] | None = None
        self._target: int | None = None
        self._idle_at: float | None = None
        self._position = 0

    def prepare_available_now(self) -> None:
        """Freeze the end of the run: what is queued now, and nothing later."""
        queue = Queue(self._store, self._config, runtime=self._runtime, role="consumer")
        manifest = queue.read()  # Retries by itself.
        self._target = 0 if manifest is None else manifest.next_sequence
        self._log.available_now()

    def latest(self, start: SourceOffset | None, *, unlimited: bool = False) -> SourceOffset:
        """The end of the next micro-batch; equal to ``start`` when nothing waits.

        Args:
            start: Where the last micro-batch ended; None for a new query.
            unlimited: Ignore the limits per trigger.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: ``start`` is not a position of this queue any more.
        """
        begin, base = self._resolve(start)
        if self._log.handed(start, self._runtime.monotonic()) and start is not None:
            self._acknowledge(start)
        options = self._options
        limits = (
            Limits()
            if unlimited
            else Limits(options.max_batches, options.max_bytes, options.max_records)
        )
        if start is not None and (begin != start.next or not self._is_ours(start)):
            # First a micro-batch without rows. One with rows might end beyond `start`, and a
            # replay would take it for one that begins at `start`.
            self._position = begin
            # Writers count their batches per queue: another queue's numbers say nothing here.
            passed = start.transactions if self._is_ours(start) else {}
            return SourceOffset(begin, base, passed, self._queue_id)
        waiting = self._wait_for(begin, limits)
        if waiting and waiting[0].sequence > begin:
            begin = base = waiting[0].sequence  # A loss the consumer was allowed to pass by.
        count = self._patient(admit, waiting, limits, self._measures.sizes, self._measures.records)
        self._position = begin + count
        if count == 0 and start is not None:
            return start
        transactions = self._filter(start)
        for each in waiting[:count]:
            transactions.offer(each.sequence, each.location)
        return SourceOffset(begin + count, base, transactions.to_dict(), self._queue_id)

    def plan(
        self, start: SourceOffset | None, end: SourceOffset
    ) -> list[tuple[BatchDescriptor, ...]]:
        """The tasks of the micro-batch from ``start`` to ``end``.

        The same batches in the same order for equal arguments, in any run. Repeats of a
        transaction that was read already are left out.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: The queue does not have these entries any more.
        """
        self._log.planned(start)
        begin = end.begin_of(start)
        if self._consumer is None:
            # A replay after a crash. What is before `start` is in the commit log of the batch
            # before; what is before another base was never read, nor is it ours to drop.
            same = start is not None and begin == start.next and start.queue == end.queue
            self._claim(start if same else None, end.queue)
        batches = self._between(begin, end.next)
        transactions = self._filter(start)
        passed = [each for each in batches if transactions.offer(each.sequence, each.location)]
        if len(passed) < len(batches):
            log.info(
                "left out %d of %d batches: a writer repeated a transaction that was read already",
                len(batches) - len(passed),
                len(batches),
            )
        options = self._options
        sizes = self._patient(self._measures.estimates, passed)
        return pack(passed, sizes, options.parallelism, options.min_partitions)

    def commit(self, end: SourceOffset) -> None:
        """Everything below ``end`` is safe with Spark: let it leave the queue.

        Cumulative and repeatable. A store that does not answer is no failure here: the next
        commit makes up for it.

        Raises:
            Fenced: Another consumer took the queue.
        """
        self._log.committed(end)
        if self._consumer is None:
            self._claim(end, end.queue)
        self._acknowledge(end)

    def report(self) -> dict[str, Any] | None:
        """How far the queue reaches beyond what the last call returned; makes no request."""
        if self._consumer is None:
            return None
        behind = self._waiting_from(self._position)
        lag_ms = 0
        if behind:
            written = location_timestamp_ms(behind[0].location)
            lag_ms = 0 if written is None else max(0, self._runtime.now_ms() - written)
        end = max(self._position, self._consumer.next_sequence)
        return {"v": 1, "next": end, "backlogBatches": end - self._position, "lagMs": lag_ms}

    def stop(self) -> None:
        """Stop the collector and let the queue go; acknowledges nothing."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _resolve(self, start: SourceOffset | None) -> tuple[int, int]:
        """Where the next micro-batch begins, and the base that goes with it."""
        if self._consumer is None:
            self._claim(start, "" if start is None else start.queue)
        if start is None:
            if self._base is None:
                self._base = self._first_position()
            return self._base, self._base
        assert self._consumer is not None
        if start.next > self._consumer.next_sequence:
            # A replay that was allowed to find less than `start` says has read all there was.
            self._rebased = (start, self._handed_out)
        if self._rebased is not None and self._rebased[0] == start:
            return self._rebased[1], self._rebased[1]
        # Spark is beyond it. A later position may be equal to it, and is then of this queue.
        self._rebased = None
        return start.next, start.base

    def _is_ours(self, position: SourceOffset) -> bool:
        return position.queue in ("", self._queue_id) or not self._queue_id

    def _claim(self, start: SourceOffset | None, queue_id: str) -> None:
        """Become the queue's consumer, behind ``start``, which is in the commit log.

        At the first offset Spark hands over and not before: a reader that is only made, to be
        pickled or to look at its schema, must not fence a running query.

        Args:
            start: Everything before it may leave the queue.
            queue_id: The queue the checkpoint is about; empty when it does not say.
        """
        last = start.next - 1 if start is not None and start.next > 0 else None
        try:
            self._check_identity(queue_id)
            self._consumer = self._patient(self._open_consumer, last)
        except QueueReset as error:
            if self._options.fail_on_data_loss:
                raise
            log.warning("data loss allowed, reading from the start of another queue: %s", error)
            self._consumer = self._patient(self._open_consumer, None)
            if start is not None:
                self._rebased = (start, self._handed_out)

    def _check_identity(self, expected: str) -> None:
        """Learn the queue's id, before anything is claimed or dropped (failure F4)."""
        config = self._config
        claim = self._patient(claim_for_use, self._store, config, runtime=self._runtime)
        found: str = claim.queue_id
        self._queue_id = found
        if expected and found and found != expected:
            raise QueueReset(
                f"the checkpoint is about queue {expected}, and manifest "
                f"{config.manifest_path!r} in {self._store.url} belongs to queue {found}: the "
                "path or the prefix was changed, or the queue was deleted and made anew. If only "
                f"{marker_key(config.data_path_prefix)!r} was lost, write the old id back into it."
            )

    def _open_consumer(self, last_acked: int | None) -> Consumer:
        return Consumer(
            self._config,
            last_acked,
            store=self._store,
            runtime=self._runtime,
            allow_data_loss=not self._options.fail_on_data_loss,
        )

    def _first_position(self) -> int:
        assert self._consumer is not None
        first, end = self._handed_out, self._consumer.next_sequence
        wanted = self._options.starting_offsets
        if wanted == EARLIEST:
            return first
        if wanted == LATEST:
            return end if self._target is None else max(first, min(end, self._target))
        position = int(wanted)
        if position > end:
            raise InvalidInput(
                f"option startingOffsets is {position} and manifest "
                f"{self._config.manifest_path!r} ends at {end - 1}: use a sequence up to {end}, "
                "'earliest' or 'latest'"
            )
        if position < first:
            if self._options.fail_on_data_loss:
                raise DataLoss(
                    self._config.manifest_path,
                    position,
                    first,
                    "Start at 'earliest' or at a sequence that is still queued.",
                )
            log.warning("data loss allowed: starting at %d, not at %d", first, position)
            return first
        return position

    @property
    def _handed_out(self) -> int:
        """First sequence the consumer has not handed out."""
        assert self._consumer is not None
        last = self._consumer.last_handed_out_sequence
        return 0 if last is None else last + 1

    def _acknowledge(self, end: SourceOffset) -> None:
        consumer = self._consumer
        assert consumer is not None
        acked = consumer.last_acked_sequence
        done = 0 if acked is None else acked + 1
        if not self._is_ours(end) or not done < end.next <= self._handed_out:
            return  # Done before, or a position of a queue that was replaced.
        try:
            consumer.ack_through(end.next - 1)
        except (TransientStorageError, Conflict) as error:
            log.warning("acknowledging through %d is put off: %s", end.next - 1, error)
            return
        self._waiting = self._waiting_from(end.next)
        self._measures.forget_before(end.next)

    def _filter(self, start: SourceOffset | None) -> TransactionFilter:
        prefix = self._config.data_path_prefix
        if start is None or not start.transactions:
            return TransactionFilter(prefix)
        return TransactionFilter.from_dict(start.transactions, prefix)

    def _wait_for(self, begin: int, limits: Limits) -> list[BatchDescriptor]:
        """Entries in a row from ``begin`` on that this trigger may read."""
        stop = EVERYTHING if self._target is None else self._target
        if limits.batches is not None:
            stop = min(stop, begin + limits.batches)
        elif limits.bytes is not None or limits.records is not None:
            stop = min(stop, begin + READ_AHEAD)
        if self._handed_out < stop:
            idle = not self._waiting_from(begin)
            if idle and self._target is None:
                self._await_poll()
            # One more than is wanted: its age is the lag the progress shows.
            self._hand_out(stop + 1)
        waiting = self._waiting_from(begin)
        waiting = waiting[: bisect_left(waiting, stop, key=_sequence)]
        self._idle_at = None if waiting else self._runtime.monotonic()
        if waiting and waiting[-1].sequence - waiting[0].sequence >= len(waiting):
            # A loss that was allowed, in the middle: a micro-batch ends at it.
            gap = next(
                index
                for index in range(1, len(waiting))
                if waiting[index].sequence != waiting[index - 1].sequence + 1
            )
            waiting = waiting[:gap]
        return waiting

    def _await_poll(self) -> None:
        """Let ``pollIntervalMs`` pass between two looks at an idle queue.

        Waits and then looks, rather than answering from the last look: an answer older than
        the call would let ``processAllAvailable()`` return before it saw what was there.
        """
        if self._idle_at is not None:
            due = self._idle_at + self._options.poll_interval_ms / 1000
            left = due - self._runtime.monotonic()
            if left > 0:
                self._runtime.sleep(left)

    def _hand_out(self, stop: int) -> None:
        """Have the consumer hand out entries below ``stop``, as far as there are any."""
        assert self._consumer is not None
        if self._handed_out < stop:
            wanted = min(stop - self._handed_out, EVERYTHING)
            self._waiting.extend(self._consumer.next_descriptors(wanted))

    def _between(self, begin: int, stop: int) -> list[BatchDescriptor]:
        """Exactly the entries [begin, stop).

        Raises:
            DataLoss: They are gone, unless that is allowed.
            QueueReset: The queue ends before them, unless that is allowed.
        """
        if begin >= stop:
            return []
        self._hand_out(stop)
        found = self._waiting_from(begin)
        found = found[: bisect_left(found, stop, key=_sequence)]
        if len(found) < stop - begin:
            assert self._consumer is not None
            end = self._consumer.next_sequence
            message = (
                f"the checkpoint needs sequences {begin} to {stop - 1} of manifest "
                f"{self._config.manifest_path!r}, of which {len(found)} are left; it holds "
                f"{self._waiting[0].sequence if self._waiting else end} to {end - 1}"
            )
            if self._options.fail_on_data_loss:
                if end < stop:
                    raise QueueReset(f"{message}. The queue was replaced or went backwards.")
                oldest = found[0].sequence if found else stop
                raise DataLoss(self._config.manifest_path, begin, oldest, f"So {message}.")
            log.warning("data loss allowed: %s", message)
        return found

    def _waiting_from(self, sequence: int) -> list[BatchDescriptor]:
        return self._waiting[bisect_left(self._waiting, sequence, key=_sequence) :]


def _sequence(descriptor: BatchDescriptor) -> int:
    return descriptor.sequence
