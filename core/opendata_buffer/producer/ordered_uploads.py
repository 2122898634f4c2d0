"""Uploads and their lane: which batches of a producer may be appended, in which order.

Pure: no thread, lock, store or clock; times are passed in, as seconds of the monotonic clock.
A batch becomes an :class:`Upload`, and every upload passes these stages::

                 stored()              take()                landed()
    UPLOADING ────────────> UPLOADED ──────────> APPENDING ────────────> SETTLED
        ^                    │    ^                  │      failed()
        └────────────────────┘    └──────────────────┘
          take(): grew too old      refused(): surely not written

1. A lane holds the uploads of one producer in produce order and never changes the order: what is
   taken is a run of uploaded ones, and nothing passes an upload that is neither stored nor
   settled. One group of a lane is appended at a time.
2. An uploaded object older than half the collector's grace period is not appended but stored
   again, under a new name: the append could take the other half (failure F5).
3. An append that was refused leaves its uploads where they were, for the next group.
4. An upload that fails is settled alone, those behind it go on. An *ordered* one (a transaction,
   or the separator before it) takes all ordered ones behind it along: appended now, they would
   make the reader take the failed one for a repeat when it is produced again.
5. Every upload is settled by its deadline, in any stage but APPENDING; an append that is never
   answered is settled as unknown after a time of its own.
6. Settled is final; whatever becomes known later is ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias
from uuid import UUID

from opendata_buffer.errors import CommitStateUnknown, OpenDataBufferError, TransientStorageError
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.producer.handle import Completion, Durable
from opendata_buffer.runtime import Moment

__all__ = ["OrderedUploads", "LateUpload", "Outcome", "Stage", "Upload"]


Outcome: TypeAlias = Durable | BaseException
"""What an upload comes to: where it is queued, or why it is not known to be."""


class Stage(Enum):
    """Where an upload stands."""

    UPLOADING = auto()
    UPLOADED = auto()
    APPENDING = auto()
    SETTLED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Upload:
    """One batch on its way into the queue.

    Attributes:
        completion: What the callers wait on.
        metadata: The ranges of its queue entry; set with ``data``.
        transaction: Identity in its location.
        message: Identity as a message in its location.
        ordered: Whether its failure stops the ordered uploads behind it.
        calls: ``produce()`` calls in it.
        count: Records in it; set with ``data``.
        size: Bytes of its record block; set with ``data``.
        held: Bytes of the producer's budget that it takes until it is settled.
        deadline: When to give up, monotonic seconds.
        data: The object's bytes, or its pieces, kept until the upload is settled.
        location: The object's key.
        minted: When the location's ULID was made; None before the first upload.
        trouble: What its last attempt failed with.
        outcome: Set when it is settled.
    """

    completion: Completion
    metadata: tuple[Metadata, ...] = ()
    transaction: Transaction | None = None
    message: UUID | None = None
    ordered: bool = False
    calls: int = 0
    count: int = 0
    size: int = 0
    held: int = 0
    deadline: float
    stage: Stage = Stage.UPLOADING
    data: bytes | list[bytes | memoryview] = b""
    location: str = ""
    minted: Moment | None = None
    trouble: OpenDataBufferError | None = None
    outcome: Outcome | None = None

    @property
    def entry(self) -> NewEntry:
        """What to append."""
        return NewEntry(self.location, self.metadata)

    def age(self, now: Moment) -> float:
        """Seconds since its name was made, by the clock that says more (failure F5)."""
        return 0.0 if self.minted is None else self.minted.age_ms(now) / 1000


@dataclass(frozen=True, slots=True)
class LateUpload:
    """An upload whose entry landed when a collector may already have taken its object.

    Attributes:
        upload: Which.
        sequence: Of its entry.
        age: Seconds since its name was made.
    """

    upload: Upload
    sequence: int
    age: float


class OrderedUploads:
    """One producer's uploads in produce order.

    Args:
        manifest_path: Named in errors.
        max_age: Seconds after which an uploaded object is not appended any more: half the
            collector's grace period.
        append_limit: Seconds after which an append without an answer is settled as unknown.
    """

    def __init__(self, *, manifest_path: str, max_age: float, append_limit: float) -> None:
        self._manifest_path = manifest_path
        self._max_age = max_age
        self._append_limit = append_limit
        # Uploads that were settled out of turn stay in the line until they reach its front: so
        # settling takes no walk along it.
        self._line: deque[Upload] = deque()
        self._group: list[Upload] = []
        self._group_limit = 0.0
        self._settled: list[Upload] = []
        self._failure: BaseException | None = None
        self.unsettled = 0
        """How many uploads have no outcome yet."""

    def enter(self, upload: Upload) -> None:
        """Give an upload its place, before its bytes are stored.

        An ordered one behind a failed ordered one is settled at once: let in here, it would
        pass the sweep that follows a failure.
        """
        self.unsettled += 1
        if upload.ordered and self._failure is not None:
            self._settle(upload, self._failure)
        else:
            self._line.append(upload)

    def stored(self, upload: Upload) -> None:
        """The upload's object is stored."""
        if upload.stage is Stage.UPLOADING:
            upload.stage = Stage.UPLOADED

    def take(self, now: Moment, most: int | None = None) -> tuple[list[Upload], list[Upload]]:
        """Begin an append.

        Args:
            now: The present.
            most: How many uploads to take; None takes all that are ready.

        Returns:
            The uploads to append, in order, and those that grew too old and must be stored
            again under another name. Answer with :meth:`landed`, :meth:`refused` or
            :meth:`failed` if there is one to append.
        """
        self.expire(now.monotonic)
        if self._group:
            return [], []
        ready: list[Upload] = []
        again: list[Upload] = []
        for upload in self._line:
            if upload.stage is Stage.SETTLED:
                continue
            if upload.stage is Stage.UPLOADING or len(ready) == most:
                break
            if upload.age(now) > self._max_age:
                upload.stage = Stage.UPLOADING
                again.append(upload)
            elif not again:
                ready.append(upload)
            # All behind an old one are looked at too: those that are old as well are stored
            # again at the same time, and not one after the other.
        for upload in ready:
            upload.stage = Stage.APPENDING
        while self._line and self._line[0].stage in (Stage.APPENDING, Stage.SETTLED):
            self._line.popleft()
        self._group = ready
        self._group_limit = now.monotonic + self._append_limit
        return list(ready), again

    def begin_by(self, group: Sequence[Upload]) -> float:
        """Until when the append of the group may begin, monotonic seconds."""
        limits = [upload.deadline for upload in group]
        limits += [each.minted.monotonic + self._max_age for each in group if each.minted]
        return min(limits)

    def landed(self, first: int, now: Moment) -> list[LateUpload]:
        """The group was appended, its first upload with sequence ``first``.

        Returns:
            Those that landed later than the grace period allows. The process slept between the
            age check and the answer: a collector may have listed the object as unreferenced and
            old, and may delete it now or later (failure F5). Store it again, then
            :meth:`settle` it; another process can undo what is promised here.
        """
        late: list[LateUpload] = []
        for position, upload in enumerate(self._group):
            age = upload.age(now)
            if age > 2 * self._max_age:
                late.append(LateUpload(upload, first + position, age))
            else:
                self._settle(upload, Durable(first + position, upload.location))
        self._group = [each.upload for each in late]
        return late

    def refused(self, error: OpenDataBufferError, now: Moment) -> None:
        """Surely nothing of the group was written: it goes back to the front of the line."""
        group, self._group = self._group, []
        for upload in group:
            upload.stage = Stage.UPLOADED
            upload.trouble = error
        self._line.extendleft(reversed(group))
        self.expire(now.monotonic)

    def failed(self, error: BaseException) -> None:
        """The group failed for good."""
        self._fail(self._group, error)
        self._group = []

    def settle(self, upload: Upload, outcome: Outcome) -> None:
        """Settle one upload, and the ordered ones behind it if it is ordered and failed."""
        if isinstance(outcome, BaseException):
            self._fail([upload], outcome)
        else:
            self._settle(upload, outcome)
        if upload in self._group:
            self._group.remove(upload)

    def expire(self, now: float) -> None:
        """Settle what is past its deadline."""
        if self._group and now >= self._group_limit:
            self._give_group_up(f"no answer in {self._append_limit:g} s")
        while (head := self._head()) is not None and head.deadline <= now:
            self._fail([head], head.trouble or _not_in_time(head))

    def abandon(self, error: BaseException) -> None:
        """Settle everything; what is being appended is unknown."""
        self._give_group_up(str(error))
        for upload in self._line:
            self._settle(upload, error)
        self._line.clear()

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
    def has_settled(self) -> bool:
        """Whether :meth:`take_settled` has any."""
        return bool(self._settled)

    def take_settled(self) -> list[Upload]:
        """The uploads that were settled since the last call, to tell their callers."""
        settled, self._settled = self._settled, []
        return settled

    def _head(self) -> Upload | None:
        # Deadlines rise along the line, so the first unsettled upload has the earliest.
        while self._line and self._line[0].stage is Stage.SETTLED:
            self._line.popleft()
        return self._line[0] if self._line else None

    def _give_group_up(self, reason: str) -> None:
        if not self._group:
            return
        locations = tuple(each.location for each in self._group)
        unknown = CommitStateUnknown(self._manifest_path, None, locations, None, reason)
        self._fail(self._group, unknown)
        self._group = []

    def _fail(self, uploads: Sequence[Upload], error: BaseException) -> None:
        ordered = [each for each in uploads if each.ordered and each.stage is not Stage.SETTLED]
        for upload in uploads:
            self._settle(upload, error)
        if ordered:
            self._failure = error
            self._sweep(ordered[0], error)

    def _sweep(self, failed: Upload, error: BaseException) -> None:
        behind = failed not in self._line
        for upload in self._line:
            if upload is failed:
                behind = True
            elif behind and upload.ordered:
                self._settle(upload, error)

    def _settle(self, upload: Upload, outcome: Outcome) -> None:
        if upload.stage is Stage.SETTLED:
            return
        upload.stage = Stage.SETTLED
        upload.outcome = outcome
        upload.data = b""
        self.unsettled -= 1
        self._settled.append(upload)


def _not_in_time(upload: Upload) -> TransientStorageError:
    reason = (
        "its upload did not end"
        if upload.stage is Stage.UPLOADING
        else "a batch before it did not get in"
    )
    return TransientStorageError(
        f"a batch of {upload.calls} produce() calls was not durable within delivery_timeout_ms: "
        f"{reason}. Nothing of it is queued. Look at the store, or raise delivery_timeout_ms."
    )
