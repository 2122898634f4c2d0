"""Who appends to a manifest: a :class:`Committer`, and the one of this process.

A committer appends what its callers give it and answers each with a sequence or an error; it
knows nothing of uploads, lanes or producers. :class:`GroupCommitter` joins what waits: while one
compare-and-swap is on its way, appends of all producers of the process pile up, and the next one
takes them all. They never race each other then, and the store's rate of compare-and-swaps is not
the limit on batches per second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CommitStateUnknown, QueueFull, TransientStorageError
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.locks import locked
from opendata_buffer.queue.owner import Claim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores import Store

__all__ = ["Committer", "GroupCommitter", "shared_committer"]


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
    taken: bool = False
    outcome: int | BaseException | None = None


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
        self._queue = Queue(store, config, runtime=runtime, role="producer", claim=claim)
        self._condition = runtime.condition()
        self._waiting: list[_Request] = []
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

    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        """See :class:`Committer`."""
        request = _Request(entries, begin_by)
        group = self._await_turn(request)
        if group:
            try:
                self._write(group)
            finally:
                self._end(group)
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
                if not self._writing:
                    self._writing = True
                    group, self._waiting = self._waiting, []
                    for each in group:
                        each.taken = True
                    return group
                left = request.begin_by - self._runtime.monotonic()
                if not request.taken and left <= 0:
                    raise _too_late()
                self._condition.wait(None if request.taken else left)
            return []
        finally:
            if request in self._waiting:
                self._waiting.remove(request)

    def _write(self, group: list[_Request]) -> None:
        now = self._runtime.monotonic()
        for request in group:
            if request.begin_by <= now:
                request.outcome = _too_late()
        group = [each for each in group if each.outcome is None]
        if not group:
            return
        try:
            first = self._queue.append([entry for each in group for entry in each.entries])
        except QueueFull as error:
            if len(group) == 1:
                group[0].outcome = error
                return
            # Half of them may fit; all together never would, also into an empty queue.
            half = len(group) // 2
            self._write(group[:half])
            self._write(group[half:])
        except Exception as error:
            for request in group:
                request.outcome = error
        else:
            for request in group:
                request.outcome = first
                first += len(request.entries)

    @locked
    def _end(self, group: list[_Request]) -> None:
        self._writing = False
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


_committers: dict[tuple[int, int, str], GroupCommitter] = {}


def shared_committer(
    store: Store, config: QueueConfig, runtime: Runtime, *, claim: Claim | None = None
) -> GroupCommitter:
    """The process's committer for this manifest, with one more caller, who must close it.

    Made for the first caller, with that one's claim, deadlines and limits. A simulated process
    has a runtime of its own and so stands for itself. A forked child makes its own.
    """
    process = os.getpid() if isinstance(runtime, SystemRuntime) else id(runtime)
    key = (process, id(store), config.manifest_path)

    def forget() -> None:
        _committers.pop(key, None)

    while True:
        committer = _committers.get(key)
        if committer is None:
            made = GroupCommitter(store, config, runtime, claim, forget)
            committer = _committers.setdefault(key, made)
        if committer.join():
            return committer
