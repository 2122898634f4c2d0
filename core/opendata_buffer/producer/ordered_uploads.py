"""Which batches of a producer may be appended, in which order. Pure.

Times are passed in, as seconds of the monotonic clock. Every sealed batch passes these stages::

                 stored()              take()                landed()
    UPLOADING ────────────> UPLOADED ──────────> APPENDING ────────────> COMPLETED
        ^                    │    ^                  │      failed()
        └────────────────────┘    └──────────────────┘
          take(): grew too old      refused(): surely not written

1. The batches of one producer stand in a queue in produce order, which never changes: a group to
   append is a series of uploaded ones, and nothing passes a batch that is neither stored nor
   completed. One group is appended at a time.
2. An uploaded object older than half the collector's grace period is not appended but stored
   again, under a new name: the append could take the other half (failure F5).
3. An append that was refused leaves its batches where they were, for the next group.
4. A batch that fails is completed alone, those behind it go on. An *ordered* one (a transaction,
   or the separator before it) takes all ordered ones behind it along: appended now, they would
   make the reader take the failed one for a repeat when it is produced again.
5. Every batch is completed by its deadline, in any stage but APPENDING; an append that is never
   answered is completed as unknown after a time of its own.
6. An outcome is final; a later one is ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from opendata_buffer.errors import CommitStateUnknown, OpenDataBufferError, TransientStorageError
from opendata_buffer.producer.batching import Batch, Stage
from opendata_buffer.producer.handle import Durable
from opendata_buffer.runtime import Moment


@dataclass(frozen=True, slots=True)
class LateUpload:
    """A batch whose entry landed when a collector may already have taken its object.

    Attributes:
        batch: The batch.
        sequence: Of its entry.
        age: Seconds since its name was made.
    """

    batch: Batch
    sequence: int
    age: float


class OrderedUploads:
    """One producer's sealed batches in produce order.

    Args:
        manifest_path: Named in errors.
        max_age: Seconds after which an uploaded object is not appended any more: half the
            collector's grace period.
        append_limit: Seconds after which an append without an answer is completed as unknown.
    """

    def __init__(self, *, manifest_path: str, max_age: float, append_limit: float) -> None:
        self._manifest_path = manifest_path
        self._max_age = max_age
        self._append_limit = append_limit
        # A batch that is completed before its turn stays in the queue until it is at the front:
        # so completing one takes no search.
        self._queue: deque[Batch] = deque()
        self._group: list[Batch] = []
        self._group_limit = 0.0
        self._completed: list[Batch] = []
        self._failure: BaseException | None = None

    def enter(self, batch: Batch) -> None:
        """Put a sealed batch at the end, before its bytes are stored.

        An ordered one behind a failed ordered one is completed at once: the failure has completed
        those that were in the queue, and this one came later.
        """
        if batch.ordered and self._failure is not None:
            self._complete(batch, self._failure)
        else:
            self._queue.append(batch)

    def stored(self, batch: Batch) -> None:
        """The batch's object is stored."""
        if batch.stage is Stage.UPLOADING:
            batch.stage = Stage.UPLOADED

    def take(self, now: Moment, most: int | None = None) -> tuple[list[Batch], list[Batch]]:
        """Begin an append.

        Args:
            now: The present.
            most: How many batches to take; None takes all that are ready.

        Returns:
            The batches to append, in order, and those that grew too old and must be stored
            again under another name. Answer with :meth:`landed`, :meth:`refused` or
            :meth:`failed` if there is one to append.
        """
        self.expire(now.monotonic)
        if self._group:
            return [], []
        ready: list[Batch] = []
        again: list[Batch] = []
        for batch in self._queue:
            if batch.stage is Stage.COMPLETED:
                continue
            if batch.stage is Stage.UPLOADING or len(ready) == most:
                break
            if batch.age(now) > self._max_age:
                batch.stage = Stage.UPLOADING
                again.append(batch)
            elif not again:
                ready.append(batch)
            # All behind an old one are looked at too: those that are old as well are stored
            # again at the same time, and not one after the other.
        for batch in ready:
            batch.stage = Stage.APPENDING
        while self._queue and self._queue[0].stage in (Stage.APPENDING, Stage.COMPLETED):
            self._queue.popleft()
        self._group = ready
        self._group_limit = now.monotonic + self._append_limit
        return list(ready), again

    def begin_by(self, group: Sequence[Batch]) -> float:
        """Until when the append of the group may begin, monotonic seconds."""
        limits = [batch.deadline for batch in group]
        limits += [each.named.monotonic + self._max_age for each in group if each.named]
        return min(limits)

    def landed(self, first: int, now: Moment) -> list[LateUpload]:
        """The group was appended, its first batch with sequence ``first``.

        Returns:
            Those that landed later than the grace period allows. The process slept between the
            age check and the answer: a collector may have listed the object as unreferenced and
            old, and may delete it now or later (failure F5). Store it again, then :meth:`fail`
            it: another process may still delete what was stored.
        """
        late: list[LateUpload] = []
        for position, batch in enumerate(self._group):
            age = batch.age(now)
            if age > 2 * self._max_age:
                late.append(LateUpload(batch, first + position, age))
            else:
                self._complete(batch, Durable(first + position, batch.location))
        self._group = [each.batch for each in late]
        return late

    def refused(self, error: OpenDataBufferError, now: Moment) -> None:
        """Surely nothing of the group was written: it goes back to the front of the queue."""
        group, self._group = self._group, []
        for batch in group:
            batch.stage = Stage.UPLOADED
            batch.trouble = error
        self._queue.extendleft(reversed(group))
        self.expire(now.monotonic)

    def failed(self, error: BaseException) -> None:
        """The group failed for good."""
        group, self._group = self._group, []
        self._fail(group, error)

    def fail(self, batch: Batch, error: BaseException) -> None:
        """Fail one batch, and the ordered ones behind it if it is ordered."""
        self._fail([batch], error)
        if batch in self._group:
            self._group.remove(batch)

    def expire(self, now: float) -> None:
        """Fail what is past its deadline."""
        if self._group and now >= self._group_limit:
            self._fail_group_as_unknown(f"no answer in {self._append_limit:g} s")
        while (head := self._head()) is not None and head.deadline <= now:
            self._fail([head], head.trouble or _not_in_time(head))

    def abandon(self, error: BaseException) -> None:
        """Complete everything; what is being appended is unknown."""
        self._fail_group_as_unknown(str(error))
        for batch in self._queue:
            self._complete(batch, error)
        self._queue.clear()

    def next_deadline(self) -> float | None:
        """When :meth:`expire` has something to do, monotonic seconds; None when never."""
        head = self._head()
        limits = [] if head is None else [head.deadline]
        if self._group:
            limits.append(self._group_limit)
        return min(limits, default=None)

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`take` has something to do."""
        head = self._head()
        return not self._group and head is not None and head.stage is Stage.UPLOADED

    @property
    def has_completed(self) -> bool:
        """Whether :meth:`take_completed` has any."""
        return bool(self._completed)

    def take_completed(self) -> list[Batch]:
        """The batches that were completed since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def _head(self) -> Batch | None:
        # Deadlines rise along the queue, so the first batch without an outcome has the earliest.
        while self._queue and self._queue[0].stage is Stage.COMPLETED:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def _fail_group_as_unknown(self, reason: str) -> None:
        if self._group:
            locations = tuple(each.location for each in self._group)
            self.failed(CommitStateUnknown(self._manifest_path, None, locations, None, reason))

    def _fail(self, batches: Sequence[Batch], error: BaseException) -> None:
        first = next((x for x in batches if x.ordered and x.stage is not Stage.COMPLETED), None)
        for batch in batches:
            self._complete(batch, error)
        if first is not None:
            self._failure = error
            behind = first not in self._queue
            for batch in self._queue:
                if behind and batch.ordered:
                    self._complete(batch, error)
                behind = behind or batch is first

    def _complete(self, batch: Batch, outcome: Durable | BaseException) -> None:
        if batch.stage is Stage.COMPLETED:
            return
        # The stage first: an uploading thread that sees another stage has read the bytes before.
        batch.stage = Stage.COMPLETED
        batch.outcome = outcome
        batch.data = None
        batch.parts = []
        self._completed.append(batch)


def _not_in_time(batch: Batch) -> TransientStorageError:
    reason = (
        "its upload did not end"
        if batch.stage is Stage.UPLOADING
        else "a batch before it did not get in"
    )
    return TransientStorageError(
        f"a batch of {batch.calls} produce() calls was not durable within delivery_timeout_ms: "
        f"{reason}. Nothing of it is queued. Look at the store, or raise delivery_timeout_ms."
    )
