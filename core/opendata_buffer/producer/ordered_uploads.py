"""The order of a producer's batches, from their upload to their outcome.

**The problem.** A consumer must get records in the order of the calls, but uploads finish in any
order, some fail, and some take so long that the collector may delete the object before it is in the
queue.

**The idea.** A line of batches in produce order, of which only the front may be appended.
Every batch passes these stages, and all times are monotonic seconds::

                 stored()              take()                landed()
    UPLOADING ────────────> UPLOADED ──────────> APPENDING ────────────> COMPLETED
        ^                    │    ^                  │      fail()
        └────────────────────┘    └──────────────────┘
          take(): grew too old      refused(): surely not written

1. Batches wait in produce order, which never changes. A group to append is a series of uploaded
   batches. No batch passes one that is neither stored nor completed. One group is appended at a
   time.
2. An uploaded object that is older than half of the collector's grace period is not appended.
   It is stored again under a new name, because the append could take the other half (failure
   F5).
3. An append that was refused leaves its batches where they were, for the next group.
4. A batch that fails is completed alone, and those after it go on. An *ordered* batch is
   different. It is a transaction, or the separator before one, and all ordered batches after it
   fail, too. If they were appended now and the failed one was produced again later, the reader
   would take it for a repeat.
5. Every batch is completed by its deadline, in any stage but APPENDING. An append without an
   answer is completed as unknown after a time of its own.
6. An outcome is final. A later one is ignored.

**An example.** Of batches 1, 2 and 3, the uploads of 2 and 3 are done. Nothing can be appended. The
upload of 1 fails for good: 1 is completed with its error, and the next group is 2 and 3. If 1 and 3
are transactions, 3 fails as well, and the group is 2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from opendata_buffer import errors
from opendata_buffer.config import ProducerConfig
from opendata_buffer.hints import Action, Hint, Setting
from opendata_buffer.producer.batching import Batch, Stage
from opendata_buffer.producer.handles import Durable
from opendata_buffer.runtime import Moment

LateUpload = tuple[Batch, int, float]
"""A batch that landed so late that a collector may have deleted its object, with details.

