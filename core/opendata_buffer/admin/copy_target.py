"""Where a copy goes: a queue in which each transaction of the copy arrives once, and its record.

Each copied batch carries an identity in its name (:mod:`.copy`). What waits in the target shows
what was appended; what its reader has taken does not, so an append to a queue that was emptied
goes behind an empty batch, and a repeat is then dropped by who reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opendata_buffer import outcomes
from opendata_buffer.admin.copy_pace import CopyPace
from opendata_buffer.admin.copy_record import RECORD, CopyRecord, copy_record_key
from opendata_buffer.admin.rebuild import GRACE_MS
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.fetch import BatchDescriptor, RawBatch
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.errors import Drained, Superseded, TransientStorageError
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key, parse_location
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.cas import CasObject
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Moment, Runtime
from opendata_buffer.stores.base import Store

__all__ = ["CopyTarget", "Group", "Moved", "Side"]

CONCURRENCY = 8
IN_FLIGHT_BYTES = 256 * 1024 * 1024

Group = list[tuple[int, list[BatchDescriptor]]]
"""Transactions of one append, in order: the number of each, and the batches of the source."""


@dataclass(frozen=True)
class Side:
    """A queue that is copied, or that is copied to."""

    store: Store
    config: ConsumerConfig


@dataclass(frozen=True)
class Moved:
    """A batch that was uploaded to the target.

    Attributes:
        entry: What to append.
        nbytes: Size of its object.
    """

    entry: NewEntry
    nbytes: int


class _Emptied:
    """An append was not made: an empty batch must go in front."""


@dataclass(frozen=True)
class _There:
    """An append was not made: the target has some of it already.

    Attributes:
        highest: The last transaction that it has.
    """

    highest: int


class CopyTarget:
    """The target of one copy; it is made if there is none. Not thread-safe.

    Args:
        target: The queue.
        app: The app id in the names of the copies.
        pace: Is told how long uploads take.
        runtime: Clock, names and threads.

    Raises:
        QueueReset: The target's manifest is gone or old.
        UnsafeStore, PrefixConflict: As for a producer.
        CorruptData, StorageError: Something could not be read or written.
    """

    def __init__(self, target: Side, app: str, pace: CopyPace, runtime: Runtime) -> None:
        self._store = target.store
        self._prefix = target.config.data_path_prefix
        self._app = app
        self._pace = pace
        self._runtime = runtime
        self._run = runtime.ulid()
        self._patient = queue_retry(runtime, target.config)
        claim = claim_for_writing(target.store, target.config, runtime=runtime)
        self._queue = Queue(
            target.store, target.config, runtime=runtime, role="producer", claim=claim
        )
        self._register = CasObject(
            target.store,
            copy_record_key(self._prefix, app),
            decode=CopyRecord.from_json,
            encode=CopyRecord.to_json,
            runtime=runtime,
            settings=target.config,
            max_bytes=RECORD.max_bytes,
            unreadable=RECORD.unreadable,
        )

    @property
    def record_place(self) -> str:
        """Key and store of the record, for errors."""
        return f"{self._register.key!r} in {self._store.url}"

    def take_over(self, source: str, next_sequence: int, state: Mapping[str, Any]) -> CopyRecord:
        """Become the one who copies; whoever did it before ends.

        Args:
            source: What is copied, for people.
            next_sequence: Where to begin, if nothing was copied yet.
            state: What the reader's rule remembers there.

        Returns:
            The record, from which to go on.

        Raises:
            TransientStorageError: The record could not be written.
        """
        fresh = CopyRecord(source, self._run, next_sequence, state)
        return self._note(lambda found: replace(found or fresh, run=self._run))

    def note(self, next_sequence: int, state: Mapping[str, Any]) -> None:
        """Let the record say that all before ``next_sequence`` is done with.

        Raises:
            Superseded: Another process copies this queue by now.
            TransientStorageError: The record could not be written.
        """

        def noted(found: CopyRecord | None) -> CopyRecord:
            if found is None or found.run != self._run:
                raise self._superseded(next_sequence)
            return replace(found, next_sequence=next_sequence, transactions=state)

        self._note(noted)

    def is_current(self) -> bool:
        """Whether the record still names this run."""
        found = self._register.read()
        return isinstance(found, CopyRecord) and found.run == self._run

    def highest(self) -> int | None:
        """The last transaction of this copy that waits in the target; None when none does.

        Raises:
            Drained: The target was closed for good.
        """
        manifest = self._queue.read()
        if manifest is not None and manifest.sealed:
            raise Drained(self._queue.key)
        return None if manifest is None else self._highest(manifest)

    def append(self, group: Group, fetch: Callable[[BatchDescriptor], RawBatch]) -> Sequence[Moved]:
        """Copy some transactions, all of them or none; what was uploaded for them.

        What the target has by now is passed by: a run that this one took the copy over from may
        have had one append under way.

        Args:
            group: At least one.
            fetch: Reads a batch of the source.

        Raises:
            Superseded: Another process copies this queue by now.
            QueueFull, Conflict, CommitStateUnknown, QueueReset, CorruptData, StorageError: It was
                not appended, or nobody knows.
        """
        first = group[0][0]
        moved = self._moved(group, fetch)
        entries = [each.entry for each in moved]
        append = self._queue.append
        done = append(entries, guard=lambda before: self._stop(before, first), read_first=True)
        if isinstance(done, _Emptied):
            separator = NewEntry(self._upload(encode_batch([]), None))
            done = append(
                [separator, *entries],
                guard=lambda before: self._stop(before, first, separated=True),
                read_first=True,
            )
        if isinstance(done, _There):
            left = [each for each in group if each[0] > done.highest]
            return self.append(left, fetch) if left else []
        return moved

    def close(self) -> None:
        """Let the target's marker remember how far it got. Free to repeat."""
        self._queue.close()

    def _stop(
        self, before: Manifest, first: int, separated: bool = False
    ) -> _There | _Emptied | None:
        """What is to be known of the manifest that an append replaces."""
        highest = self._highest(before)
        if highest is not None and highest >= first:
            return _There(highest)
        # Its reader has taken all there was. The last of it may have been what is appended now,
        # by a run that was killed or by one that has taken over since: right behind itself a
        # repeat looks like the rest of one transaction.
        if before.next_sequence and not before.entry_count and not separated:
            return _Emptied()
        return None

    def _highest(self, manifest: Manifest) -> int | None:
        if f"/app={self._app}/".encode() not in manifest.raw:
            return None
        found = [
            parsed.txn.batch
            for location in manifest.locations()
            if (parsed := parse_location(location, self._prefix)) is not None
            and parsed.txn is not None
            and parsed.txn.app == self._app
        ]
        return max(found, default=None)

    def _moved(self, group: Group, fetch: Callable[[BatchDescriptor], RawBatch]) -> Sequence[Moved]:
        """Upload the batches of some transactions, in order, in time to be appended."""
        wanted = [(number, each) for number, batches in group for each in batches]
        numbers = {id(each): number for number, each in wanted}

        def move(descriptor: BatchDescriptor) -> Moved:
            raw = self._patient(fetch, descriptor)
            location = self._upload(raw.data, Transaction(self._app, numbers[id(descriptor)]))
            return Moved(NewEntry(location, descriptor.metadata), raw.nbytes)

        for _ in range(2):
            self._check_run(wanted[0][0])
            began = Moment.now(self._runtime)
            moved = list(
                fetch_many(
                    move,
                    [each for _, each in wanted],
                    concurrency=CONCURRENCY,
                    max_in_flight_bytes=IN_FLIGHT_BYTES,
                    runtime=self._runtime,
                )
            )
            took_ms = began.age_ms(Moment.now(self._runtime))
            self._pace.took(took_ms)
            if took_ms < GRACE_MS // 2:
                return moved
        raise TransientStorageError(
            f"{len(wanted)} batches took {took_ms / 1000:.0f} s to upload: the target's collector "
            f"could delete them before they are appended. Run it again nearer to the stores; "
            f"{self._pace.most} batches are the most it takes at once by now"
        )

    def _upload(self, data: bytes, txn: Transaction | None) -> str:
        location = batch_key(self._prefix, self._runtime.ulid(), txn)
        self._patient(self._store.put, location, data)
        return location

    def _check_run(self, first: int) -> None:
        found = self._register.read()
        if not isinstance(found, CopyRecord):
            raise TransientStorageError(
                f"{self.record_place} was deleted while the copy ran. Run it again: what waits in "
                "the target is not copied twice"
            )
        if found.run != self._run:
            raise self._superseded(first)

    def _superseded(self, first: int) -> Superseded:
        return Superseded(
            self._app,
            first,
            "another run of 'opendata-buffer copy' has taken this copy over, by its record "
            f"{self.record_place}: it goes on from where this one ended, at sequence {first} of "
            "the source, and copies nothing twice. So let it finish, or stop it and start this one "
            "again",
        )

    def _note(self, change: Callable[[CopyRecord | None], CopyRecord]) -> CopyRecord:
        # The same change twice is the same record, so a lost answer needs no proof.
        outcome = self._register.update(change)
        if isinstance(outcome, outcomes.Applied) and outcome.value is not None:
            return outcome.value
        raise TransientStorageError(
            f"{self.record_place} could not be written: {outcome}. "
            "Run it again: it goes on where it ended"
        )
