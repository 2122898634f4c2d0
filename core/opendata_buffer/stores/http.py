"""What the stores of S3, Google Cloud Storage and Azure share: services that speak HTTP.

Each cloud's client sends a request once. :class:`CloudStore` adds what the promises of
:class:`~.base.Store` need and no client has in the same way: a deadline that also ends a request
without a timeout, repetition of what may be repeated, paging, the probe, and keys below a root.
"""

from __future__ import annotations

import base64
import builtins
import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import ClassVar, TypeVar

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    ObjectNotFound,
    OpenDataBufferError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.formats.keys import MAX_KEY_BYTES, check_key
from opendata_buffer.redaction import redacted
from opendata_buffer.retry import Retries
from opendata_buffer.runtime import Runtime, SystemRuntime, remaining
from opendata_buffer.stores.base import (
    Absent,
    Blob,
    DeleteFailure,
    Get,
    IfVersion,
    Listing,
    NotModified,
    ObjectInfo,
    PutOutcome,
    check_limit,
    check_size,
    cut,
)
from opendata_buffer.stores.probe import PROBE_DEADLINE_MS, RACES, SAFE, probe_conditional_writes

MAX_ERROR_BYTES = 64 * 1024
MAX_PAGE_BYTES = 64 * 1024**2
"""Largest response that is read besides an object. The largest are pages of Azure's listings:
5,000 blobs, each with up to 8 KiB of metadata."""
CHUNK_BYTES = 64 * 1024

_MALFORMED = (AttributeError, HTTPException, LookupError, TypeError, ValueError)
"""What parsing a malformed response may raise, here or in a client library."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing.

    Attributes:
        objects: Their keys without the root.
        token: Where the next page begins; None on the last page.
        now_ms: The service's clock, milliseconds since the Unix epoch; None if it was not sent.
    """

    objects: builtins.list[ObjectInfo]
    token: str | None
    now_ms: int | None


