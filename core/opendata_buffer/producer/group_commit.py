"""Who appends to a manifest: a :class:`Committer`, and the one of this process.

A committer appends what its callers give it and answers each with a sequence or an error; it
knows nothing of uploads, lanes or producers. :class:`GroupCommitter` joins what waits: while one
compare-and-swap is on its way, appends of all producers of the process pile up, and the next one
takes them all. They never race each other then, and the store's rate of compare-and-swaps is not
the limit on batches per second. Where the store takes one object only so often, an append waits
until the next is due, and takes what comes meanwhile with it. With other processes it takes turns
(:mod:`opendata_buffer.producer.group_commit`).
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from opendata_buffer.concurrency import locked
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import (
    CommitStateUnknown,
    CorruptManifest,
    InvalidInput,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.formats.keys import location_tag, ulid_tag
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.ownership import Claim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.retry import load_retries
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import RateLimited, Store

__all__ = ["Committer", "Gaps", "GroupCommitter", "Turns", "shared_committer"]


# ---- Who writes all the time leaves a gap now and then, for those who must read first. Pure. ----
#
# A writer that has the manifest in memory writes again as soon as its last write has landed.
# Whoever comes from outside (a consumer that acknowledges, a sink, an operator) reads and then
# writes, and in between the next write has always landed already: beside a writer that never
# pauses it may lose every race for a minute. So such a writer pauses for some of its writes once in
# a while: seldom while it lost no race, and every second once it did, because somebody is
# there.


ALONE_S = 20.0
"""Between two gaps while nobody else is known. Longer, and a consumer that begins beside a writer
that never rests waits longer; shorter, and more than one append in a hundred is late for nobody's
sake: a gap is three writes of 60 ms."""

BESIDE_S = 1.0
"""Between two gaps while others write, too."""

KNOWN_S = 60.0
"""Others are known for so long after they won a race."""

WRITES = 3.0
"""Length of a gap, in writes: another one's read and write fit in, wherever it stands just then."""

LONGEST_S = 0.5


