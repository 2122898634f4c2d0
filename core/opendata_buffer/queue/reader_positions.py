"""Keep the position of each named reader of a log.

A log keeps its batches for several readers, like a Kafka topic for its consumer groups. Every
reader has a name and reads at its own pace. How far it got is in an object of its own,
``<prefix>/_readers/<name>.json``::

    {"version": 1, "queue": "01J5...", "next": 4711, "epoch": 3, "host": "worker-7",
     "process": 4711, "program": "Spark", "since_ms": 1767225600000, "moved_ms": 1767225700000}

``next`` is the first sequence that the reader has not acknowledged. ``read`` is there if the
consumer has read further and cannot acknowledge that yet, such as an idle Spark query; it only
counts for the reader's lag. A consumer that starts under this name raises ``epoch``, which fences
the previous consumer of the same name. Readers with other names do not notice, because they never
write the same object.

The index of the log lists the names of its readers, and holds the log start offset ("floor"): the
collector raises it to the lowest position of all readers and deletes what lies before it. Index and
positions are different objects, so the order of reads and writes matters (decision 0038):

* A reader writes its position first and then its name into the index. A collector that finds the
  name therefore also finds the position.
* The collector reads the index, then the positions, and then writes the index on condition that no
  one has changed it. If a reader registered in between, the collector loses this race and starts
  again.

Things that can go wrong:

* A position is missing although the index has the name, because ``readers delete`` was killed
  between its two writes, or an operator deleted the object. Such a reader counts as being at the
  floor, and expires like any other (failure F44). See :func:`read_positions`.
* A position is from a queue that was deleted and created again. Its ``queue`` is not the id of this
  queue, so it counts as missing.
* A reader is idle for a long time. It expires by ``moved_ms``, so an idle reader rewrites its
  position from time to time (:mod:`opendata_buffer.queue.reader_queue`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from opendata_buffer import errors
from opendata_buffer.config import QueueConfig
from opendata_buffer.hints import Action, Hint
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.queue.consumer_note import process_runs
from opendata_buffer.queue.hints import queue_name
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.sidecar import Sidecar

_POSITION = Sidecar("the position of a reader", Hint(Action.RESTORE_POSITION, readers=("NAME",)))

_LIVE_MS = 5 * 60 * 1000
"""Milliseconds for which a reader on another host counts as running after its last write."""


@dataclass(frozen=True, slots=True)
class ReaderPosition:
    """The place of a reader, and its consumer. Times are milliseconds since the Unix epoch.

    Attributes:
        queue_id: Id of the queue. A position in another queue is not valid here.
        next: The first sequence that is not acknowledged.
        epoch: Raised by each consumer that starts. 0 until the first consumer of the reader starts.
        host: Host of the consumer.
        process: Number of its process; 0 after the consumer was closed.
        program: The program, as operators know it.
        since_ms: When the consumer started, in milliseconds since the Unix epoch.
        moved_ms: When this object was last written, in milliseconds since the Unix epoch.
        read: The first sequence that the consumer has not read, if it has noted that; else 0. It
            keeps no batches, and a consumer that starts does not continue there.
        v1: The prefix of a v1 consumer's queue; None for all other readers. ``next`` and ``epoch``
            are then those of that queue, as they were last seen.
        fed: The sequence up to which that queue was fed, as it was last seen.
        others: Fields of later releases.
    """

    queue_id: str
    next: int
    epoch: int
    host: str = ""
    process: int = 0
    program: str = ""
    since_ms: int = 0
    moved_ms: int = 0
    read: int = 0
    v1: str | None = None
    fed: int | None = None
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the bytes of the object."""
        return _POSITION.encode_value(self, queue=self.queue_id, queue_id=None)

    @classmethod
    def from_json(cls, data: bytes, kind: Sidecar = _POSITION) -> ReaderPosition:
        """Parse the bytes of a position.

        Args:
            data: The whole object.
            kind: The sidecar, whose remedy ends an error.

        Returns:
            The position. Unknown fields are kept.

        Raises:
            CorruptData: They are not a position, or a later version wrote them.
        """
        found = kind.decode(data)
        return found.into(cls, queue_id=found.text("queue"))

    @property
    def waits_from(self) -> int:
        """The first sequence that the reader has not read, for its lag."""
        return max(self.next, self.read)

    @property
    def is_missing(self) -> bool:
        """Return whether this stands for a missing position; see :func:`read_positions`."""
        return self.since_ms == 0

    def may_run(self, now_ms: int) -> bool:
        """Look for the reader's consumer.

        On this host, look for its process. For another host, go by the time of the last write.

        Args:
            now_ms: The current time, in milliseconds since the Unix epoch.

        Returns:
            Whether the consumer may still run.
        """
        if not self.process:
            return False
        if self.host != os.uname().nodename:
            return now_ms - self.moved_ms < _LIVE_MS
        return process_runs(self.process)


