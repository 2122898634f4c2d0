"""The commit of a write to a topic: visible in all its partitions, or in none.

:mod:`opendata_buffer.transactions.coordinator` is the protocol. What a write of the sink adds is
here: uploads that grow old, and partitions that leave the topic.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from functools import cached_property, partial

from buffer_sink.messages import Group, TopicWrite, UploadedBatch
from buffer_sink.queue_commit import UploadCommitter
from opendata_buffer.concurrency import in_parallel
from opendata_buffer.errors import (
    CommitStateUnknown,
    Drained,
    OpenDataBufferError,
    TransientStorageError,
)
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.queue.ownership import queue_hint
from opendata_buffer.queue.queue import Queue
from opendata_buffer.topic.topic import Topic
from opendata_buffer.transactions.coordinator import Attempt, TransactionCoordinator

log = logging.getLogger(__name__)


class TopicCommitter(UploadCommitter):
    """Appends groups of uploads to the partitions of one topic."""

    @cached_property
    def _coordinator(self) -> TransactionCoordinator:
        ahead_ms = self._ages.grace_ms
        return TransactionCoordinator(
            self._store, self._config, self._queue_of, self._runtime, ahead_ms=ahead_ms
        )

    def append(self, group: Group | None) -> bool:
        """Append a group, unless it was committed before.

        A group without uploads completes or rolls back what an earlier run of its app left
        undecided, and does nothing else.

        Returns:
            False when there was nothing to append.

        Raises:
            InvalidInput: The group's app id belongs to another query; nothing is visible.
            Superseded: Another run of the app has begun to write; nothing is visible.
            Drained: A partition has left the topic since the write was planned; nothing is
                visible, and a repeated write goes to the others.
            TransientStorageError: Uploads are too old or gone, storage failed, or the outcome is
                unknown; the text says which.
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
            return self._append_once(group, topic, txn)
        finally:
            self._close_after(group)

    def _append_once(self, group: Group, topic: TopicWrite, txn: Transaction) -> bool:
        if not self._coordinator.begin(txn, group.query, topic.names):
            return self._drop_repeat(group, txn)
        uploads: defaultdict[str, list[UploadedBatch]] = defaultdict(list)
        for upload in group.uploads:
            assert upload.partition is not None
            uploads[upload.partition].append(upload)
        intents = {name: each[-1].clock + 1 for name, each in uploads.items()}
        attempt = Attempt(txn, topic.producer, intents)
        since = self._append_pending(group, attempt, uploads)
        if not self._coordinator.decide(attempt):
            return self._drop_repeat(group, txn)
        self._complete(attempt, since, group)
        log.info(
            "%s: %d records in %d batches in %d partitions",
            txn, group.records, len(group.uploads), len(uploads),
        )  # fmt: skip
        if group.transaction is None:
            self._coordinator.forget(txn.app)  # this identity is never written again
        return True

    def _append_pending(
        self, group: Group, attempt: Attempt, uploads: dict[str, list[UploadedBatch]]
    ) -> dict[str, int]:
        """Append to all partitions at once. Returns the first sequence of each partition's part."""
        since: dict[str, int] = {}

        def append(name: str) -> None:
            part = replace(group, uploads=tuple(uploads[name]))
            since[name] = self._append_unexpired(
                self._queue_of(name),
                part,
                part.entries,
                lambda before: None,
                lambda sequence: self._ages.too_old(),
            )

        prepare = partial(self._coordinator.prepare, attempt)
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

    def _complete(self, attempt: Attempt, since: dict[str, int], group: Group) -> None:
        try:
            self._coordinator.complete(attempt, since)
        except OpenDataBufferError as error:
            words = f"{queue_hint(self._config.store, self._config)} {attempt.producer.hex()}"
            again = (
                "Start the query again"
                if group.transaction is not None
                else f"Run 'opendata-buffer abort {words}'"
            )
            error.add_note(
                f"{attempt.txn} is committed, and not visible in all partitions yet. {again}: "
                "that completes it. Do not write it again."
            )
            raise

    def _queue_of(self, name: str) -> Queue:
        return self._queue(Topic.config_of(name, self._config))