class CloudStore(ABC):
    """A bucket of a cloud, or the part of it below ``root``.

    The client sends each request once. Reads, listings, deletions and unconditional writes that
    failed are repeated here, at most ``max_attempts`` times; a conditional write is not, because
    the repetition of one that was applied and whose response was lost would fail on its own
    success (failure F1).

    Every call ends within the caller's :func:`~opendata_buffer.runtime.deadline`, whatever the
    service does. Without one, a silent service ends it after the timeouts of all attempts.

    Args:
        bucket: The name of the bucket, or of Azure's container.
        root: Prefix of every key, without slashes around it; may be empty.
        options: Endpoint, credentials, timeouts.
        runtime: Backoff, names of probe objects, threads.

    Raises:
        InvalidInput: No key can begin with this root.
    """

    _BUCKET: ClassVar[str] = "bucket"
    _KEYS: ClassVar[str]
    """What the service calls its keys, for messages."""
    _BULK: ClassVar[int]
    """Most keys of one request that deletes."""

    def __init__(
        self, bucket: str, root: str, options: StoreOptions | None, runtime: Runtime | None
    ) -> None:
        if root:
            check_key("root of the store", root)
        self._bucket = bucket
        self._prefix = f"{root}/" if root else ""
        self._options = options if options is not None else StoreOptions()
        self._runtime = runtime if runtime is not None else SystemRuntime()

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL that names this store; without credentials."""

    @abstractmethod
    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | NotModified:
        """See :meth:`opendata_buffer.stores.Get.get`."""

    @abstractmethod
    def _endpoint(self) -> str:
        """The URL of the service, without secrets. Makes the client."""

    @abstractmethod
    def _client_errors(self) -> tuple[type[BaseException], ...]:
        """What the client raises."""

    @abstractmethod
    def _error(self, error: BaseException, verb: str, key: str) -> StorageError:
        """The library's error for one of the client's.

        ``verb`` is read, write, list or delete; ``key`` is the full one.
        """

    @abstractmethod
    def _put_if(
        self, key: str, full: str, data: bytes, condition: Absent | IfVersion
    ) -> PutOutcome:
        """Send one conditional write."""

    @abstractmethod
    def _page(self, prefix: str, start_after: str, token: str | None, wanted: int | None) -> Page:
        """Request one page: from ``token``, for at most ``wanted`` objects (None for all of them).

        ``prefix`` has the root, ``start_after`` has not; objects up to it may be in the page.
        """

    @abstractmethod
    def _delete(self, keys: builtins.list[str]) -> builtins.list[DeleteFailure]:
        """Delete at most :attr:`_BULK` objects; a missing one counts as deleted."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.ConditionalPut.put_if`."""
        full = self._full(key)
        try:
            return self._call(lambda: self._put_if(key, full, data, condition), "write", full)
        except TransientStorageError as error:
            return outcomes.Unknown(str(error))

    def check_conditional_writes(self, near: str) -> None:
        """See :meth:`opendata_buffer.stores.ConditionalPut.check_conditional_writes`.

        Small writes to objects named ``near`` + ``.probe-<ULID>``, a read, and their deletion.
        """
        check_key("near", near)
        endpoint = self._endpoint()
        subject = f"{endpoint}/{self._bucket}"
        if subject in SAFE:
            return
        probe_conditional_writes(
            self,
            near,
            self._runtime,
            name=f"{self.url!r} at {endpoint}",
            room=len(self._prefix.encode()),
            deadline_ms=min(self._options.read_timeout_ms, PROBE_DEADLINE_MS),
            races=self._probe_races(endpoint),
        )
        SAFE.add(subject)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.List.list`."""
        return self._list(prefix, start_after, limit, None)[0]

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.Delete.delete_many`."""
        legal: list[str] = []
        failures: list[DeleteFailure] = []
        for key in keys:
            try:
                self._full(key)
            except InvalidInput as error:
                failures.append(DeleteFailure(key, str(error)))
            else:
                legal.append(key)
        for start in range(0, len(legal), self._BULK):
            chunk = legal[start : start + self._BULK]
            try:
                failures += self._repeated(
                    partial(self._delete, chunk), "delete", f"{len(chunk)} objects"
                )
            except StorageError as error:
                failures += [DeleteFailure(key, str(error)) for key in chunk]
        return tuple(failures)

    def _full(self, key: str) -> str:
        """The object's name in the bucket."""
        check_key("key", key)
        full = self._prefix + key
        if len(full.encode()) > MAX_KEY_BYTES:
            raise InvalidInput(
                f"key {key!r} below root {self._prefix!r} has {len(full.encode())} bytes: "
                f"{self._KEYS} have at most {MAX_KEY_BYTES}, use a shorter one"
            )
        return full

    def _probe_races(self, endpoint: str) -> int:
        """For how many objects the probe lets writers race."""
        del endpoint
        return RACES

    def _list(
        self, prefix: str, start_after: str, limit: int | None, token: str | None
    ) -> tuple[Listing, str | None]:
        """A listing that begins at a token, and the token of what follows its last object; that is
        None where the listing ends in the middle of a page."""
        check_limit(limit)
        full = self._prefix + prefix
        objects: list[ObjectInfo] = []
        now_ms: int | None = None
        while True:
            wanted = None if limit is None else limit - len(objects)
            page = self._repeated(
                partial(self._page, full, start_after, token, wanted), "list", full
            )
            if token and token == page.token:
                raise TransientStorageError(
                    f"cannot list {full!r} in {self.url}: the listing goes on where it was. Check "
                    "what answers at the endpoint, or try again later."
                )
            now_ms = page.now_ms if now_ms is None else now_ms
            # A service that ignores start_after must not repeat what the caller already has.
            objects += [each for each in page.objects if each.key > start_after]
            token = page.token
            if not token or (limit is not None and len(objects) >= limit):
                break
        if now_ms is None:
            # The service sent no clock. Its newest object is a lower bound, so nothing looks
            # older than it is; this machine's clock would be no such bound (failure F6).
            now_ms = max((info.last_modified_ms for info in objects), default=0)
        # Buckets with directories, and services that only resemble these, have another order.
        kept = tuple(sorted(objects, key=lambda info: info.key)[:limit])
        is_cut = len(kept) < len(objects)
        listing = Listing(kept, now_ms, truncated=is_cut or bool(token))
        return listing, None if is_cut else token

    def _check_put(self, key: str, full: str, data: bytes) -> None:
        """Make sure that a write was applied whose response has no version.

        The services always send one. A proxy that answers 200 in their place must not be
        believed, or what is lost would be acknowledged.
        """
        found = verify_write(self, key, data)
        if isinstance(found, outcomes.Unknown):
            raise TransientStorageError(f"cannot write {full!r}: {found.reason}")

    def _where(self) -> str:
        endpoint = self._options.endpoint_url
        at = f" at {redacted(endpoint)}" if endpoint else ""
        return f"{self._BUCKET} {self._bucket!r}{at}"

    def _unversioned(self, found: str, use: str) -> UnsafeStore:
        """The error for responses that have ``found`` instead of a version."""
        return UnsafeStore(
            f"store {self.url!r} at {self._endpoint()} answers a read with {found}: nothing tells "
            "whether an object is still the one that was read, and writers of one manifest would "
            f"overwrite each other. {use}"
        )

    def _call(self, request: Callable[[], T], verb: str, key: str) -> T:
        """What ``request`` returns, within the caller's deadline; errors are the library's.

        A passed deadline and a malformed response are transient errors.
        """

        def mapped() -> T:
            try:
                return request()
            except OpenDataBufferError:
                raise
            except self._client_errors() as error:
                raise self._error(error, verb, key) from error
            except _MALFORMED as error:
                # Client libraries take any response to be the service's. What a broken server or
                # a proxy sent ends in whatever error comes of it.
                raise TransientStorageError(
                    f"cannot {verb} {key!r} in {self._where()}: the answer makes no sense "
                    f"({type(error).__name__}: {redacted(str(error)).strip()}). Check what answers "
                    "at the endpoint, or try again later."
                ) from error

        try:
            return within_deadline(self._runtime, mapped)
        except DeadlinePassed:
            raise TransientStorageError(
                f"cannot {verb} {key!r} in {self._where()}: no answer in time. Check the endpoint "
                "and the network, or try again later."
            ) from None

    def _repeated(self, request: Callable[[], T], verb: str, key: str) -> T:
        """As :meth:`_call`, repeated after transient failures, at most ``max_attempts`` times."""
        return repeat_transient(
            self._runtime, self._options, lambda: self._call(request, verb, key)
        )