def readers_folder(config: QueueConfig) -> str:
    """Return the folder of the positions, with a slash at the end."""
    return f"{config.data_path_prefix}/_readers/"


def position_key(config: QueueConfig, name: str) -> str:
    """Return the key of a reader's position."""
    return f"{readers_folder(config)}{name}.json"


def stored_readers(log_: Log) -> dict[str, int]:
    """List the readers that have a position, also those that have expired. Makes one request.

    Args:
        log_: The log.

    Returns:
        When each position was stored, in milliseconds by the store's clock, by reader.
    """
    folder = readers_folder(log_.config)
    files = {info.key[len(folder) :]: info for info in log_.store.list(folder).objects}
    return {
        name.removesuffix(".json"): info.last_modified_ms
        for name, info in files.items()
        if "/" not in name
    }


def stored_position(log_: Log, name: str, queue_id: str) -> ReaderPosition | None:
    """Read the position of a reader that the index may not name.

    Args:
        log_: The log.
        name: The reader.
        queue_id: The id of the queue.

    Returns:
        None if the reader has no position in this queue.

    Raises:
        CorruptData: The position cannot be read.
        StorageError: The store did not answer.
    """
    found = position_object(log_, name).read()
    if isinstance(found, ReaderPosition) and found.queue_id == queue_id:
        return found
    return None


def position_object(log_: Log, name: str) -> CasObject[ReaderPosition]:
    """Return the position of one reader as an object to read and change."""
    key = position_key(log_.config, name)
    queue = queue_name(log_.store.url, log_.config)
    kind = replace(_POSITION, remedy=Hint(Action.RESTORE_POSITION, queue, readers=(name,)))
    return CasObject(
        log_.store,
        key,
        decode=partial(ReaderPosition.from_json, kind=kind),
        encode=ReaderPosition.to_json,
        runtime=log_.runtime,
        settings=log_.config,
        sidecar=kind,
    )


def read_positions(
    log_: Log, index: LogIndex, unreadable: Callable[[errors.CorruptData], None] | None = None
) -> dict[str, ReaderPosition]:
    """Read the positions of all readers in the index. Costs one read for each reader.

    A reader whose position is missing may need everything that is kept, so it counts as being at
    the floor. It counts as having moved at the time when the collector first missed its position,
    which the index records, or else now. So it holds the batches that it needs, and expires like
    any other reader (failure F44).

    Args:
        log_: The log.
        index: The index as it was read before.
        unreadable: Called with the error of each position that cannot be read. That reader is left
            out.

    Returns:
        The positions by name.

    Raises:
        CorruptData: A position cannot be read, and ``unreadable`` is not given.
        StorageError: The store did not answer.
    """
    found = {}
    for name in index.readers:
        try:
            position = position_object(log_, name).read()
        except errors.CorruptData as error:
            if unreadable is None:
                raise
            unreadable(error)
            continue
        if not isinstance(position, ReaderPosition) or position.queue_id != index.queue_id:
            moved_ms = index.missing.get(name, log_.runtime.now_ms())
            position = ReaderPosition(index.queue_id, index.floor, 0, moved_ms=moved_ms)
        found[name] = position
    return found


def not_for_v1(name: str) -> errors.InvalidInput:
    """Return the error for a program or a reset that uses the name of a v1 consumer."""
    return errors.InvalidInput(
        f"reader {name!r} is a v1 consumer, whose queue only moves forward: it cannot be reset, "
        "and no other consumer can have its name. To read again or to skip, delete it and add it "
        "again with another prefix."
    )
