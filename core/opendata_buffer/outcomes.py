"""The outcomes of a conditional write: applied, conflict, vanished, unknown.

A store answers one conditional put with one of these four, :mod:`~opendata_buffer.queue.cas`
answers a change that took several attempts with one of the same four, and each error that a user
sees for a write stands for one of them. There is no other vocabulary for it.

==============  ====================  ======================  ====================  ==============
outcome         the store's answer    what certainly          the caller then       error that a
                                      happened                                      user sees
==============  ====================  ======================  ====================  ==============
`Applied`       success, and the      Written, exactly this.  Continues with the    none
                new version           Earlier attempts        new version.
                                      cannot apply any more.
`LostRace`      the condition does    Not written by this     Reads the object.     `Conflict`
                not hold (412)        request, and never      Looks in it for a     if every
                                      will be. A proxy that   change that must not  attempt lost
                                      repeats requests may    be applied twice, and until the
                                      have written it before  otherwise tries       deadline
                                      (failure F1).           again.
`Vanished`      the condition names   Not written, and never  Stops: it does not    `QueueReset`
                a version, and the    will be.                create a deleted      for a manifest
                object is gone (404)                          object again
                                                              (failure F4).
`Unknown`       no answer in time,    Nothing is certain: it  Reads the object: it  `Commit-
                or none that can be   may be written, or may  was written if the    StateUnknown`
                trusted               still be written later  change is in it, and  if this stays
                                      (failure F2).           never will be if the  unknown until
                                                              version it was bound  the deadline
                                                              to was replaced.
==============  ====================  ======================  ====================  ==============

A request that certainly changed nothing for another reason (no permission, no bucket, nothing was
sent) is not an outcome: it raises ``PermanentStorageError`` or ``TransientStorageError``.

:class:`opendata_buffer.errors.Conflict` is the error that may follow from :class:`LostRace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from opendata_buffer.errors import OpenDataBufferError

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, slots=True)
class Applied(Generic[T]):
    """The write was applied."""

    value: T
    """The new version of the object for a store's put; the new value for a change."""


@dataclass(frozen=True, slots=True)
class LostRace:
    """Certainly not written: another writer was faster at each of the attempts."""

    attempts: int = 1
    waited_s: float = 0.0

    def __str__(self) -> str:
        return f"other writers were faster {self.attempts} times in {self.waited_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Vanished:
    """Certainly not written: the object was deleted while it was in use (failure F4)."""

    def __str__(self) -> str:
        return "it was deleted meanwhile"


@dataclass(frozen=True, slots=True)
class Unknown:
    """The write may have been applied, or may still be applied (failures F1, F2)."""

    reason: str
    first_mark: int = 0
    """Where the first attempt of a change with an unknown outcome would be."""
    cause: OpenDataBufferError | None = None
    """The error that ended the change; None if the deadline ended it."""

    def __str__(self) -> str:
        return self.reason.rstrip(".")


Outcome = Applied[T] | LostRace | Vanished | Unknown
