"""Objects in a container of Azure Blob Storage or Data Lake Storage, through Azure's SDK."""

from __future__ import annotations

import builtins
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.redaction import check_no_secrets, redacted
from opendata_buffer.runtime import Runtime, remaining
from opendata_buffer.stores.base import (
    Absent,
    Blob,
    DeleteFailure,
    IfVersion,
    Listing,
    NotModified,
    ObjectInfo,
    PutOutcome,
    check_range,
    check_size,
)
from opendata_buffer.stores.clients import (
    AZURE_ENVIRONMENT,
    ProcessClient,
    load,
    service_credential,
)
from opendata_buffer.stores.http import (
    MAX_PAGE_BYTES,
    CloudStore,
    DeadlinePassed,
    Page,
    check_md5,
    check_part,
    not_modified,
    strong_etag,
    verify_write,
    with_retry_after,
)

_PAGE = 5_000
"""Most blobs of one page of a listing."""
_CONTINUATIONS = 16
"""Listings of which it is remembered where they continue."""
_ONE_REQUEST = 4 * 1024**3
"""Objects up to this size are written by one request: its condition holds for all of it."""
_CHUNK = 32 * 1024**2


class AzureStore(CloudStore):
    """A container, or the part of it below ``root``. Versions are ETags.

    See :class:`.CloudStore`.

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

    _BUCKET = "container"
    _KEYS = "blob names"
    _BULK = 256

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
        super().__init__(container, root, options, runtime)
        self._options.check_s3_only("abfss" if host else "az")
        self._host = host
        self._client: ProcessClient[Any] = ProcessClient(
            connect, host, self._options, AZURE_ENVIRONMENT
        )
        self._continuations: OrderedDict[tuple[str, str], str] = OrderedDict()

    @property
    def url(self) -> str:
        """``abfss://container@account.dfs.core.windows.net/root``, or ``az://container/root``."""
        account = f"@{self._host.replace('.blob.', '.dfs.', 1)}" if self._host else ""
        scheme = "abfss" if account else "az"
        return f"{scheme}://{self._bucket}{account}/{self._prefix}".rstrip("/")

    def get(
        self,
        key: str,
        *,
        if_changed: str | None = None,
        byte_range: tuple[int, int] | None = None,
        max_bytes: int | None = None,
    ) -> Blob | NotModified:
        """See :meth:`opendata_buffer.stores.Get.get`."""
        full = self._full(key)
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
            except self._client_errors() as error:
                if _status_of(error) == 304:
                    return not_modified(key, self.url, if_changed)
                if _is_missing(error):
                    raise ObjectNotFound(key, self.url) from None
                if _status_of(error) != 416:
                    raise
                # The empty range at the end of an object.
                about, data = blob.get_blob_properties(**self._timeouts()), b""
            check_part(key, len(data), byte_range, max_bytes)
            if byte_range is None:
                sent = about.content_settings.content_md5
                check_md5(data, bytes(sent) if sent else None, f"{full!r} in {self._where()}")
            return Blob(data, self._etag(about.etag), _modified_ms(about))

        return self._repeated(once, "read", full)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.Put.put`."""
        full = self._full(key)
        content = bytes(data)
        self._repeated(lambda: self._upload(full, content, overwrite=True), "write", full)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.List.list`.

        Azure's listings begin at the start of a prefix or at a token of an earlier one. So one
        that continues behind the last key of an earlier one, in this process, costs its own pages
        only; any other ``start_after`` costs the pages before it, too.
        """
        token = self._continuations.get((prefix, start_after))
        listing, following = self._list(prefix, start_after, limit, token)
        if following and listing.objects:
            self._continuations[prefix, listing.objects[-1].key] = following
            while len(self._continuations) > _CONTINUATIONS:
                self._continuations.popitem(last=False)
        return listing

    def _upload(self, full: str, data: bytes, **how: Any) -> str | None:
        """Write an object by one request that carries its checksum; returns its strong ETag."""
        how |= {"validate_content": True, **self._timeouts()}
        answer = self._blob(full).upload_blob(data, **how)
        return strong_etag(answer.get("etag"))

    def _put_if(
        self, key: str, full: str, data: bytes, condition: Absent | IfVersion
    ) -> PutOutcome:
        how: dict[str, Any] = {"overwrite": False}  # If-None-Match: *
        if isinstance(condition, IfVersion):
            how = {
                "overwrite": True,
                "etag": condition.version,
                "match_condition": self._match("IfNotModified"),
            }
        try:
            etag = self._upload(full, data, **how)
            return verify_write(self, key, data) if etag is None else outcomes.Applied(etag)
        except self._client_errors() as error:
            code, replaces = _code_of(error), isinstance(condition, IfVersion)
            # S3's 409 says that nothing was decided. Azure's says that the object exists.
            if code == "BlobAlreadyExists" and not replaces:
                return outcomes.Conflict()
            if _is_missing(error) and replaces:
                return outcomes.Vanished()  # failure F4
            if _status_of(error) == 412 and not code.startswith("Lease"):
                gone = replaces and self._is_gone(full)
                return outcomes.Vanished() if gone else outcomes.Conflict()
            raise

    def _is_gone(self, full: str) -> bool:
        """Whether a condition failed because there is no object: Azure answers 412 to both."""
        try:
            self._blob(full).get_blob_properties(**self._timeouts())
        except self._client_errors() as error:
            if _is_missing(error):
                return True
            raise
        return False

    def _page(self, prefix: str, start_after: str, token: str | None, wanted: int | None) -> Page:
        passes_by = bool(start_after) and token is None
        size = _PAGE if wanted is None or passes_by else min(wanted, _PAGE)
        dates: list[str | None] = []
        pages = (
            self._container()
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
        objects = _objects_of(next(pages, ()), self._prefix)
        date = dates[0] if dates else None
        now_ms = int(parsedate_to_datetime(date).timestamp() * 1000) if date else None
        return Page(objects, pages.continuation_token or None, now_ms)

    def _delete(self, keys: builtins.list[str]) -> builtins.list[DeleteFailure]:
        names = [self._prefix + key for key in keys]
        parts = list(
            self._container().delete_blobs(*names, raise_on_any_failure=False, **self._timeouts())
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

    def _endpoint(self) -> str:
        return str(self._client.get().primary_endpoint).partition("?")[0].rstrip("/")

    def _container(self) -> Any:
        return self._client.get().get_container_client(self._bucket)

    def _blob(self, full: str) -> Any:
        return self._client.get().get_blob_client(self._bucket, full)

    def _match(self, name: str) -> Any:
        core = load("azure.core", scheme="az", extra="azure")
        return getattr(core.MatchConditions, name)

    def _timeouts(self) -> dict[str, float]:
        """How long one request may take, which is sent right now."""
        left = remaining()
        if left is None:
            return {}
        if left <= 0:
            raise DeadlinePassed
        return {"read_timeout": min(self._options.read_timeout_ms / 1000, left)}

    def _client_errors(self) -> tuple[type[BaseException], ...]:
        core = load("azure.core.exceptions", scheme="az", extra="azure")
        return (core.AzureError, OSError)  # errors of requests are OSErrors

    def _error(self, error: BaseException, verb: str, key: str) -> StorageError:
        headers = getattr(getattr(error, "response", None), "headers", {})
        return with_retry_after(self._mapped(error, verb, key), headers)

    def _mapped(self, error: BaseException, verb: str, key: str) -> StorageError:
        status, code = _status_of(error), _code_of(error)
        # Behind the first line come request ids and dates, and of credentials all that was tried.
        said = redacted((str(error).strip().splitlines() or [""])[0]).rstrip(".")
        what = f"cannot {verb} {key!r} in container {self._bucket!r} at {self._endpoint()}: "
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
                f"{what}. That is no answer of Azure's: check what answers at the endpoint (a "
                "proxy?), or try again later."
            )
        if status in (408, 429) or status >= 500:
            return TransientStorageError(
                f"{what}. The store failed or is overloaded; try again later."
            )
        if code in ("ContainerBeingDeleted", "OperationTimedOut"):
            return TransientStorageError(f"{what}. Try again later.")
        if status == 304 or code in ("ConditionNotMet", "InvalidRange"):
            return TransientStorageError(
                f"{what}. The object changed while it was read; try again."
            )
        if code == "Md5Mismatch":
            return TransientStorageError(f"{what}. The bytes were garbled on the way; try again.")
        if status == 404:
            return PermanentStorageError(
                f"{what}. Create container {self._bucket!r} or correct the store URL."
            )
        if code in _CREDENTIALS or status == 401:
            return PermanentStorageError(f"{what}. Renew or correct the Azure credentials. {_HOW}.")
        if status == 403:
            return PermanentStorageError(
                f"{what}. Allow these credentials to {verb} blobs of container {self._bucket!r} "
                "(role 'Storage Blob Data Contributor'), and look at the account's firewall."
            )
        if code.startswith("Lease"):
            return PermanentStorageError(
                f"{what}. Another client holds a lease on it: break the lease."
            )
        return PermanentStorageError(
            f"{what}. Check the container, its policies (immutability, archive tier), and that "
            "Azure Blob Storage answers at this endpoint."
        )

    def _etag(self, found: str | None) -> str:
        """The version of an object that was read."""
        etag = strong_etag(found)
        if etag is None:
            raise self._unversioned(
                f"the weak ETag {found}" if found else "no ETag",
                "Use Azure Storage itself, or take the proxy before it away.",
            )
        return etag


def _modified_ms(about: Any) -> int:
    """When a blob was written, by its properties, milliseconds since the Unix epoch; 0 when they
    do not say."""
    when = about.last_modified
    return 0 if when is None else int(when.timestamp() * 1000)


def _objects_of(blobs: Iterable[Any], root: str) -> list[ObjectInfo]:
    """The objects of a page of a listing, their keys without the root.

    Accounts with directories list those, too, as empty blobs.
    """
    return [
        ObjectInfo(each.name[len(root) :], each.size, _modified_ms(each))
        for each in blobs
        if (each.metadata or {}).get("hdi_isfolder") != "true"
    ]


def blob_host(host: str) -> str:
    """The host of an account's blobs, for that of its files: one account has both."""
    name, dot, rest = host.partition(".")
    service, _, domain = rest.partition(".")
    if not name or not dot or service not in ("dfs", "blob") or not domain or ":" in host:
        raise InvalidInput(
            f"{host!r} is no host of an Azure storage account: use "
            "abfss://container@account.dfs.core.windows.net[/root]"
        )
    return f"{name}.blob.{domain}"


