"""Objects in a Google Cloud Storage bucket, through its JSON API (decision 0023)."""

from __future__ import annotations

import builtins
import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
import urllib3.exceptions

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions, check_endpoint, redacted
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.hints import Setting
from opendata_buffer.runtime import Retries
from opendata_buffer.stores.base import Blob, DeleteFailure, ObjectInfo
from opendata_buffer.stores.clients import (
    GCS_ENVIRONMENT,
    ProcessClient,
    check_resolved,
    load,
    service_credential,
)
from opendata_buffer.stores.http import (
    MAX_ERROR_BYTES,
    MAX_PAGE_BYTES,
    Answer,
    CloudStore,
    Page,
    Read,
    epoch_ms,
    header_ms,
    md5,
    read_timeout_s,
    with_retry_after,
)

PUBLIC = "https://storage.googleapis.com"  # Google's own endpoint

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_PAGE = 1_000  # most keys of one page of a listing
_LISTED = "nextPageToken,items(name,size,timeCreated,generation)"
_WRITE_INTERVAL_S = 1.0  # seconds between two writes of one object that Google accepts
_THROTTLED_MS = 5_000
"""How long a conditional write that was refused because of its rate is sent again, in milliseconds.
"""


class GcsStore(CloudStore):
    """A bucket, or the part of it below ``root``; see :class:`.CloudStore`.

    Versions are generations. A conditional write is repeated only if it was refused because of its
    rate and therefore certainly not applied.

    Raises:
        InvalidInput: google-auth is not installed, or the options belong to another store.
    """

    _SCHEME = "gs"
    _KEYS = "GCS names"
    _VERSION = "generation"
    # A race there would take as many seconds as it has writers.
    _RACE_FREE = PUBLIC
    _CLOUD = "Google"
    _USE = "Use Google Cloud Storage itself, or take the proxy before it away."
    _ALLOW = " (roles/storage.objectUser has all that is needed)"
    _CHECK = "Check that GCS's JSON API answers at this endpoint, and the bucket."

    def _prepare(self) -> None:
        load("google.auth")
        self._options.check_s3_only("gs")
        self._write_rate = WriteRate()
        self._client = ProcessClient(connect, GCS_ENVIRONMENT, self._options)

    def _get(self, read: Read) -> Blob | None:
        query: dict[str, str | int] = {"alt": "media"}
        if read.if_changed is not None and read.if_changed.isdecimal():
            query["ifGenerationNotMatch"] = read.if_changed
        body = partial(read_object, read)
        response = self._send("GET", read.name, query, headers=read.range_header, read_body=body)
        if response.status == 304:
            return None
        if response.status == 416:  # the empty range at the end of an object
            response = self._send("GET", read.name)
            self._check_found(response, read)
            about = response.fields()
            return Blob(b"", self._version(about.get("generation")), _created_ms(about))
        self._check_found(response, read)
        version = self._version(response.headers.get("x-goog-generation"))
        if version == read.if_changed:  # a server that ignores the condition
            return None
        self._check_md5(read, response.body, sent_md5(response.headers))
        modified_ms = header_ms(response.headers.get("last-modified")) or 0
        return Blob(response.body, version, modified_ms)

    def write_due(self, key: str) -> float:
        """See :meth:`opendata_buffer.stores.base.RateLimited.write_due`."""
        return self._write_rate.due(self._full(key), self._runtime.monotonic())

    def _put(self, name: str, data: bytes) -> str | None:
        return self._generation(self._upload(name, data, {}), name)

    def _put_if(self, name: str, data: bytes, version: str | None) -> Answer:
        query = {"ifGenerationMatch": expected_generation(version)}

        def once() -> Response:
            response = self._upload(name, data, query)
            if _is_throttled(response):
                self._write_rate.refused(name, self._runtime.monotonic())
                raise _Throttled
            return response

        # Retry at an even pace. The next write is accepted within a second, and a pause that grows
        # after each refusal would end seconds too late.
        policy = Retries(
            self._runtime,
            base_ms=100,
            max_ms=400,
            deadline_ms=_THROTTLED_MS,
            retry_on=(_Throttled,),
            pause=lambda _: 0.1 + 0.3 * self._runtime.random(),
        )
        try:
            response = policy(once)
        except _Throttled:
            # This is not a conflict, because the condition was never checked.
            return outcomes.Unknown(f"writes of {name!r} were refused for their rate for too long")
        if response.status == 412:
            gone = version is not None and self._is_gone(name)
            return outcomes.Vanished() if gone else outcomes.LostRace()
        generation = self._generation(response, name)
        self._write_rate.accepted(name, self._runtime.monotonic())
        return generation

    def _generation(self, response: Response, name: str) -> str | None:
        """Return the generation that an upload created; None if the response has none."""
        self._check_status(response, "write", name)
        return response.fields().get("generation")

    def _page(self, prefix: str, start_after: str, token: str | None, wanted: int | None) -> Page:
        size = _PAGE if wanted is None else min(wanted + 1, _PAGE)
        query: dict[str, str | int] = {"prefix": prefix, "fields": _LISTED, "maxResults": size}
        if start_after:
            query["startOffset"] = self._prefix + start_after  # which itself is listed, too
        if token is not None:
            query["pageToken"] = token
        response = self._client.get().send("GET", f"/storage/v1/b/{self._bucket}/o", query)
        self._check_status(response, "list", prefix)
        return page_of(response, self._prefix)

    def _delete(self, keys: builtins.list[str]) -> builtins.list[DeleteFailure]:
        return self._delete_each(self._delete_one, keys)

    def _delete_one(self, name: str) -> None:
        response = self._send("DELETE", name)
        if response.status != 404 or _is_missing_bucket(response):
            self._check_status(response, "delete", name)

    def _upload(self, name: str, data: bytes, query: Mapping[str, str]) -> Response:
        body, headers = upload(name, data)
        return self._client.get().send(
            "POST",
            f"/upload/storage/v1/b/{self._bucket}/o",
            {"uploadType": "multipart", **query},
            headers=headers,
            body=body,
        )

    def _send(
        self, method: str, name: str, query: Mapping[str, str | int] | None = None, **how: Any
    ) -> Response:
        # The name is raw, in one segment of the path (failure F24).
        path = f"/storage/v1/b/{quote(self._bucket, safe='')}/o/{quote(name, safe='')}"
        return self._client.get().send(method, path, query or {}, **how)

    def _check_found(self, response: Response, read: Read) -> None:
        if response.status == 404 and not _is_missing_bucket(response):
            raise ObjectNotFound(read.key, self.url)
        self._check_status(response, "read", read.name)

    def _check_status(self, response: Response, verb: str, name: str) -> None:
        """Raise the library's error for a response that is an HTTP error."""
        if response.status >= 300:
            raise with_retry_after(self._answered(response, verb, name), response.headers)

    def _answered(self, response: Response, verb: str, name: str) -> StorageError:
        """Return the error for a response that is an HTTP error."""
        reason, message = _reason_and_message(response)
        answer = redacted(f"{response.status} {reason} {message}")
        what = f"{self._cannot(verb, name, self._endpoint())}: {answer}".rstrip(". ")
        if _is_throttled(response):
            return TransientStorageError(
                f"{what}. GCS takes about one write a second to one object, and more requests to a "
                "bucket only little by little; try again later. Many writers of one queue: use a "
                "broker or a topic."
            )
        # 409: another operation on the bucket is under way.
        return self._refusal(what, 503 if response.status == 409 else response.status, verb)

    def _endpoint(self) -> str:
        return self._client.get().endpoint

    def _client_errors(self) -> tuple[type[BaseException], ...]:
        auth = load("google.auth.exceptions")
        return (urllib3.exceptions.HTTPError, OSError, auth.GoogleAuthError)

    def _error(self, error: BaseException, verb: str, name: str) -> StorageError:
        auth = load("google.auth.exceptions")
        what = self._cannot(verb, name, self._endpoint())
        refused = isinstance(error, auth.GoogleAuthError) and not getattr(error, "retryable", False)
        if refused and not isinstance(error, auth.TransportError):
            return PermanentStorageError(
                f"{what}: the Google credentials gave no token ({type(error).__name__}). Renew "
                "them: 'gcloud auth application-default login', or GOOGLE_APPLICATION_CREDENTIALS."
            )
        return self._unanswered(what, error)