class Gaps:
    """The gaps of one writer. Times are monotonic seconds; not thread-safe."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=5)
        self._ended: float | None = None
        self._since = 0.0
        self._idle = 0.0
        self._raced_at = float("-inf")

    @property
    def write(self) -> float | None:
        """How long a write takes that loses no race, seconds; None before the first."""
        return statistics.median(self._took) if self._took else None

    def lost(self, now: float) -> None:
        """A race was lost: somebody else writes, too."""
        self._raced_at = now

    def wrote(self, began: float, ended: float) -> float:
        """A write has landed; returns for how many seconds the next one is not to begin.

        Args:
            began: When it began.
            ended: When it had landed.
        """
        idle = 0.0 if self._ended is None else began - self._ended
        if self._raced_at < began:
            # A write that lost races says nothing about how long one takes.
            self._took.append(ended - began)
        write = self.write or 0.0
        gap = min(WRITES * write, LONGEST_S)
        # What it has nothing to write for is a gap as good as any; the moment it takes to put
        # the next write together is none.
        self._idle += idle if idle >= write / 2 else 0.0
        if self._ended is None or self._idle >= gap:
            self._since, self._idle = ended, 0.0
        self._ended = ended
        every = BESIDE_S if ended - self._raced_at < KNOWN_S else ALONE_S
        return gap if ended - self._since >= every else 0.0


# ---- When a process may append again, so that many of them share one manifest. Pure. ----
#
# Of processes that compare-and-swap on one object one wins and all others have worked for nothing.
# Who wins and goes on at once wins again: it need not read what it wrote itself. So after each win
# a process stands back for as long as the others need for one write each::
#
#     pause = other writers x 1.5 x cycle          cycle: the time of its own read and write
#
# One and a half, because those others lose races among each other, too. Who loses tries again at
# once, with little jitter. A process that is alone never pauses and never reads.
#
# How many others there are is read from the manifest, which has no room to say it: a process gives
# all its batches the same first six random characters of their ULIDs, its **tag**. Tags that come
# up again and again are writers. A client that knows nothing of tags draws new ones each time and
# is not counted; it is noticed by the races that are lost to it.


CYCLES_EACH = 1.5
JITTER = 0.05
WINDOW_S = 10.0
"""A writer counts for so long after it was seen, and for two of our pauses."""

MAX_PAUSE_S = 15.0
"""Whatever tags are found in a manifest, by mistake or by malice."""

MAX_TAGS = 4_096

FIRST_CYCLE_S = 0.1
"""Before anything was measured."""


class Turns:
    """What one writer knows of the others. Times are monotonic seconds; not thread-safe.

    Args:
        tag: Of this writer: six characters of a ULID.
        random: A number in [0, 1).
    """

    def __init__(self, tag: str, random: Callable[[], float]) -> None:
        self.tag = tag
        self._random = random
        self._seen: dict[str, deque[float]] = {}
        self._conflict_at: float | None = None
        self._cycles: deque[float] = deque(maxlen=5)
        self._began: float | None = None
        self._gaps = Gaps()
        self._write_began = 0.0
        self._turn_at = 0.0
        self._window = WINDOW_S

    def saw(self, locations: Iterable[str], now: float) -> None:
        """These were appended since the last look, by anybody."""
        for location in locations:
            tag = location_tag(location)
            if tag is not None and tag != self.tag:
                # Behind the others: the first ones are those not seen for longest.
                times = self._seen.pop(tag, None) or deque(maxlen=2)
                times.append(now)
                self._seen[tag] = times
        while self._seen:
            oldest = next(iter(self._seen))
            if len(self._seen) <= MAX_TAGS and self._seen[oldest][-1] >= now - self._window:
                break
            del self._seen[oldest]

    def others(self, now: float) -> int:
        """Other writers, as far as known."""
        since = now - self._window
        known = sum(len(times) == 2 and times[0] >= since for times in self._seen.values())
        raced = self._conflict_at is not None and self._conflict_at >= since
        return max(known, int(raced))

    def begins(self, now: float) -> bool:
        """A write begins; whether to read first, because others write, too."""
        shared = self.others(now) > 0
        self._began = now if shared else None
        self._write_began = now
        return shared

    def lost(self, now: float) -> float:
        """A race was lost; seconds to wait before the next attempt, which begins with a read."""
        self._conflict_at = now
        self._gaps.lost(now)
        wait = self._random() * self._cycle() / 2
        self._began = now + wait
        return wait

    def won(self, now: float) -> None:
        """The write has landed."""
        if self._began is not None:
            self._cycles.append(now - self._began)
            self._began = None
        pause = self.others(now) * CYCLES_EACH * self._cycle()
        pause = min(pause * (1 + JITTER * (2 * self._random() - 1)), MAX_PAUSE_S)
        # Not everybody is counted: a consumer that never won a race has left no trace.
        pause = pause or self._gaps.wrote(self._write_began, now)
        self._window = max(WINDOW_S, 2 * pause)
        self._turn_at = now + pause

    def pause(self, now: float) -> float:
        """Seconds until the next write may begin; not above zero when it may."""
        return self._turn_at - now

    def _cycle(self) -> float:
        # The median: one write that hung says nothing about how long the others take.
        if self._cycles:
            return statistics.median(self._cycles)
        # A writer that was alone so far has measured writes and no read: on a disk both take a
        # millisecond, and its first lost race, to a consumer's acknowledgement, must not hold
        # what comes meanwhile for fifty.
        write = self._gaps.write
        return FIRST_CYCLE_S if write is None else 2 * write


MOST_LOOKED_AT = 1_000
"""Of the entries that others appended, the newest so many tell who they are."""


class Committer(Protocol):
    """Appends batches to one queue. Thread-safe."""

    @property
    def attempts(self) -> int:
        """Manifest writes tried so far."""
        ...

    @property
    def conflicts(self) -> int:
        """How many of them lost against another writer."""
        ...

    @property
    def tag(self) -> str:
        """Six characters for the ULIDs of all batches that are appended through it: by them
        other processes tell how many write. See :func:`.tagged_ulid`."""
        ...

    def pause(self) -> float:
        """Seconds until an append would begin; not above zero when it would at once.

        Until then others have their turn. What a caller puts together only then goes into one
        write, and not half of it into the next.
        """
        ...

    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        """Append entries in one write: contiguous, in order, all or none. Blocks.

        Idempotent by location: what has landed is not appended again. A caller makes one append
        at a time; appends of several callers land in any order.

        Args:
            entries: At least one.
            begin_by: Monotonic seconds after which no write of it may begin: what waits for its
                turn until then is refused.

        Returns:
            The first entry's sequence.

        Raises:
            Conflict, QueueFull, TransientStorageError: Surely nothing was appended, and it may
                be tried again.
            CommitStateUnknown: It may have been appended.
            OpenDataBufferError: Nothing was appended, and trying again does not help.
        """
        ...

    def close(self) -> None:
        """One caller appends no more; called once by each."""
        ...


@dataclass(slots=True, eq=False)
class _Request:
    """One call of :meth:`GroupCommitter.append`; ``outcome`` is a sequence or an error."""

    entries: Sequence[NewEntry]
    begin_by: float
    patient_until: float
    """However many others there are, it waits no longer for this process's turn."""
    taken: bool = False
    outcome: int | BaseException | None = None