def repeat_transient(runtime: Runtime, options: StoreOptions, once: Callable[[], T]) -> T:
    """What ``once`` returns, after at most ``max_attempts`` transient failures.

    Between two attempts it waits as long as the service asked for, but no longer than one attempt
    may take; else it backs off. Where that wait would not end before the caller's deadline, the
    failure is raised at once. ``once`` must have the same effect when it is done twice.
    """

    def pause(error: BaseException) -> float | None:
        asked: float | None = getattr(error, "retry_after_s", None)
        if asked is None:
            return None
        # Jitter: all clients that were refused together would otherwise return together.
        return min(asked, options.read_timeout_ms / 1000) + runtime.random()

    policy = Retries(
        runtime,
        base_ms=100,
        max_ms=2_000,
        deadline_ms=options.read_timeout_ms * options.max_attempts,
        retry_on=(TransientStorageError,),
        pause=pause,
        max_attempts=options.max_attempts,
    )
    return policy(once)


def with_retry_after(error: StorageError, headers: Mapping[str, str]) -> StorageError:
    """The error, with how long the response asks to wait before the next attempt.

    A ``Retry-After`` that is a date is ignored: it would be compared with this machine's clock.
    """
    seconds = headers.get("retry-after", "")
    if isinstance(error, TransientStorageError) and seconds.isdecimal() and len(seconds) < 10:
        error.retry_after_s = float(seconds)
    return error


class DeadlinePassed(Exception):
    """The call did not end in time; it may still be under way, and take effect."""


