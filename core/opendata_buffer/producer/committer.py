"""The interface of a committer, which appends batches to a queue.

A producer uploads a batch as an object, and then a committer puts the object's name into the
manifest. There are two: :class:`.GroupCommitter` writes the manifest itself, and
:class:`.BrokeredCommitter` sends the names to a broker while there is one. All producers of a
process that write to one queue share a committer (:mod:`.sharing`), so that one write takes what
all of them have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.runtime import Runtime, locked
from opendata_buffer.stores.base import Store


class Committer(ABC):
    """Appends batches to one queue, for the callers that share it. Thread-safe.

    It lives from the first :meth:`join` to the last :meth:`close`.

    Args:
        runtime: The clock and the threads.
        on_end: Called when the last caller has closed it.
    """

    tag: str
    """Six characters that the ULIDs of all batches start their random part with.

    By them other processes count the writers; see :func:`.tagged_ulid`.
    """

    def __init__(self, runtime: Runtime, on_end: Callable[[], object]) -> None:
        self._condition = runtime.condition()
        self._on_end = on_end
        self._callers = 0
        self._ended = False

    @property
    @abstractmethod
    def attempts(self) -> int:
        """How often it has tried to write the manifest."""

    @property
    @abstractmethod
    def conflicts(self) -> int:
        """How many of these attempts lost against another writer."""

    @abstractmethod
    def pause(self) -> float:
        """Return the seconds until an append would begin, because others write.

        Zero or less means at once. A caller that waits this long before it puts its append together
        gets more into one write.
        """

    @abstractmethod
    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        """Append entries in one write: all or none, in order, with nothing in between.

        It blocks until the outcome is known. It is idempotent by location: an entry that is in the
        queue is not appended again. A caller makes one append at a time. Appends of several callers
        land in any order.

        Args:
            entries: At least one.
            begin_by: No write begins after this time, in monotonic seconds.

        Returns:
            The sequence of the first entry.

        Raises:
            Conflict: Another writer won every race. Nothing was appended; try again.
            QueueFull: The manifest is full. Nothing was appended; try again.
            TransientStorageError: Nothing was appended; try again.
            CommitStateUnknown: The entries may have been appended.
            OpenDataBufferError: Nothing was appended, and trying again does not help.
        """

    @locked
    def join(self) -> bool:
        """Count one more caller.

        Returns:
            False if the committer has ended; then the caller needs a new one.

        Raises:
            OpenDataBufferError: It could not begin.
        """
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
        """Leave: this caller appends no more. Each caller calls it once; the last one ends it."""
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


OpenCommitter = Callable[[Store, ProducerConfig, Runtime, QueueClaim | None], Committer]
"""Opens the committer of a producer, which the producer closes."""