def connect(host: str, options: StoreOptions) -> Any:
    """A ``BlobServiceClient`` that sends each request once.

    ``host`` is empty where the URL names no account.
    """
    blob = load("azure.storage.blob", scheme="az", extra="azure")
    settings = _settings(options)
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    if options.anonymous or options.service_credential is not None:
        # The string may hold a key, and names an account besides.
        if text and not host and options.endpoint_url is None:
            raise InvalidInput(
                "the store URL names no storage account, and AZURE_STORAGE_CONNECTION_STRING has "
                "credentials of its own: use "
                "abfss://container@account.dfs.core.windows.net[/root], or leave anonymous and "
                "service_credential out"
            )
        text = ""
    try:
        if text and not host and options.endpoint_url is None:
            return blob.BlobServiceClient.from_connection_string(text, **settings)
        endpoint = _endpoint(host, options)
        return blob.BlobServiceClient(
            endpoint, credential=_credential(endpoint, text, options), **settings
        )
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        # The SDK's messages may hold parts of what it could not read.
        raise PermanentStorageError(
            "cannot make an Azure client: correct AZURE_STORAGE_CONNECTION_STRING, "
            "AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or the endpoint"
        ) from None


def _settings(options: StoreOptions) -> dict[str, Any]:
    requests = load("requests", scheme="az", extra="azure")
    adapters = load("requests.adapters", scheme="az", extra="azure")
    transport = load("azure.core.pipeline.transport", scheme="az", extra="azure")
    session = requests.Session()
    for scheme in ("https://", "http://"):
        # The SDK's own keeps ten connections, and logs a warning for each one more.
        adapter = adapters.HTTPAdapter(pool_maxsize=options.max_connections, max_retries=0)
        adapter.build_response = partial(_build_bounded, adapter.build_response)
        session.mount(scheme, adapter)
    timeouts = {
        "connection_timeout": options.connect_timeout_ms / 1000,
        "read_timeout": options.read_timeout_ms / 1000,
    }
    return {
        **timeouts,
        # A conditional write that is sent again would lose against itself (failure F1).
        "retry_total": 0,
        # Azure never redirects. A server that does would get what is written, or be read as Azure.
        "permit_redirects": False,
        "max_single_put_size": _ONE_REQUEST,
        "max_single_get_size": _CHUNK,
        "max_chunk_get_size": _CHUNK,
        "transport": transport.RequestsTransport(session=session, **timeouts),
    }