These are its sequence, and the seconds since its name was made.
"""


class OrderedUploads:
    """Decides which batches of one producer may be appended, in which order. It does no IO.

    Args:
        config: The queue, for errors.
    """

    def __init__(self, config: ProducerConfig) -> None:
        self._manifest_path = config.manifest_path
        self._max_age = self._append_limit = math.inf
        # A completed batch stays in the queue until it gets to the front, so that completing one
        # needs no search.
        self._queue: deque[Batch] = deque()
        self._group: list[Batch] = []
        self._group_limit = 0.0
        self._completed: list[Batch] = []
        self._ordered_failure: BaseException | None = None
        self.failed_calls = 0
        """How many calls the batches have that failed so far."""
        self.unknown_calls = 0
        """How many of these calls may be durable after all."""
        self.first_failure: BaseException | None = None

    def set_limits(self, grace_ms: int, append_limit: float) -> None:
        """Set the limits that are known once the queue is claimed.

        Args:
            grace_ms: The queue's grace period, in milliseconds.
            append_limit: Seconds after which an append without an answer is completed as unknown.
        """
        self._max_age, self._append_limit = grace_ms / 2000, append_limit

    def enter(self, batch: Batch) -> None:
        """Put a sealed batch at the end. An ordered one fails if an ordered one failed before."""
        if batch.ordered and self._ordered_failure is not None:
            self._complete(batch, self._ordered_failure)
        else:
            self._queue.append(batch)

    def stored(self, batch: Batch) -> None:
        """Note that the batch's object is stored."""
        if batch.stage is Stage.UPLOADING:
            batch.stage = Stage.UPLOADED

    def take(self, now: Moment, most: int | None = None) -> tuple[list[Batch], list[Batch]]:
        """Begin an append.

        Args:
            now: The time.
            most: Most batches to append. None: all that are ready.

        Returns:
            The batches to append, in order, which end with :meth:`landed`, :meth:`refused` or
            :meth:`fail`; and those that grew too old and must be stored again.
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
            # After an old batch the loop goes on, so that all old ones are stored again together.
        for batch in ready:
            batch.stage = Stage.APPENDING
        while self._queue and self._queue[0].stage in (Stage.APPENDING, Stage.COMPLETED):
            self._queue.popleft()
        self._group = ready
        self._group_limit = now.monotonic + self._append_limit
        return list(ready), again

    def begin_by(self, group: Sequence[Batch]) -> float:
        """Return until when the append of a group may begin, in monotonic seconds."""
        limits = [batch.deadline for batch in group]
        limits += [batch.named.monotonic + self._max_age for batch in group if batch.named]
        return min(limits)

    def landed(self, first: int, now: Moment) -> list[LateUpload]:
        """Note that the group was appended.

        Args:
            first: The sequence of its first batch.
            now: The time.

        Returns:
            The batches that landed later than the grace period allows. This happens if the process
            slept between the check of their age and the answer. A collector may delete their
            objects (failure F5). Store each of them again, then :meth:`fail` it, because it may
            still be deleted.
        """
        late: list[LateUpload] = []
        for position, batch in enumerate(self._group):
            age = batch.age(now)
            if age > 2 * self._max_age:
                late.append((batch, first + position, age))
            else:
                self._complete(batch, Durable(first + position, batch.location))
        self._group = [batch for batch, *_ in late]
        return late

    def refused(self, error: errors.OpenDataBufferError, now: Moment) -> None:
        """Put the group back to the front of the queue: nothing of it was written, for certain."""
        group, self._group = self._group, []
        for batch in group:
            batch.stage = Stage.UPLOADED
            batch.last_error = error
        self._queue.extendleft(reversed(group))
        self.expire(now.monotonic)

    def fail(self, batches: Sequence[Batch], error: BaseException) -> None:
        """Give batches up. If one of them is ordered, the ordered ones after it fail, too."""
        is_group = any(batch.stage is Stage.APPENDING for batch in batches)
        first = None
        for batch in batches:
            if batch.ordered and batch.stage is not Stage.COMPLETED:
                first = batch
                break
        for batch in batches:
            self._complete(batch, error)
        if is_group:
            self._group = [batch for batch in self._group if batch.stage is not Stage.COMPLETED]
        if first is not None:
            self._ordered_failure = error
            is_later = first not in self._queue
            for batch in self._queue:
                if is_later and batch.ordered:
                    self._complete(batch, error)
                is_later = is_later or batch is first

    def expire(self, now: float) -> None:
        """Fail the batches that are past their deadline."""
        if self._group and now >= self._group_limit:
            self._fail_group_as_unknown(f"no answer in {self._append_limit:g} s")
        while (head := self._head()) is not None and head.deadline <= now:
            self.fail([head], head.last_error or _not_in_time(head))

    def abandon(self, error: BaseException) -> None:
        """Complete all batches. The outcome of those that are being appended is unknown."""
        self._fail_group_as_unknown(str(error))
        for batch in self._queue:
            self._complete(batch, error)
        self._queue.clear()

    def next_deadline(self) -> float | None:
        """Return when :meth:`expire` has something to do, in monotonic seconds; None if never."""
        head = self._head()
        limits = [] if head is None else [head.deadline]
        if self._group:
            limits.append(self._group_limit)
        return min(limits, default=None)

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`take` would find something to append."""
        head = self._head()
        return not self._group and head is not None and head.stage is Stage.UPLOADED

    @property
    def has_completed(self) -> bool:
        """Whether :meth:`take_completed` would return any."""
        return bool(self._completed)

    def check_ordered(self) -> None:
        """Raise an error if an ordered batch failed.

        If it was produced again after a later one, it would look like a repeat of that one.

        Raises:
            FlushFailed: With the number of calls that failed, and the first cause.
        """
        if self._ordered_failure is not None:
            raise self.flush_failed("an earlier batch failed: ")

    def flush_failed(self, before: str = "") -> errors.FlushFailed:
        """Return the error that reports all batches that failed so far.

        Args:
            before: Words before the first cause.

        Returns:
            The error, with the hints of the first cause.
        """
        failure = self.first_failure
        if isinstance(failure, errors.OpenDataBufferError):
            cause, hints = failure.problem, failure.hints
        else:
            cause, hints = str(failure), ()
        return errors.FlushFailed(self.failed_calls, before + cause, self.unknown_calls, hints)

    def take_completed(self) -> list[Batch]:
        """Return the batches that were completed since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def _head(self) -> Batch | None:
        # Deadlines rise along the queue, so the first batch without an outcome is the next one due.
        while self._queue and self._queue[0].stage is Stage.COMPLETED:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def _fail_group_as_unknown(self, reason: str) -> None:
        if self._group:
            locations = tuple(batch.location for batch in self._group)
            error = errors.CommitStateUnknown(self._manifest_path, None, locations, None, reason)
            self.fail(self._group, error)

    def _complete(self, batch: Batch, outcome: Durable | BaseException) -> None:
        if batch.stage is Stage.COMPLETED:
            return
        # Set the stage first: a thread that uploads takes the bytes, and then checks the stage.
        batch.stage = Stage.COMPLETED
        batch.outcome = outcome
        batch.data = None
        batch.parts = []
        self._completed.append(batch)
        if isinstance(outcome, BaseException):
            self.failed_calls += batch.calls
            if isinstance(outcome, errors.CommitStateUnknown):
                self.unknown_calls += batch.calls
            self.first_failure = self.first_failure or outcome


def _not_in_time(batch: Batch) -> errors.TransientStorageError:
    uploading = batch.stage is Stage.UPLOADING
    reason = "its upload did not end" if uploading else "a batch before it did not get in"
    return errors.TransientStorageError(
        f"a batch of {batch.calls} produce() calls was not durable within ",
        Setting("delivery_timeout_ms"),
        f": {reason}. Nothing of it is queued",
        Hint(Action.WAIT_LONGER_FOR_DELIVERY),
    )
