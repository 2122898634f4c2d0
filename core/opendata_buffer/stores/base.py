"""Storage: what the queue asks of an object store, and nothing more.

Each function asks for the smallest protocol it needs: the fetcher wants :class:`Get`, the
collector :class:`List` and :class:`Delete`, the queue :class:`Get` and :class:`ConditionalPut`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from opendata_buffer import outcomes
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    ObjectNotFound,
    OpenDataBufferError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.formats.sidecar import Sidecar

__all__ = [
    "ABSENT",
    "Absent",
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
    "check_goes_on",
    "check_limit",
    "check_range",
    "check_size",
    "cut",
    "listed",
    "looked_up",
    "not_modified",
    "read_part",
    "read_sidecar",
    "strong_etag",
    "unversioned",
    "weak_or_none",
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


PutOutcome = outcomes.Outcome[str]
"""What became of a conditional put; the applied value is the object's new version."""


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


# ---- Reading the small JSON objects beside a manifest ----
#
# By who only looks; a register changes them.


T = TypeVar("T")


def read_sidecar(store: Get, key: str, kind: Sidecar, decode: Callable[[bytes], T]) -> T:
    """The object at a key, as a value.

    Args:
        store: Where it lies.
        key: Its key.
        kind: How large it may be.
        decode: From its bytes to the value; raises :class:`CorruptData`.

    Raises:
        ObjectNotFound: There is none.
        CorruptData: It is too large, or no such object; names the key.
        TransientStorageError, PermanentStorageError: The store did not answer.
    """
    try:
        got = store.get(key, max_bytes=kind.max_bytes)
    except CorruptData as error:
        raise CorruptData(f"{key!r}: {kind.unreadable(str(error).rstrip('.'))}") from error
    assert isinstance(got, Blob)  # the other one is only an answer to if_changed
    try:
        return decode(got.data)
    except CorruptData as error:
        # The decoder sees bytes and cannot say whose they are.
        raise CorruptData(f"{key!r}: {error}") from error


# ---- What became of a write whose answer does not tell the version that it made. ----


def looked_up(store: Get, key: str, written: bytes) -> outcomes.Applied[str] | outcomes.Unknown:
    """The outcome of a write that was answered without a version, as behind some proxies.

    If the object holds the bytes that were written, its version is a version of them, whoever
    wrote it last. It raises nothing: the write may be there, and an error would deny it.

    Args:
        store: Read once.
        key: Of the object.
        written: What was sent.
    """
    why = "the object has changed since"
    try:
        found = store.get(key, max_bytes=len(written))
        if isinstance(found, Blob) and found.data == written:
            return outcomes.Applied(found.version)
    except (CorruptData, ObjectNotFound):
        pass  # it may have been written all the same, and is larger or gone since
    except OpenDataBufferError as error:
        why = f"it cannot be looked up: {error}"
    return outcomes.Unknown(f"the store answered a write of {key!r} without its version, and {why}")


# ---- Versions in answers: what tells whether an object is still the one that was read. Pure. ----


def not_modified(key: str, store: str, if_changed: str | None) -> NotModified:
    """What a 304 means: nothing, where no version was asked about.

    Args:
        key: That was read.
        store: Its URL.
        if_changed: The version that the caller knows.

    Raises:
        TransientStorageError: It knows none, and would take the answer for the object.
    """
    if if_changed is None:
        raise TransientStorageError(
            f"cannot read {key!r} in {store}: it was answered as not modified (304), which was not "
            "asked. Check what answers at the endpoint (a cache?), or try again later."
        )
    return NotModified()


def strong_etag(etag: str | None) -> str | None:
    """An answer's ETag; None when there is none, or when it is weak.

    A weak one (``W/"..."``) says that two contents are as good as each other, not that they are
    the same bytes. It never matches an ``If-Match``.
    """
    return None if not etag or etag.startswith("W/") else etag


def weak_or_none(etag: str | None) -> str:
    """What an answer has instead of a strong ETag, in words."""
    return f"the weak ETag {etag}" if etag else "no ETag"


def unversioned(store: str, answers: str, use: str) -> UnsafeStore:
    """The error about a store whose answers do not tell an object's version.

    Args:
        store: Its URL and its endpoint.
        answers: What it answers, in words: ``answers a read with no ETag``.
        use: What to use instead, as a whole sentence.
    """
    return UnsafeStore(
        f"store {store} {answers}: nothing tells whether an object is still the one that was read, "
        f"and writers of one manifest would overwrite each other. {use}"
    )


