"""Storage: what the queue asks of an object store, and nothing more.

Each function asks for the smallest protocol it needs: the fetcher wants :class:`Get`, the
collector :class:`List` and :class:`Delete`, the queue :class:`Get` and :class:`ConditionalPut`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = [
    "ABSENT",
    "Absent",
    "Applied",
    "Blob",
    "ConditionalPut",
    "Delete",
    "DeleteFailure",
    "Get",
    "GetInto",
    "IfVersion",
    "List",
    "Listing",
    "Near",
    "NotModified",
    "ObjectInfo",
    "Paced",
    "Probed",
    "Put",
    "PutOutcome",
    "PutPieces",
    "Store",
    "Unknown",
    "Vanished",
    "VersionConflict",
]


@dataclass(frozen=True, slots=True)
class Blob:
    """What a read returned.

    Attributes:
        data: The object's bytes, or the asked range of them.
        version: Token of exactly these bytes; opaque. Equal tokens mean equal bytes.
        last_modified_ms: When the object was written, by the store's own clock.
    """

    data: bytes
    version: str
    last_modified_ms: int


@dataclass(frozen=True, slots=True)
class NotModified:
    """The object still has the version the caller knows."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Put only if no object of that name exists."""


@dataclass(frozen=True, slots=True)
class IfVersion:
    """Put only if the object still has this version."""

    version: str


ABSENT = Absent()


@dataclass(frozen=True, slots=True)
class Applied:
    """The write landed and the object now has this version."""

    version: str


@dataclass(frozen=True, slots=True)
class VersionConflict:
    """The condition did not hold; nothing was written by this call."""


@dataclass(frozen=True, slots=True)
class Vanished:
    """``IfVersion`` on an object that no longer exists; nothing was written (failure F4)."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The answer was lost: the write may have landed or still land (failures F1, F2)."""

    reason: str


PutOutcome = Applied | VersionConflict | Vanished | Unknown


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing; ``size`` in bytes, time by the store's own clock."""

    key: str
    size: int
    last_modified_ms: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects below a prefix, and the store's own clock when the listing began.

    Ages are ``now_ms - last_modified_ms``: both from one clock, so no client's clock can make
    an object look old (failure F6).

    Attributes:
        objects: In the order of their keys' UTF-8 bytes, which is the order of the strings.
        now_ms: Milliseconds since the Unix epoch.
        truncated: The limit was reached and more objects may follow the last one.
    """

    objects: tuple[ObjectInfo, ...]
    now_ms: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class DeleteFailure:
    """An object that could not be deleted, and why."""

    key: str
    reason: str


class Get(Protocol):
    """Reading one object."""

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | NotModified:
        """Read an object, or ``byte_range`` = (start, end exclusive) of it.

        Returns :class:`NotModified` only when ``if_changed`` is the current version. A range
        is cut at the end of the object.

        Raises:
            ObjectNotFound: No such object.
            InvalidInput: A key no object can have, or a range that is empty or negative.
            CorruptData: The object (or range) is larger than ``max_bytes``; it was not read.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """
        ...


@runtime_checkable
class GetInto(Protocol):
    """Reading one object into memory the caller allocates: where objects are files, no copy."""

    def get_into(
        self, key: str, allocate: Callable[[int], memoryview], *, max_bytes: int | None = None
    ) -> None:
        """Read an object into what ``allocate`` returns; it is called once, with the size in bytes.

        Raises:
            As :meth:`Get.get`. The memory may have been written to.
        """
        ...


@runtime_checkable
class Near(Protocol):
    """A store that may be on the machine that reads it."""

    @property
    def is_near(self) -> bool:
        """Whether reads come from this machine's memory or disks; false where that is not sure.

        Who reads one object after the other there waits for nothing that threads could hide.
        """
        ...


class Put(Protocol):
    """Writing one object, whole, under a name nobody else uses."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object atomically and durably; safe to repeat with the same bytes.

        Raises:
            TransientStorageError, PermanentStorageError: It may or may not have been written.
        """
        ...


@runtime_checkable
class PutPieces(Protocol):
    """Writing one object that lies in several pieces: where objects are files, no copy."""

    def put_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
        """As :meth:`Put.put`, of the pieces one behind the other.

        Raises:
            As :meth:`Put.put`.
        """
        ...


class ConditionalPut(Protocol):
    """Compare-and-swap on one object."""

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        """Write an object if the condition holds, in one attempt.

        Every answer of the store is a value. Only what is surely not applied raises.

        Raises:
            TransientStorageError: It was not begun; try again later.
            PermanentStorageError: Refused: credentials, permissions, missing bucket.
        """
        ...

    def check_conditional_writes(self, near: str) -> None:
        """Make sure the store honours conditions, once per process (failure F12).

        Writes nothing that stays; ``near`` is a key below which a probe object may be named.

        Raises:
            UnsafeStore: The store ignores or does not know conditional writes.
        """
        ...


@runtime_checkable
class Probed(Protocol):
    """A store whose conditions are tried by real writes: what another process found spares them."""

    @property
    def probe_subject(self) -> str:
        """What is tried: endpoint and bucket, the same for all queues in it."""
        ...

    @property
    def is_probed(self) -> bool:
        """Whether this process knows that it is safe."""
        ...

    def take_as_probed(self) -> None:
        """Another process has found that it is safe."""
        ...


@runtime_checkable
class Paced(Protocol):
    """A store that takes writes of one object only so often, as Google's does."""

    def write_due(self, key: str) -> float:
        """Seconds until a write of the object is not refused for its rate; 0 where it may be sent.

        A writer that gathers what it has to write waits so long before it puts its write together.
        """
        ...


class List(Protocol):
    """Listing."""

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """The objects whose key starts with ``prefix`` and comes after ``start_after``.

        A large prefix is read piece by piece: ask with a limit, and while the answer is
        ``truncated`` ask again with its last key as ``start_after``. Names that begin with a
        ULID so come oldest first.

        Args:
            prefix: May end inside a name; ``""`` is everything.
            start_after: Any text, not necessarily a key; it is itself not listed.
            limit: Most objects listed. Default: all of them.

        Raises:
            InvalidInput: ``limit`` is less than 1.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """
        ...


class Delete(Protocol):
    """Deleting."""

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """Delete objects; a missing one counts as deleted. Returns those that failed.

        Never raises for a single object or a failed request: those keys are in the result.
        """
        ...


class Store(Get, Put, ConditionalPut, List, Delete, Protocol):
    """Every operation. Thread-safe, and picklable when another process can reach the store."""

    @property
    def url(self) -> str:
        """The URL that names this store; without credentials."""
        ...
