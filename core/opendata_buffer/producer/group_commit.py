"""Appends to a manifest: a :class:`Committer`, and the process's own.

While one compare-and-swap is in flight, appends of all producers of the process wait, and the next
one takes them all. After each write, other processes may write (:class:`WriteFairness`).
"""

from __future__ import annotations

import os
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from opendata_buffer import errors
from opendata_buffer.config import ProducerConfig, QueueConfig
from opendata_buffer.formats.batch import location_tag, ulid_tag
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, SystemRuntime, locked
from opendata_buffer.stores.base import RateLimited, Store

CYCLES_EACH = 1.5
JITTER = 0.05
WINDOW_S = 10.0
"""Seconds for which a writer counts after it was seen, and for two of our pauses."""

MAX_PAUSE_S = 15.0
"""Seconds; the limit whatever tags a manifest has, by mistake or by malice."""

MAX_UNKNOWN_PAUSE_S = 2.0
"""Seconds; the limit for a writer that is not known by its tag, however long a write took."""

MAX_TAGS = 4_096

FIRST_CYCLE_S = 0.1
"""Seconds of a cycle before any was measured."""

ALONE_S = 20.0
"""Seconds between two pauses while no other writer is known: at most one append in a hundred is
late by it, and a consumer that begins beside a writer that never rests waits no longer."""

BESIDE_S = 1.0
"""Seconds between two pauses for :data:`KNOWN_S` after a lost race."""

KNOWN_S = 60.0


class WriteFairness:
    """How long a writer pauses after each of its writes, so that all get the manifest. Pure.

    The winner of a race has the new version in memory; if it wrote again at once it would win
    again, because the others must read first. So after each write it leaves the manifest to them::

        pause = other writers x 1.5 x cycle        cycle: the time of its own read and write

    How a writer knows of others (decision 0017):

    * **By their batches.** A process gives all its batches the same first six random characters of
      their ULIDs, its **tag**. A broker, which writes for all of them, has none.
    * **By a request.** A process that would lose every race asks the broker for one pause.
    * **By chance.** A process that cannot ask writes in the pauses that a busy writer makes from
      time to time: seldom while no race was lost, and every second after one was lost.

    Times are monotonic seconds; ``random`` gives a number in [0, 1). Not thread-safe.
    """

    def __init__(self, random: Callable[[], float], tag: str | None = None) -> None:
        self.tag = tag
        self._random = random
        self._seen: dict[str, deque[float]] = {}
        self._window = WINDOW_S
        self._raced_at = float("-inf")
        self._cycles: deque[float] = deque(maxlen=5)
        self._writes: deque[float] = deque(maxlen=5)
        self._reads_first = False
        self._cycle_began = 0.0
        self._ended_at: float | None = None
        self._paused_at: float | None = None
        self._let_in = False
        self._next_at = 0.0

    def saw(self, locations: Iterable[str], now: float) -> None:
        """Note the batches that any writer appended since the last call."""
        for location in locations:
            tag = location_tag(location)
            if tag is not None and tag != self.tag:
                # Moved to the end: the first tags are those not seen for longest.
                times = self._seen.pop(tag, None) or deque(maxlen=2)
                times.append(now)
                self._seen[tag] = times
        while self._seen:
            oldest = next(iter(self._seen))
            if len(self._seen) <= MAX_TAGS and self._seen[oldest][-1] >= now - self._window:
                break
            del self._seen[oldest]

    def others(self, now: float) -> int:
        """Other writers that are known; a lost race shows one."""
        if self.tag is None:
            return 0
        since = now - self._window
        known = sum(len(times) == 2 and times[0] >= since for times in self._seen.values())
        return max(known, int(self._raced_at >= since))

    def let_in(self, writes: int, now: float) -> float:
        """Seconds to leave to others that asked for so many reads and writes."""
        self._let_in, self._paused_at = True, now
        return self._unknown_pause(writes)

    def begins(self, now: float) -> bool:
        """A write begins; whether to read first, because others have written or soon will."""
        if self._ended_at is not None and now - self._ended_at >= self._cycle():
            self._paused_at = now  # Time without anything to write is as good as a pause.
        self._reads_first = self._let_in or self.others(now) > 0
        self._let_in = False
        self._cycle_began = now
        return self._reads_first

    def lost(self, now: float) -> float:
        """A race was lost; seconds to wait before the next attempt, which begins with a read."""
        wait = self._random() * self._cycle() / 2
        self._raced_at, self._reads_first, self._cycle_began = now, True, now + wait
        return wait

    def won(self, now: float) -> None:
        """The write has landed."""
        took = now - self._cycle_began
        if took > 0:  # A broker's queue repeats a lost race itself, and reports it after the write.
            (self._cycles if self._reads_first else self._writes).append(took)
        if self._paused_at is None:
            self._paused_at = now
        pause = self.others(now) * CYCLES_EACH * self._cycle()
        if not pause and now - self._paused_at >= self._unknown_every(now):
            pause = self._unknown_pause(1)
        if pause:
            self._paused_at = now
        pause = min(pause * (1 + JITTER * (2 * self._random() - 1)), MAX_PAUSE_S)
        self._window = max(WINDOW_S, 2 * pause)
        self._ended_at, self._next_at = now, now + pause

    def pause(self, now: float) -> float:
        """Seconds until the next write may begin; not above zero when it may."""
        return self._next_at - now

    def _unknown_pause(self, writes: int) -> float:
        return min(writes * CYCLES_EACH * self._cycle(), MAX_UNKNOWN_PAUSE_S)

    def _unknown_every(self, now: float) -> float:
        return BESIDE_S if now - self._raced_at < KNOWN_S else ALONE_S

    def _cycle(self) -> float:
        # The median: one write that hung does not show how long the others take.
        if self._cycles and len(self._cycles) >= len(self._writes):
            return statistics.median(self._cycles)
        # A writer that was alone so far has measured writes and few reads: on a disk both take a
        # millisecond, and its first lost race, to a consumer's acknowledgement, must not hold
        # what comes meanwhile for fifty.
        return 2 * statistics.median(self._writes) if self._writes else FIRST_CYCLE_S


