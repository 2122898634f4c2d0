"""Objects in a container of Azure Blob Storage or Data Lake Storage, through Azure's SDK."""

from __future__ import annotations

import builtins
import os
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

import urllib3.exceptions

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions, check_endpoint, redacted, remember_secret
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.hints import Setting
from opendata_buffer.runtime import Runtime
from opendata_buffer.stores.base import Blob, DeleteFailure, Listing, ObjectInfo, check_size
from opendata_buffer.stores.clients import (
    AZURE_ENVIRONMENT,
    ProcessClient,
    check_resolved,
    load,
    service_credential,
)
from opendata_buffer.stores.http import (
    GARBLED,
    MAX_PAGE_BYTES,
    OF_A_PROXY,
    Answer,
    CloudStore,
    Page,
    Read,
    epoch_ms,
    header_ms,
    read_timeout_s,
    with_retry_after,
)

_PAGE = 5_000  # most blobs of one page of a listing
_CONTINUATIONS = 16  # listings whose continuation is remembered
_ONE_REQUEST = 4 * 1024**3
"""Objects up to this size are written by one request, so that its condition holds for all of it."""
_CHUNK = 32 * 1024**2
_URL = "abfss://container@account.dfs.core.windows.net[/root]"


class AzureStore(CloudStore):
    """A container, or the part of it below ``root``; see :class:`.CloudStore`. Versions are ETags.

    Args:
        container: Name of the container.
        root: Prefix of every key.
        options: How to reach the service.
        host: The host of the account's blobs, ``account.blob.core.windows.net``. Default: the
            account in ``AZURE_STORAGE_ACCOUNT`` or ``AZURE_STORAGE_CONNECTION_STRING``.
        runtime: Clock and threads.

    Raises:
        InvalidInput: The SDK is not installed, or the options belong to another store.
    """

    _SCHEME = "az"
    _BUCKET = "container"
    _KEYS = "blob names"
    _BULK = 256
    _CLOUD = "Azure"
    _USE = "Use Azure Storage itself, or take the proxy before it away."
    _ALLOW = " (role 'Storage Blob Data Contributor'), and check the account's firewall"
    _CHECK = (
        "Check the container, its policies (immutability, archive tier), and that Azure Blob "
        "Storage answers at this endpoint."
    )

    def __init__(
        self,
        container: str,
        root: str = "",
        options: StoreOptions | None = None,
        *,
        host: str = "",
        runtime: Runtime | None = None,
    ) -> None:
        self._host = host
        super().__init__(container, root, options, runtime=runtime)

    def _prepare(self) -> None:
        scheme = "abfss" if self._host else "az"
        load("azure.storage.blob", scheme)
        self._options.check_s3_only(scheme)
        self._client = ProcessClient(connect, AZURE_ENVIRONMENT, self._host, self._options)
        self._continuations: OrderedDict[tuple[str, str], str] = OrderedDict()

    @property
    def url(self) -> str:
        """``abfss://container@account.dfs.core.windows.net/root``, or ``az://container/root``."""
        if not self._host:
            return super().url
        account = self._host.replace(".blob.", ".dfs.", 1)
        return f"abfss://{self._bucket}@{account}/{self._prefix}".rstrip("/")

    def _get(self, read: Read) -> Blob | None:
        wanted: dict[str, Any] = self._timeouts()
        if read.if_changed is not None:
            wanted |= {"etag": read.if_changed, "match_condition": _match("IfModified")}
        if read.byte_range is not None:
            start, end = read.byte_range
            wanted |= {"offset": start, "length": end - start}
        blob = self._blob(read.name)
        try:
            found = blob.download_blob(**wanted)
            about = found.properties
            check_size(read.key, found.size, read.max_bytes)
            data: bytes = found.readall()
        except self._client_errors() as error:
            if _status_of(error) == 304:
                return None
            if _is_missing(error):
                raise ObjectNotFound(read.key, self.url) from None
            if _status_of(error) != 416:
                raise
            # The empty range at the end of an object.
            about, data = blob.get_blob_properties(**self._timeouts()), b""
        read.check_size(len(data))
        sent = about.content_settings.content_md5
        self._check_md5(read, data, b64encode(sent).decode() if sent else None)
        return Blob(data, self._version(about.etag), epoch_ms(about.last_modified))

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.base.List.list`.

        A listing that continues after the last key of an earlier one in this process costs only its
        own pages. Any other ``start_after`` also costs the pages before it.
        """
        token = self._continuations.get((prefix, start_after))
        listing, following = self._list(prefix, start_after, limit, token)
        if following and listing.objects:
            self._continuations[prefix, listing.objects[-1].key] = following
            while len(self._continuations) > _CONTINUATIONS:
                self._continuations.popitem(last=False)
        return listing

    def _put(self, name: str, data: bytes, **how: Any) -> str | None:
        how = {"overwrite": True, "validate_content": True, **how, **self._timeouts()}
        etag: str | None = self._blob(name).upload_blob(data, **how).get("etag")
        return etag

    def _put_if(self, name: str, data: bytes, version: str | None) -> Answer:
        how: dict[str, Any] = {"overwrite": False}  # If-None-Match: *
        if version is not None:
            how = {"etag": version, "match_condition": _match("IfNotModified")}
        try:
            return self._put(name, data, **how)
        except self._client_errors() as error:
            code, replaces = _code_of(error), version is not None
            # S3's 409 means that nothing was decided; Azure's means that the object exists.
            if code == "BlobAlreadyExists" and not replaces:
                return outcomes.LostRace()
            if _is_missing(error) and replaces:
                return outcomes.Vanished()  # failure F4
            if _status_of(error) == 412 and not code.startswith("Lease"):
                gone = replaces and self._is_gone(name)
                return outcomes.Vanished() if gone else outcomes.LostRace()
            raise

    def _page(self, prefix: str, start_after: str, token: str | None, wanted: int | None) -> Page:
        skips = bool(start_after) and token is None
        dates: list[str | None] = []
        listing = self._container().list_blobs(
            name_starts_with=prefix or None,
            include=["metadata"],
            results_per_page=_PAGE if wanted is None or skips else min(wanted, _PAGE),
            raw_response_hook=lambda found: dates.append(found.http_response.headers.get("Date")),
            **self._timeouts(),
        )
        pages = listing.by_page(token)
        objects = [
            ObjectInfo(
                each.name[len(self._prefix) :],
                each.size,
                epoch_ms(each.last_modified),
                str(each.etag or ""),
            )
            for each in next(pages, ())
            # Accounts with directories also list the directories as blobs.
            if (each.metadata or {}).get("hdi_isfolder") != "true"
        ]
        now_ms = header_ms(dates[0]) if dates else None
        return Page(objects, pages.continuation_token or None, now_ms)

    def _delete(self, keys: builtins.list[str]) -> builtins.list[DeleteFailure]:
        names = [self._prefix + key for key in keys]
        parts = self._container().delete_blobs(
            *names, raise_on_any_failure=False, **self._timeouts()
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

    def _blob(self, name: str) -> Any:
        return self._client.get().get_blob_client(self._bucket, name)

    def _timeouts(self) -> dict[str, Any]:
        """Return the timeouts of a request that is sent now."""
        return {"read_timeout": read_timeout_s(self._options)}

    def _client_errors(self) -> tuple[type[BaseException], ...]:
        return (load("azure.core.exceptions").AzureError, OSError)  # of requests are OSErrors

    def _error(self, error: BaseException, verb: str, name: str) -> StorageError:
        headers = getattr(getattr(error, "response", None), "headers", {})
        return with_retry_after(self._answered(error, verb, name), headers)

    def _answered(self, error: BaseException, verb: str, name: str) -> StorageError:
        status, code = _status_of(error), _code_of(error)
        # Behind the first line come request ids, dates, and all credentials that were tried.
        first_line = redacted((str(error).strip().splitlines() or [""])[0]).rstrip(".")
        what = self._cannot(verb, name, self._endpoint())
        if not status:
            if "Credential" in type(error).__name__ or "Authentication" in type(error).__name__:
                return PermanentStorageError(f"{what}: {first_line}. {_HOW}.")
            return self._unanswered(what, error)
        what = f"{what}: {status} {code} {first_line}".rstrip(". ")
        if status < 300 or (status == 404 and not code):
            return TransientStorageError(f"{what}. {OF_A_PROXY}")
        if status == 304 or code in ("ConditionNotMet", "InvalidRange"):
            hint = "The object changed while it was read; try again."
            return TransientStorageError(f"{what}. {hint}")
        if code == "Md5Mismatch":
            return TransientStorageError(f"{what}. {GARBLED}")
        if code.startswith("Lease"):
            hint = "Another client holds a lease on it: break the lease."
            return PermanentStorageError(f"{what}. {hint}")
        if code in ("ContainerBeingDeleted", "OperationTimedOut"):
            status = 503
        if code in _CREDENTIALS or status == 401:
            return PermanentStorageError(f"{what}. Renew or correct the Azure credentials. {_HOW}.")
        return self._refusal(what, status, verb)


def _match(name: str) -> Any:
    return load("azure.core").MatchConditions[name]


def blob_host(host: str) -> str:
    """Find the host of an account's blobs. An account has one host for blobs and one for files.

    Args:
        host: One of the two hosts, such as ``account.dfs.core.windows.net``.

    Returns:
        The host of the blobs.

    Raises:
        InvalidInput: The host is not one of an Azure storage account.
    """
    name, dot, rest = host.partition(".")
    service, _, domain = rest.partition(".")
    if not name or not dot or service not in ("dfs", "blob") or not domain or ":" in host:
        raise InvalidInput(f"{host!r} is not a host of an Azure storage account: use {_URL}")
    return f"{name}.blob.{domain}"


def connect(host: str, options: StoreOptions) -> Any:
    """Make a client that sends each request once.

    Args:
        host: The host of the account's blobs; empty to use the connection string in the
            environment.
        options: How to reach the cloud.

    Returns:
        A ``BlobServiceClient``.

    Raises:
        InvalidInput: The options contradict the environment, or no storage account is named.
        PermanentStorageError: The client refuses the options.
    """
    blob = load("azure.storage.blob")
    settings = _settings(options)
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    by_string = bool(text) and not host and options.endpoint_url is None
    if by_string and (options.anonymous or options.service_credential is not None):
        raise InvalidInput(
            "the store URL names no storage account, and AZURE_STORAGE_CONNECTION_STRING has "
            f"credentials of its own: use {_URL}, or leave ",
            Setting("anonymous"),
            " and ",
            Setting("service_credential"),
            " out",
        )
    if text:
        check_resolved(text.replace(" ", ""), "AZURE_STORAGE_CONNECTION_STRING")
    try:
        if by_string:
            _remember_parts(text)
            return blob.BlobServiceClient.from_connection_string(text, **settings)
        endpoint = _endpoint(host, options)
        return blob.BlobServiceClient(
            endpoint, credential=_credential(endpoint, text, options), **settings
        )
    except InvalidInput:
        raise
    except ValueError:
        pass
    # Show neither the SDK's message nor the chain: both may quote the input it could not read.
    raise PermanentStorageError(
        "cannot make an Azure client: correct AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_KEY, "
        "AZURE_STORAGE_SAS_TOKEN or the endpoint"
    )


def _settings(options: StoreOptions) -> dict[str, Any]:
    requests = load("requests")
    adapters = load("requests.adapters")
    transport = load("azure.core.pipeline.transport")
    session = requests.Session()
    # The SDK's own keeps ten connections, and logs a warning for each one more.
    adapter = adapters.HTTPAdapter(pool_maxsize=options.max_connections, max_retries=0)
    adapter.build_response = partial(_build_bounded, adapter.build_response)
    for scheme in ("https://", "http://"):
        session.mount(scheme, adapter)
    timeouts = {
        "connection_timeout": options.connect_timeout_ms / 1000,
        "read_timeout": options.read_timeout_ms / 1000,
    }
    return {
        **timeouts,
        # A conditional write that is sent twice would lose against itself (failure F1).
        "retry_total": 0,
        # Azure never redirects. A redirect could send data to another server, or read from one.
        "permit_redirects": False,
        "max_single_put_size": _ONE_REQUEST,
        "max_single_get_size": _CHUNK,
        "max_chunk_get_size": _CHUNK,
        "transport": transport.RequestsTransport(session=session, **timeouts),
    }


def _build_bounded(build: Callable[[Any, Any], Any], request: Any, raw: Any) -> Any:
    """Return a response of requests that fails after ``MAX_PAGE_BYTES``.

    The SDK reads every body to its end. Objects are read in smaller ranges.
    """
    stream = raw.stream

    def bounded(*args: Any, **kwargs: Any) -> Iterator[bytes]:
        left = MAX_PAGE_BYTES
        for part in stream(*args, **kwargs):
            left -= len(part)
            if left < 0:
                raise urllib3.exceptions.ProtocolError(
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
            f"AZURE_STORAGE_CONNECTION_STRING, or use {_URL}"
        )
    check_endpoint("the endpoint", endpoint)
    return endpoint.rstrip("/")


def _credential(endpoint: str, connection_string: str, options: StoreOptions) -> Any:
    """Return the credential in the options, or in the environment, or this process's identity."""
    if options.anonymous:
        return None
    if options.service_credential is not None:
        _check_https(endpoint)
        return CheckedTokens(service_credential(options.service_credential, "az"))
    parts = urlsplit(endpoint)
    # An emulator's URLs contain the account in the path.
    name = parts.path.strip("/") or (parts.hostname or "").partition(".")[0]
    key = os.environ.get("AZURE_STORAGE_KEY")
    token = os.environ.get("AZURE_STORAGE_SAS_TOKEN")
    if connection_string:
        fields = _remember_parts(connection_string)
        if fields.get("AccountName", name) != name:
            raise InvalidInput(
                f"AZURE_STORAGE_CONNECTION_STRING is of account {fields['AccountName']!r}, and the "
                f"store of account {name!r}: set the right one, or none"
            )
        key = fields.get("AccountKey", key)
        token = fields.get("SharedAccessSignature", token)
    if key:
        check_resolved(key, "AZURE_STORAGE_KEY")
        return {"account_name": name, "account_key": key}
    credentials = load("azure.core.credentials")
    if token:
        check_resolved(token, "AZURE_STORAGE_SAS_TOKEN")
        _remember_signature(token)
        return credentials.AzureSasCredential(token)
    _check_https(endpoint)
    for variable in ("AZURE_CLIENT_SECRET", "AZURE_PASSWORD", "IDENTITY_HEADER", "MSI_SECRET"):
        check_resolved(os.environ.get(variable), variable)
    return CheckedTokens(load("azure.identity").DefaultAzureCredential())


def _remember_parts(connection_string: str) -> dict[str, str]:
    """Return the fields of a connection string, and hide its key and signature from now on."""
    fields = dict(each.split("=", 1) for each in connection_string.split(";") if "=" in each)
    remember_secret(fields.get("AccountKey", ""))
    _remember_signature(fields.get("SharedAccessSignature", ""))
    return fields


def _remember_signature(token: str) -> None:
    for value in parse_qs(token.lstrip("?")).get("sig", ()):
        remember_secret(value)  # as a URL has it, and as the SDK decodes it


class CheckedTokens:
    """Credentials that refuse a token that no header can carry, even a renewed one.

    Args:
        credentials: Credentials of the package ``azure-identity``.

    Raises:
        PermanentStorageError: The error names the token without showing it.
    """

    def __init__(self, credentials: Any) -> None:
        self.credentials = credentials

    def get_token(self, *scopes: str, **how: Any) -> Any:
        """See ``azure.core.credentials.TokenCredential``."""
        found = self.credentials.get_token(*scopes, **how)
        check_resolved(getattr(found, "token", None), "the access token of the Azure credentials")
        return found


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
    return int(getattr(error, "status_code", None) or 0)


def _code_of(error: Any) -> str:
    """Return Azure's error code, such as ``BlobNotFound``; empty without a code."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _is_missing(error: Any) -> bool:
    """Return whether the response is Azure's own for a missing blob.

    A proxy does not name its error, and a missing container has another code.
    """
    return _status_of(error) == 404 and _code_of(error) not in ("", "ContainerNotFound")