class _Throttled(Exception):
    """A write was refused because of its rate. It was not applied and may be sent again."""


class WriteRate:
    """When an object may be written again, learned from writes that were refused.

    Times are monotonic seconds. Thread-safe: threads lose at most one of each other's observations.
    It pickles as a new one, because another process has another clock.
    """

    REMEMBERED_S = 600.0  # until a refusal is forgotten, in case the store has been replaced
    MAX_KEYS = 1_000  # objects remembered; those that are written under a condition are few

    def __init__(self) -> None:
        self._accepted: dict[str, float] = {}
        self._refused: dict[str, float] = {}

    def __reduce__(self) -> tuple[type[WriteRate], tuple[()]]:
        return WriteRate, ()

    def accepted(self, key: str, now: float) -> None:
        """Note that a write of the object was applied."""
        self._keep(self._accepted, key, now)

    def refused(self, key: str, now: float) -> None:
        """Note that a write of the object was refused because of its rate."""
        self._keep(self._refused, key, now)

    def due(self, key: str, now: float) -> float:
        """Return the seconds until the next write of the object is accepted; 0 if unknown."""
        refused, accepted = self._refused.get(key), self._accepted.get(key)
        if refused is None or accepted is None or now - refused > self.REMEMBERED_S:
            return 0.0
        return max(0.0, accepted + _WRITE_INTERVAL_S - now)

    def _keep(self, times: dict[str, float], key: str, now: float) -> None:
        if len(times) >= self.MAX_KEYS and key not in times:
            times.clear()
        times[key] = now


