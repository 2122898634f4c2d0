"""The driver's side of a stream: positions in, positions and plans out. No Spark in it.

One object lives for one run of one query and owns the queue's consumer. Every answer is a
function of the offsets Spark hands over and of the manifest; what is kept between calls only
saves requests. So a replay after a crash, which calls :meth:`plan` first, needs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from buffer_source.measures import Measures
from buffer_source.offsets import SourceOffset
from buffer_source.options import EARLIEST, LATEST, SourceOptions
from buffer_source.planner import Limits, admit, pack
from buffer_source.progress import CommitLog
from opendata_buffer.consumer import Consumer
from opendata_buffer.descriptors import BatchDescriptor
from opendata_buffer.errors import (
    Conflict,
    DataLoss,
    InvalidInput,
    QueueReset,
    TransientStorageError,
)
from opendata_buffer.formats.keys import location_timestamp_ms
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Store
from opendata_buffer.transactions import TransactionFilter

__all__ = ["StreamDriver"]

log = logging.getLogger(__name__)

_ALL = 1 << 62


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
        self._peek = Queue(store, self._config, runtime=runtime, role="consumer")
        self._measures = Measures(
            store,
            self._config.data_path_prefix,
            runtime=runtime,
            concurrency=options.fetch_concurrency,
        )
        self._log = CommitLog()
        self._consumer: Consumer | None = None
        self._acked = 0
        """Everything below was acknowledged by this run."""
        self._waiting: list[BatchDescriptor] = []
        """Contiguous entries that were handed out and not acknowledged."""
        self._target: int | None = None
        self._polled_at: float | None = None
        self._position = 0

    def prepare_available_now(self) -> None:
        """Freeze the end of the run: what is queued now, and nothing later."""
        manifest = self._peek.read()
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
        limits = Limits(
            None if unlimited else self._options.max_batches,
            None if unlimited else self._options.max_bytes,
            None if unlimited else self._options.max_records,
        )
        waiting = self._from(begin, limits.batches)
        if waiting and waiting[0].sequence > begin:
            base = begin = self._passed_by(begin, waiting[0].sequence)
        if self._target is not None:
            waiting = waiting[: max(0, self._target - begin)]
        count = admit(waiting, limits, self._measures.sizes, self._measures.records)
        self._position = begin + count
        if count == 0 and start is not None:
            return start
        transactions = self._filter(start)
        for each in waiting[:count]:
            transactions.offer(each.sequence, each.location)
        return SourceOffset(begin + count, base, transactions.to_dict())

    def plan(
        self, start: SourceOffset | None, end: SourceOffset
    ) -> list[tuple[BatchDescriptor, ...]]:
        """The tasks of the micro-batch from ``start`` to ``end``; equal for equal arguments.

        Repeats of a transaction that was read already are left out.

        Raises:
            Fenced: Another consumer took the queue.
            DataLoss, QueueReset: The queue does not have these entries any more.
        """
        begin = end.begin_of(start)
        self._log.planned(start)
        if end.next <= begin:
            return []
        self._ensure(start, begin)
        batches = self._between(begin, end.next)
        transactions = self._filter(start)
        passed = [each for each in batches if transactions.offer(each.sequence, each.location)]
        if len(passed) < len(batches):
            log.info(
                "left out %d of %d batches: a writer repeated a transaction that was read already",
                len(batches) - len(passed),
                len(batches),
            )
        return pack(
            passed,
            self._measures.estimates(passed),
            self._options.parallelism,
            self._options.min_partitions,
        )

    def commit(self, end: SourceOffset) -> None:
        """Everything below ``end`` is safe with Spark: let it leave the queue.

        Cumulative and repeatable. A store that does not answer is no failure here: the next
        commit makes up for it.

        Raises:
            Fenced: Another consumer took the queue.
        """
        self._log.committed(end)
        self._ensure(end, end.next)
        self._acknowledge(end)

    def report(self) -> dict[str, Any] | None:
        """How far the queue reaches beyond what the last call returned; no request is made."""
        if self._consumer is None:
            return None
        behind = self._waiting_from(self._position)
        lag_ms = 0
        if behind:
            written = location_timestamp_ms(behind[0].location)
            lag_ms = 0 if written is None else max(0, self._runtime.now_ms() - written)
        newest = self._waiting[-1].sequence + 1 if self._waiting else self._position
        return {"v": 1, "next": newest, "backlogBatches": len(behind), "lagMs": lag_ms}

    def stop(self) -> None:
        """Stop the collector and let the queue go; acknowledges nothing."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _resolve(self, start: SourceOffset | None) -> tuple[int, int]:
        """Where the next micro-batch begins, and the base that goes with it."""
        if start is not None:
            self._ensure(start, start.next)
            return (start.next, start.base) if self._rebased is None else (self._rebased,) * 2
        self._ensure(None, 0)
        if self._base is None:
            self._base = self._first_position()
        return self._base, self._base

    def _first_position(self) -> int:
        manifest = self._peek.read() or Manifest.empty()
        wanted = self._options.starting_offsets
        if wanted == EARLIEST:
            return manifest.first_sequence
        end = manifest.next_sequence
        if wanted == LATEST:
            return end if self._target is None else min(end, self._target)
        position = int(wanted)
        if position > end:
            raise InvalidInput(
                f"option startingOffsets is {position} and manifest {self._peek.key!r} ends at "
                f"{end - 1}: use a sequence up to {end}, 'earliest' or 'latest'"
            )
        if position < manifest.first_sequence:
            return self._passed_by(position, manifest.first_sequence)
        return position

    def _ensure(self, start: SourceOffset | None, position: int) -> Consumer:
        """The consumer; claimed at the first offset Spark hands over, which is on record."""
        if self._consumer is None:
            if start is not None:
                manifest = self._peek.read() or Manifest.empty()
                if start.next > manifest.next_sequence:
                    self._went_backwards(start.next, manifest)
                    start, self._rebased = None, manifest.first_sequence
            last = start.next - 1 if start is not None and start.next > 0 else None
            self._consumer = Consumer(
                self._config,
                last,
                store=self._store,
                runtime=self._runtime,
                allow_data_loss=not self._options.fail_on_data_loss,
            )
            self._acked = 0 if last is None else last + 1
        return self._consumer

    def _acknowledge(self, end: SourceOffset) -> None:
        consumer = self._consumer
        if consumer is None or end.next <= self._acked or self._rebased is not None:
            return
        if self._waiting_end < end.next:
            self._pull(end.next)
        try:
            consumer.ack_through(end.next - 1)
        except (TransientStorageError, Conflict) as error:
            log.warning("acknowledging through %d is put off: %s", end.next - 1, error)
            return
        self._acked = end.next
        del self._waiting[: len(self._waiting) - len(self._waiting_from(end.next))]
        self._measures.forget_before(end.next)

    def _filter(self, start: SourceOffset | None) -> TransactionFilter:
        prefix = self._config.data_path_prefix
        if start is None or not start.transactions:
            return TransactionFilter(prefix)
        return TransactionFilter.from_dict(start.transactions, prefix)

    def _from(self, begin: int, most: int | None) -> list[BatchDescriptor]:
        """Entries that wait from ``begin`` on, at least as many as a trigger may take."""
        waiting = self._waiting_from(begin)
        if self._target is not None and begin >= self._target:
            return []
        if most is None or len(waiting) < most:
            if not waiting and self._target is None:
                self._await_poll()
            self._pull(_ALL if most is None else begin + most)
            waiting = self._waiting_from(begin)
        return waiting

    def _await_poll(self) -> None:
        """Let ``pollIntervalMs`` pass between two looks at an idle queue.

        Waits and then looks, rather than answering from the last look: an answer older than
        the call would let ``processAllAvailable()`` return before it saw what was there.
        """
        if self._polled_at is not None:
            due = self._polled_at + self._options.poll_interval_ms / 1000
            left = due - self._runtime.monotonic()
            if left > 0:
                self._runtime.sleep(left)

    def _pull(self, stop: int) -> None:
        """Have the consumer hand out entries below ``stop``, as far as there are any."""
        assert self._consumer is not None
        wanted = min(stop - self._waiting_end, _ALL) if self._waiting else _ALL
        got = self._consumer.next_descriptors(wanted)
        self._waiting.extend(got)
        self._polled_at = None if got else self._runtime.monotonic()