MOST_READ = 1_000
"""Of the entries that others appended, the newest so many are searched for their tags."""


@dataclass(slots=True, eq=False)
class _Request:
    """One call of :meth:`GroupCommitter.append`; ``outcome`` is a sequence or an error."""

    entries: Sequence[NewEntry]
    begin_by: float
    pause_until: float
    """End of the pause for other writers, however many there are."""
    taken: bool = False
    outcome: int | BaseException | None = None


class _Joined:
    """A guard's answer: more appends wait by now, and go into the same write."""


class Committer(ABC):
    """Appends batches to one queue, for callers that share it: from the first :meth:`join` to the
    last :meth:`close`, when ``on_end`` is called. Thread-safe."""

    tag: str
    """Six characters for the ULIDs of all batches that are appended through it: by them other
    processes count the writers. See :func:`.tagged_ulid`."""

    def __init__(self, runtime: Runtime, on_end: Callable[[], object]) -> None:
        self._condition = runtime.condition()
        self._on_end = on_end
        self._callers = 0
        self._ended = False

    @property
    @abstractmethod
    def attempts(self) -> int:
        """Manifest writes tried so far."""

    @property
    @abstractmethod
    def conflicts(self) -> int:
        """How many of them lost against another writer."""

    @abstractmethod
    def pause(self) -> float:
        """Seconds until an append would begin, because others write; not above zero: at once. A
        caller that puts its append together only then gets all of it into one write."""

    @abstractmethod
    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        """Append entries, at least one, in one write: contiguous, in order, all or none. Blocks,
        and returns the first sequence. No write begins after ``begin_by``, monotonic seconds.

        Idempotent by location: what has landed is not appended again. A caller makes one append
        at a time; appends of several callers land in any order.

        Raises:
            Conflict, QueueFull, TransientStorageError: Surely nothing was appended, and it may
                be tried again.
            CommitStateUnknown: It may have been appended.
            OpenDataBufferError: Nothing was appended, and trying again does not help.
        """

    @locked
    def join(self) -> bool:
        """Count one more caller; False when the last one has closed it, or it could not begin."""
        if self._ended:
            return False
        if not self._callers:
            try:
                self._begin()
            except BaseException:
                self._ended = True
                self._on_end()
                raise
        self._callers += 1
        return True

    def close(self) -> None:
        """One caller appends no more; called once by each. After the last one, the next one gets a
        new committer."""
        if self._leave():
            self._end()

    @locked
    def _leave(self) -> bool:
        self._callers -= 1
        self._ended = self._callers == 0
        if self._ended:
            self._on_end()
        return self._ended

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