class _Joined:
    """A guard's answer: more waits by now, and is to be appended in the same write."""


class GroupCommitter:
    """Joins the appends of all its callers; the thread that finds it idle writes for them all.

    It has no thread of its own. Made by :func:`shared_committer`.
    """

    def __init__(
        self,
        store: Store,
        config: QueueConfig,
        runtime: Runtime,
        claim: Claim | None,
        on_idle: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._on_idle = on_idle
        self._turns = Turns(ulid_tag(runtime.ulid()), runtime.random)
        self._queue = Queue(
            store,
            config,
            runtime=runtime,
            role="producer",
            claim=claim,
            after_conflict=lambda: self._turns.lost(runtime.monotonic()),
        )
        self._paced = store if isinstance(store, RateLimited) else None
        self._looked_to: int | None = None
        self._condition = runtime.condition()
        self._waiting: list[_Request] = []
        self._under_way: list[_Request] = []
        self._writing = False
        self._callers = 0
        self._ended = False

    @property
    def attempts(self) -> int:
        """See :class:`Committer`."""
        return self._queue.attempts

    @property
    def conflicts(self) -> int:
        """See :class:`Committer`."""
        return self._queue.conflicts

    @property
    def tag(self) -> str:
        """See :class:`Committer`."""
        return self._turns.tag

    def pause(self) -> float:
        """See :class:`Committer`."""
        return self._pause(self._runtime.monotonic())

    def _pause(self, now: float) -> float:
        # The store's pace counts as a turn of others: what comes meanwhile goes into this write,
        # and not into the one after it.
        turn = self._turns.pause(now)
        return turn if self._paced is None else max(turn, self._paced.write_due(self._queue.key))

    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        """See :class:`Committer`."""
        now = self._runtime.monotonic()
        request = _Request(entries, begin_by, patient_until=(now + begin_by) / 2)
        group = self._await_turn(request)
        if group:
            try:
                self._write(group)
            finally:
                self._end()
            # Who writes by himself will lose a race; nothing waits now for loading what it takes.
            # A process whose broker writes for it needs none of it: many that start at once would
            # all load it while they look for that broker.
            load_retries()
        outcome = request.outcome
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return outcome

    @locked
    def join(self) -> bool:
        """Count one more caller; False when the last one has closed it meanwhile."""
        if self._ended:
            return False
        self._callers += 1
        return True

    def close(self) -> None:
        """See :class:`Committer`. After the last caller, the next one gets a new committer."""
        if self._leave():
            self._queue.close()

    @locked
    def _leave(self) -> bool:
        self._callers -= 1
        self._ended = self._callers == 0
        if self._ended:
            self._on_idle()
        return self._ended

    @locked
    def _await_turn(self, request: _Request) -> list[_Request]:
        """Wait until another thread has appended the request; or what this one must write."""
        self._waiting.append(request)
        try:
            while request.outcome is None:
                now = self._runtime.monotonic()
                left = request.begin_by - now
                if not request.taken and left <= 0 and self._writing:
                    raise _too_late()
                if not self._writing:
                    pause = min(self._pause(now), request.patient_until - now)
                    if pause <= 0:
                        self._writing = True
                        return self._take()
                    left = pause
                self._condition.wait(None if request.taken else left)
            return []
        except BaseException:
            if request in self._waiting:
                self._waiting.remove(request)
            raise

    @locked
    def _join(self) -> list[_Request]:
        return self._take()

    def _take(self) -> list[_Request]:
        """Take what waits into the write under way; called with the lock held."""
        joined, self._waiting = self._waiting, []
        for each in joined:
            each.taken = True
        self._under_way += joined
        return joined

    def _write(self, group: list[_Request]) -> None:
        """Append requests in one write, and with them what comes until it is sent."""
        read_first = self._turns.begins(self._runtime.monotonic())
        while True:
            now = self._runtime.monotonic()
            for request in group:
                if request.begin_by <= now:
                    request.outcome = _too_late()
            group = [each for each in group if each.outcome is None]
            if not group:
                return
            entries = [entry for each in group for entry in each.entries]
            try:
                first = self._queue.append(
                    entries, guard=self._look(read_first), read_first=read_first
                )
            except (InvalidInput, QueueFull) as error:
                if len(group) == 1:
                    group[0].outcome = error
                    return
                # Half of them may fit; all together never would, also into an empty queue. And an
                # entry that no manifest can hold is the fault of one caller, not of all.
                half = len(group) // 2
                self._write(group[:half])
                self._write(group[half:])
                return
            except Exception as error:
                for request in group:
                    request.outcome = error
                return
            if not isinstance(first, _Joined):
                break
            group += self._join()
            read_first = False  # It was read just now, and not written.
        self._turns.won(self._runtime.monotonic())
        for request in group:
            request.outcome = first
            first += len(request.entries)
        self._looked_to = first

    def _look(self, read_first: bool) -> Callable[[Manifest], _Joined | None]:
        """What is done with each manifest that is about to be replaced."""
        attempts, conflicts = self._queue.attempts, self._queue.conflicts

        def look(before: Manifest) -> _Joined | None:
            self._turns.saw(self._appended(before), self._runtime.monotonic())
            tried = self._queue.attempts - attempts
            # Behind a read only, or it would cost one. And not while an attempt is in doubt: it
            # may have landed without what came since.
            if not self._waiting or not (read_first or tried):
                return None
            return None if tried > self._queue.conflicts - conflicts else _Joined()

        return look

    def _appended(self, manifest: Manifest) -> list[str]:
        """Locations that others have appended since the last look."""
        start, end = self._looked_to, manifest.next_sequence
        self._looked_to = end
        if start is None or start >= end:
            return []
        try:
            return [each.location for each in manifest.entries(max(start, end - MOST_LOOKED_AT))]
        except CorruptManifest:
            # Its readers will say so. An append copies what is there, whatever it is.
            return []

    @locked
    def _end(self) -> None:
        self._writing = False
        group, self._under_way = self._under_way, []
        for request in group:
            if request.outcome is None:
                # The thread that wrote for all was interrupted by no error of the queue's.
                locations = tuple(entry.location for entry in request.entries)
                reason = "the thread that appended it was interrupted"
                request.outcome = CommitStateUnknown(self._queue.key, None, locations, None, reason)
        self._condition.notify_all()


def _too_late() -> TransientStorageError:
    return TransientStorageError(
        "an append waited for another one for too long and was not begun. Nothing was appended."
    )


_committers: dict[tuple[int, int, str, str], GroupCommitter] = {}


def shared_committer(
    store: Store, config: QueueConfig, runtime: Runtime, *, claim: Claim | None = None
) -> GroupCommitter:
    """The process's committer for this manifest, with one more caller, who must close it.

    Made for the first caller, with that one's claim, deadlines and limits. A simulated process
    has a runtime of its own and so stands for itself. A forked child makes its own.
    """
    process = os.getpid() if isinstance(runtime, SystemRuntime) else id(runtime)
    # Whoever still has the queue that was there before it was started over does not keep those
    # out who write to the new one.
    key = (process, id(store), config.manifest_path, "" if claim is None else claim.queue_id)

    def forget() -> None:
        _committers.pop(key, None)

    while True:
        committer = _committers.get(key)
        if committer is None:
            made = GroupCommitter(store, config, runtime, claim, forget)
            committer = _committers.setdefault(key, made)
        if committer.join():
            return committer
