"""What became of the attempts to write one change, as far as that is known. Pure.

An attempt is in doubt while nobody can tell whether it was written or still may be:

* One that lost its race, until the object is read. A proxy that repeats requests turns our own
  success into a conflict.
* One whose answer was lost, while the version it was bound to is the current one. Bound to an
  older one it can never land any more, so if it is not in the object by then it never was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from opendata_buffer.errors import OpenDataBufferError

__all__ = ["Attempts", "Proof", "Untraceable"]

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Untraceable(OpenDataBufferError):
    """What an attempt wrote may have been in the object and be gone again."""


class Proof(Protocol[T_contra]):
    """How a change that must not be applied twice is recognised in a later value."""

    def mark(self) -> int:
        """Where the attempt that was decided last would be found; kept while it is in doubt."""
        ...

    def find(self, now: T_contra, marks: Sequence[int]) -> bool:
        """Whether one of the attempts of this change is in the value read just now.

        Args:
            now: The value.
            marks: Of the attempts in doubt; others surely failed, or were repeated on the way
                and answered as conflicts.

        Raises:
            Untraceable: It is not, but it may have been.
        """
        ...


class Attempts(Generic[T]):
    """The attempts of one change.

    Args:
        proof: How the change is recognised; None for one that may be applied twice.
    """

    def __init__(self, proof: Proof[T | None] | None) -> None:
        self._proof = proof
        self._tried = False
        self._unseen = False  # whether one lost its race, and the object was not read since
        self._mark = 0
        self._lost: list[tuple[int, str | None]] = []  # mark, and the version it was bound to

    @property
    def in_doubt(self) -> bool:
        """Whether one may have landed, or may still land, without our knowing."""
        return self._unseen or bool(self._lost)

    @property
    def first_mark(self) -> int:
        """:meth:`Proof.mark` of the first one in doubt."""
        return self._lost[0][0] if self._lost else self._mark

    def begin(self) -> None:
        """One more is about to be sent."""
        self._tried = True
        self._mark = self._proof.mark() if self._proof is not None else 0

    def landed(self) -> None:
        """The last one was written, and earlier ones cannot be: they were bound to the version
        it replaced, or to older ones."""
        self._unseen = False
        self._lost.clear()

    def raced(self) -> None:
        """The last one was answered with a conflict."""
        self._unseen = True

    def lost_answer(self, version: str | None) -> None:
        """The last one, which was bound to ``version``, was not answered."""
        self._lost.append((self._mark, version))

    def look(self, now: T | None, version: str | None) -> bool:
        """Whether the change is in what was read just now (failures F1, F2).

        Args:
            now: The value; None when there is no object.
            version: The object's.

        Raises:
            Untraceable: It is not, but it may have been.
        """
        if not self._tried:
            return False
        marks = [mark for mark, _ in self._lost]
        found = self._proof is not None and self._proof.find(now, marks)
        self._unseen = False
        self._lost = [] if found else [lost for lost in self._lost if lost[1] == version]
        return found
