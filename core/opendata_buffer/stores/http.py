"""The common part of the stores for S3, Google Cloud Storage, and Azure, which speak HTTP.

Each cloud's client sends a request once. :class:`CloudStore` adds the other promises of a
:class:`~.base.Store`: deadlines, retries of requests that may be repeated, paging, the probe, and
a root.
"""

from __future__ import annotations

import builtins
import hashlib
import re
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPException
from typing import Any, ClassVar, TypeVar

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions, hide_secrets, redacted
from opendata_buffer.errors import (
    CorruptData,
    InvalidInput,
    ObjectNotFound,
    OpenDataBufferError,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.formats.batch import MAX_KEY_BYTES, check_key
from opendata_buffer.runtime import Retries, Runtime, SystemRuntime, in_parallel, remaining
from opendata_buffer.stores.base import (
    Blob,
    DeleteFailure,
    Get,
    Listing,
    ObjectInfo,
    PutOutcome,
    WrongChecksum,
    check_limit,
    check_range,
    check_size,
    cut,
)
from opendata_buffer.stores.probe import (
    PROBE_DEADLINE_MS,
    RACES,
    check_refusal,
    probe_conditional_writes,
)
from opendata_buffer.stores.probed import PLACES, Probed

MAX_ERROR_BYTES = 64 * 1024
MAX_PAGE_BYTES = 64 * 1024**2
"""Largest response that is read, apart from objects. Pages of Azure's listings are the largest:
5,000 blobs, each with up to 8 KiB of metadata."""

GARBLED = "The bytes were garbled on the way; try again."
OF_A_PROXY = (
    "That is not the answer of the store (a proxy, an ingress?): check what answers at the "
    "endpoint, or try again later."
)

_MALFORMED = (AttributeError, HTTPException, LookupError, TypeError, ValueError)
"""Errors that parsing a malformed response may raise, here or in a client library."""

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True, slots=True)
class Read:
    """The arguments of one :meth:`.Get.get`; ``name`` is the key including the store's root."""

    key: str
    name: str
    if_changed: str | None
    byte_range: tuple[int, int] | None
    max_bytes: int | None

    @property
    def range_header(self) -> dict[str, str]:
        """The ``Range`` header of the request; empty for the whole object."""
        if self.byte_range is None:
            return {}
        return {"Range": f"bytes={self.byte_range[0]}-{self.byte_range[1] - 1}"}

    def part_of(
        self, read_body: Callable[[int | None], bytes], size: int | None, *, whole: bool
    ) -> bytes:
        """Return the bytes that were asked for; read at most one byte past the limit.

        Args:
            read_body: Reads at most this many bytes of the response's body; None reads all of it.
            size: Size of the body in bytes, if the response tells it.
            whole: The body is the whole object, because the service does not support ranges.

        Returns:
            The bytes.

        Raises:
            CorruptData: The body is larger than ``max_bytes``.
            TransientStorageError: The body is larger than the range.
        """
        if whole:
            data = read_body(None)
            start, end = cut(self.byte_range, len(data))
            data = data[start:end]
        elif size is not None:
            self.check_size(size)
            data = read_body(None)
        else:
            limits = [each for each in (self.max_bytes, self._asked) if each is not None]
            data = read_body(min(limits) + 1 if limits else None)
            if limits and len(data) <= min(limits):
                data += read_body(None)  # the client compares a checksum only at the end
        self.check_size(len(data))
        return data

    @property
    def _asked(self) -> int | None:
        """Number of bytes in the range; None for the whole object."""
        return None if self.byte_range is None else self.byte_range[1] - self.byte_range[0]

    def check_size(self, size: int) -> None:
        """Refuse more bytes than the limit, or than the range that was asked for.

        Args:
            size: The number of bytes in the response.

        Raises:
            CorruptData: The object is larger than ``max_bytes``.
            TransientStorageError: The response is larger than the range.
        """
        check_size(self.key, size, self.max_bytes)
        if self._asked is not None and size > self._asked:
            raise TransientStorageError(
                f"cannot read {self._asked} bytes of {self.key!r}: the answer has {size} bytes. "
                "Check what answers at the endpoint, or try again later."
            )


