"""How much is read of an answer: a server that sends without end must not fill the memory."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import copy_context
from http.client import HTTPException
from typing import TypeVar

from urllib3.exceptions import ProtocolError

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    InvalidInput,
    OpenDataBufferError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.formats.keys import MAX_KEY_BYTES, check_key
from opendata_buffer.redaction import redacted
from opendata_buffer.retry import full_jitter
from opendata_buffer.runtime import Runtime, remaining
from opendata_buffer.stores.base import DeleteFailure

__all__ = [
    "DeadlinePassed",
    "MOST_OF_AN_ERROR",
    "MOST_OF_A_PAGE",
    "PIECE",
    "Root",
    "TooLong",
    "as_base64",
    "bounded",
    "check_md5",
    "crc32",
    "in_time",
    "limited",
    "md5",
    "repeated",
    "with_pause",
]


# ---- The part of a bucket that a store is: the keys below a prefix. ----


class Root:
    """Puts the root of a store before its keys.

    Args:
        root: Prefix of every key, without slashes around it; may be empty.
        names: What the service calls its keys, for messages: ``S3 keys``.

    Raises:
        InvalidInput: A root that no key can begin with.
    """

    def __init__(self, root: str, names: str) -> None:
        if root:
            check_key("root of the store", root)
        self._names = names
        self.prefix = f"{root}/" if root else ""

    def full(self, key: str) -> str:
        """The object's name in the bucket.

        Raises:
            InvalidInput: A key that no object can have, or one that is too long with the root.
        """
        check_key("key", key)
        full = self.prefix + key
        if len(full.encode()) > MAX_KEY_BYTES:
            raise InvalidInput(
                f"key {key!r} below root {self.prefix!r} has {len(full.encode())} bytes: "
                f"{self._names} have at most {MAX_KEY_BYTES}, use a shorter one"
            )
        return full

    def legal(self, keys: Iterable[str]) -> tuple[list[str], list[DeleteFailure]]:
        """Those that an object can have, and why the others are not deleted."""
        found: list[str] = []
        failures: list[DeleteFailure] = []
        for key in keys:
            try:
                self.full(key)
            except InvalidInput as error:
                failures.append(DeleteFailure(key, str(error)))
            else:
                found.append(key)
        return found, failures


# ---- Checksums of objects on their way to a service and back. Pure. ----


def md5(data: bytes | memoryview) -> bytes:
    """The MD5 of some bytes: against accidents, not against people."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def crc32(data: bytes | memoryview) -> bytes:
    """The CRC-32 of some bytes, the highest byte first."""
    return zlib.crc32(data).to_bytes(4, "big")


def as_base64(checksum: bytes) -> str:
    """As headers carry it."""
    return base64.b64encode(checksum).decode()


def check_md5(data: bytes, told: bytes | None, what: str) -> None:
    """Refuse bytes that are not those whose MD5 the service told.

    Args:
        data: What was read.
        told: None where it told none.
        what: Which object, in words.

    Raises:
        TransientStorageError: They are others.
    """
    if told is not None and told != md5(data):
        raise TransientStorageError(
            f"cannot read {what}: the bytes were garbled on the way (MD5). Try again."
        )


# ---- Sending again what may be sent again, for clients that repeat nothing by themselves. ----


T = TypeVar("T")


def with_pause(error: StorageError, headers: Mapping[str, str]) -> StorageError:
    """The error, with how long its answer asks to wait before the next attempt.

    Args:
        error: Only a transient one is tried again.
        headers: Of the answer. A ``Retry-After`` that is a date is passed by: it would be compared
            with a clock of this machine.
    """
    told = headers.get("retry-after", "")
    if isinstance(error, TransientStorageError) and told.isdecimal() and len(told) < 10:
        error.retry_after_s = float(told)
    return error


