"""Group commit: one write of the manifest appends what many producers have.

**The problem.** An append is a compare-and-swap of the whole manifest, which takes a store some
tens of milliseconds, and only one can win at a time. If each producer of a process wrote for
itself, they would lose races against each other, and the more of them there were, the slower all
would be.

**The idea.** The producers of a process share one :class:`GroupCommitter`. A caller whose append
finds no write in flight becomes the writer, and writes for every caller that is waiting. Those
that come during the write wait for it, and one of them becomes the next writer. It needs no
thread of its own, so a single producer pays nothing for it.

**An example.** A, B and C append while no write is in flight::

    A   append(a) ---- writes a ---- returns 7
    B        append(b) -- waits -- writes b and c -- returns 8
    C            append(c) -- waits ---------------- returns 9

**Joining.** A writer that reads the manifest first, because other processes write too, looks again
after the read. Requests that arrived meanwhile go into the same write: the guard of
:meth:`.Queue.append` stops the append with :class:`_MoreArrived`, and it begins again with all of
them. Before a write there may also be a pause for other processes (:mod:`.fairness`).

**What can go wrong.**

* *The manifest refuses the group*, because it is full or an entry is not valid. The writer tries
  each half, until only the request that cannot be appended gets the error.
* *An answer was lost.* The group may be in the manifest. Only the queue can find out, so nothing
  joins until it has.
* *The writer is interrupted.* The requests that it took get ``CommitStateUnknown``; the others go
  on with another writer.
* *A request waits too long.* No write begins after its ``begin_by``, since the collector may
  delete its object by then (failure F5). A pause ends at half of this time at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opendata_buffer import errors
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import ulid_tag
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.producer.committer import Committer
from opendata_buffer.producer.fairness import WriteFairness
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, locked
from opendata_buffer.stores.base import RateLimited, Store

MOST_READ = 1_000
"""Most new entries of others, the newest ones, that are searched for tags."""


@dataclass(slots=True, eq=False)
class _Request:
    """One call of :meth:`GroupCommitter.append`."""

    entries: Sequence[NewEntry]
    begin_by: float
    """No write begins after this time, in monotonic seconds."""
    pause_until: float
    """A pause for other writers ends at this time, however many there are."""
    taken: bool = False
    """Whether it is in the write in flight."""
    outcome: int | BaseException | None = None
    """The first sequence, or the error; None while it is waiting or being written."""


class _MoreArrived:
    """The answer of a guard that stops an append: more requests wait by now."""


class GroupCommitter(Committer):
    """A committer that writes the manifest itself. See the module for how it works.

    Args:
        store: The queue's store.
        config: The queue.
        runtime: The clock, the threads and the random numbers.
        claim: The queue as it was claimed for writing.
        on_end: Called when the last caller has closed it.
    """

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
            feeds=True,
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
        pause = self._fairness.pause(self._runtime.monotonic())
        if self._paced is None:
            return pause
        # A store that limits the rate of writes makes a pause, too. Requests that arrive
        # meanwhile go into the next write.
        return max(pause, self._paced.write_due(self._queue.key))

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
            # A copy, because other callers may raise the same error at the same time.
            raise errors.copied(outcome)
        assert outcome is not None
        return outcome

    def _begin(self) -> None:
        pass

    def _end(self) -> None:
        self._queue.close()

    @locked
    def _await_write(self, request: _Request) -> list[_Request]:
        """Wait until another thread has appended a request, or until this thread has to write.

        Returns:
            The requests that this thread has to write; empty if another thread wrote this one.

        Raises:
            TransientStorageError: The request waited until its ``begin_by``. Nothing was appended.
        """
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
        """Take the waiting requests into the write in flight. The caller holds the lock."""
        joined = self._waiting
        self._waiting = []
        for request in joined:
            request.taken = True
        self._under_way += joined
        return joined

    def _write(self, group: list[_Request]) -> None:
        """Append requests in one write, together with those that arrive before it is sent."""
        read_first = self._fairness.begins(self._runtime.monotonic())
        while True:
            group = self._in_time(group)
            if not group:
                return
            entries = [entry for request in group for entry in request.entries]
            guard = self._guard(read_first)
            try:
                first = self._queue.append(entries, guard=guard, read_first=read_first)
            except (errors.InvalidInput, errors.QueueFull) as error:
                self._write_halves(group, error)
                return
            except Exception as error:
                for request in group:
                    request.outcome = error
                return
            if not isinstance(first, _MoreArrived):
                break
            group += self._join()
            # The manifest was read just now, and nothing was written.
            read_first = False
        self._fairness.won(self._runtime.monotonic())
        for request in group:
            request.outcome = first
            first += len(request.entries)
        self._read_to = first

    def _in_time(self, group: list[_Request]) -> list[_Request]:
        """Return the requests that may still begin; the others get their error."""
        now = self._runtime.monotonic()
        for request in group:
            if request.begin_by <= now:
                request.outcome = _too_late()
        return [request for request in group if request.outcome is None]

    def _write_halves(self, group: list[_Request], error: errors.OpenDataBufferError) -> None:
        """Write a group that was refused in two halves; a single request gets the error.

        Half of the group may fit where all of it does not, and all of it might never fit, not even
        into an empty queue. And an entry that no manifest can hold must fail one caller only.
        """
        if len(group) == 1:
            group[0].outcome = error
            return
        half = len(group) // 2
        self._write(group[:half])
        self._write(group[half:])

    def _guard(self, read_first: bool) -> Callable[[Manifest], _MoreArrived | None]:
        """Return a guard, which sees each manifest that the append is about to replace.

        It learns about the other writers from the manifest. And it stops the append if more
        requests have arrived, so that they go into the same write.
        """
        attempts, conflicts = self._queue.attempts, self._queue.conflicts

        def guard(before: Manifest) -> _MoreArrived | None:
            self._fairness.saw(self._appended(before), self._runtime.monotonic())
            tried = self._queue.attempts - attempts
            if not self._waiting:
                return None
            # Stop only after a read: a write from memory would have to read because of it.
            if not (read_first or tried):
                return None
            # Do not stop while the outcome of an attempt is unknown. It may have landed, without
            # the requests that arrived since.
            if tried > self._queue.conflicts - conflicts:
                return None
            return _MoreArrived()

        return guard

    def _appended(self, manifest: Manifest) -> list[str]:
        """Return the newest locations that were appended since the last manifest."""
        start = self._read_to
        end = manifest.next_sequence
        self._read_to = end
        if start is None or start >= end:
            return []
        try:
            return [entry.location for entry in manifest.entries(max(start, end - MOST_READ))]
        except errors.CorruptManifest:
            # A reader reports that. An append copies the entries as they are.
            return []

    @locked
    def _end_write(self) -> None:
        self._writing = False
        group = self._under_way
        self._under_way = []
        for request in group:
            if request.outcome is None:
                # The thread that wrote was interrupted, for example by Ctrl-C.
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
