"""The driver's part of a write to a topic: visible in all partitions, or in none."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from functools import partial

from buffer_sink.decision import Expired
from buffer_sink.lifetime import Expiry, Lifetimes
from buffer_sink.messages import Group, UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_sink.topic_write import TopicWrite
from opendata_buffer import metrics
from opendata_buffer.broker.network import Network
from opendata_buffer.broker.yielding_queue import YieldingQueue
from opendata_buffer.concurrency import in_parallel
from opendata_buffer.errors import (
    CommitStateUnknown,
    Drained,
    OpenDataBufferError,
    TransientStorageError,
)
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Store
from opendata_buffer.topic.topic import Topic
from opendata_buffer.transactions.coordinator import Attempt, TransactionCoordinator

__all__ = ["TopicCommitter"]

log = logging.getLogger(__name__)


class TopicCommitter:
    """Appends groups of uploads to the partitions of one topic.

    :mod:`opendata_buffer.transactions.coordinator` is the protocol; here is what a write has of
    its own:
    uploads that grow old, and partitions that leave.

    Args:
        store: Where the topic is.
        options: The sink's options.
        runtime: Clocks, names and threads.
        network: How brokers are reached, one for each partition; WebSockets by default.
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
        self._lifetimes = Lifetimes(
            store, options.gc_grace_period_ms, options.max_write_duration_ms, runtime
        )
        self._coordinator = TransactionCoordinator(
            store, options.queue, self._queue_of, runtime, ahead_ms=options.gc_grace_period_ms
        )
        self._queues: dict[str, YieldingQueue] = {}

    def append(self, group: Group | None) -> bool:
        """Append a group, unless it was committed before.

        A group without uploads ends what an earlier run of its app left, and is nothing else.

        Returns:
            False when there was nothing to append.

        Raises:
            InvalidInput: The group's app id belongs to another query; nothing is visible.
            Superseded: Another run of the app has begun to write; nothing is visible.
            Drained: A partition has left the topic since the write was planned; nothing is
                visible, and a repeated write goes to the others.
            TransientStorageError: Uploads are too old or gone, storage failed, or nobody can
                tell whether the group was committed; the text says which.
            OpenDataBufferError: As :meth:`.Queue.append`; nothing is visible, unless the text
                says that it is committed.
        """
        if group is None or group.topic is None:
            return False
        topic, txn = group.topic, group.topic.transaction(group.transaction)
        if not group.uploads:
            if group.transaction is not None:
                self._coordinator.recover(txn.app, group.query, topic.names)
            return False
        try:
            return self._append(group, topic, txn)
        finally:
            if group.query is None:
                # A write outside of a query may be all that its process does, so the markers
                # learn now how far the queues got (failure F4), and not within the next minute.
                for queue in self._queues.values():
                    queue.close()

    def disconnect(self) -> None:
        """End connections that outlive an append; the next one makes what it needs."""
        for queue in self._queues.values():
            queue.disconnect()

    def _append(self, group: Group, topic: TopicWrite, txn: Transaction) -> bool:
        if not self._coordinator.begin(txn, group.query, topic.names):
            self._drop_repeat(group, txn)
            return False
        uploads: defaultdict[str, list[UploadedBatch]] = defaultdict(list)
        for upload in group.uploads:
            assert upload.partition is not None
            uploads[upload.partition].append(upload)
        attempt = Attempt(
            txn,
            topic.producer,
            {name: each[-1].clock + 1 for name, each in uploads.items()},
            group.query,
        )
        since = self._append_pending(group, attempt, uploads)
        if not self._coordinator.decide(attempt):
            self._drop_repeat(group, txn)
            return False
        self._settle(attempt, since, group)
        log.info(
            "%s: %d records in %d batches in %d partitions",
            txn, group.records, len(group.uploads), len(uploads),
        )  # fmt: skip
        if group.transaction is None:
            self._coordinator.forget(txn.app)  # nobody repeats this write
        return True

    def _append_pending(
        self, group: Group, attempt: Attempt, uploads: dict[str, list[UploadedBatch]]
    ) -> dict[str, int]:
        """Append to all partitions at once. Returns where each partition's part begins."""
        since: dict[str, int] = {}

        def append(name: str) -> None:
            since[name] = self._append_part(name, replace(group, uploads=tuple(uploads[name])))

        def prepare(name: str) -> None:
            self._coordinator.prepare(attempt, name)

        steps = [partial(step, name) for step in (append, prepare) for name in uploads]
        try:
            in_parallel(self._runtime, lambda step: step(), steps)
            return since
        except OpenDataBufferError as error:
            # No record names the attempt, and none will.
            self._coordinator.abandon(attempt)
            if isinstance(error, CommitStateUnknown):
                raise TransientStorageError(
                    f"{attempt.txn} was not committed: it could not be written to all partitions "
                    f"({error.reason}, {error.key!r}). Nothing of it is visible; write it again."
                ) from error
            if isinstance(error, Drained):
                error.add_note("Nothing is visible. Start the query again: it uses the others.")
            raise

    def _append_part(self, name: str, part: Group) -> int:
        """Append one partition's part while its uploads are safe (failure F5)."""
        queue = self._queue_of(name)
        while True:
            expiry = self._lifetimes.expiry(part)

            def guard(before: Manifest, expiry: Expiry = expiry) -> Expired | None:
                # Asked on each attempt: the process may have been paused since the last one.
                return Expired() if expiry.is_over(self._runtime) else None

            outcome = queue.append(part.entries, guard=guard)
            if not isinstance(outcome, Expired):
                self._check_late(part, expiry)
                return outcome

    def _check_late(self, part: Group, expiry: Expiry) -> None:
        """Refuse a part that landed after its uploads had expired, if some of them are gone.

        They are queued now, so what is still there after the collectors' delay stays.
        """
        if not expiry.is_over(self._runtime):
            return
        self._lifetimes.outwait_collector()
        if self._lifetimes.oldest_ms(each.location for each in part.uploads) is None:
            raise self._lifetimes.too_old()

    def _settle(self, attempt: Attempt, since: dict[str, int], group: Group) -> None:
        try:
            self._coordinator.complete(attempt, since)
        except OpenDataBufferError as error:
            again = (
                "Start the query again"
                if group.transaction is not None
                else "Run 'opendata-buffer transactions abort' on the topic"
            )
            error.add_note(
                f"{attempt.txn} is committed, and not visible in all partitions yet. {again}: "
                "that completes it. Do not write it again."
            )
            raise

    def _drop_repeat(self, group: Group, txn: Transaction) -> None:
        metrics.write_repeats_dropped.add(len(group.uploads))
        log.warning(
            "batch %d of app %s was committed before: %d records in %d batches are not appended "
            "again. After a restart of its query this is right; otherwise two writers share the "
            "txnAppId.",
            txn.batch, txn.app, group.records, len(group.uploads),
        )  # fmt: skip

    def _queue_of(self, name: str) -> YieldingQueue:
        # First use in this process: a store without compare-and-swap (failure F12) is refused,
        # and so is a manifest that was lost or restored from an old copy (failure F4).
        found = self._queues.get(name)
        if found is None:
            config = Topic.config_of(name, self._config)
            claim = claim_for_writing(self._store, config, runtime=self._runtime)
            found = YieldingQueue(
                self._store,
                config,
                runtime=self._runtime,
                claim=claim,
                broker=self._broker,
                network=self._network,
            )
            self._queues[name] = found
        return found
