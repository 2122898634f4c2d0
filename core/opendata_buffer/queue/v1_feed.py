"""Feed v1 consumers from a log: decide what to append to their queues, and append it.

A consumer of another language or of an older program knows only a manifest of v1, and removes what
it has read from it. On the log's own manifest it would take batches from all readers. So a v1
consumer that reads a log gets a manifest of its own, its *queue*, below a prefix of its own. The
processes of the log append the entries of the log to it, with the same locations. Nothing is
copied: the consumer fetches the log's own objects::

    ingest/_log.json             "v1": {"clickhouse": "clickhouse"}
    ingest/manifest              the log: entries up to 3100
    clickhouse/manifest          the queue: entries 2900 to 3100, of batches in ingest/
    ingest/_readers/clickhouse.json      "v1": "clickhouse", "next": 2900, "fed": 3101

**A sequence of the queue is the same sequence in the log.** So the queue's ``next_sequence`` says
how far it is fed, and it is in the same object as the entries. A feeder reads the queue, takes the
log's entries from there on, and appends them with one compare-and-swap. Any number of feeders may
do that at the same time, and each may die anywhere: every entry is appended once. If the answer to
a write is lost, the feeder reads the queue again.

**The front of the queue is the position of the reader.** Only the consumer removes entries, and
always the oldest ones, so the front only rises. A front that was read earlier is therefore a safe
lower bound for the collector. Feeders write it into the reader's position object, so that a
collector of an earlier release, which does not know about v1 consumers, deletes nothing they need.

The queue holds at most as many entries as a log's manifest, and is filled again as the consumer
reads. It is small even if the consumer is down for days.

Feeders run after each append (:mod:`opendata_buffer.queue.v1_feeding`), in each cycle of the
collector, and in ``opendata-buffer readers feed``.

Things that can go wrong:

* Another producer appends to the queue. Its entry takes the sequence of one of the log's. Feeders
  compare the last entry of the queue with the log's before they append.
* The queue is deleted, damaged, or restored from an old copy. Feeders remember how far it was.
* The log lacks entries that are next, because a v1 consumer removed them from the log (failure
  F42) or the reader has expired.

In each of these cases feeding stops for this reader, and nothing that it has not read is deleted
until it expires. ``status`` says why. Delete the reader, and add it again with another prefix.
The specification is ``tests/specification/V1Reader.tla``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from opendata_buffer import errors, outcomes
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import (
    SEALED_EPOCH,
    BatchDescriptor,
    Manifest,
    NewEntry,
    entry_bytes,
)
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.log_index import LogIndex
from opendata_buffer.queue.log_view import LogView
from opendata_buffer.queue.marker import Watermark
from opendata_buffer.queue.reader_positions import ReaderPosition, position_object
from opendata_buffer.queue.stored_manifest import manifest_object, read_manifest

log = logging.getLogger(__name__)

MOST_ENTRIES = 1_024
"""Largest number of entries in the queue of a v1 consumer."""
MOST_BYTES = 1024 * 1024
"""Size in bytes above which nothing more is appended. Every feed rewrites the queue."""
NOTE_MS = 60_000
"""The position of a reader that has everything is written again after this time."""
_DEADLINE_MS = 10_000


class _Stopped(Exception):
    """Nothing may be appended to the queue; the text says why. Never leaves this module."""


class _Gap(_Stopped):
    """The log has lost the next entry. The queue itself is as feeders have left it."""


@contextmanager
def _damage_stops() -> Iterator[None]:
    """Stop feeding a damaged queue. The advice about an ordinary queue does not help here."""
    try:
        yield
    except errors.CorruptManifest as error:
        raise _Stopped("it is damaged, or another program has overwritten it") from error


def v1_config(config: QueueConfig, prefix: str) -> QueueConfig:
    """Return the settings of a v1 consumer's queue, with a short deadline.

    Args:
        config: The settings of the log.
        prefix: The prefix of the queue.

    Returns:
        The settings.

    Raises:
        InvalidInput: The prefix cannot be used.
    """
    quick = QueueConfig(
        store=config.store,
        data_path_prefix=prefix,
        manifest_path=f"{prefix}/manifest",
        store_options=config.store_options,
    )
    return quick.with_timeout(min(_DEADLINE_MS, config.timeout_ms))


def room_in(queue: Manifest) -> int:
    """Return how many entries may be appended to a queue."""
    return 0 if queue.size >= MOST_BYTES else max(0, MOST_ENTRIES - queue.entry_count)


def check_feedable(queue: Manifest, reached: Watermark) -> None:
    """Check that a queue may be fed. Pure.

    Args:
        queue: The queue as it was read.
        reached: How far it was at least once.

    Raises:
        _Stopped: It went backwards, or was sealed.
    """
    if queue.epoch >= SEALED_EPOCH:
        raise _Stopped("it is closed, because 'readers delete' was interrupted: repeat that")
    if not reached.allows(queue):
        raise _Stopped(
            f"it was restored from an old copy, or another client replaced it: it ended at "
            f"{reached.next_sequence} with epoch {reached.epoch}, and now at "
            f"{queue.next_sequence} with epoch {queue.epoch}"
        )


def check_entries(queue: Manifest, found: Sequence[BatchDescriptor]) -> Sequence[BatchDescriptor]:
    """Compare a queue with the log, and return the entries that follow. Pure.

    Args:
        queue: The queue.
        found: Entries of the log from the last one in the queue on; without one in the queue, from
            the next one on.

    Returns:
        The entries that follow the queue.

    Raises:
        _Gap: The next entry is gone from the log.
        _Stopped: The last entry of the queue is not the log's.
    """
    if queue.entry_count and found:
        (last,) = queue.entries(queue.next_sequence - 1)
        if found[0].sequence == last.sequence:
            if found[0].location != last.location:
                raise _Stopped(
                    f"another producer writes to it: its sequence {last.sequence} is "
                    f"{last.location!r}, and in the log it is {found[0].location!r}"
                )
            found = found[1:]
    if found and found[0].sequence != queue.next_sequence:
        raise _Gap(
            f"sequences {queue.next_sequence} to {found[0].sequence - 1} are gone from the log"
        )
    return found


def fed(entries: Sequence[BatchDescriptor], queue: Manifest | None) -> Manifest | None:
    """Append entries of the log to a queue, as far as they follow it and fit. Pure.

    Args:
        entries: Entries of the log, in order.
        queue: The queue as it is; None if it does not exist.

    Returns:
        The queue as it should be: the same one if there is nothing to append.
    """
    if queue is None or queue.epoch >= SEALED_EPOCH:
        return queue
    following = [entry for entry in entries if entry.sequence >= queue.next_sequence]
    if not following or following[0].sequence != queue.next_sequence:
        return queue
    new, size = list[NewEntry](), queue.size
    for entry in following[: room_in(queue)]:
        if size >= MOST_BYTES:
            break
        new.append(NewEntry(entry.location, entry.metadata))
        size += entry_bytes(new[-1])
    return queue.append(new) if new else queue


def noted(
    before: ReaderPosition | None, prefix: str, queue: Manifest, end: int, now_ms: int
) -> ReaderPosition | None:
    """Write what was seen of a queue into the position of its reader. Pure.

    A reader moves if its front or its epoch rises. It also counts as moved while it has read
    everything: then it holds nothing, and must not expire.

    Args:
        before: The position as it is; None if it does not exist.
        prefix: The prefix of the queue.
        queue: The queue, as it was read at some time.
        end: The end of the log.
        now_ms: The current time, in milliseconds since the Unix epoch.

    Returns:
        The position as it should be: the same one if there is nothing to write.
    """
    if before is None or before.v1 != prefix:
        return before
    has_all = not queue.entry_count and queue.next_sequence >= end
    moved = queue.first_sequence > before.next or queue.epoch > before.epoch
    if moved or (has_all and now_ms - before.moved_ms >= NOTE_MS):
        before = replace(before, moved_ms=max(before.moved_ms, now_ms))
    elif queue.next_sequence <= (before.fed or 0):
        return before
    return replace(
        before,
        next=max(before.next, queue.first_sequence),
        epoch=max(before.epoch, queue.epoch),
        fed=max(before.fed or 0, queue.next_sequence),
    )


class Feeder:
    """Feeds the queue of one v1 consumer.

    Not thread-safe: the owner of this object must make its calls one after another.

    Args:
        log_: The log.
        name: The reader.
        prefix: The prefix of its queue.
    """

    def __init__(self, log_: Log, name: str, prefix: str) -> None:
        self.name = name
        self.prefix = prefix
        self._log = log_
        config = v1_config(log_.config, prefix)
        self.key = config.manifest_path
        """The key of the queue."""
        self._queue = manifest_object(log_.store, config, log_.runtime)
        self._position = position_object(log_, name)
        self._reached: Watermark | None = None
        self.fault = ""
        """Why feeding has stopped; empty if it has not."""
        self.is_sound = True
        """Whether only feeders and the consumer have changed the queue, as far as is known."""
        self.lost_race = False
        """Whether another feeder was faster in the last call of :meth:`feed`."""

    @property
    def queue(self) -> Manifest | None:
        """Return the queue as it was last seen."""
        return self._queue.last_seen

    def lacks(self, end: int) -> bool:
        """Return whether the queue has not been fed up to a sequence."""
        return not self.fault and (self.queue is None or self.queue.next_sequence < end)

    def look(self, manifest: Manifest) -> None:
        """Read the queue and compare it with the log. Write nothing.

        Args:
            manifest: The manifest of the log.

        Raises:
            StorageError: The store did not answer.
        """
        with self._noting_faults():
            self._read()
            self._following(manifest, check=True)

    def feed(self, manifest: Manifest, *, check: bool = False) -> None:
        """Append the entries of the log that the queue lacks, until it is full.

        Args:
            manifest: The manifest of the log, which may be an older version.
            check: Read the queue in any case. Otherwise it is only read if it has changed since
                this object wrote it.

        Raises:
            StorageError: The store did not answer, or it is not known whether it has written.
        """
        self.lost_race = False
        with self._noting_faults():
            if check or not self._feed_from_memory(manifest):
                self._read()
                self._append(manifest, self._following(manifest, check=True))

    @contextmanager
    def _noting_faults(self) -> Iterator[None]:
        try:
            yield
        except (_Stopped, errors.CorruptData) as error:
            self.fault = f"the queue {self.key!r} of reader {self.name!r} is not fed: {error}"
            self.is_sound = isinstance(error, _Gap)
        else:
            self.fault, self.is_sound = "", True

    def _feed_from_memory(self, manifest: Manifest) -> bool:
        """Feed the queue as it was last seen. Return whether it now has everything."""
        if self.queue is None:
            return False
        try:
            self._append(manifest, self._following(manifest))
        except _Stopped:
            return False  # Memory may be out of date. Only a read can tell.
        return self.queue.next_sequence >= manifest.next_sequence

    def _append(self, manifest: Manifest, entries: Sequence[BatchDescriptor]) -> None:
        """Append entries, and those that follow them, as long as there is room."""
        while entries:
            attempts, conflicts = self._queue.attempts, self._queue.conflicts
            with _damage_stops():
                outcome = self._queue.update(partial(fed, entries), from_memory=True)
            if isinstance(outcome, outcomes.Vanished):
                raise _Stopped("it is gone")
            if not isinstance(outcome, outcomes.Applied):
                raise errors.TransientStorageError(
                    f"{self.key!r} in {self._log.store.url} was not fed: {outcome}. Try again."
                )
            lost = self._queue.conflicts - conflicts
            if lost and self._queue.attempts == attempts + lost:
                self.lost_race = True
            entries = self._following(manifest)

    def _read(self) -> None:
        with _damage_stops():
            found = self._queue.read()
        if not isinstance(found, Manifest):
            raise _Stopped("it is gone")

    @property
    def reached(self) -> Watermark:
        """Return how far the queue was, by its reader's position and by this object's memory.

        Raises:
            _Stopped: The position belongs to another reader.
            CorruptData: The position cannot be read.
            StorageError: The store did not answer.
        """
        if self._reached is None:
            found = self._position.read()
            known = found if isinstance(found, ReaderPosition) else None
            if known is not None and known.v1 != self.prefix:
                raise _Stopped(f"{self._position.key!r} is the position of another reader")
            self._reached = (
                Watermark(0, 0) if known is None else Watermark(known.fed or 0, known.epoch)
            )
        return self._reached

    def _following(self, manifest: Manifest, *, check: bool = False) -> Sequence[BatchDescriptor]:
        """Return entries of the log that follow the queue, at most as many as fit."""
        queue, reached = self.queue, self.reached
        assert queue is not None
        check_feedable(queue, reached)
        self._reached = reached.joined(Watermark(queue.next_sequence, queue.epoch))
        if check and queue.next_sequence > manifest.next_sequence:
            # The manifest may be older than the queue.
            config = self._log.config
            now = read_manifest(self._log.store, config, self._log.runtime)
            if now is not None and queue.next_sequence > now.next_sequence:
                raise _Stopped(
                    f"another producer writes to it: it ends at {queue.next_sequence}, and the "
                    f"log at {now.next_sequence}"
                )
        first = queue.next_sequence - (1 if queue.entry_count else 0)
        count = min(manifest.next_sequence - first, room_in(queue) + 1)
        if count <= 0 or (count == 1 and not check and first < queue.next_sequence):
            return ()
        new = check_entries(queue, self._entries(manifest, first, count))[: room_in(queue)]
        if not new and room_in(queue) and queue.next_sequence < manifest.next_sequence:
            raise _Gap(f"sequence {queue.next_sequence} is gone from the log")
        return new

    def _entries(self, manifest: Manifest, first: int, count: int) -> Sequence[BatchDescriptor]:
        if first >= manifest.first_sequence:
            return manifest.entries(first, count)
        # The index is read after the manifest: what left the manifest in between is in the index.
        index = self._log.need()
        return LogView.of(self._log, index, manifest).entries(first, count)

    def note(self, end: int) -> None:
        """Write what was last seen of the queue into the position of the reader.

        Nothing is written if the queue is not sound: the log then keeps everything from the last
        position on.

        Args:
            end: The end of the log.

        Raises:
            StorageError: The store did not answer, or it is not known whether it has written.
        """
        queue = self.queue
        if queue is None or not self.is_sound:
            return
        now_ms = self._log.runtime.now_ms()
        outcome = self._position.update(
            lambda before: noted(before, self.prefix, queue, end, now_ms)
        )
        if not isinstance(outcome, outcomes.Applied | outcomes.Vanished):
            raise errors.TransientStorageError(
                f"{self._position.key!r} in {self._log.store.url} was not written: {outcome}"
            )


class Feeders:
    """Feeds the queues of all v1 consumers of a log.

    Not thread-safe: the owner of this object must make its calls one after another.

    Args:
        log_: The log.
    """

    def __init__(self, log_: Log) -> None:
        self._log = log_
        self.feeders: dict[str, Feeder] = {}
        """By the name of the reader."""

    def find(self, index: LogIndex) -> None:
        """Take the readers from an index that was just read."""
        known, self.feeders = self.feeders, {}
        for name, prefix in index.v1.items():
            if name in index.readers:
                feeder = known.get(name)
                if feeder is None or feeder.prefix != prefix:
                    feeder = Feeder(self._log, name, prefix)
                self.feeders[name] = feeder

    def feed(self, manifest: Manifest, *, check: bool = False, note: bool = False) -> None:
        """Feed all queues. An error of the store stops only one of them, and is logged.

        Args:
            manifest: The manifest of the log.
            check: See :meth:`Feeder.feed`.
            note: Also write the positions of the readers.
        """
        for feeder in self.feeders.values():
            known = feeder.fault
            try:
                feeder.feed(manifest, check=check)
                if note:
                    feeder.note(manifest.next_sequence)
                if feeder.fault not in ("", known):
                    log.error("%s", feeder.fault)
            except errors.OpenDataBufferError as error:
                log.warning("%s was not fed, and is tried again: %s", feeder.key, error)

    def fronts(self) -> dict[str, int]:
        """Return the first sequence of each sound queue, as it was last seen."""
        return {
            name: feeder.queue.first_sequence
            for name, feeder in self.feeders.items()
            if feeder.queue is not None and feeder.is_sound
        }