def expected_generation(version: str | None) -> str:
    """Return the generation on whose condition an object is written; ``0`` means no object."""
    if version is None:
        return "0"
    # Another text becomes 1, which no object has: generations are microseconds since 1970.
    return version if version.isdecimal() and version != "0" else "1"


def upload(full: str, data: bytes | memoryview) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of an upload: the description with a checksum, and the bytes."""
    # No cache may keep it. Otherwise GCS serves a public manifest that is an hour old.
    about = {"name": full, "md5Hash": md5(data), "cacheControl": "no-store"}
    boundary = f"part-{uuid.uuid4().hex}".encode()
    body = b"".join(
        (
            b"--" + boundary + b"\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n",
            json.dumps(about).encode(),
            b"\r\n--" + boundary + b"\r\nContent-Type: application/octet-stream\r\n\r\n",
            data,
            b"\r\n--" + boundary + b"--\r\n",
        )
    )
    return body, {"Content-Type": f"multipart/related; boundary={boundary.decode()}"}


def read_object(read: Read, response: Any) -> bytes:
    """Read the body of a response of urllib3.

    Args:
        read: The range that was asked for.
        response: The response, whose body was not read.

    Returns:
        The bytes that were asked for.

    Raises:
        urllib3.exceptions.HTTPError: The body broke off.
    """
    # A server that knows no ranges sends the whole object.
    whole = read.byte_range is not None and response.status == 200
    return read.part_of(partial(_body, response), _size(response.headers), whole=whole)


def _body(response: Any, most: int | None) -> bytes:
    """Return the body of a response, or its first ``most`` bytes."""
    content: bytes = response.read(most)
    if len(content) == most:
        response.close()  # the rest of the body is on its way
    return content


def _size(headers: Mapping[str, str]) -> int | None:
    sent = headers.get("content-length", "")
    # A body that is compressed in transit has another size when it is unpacked.
    return int(sent) if sent.isdecimal() and "content-encoding" not in headers else None


def _created_ms(about: Mapping[str, Any]) -> int:
    """Return when an object was written, in milliseconds, rounded to seconds like a read's."""
    when = about.get("timeCreated")
    return epoch_ms(datetime.fromisoformat(when)) // 1_000 * 1_000 if when else 0


def sent_md5(headers: Mapping[str, str]) -> str | None:
    """Return the MD5 of the whole object from the headers of a read; None if they have none."""
    hashes = (each.strip().partition("=") for each in headers.get("x-goog-hash", "").split(","))
    return next((value for name, _, value in hashes if name == "md5"), None)


