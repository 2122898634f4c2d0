"""Requests to Google Cloud Storage's JSON API, each sent once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import urllib3
import urllib3.exceptions

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.redaction import check_no_secrets, redacted
from opendata_buffer.runtime import remaining
from opendata_buffer.stores.bounded import DeadlinePassed
from opendata_buffer.stores.extras import load
from opendata_buffer.stores.gcs_body import check_whole
from opendata_buffer.stores.service_credential import service_credential
from opendata_buffer.stores.wire import MOST_OF_A_PAGE, MOST_OF_AN_ERROR, PIECE, limited

__all__ = ["PUBLIC", "Answer", "GcsClient", "connect"]

PUBLIC = "https://storage.googleapis.com"
"""Where Google answers."""
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: its status, its headers, and its body where it was wanted."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def fields(self) -> dict[str, Any]:
        """The body as a JSON object; empty where it is none."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class GcsClient:
    """Sends requests with credentials, never twice: whoever asks decides what may be repeated.

    Only where the service refused the token is a request sent again, with a new one; a refused
    request was not carried out.

    Args:
        http: urllib3's pool, or google-auth's around it.
        endpoint: The service's URL.
        options: Timeouts.
    """

    def __init__(self, http: Any, endpoint: str, options: StoreOptions) -> None:
        self._http = http
        self._options = options
        self.endpoint = endpoint

    def object_url(self, bucket: str, key: str) -> str:
        """The path of an object, its name raw in one segment (failure F24)."""
        return f"/storage/v1/b/{quote(bucket, safe='')}/o/{quote(key, safe='')}"

    def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | int],
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        read: Callable[[Any], bytes] | None = None,
    ) -> Answer:
        """The answer to one request; an HTTP error is an answer too.

        Args:
            method: Of HTTP.
            path: Below the endpoint.
            query: Parameters.
            headers: Besides those of the credentials.
            body: What is sent.
            read: Reads the body of a success. Default: all of it, as far as a page may be long.

        Raises:
            DeadlinePassed: No time was left to send it.
            Exception: The connection's and the credentials' errors, as they are.
        """
        left = remaining()
        if left is not None and left <= 0:
            raise DeadlinePassed
        silence = self._options.read_timeout_ms / 1000
        response = self._http.urlopen(
            method,
            f"{self.endpoint}{path}?{urlencode(query, quote_via=quote)}",
            body=body,
            headers={**(headers or {}), "Accept-Encoding": "identity"},
            timeout=urllib3.Timeout(
                connect=self._options.connect_timeout_ms / 1000,
                read=silence if left is None else min(silence, left),
            ),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        try:
            if response.status >= 300:
                content = response.read(MOST_OF_AN_ERROR)
                if len(content) == MOST_OF_AN_ERROR:
                    response.close()
            elif read is not None:
                content = read(response)
            else:
                parts = response.stream(PIECE, decode_content=True)
                content = b"".join(limited(parts, MOST_OF_A_PAGE))
                check_whole(response.headers, content)
        except BaseException:
            response.close()  # the rest of the body is on its way
            raise
        response.release_conn()
        return Answer(response.status, response.headers, content)


def connect(name: str, options: StoreOptions) -> GcsClient:
    """A client with the credentials that the options name, else with the application default ones;
    without any to an emulator.

    Raises:
        InvalidInput: google-auth is not installed, or the endpoint is no URL, or none that
            credentials may be sent to.
        PermanentStorageError: There are no credentials.
    """
    del name  # one service for all buckets
    endpoint = options.endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST") or PUBLIC
    if "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    check_no_secrets("STORAGE_EMULATOR_HOST", endpoint)
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidInput(f"endpoint {endpoint!r} is no URL of a server: use https://host[:port]")
    endpoint = endpoint.rstrip("/")
    transport = load("google.auth.transport.urllib3", scheme="gs", extra="gcs")
    pool = urllib3.PoolManager(maxsize=options.max_connections, num_pools=4)
    # A token that is sent in the clear is a token given away. Emulators ask for none.
    if options.service_credential is not None and parts.scheme == "http":
        raise InvalidInput(
            f"service_credential is {options.service_credential!r} and {endpoint} is not https: "
            "leave one out"
        )
    if options.anonymous or parts.scheme == "http":
        return GcsClient(pool, endpoint, options)
    credentials = _credentials(endpoint, options)
    return GcsClient(transport.AuthorizedHttp(credentials, pool), endpoint, options)


def _credentials(endpoint: str, options: StoreOptions) -> Any:
    if options.service_credential is not None:
        scoped = load("google.auth.credentials", scheme="gs", extra="gcs")
        found = service_credential(options.service_credential, scheme="gs", has="before_request")
        return scoped.with_scopes_if_required(found, [_SCOPE])
    auth = load("google.auth", scheme="gs", extra="gcs")
    errors = load("google.auth.exceptions", scheme="gs", extra="gcs")
    try:
        credentials, _ = auth.default(scopes=[_SCOPE])
    except errors.GoogleAuthError as error:
        raise PermanentStorageError(
            f"no credentials for {endpoint}: {redacted(str(error)).rstrip('.')}. Run 'gcloud auth "
            "application-default login', set GOOGLE_APPLICATION_CREDENTIALS to a key file, or "
            "give this machine a service account."
        ) from error
    return credentials
