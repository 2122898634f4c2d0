"""The outcomes of a conditional write: applied, conflict, vanished, unknown.

A store answers one conditional put with one of these four, :class:`~opendata_buffer.queue.cas`
answers a change that took several attempts with one of the same four, and each error that a user
sees for a write stands for one of them. There is no other vocabulary for it.

==============  ====================  ======================  ====================  ==============
outcome         the store's answer    what surely happened,   what the caller does  error that a
                                      what surely did not                           user sees
==============  ====================  ======================  ====================  ==============
`Applied`       success, and the      Written, exactly this.  Goes on with the new  none
                new version           Earlier attempts        version.
                                      cannot apply any more.
`Conflict`      the condition does    Not written by this     Reads the object, to  `Conflict`
                not hold (412)        request, and never      see what won; a       when every
                                      will be. A proxy that   change that must not  attempt lost
                                      repeats requests may    be applied twice is   until the
                                      have written it before  looked for in it;     deadline
                                      (failure F1).           tries again.
`Vanished`      the condition names   Not written, and never  Stops: a deleted      `QueueReset`
                a version, and there  will be.                object is not made    for a manifest
                is no object (404)                            again (failure F4).
`Unknown`       nothing, nothing      Nothing is sure: it     Reads the object: it  `Commit-
                that can be believed  may be written, or may  is written if the     StateUnknown`
                in time               still be written later  change is in it, and  when that is
                                      (failure F2).           never will be if the  unknown until
                                                              version it was bound  the deadline
                                                              to is replaced.
==============  ====================  ======================  ====================  ==============

A request that surely changed nothing for another reason (no permission, no bucket, nothing was
sent) is no outcome: it raises a ``PermanentStorageError`` or ``TransientStorageError``.

Import the module and not the classes: ``outcomes.Conflict`` is a value, and
:class:`opendata_buffer.errors.Conflict` the error that may follow from it.
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
class Conflict:
    """Surely not written: another writer was faster, at each of the attempts."""

    attempts: int = 1
    waited_s: float = 0.0

    def __str__(self) -> str:
        return f"other writers were faster each of {self.attempts} times in {self.waited_s:.0f} s"


@dataclass(frozen=True, slots=True)
class Vanished:
    """Surely not written: the object was deleted while it was in use (failure F4)."""

    def __str__(self) -> str:
        return "it was deleted meanwhile"


@dataclass(frozen=True, slots=True)
class Unknown:
    """The write may have been applied, or may still be (failures F1, F2)."""

    reason: str
    first_mark: int = 0
    """Where a change's first attempt with an unknown outcome would be."""
    cause: OpenDataBufferError | None = None
    """The error that ended the change, if it was an error and not the deadline."""

    def __str__(self) -> str:
        return self.reason.rstrip(".")


Outcome = Applied[T] | Conflict | Vanished | Unknown