def _build_bounded(build: Callable[[Any, Any], Any], request: Any, raw: Any) -> Any:
    """A response of requests that ends in an error after ``MAX_PAGE_BYTES``: the SDK reads every
    body to its end. Objects are read in smaller ranges."""
    stream = raw.stream

    def bounded(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        left = MAX_PAGE_BYTES
        for part in stream(*args, **kwargs):
            left -= len(part)
            if left < 0:
                raise load("urllib3.exceptions", scheme="az", extra="azure").ProtocolError(
                    f"the response has more than {MAX_PAGE_BYTES} bytes"
                )
            yield part

    raw.stream = bounded
    return build(request, raw)


def _endpoint(host: str, options: StoreOptions) -> str:
    account = os.environ.get("AZURE_STORAGE_ACCOUNT", "")
    if options.endpoint_url is not None:
        endpoint = options.endpoint_url
    elif host or account:
        endpoint = f"https://{host or f'{account}.blob.core.windows.net'}"
    else:
        raise InvalidInput(
            "the store URL names no storage account: set AZURE_STORAGE_ACCOUNT or "
            "AZURE_STORAGE_CONNECTION_STRING, or use "
            "abfss://container@account.dfs.core.windows.net[/root]"
        )
    check_no_secrets("endpoint", endpoint)
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidInput(
            f"endpoint {redacted(endpoint)!r} is no URL of a server: use https://host[:port]"
        )
    return endpoint.rstrip("/")


def _account_of(endpoint: str) -> str:
    """The account's name: the first label of its host; of an emulator's, the path."""
    parts = urlsplit(endpoint)
    return parts.path.strip("/") or (parts.hostname or "").partition(".")[0]


def _credential(endpoint: str, connection_string: str, options: StoreOptions) -> Any:
    """What the options name, else what the environment has for an account, else the identity of
    this process."""
    if options.anonymous:
        return None
    if options.service_credential is not None:
        _check_https(endpoint)
        return service_credential(options.service_credential, scheme="az", has="get_token")
    name, key = _account_of(endpoint), os.environ.get("AZURE_STORAGE_KEY")
    token = os.environ.get("AZURE_STORAGE_SAS_TOKEN")
    if connection_string:
        fields = dict(each.split("=", 1) for each in connection_string.split(";") if "=" in each)
        if fields.get("AccountName", name) != name:
            raise InvalidInput(
                f"AZURE_STORAGE_CONNECTION_STRING is of account {fields['AccountName']!r}, and the "
                f"store of account {name!r}: set the right one, or none"
            )
        key = fields.get("AccountKey", key)
        token = fields.get("SharedAccessSignature", token)
    if key:
        return {"account_name": name, "account_key": key}
    credentials = load("azure.core.credentials", scheme="az", extra="azure")
    if token:
        return credentials.AzureSasCredential(token)
    _check_https(endpoint)
    return load("azure.identity", scheme="az", extra="azure").DefaultAzureCredential()


def _check_https(endpoint: str) -> None:
    if not endpoint.startswith("https:"):
        # A token must not be sent in the clear.
        raise PermanentStorageError(
            f"no credentials for {endpoint}: without https only a key can be used. Set "
            "AZURE_STORAGE_KEY to the emulator's key."
        )


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


def _status_of(error: Any) -> int:
    """The HTTP status of an answer; 0 where there was none."""
    return int(getattr(error, "status_code", None) or 0)


def _code_of(error: Any) -> str:
    """Azure's error code, such as ``BlobNotFound``; empty where there is none."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _is_missing(error: Any) -> bool:
    """Whether the response is Azure's for a missing blob.

    Azure always names its errors. A 404 without a name is that of a proxy, and not of a container
    that is missing: then the blob would be, too.
    """
    return _status_of(error) == 404 and _code_of(error) not in ("", "ContainerNotFound")