def within_deadline(runtime: Runtime, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, within the deadline of the calling thread.

    Resolving a name has no timeout, fetching credentials has others than ours, and a server that
    sends a byte now and then never exceeds the timeout between two bytes. So with a deadline the
    call runs in a thread of its own, and its caller goes on without it when the time is up. The
    call sees the same deadline and begins nothing more once it has passed; the request it waits
    for then ends by its own timeout. Without a deadline it runs in the calling thread.

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
        result: tuple[T | None, BaseException | None]
        try:
            result = (call(), None)
        except BaseException as error:  # raised again in the caller's thread
            result = (None, error)
        with changed:
            ended.append(result)
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


def read_part(
    key: str,
    read: Callable[[int | None], bytes],
    size: int | None,
    byte_range: tuple[int, int] | None,
    max_bytes: int | None,
    *,
    whole: bool,
) -> bytes:
    """The part of a response's body that was asked for; no more is read than shows an excess.

    Args:
        key: For errors.
        read: Reads the body: at most so many bytes of it, or all.
        size: Of the body; None where the response does not tell it.
        byte_range: What was asked for.
        max_bytes: Most bytes of that.
        whole: The service knows no ranges and sends the whole object.
    """
    if whole:
        data = read(None)
        start, end = cut(byte_range, len(data))
        data = data[start:end]
    elif size is not None:
        check_part(key, size, byte_range, max_bytes)
        data = read(None)
    else:
        asked = None if byte_range is None else byte_range[1] - byte_range[0]
        limits = [each for each in (max_bytes, asked) if each is not None]
        data = read(min(limits) + 1 if limits else None)
    check_part(key, len(data), byte_range, max_bytes)
    return data


def check_part(
    key: str, size: int, byte_range: tuple[int, int] | None, max_bytes: int | None
) -> None:
    """Refuse more bytes than the limit, or than the range that was asked for."""
    check_size(key, size, max_bytes)
    if byte_range is not None and size > byte_range[1] - byte_range[0]:
        raise TransientStorageError(
            f"cannot read {byte_range[1] - byte_range[0]} bytes of {key!r}: the answer has {size} "
            "bytes. Check what answers at the endpoint, or try again later."
        )


def verify_write(store: Get, key: str, written: bytes) -> outcomes.Applied[str] | outcomes.Unknown:
    """The outcome of a write that was answered without a version, as behind some proxies.

    If the object holds the bytes that were written, its version is a version of them, also
    if another writer wrote it last. It raises nothing: the write may be applied, and an error
    would deny it.
    """
    why = "the object has changed since"
    try:
        found = store.get(key, max_bytes=len(written))
        if isinstance(found, Blob) and found.data == written:
            return outcomes.Applied(found.version)
    except (CorruptData, ObjectNotFound):
        pass  # it may have been written all the same, and is larger or deleted since
    except OpenDataBufferError as error:
        why = f"it cannot be looked up: {error}"
    return outcomes.Unknown(f"the store answered a write of {key!r} without its version, and {why}")


def not_modified(key: str, store: str, if_changed: str | None) -> NotModified:
    """The result of a read that was answered with 304: an error where the caller knows no version,
    because the response is not to its request then.
    """
    if if_changed is None:
        raise TransientStorageError(
            f"cannot read {key!r} in {store}: it was answered as not modified (304), which was not "
            "asked. Check what answers at the endpoint (a cache?), or try again later."
        )
    return NotModified()


def strong_etag(etag: str | None) -> str | None:
    """A response's ETag; None when there is none, or when it is weak.

    A weak one (``W/"..."``) says that two contents are equivalent, not that they are the same
    bytes. It never matches an ``If-Match``.
    """
    return None if not etag or etag.startswith("W/") else etag


def md5(data: bytes | memoryview) -> bytes:
    """The MD5 of some bytes: against accidents, not against attackers."""
    return hashlib.md5(data, usedforsecurity=False).digest()


def crc32(data: bytes | memoryview) -> bytes:
    """The CRC-32 of some bytes, the highest byte first."""
    return zlib.crc32(data).to_bytes(4, "big")


def as_base64(checksum: bytes) -> str:
    """A checksum as headers carry it."""
    return base64.b64encode(checksum).decode()


def check_md5(data: bytes, expected: bytes | None, what: str) -> None:
    """Refuse bytes whose MD5 is not the one that the service sent (failure F36)."""
    if expected is not None and expected != md5(data):
        raise TransientStorageError(
            f"cannot read {what}: the bytes were garbled on the way (MD5). Try again."
        )
