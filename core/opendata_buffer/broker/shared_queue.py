"""The queue as two threads of a broker use it: one appends for producers, one acknowledges.

With a queue each, every acknowledgement would be a race between the two: who acknowledges reads
first, and would lose against who has the manifest in memory. With one they take turns, and both
write from memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.owner import Claim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores import Store

__all__ = ["SharedQueue"]

T = TypeVar("T")

FRESH_S = 0.2
"""A manifest that was written so recently is not read again to see what is new in it."""


class SharedQueue(Queue):
    """A :class:`Queue` for several threads: each call waits for its turn.

    Args:
        store: Where it lives.
        config: The queue.
        runtime: Clock and threads.
        claim: Of the prefix.
    """

    # Nobody else writes it as often as this process: what it remembers is seldom out of date.
    _changes_from_memory = True

    def __init__(
        self, store: Store, config: QueueConfig, *, runtime: Runtime, claim: Claim | None = None
    ) -> None:
        super().__init__(store, config, runtime=runtime, role="broker", claim=claim)
        self._turn = _Turn(runtime)
        self._written_at = float("-inf")

    def append(
        self,
        entries: Sequence[NewEntry],
        *,
        guard: Callable[[Manifest], T | None] | None = None,
        read_first: bool = False,
        makes_room: bool = False,
    ) -> int | T:
        """See :meth:`Queue.append`."""
        with self._turn:
            found = super().append(
                entries, guard=guard, read_first=read_first, makes_room=makes_room
            )
            self._written_at = self._runtime.monotonic()
            return found

    def claim_epoch(
        self, last_acked_sequence: int | None, *, allow_data_loss: bool = False
    ) -> Manifest:
        """See :meth:`Queue.claim_epoch`."""
        with self._turn:
            return super().claim_epoch(last_acked_sequence, allow_data_loss=allow_data_loss)

    def dequeue(self, through_sequence: int, epoch: int) -> Manifest:
        """See :meth:`Queue.dequeue`."""
        with self._turn:
            return super().dequeue(through_sequence, epoch)

    def read(self) -> Manifest | None:
        """See :meth:`Queue.read`; what this process wrote just now is not read again."""
        if self._runtime.monotonic() - self._written_at < FRESH_S:
            return self.last_seen
        with self._turn:
            return super().read()

    def close(self) -> None:
        """See :meth:`Queue.close`."""
        with self._turn:
            super().close()


class _Turn:
    """A lock that is given to who waits longest: who comes back at once waits behind the others."""

    def __init__(self, runtime: Runtime) -> None:
        self._condition = runtime.condition()
        self._line: deque[object] = deque()

    def __enter__(self) -> None:
        me = object()
        with self._condition:
            self._line.append(me)
            try:
                while self._line[0] is not me:
                    self._condition.wait()
            except BaseException:
                self._line.remove(me)
                self._condition.notify_all()
                raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._condition:
            self._line.popleft()
            self._condition.notify_all()
