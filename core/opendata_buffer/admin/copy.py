"""Copying a queue to another one, in any store, so that each batch arrives once.

Batches are copied as objects, not decoded. What is copied is what a reader would be given: of
transactions only those that are committed, and repeats of a writer not at all.

Each copied batch carries an identity in its name, as those of the Spark sink do:
``app=copy-<id of the source>/batch=<sequence>/``, where the sequence is that of the source's entry
that let it be delivered. It never comes again for other batches, so whoever copies may be killed
at any point and run again:

* What the record says was copied is not copied again.
* What the record does not know yet, the target's manifest shows while it waits there.
* What neither shows (it was appended, its reader took it, and the record was not written before
  the end) is appended again under the same identity, behind an empty batch; readers that know the
  rule, as Spark's and :class:`~.ReadCommitted`, drop it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from opendata_buffer.admin.copy_record import RECORD, CopyRecord, copy_app, copy_record_key
from opendata_buffer.admin.observe import Observer
from opendata_buffer.admin.rebuild import GRACE_MS
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.consumer.read_ahead import fetch_many
from opendata_buffer.consumer.read_committed import ReadCommitted
from opendata_buffer.errors import (
    DataLoss,
    Drained,
    InvalidInput,
    QueueReset,
    Superseded,
    TransientStorageError,
)
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import Transaction, batch_key, parse_location
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.cas import Done, Register
from opendata_buffer.queue.owner import check_owner, claim_for_use
from opendata_buffer.queue.queue import Queue
from opendata_buffer.retry import queue_retry
from opendata_buffer.runtime import Moment, Runtime
from opendata_buffer.stores import Store

__all__ = ["Copied", "Copier", "Side"]

MOST_AT_ONCE = 100
"""Batches of one append, unless a transaction has more: it is not torn apart."""

CONCURRENCY = 8
IN_FLIGHT_BYTES = 256 * 1024 * 1024

SLOW_S, QUICK_S = 30.0, 5.0
"""Uploads of one append that take longer are halved the next time, and shorter ones doubled. The
collector of the target would otherwise take them for garbage (failure F5)."""


@dataclass(frozen=True)
class Side:
    """A queue that is copied, or that is copied to."""

    store: Store
    config: ConsumerConfig


@dataclass
class Copied:
    """What one process has copied.

    Attributes:
        batches: How many.
        stored_bytes: Sizes of their objects.
        next_sequence: First sequence of the source that was not looked at.
        held_from: First sequence of a transaction that is not decided; None without any. What
            follows it is copied all the same.
        lost: Batches that its consumer took before they could be copied, where that was allowed.
    """

    batches: int = 0
    stored_bytes: int = 0
    next_sequence: int = 0
    held_from: int | None = None
    lost: int = 0


@dataclass(frozen=True)
class _Moved:
    """A batch that was uploaded to the target."""

    entry: NewEntry
    nbytes: int


_Group = list[tuple[int, list[BatchDescriptor]]]


class Copier:
    """Copies one queue, from where the last run ended. Not thread-safe.

    Opening it takes the copy over from a process that still copies the same queue to the same
    target. The source is only read, and its consumer is not disturbed.

    Args:
        source: What is copied.
        target: Where to; it is made if there is none.
        runtime: Clock, names and threads.
        allow_data_loss: Go on behind what the source's consumer took before it was copied.

    Raises:
        InvalidInput: There is no source, or both are the same queue.
        DataLoss: The source's consumer has taken what was not copied yet.
        QueueReset: The source's or the target's manifest is gone or old.
        UnsafeStore, PrefixConflict: As for a producer of the target.
        CorruptData, StorageError: Something could not be read or written.
    """

    def __init__(
        self, source: Side, target: Side, runtime: Runtime, *, allow_data_loss: bool = False
    ) -> None:
        self._runtime = runtime
        self._target = target
        self._allow_data_loss = allow_data_loss
        self._observer = Observer(source.store, source.config, runtime)
        self._prefix = source.config.data_path_prefix
        self._handle = FetchHandle.of(source.config, store=source.store, runtime=runtime)
        self._patient = queue_retry(runtime, target.config)
        _refuse_same(source, target)
        manifest = self._observer.manifest()
        claim = check_owner(source.store, source.config, runtime=runtime)
        if claim is not None:
            claim.check(manifest)
        key = source.config.manifest_path
        queue_id = "" if claim is None else claim.queue_id
        self._source_key = key
        self._app = copy_app(queue_id, source.store.url, key)
        self._run = runtime.ulid()
        own = claim_for_use(target.store, target.config, runtime=runtime)
        self._queue = Queue(
            target.store, target.config, runtime=runtime, role="producer", claim=own
        )
        fresh = CopyRecord(
            f"{source.store.url} {key}",
            self._run,
            manifest.first_sequence,
            ReadCommitted(self._prefix).to_dict(),
        )
        self._register = _register(target, self._app, runtime)
        record = self._note(lambda found: replace(found or fresh, run=self._run))
        self._next = record.next_sequence
        self._rule = ReadCommitted.from_dict(dict(record.transactions), self._prefix)
        self._most = MOST_AT_ONCE
        self.total = Copied()
        self._catch_up(manifest)

    @property
    def partition(self) -> str:
        """The source's data prefix."""
        return self._prefix

    @property
    def app(self) -> str:
        """The app id in the names of the copies."""
        return self._app

    def step(self) -> bool:
        """Copy what comes next, about a hundred batches; whether there was anything to look at.

        Raises:
            DataLoss: The source's consumer has taken what was not copied yet.
            PoisonBatch: A batch of the source is missing or outside of its prefix.
            Superseded: Another process copies this queue by now.
            QueueFull, Conflict, CommitStateUnknown, QueueReset, CorruptData, StorageError: What
                was not appended was not noted; run it again.
        """
        manifest = self._observer.manifest()
        self._pass_loss(manifest)
        group = self._ready(manifest)
        if group is None:
            return False
        if group:
            self._append(group)
        self._note_progress()
        return True

    def close(self) -> None:
        """Let the target's marker remember how far it got. Free to repeat."""
        self._queue.close()

    # What is to be copied.

    def _ready(self, manifest: Manifest) -> _Group | None:
        """Transactions to copy in one append; None when there was nothing new to look at."""
        entries = manifest.entries(self._next, self._most)
        if not entries:
            return None
        group: _Group = []
        count = 0
        for entry in entries:
            batches = self._offer(entry.sequence, entry.location, manifest)
            if batches:
                group.append((entry.sequence, batches))
                count += len(batches)
                if count >= self._most:
                    break
        return group

    def _offer(self, sequence: int, location: str, manifest: Manifest) -> list[BatchDescriptor]:
        def replay(begin: int, end: int) -> Iterable[tuple[int, str]]:
            return [(each.sequence, each.location) for each in manifest.entries(begin, end - begin)]

        delivered = self._rule.offer(sequence, location, replay)
        self._next = sequence + 1
        return [
            BatchDescriptor.of(entry) for each in delivered for entry in manifest.entries(each, 1)
        ]

    def _catch_up(self, manifest: Manifest) -> None:
        """Pass by what the target shows to be copied and the record does not know yet."""
        copied = self._highest(self._target_manifest())
        if max(self._next, -1 if copied is None else copied + 1) > manifest.next_sequence:
            raise QueueReset(
                f"the copy has got to sequence {self._next if copied is None else copied + 1} of "
                f"manifest {self._source_key!r}, which ends at {manifest.next_sequence - 1}: it "
                "was deleted and made again, or restored from an old copy. To copy what is there "
                f"now, delete {self._register.key!r} in {self._target.store.url} first."
            )
        if copied is None or copied < self._next:
            return
        self._pass_loss(manifest, copied)
        for entry in manifest.entries(self._next, max(0, copied + 1 - self._next)):
            self._offer(entry.sequence, entry.location, manifest)
        self._note_progress()

    def _pass_loss(self, manifest: Manifest, copied: int = -1) -> None:
        """See whether entries that are still needed have left the source.

        Args:
            manifest: The source's.
            copied: Entries up to this one are surely copied, unless their transaction is open.
        """
        first, floor = manifest.first_sequence, self._rule.floor(self._next)
        pending = floor < self._next
        unseen = max(self._next, copied + 1)
        needed = floor if pending else unseen
        if first > needed:
            if not self._allow_data_loss:
                raise DataLoss(
                    self._source_key,
                    needed,
                    first,
                    "Its consumer took them before they were copied. Stop it before you copy, or "
                    "go on behind them with --allow-data-loss.",
                )
            self.total.lost += max(0, first - unseen)
        if first > (floor if pending else self._next):
            self._rule.lost(first - 1)
            self._next = max(self._next, first)

    # How it gets there.

    def _append(self, group: _Group) -> None:
        moved = self._moved(group)
        first = group[0][0]
        entries = [each.entry for each in moved]
        append = self._queue.append
        done = append(entries, guard=lambda before: self._stop(before, first), read_first=True)
        if done is _Stop.EMPTIED:
            separator = NewEntry(self._upload(encode_batch([]), None))
            done = append(
                [separator, *entries],
                guard=lambda before: self._stop(before, first, separated=True),
                read_first=True,
            )
        if isinstance(done, _Stop):
            raise Superseded(self._app, first)
        self.total.batches += len(moved)
        self.total.stored_bytes += sum(each.nbytes for each in moved)

    def _stop(self, before: Manifest, first: int, separated: bool = False) -> _Stop | None:
        """What is to be known of the manifest that an append replaces."""
        highest = self._highest(before)
        if highest is not None and highest >= first:
            return _Stop.ELSEWHERE
        # Its reader has taken all there was. The last of it may have been what is appended now,
        # by a run that was killed or by one that has taken over since: right behind itself a
        # repeat looks like the rest of one transaction.
        if before.next_sequence and not before.entry_count and not separated:
            return _Stop.EMPTIED
        return None

    def _moved(self, group: _Group) -> list[_Moved]:
        """Upload the batches of some transactions, in order, in time to be appended."""
        wanted = [(number, each) for number, batches in group for each in batches]
        numbers = {id(each): number for number, each in wanted}

        def move(descriptor: BatchDescriptor) -> _Moved:
            raw = self._patient(self._handle.fetch_raw, descriptor)
            txn = Transaction(self._app, numbers[id(descriptor)])
            location = self._upload(raw.data, txn)
            return _Moved(NewEntry(location, descriptor.metadata), raw.nbytes)

        for _ in range(2):
            self._check_run()
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
            if took_ms > SLOW_S * 1000:
                self._most = max(1, self._most // 2)
            elif took_ms < QUICK_S * 1000:
                self._most = min(MOST_AT_ONCE, self._most * 2)
            if took_ms < GRACE_MS // 2:
                return moved
        raise TransientStorageError(
            f"{len(wanted)} batches took {took_ms / 1000:.0f} s to upload: the target's collector "
            f"could delete them before they are appended. Run it again nearer to the stores; "
            f"{self._most} batches are the most it takes at once by now"
        )

    def _upload(self, data: bytes, txn: Transaction | None) -> str:
        prefix = self._target.config.data_path_prefix
        location = batch_key(prefix, self._runtime.ulid(), txn)
        self._patient(self._target.store.put, location, data)
        return location

    # What is known of it.

    def _target_manifest(self) -> Manifest:
        manifest = self._queue.read()
        if manifest is not None and manifest.sealed:
            raise Drained(self._queue.key)
        return Manifest.empty() if manifest is None else manifest

    def _highest(self, manifest: Manifest) -> int | None:
        """The last transaction of this copy that waits in the target."""
        if f"/app={self._app}/".encode() not in manifest.raw:
            return None
        prefix = self._target.config.data_path_prefix
        found = [
            parsed.txn.batch
            for location in manifest.locations()
            if (parsed := parse_location(location, prefix)) is not None
            and parsed.txn is not None
            and parsed.txn.app == self._app
        ]
        return max(found, default=None)

    def _check_run(self) -> None:
        found = self._register.read()
        if isinstance(found, Done) and found.value is not None and found.value.run == self._run:
            return
        raise Superseded(self._app, self._next)

    def _note_progress(self) -> None:
        floor = self._rule.floor(self._next)
        self.total.next_sequence = self._next
        self.total.held_from = floor if floor < self._next else None
        self._rule.prune(self._runtime.now_ms())
        state = self._rule.to_dict()

        def noted(found: CopyRecord | None) -> CopyRecord:
            if found is None or found.run != self._run:
                raise Superseded(self._app, self._next)
            return replace(found, next_sequence=self._next, transactions=state)

        self._note(noted)

    def _note(self, change: Callable[[CopyRecord | None], CopyRecord]) -> CopyRecord:
        # The same change twice is the same record, so a lost answer needs no proof.
        outcome = self._register.update(change)
        if isinstance(outcome, Done) and outcome.value is not None:
            return outcome.value
        raise TransientStorageError(
            f"{self._register.key!r} in {self._target.store.url} could not be written: {outcome}. "
            "Run it again: it goes on where it ended"
        )


class _Stop(Enum):
    """Why an append is not made."""

    ELSEWHERE = "another process has appended it"
    EMPTIED = "an empty batch must go in front"


def _refuse_same(source: Side, target: Side) -> None:
    here = source.store.url, source.config.manifest_path
    if here == (target.store.url, target.config.manifest_path):
        raise InvalidInput(
            f"source and target are the same queue, {here[1]!r} in {here[0]}: name another target"
        )


def _register(target: Side, app: str, runtime: Runtime) -> Register[CopyRecord]:
    config: QueueConfig = target.config
    return Register(
        target.store,
        copy_record_key(config.data_path_prefix, app),
        decode=CopyRecord.from_json,
        encode=CopyRecord.to_json,
        runtime=runtime,
        settings=config,
        max_bytes=RECORD.max_bytes,
    )
