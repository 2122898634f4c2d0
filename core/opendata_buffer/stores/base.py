"""The protocols of an object store; each caller takes the smallest one that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from opendata_buffer import outcomes
from opendata_buffer.errors import CorruptData, InvalidInput, ObjectNotFound


@dataclass(frozen=True, slots=True)
class Blob:
    """The result of a read. Equal versions mean equal bytes."""

    data: bytes  # of the object, or of the asked range of it
    version: str  # an opaque token of exactly these bytes
    last_modified_ms: int  # when the object was written, by the store's own clock


PutOutcome = outcomes.Outcome[str]
"""The outcome of a conditional put; the applied value is the object's new version."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing; ``size`` in bytes, time by the store's own clock."""

    key: str
    size: int
    last_modified_ms: int


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects below a prefix, in the order of their keys' UTF-8 bytes (that of the strings).

    Ages are ``now_ms - last_modified_ms``, so no client's clock can make an object look old
    (failure F6).
    """

    objects: tuple[ObjectInfo, ...]
    now_ms: int  # when the listing began, by the store's own clock, since the Unix epoch
    truncated: bool = False  # whether the limit was reached, and more may follow the last one


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
    ) -> Blob | None:
        """Read an object, or ``byte_range`` = (start, end exclusive) of it.

        Returns None only when ``if_changed`` is the current version. A range is cut at the end of
        the object.

        Raises:
            ObjectNotFound: No such object.
            InvalidInput: A key no object can have, or a range that is empty or negative.
            CorruptData: The object (or range) is larger than ``max_bytes``; it was not read.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """


class Put(Protocol):
    """Writing one whole object under a name that no other writer uses."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object atomically and durably; safe to repeat with the same bytes. After a
        TransientStorageError or PermanentStorageError it may or may not have been written."""


Allocate = Callable[[int], memoryview]
"""Returns memory to read an object of this many bytes into."""


@runtime_checkable
class ZeroCopy(Protocol):
    """A store that reads into and writes from memory of the caller without a copy.

    Its objects are files of this machine, so reads also have no latency that threads could hide.
    """

    def get_into(
        self, key: str, allocate: Allocate, start: int = 0, *, max_bytes: int | None = None
    ) -> None:
        """Fill the memory that ``allocate`` returns with an object.

        Args:
            key: The object.
            allocate: Called once, with the number of bytes.
            start: First byte of the object to read.
            max_bytes: A larger object is refused.

        Raises:
            ObjectNotFound: There is no such object.
            CorruptData: The object is larger than ``max_bytes``. The memory may have been written
                to.
            StorageError: The store did not answer. The memory may have been written to.
        """

    def put_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write an object that consists of these pieces; otherwise like :meth:`Put.put`."""


class ConditionalPut(Protocol):
    """Compare-and-swap on one object."""

    def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
        """Write an object if it still has this version or, with None, if there is none yet, in one
        attempt; see :mod:`opendata_buffer.outcomes`. Raises TransientStorageError for one that was
        not begun, PermanentStorageError for one that was refused: credentials, permissions, missing
        bucket."""

    def check_conditional_writes(self, near: str) -> None:
        """Raise UnsafeStore for a store that ignores or does not know conditional writes (failure
        F12). Once per process; writes nothing that stays. ``near`` is a key below which a probe
        object may be named."""


@runtime_checkable
class RateLimited(Protocol):
    """A store that limits how often one object is written, as Google's does."""

    def write_due(self, key: str) -> float:
        """Seconds until a write of the object is not refused for its rate; 0 if it may be sent."""


class List(Protocol):
    """Listing."""

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """The objects whose key starts with ``prefix`` and comes after ``start_after``.

        A large prefix is read piece by piece: ask with a limit, and while the answer is
        ``truncated`` ask again with its last key as ``start_after``.

        Args:
            prefix: May end inside a name; ``""`` is everything.
            start_after: Any text, not necessarily a key; it is itself not listed.
            limit: Most objects listed. Default: all of them.

        Raises:
            InvalidInput: ``limit`` is less than 1.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """


class Delete(Protocol):
    """Deleting."""

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """Delete objects; a missing one counts as deleted. Returns those that failed."""


class Store(Get, Put, ConditionalPut, List, Delete, Protocol):
    """Every operation. Thread-safe, and picklable when another process can reach the store."""

    @property
    def url(self) -> str:
        """The URL that names this store; without credentials."""


T = TypeVar("T")


class WrongChecksum(CorruptData):
    """The store keeps another checksum for it (failure F36); reads of a range compare none."""


def read_bytes(store: Get, key: str, max_bytes: int | None = None) -> bytes:
    """Return all bytes of an object. Raises like :meth:`Get.get`."""
    got = store.get(key, max_bytes=max_bytes)
    assert isinstance(got, Blob)  # the other one is only an answer to if_changed
    return got.data


def exists(store: Get, key: str) -> bool:
    """Return whether an object is there. Reads one byte.

    Raises:
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    try:
        store.get(key, byte_range=(0, 1))
    except ObjectNotFound:
        return False
    return True


def check_limit(limit: int | None) -> None:
    """Refuse a listing of no objects: it would be truncated without a key to go on after."""
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit!r}: use a whole number of at least 1")


def check_range(byte_range: tuple[int, int] | None) -> None:
    """Refuse a range (start, end exclusive) that is empty or negative."""
    if byte_range is not None and not 0 <= byte_range[0] < byte_range[1]:
        raise InvalidInput(
            f"byte_range is {byte_range!r}: use (start, end) with 0 <= start < end, end exclusive"
        )


def cut(byte_range: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """The part of the range that an object of ``size`` bytes has: (start, end)."""
    if byte_range is None:
        return (0, size)
    return (min(byte_range[0], size), min(byte_range[1], size))


def check_size(key: str, size: int, max_bytes: int | None) -> None:
    """Refuse to read more than the caller wants to hold in memory."""
    if max_bytes is not None and size > max_bytes:
        raise CorruptData(
            f"object {key!r} has {size} bytes to read, more than the limit of {max_bytes}: "
            "it was not read"
        )
