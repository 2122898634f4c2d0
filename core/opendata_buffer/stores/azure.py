"""Objects in a container of Azure Blob Storage or Data Lake Storage, through Azure's SDK."""

from __future__ import annotations

import builtins
from collections import OrderedDict
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any, TypeVar

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.formats.keys import check_key
from opendata_buffer.redaction import redacted
from opendata_buffer.runtime import Runtime, SystemRuntime, remaining
from opendata_buffer.stores.azure_client import connect
from opendata_buffer.stores.base import (
    Absent,
    Blob,
    DeleteFailure,
    IfVersion,
    Listing,
    NotModified,
    ObjectInfo,
    PutOutcome,
    check_goes_on,
    check_limit,
    check_range,
    check_size,
    listed,
    looked_up,
    not_modified,
    strong_etag,
    unversioned,
    weak_or_none,
)
from opendata_buffer.stores.clients import AZURE_ENVIRONMENT, ProcessClient, load
from opendata_buffer.stores.http import (
    DeadlinePassed,
    Root,
    check_md5,
    in_time,
    repeated,
    with_pause,
)
from opendata_buffer.stores.probe import PROBE_DEADLINE_MS, SAFE, probe_conditional_writes

__all__ = [
    "AzureStore",
    "Places",
    "code_of",
    "date_ms",
    "is_missing",
    "modified_ms",
    "objects_of",
    "status_of",
    "storage_error",
]


# ---- What an error of Azure's SDK means for the caller, and how to say it. ----


_CREDENTIALS = {
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
    "KeyBasedAuthenticationNotPermitted",
    "NoAuthenticationInformation",
}
_HOW = (
    "Log in ('az login'), give this machine a managed identity, or set AZURE_STORAGE_KEY, "
    "AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING"
)


def status_of(error: Any) -> int:
    """The HTTP status of an answer; 0 where there was none."""
    return int(getattr(error, "status_code", None) or 0)


def code_of(error: Any) -> str:
    """Azure's error code, such as ``BlobNotFound``; empty where there is none."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def is_missing(error: Any) -> bool:
    """Whether the answer is Azure's that there is no such blob.

    Azure always names its errors. A 404 without a name is that of a proxy, and not of a container
    that is missing: then the blob would be, too.
    """
    return status_of(error) == 404 and code_of(error) not in ("", "ContainerNotFound")


def storage_error(
    error: Exception, *, verb: str, key: str, container: str, endpoint: str
) -> StorageError:
    """The error of this library for one of Azure's, with the fix in its message.

    Args:
        error: What azure-core, azure-identity or the socket raised.
        verb: ``read``, ``write``, ``list`` or ``delete``.
        key: The full key, or prefix.
        container: The container.
        endpoint: The account's URL.
    """
    status, code = status_of(error), code_of(error)
    # Behind the first line come request ids and dates, and of credentials all that was tried.
    said = redacted((str(error).strip().splitlines() or [""])[0]).rstrip(".")
    what = f"cannot {verb} {key!r} in container {container!r} at {endpoint}: "
    if not status:
        if "Credential" in type(error).__name__ or "Authentication" in type(error).__name__:
            return PermanentStorageError(f"{what}{said}. {_HOW}.")
        return TransientStorageError(
            f"{what}{type(error).__name__}: {said}. Check the endpoint and the network, or try "
            "again later."
        )
    what += f"{status} {code} {said}".rstrip(". ")
    if status < 300 or (status == 404 and not code):
        return TransientStorageError(
            f"{what}. That is no answer of Azure's: check what answers at the endpoint (a proxy?), "
            "or try again later."
        )
    if status in (408, 429) or status >= 500:
        return TransientStorageError(f"{what}. The store failed or is overloaded; try again later.")
    if code in ("ContainerBeingDeleted", "OperationTimedOut"):
        return TransientStorageError(f"{what}. Try again later.")
    if status == 304 or code in ("ConditionNotMet", "InvalidRange"):
        return TransientStorageError(f"{what}. The object changed while it was read; try again.")
    if code == "Md5Mismatch":
        return TransientStorageError(f"{what}. The bytes were garbled on the way; try again.")
    if status == 404:
        return PermanentStorageError(
            f"{what}. Create container {container!r} or correct the store URL."
        )
    if code in _CREDENTIALS or status == 401:
        return PermanentStorageError(f"{what}. Renew or correct the Azure credentials. {_HOW}.")
    if status == 403:
        return PermanentStorageError(
            f"{what}. Allow these credentials to {verb} blobs of container {container!r} (role "
            "'Storage Blob Data Contributor'), and look at the account's firewall."
        )
    if code.startswith("Lease"):
        return PermanentStorageError(f"{what}. Somebody holds a lease on it: break the lease.")
    return PermanentStorageError(
        f"{what}. Check the container, its policies (immutability, archive tier), and that "
        "Azure Blob Storage answers at this endpoint."
    )


# ---- Where Azure's listings go on: it takes its own tokens for that, and no keys. ----


MOST = 16
"""Listings of which it is remembered where they go on."""


class Places:
    """Tokens of the last listings of this process, by prefix and last key. A copy is empty."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, str], str] = OrderedDict()

    def behind(self, prefix: str, key: str) -> str | None:
        """The token of a listing that goes on behind a key; None when none ended there."""
        return self._tokens.get((prefix, key))

    def remember(self, prefix: str, key: str, token: str) -> None:
        """A listing ended behind a key. The oldest are forgotten."""
        self._tokens[prefix, key] = token
        while len(self._tokens) > MOST:
            self._tokens.popitem(last=False)

    def __getstate__(self) -> dict[str, object]:
        return {"_tokens": OrderedDict()}