# ---- Byte ranges and limits of reads and listings, the same for every store. ----


def check_limit(limit: int | None) -> None:
    """Refuse a listing of no objects: it would be truncated without a key to go on after.

    Raises:
        InvalidInput: ``limit`` is less than 1.
    """
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit is {limit!r}: use a whole number of at least 1")


def check_goes_on(token: object, following: object, prefix: str, store: str) -> None:
    """Refuse a listing whose next page would be the same one again, for ever.

    Args:
        token: Where this page began; empty or None for the first.
        following: Where the next one begins.
        prefix: The full prefix.
        store: The store's URL.

    Raises:
        TransientStorageError: Both are the same.
    """
    if token and token == following:
        raise TransientStorageError(
            f"cannot list {prefix!r} in {store}: the listing goes on where it was. Check what "
            "answers at the endpoint, or try again later."
        )


def check_range(byte_range: tuple[int, int] | None) -> None:
    """Refuse a range (start, end exclusive) that is empty or negative.

    Raises:
        InvalidInput: It is.
    """
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
    """Refuse to read more than the caller wants to hold in memory.

    Raises:
        CorruptData: ``size`` is larger than ``max_bytes``.
    """
    if max_bytes is not None and size > max_bytes:
        raise CorruptData(
            f"object {key!r} has {size} bytes to read, more than the limit of {max_bytes}: "
            "it was not read"
        )


def read_part(
    key: str,
    read: Callable[[int | None], bytes],
    size: int | None,
    byte_range: tuple[int, int] | None,
    max_bytes: int | None,
    *,
    whole: bool,
) -> bytes:
    """What was asked for of an answer's body, reading no more than tells that it is too much.

    Args:
        key: For errors.
        read: Reads the body: at most so many bytes of it, or all.
        size: Of the body; None where the answer does not tell it.
        byte_range: What was asked for.
        max_bytes: Most bytes of that.
        whole: There was a range, and the answer has the whole object: the store knows no ranges.

    Raises:
        CorruptData: There are more than ``max_bytes``.
        TransientStorageError: There are more than the range has.
    """
    most = None if max_bytes is None else max_bytes + 1
    if byte_range is not None:
        most = byte_range[1] if whole else byte_range[1] - byte_range[0] + 1
    if size is not None:
        start, end = cut(byte_range, size) if whole else (0, size)
        check_size(key, end - start, max_bytes)
        _check_asked(key, end - start, byte_range)
        return read(None if end == size else end)[start:end]
    data = read(most)
    start, end = cut(byte_range, len(data)) if whole else (0, len(data))
    check_size(key, end - start, max_bytes)
    _check_asked(key, end - start, byte_range)
    # All of it is not copied: bytes sliced from 0 to their end are the same object.
    return data[start:end]


def _check_asked(key: str, size: int, byte_range: tuple[int, int] | None) -> None:
    """Refuse more bytes than a range has: they are others than were asked for.

    Raises:
        TransientStorageError: There are.
    """
    if byte_range is not None and size > byte_range[1] - byte_range[0]:
        raise TransientStorageError(
            f"cannot read bytes {byte_range[0]} to {byte_range[1]} of {key!r}: the answer has "
            f"{size} bytes. Check what answers at the endpoint, or try again later."
        )


def listed(
    objects: Sequence[ObjectInfo], now_ms: int | None, limit: int | None, *, more: bool
) -> Listing:
    """The listing that pages of a service make.

    Args:
        objects: All that were read, which may be more than ``limit``.
        now_ms: The service's clock, milliseconds since the Unix epoch; None where it told none.
        limit: Most objects of the listing.
        more: Whether there are pages that were not read.
    """
    if now_ms is None:
        # No clock of the store's: its newest object is a lower bound, so nothing looks
        # older than it is. This machine's clock would be no such bound (failure F6).
        now_ms = max((info.last_modified_ms for info in objects), default=0)
    # In their order already, except on accounts and buckets with directories, and on what only
    # looks like one of these services.
    kept = tuple(sorted(objects, key=lambda info: info.key)[:limit])
    return Listing(kept, now_ms, truncated=more or len(kept) < len(objects))
