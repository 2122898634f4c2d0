"""The driver's part of a write: one compare-and-swap that makes all of it visible, once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from buffer_sink.decision import (
    APPEND,
    AlreadyDone,
    Append,
    Decision,
    Expired,
    Kind,
    decide,
)
from buffer_sink.lifetime import Expiry, Lifetimes
from buffer_sink.messages import Group
from buffer_sink.options import SinkOptions
from buffer_sink.records import CommitRecords
from opendata_buffer import metrics
from opendata_buffer.broker.network import Network
from opendata_buffer.broker.yielding_queue import YieldingQueue
from opendata_buffer.errors import CommitStateUnknown
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store

__all__ = ["WriteCommitter"]

log = logging.getLogger(__name__)


class WriteCommitter:
    """Appends groups of uploads to one queue. See :mod:`buffer_sink.decision` for the protocol.

    Args:
        store: Where queue and batches live.
        options: The sink's options.
        runtime: Clocks, names and threads.
        network: How brokers are reached; WebSockets by default.
    """

    def __init__(
        self,
        store: Store,
        options: SinkOptions,
        runtime: Runtime,
        network: Network | None = None,
    ) -> None:
        self._store = store
        self._config = options.queue
        self._broker = options.broker
        self._network = network
        self._runtime = runtime
        self._grace_ms = options.gc_grace_period_ms
        self._lifetimes = Lifetimes(
            store, options.gc_grace_period_ms, options.max_write_duration_ms, runtime
        )
        self._records = CommitRecords(store, options.queue, runtime)
        self._opened: YieldingQueue | None = None

    @property
    def _queue(self) -> YieldingQueue:
        # First use in this process: a store without compare-and-swap (failure F12), or a prefix
        # of another queue, whose collector would delete our batches (failure F7), is refused.
        if self._opened is None:
            claim = claim_for_writing(self._store, self._config, runtime=self._runtime)
            self._opened = YieldingQueue(
                self._store,
                self._config,
                runtime=self._runtime,
                claim=claim,
                broker=self._broker,
                network=self._network,
            )
        return self._opened

    def append(self, group: Group | None) -> bool:
        """Append a group, unless it is in the queue or was there before.

        Returns:
            False when there was nothing to append.

        Raises:
            InvalidInput: The group's app id belongs to another query; nothing was appended.
            CommitStateUnknown: It may or may not be in the queue. Append it again.
            TransientStorageError: Uploads are so old that the collector may delete them before
                they are in the queue, or has deleted them; write all of them again.
            OpenDataBufferError: As :meth:`.Queue.append`; nothing was appended.
        """
        if group is None or not group.uploads:
            return False
        try:
            if group.transaction is not None:
                return self._append_once(group, group.transaction)
            self._append_if(group, group.entries, lambda before: APPEND)
            return True
        except CommitStateUnknown as error:
            # The batch may have landed and be gone again. Only an append from the start can go
            # on from here; it puts a separator in front, so the reader tells the two apart.
            if group.transaction is not None:
                error.add_note(
                    f"Start the query again: Spark repeats the batch {group.transaction.batch} "
                    "under the same identity, and the Spark source of this library drops the "
                    "repeat."
                )
            raise
        finally:
            if group.query is None and self._opened is not None:
                # A write outside of a query may be all that its process does, so the marker
                # learns now how far the queue got (failure F4), and not within the next minute.
                self._opened.close()

    def disconnect(self) -> None:
        """End connections that outlive an append; the next one makes what it needs."""
        if self._opened is not None:
            self._opened.disconnect()

    def _append_once(self, group: Group, transaction: Transaction) -> bool:
        queue = self._queue
        record = self._records.claim(transaction.app, group.query)

        def decision(before: Manifest) -> Decision:
            return decide(
                before, record, transaction, prefix=self._config.data_path_prefix, key=queue.key
            )

        entries: list[NewEntry] = group.entries
        accepted: tuple[Kind, ...] = (Append,)
        while True:
            outcome = self._append_if(group, entries, decision, accepted)
            if isinstance(outcome, int):
                break
            if isinstance(outcome, AlreadyDone):
                if not self._is_torn(outcome.queued):
                    self._drop_repeat(group, transaction)
                    return False
                log.warning("%s is queued, but its objects are gone: again", transaction)
            accepted = (*accepted, type(outcome))
            entries = [self._separator(), *group.entries]
        log.info(
            "%s: %d records in %d batches at sequence %d",
            transaction, group.records, len(group.uploads), outcome,
        )  # fmt: skip
        self._records.raise_to(
            transaction.app, transaction.batch, outcome + len(entries), group.query
        )
        return True

    def _append_if(
        self,
        group: Group,
        entries: Sequence[NewEntry],
        decision: Callable[[Manifest], Decision],
        accepted: tuple[Kind, ...] = (Append,),
    ) -> int | Decision:
        """Append while the uploads are safe and the decision is an accepted one.

        Args:
            group: Whose uploads the entries name.
            entries: What to append.
            decision: Asked of the manifest that is about to be replaced.
            accepted: Kinds of decisions that let the append go on.

        Returns:
            The first sequence, or the decision that stopped the append.
        """
        while True:
            expiry = self._lifetimes.expiry(group)

            def guard(before: Manifest, expiry: Expiry = expiry) -> Decision | None:
                # Asked on each attempt: the process may have been paused since the last one.
                if expiry.is_over(self._runtime):
                    return Expired()
                found = decision(before)
                return None if isinstance(found, accepted) else found

            outcome: int | Decision = self._queue.append(entries, guard=guard)
            if isinstance(outcome, int):
                self._check_late(group, expiry, outcome + len(entries))
            if not isinstance(outcome, Expired):
                return outcome

    def _check_late(self, group: Group, expiry: Expiry, next_sequence: int) -> None:
        """Notice an append that landed after its uploads had expired (failure F5).

        That takes a process that is frozen between the last look at the clock and the write, for
        long, while nobody else writes the manifest. A collector that had read the manifest
        before may then delete the uploads for another quarter of the grace period. What is there
        after that is queued and stays.
        """
        if not expiry.is_over(self._runtime):
            return
        locations = tuple(each.location for each in group.uploads)
        self._lifetimes.outwait_collector()
        if self._lifetimes.oldest_ms(locations) is None:
            raise CommitStateUnknown(
                self._queue.key,
                next_sequence - len(locations),
                locations,
                next_sequence,
                "it landed later than the collector's grace period allows, and objects are gone",
            )

    def _is_torn(self, queued: tuple[str, ...]) -> bool:
        """Whether queued batches of a transaction have lost their objects: it landed too late.

        Then they must be written again. The reader cannot deliver the first ones; once they are
        skipped there, its filter passes the others (``TransactionFilter.skip``).

        Asked of the manifest that shows them, and of a listing made after it: a reader may have
        passed them by at any time since, and a later manifest would not say how. If it delivered
        them, and they were collected since, the others are a repeat that its filter drops.

        Args:
            queued: Locations of the transaction in the manifest. None of them means that the
                record, or a later batch of the app, tells that this one was committed; a record
                is written only once all objects outlived the collector.
        """
        if not queued:
            return False
        oldest_ms = self._lifetimes.oldest_ms(queued)
        if oldest_ms is not None and oldest_ms > self._grace_ms:
            self._lifetimes.outwait_collector()
            oldest_ms = self._lifetimes.oldest_ms(queued)
        return oldest_ms is None

    def _drop_repeat(self, group: Group, transaction: Transaction) -> None:
        metrics.write_repeats_dropped.add(len(group.uploads))
        log.warning(
            "batch %d of app %s was committed before: %d records in %d batches are not appended "
            "again. After a restart of its query this is right; otherwise two writers share the "
            "txnAppId.",
            transaction.batch, transaction.app, group.records, len(group.uploads),
        )  # fmt: skip

    def _separator(self) -> NewEntry:
        """An empty batch without identity: a gap between two groups of one batch."""
        location = batch_key(self._config.data_path_prefix, self._runtime.ulid())
        self._store.put(location, encode_batch([]))
        return NewEntry(location)