Answer = str | outcomes.LostRace | outcomes.Vanished | outcomes.Unknown | None
"""A service's answer to a conditional write. The answer to an applied write is the object's
version, or None if the response has none."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing. Keys are without the root, and ``now_ms`` is the service's clock."""

    objects: builtins.list[ObjectInfo]
    token: str | None  # where the next page begins; None on the last page
    now_ms: int | None


class CloudStore(ABC):
    """A bucket of a cloud (or an Azure container), or the part of it below ``root``.

    The client sends each request once. This class retries failed reads, listings, deletions, and
    unconditional writes, at most ``max_attempts`` times. It does not retry a conditional write:
    after a lost response, a write that was applied would fail because of its own success (failure
    F1).

    Every call ends within the caller's :func:`~opendata_buffer.runtime.deadline`, whatever the
    service does. Without a deadline, it ends after the timeouts of all attempts.

    Args:
        bucket: Name of the bucket or container.
        root: Prefix of every key, without slashes at its ends; may be empty.
        options: How to reach the service.
        runtime: Clock and threads.

    Raises:
        InvalidInput: No key can begin with ``root``.
    """

    _SCHEME: ClassVar[str]
    _BULK: ClassVar[int] = 1_000  # most keys of one request that deletes
    _RACE_FREE: ClassVar[str] = ""  # an endpoint where races are known to have one winner
    _unordered = False
    """Whether listings are not in the order of the keys (S3's directory buckets, hierarchical
    namespaces of Azure and Google). Each listing then reads all pages and sorts them."""
    # For messages: the service's own terms, and the advice for responses without versions, for
    # missing permissions, and after a refusal without a better explanation.
    _CLOUD: ClassVar[str]
    _BUCKET: ClassVar[str] = "bucket"
    _KEYS: ClassVar[str]
    _VERSION: ClassVar[str] = "ETag"
    _USE: ClassVar[str]
    _ALLOW: ClassVar[str] = ""
    _CHECK: ClassVar[str]

    def __init__(
        self,
        bucket: str,
        root: str = "",
        options: StoreOptions | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        if root:
            check_key("root of the store", root)
        self._bucket = bucket
        self._prefix = f"{root}/" if root else ""
        self._options = options if options is not None else StoreOptions()
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Set this service's attributes, such as ``_client``, which the first request creates."""

    @property
    def url(self) -> str:
        """``scheme://bucket/root``."""
        return f"{self._SCHEME}://{self._bucket}/{self._prefix}".rstrip("/")

    @abstractmethod
    def _endpoint(self) -> str:
        """Return the URL of the service, without secrets. This creates the client."""

    @abstractmethod
    def _client_errors(self) -> tuple[type[BaseException], ...]:
        """Return the errors that the client raises."""

    @abstractmethod
    def _error(self, error: BaseException, verb: str, name: str) -> StorageError:
        """Return the library's error for the client's; ``verb`` is read, write, list, or delete."""

    @abstractmethod
    def _get(self, read: Read) -> Blob | None:
        """Send one read."""

    @abstractmethod
    def _put(self, name: str, data: bytes) -> str | None:
        """Send one unconditional write, and return the object's version in the response."""

    @abstractmethod
    def _put_if(self, name: str, data: bytes, version: str | None) -> Answer:
        """Send one conditional write."""

    @abstractmethod
    def _page(self, prefix: str, start_after: str, token: str | None, wanted: int | None) -> Page:
        """Request one page of a listing.

        Args:
            prefix: With the root.
            start_after: Without the root. The page may still contain objects up to it.
            token: Where the page begins; None for the first one.
            wanted: Largest number of objects; None for all.
        """

    @abstractmethod
    def _delete(self, keys: builtins.list[str]) -> builtins.list[DeleteFailure]:
        """Delete at most :attr:`_BULK` objects; a missing one counts as deleted."""

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | None:
        """See :meth:`opendata_buffer.stores.base.Get.get`."""
        read = Read(key, self._full(key), if_changed, byte_range, max_bytes)
        check_range(byte_range)

        def once() -> Blob | None:
            found = self._get(read)
            if found is None and if_changed is None:
                raise TransientStorageError(
                    f"cannot read {key!r} in {self.url}: it was answered as not modified (304), "
                    "which was not asked. Check what answers at the endpoint (a cache?)."
                )
            return found

        return self._repeated(once, "read", read.name)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.base.Put.put`."""
        name, content = self._full(key), bytes(data)

        def once() -> None:
            if not self._put(name, content):
                # The services always send a version. Do not trust a proxy that answers 200 in
                # their place: a lost object would be reported as durable.
                found = verify_write(self, key, content)
                if isinstance(found, outcomes.Unknown):
                    raise TransientStorageError(f"cannot write {name!r}: {found.reason}")

        self._repeated(once, "write", name)

    def put_if(self, key: str, data: bytes, version: str | None) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.put_if`."""
        name = self._full(key)
        try:
            found = self._call(lambda: self._put_if(name, data, version), "write", name)
        except TransientStorageError as error:
            return outcomes.Unknown(str(error))
        if isinstance(found, outcomes.LostRace | outcomes.Vanished | outcomes.Unknown):
            return found
        new = strong_etag(found)
        return verify_write(self, key, data) if new is None else outcomes.Applied(new)

    def check_conditional_writes(
        self, near: str, known: Iterable[Probed] = (), *, trust: bool = True
    ) -> Probed | None:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.check_conditional_writes`."""
        check_key("near", near)
        races = 0 if self._endpoint() == self._RACE_FREE else RACES
        return PLACES.check(
            self._place(),
            known,
            self._runtime.now_ms(),
            trust=trust,
            refusal=partial(check_refusal, self, near, self._runtime, **self._probing()),
            probe=partial(
                probe_conditional_writes, self, near, self._runtime, races=races, **self._probing()
            ),
        )

    def check_refusal(self, near: str) -> None:
        """See :meth:`opendata_buffer.stores.base.ConditionalPut.check_refusal`."""
        check_key("near", near)
        PLACES.check_refusal(
            self._place(), partial(check_refusal, self, near, self._runtime, **self._probing())
        )

    def _place(self) -> str:
        """Return the endpoint and the bucket, which together decide who answers."""
        return f"{self._endpoint()}/{self._bucket}"

    def _probing(self) -> dict[str, Any]:
        return {
            "name": f"{self.url!r} at {self._endpoint()}",
            "room": len(self._prefix.encode()),
            "deadline_ms": min(self._options.read_timeout_ms, PROBE_DEADLINE_MS),
        }

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.base.List.list`."""
        return self._list(prefix, start_after, limit, None)[0]

    def list_versions(self, prefix: str, most: int) -> Mapping[str, str] | None:
        """See :meth:`opendata_buffer.stores.listed.ListsVersions.list_versions`."""
        full = self._prefix + prefix
        page = self._repeated(partial(self._page, full, "", None, most), "list", full)
        if page.token or not all(found.version for found in page.objects):
            return None
        # The time, too: an object that was changed and changed back has been written.
        return {found.key: f"{found.version} {found.last_modified_ms}" for found in page.objects}

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.base.Delete.delete_many`."""
        legal: list[str] = []
        failures: list[DeleteFailure] = []
        for key in keys:
            try:
                self._full(key)
                legal.append(key)
            except InvalidInput as error:
                failures.append(DeleteFailure(key, str(error)))
        for start in range(0, len(legal), self._BULK):
            chunk = legal[start : start + self._BULK]
            try:
                failures += self._repeated(
                    partial(self._delete, chunk), "delete", f"{len(chunk)} objects"
                )
            except StorageError as error:
                failures += [DeleteFailure(key, str(error)) for key in chunk]
        return tuple(failures)

    def _delete_each(
        self, delete: Callable[[str], None], keys: builtins.list[str]
    ) -> builtins.list[DeleteFailure]:
        """Delete objects with one request each."""
        failures: list[DeleteFailure] = []

        def delete_one(key: str) -> None:
            name = self._prefix + key
            try:
                self._repeated(partial(delete, name), "delete", name)
            except StorageError as error:
                failures.append(DeleteFailure(key, str(error)))

        in_parallel(self._runtime, delete_one, keys)
        return failures

    def _full(self, key: str) -> str:
        """Return the object's name in the bucket."""
        check_key("key", key)
        full = self._prefix + key
        if len(full.encode()) > MAX_KEY_BYTES:
            raise InvalidInput(
                f"key {key!r} below root {self._prefix!r} has {len(full.encode())} bytes: "
                f"{self._KEYS} have at most {MAX_KEY_BYTES}, use a shorter one"
            )
        return full

    def _list(
        self, prefix: str, start_after: str, limit: int | None, token: str | None
    ) -> tuple[Listing, str | None]:
        """Return a listing that begins at a token, and the token after its last object.

        The second value is None if the listing ends within a page.
        """
        check_limit(limit)
        full = self._prefix + prefix
        most, after = limit, start_after
        if self._unordered:
            most, after, token = None, "", None
        begins_at = token
        keys = [start_after] if token else []
        objects: list[ObjectInfo] = []
        dates: list[int] = []
        while True:
            wanted = None if most is None else most - len(objects)
            page = self._repeated(partial(self._page, full, after, token, wanted), "list", full)
            if token and token == page.token:
                raise TransientStorageError(
                    f"cannot list {full!r} in {self.url}: the listing goes on where it was. Check "
                    "what answers at the endpoint, or try again later."
                )
            dates += [] if page.now_ms is None else [page.now_ms]
            keys += [each.key for each in page.objects]
            # A service that ignores start_after must not repeat keys that the caller already has.
            objects += [each for each in page.objects if each.key > start_after]
            token = page.token
            if not token or (most is not None and len(objects) >= most):
                break
        is_part = token or begins_at or start_after
        if is_part and most is not None and keys != sorted(keys):
            # The first keys are known only after everything was listed.
            self._unordered = True
            return self._list(prefix, start_after, limit, None)
        # Where the service sent no clock, its newest object is a lower bound: nothing looks older
        # than it is. This machine's clock would be no such bound (failure F6).
        now_ms = dates[0] if dates else max((each.last_modified_ms for each in objects), default=0)
        kept = tuple(sorted(objects, key=lambda info: info.key)[:limit])
        is_cut = len(kept) < len(objects)
        listing = Listing(kept, now_ms, truncated=is_cut or bool(token))
        return listing, None if is_cut else token

    def _is_gone(self, name: str) -> bool:
        """Return whether a condition failed because the object is missing.

        GCS and Azure answer 412 in both cases.
        """
        try:
            self._get(Read(name, name, None, (0, 1), None))
        except ObjectNotFound:
            return True
        return False

    def _version(self, sent: str | None) -> str:
        """Return the version of an object that was read, from the response."""
        version = strong_etag(sent)
        if version is None:
            found = f"the weak {self._VERSION} {sent}" if sent else f"no {self._VERSION}"
            raise UnsafeStore(
                f"store {self.url!r} at {self._endpoint()} answers a read with {found}: nothing "
                "tells whether an object is still the one that was read, and writers of one "
                f"manifest would overwrite each other. {self._USE}"
            )
        return version

    def _check_md5(self, read: Read, data: bytes, expected: str | None) -> None:
        """Refuse a whole object whose MD5 is not the one that the service sent (failure F36)."""
        if read.byte_range is None and expected not in (None, md5(data)):
            raise self._garbled(read)

    def _garbled(self, read: Read) -> WrongChecksum:
        return WrongChecksum(
            f"{self._cannot('read', read.name, None)}: its bytes do not have the checksum that the "
            "store keeps for it, and have changed since it was written"
        )

    def _cannot(self, verb: str, name: str, endpoint: str | None) -> str:
        """Return the beginning of an error's message."""
        at = f" at {redacted(endpoint)}" if endpoint else ""
        return f"cannot {verb} {name!r} in {self._BUCKET} {self._bucket!r}{at}"

    def _unsendable(self, what: str) -> PermanentStorageError:
        """Return the error for a header that cannot be sent; it may be a secret, so hide it."""
        return PermanentStorageError(
            f"{what}: a header of the request has a character that HTTP cannot carry. Most likely "
            f"one of the {self._CLOUD} credentials has a newline or another character that is not "
            "visible ASCII: strip it where the credential is stored."
        )

    def _unanswered(self, what: str, reason: BaseException | str) -> TransientStorageError:
        """Return the error for a request without a response, or with a malformed one."""
        if isinstance(reason, BaseException):
            reason = f"{type(reason).__name__}: {redacted(str(reason)).strip().rstrip('.')}"
        return TransientStorageError(
            f"{what}: {reason}. Check {self._doubtful()}, and the network, or try again later."
        )

    def _doubtful(self) -> str:
        """Return what else than the network may be wrong when a request gets no response."""
        return "what answers at the endpoint"

    def _refusal(self, what: str, status: int, verb: str) -> StorageError:
        """Return the error for an HTTP status that means the same in every cloud."""
        if status in (408, 429) or (status >= 500 and status != 501):
            hint = "The store failed or is overloaded; try again later."
            return TransientStorageError(f"{what}. {hint}")
        bucket = f"{self._BUCKET} {self._bucket!r}"
        fixes = {
            401: f"Renew or correct the {self._CLOUD} credentials.",
            403: f"Allow these credentials to {verb} objects of {bucket}{self._ALLOW}.",
            404: f"Create {bucket} or correct the store URL.",
        }
        return PermanentStorageError(f"{what}. {fixes.get(status, self._CHECK)}")

    def _call(self, request: Callable[[], T], verb: str, name: str) -> T:
        """Call ``request`` within the caller's deadline; raise only the library's errors."""
        # Not the client's endpoint: making the client may be what takes too long.
        endpoint = self._options.endpoint_url

        def mapped() -> T:
            failure: OpenDataBufferError
            try:
                return request()
            except OpenDataBufferError as error:
                failure = error
            except self._client_errors() as error:
                if is_unsendable(error):
                    failure = self._unsendable(self._cannot(verb, name, endpoint))
                else:
                    failure = self._error(error, verb, name)
                failure.__cause__ = error
            except _MALFORMED as error:
                what = self._cannot(verb, name, endpoint)
                if is_unsendable(error):
                    failure = self._unsendable(what)
                else:
                    # Client libraries treat the answer of a proxy like the service's own.
                    failure = self._unanswered(what, error)
                failure.__cause__ = error
            try:
                # Not in the handlers: there Python would chain the client's error again, with what
                # it says of a header.
                raise without_secrets(failure)
            finally:
                del failure  # else the error, its traceback and this frame hold each other

        try:
            return within_deadline(self._runtime, mapped)
        except DeadlinePassed:
            what = self._cannot(verb, name, endpoint)
            raise self._unanswered(what, "no answer in time") from None

    def _repeated(self, request: Callable[[], T], verb: str, name: str) -> T:
        """Do the same as :meth:`_call`, and retry transient failures."""
        options = self._options

        def pause(error: BaseException) -> float | None:
            """As long as the service asked for, but no longer than one attempt may take."""
            asked: float | None = getattr(error, "retry_after_s", None)
            if asked is None:
                return None
            # Add jitter. Otherwise all clients that were refused together would return together.
            return min(asked, options.read_timeout_ms / 1000) + self._runtime.random()

        policy = Retries(
            self._runtime,
            base_ms=100,
            max_ms=2_000,
            deadline_ms=options.read_timeout_ms * options.max_attempts,
            # Bytes that were damaged in transit are right in the next attempt.
            retry_on=(TransientStorageError, WrongChecksum),
            pause=pause,
            max_attempts=options.max_attempts,
        )
        return policy(self._call, request, verb, name)


_UNSENDABLE = re.compile(
    r"invalid header (?:value|name)|header value|header part|legal header|"
    r"'(?:latin-1|ascii)' codec can't encode",
    re.IGNORECASE,
)
"""The words of http.client, urllib3, requests, and botocore for a header that they cannot send.
Some of them quote the header."""


def is_unsendable(error: BaseException) -> bool:
    """Return whether a request was not sent because of a character that no header can carry."""
    links = [*chain_of(error)]
    # A service's answer may mention headers, too.
    is_answer = any(getattr(link, "response", None) is not None for link in links)
    return not is_answer and any(_UNSENDABLE.search(str(link)) for link in links)


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause and context, and theirs."""
    seen = set[int]()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            waiting += [link.__cause__, link.__context__]


def without_secrets(error: E) -> E:
    """Remove credentials from the text of an error, and its chain if that shows one (failure F49).

    The chain has the errors of the client library, which may quote the header that it could not
    send. A chain without a credential stays, because it helps to find the cause.

    Args:
        error: The error, which is changed in place.

    Returns:
        The same error.
    """
    error.args = tuple(redacted(each) if isinstance(each, str) else each for each in error.args)
    links = [link for link in chain_of(error) if link is not error]
    for link in links:
        if getattr(link, "request", None) is not None:
            link.request = None  # type: ignore[attr-defined]  # its headers have a signature
    texts = [f"{link}\n{link!r}" for link in links]
    if any(_UNSENDABLE.search(text) or hide_secrets(text) != text for text in texts):
        error.__cause__ = error.__context__ = None
    return error


def with_retry_after(error: StorageError, headers: Mapping[str, str]) -> StorageError:
    """Return the error with the time that the response asks to wait before the next attempt.

    A date is ignored, because it would be compared with this machine's clock.
    """
    seconds = headers.get("retry-after", "")
    if isinstance(error, TransientStorageError) and seconds.isdecimal() and len(seconds) < 10:
        error.retry_after_s = float(seconds)
    return error


class DeadlinePassed(Exception):
    """The call did not end in time. It may still be running and take effect."""


def time_left() -> float | None:
    """Return the seconds until the caller's deadline; None without one.

    Returns:
        The seconds, more than 0; None without a deadline.

    Raises:
        DeadlinePassed: No time is left. The caller has continued, so nothing more may be sent.
    """
    left = remaining()
    if left is not None and left <= 0:
        raise DeadlinePassed
    return left


def read_timeout_s(options: StoreOptions) -> float:
    """Return how long the service may stay silent, in seconds, for a request that is sent now."""
    left = time_left()
    silence_s = options.read_timeout_ms / 1000
    return silence_s if left is None else min(silence_s, left)


def within_deadline(runtime: Runtime, call: Callable[[], T]) -> T:
    """Call a function within the deadline of the calling thread.

    Name resolution has no timeout, fetching credentials has timeouts other than ours, and a server
    that sends a byte now and then never exceeds the timeout between two bytes. With a deadline, the
    call therefore runs in its own thread, and its caller continues without it when the time is up.

    Args:
        runtime: Clock and threads.
        call: The function.

    Returns:
        The function's result.

    Raises:
        DeadlinePassed: Time is up; the call may still be running.
        BaseException: The function's error.
    """
    if time_left() is None:
        return call()
    changed = runtime.condition()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)
        with changed:
            changed.notify_all()

    context = copy_context()
    runtime.spawn(lambda: context.run(run), "opendata-buffer-store")
    with changed:
        while not (results or errors):
            changed.wait(time_left())
    if errors:
        raise errors.pop()
    return results.pop()


def verify_write(store: Get, key: str, written: bytes) -> outcomes.Applied[str] | outcomes.Unknown:
    """Return the outcome of a write whose response had no version, as behind some proxies.

    It raises nothing, because the write may be applied, and an error would deny that.
    """
    why = "the object has changed since"
    try:
        found = store.get(key, max_bytes=len(written))
        if isinstance(found, Blob) and found.data == written:
            return outcomes.Applied(found.version)
    except (CorruptData, ObjectNotFound):
        pass  # it may have been written, and replaced or deleted since
    except OpenDataBufferError as error:
        why = f"it cannot be read: {error}"
    return outcomes.Unknown(f"the store answered a write of {key!r} without its version, and {why}")


def strong_etag(etag: str | None) -> str | None:
    """Return the ETag of a response; None if it is missing or weak (``W/"..."``).

    A weak ETag says that two contents are equivalent, not that their bytes are equal.
    """
    return None if not etag or etag.startswith("W/") else etag


def epoch_ms(when: datetime | None) -> int:
    """Return a time in milliseconds since the Unix epoch; 0 for a missing one."""
    return 0 if when is None else int(when.timestamp() * 1000)


def header_ms(date: str | None) -> int | None:
    """Return the date of a header in milliseconds since the Unix epoch; None for a missing one."""
    return epoch_ms(parsedate_to_datetime(date)) if date else None


def md5(data: bytes | memoryview) -> str:
    """Return an MD5 as headers carry it, which guards against accidents, not attackers."""
    return b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
