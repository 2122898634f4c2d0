"""Requests to Google Cloud Storage's JSON API, each sent once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import urllib3
import urllib3.exceptions

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    InvalidInput,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.redaction import check_no_secrets, redacted
from opendata_buffer.runtime import remaining
from opendata_buffer.stores.base import read_part
from opendata_buffer.stores.clients import load, service_credential
from opendata_buffer.stores.http import (
    MOST_OF_A_PAGE,
    MOST_OF_AN_ERROR,
    PIECE,
    DeadlinePassed,
    limited,
)

__all__ = [
    "Answer",
    "GcsClient",
    "PUBLIC",
    "answer_error",
    "check_whole",
    "connect",
    "is_missing_bucket",
    "is_throttled",
    "network_error",
    "read_object",
]


# ---- Bodies of answers of GCS, read as far as they were asked for. ----


def read_object(
    key: str, byte_range: tuple[int, int] | None, max_bytes: int | None, response: Any
) -> bytes:
    """An object, or the part of it that was asked for.

    Args:
        key: For errors.
        byte_range: What was asked for; a server that knows no ranges sends the whole object.
        max_bytes: Most bytes of that.
        response: Of urllib3, with the status of a success.

    Raises:
        CorruptData: There are more.
        TransientStorageError: There are more than were asked for.
        HTTPError: The body broke off.
    """
    whole = byte_range is not None and response.status == 200
    size = _size(response.headers)
    return read_part(key, partial(_read, response), size, byte_range, max_bytes, whole=whole)


def check_whole(headers: Mapping[str, str], content: bytes) -> None:
    """Refuse a body that broke off, which urllib3 does not always see.

    Raises:
        ProtocolError: Fewer or more bytes came than the headers tell.
    """
    size = _size(headers)
    if size is not None and size != len(content):
        raise urllib3.exceptions.ProtocolError(f"{len(content)} of {size} bytes arrived")


def _size(headers: Mapping[str, str]) -> int | None:
    told = headers.get("content-length", "")
    # What is compressed on the way has another size when it is unpacked.
    return int(told) if told.isdecimal() and "content-encoding" not in headers else None


def _read(response: Any, most: int | None) -> bytes:
    if most is None:
        content: bytes = response.read()
        check_whole(response.headers, content)
        return content
    parts = []
    for part in response.stream(PIECE, decode_content=True):
        parts.append(part[:most])
        most -= len(parts[-1])
        if not most:
            response.close()  # the rest of the body is on its way
            break
    return b"".join(parts)


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


# ---- What an error of Google Cloud Storage means for the caller, and how to say it. ----


_THROTTLED = {"rateLimitExceeded", "userRateLimitExceeded"}


def _said(answer: Answer) -> tuple[str, str]:
    """Reason and message of an error."""
    error = answer.fields().get("error")
    if not isinstance(error, dict):
        return "", answer.body[:200].decode(errors="replace").strip()
    reasons = error.get("errors")
    first = reasons[0] if isinstance(reasons, list) and reasons else None
    reason = first.get("reason", "") if isinstance(first, dict) else ""
    return str(reason), str(error.get("message", ""))


def is_throttled(answer: Answer) -> bool:
    """Whether the request was refused for its rate, and so surely not carried out.

    One object takes about one write a second.
    """
    return answer.status == 429 or (answer.status == 403 and _said(answer)[0] in _THROTTLED)


def is_missing_bucket(answer: Answer) -> bool:
    """Whether it is not the object that is missing."""
    return answer.status == 404 and "bucket does not exist" in _said(answer)[1].lower()


def answer_error(
    answer: Answer, *, verb: str, key: str, bucket: str, endpoint: str
) -> StorageError:
    """The error of this library for an answer, with the fix in its message.

    Args:
        answer: With the status of an error.
        verb: ``read``, ``write``, ``list`` or ``delete``.
        key: The full key, or prefix.
        bucket: The bucket.
        endpoint: The endpoint's URL.
    """
    reason, message = _said(answer)
    status = answer.status
    what = (
        f"cannot {verb} {key!r} in bucket {bucket!r} at {endpoint}: "
        f"{redacted(f'{status} {reason} {message}')}"
    ).rstrip(". ")
    if is_throttled(answer):
        return TransientStorageError(
            f"{what}. GCS takes about one write a second to one object, and more requests to a "
            "bucket only little by little; try again later. Many writers of one queue: use a "
            "broker or a topic."
        )
    if status in (408, 409) or status >= 500:
        return TransientStorageError(f"{what}. The store failed; try again later.")
    if status == 404:
        return PermanentStorageError(f"{what}. Create bucket {bucket!r} or correct the store URL.")
    if status == 401:
        return PermanentStorageError(f"{what}. Renew or correct the Google credentials.")
    if status == 403:
        return PermanentStorageError(
            f"{what}. Allow these credentials to {verb} objects of bucket {bucket!r} "
            "(roles/storage.objectUser has all that is needed)."
        )
    return PermanentStorageError(
        f"{what}. Check that GCS's JSON API answers at this endpoint, and the bucket."
    )


def network_error(
    error: Exception, *, verb: str, key: str, bucket: str, endpoint: str
) -> TransientStorageError:
    """The error for a request that was not answered. Arguments as there."""
    return TransientStorageError(
        f"cannot {verb} {key!r} in bucket {bucket!r} at {endpoint}: {type(error).__name__}: "
        f"{redacted(str(error)).rstrip('.')}. Check the endpoint and the network, or try again "
        "later."
    )
