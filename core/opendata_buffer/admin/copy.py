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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opendata_buffer.admin.copy_pace import CopyPace
from opendata_buffer.admin.copy_record import copy_app
from opendata_buffer.admin.copy_target import CopyTarget, Group, Side
from opendata_buffer.admin.observe import Observer
from opendata_buffer.concurrency import together
from opendata_buffer.consumer.fetch import BatchDescriptor, FetchHandle
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset, Superseded
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.ownership import check_owner
from opendata_buffer.runtime import Runtime

__all__ = ["Copied", "Copier", "step_all"]


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
        self._allow_data_loss = allow_data_loss
        self._observer = Observer(source.store, source.config, runtime)
        self._prefix = source.config.data_path_prefix
        self._handle = FetchHandle.of(source.config, store=source.store, runtime=runtime)
        _refuse_same(source, target)
        manifest = self._observer.manifest()
        claim = check_owner(source.store, source.config, runtime=runtime)
        if claim is not None:
            claim.check(manifest)
        key = source.config.manifest_path
        self._source_key = key
        app = copy_app("" if claim is None else claim.queue_id, source.store.url, key)
        self._pace = CopyPace()
        self._target = CopyTarget(target, app, self._pace, runtime)
        self._source_name = f"{source.store.url} {key}"
        self.total = Copied()
        self._take_over(manifest.first_sequence)

    @property
    def partition(self) -> str:
        """The source's data prefix."""
        return self._prefix

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
            self._tell_place()  # Of what was lost just now, too.
            return False
        if group:
            moved = self._target.append(group, self._handle.fetch_raw)
            self.total.batches += len(moved)
            self.total.stored_bytes += sum(each.nbytes for each in moved)
        self._note_progress()
        return True

    @property
    def is_current(self) -> bool:
        """Whether no other run has taken the copy over."""
        return self._target.is_current()

    def take_back(self) -> None:
        """Take the copy over again, from a run that is to end.

        Raises:
            As for opening it.
        """
        self._take_over(self._observer.manifest().first_sequence)

    def close(self) -> None:
        """Let the target's marker remember how far it got. Free to repeat."""
        self._target.close()

    # What is to be copied.

    def _ready(self, manifest: Manifest) -> Group | None:
        """Transactions to copy in one append; None when there was nothing new to look at."""
        entries = manifest.entries(self._next, self._pace.most)
        if not entries:
            return None
        group: Group = []
        count = 0
        for entry in entries:
            batches = self._offer(entry.sequence, entry.location, manifest)
            if batches:
                group.append((entry.sequence, batches))
                count += len(batches)
                if count >= self._pace.most:
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

    def _take_over(self, first: int) -> None:
        fresh = ReadCommitted(self._prefix).to_dict()
        record = self._target.take_over(self._source_name, first, fresh)
        self._next = record.next_sequence
        self._rule: ReadCommitted = ReadCommitted.from_dict(dict(record.transactions), self._prefix)
        self._tell_place()
        self._catch_up()

    def _catch_up(self) -> None:
        """Pass by what the target shows to be copied and the record does not know yet."""
        copied = self._target.highest()
        reached = self._next if copied is None else max(self._next, copied + 1)
        # Looked at after record and target: whoever copied until now went on, with what the source
        # was given meanwhile, and beside an older look that is a source that has gone back.
        manifest = self._observer.manifest()
        if reached > manifest.next_sequence:
            raise QueueReset(
                f"the copy has got to sequence {reached} of manifest {self._source_key!r}, which "
                f"ends at {manifest.next_sequence - 1}: it was deleted and made again, or restored "
                "from an old copy. To copy what is there now, delete "
                f"{self._target.record_place} first."
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
        first, floor = manifest.first_sequence, self._rule.stable_end(self._next)
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

    def _tell_place(self) -> None:
        floor = self._rule.stable_end(self._next)
        self.total.next_sequence = self._next
        self.total.held_from = floor if floor < self._next else None

    def _note_progress(self) -> None:
        self._tell_place()
        self._rule.prune(self._runtime.now_ms())
        self._target.note(self._next, self._rule.to_dict())


def step_all(copiers: Sequence[Copier], runtime: Runtime) -> bool:
    """A step of each copier at once; whether there was anything to look at.

    Two runs that begin together may each take some partitions from the other, and both would end.
    So the run that has the first partition takes the others back.

    Raises:
        Superseded: Another run has the first partition.
        Others: As :meth:`Copier.step`.
    """
    try:
        return any(together(runtime, Copier.step, copiers))
    except Superseded:
        if not copiers[0].is_current:
            raise
        for each in copiers[1:]:
            if not each.is_current:
                each.take_back()
        return True


def _refuse_same(source: Side, target: Side) -> None:
    here = source.store.url, source.config.manifest_path
    if here == (target.store.url, target.config.manifest_path):
        raise InvalidInput(
            f"source and target are the same queue, {here[1]!r} in {here[0]}: name another target"
        )