class GroupCommitter(Committer):
    """Joins the appends of its callers; the thread that finds it idle writes for all of them."""

    def __init__(
        self,
        store: Store,
        config: QueueConfig,
        runtime: Runtime,
        claim: QueueClaim | None,
        on_end: Callable[[], object],
    ) -> None:
        super().__init__(runtime, on_end)
        self._runtime = runtime
        self.tag = ulid_tag(runtime.ulid())
        self._fairness = WriteFairness(runtime.random, self.tag)
        self._queue = Queue(
            store,
            config,
            runtime=runtime,
            role="producer",
            claim=claim,
            after_conflict=lambda: self._fairness.lost(runtime.monotonic()),
        )
        self._paced = store if isinstance(store, RateLimited) else None
        self._read_to: int | None = None
        self._waiting: list[_Request] = []
        self._under_way: list[_Request] = []
        self._writing = False

    @property
    def attempts(self) -> int:
        """See :class:`Committer`."""
        return self._queue.attempts

    @property
    def conflicts(self) -> int:
        """See :class:`Committer`."""
        return self._queue.conflicts

    def pause(self) -> float:
        """See :class:`Committer`."""
        # The store's pace counts as a pause, too: what comes meanwhile goes into this write.
        pause = self._fairness.pause(self._runtime.monotonic())
        return pause if self._paced is None else max(pause, self._paced.write_due(self._queue.key))

    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        """See :class:`Committer`."""
        now = self._runtime.monotonic()
        request = _Request(entries, begin_by, pause_until=(now + begin_by) / 2)
        group = self._await_write(request)
        if group:
            try:
                self._write(group)
            finally:
                self._end_write()
        outcome = request.outcome
        if isinstance(outcome, BaseException):
            raise errors.copied(outcome)  # other producers may raise it at the same time
        assert outcome is not None
        return outcome

    def _begin(self) -> None:
        pass

    def _end(self) -> None:
        self._queue.close()

    @locked
    def _await_write(self, request: _Request) -> list[_Request]:
        """Wait until another thread has appended the request; or what this one must write."""
        self._waiting.append(request)
        try:
            while request.outcome is None:
                now = self._runtime.monotonic()
                left = request.begin_by - now
                if not request.taken and left <= 0 and self._writing:
                    raise _too_late()
                if not self._writing:
                    pause = min(self.pause(), request.pause_until - now)
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
        """Take the waiting appends into the write in flight; called with the lock held."""
        joined, self._waiting = self._waiting, []
        for each in joined:
            each.taken = True
        self._under_way += joined
        return joined

    def _write(self, group: list[_Request]) -> None:
        """Append requests in one write, and with them what comes until it is sent."""
        read_first = self._fairness.begins(self._runtime.monotonic())
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
                    entries, guard=self._guard(read_first), read_first=read_first
                )
            except (errors.InvalidInput, errors.QueueFull) as error:
                if len(group) == 1:
                    group[0].outcome = error
                    return
                # Half of them may fit; all together never would, also into an empty queue. And an
                # entry that no manifest can hold must fail one caller only.
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
        self._fairness.won(self._runtime.monotonic())
        for request in group:
            request.outcome = first
            first += len(request.entries)
        self._read_to = first

    def _guard(self, read_first: bool) -> Callable[[Manifest], _Joined | None]:
        """A guard that reads each manifest that is about to be replaced."""
        attempts, conflicts = self._queue.attempts, self._queue.conflicts

        def guard(before: Manifest) -> _Joined | None:
            self._fairness.saw(self._appended(before), self._runtime.monotonic())
            tried = self._queue.attempts - attempts
            # Behind a read only, or it would cost one. And not while an attempt is in doubt: it
            # may have landed without what came since.
            if not self._waiting or not (read_first or tried):
                return None
            return None if tried > self._queue.conflicts - conflicts else _Joined()

        return guard

    def _appended(self, manifest: Manifest) -> list[str]:
        """Locations that others have appended since the manifest that was read before."""
        start, end = self._read_to, manifest.next_sequence
        self._read_to = end
        if start is None or start >= end:
            return []
        try:
            return [each.location for each in manifest.entries(max(start, end - MOST_READ))]
        except errors.CorruptManifest:
            # An error of readers: an append copies the entries as they are.
            return []

    @locked
    def _end_write(self) -> None:
        self._writing = False
        group, self._under_way = self._under_way, []
        for request in group:
            if request.outcome is None:
                # The thread that wrote was interrupted, by no error of the queue's.
                locations = tuple(entry.location for entry in request.entries)
                reason = "the thread that appended it was interrupted"
                request.outcome = errors.CommitStateUnknown(
                    self._queue.key, None, locations, None, reason
                )
        self._condition.notify_all()


def _too_late() -> errors.TransientStorageError:
    return errors.TransientStorageError(
        "an append waited for another one for too long and was not begun. Nothing was appended."
    )


_committers: dict[Hashable, GroupCommitter] = {}


def shared_committer(
    store: Store, config: QueueConfig, runtime: Runtime, claim: QueueClaim | None = None
) -> GroupCommitter:
    """The process's committer for this manifest, with one more caller, which must close it; it has
    the claim, the deadlines and the limits of the first one."""
    key = committer_key(store, config, runtime, claim)
    return share(_committers, key, partial(GroupCommitter, store, config, runtime, claim))


def committer_key(
    store: Store, config: QueueConfig, runtime: Runtime, claim: QueueClaim | None
) -> Hashable:
    """What the producers have in common that share a committer."""
    # A simulated process, which has a runtime of its own, and a forked child have their own.
    process = os.getpid() if isinstance(runtime, SystemRuntime) else id(runtime)
    # The id, because a queue may be started over while producers of the old one are open.
    return process, id(store), config.manifest_path, "" if claim is None else claim.queue_id


Shared = TypeVar("Shared", bound=Committer)


def share(
    shared: dict[Hashable, Shared], key: Hashable, make: Callable[[Callable[[], object]], Shared]
) -> Shared:
    """The committer of a key, with one more caller. A new one is made with what forgets it."""
    while True:
        found = shared.get(key) or shared.setdefault(key, make(lambda: shared.pop(key, None)))
        if found.join():
            return found


OpenCommitter = Callable[[Store, ProducerConfig, Runtime, QueueClaim | None], Committer]
"""Opens the committer of a producer; the producer closes it."""