# ---- What is read off an answer of Azure, as its SDK hands it on. Pure. ----


def modified_ms(about: Any) -> int:
    """When a blob was written, milliseconds since the Unix epoch; 0 when the answer does not say.

    Args:
        about: Its properties.
    """
    when = about.last_modified
    return 0 if when is None else int(when.timestamp() * 1000)


def date_ms(header: str | None) -> int | None:
    """A date in a header, milliseconds since the Unix epoch; None where there is none."""
    return None if not header else int(parsedate_to_datetime(header).timestamp() * 1000)


def objects_of(blobs: Iterable[Any], root: str) -> list[ObjectInfo]:
    """The objects of a page of a listing, their keys without the root.

    Accounts with directories list those, too, as empty blobs.
    """
    return [
        ObjectInfo(each.name[len(root) :], each.size, modified_ms(each))
        for each in blobs
        if (each.metadata or {}).get("hdi_isfolder") != "true"
    ]


_PAGE = 5_000
"""Most blobs of one page of a listing."""
_BULK = 256
"""Most deletions of one request."""

T = TypeVar("T")


class AzureStore:
    """A container, or the part of it below ``root``. Versions are ETags.

    The SDK's client sends each request once; reads and unconditional writes that failed are
    repeated here, conditional ones never: the repetition of one whose answer was lost would fail
    on its own success (failure F1).

    Every call ends within the caller's :func:`~opendata_buffer.runtime.deadline`, whatever the
    store does. Without one, silence ends it after the timeouts of all its attempts.

    Args:
        container: Its name.
        root: Prefix of every key, without slashes around it; may be empty.
        options: Endpoint and timeouts. ``region``, keys and roles are S3's alone.
        host: Of the account's blobs, ``account.blob.core.windows.net``. Default: the account that
            ``AZURE_STORAGE_ACCOUNT`` or ``AZURE_STORAGE_CONNECTION_STRING`` names.
        runtime: Backoff, names of probe objects.

    Raises:
        InvalidInput: The SDK is not installed, or the options are another store's.
    """

    def __init__(
        self,
        container: str,
        root: str = "",
        options: StoreOptions | None = None,
        *,
        host: str = "",
        runtime: Runtime | None = None,
    ) -> None:
        load("azure.storage.blob", scheme="az", extra="azure")
        self._container = container
        self._root = Root(root, "blob names")
        self._options = options if options is not None else StoreOptions()
        self._options.check_s3_only("abfss" if host else "az")
        self._host = host
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._service: ProcessClient[Any] = ProcessClient(
            connect, host, self._options, AZURE_ENVIRONMENT
        )
        self._places = Places()

    @property
    def url(self) -> str:
        """``abfss://container@account.dfs.core.windows.net/root``, or ``az://container/root``."""
        account = f"@{self._host.replace('.blob.', '.dfs.', 1)}" if self._host else ""
        scheme = "abfss" if account else "az"
        return f"{scheme}://{self._container}{account}/{self._root.prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"AzureStore({self.url!r})"

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | NotModified:
        """See :meth:`opendata_buffer.stores.Get.get`."""
        full = self._root.full(key)
        check_range(byte_range)
        wanted: dict[str, Any] = {}
        if if_changed is not None:
            wanted = {"etag": if_changed, "match_condition": self._match("IfModified")}
        if byte_range is not None:
            wanted |= {"offset": byte_range[0], "length": byte_range[1] - byte_range[0]}

        def once() -> Blob | NotModified:
            blob = self._blob(full)
            try:
                found = blob.download_blob(**wanted, **self._timeouts())
                about = found.properties
                check_size(key, found.size, max_bytes)
                data: bytes = found.readall()
            except self._errors() as error:
                if status_of(error) == 304:
                    return not_modified(key, self.url, if_changed)
                if is_missing(error):
                    raise ObjectNotFound(key, self.url) from None
                if status_of(error) != 416:
                    raise
                # An empty range at the end of the object.
                about, data = blob.get_blob_properties(**self._timeouts()), b""
            check_size(key, len(data), max_bytes)
            if byte_range is None:
                told = about.content_settings.content_md5
                what = f"{full!r} in {self._where()}"
                check_md5(data, bytes(told) if told else None, what)
            return Blob(data, self._etag(about.etag), modified_ms(about))

        return self._repeated(once, "read", full)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.Put.put`."""
        full = self._root.full(key)
        content = bytes(data)
        self._repeated(lambda: self._upload(full, content, overwrite=True), "write", full)

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.ConditionalPut.put_if`."""
        full = self._root.full(key)
        try:
            return self._ended(lambda: self._put_if(key, data, condition), "write", full)
        except TransientStorageError as error:
            return outcomes.Unknown(str(error))

    @property
    def probe_subject(self) -> str:
        """See :class:`opendata_buffer.stores.base.Probed`."""
        return f"{self._endpoint()}/{self._container}"

    @property
    def is_probed(self) -> bool:
        """See :class:`opendata_buffer.stores.base.Probed`."""
        return self.probe_subject in SAFE

    def take_as_probed(self) -> None:
        """See :class:`opendata_buffer.stores.base.Probed`."""
        SAFE.add(self.probe_subject)

    def check_conditional_writes(self, near: str) -> None:
        """See :meth:`opendata_buffer.stores.ConditionalPut.check_conditional_writes`.

        Small writes to objects named ``near`` + ``.probe-<ULID>``, a read, and their deletion.
        """
        check_key("near", near)
        endpoint = self._endpoint()
        if self.is_probed:
            return
        probe_conditional_writes(
            self,
            near,
            self._runtime,
            name=f"{self.url!r} at {endpoint}",
            room=len(self._root.prefix.encode()),
            deadline_ms=min(self._options.read_timeout_ms, PROBE_DEADLINE_MS),
        )
        self.take_as_probed()

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.List.list`.

        Azure's listings begin at the start of a prefix or where an earlier one ended. So one that
        goes on after the last key of an earlier one, in this process, costs its own pages only;
        any other ``start_after`` costs those before it, too.
        """
        check_limit(limit)
        objects: list[ObjectInfo] = []
        now_ms: int | None = None
        token = self._places.behind(prefix, start_after)
        more = True
        while more and (limit is None or len(objects) < limit):
            # Not what the limit leaves, while objects before start_after are passed by.
            size = _PAGE if limit is None or not (token or not start_after) else limit
            full, before = self._root.prefix + prefix, token
            page, token, date = self._page(full, token, min(size, _PAGE))
            check_goes_on(before, token, full, self.url)
            now_ms = date if now_ms is None else now_ms
            objects += [each for each in page if each.key > start_after]
            more = bool(token)
        listing = listed(objects, now_ms, limit, more=more)
        if token and listing.objects and len(listing.objects) == len(objects):
            self._places.remember(prefix, listing.objects[-1].key, token)
        return listing

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.Delete.delete_many`."""
        legal, failures = self._root.legal(keys)
        waiting = iter(legal)
        while chunk := list(islice(waiting, _BULK)):
            failures += self._delete(chunk)
        return tuple(failures)

    # ---- keys, errors, repetition

    def _endpoint(self) -> str:
        return str(self._service.get().primary_endpoint).partition("?")[0].rstrip("/")

    def _blob(self, full: str) -> Any:
        return self._service.get().get_blob_client(self._container, full)

    def _match(self, name: str) -> Any:
        core = load("azure.core", scheme="az", extra="azure")
        return getattr(core.MatchConditions, name)

    def _errors(self) -> Any:
        """The class of all that Azure's libraries raise."""
        return load("azure.core.exceptions", scheme="az", extra="azure").AzureError

    def _timeouts(self) -> dict[str, float]:
        """How long one request may take, which is sent right now.

        Raises:
            DeadlinePassed: No time is left to send it.
        """
        left = remaining()
        if left is None:
            return {}
        if left <= 0:
            raise DeadlinePassed
        return {"read_timeout": min(self._options.read_timeout_ms / 1000, left)}

    def _error(self, error: Exception, verb: str, key: str) -> StorageError:
        mapped = storage_error(
            error, verb=verb, key=key, container=self._container, endpoint=self._endpoint()
        )
        return with_pause(mapped, getattr(getattr(error, "response", None), "headers", {}))

    def _where(self) -> str:
        return f"container {self._container!r}"

    def _ended(self, call: Callable[[], T], verb: str, key: str) -> T:
        """What the call returns or raises, in our errors, within the caller's deadline."""

        def mapped() -> T:
            try:
                return call()
            except (self._errors(), OSError) as error:  # requests' errors are OSErrors
                raise self._error(error, verb, key) from error

        return in_time(self._runtime, mapped, verb=verb, key=key, where=self._where)

    def _repeated(self, once: Callable[[], T], verb: str, key: str) -> T:
        """Send what may be sent again until it succeeds, at most ``max_attempts`` times."""
        return repeated(self._runtime, self._options, lambda: self._ended(once, verb, key))

    def _etag(self, found: str | None) -> str:
        """The version in an answer.

        Raises:
            UnsafeStore: There is none, or it is weak.
        """
        etag = strong_etag(found)
        if etag is None:
            raise unversioned(
                f"{self.url!r} at {self._endpoint()}",
                f"answers with {weak_or_none(found)}",
                "Use Azure Storage itself, or take the proxy before it away.",
            )
        return etag

    # ---- reading, writing, deleting

    def _upload(self, full: str, data: bytes, **how: Any) -> str | None:
        """Write an object by one request that carries its checksum; returns its strong ETag."""
        how |= {"validate_content": True, **self._timeouts()}
        answer = self._blob(full).upload_blob(data, **how)
        return strong_etag(answer.get("etag"))

    def _put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        full = self._root.full(key)
        how: dict[str, Any] = {"overwrite": False}  # If-None-Match: *
        if isinstance(condition, IfVersion):
            how = {
                "overwrite": True,
                "etag": condition.version,
                "match_condition": self._match("IfNotModified"),
            }
        try:
            etag = self._upload(full, data, **how)
            return looked_up(self, key, data) if etag is None else outcomes.Applied(etag)
        except self._errors() as error:
            code, replaces = code_of(error), isinstance(condition, IfVersion)
            # S3's 409 says that nothing was decided. Azure's says that the object exists.
            if code == "BlobAlreadyExists" and not replaces:
                return outcomes.Conflict()
            if is_missing(error) and replaces:
                return outcomes.Vanished()  # failure F4
            if status_of(error) == 412 and not code.startswith("Lease"):
                gone = replaces and self._is_gone(full)
                return outcomes.Vanished() if gone else outcomes.Conflict()
            raise

    def _is_gone(self, full: str) -> bool:
        """Whether a condition failed because there is no object: Azure answers 412 to both."""
        try:
            self._blob(full).get_blob_properties(**self._timeouts())
        except self._errors() as error:
            if is_missing(error):
                return True
            raise
        return False

    def _page(
        self, prefix: str, token: str | None, size: int
    ) -> tuple[builtins.list[ObjectInfo], str | None, int | None]:
        """Objects of one page, where the next one begins, and the service's clock."""

        def once() -> tuple[builtins.list[ObjectInfo], str | None, int | None]:
            dates: list[str | None] = []
            pages = (
                self._service.get()
                .get_container_client(self._container)
                .list_blobs(
                    name_starts_with=prefix or None,
                    include=["metadata"],
                    results_per_page=size,
                    raw_response_hook=lambda found: dates.append(
                        found.http_response.headers.get("Date")
                    ),
                    **self._timeouts(),
                )
                .by_page(token)
            )
            objects = objects_of(next(pages, ()), self._root.prefix)
            return objects, pages.continuation_token or None, date_ms(dates[0] if dates else None)

        return self._repeated(once, "list", prefix)

    def _delete(self, keys: builtins.list[str]) -> builtins.list[DeleteFailure]:
        """Delete at most 256 objects by one request."""

        def once() -> builtins.list[DeleteFailure]:
            container = self._service.get().get_container_client(self._container)
            names = [self._root.prefix + key for key in keys]
            parts = list(
                container.delete_blobs(*names, raise_on_any_failure=False, **self._timeouts())
            )
            if len(parts) != len(keys):
                raise TransientStorageError(
                    f"{len(parts)} answers to {len(keys)} deletions; try again later"
                )
            return [
                DeleteFailure(key, f"HTTP {part.status_code} {part.reason or ''}".strip())
                for key, part in zip(keys, parts, strict=True)
                if part.status_code not in (200, 202, 404)
                or part.headers.get("x-ms-error-code") == "ContainerNotFound"
            ]

        try:
            return self._repeated(once, "delete", f"{len(keys)} objects")
        except StorageError as error:
            return [DeleteFailure(key, str(error)) for key in keys]
