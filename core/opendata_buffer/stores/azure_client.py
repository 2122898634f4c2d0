"""The client of an Azure storage account: where it is, with what credentials, without retries."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.redaction import check_no_secrets, redacted
from opendata_buffer.stores.clients import load, service_credential
from opendata_buffer.stores.http import MOST_OF_A_PAGE, MOST_OF_AN_ERROR, TooLong, limited

__all__ = ["blob_host", "bounded_answer", "connect"]


# ---- Answers of Azure, read no further than they may be long: the SDK reads each to its end. ----


_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


def bounded_answer(build: Callable[[Any, Any], Any], request: Any, raw: Any) -> Any:
    """What an adapter of requests makes of an answer, bounded by what was asked for.

    Args:
        build: The adapter's own ``build_response``.
        request: Of requests.
        raw: The answer, of urllib3.

    Raises:
        ConnectionError: Of requests: by its header the body is too long. The SDK would take memory
            for all of it at once.
    """
    asked = _RANGE.fullmatch(request.headers.get("x-ms-range") or "")
    most = int(asked[2]) - int(asked[1]) + 1 if asked else MOST_OF_A_PAGE
    if raw.status >= 300:
        most = MOST_OF_AN_ERROR
    told = raw.headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > most and request.method != "HEAD":
        raw.close()
        error = load("requests.exceptions", scheme="az", extra="azure").ConnectionError
        raise error(TooLong(f"the answer has {told[:20]} bytes, more than the {most} it may have"))
    raw.enforce_content_length = True  # as the SDK would set it, which does not get at it any more
    response = build(request, raw)
    response.raw = _Bounded(raw, most)
    return response


class _Bounded:
    """A body of urllib3 that ends in an error where it is too long."""

    def __init__(self, raw: Any, most: int) -> None:
        self._raw = raw
        self._most = most

    def stream(self, *how: Any, **more: Any) -> Iterator[bytes]:
        return limited(self._raw.stream(*how, **more), self._most)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


_ONE_REQUEST = 4 * 1024**3
"""Objects up to this size are written by one request: its condition holds for all of it."""
_CHUNK = 32 * 1024**2


def blob_host(host: str) -> str:
    """The host of an account's blobs, for that of its files: one account has both.

    Raises:
        InvalidInput: Not a host as ``account.dfs.core.windows.net``.
    """
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

    Args:
        host: Of the account's blobs; empty where the URL names no account.
        options: Endpoint and timeouts.

    Raises:
        InvalidInput: The SDK is not installed, or no account is named.
        PermanentStorageError: There are no credentials, or none that may be sent.
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
        adapter.build_response = partial(bounded_answer, adapter.build_response)
        session.mount(scheme, adapter)
    timeouts = {
        "connection_timeout": options.connect_timeout_ms / 1000,
        "read_timeout": options.read_timeout_ms / 1000,
    }
    return {
        **timeouts,
        # A conditional write that is sent again would lose against itself (failure F1).
        "retry_total": 0,
        # Azure sends nobody elsewhere. Who does would get what is written, or be read as Azure.
        "permit_redirects": False,
        "max_single_put_size": _ONE_REQUEST,
        "max_single_get_size": _CHUNK,
        "max_chunk_get_size": _CHUNK,
        "transport": transport.RequestsTransport(session=session, **timeouts),
    }


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
    whoever runs this."""
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
        # A token that is sent in the clear is a token given away.
        raise PermanentStorageError(
            f"no credentials for {endpoint}: without https only a key can be used. Set "
            "AZURE_STORAGE_KEY to the emulator's key."
        )
