"""Measure a queue or a topic again and again, at a fixed cost, for a monitoring system.

``status`` answers a person: it lists objects, samples records, and asks the broker. This module
answers a program that asks twice a minute for months, so it makes a bounded number of requests:

* for a queue it reads the owner marker, the manifest (not transferred again if it did not change)
  and the claims of workers, and lists one page of the quarantine;
* for a log it also reads the marker again, the index, and one small object per reader;
* for a topic it also reads the description.

Nothing is changed, and no consumer notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from opendata_buffer import metrics
from opendata_buffer.admin.broker_status import read_claims
from opendata_buffer.admin.queue_status import claim_of, see_queue
from opendata_buffer.admin.readers import ReaderStatus, readers_of
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.transactions import open_in
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import CorruptData, DataError
from opendata_buffer.hints import Surface
from opendata_buffer.quarantine import quarantined_names
from opendata_buffer.runtime import in_parallel

_LISTED = 1_000  # objects of a quarantine that are listed: one page


@dataclass(frozen=True, kw_only=True)
class Level:
    """One queue, or one partition of a topic, at one moment. Sequences and counts are of batches.

    In a log, those batches wait that the reader which is furthest behind has not acknowledged.
    """

    queue: str  # the URL of the manifest, as the library's metrics label it
    partition: str  # its name in the topic; empty for a queue
    is_draining: bool
    waiting: int = 0
    oldest_seconds: float = 0.0  # 0 if nothing waits
    next_sequence: int = 0
    epoch: int = 0
    manifest_bytes: int = 0
    manifest_share: float = 0.0  # of the size beyond which appends are refused
    refused: str = ""  # why producers, consumers or workers fail; empty if they do not
    is_measured: bool = True  # False if the manifest cannot be read: all numbers are 0
    readers: tuple[ReaderStatus, ...] = ()
    claimed: int | None = None  # by workers; None if that cannot be read
    quarantined: int = 0  # at most 500 or 1,000 are counted
    transactions: int = 0  # that are open
    oldest_transaction_seconds: float = 0.0  # 0 if none is open


class LevelReader:
    """Reads the levels of a queue or a topic. Remembers unchanged manifests. Not thread-safe.

    After an error, make another one: the queue may have been repaired or replaced.

    Args:
        target: The queue or the topic.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._readers: dict[str, ReadOnlyReader] = {}

    def read(self) -> list[Level]:
        """Read the queue, or all partitions of the topic at the same time.

        Returns:
            A level for the queue, or for each partition that is in the topic now.

        Raises:
            InvalidInput: The queue does not exist.
            CorruptData: The description of the topic cannot be read.
            StorageError: The store did not answer.
        """
        target = self._target
        draining: Mapping[str, bool] = {}
        if target.topic is not None:
            description = target.topic.read()
            draining = {name: name not in description.active for name in description.names}
        queues = [target.queue(name) for name in draining] if draining else [target]
        for queue in queues:
            self._readers.setdefault(queue.prefix, queue.reader())
        return in_parallel(
            target.runtime,
            lambda queue: self._level(queue, is_draining=draining.get(queue.prefix, False)),
            queues,
        )

    def _level(self, queue: Target, *, is_draining: bool) -> Level:
        known = Level(
            queue=metrics.queue_label(queue.store.url, queue.config.manifest_path),
            partition="" if self._target.topic is None else queue.prefix,
            is_draining=is_draining,
        )
        try:
            return self._measured(queue, known)
        except DataError as error:
            # One damaged partition must not hide the others. Its next read begins without memory.
            self._readers.pop(queue.prefix)
            return replace(known, refused=error.text(Surface.SHELL), is_measured=False)

    def _measured(self, queue: Target, known: Level) -> Level:
        is_partition = bool(known.partition)
        claim, reader = claim_of(queue), self._readers[queue.prefix]
        # A partition has no manifest before its first batch.
        found = reader.find() if is_partition else reader.manifest()
        manifest, view, refused, _ = see_queue(queue, claim, found)
        now_ms = queue.runtime.now_ms()
        waiting, oldest_s = manifest.entry_count, manifest.age_s(now_ms)
        readers: tuple[ReaderStatus, ...] = ()
        if view is not None:
            unreadable: list[CorruptData] = []
            readers = tuple(readers_of(queue, view, unreadable=unreadable.append))
            refused = refused or "".join(error.text(Surface.SHELL) for error in unreadable[:1])
            waiting = max((each.lag for each in readers), default=0)
            oldest_s = max((each.oldest_unread_seconds or 0.0 for each in readers), default=0.0)
        claimed: int | None = None
        try:
            claims = read_claims(queue)
            claimed = 0 if claims is None else claims.held
        except CorruptData as error:
            refused = refused or error.text(Surface.SHELL)
        transactions = open_in(manifest, queue.prefix, now_ms)
        return replace(
            known,
            waiting=waiting,
            oldest_seconds=max(0.0, oldest_s or 0.0),
            next_sequence=manifest.next_sequence,
            epoch=0 if manifest.sealed else manifest.epoch,
            manifest_bytes=manifest.size,
            manifest_share=manifest.size / queue.config.max_manifest_bytes,
            refused=refused,
            readers=readers,
            claimed=claimed,
            quarantined=len(quarantined_names(queue.store, queue.prefix, limit=_LISTED)),
            transactions=len(transactions),
            oldest_transaction_seconds=max(
                (each.age_seconds or 0.0 for each in transactions), default=0.0
            ),
        )
