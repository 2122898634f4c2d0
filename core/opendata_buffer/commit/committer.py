"""Group commit: one writer per manifest and process (seed: a queue in one object, step 2).

While one compare-and-swap is on its way, finished uploads pile up; the next one takes them all.
Producers of one process on the same manifest share the committer, so they never race each
other: the store's compare-and-swap rate stops being the limit on batches per second.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from opendata_buffer.commit.durability import Completion, Durable
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CommitStateUnknown,
    Conflict,
    OpenDataBufferError,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.producer.batcher import Batch
from opendata_buffer.queue.owner import Claim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, SystemRuntime, Task
from opendata_buffer.stores import Store

__all__ = ["Committer", "Lane", "Stage", "Upload", "shared_committer"]

log = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.25
"""Between attempts that the queue gave up; each of them has backed off on its own already."""


class Stage(Enum):
    """Where an upload stands."""

    UPLOADING = auto()
    UPLOADED = auto()
    SETTLED = auto()


@dataclass(slots=True, eq=False)
class Upload:
    """One batch's way through a lane.

    Attributes:
        batch: Its entries; dropped once they are encoded.
        completion: What the callers wait on.
        metadata: The ranges of its entry.
        transaction: Identity in its location.
        ordered: Whether a failure of it or before it must stop the ordered ones behind it.
        calls: ``produce()`` calls in it.
        count: Records in it.
        size: Bytes of its record block.
        held: Bytes of the producer's budget that it takes: block and metadata.
        deadline: When to give up, on the monotonic clock.
        data: The object's bytes, kept until the batch is settled.
        location: The object's key.
        minted_at: When the location's ULID was made, on the monotonic clock.
        minted_ms: The same on the wall clock.
    """

    batch: Batch | None
    completion: Completion
    metadata: tuple[Metadata, ...]
    transaction: Transaction | None
    ordered: bool
    calls: int
    count: int
    size: int
    held: int
    deadline: float
    stage: Stage = Stage.UPLOADING
    data: bytes = b""
    location: str = ""
    minted_at: float = 0.0
    minted_ms: int | None = None

    @classmethod
    def of(cls, batch: Batch, deadline: float) -> Upload:
        """The way of a sealed batch."""
        return cls(
            batch,
            batch.completion,
            batch.metadata(),
            batch.transaction,
            # A batch without calls is the separator in front of a first transaction.
            batch.transaction is not None or not batch.calls,
            len(batch.calls),
            batch.count,
            batch.size,
            batch.size + batch.metadata_size,
            deadline,
        )


class Lane:
    """One producer's uploads in produce order; the committer never reorders a lane.

    Args:
        max_age: Seconds after which an uploaded object may no longer be enqueued (failure F5).
        reupload: Called with an upload that grew too old; it must be uploaded anew.
        settle: Called with an upload and its outcome, once.
        repair: Writes an upload's object again under the same name.
    """

    def __init__(
        self,
        *,
        max_age: float,
        reupload: Callable[[Upload], None],
        settle: Callable[[Upload, Durable | BaseException], None],
        repair: Callable[[Upload], None],
    ) -> None:
        self.max_age = max_age
        self.reupload = reupload
        self.settle = settle
        self.repair = repair
        self.uploads: deque[Upload] = deque()
        self.failure: BaseException | None = None
        """What an ordered upload failed with: no ordered one may enter any more."""


class Committer:
    """Appends the finished uploads of its lanes, in groups."""

    def __init__(
        self,
        store: Store,
        config: QueueConfig,
        runtime: Runtime,
        on_idle: Callable[[], None],
        claim: Claim | None = None,
    ) -> None:
        self._runtime = runtime
        self._on_idle = on_idle
        self._queue = Queue(store, config, runtime=runtime, role="producer", claim=claim)
        self._condition = runtime.condition()
        self._lanes: list[Lane] = []
        self._task: Task | None = None
        self._stopping = False

    @property
    def queue(self) -> Queue:
        """The queue it writes; its counters tell attempts and conflicts."""
        return self._queue

    def open_lane(self, lane: Lane) -> bool:
        """Take part in the group commits; False when the last lane has left.

        A committer does not start again: its thread may still be ending, and two of them would
        append one upload twice.
        """
        with self._condition:
            if self._stopping:
                return False
            if self._task is None:
                self._task = self._runtime.spawn(self._run, "opendata-buffer-committer")
            self._lanes.append(lane)
            return True

    def close_lane(self, lane: Lane) -> None:
        """Leave; the thread ends with its last lane. Free to repeat."""
        with self._condition:
            if lane not in self._lanes:
                return
            self._lanes.remove(lane)
            if self._lanes:
                return
            self._stopping = True
            self._on_idle()
            self._condition.notify_all()
            task = self._task
        if task is not None:
            task.join()
        self._queue.close()

    def enter(self, lane: Lane, upload: Upload) -> BaseException | None:
        """Give an upload its place in the lane, before its bytes are stored.

        Returns the reason why it must not enter, if there is one: an ordered upload before it
        failed. This is decided where such a failure sweeps the lane, or one could slip in
        behind the sweep and overtake.
        """
        with self._condition:
            if upload.ordered and lane.failure is not None:
                upload.stage = Stage.SETTLED
                return lane.failure
            lane.uploads.append(upload)
            return None

    def uploaded(self, upload: Upload) -> None:
        """The upload's bytes are stored."""
        with self._condition:
            if upload.stage is Stage.UPLOADING:
                upload.stage = Stage.UPLOADED
                self._condition.notify_all()

    def give_up(self, lane: Lane, upload: Upload, error: BaseException) -> None:
        """The upload failed for good; those behind it go on."""
        self._settle(lane, upload, error)

    def _run(self) -> None:
        while True:
            with self._condition:
                group = self._take()
                while not group:
                    if self._stopping:
                        return
                    self._condition.wait()
                    group = self._take()
            try:
                self._commit(group)
            except Exception as error:
                # A thread that dies would leave every later produce() waiting for ever.
                log.exception("group commit failed")
                for lane, upload in group:
                    self._settle(lane, upload, error)

    def _take(self) -> list[tuple[Lane, Upload]]:
        group = []
        for lane in self._lanes:
            for upload in lane.uploads:
                if upload.stage is not Stage.UPLOADED:
                    break
                group.append((lane, upload))
        return group

    def _commit(self, group: list[tuple[Lane, Upload]]) -> None:
        group = self._without_stale(group)
        if not group:
            return
        try:
            first = self._queue.append(
                [NewEntry(upload.location, upload.metadata) for _, upload in group]
            )
        except (Conflict, QueueFull, TransientStorageError) as error:
            # Surely nothing landed. The uploads stay in their lanes for the next group.
            self._expire(group, error)
            if isinstance(error, QueueFull) and len(group) > 1:
                # Half of them may fit; all together never would, also into an empty queue.
                waiting = [each for each in group if each[1].stage is Stage.UPLOADED]
                self._commit(waiting[: len(group) // 2])
                return
            log.warning("append of %d batches failed, trying again: %s", len(group), error)
            self._runtime.sleep(RETRY_PAUSE_S)
            return
        except OpenDataBufferError as error:
            for lane, upload in group:
                self._settle(lane, upload, error)
            return
        for position, (lane, upload) in enumerate(group):
            self._landed(lane, upload, first + position)

    def _without_stale(self, group: list[tuple[Lane, Upload]]) -> list[tuple[Lane, Upload]]:
        """Send back what the collector may soon delete, and all behind it (failure F5)."""
        kept = []
        blocked: set[int] = set()
        for lane, upload in group:
            if id(lane) in blocked:
                continue
            if self._age(upload) > lane.max_age:
                blocked.add(id(lane))
                with self._condition:
                    if upload.stage is not Stage.UPLOADED:
                        continue
                    upload.stage = Stage.UPLOADING
                lane.reupload(upload)
            else:
                kept.append((lane, upload))
        return kept

    def _age(self, upload: Upload) -> float:
        """Seconds since its name was made, by the clock that says more (failure F5).

        A machine that is suspended stops its monotonic clock, and the collector does not wait;
        a wall clock may be set back.
        """
        age = self._runtime.monotonic() - upload.minted_at
        if upload.minted_ms is None:
            return age
        return max(age, (self._runtime.now_ms() - upload.minted_ms) / 1000)

    def _landed(self, lane: Lane, upload: Upload, sequence: int) -> None:
        age = self._age(upload)
        if age <= 2 * lane.max_age:
            self._settle(lane, upload, Durable(sequence, upload.location))
            return
        # The process slept between the age check and the write's answer, for longer than the
        # grace period: a collector may have listed the object as unreferenced and old, and may
        # delete it now or later. Write it again so that the entry has its object, but do not
        # promise what another process can still undo (failure F5).
        try:
            lane.repair(upload)
            reason = "its object was written again in case it is gone"
        except OpenDataBufferError as error:
            reason = f"its object could not be written again: {error}"
        self._settle(
            lane,
            upload,
            CommitStateUnknown(
                self._queue.key,
                sequence,
                (upload.location,),
                sequence + 1,
                f"it was appended {age:.0f} s after its upload, later than the collector's grace "
                f"period allows; {reason}",
            ),
        )

    def _expire(self, group: list[tuple[Lane, Upload]], error: OpenDataBufferError) -> None:
        now = self._runtime.monotonic()
        for lane, upload in group:
            if now >= upload.deadline:
                self._settle(lane, upload, error)

    def _settle(self, lane: Lane, upload: Upload, outcome: Durable | BaseException) -> None:
        with self._condition:
            settled = [upload] if upload.stage is not Stage.SETTLED else []
            if settled and upload.ordered and isinstance(outcome, BaseException):
                # Later transactions must not overtake a failed one: the reader would take it
                # for a repeat when it is produced again.
                lane.failure = outcome
                lined_up = list(lane.uploads)
                behind = lined_up[lined_up.index(upload) + 1 :]
                settled += [each for each in behind if each.ordered]
            for each in settled:
                each.stage = Stage.SETTLED
            lane.uploads = deque(u for u in lane.uploads if u.stage is not Stage.SETTLED)
            # What stood behind a failed upload may be ready now.
            self._condition.notify_all()
        for each in settled:
            lane.settle(each, outcome)


_committers: dict[tuple[int, int, str], Committer] = {}


def shared_committer(
    store: Store,
    config: QueueConfig,
    runtime: Runtime,
    lane: Lane,
    *,
    claim: Claim | None = None,
) -> Committer:
    """The process's committer for this manifest, with the lane open in it.

    Made for the first lane, with that one's settings. A simulated process has a runtime of its
    own and so stands for itself. A forked child makes its own: threads stay behind.
    """
    process = os.getpid() if isinstance(runtime, SystemRuntime) else id(runtime)
    key = (process, id(store), config.manifest_path)

    def forget() -> None:
        _committers.pop(key, None)

    while True:
        committer = _committers.get(key)
        if committer is None:
            made = Committer(store, config, runtime, forget, claim)
            committer = _committers.setdefault(key, made)
        if committer.open_lane(lane):
            return committer