def repeated(runtime: Runtime, options: StoreOptions, once: Callable[[], T]) -> T:
    """What ``once`` returns, after at most ``max_attempts`` transient failures.

    Between two attempts it waits as long as the service asked for, but no longer than one attempt
    may take; else it backs off. Where that wait would not end before the caller's deadline, the
    failure is raised at once.

    Args:
        runtime: Backoff.
        options: How many attempts, and how long each may take.
        once: A read, a listing, a deletion or an unconditional write: what does the same when it
            is done twice.

    Raises:
        TransientStorageError: Of the last attempt.
        Exception: Anything else that ``once`` raises, at once.
    """
    left = options.max_attempts

    def attempt() -> T:
        nonlocal left
        left -= 1
        try:
            return once()
        except TransientStorageError as error:
            if left > 0:
                raise _Again(error) from error
            raise

    def pause(error: BaseException) -> float | None:
        told = error.error.retry_after_s if isinstance(error, _Again) else None
        # Later by a part of a second, or all that were sent away together would be back together.
        most = options.read_timeout_ms / 1000
        return None if told is None else min(told, most) + runtime.random()

    policy = full_jitter(
        runtime,
        base_ms=100,
        max_ms=2_000,
        deadline_ms=options.read_timeout_ms * options.max_attempts,
        retry_on=(_Again,),
        pause=pause,
    )
    try:
        return policy(attempt)
    except _Again as again:  # no time is left for another attempt
        raise again.error from again.error.__cause__


class _Again(Exception):
    """What failed and may be tried again."""

    def __init__(self, error: TransientStorageError) -> None:
        super().__init__(str(error))
        self.error = error


# ---- Ends a call of a store at its deadline, also one that no timeout of its own ends. ----
#
# Resolving a name has no timeout, fetching credentials has others than ours, and a server that
# sends a byte now and then never exceeds the one between two bytes. So a call that has a deadline
# runs in a thread of its own, and its caller goes on without it when the time is up.


_NONSENSE = (AttributeError, HTTPException, LookupError, TypeError, ValueError)
"""What reading an answer may end in that is none."""


class DeadlinePassed(Exception):
    """The call did not end in time; it may still be under way, and take effect."""


def bounded(runtime: Runtime, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, within the deadline of the calling thread.

    The call sees the same deadline and can begin nothing more once it has passed; the request it
    waits for then ends by its own timeout. Without a deadline it runs in the calling thread.

    Raises:
        DeadlinePassed: The call did not end in time, or was not begun: no time was left.
    """
    left = remaining()
    if left is None:
        return call()
    if left <= 0:
        raise DeadlinePassed
    changed = runtime.condition()
    ended: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = (call(), None)
        except BaseException as error:  # raised again in the caller's thread
            outcome = (None, error)
        with changed:
            ended.append(outcome)
            changed.notify_all()

    context = copy_context()
    runtime.spawn(lambda: context.run(run), "opendata-buffer-store")
    with changed:
        while not ended:
            left = remaining()
            if left is None or left <= 0:
                raise DeadlinePassed
            changed.wait(left)
    result, error = ended.pop()
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # T may include None


def in_time(
    runtime: Runtime, call: Callable[[], T], *, verb: str, key: str, where: Callable[[], str]
) -> T:
    """What ``call`` returns or raises, within the deadline of the calling thread.

    Args:
        runtime: Threads.
        call: One request, or a few.
        verb: ``read``, ``write``, ``list`` or ``delete``.
        key: The full key, or prefix.
        where: Says what was asked; called when it gave no answer.

    Raises:
        TransientStorageError: It did not end in time, or the answer could not be made sense of.
    """
    try:
        return bounded(runtime, call)
    except (OpenDataBufferError, OSError):
        raise
    except _NONSENSE as error:
        # Libraries, and what reads their results here, take an answer to be the service's. What a
        # broken server or a proxy has written ends in whatever error comes of it.
        raise TransientStorageError(
            f"cannot {verb} {key!r} in {where()}: the answer makes no sense "
            f"({type(error).__name__}: {redacted(str(error)).strip()}). Check what answers at the "
            "endpoint, or try again later."
        ) from error
    except DeadlinePassed:
        raise TransientStorageError(
            f"cannot {verb} {key!r} in {where()}: no answer in time. Check the endpoint and the "
            "network, or try again later."
        ) from None


MOST_OF_A_PAGE = 64 * 1024**2
"""Of any answer but an object. The longest are pages of Azure's listings: 5,000 blobs, which may
each have 8 KiB of metadata that others gave them."""

MOST_OF_AN_ERROR = 64 * 1024

PIECE = 64 * 1024


class TooLong(ProtocolError):
    """An answer has more bytes than it may."""


def limited(parts: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The parts of a body, until they are more than ``most`` bytes together.

    Raises:
        TooLong: They are.
    """
    left = most
    for part in parts:
        left -= len(part)
        if left < 0:
            raise TooLong(f"the answer has more than the {most} bytes that it may have")
        yield part
