"""The protocols of an object store. Each caller takes the smallest one it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from opendata_buffer import outcomes
from opendata_buffer.errors import CorruptData, InvalidInput, ObjectNotFound
from opendata_buffer.stores.probed import Probed


@dataclass(frozen=True, slots=True)
class Blob:
    """The result of a read. Equal versions mean equal bytes.

    Attributes:
        data: The object, or the range of it that was asked for.
        version: An opaque token of exactly these bytes.
        last_modified_ms: When the object was written, by the store's own clock, in milliseconds
            since the Unix epoch.
    """

    data: bytes
    version: str
    last_modified_ms: int


PutOutcome = outcomes.Outcome[str]
"""The outcome of a conditional put. The value of an applied one is the object's new version."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing.

    Attributes:
        key: The object.
        size: Its bytes.
        last_modified_ms: When it was written, by the store's own clock, in milliseconds since the
            Unix epoch.
        version: Changes with its bytes; empty if the listing does not tell. It may have another
            form than the version of a read.
    """

    key: str
    size: int
    last_modified_ms: int
    version: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """Objects below a prefix, in the order of their keys' UTF-8 bytes (as Python orders strings).

    Ages are ``now_ms - last_modified_ms``, so no client's clock can make an object look old
    (failure F6).

    Attributes:
        objects: The objects.
        now_ms: When the listing began, by the store's own clock, since the Unix epoch.
        truncated: Whether the limit was reached, so that more objects may follow the last one.
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
    """Reads one object."""

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | None:
        """Read an object, or a range of it.

        Args:
            key: The object.
            if_changed: A version. If the object still has it, nothing is read.
            byte_range: (start, end exclusive). A range is cut at the end of the object.
            max_bytes: Largest object or range to read, in bytes.

        Returns:
            The object; None only if ``if_changed`` is the current version.

        Raises:
            ObjectNotFound: The object does not exist.
            InvalidInput: No object can have this key, or the range is empty or negative.
            CorruptData: The object (or range) is larger than ``max_bytes``; it was not read.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """


class Put(Protocol):
    """Writes one whole object under a name that no other writer uses."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object atomically and durably. Safe to repeat with the same bytes.

        Args:
            key: The object's key.
            data: All of its bytes.

        Raises:
            TransientStorageError, PermanentStorageError: The object may or may not have been
                written.
        """


Allocate = Callable[[int], memoryview]
"""Returns memory for an object of the given number of bytes."""


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
            max_bytes: An object of more bytes is refused.

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
        """Write an object, in one attempt, if it still has this version.

        Args:
            key: The object.
            data: Its new bytes.
            version: The version that it must have; None if it must not exist.

        Returns:
            The outcome; see :mod:`opendata_buffer.outcomes`.

        Raises:
            TransientStorageError: The write was not begun.
            PermanentStorageError: The write was refused: credentials, permissions, or a missing
                bucket.
        """

    def check_conditional_writes(
        self, near: str, known: Iterable[Probed] = (), *, trust: bool = True
    ) -> Probed | None:
        """Check, once per process, that the store honors conditional writes.

        A place that ``known`` names is not probed. It only has to refuse one wrong write, as in
        :meth:`check_refusal`.

        Args:
            near: A key below which a probe object may be named.
            known: Probes that count, made before by any process.
            trust: Whether the probe of another process counts. With false, only a probe of this
                process does. Use it after something happened that a sound store does not allow.

        Returns:
            The probe that counts for this place; None if the store needs none.

        Raises:
            UnsafeStore: The store ignores conditional writes or does not support them (failure
                F12).
            StorageError: The store did not answer.
        """

    def check_refusal(self, near: str) -> None:
        """Check, once per process, that the store refuses a write whose condition does not hold.

        One request, which writes nothing on a sound store.

        Args:
            near: A key below which an object would be named.

        Raises:
            UnsafeStore: The store accepted the write (failure F12).
            StorageError: The store did not answer.
        """


@runtime_checkable
class RateLimited(Protocol):
    """A store that limits how often one object is written, like Google's."""

    def write_due(self, key: str) -> float:
        """Return the seconds until the store accepts a write of the object; 0 if it does now."""


class List(Protocol):
    """Lists objects."""

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """Return the objects whose key starts with ``prefix`` and comes after ``start_after``.

        Read a large prefix piece by piece: ask with a limit, and as long as the answer is
        ``truncated``, ask again with its last key as ``start_after``.

        Args:
            prefix: May end inside a name; ``""`` means everything.
            start_after: Any text, not necessarily a key; a key equal to it is not listed.
            limit: Largest number of objects. Default: all of them.

        Returns:
            The objects by key, the store's time, and whether there are more.

        Raises:
            InvalidInput: ``limit`` is less than 1.
            TransientStorageError, PermanentStorageError: The store did not answer.
        """


class Delete(Protocol):
    """Deletes objects."""

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """Delete objects, and return those that failed; a missing one counts as deleted."""


class Store(Get, Put, ConditionalPut, List, Delete, Protocol):
    """All operations. Thread-safe, and picklable if another process can reach the store."""

    @property
    def url(self) -> str:
        """The URL that names this store, without credentials."""


T = TypeVar("T")


class WrongChecksum(CorruptData):
    """The store keeps another checksum for the object (failure F36). Range reads compare none."""


def read_bytes(store: Get, key: str, max_bytes: int | None = None) -> bytes:
    """Read all bytes of an object.

    Args:
        store: The store.
        key: The object's key.
        max_bytes: Largest object, in bytes. Default: no limit.

    Returns:
        The bytes.

    Raises:
        ObjectNotFound: The object does not exist.
        CorruptData: The object is larger than ``max_bytes``.
        StorageError: The store did not answer.
    """
    got = store.get(key, max_bytes=max_bytes)
    assert isinstance(got, Blob)  # None is only an answer to if_changed
    return got.data


def exists(store: Get, key: str) -> bool:
    """Return whether an object is there. Reads one byte.

    Args:
        store: Where to look.
        key: The object's key.

    Returns:
        Whether the store has the object.

    Raises:
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    try:
        store.get(key, byte_range=(0, 1))
    except ObjectNotFound:
        return False
    return True


def check_limit(limit: int | None) -> None:
    """Refuse a listing of no objects, which would be truncated without a key to continue after.

    Args:
        limit: Largest number of objects; None for all of them.

    Raises:
        InvalidInput: The limit is less than 1.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit!r}: use a whole number of at least 1")


def check_range(byte_range: tuple[int, int] | None) -> None:
    """Refuse a range that is empty or negative.

    Args:
        byte_range: The first byte and the one after the last; None for the whole object.

    Raises:
        InvalidInput: The range has no bytes, or begins before the object.
    """
    if byte_range is not None and not 0 <= byte_range[0] < byte_range[1]:
        raise InvalidInput(
            f"byte_range is {byte_range!r}: use (start, end) with 0 <= start < end, end exclusive"
        )


def cut(byte_range: tuple[int, int] | None, size: int) -> tuple[int, int]:
    """Return the part (start, end) of the range that an object of ``size`` bytes has."""
    if byte_range is None:
        return (0, size)
    return (min(byte_range[0], size), min(byte_range[1], size))


def check_size(key: str, size: int, max_bytes: int | None) -> None:
    """Refuse to read more than the caller wants to hold in memory."""
    if max_bytes is not None and size > max_bytes:
        raise CorruptData.too_large(
            f"object {key!r} has {size} bytes to read, more than the limit of {max_bytes}: "
            "it was not read",
            max_bytes,
        )