def page_of(response: Response, root: str) -> Page:
    """Read a page of a listing.

    Args:
        response: The response.
        root: The store's root in the bucket. Keys are returned without it.

    Returns:
        The page.

    Raises:
        ValueError: The response is not a page. As an empty page it would hide the rest of the
            listing.
    """
    page = response.fields()
    if not page and b"".join(response.body.split()) != b"{}":
        raise ValueError("it is no page of a listing")
    objects = [
        ObjectInfo(
            item["name"][len(root) :],
            int(item["size"]),
            _created_ms(item),
            str(item.get("generation", "")),
        )
        for item in page.get("items", ())
    ]
    token = str(page.get("nextPageToken") or "") or None
    return Page(objects, token, header_ms(response.headers.get("date")))


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response: its status, its headers, and its body if it was wanted."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def fields(self) -> dict[str, Any]:
        """Return the body as a JSON object; empty if it is not one."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


class GcsClient:
    """Sends requests with credentials, each once.

    google-auth sends a request again, with a new token, only if the service refused the old token
    and therefore did not carry out the request.
    """

    def __init__(self, http: Any, endpoint: str, options: StoreOptions) -> None:
        self._http = http
        self._options = options
        self.endpoint = endpoint

    def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | int],
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        read_body: Callable[[Any], bytes] | None = None,
    ) -> Response:
        """Send one request.

        Args:
            method: The HTTP method.
            path: The path after the endpoint, with its escapes.
            query: The parameters of the query, without escapes.
            headers: More headers of the request. Default: none.
            body: The body of the request. Default: none.
            read_body: Reads the body of a success. Default: at most ``MAX_PAGE_BYTES``.

        Returns:
            The response, even if it is an HTTP error.

        Raises:
            urllib3.exceptions.HTTPError: No response came, or the body broke off or is too large.
        """
        response = self._http.urlopen(
            method,
            f"{self.endpoint}{path}?{urlencode(query, quote_via=quote)}",
            body=body,
            headers={**(headers or {}), "Accept-Encoding": "identity"},
            timeout=urllib3.Timeout(
                connect=self._options.connect_timeout_ms / 1000, read=read_timeout_s(self._options)
            ),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        try:
            if response.status >= 300:
                content = _body(response, MAX_ERROR_BYTES)
            elif read_body is not None:
                content = read_body(response)
            else:
                content = _body(response, MAX_PAGE_BYTES + 1)
                if len(content) > MAX_PAGE_BYTES:
                    raise urllib3.exceptions.ProtocolError(
                        f"the response has more than {MAX_PAGE_BYTES} bytes"
                    )
        except BaseException:
            response.close()  # the rest of the body is on its way
            raise
        response.release_conn()
        return Response(response.status, response.headers, content)


def connect(options: StoreOptions) -> GcsClient:
    """Make a client with the options' credentials, or the application default ones.

    An emulator gets no credentials.

    Args:
        options: How to reach the cloud.

    Returns:
        The client, which sends each request once.

    Raises:
        InvalidInput: A credential would be sent without encryption, or the endpoint is not a URL.
    """
    endpoint = options.endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST") or PUBLIC
    if "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    check_endpoint("STORAGE_EMULATOR_HOST", endpoint)
    endpoint = endpoint.rstrip("/")
    is_plain = endpoint.lower().startswith("http:")
    # Never send a token in the clear. Emulators ask for none.
    if options.service_credential is not None and is_plain:
        raise InvalidInput(
            Setting("service_credential"),
            f" is {options.service_credential!r} and {endpoint} is not https: leave one out",
        )
    pool = CheckedPool(maxsize=options.max_connections, num_pools=4)
    if options.anonymous or is_plain:
        return GcsClient(pool, endpoint, options)
    transport = load("google.auth.transport.urllib3")
    credentials = _credentials(endpoint, options)
    return GcsClient(transport.AuthorizedHttp(credentials, pool), endpoint, options)


def _credentials(endpoint: str, options: StoreOptions) -> Any:
    if options.service_credential is not None:
        scoped = load("google.auth.credentials")
        found = service_credential(options.service_credential, "gs")
        return scoped.with_scopes_if_required(found, [_SCOPE])
    auth = load("google.auth")
    errors = load("google.auth.exceptions")
    try:
        found = auth.default(scopes=[_SCOPE])[0]
    except (errors.GoogleAuthError, ValueError) as error:
        cause = redacted(str(error)).rstrip(".")
        if not isinstance(error, errors.GoogleAuthError):
            cause = "the file of credentials cannot be read"  # the error may quote it
    else:
        for field in _SECRET_FIELDS:
            value = getattr(found, field, None)
            if isinstance(value, str):
                check_resolved(value, f"{field.strip('_')} of the Google credentials")
        return found
    # Without the chain: it may quote the file.
    raise PermanentStorageError(
        f"no credentials for {endpoint}: {cause}. Run 'gcloud auth application-default login', set "
        "GOOGLE_APPLICATION_CREDENTIALS to a key file, or give this machine a service account."
    )


_SECRET_FIELDS = ("token", "_refresh_token", "_client_id", "_client_secret", "_private_key_id")
"""Fields of credentials that Google's services receive in a header or a form."""


class CheckedPool(urllib3.PoolManager):
    """Connections that refuse a token that no header can carry, even a renewed one.

    Raises:
        PermanentStorageError: The error names the token without showing it.
    """

    def urlopen(self, method: str, url: str, redirect: bool = True, **kw: Any) -> Any:  # type: ignore[override]
        """See ``urllib3.PoolManager.urlopen``."""
        for name, value in (kw.get("headers") or {}).items():
            if name.lower() == "authorization":
                token = str(value).partition(" ")[2]
                check_resolved(token, "the access token of the Google credentials")
        return super().urlopen(method, url, redirect=redirect, **kw)


def _reason_and_message(response: Response) -> tuple[str, str]:
    error = response.fields().get("error")
    if not isinstance(error, dict):
        return "", response.body[:200].decode(errors="replace").strip()
    reasons = error.get("errors")
    first = reasons[0] if isinstance(reasons, list) and reasons else None
    reason = first.get("reason", "") if isinstance(first, dict) else ""
    return str(reason), str(error.get("message", ""))


def _is_throttled(response: Response) -> bool:
    """Return whether the request was refused because of its rate and certainly not carried out."""
    if response.status == 403:
        reason, _ = _reason_and_message(response)
        return reason in ("rateLimitExceeded", "userRateLimitExceeded")
    return response.status == 429


def _is_missing_bucket(response: Response) -> bool:
    _, message = _reason_and_message(response)
    return response.status == 404 and "bucket does not exist" in message.lower()
