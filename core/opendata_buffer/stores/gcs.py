"""Objects in a Google Cloud Storage bucket, through its JSON API (decision 0023)."""

from __future__ import annotations

import binascii
import builtins
import json
import os
import uuid
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import urllib3
import urllib3.exceptions

from opendata_buffer import outcomes
from opendata_buffer.concurrency import in_parallel
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.redaction import check_no_secrets, redacted
from opendata_buffer.retry import Retries
from opendata_buffer.runtime import Runtime, remaining
from opendata_buffer.stores.base import (
    Absent,
    Blob,
    DeleteFailure,
    IfVersion,
    NotModified,
    ObjectInfo,
    PutOutcome,
    check_range,
)
from opendata_buffer.stores.clients import GCS_ENVIRONMENT, ProcessClient, load, service_credential
from opendata_buffer.stores.http import (
    CHUNK_BYTES,
    MAX_ERROR_BYTES,
    MAX_PAGE_BYTES,
    CloudStore,
    DeadlinePassed,
    Page,
    as_base64,
    check_md5,
    md5,
    not_modified,
    read_part,
    verify_write,
    with_retry_after,
)
from opendata_buffer.stores.probe import RACES

PUBLIC = "https://storage.googleapis.com"
"""Google's own endpoint."""

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_PAGE = 1_000
"""Most keys of one page of a listing."""
_LISTED = "nextPageToken,items(name,size,timeCreated)"
_WRITE_INTERVAL_S = 1.0
"""Between two writes of one object that Google accepts."""
_THROTTLED_MS = 5_000
"""For how long a conditional write that was refused for its rate is sent again."""


class GcsStore(CloudStore):
    """A bucket, or the part of it below ``root``. Versions are generations.

    See :class:`.CloudStore`. A conditional write is repeated only if it was refused for its rate,
    and so surely not applied.

    Raises:
        InvalidInput: google-auth is not installed, or the options are another store's.
    """

    _KEYS = "GCS names"
    _BULK = 1_000

    def __init__(
        self,
        bucket: str,
        root: str = "",
        options: StoreOptions | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        load("google.auth", scheme="gs", extra="gcs")
        super().__init__(bucket, root, options, runtime)
        self._options.check_s3_only("gs")
        self._write_rate = WriteRate(_WRITE_INTERVAL_S)
        self._client: ProcessClient[GcsClient] = ProcessClient(
            connect, "", self._options, GCS_ENVIRONMENT
        )

    @property
    def url(self) -> str:
        """``gs://bucket/root``."""
        return f"gs://{self._bucket}/{self._prefix}".rstrip("/")

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
        query: dict[str, str | int] = {"alt": "media"}
        if if_changed is not None and if_changed.isdecimal():
            query["ifGenerationNotMatch"] = if_changed
        headers: dict[str, str] = {}
        if byte_range is not None:
            headers["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"

        def once() -> Blob | NotModified:
            response = self._client.get().send(
                "GET",
                self._path(full),
                query,
                headers=headers,
                read=partial(read_object, key, byte_range, max_bytes),
            )
            if response.status == 304:
                return not_modified(key, self.url, if_changed)
            if response.status == 416:  # the empty range at the end of an object
                response = self._client.get().send("GET", self._path(full), {})
                self._check_found(response, key, full)
                about = response.fields()
                return Blob(b"", self._generation(about.get("generation")), _created_ms(about))
            self._check_found(response, key, full)
            version = self._generation(response.headers.get("x-goog-generation"))
            if version == if_changed:  # a server that ignores the condition
                return NotModified()
            if byte_range is None:
                what = f"{full!r} in bucket {self._bucket!r}"
                check_md5(response.body, sent_md5(response.headers), what)
            modified_ms = _date_ms(response.headers.get("last-modified")) or 0
            return Blob(response.body, version, modified_ms)

        return self._repeated(once, "read", full)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.Put.put`."""
        full = self._full(key)
        body, headers = upload(full, data)

        def once() -> None:
            response = self._upload(body, headers, {})
            self._check_status(response, "write", full)
            if not response.fields().get("generation"):
                self._check_put(key, full, bytes(data))

        self._repeated(once, "write", full)

    def write_due(self, key: str) -> float:
        """See :meth:`opendata_buffer.stores.RateLimited.write_due`."""
        return self._write_rate.due(self._full(key), self._runtime.monotonic())

    def _put_if(
        self, key: str, full: str, data: bytes, condition: Absent | IfVersion
    ) -> PutOutcome:
        body, headers = upload(full, data)
        query = {"ifGenerationMatch": expected_generation(condition)}

        def once() -> Response:
            response = self._upload(body, headers, query)
            if _is_throttled(response):
                self._write_rate.refused(full, self._runtime.monotonic())
                raise _Throttled
            return response

        # Evenly: the next write is accepted within a second, and a pause that grows after each
        # refusal comes seconds too late.
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
            # No conflict: the condition was never looked at.
            return outcomes.Unknown(f"writes of {full!r} were refused for their rate for too long")
        if response.status == 412:
            gone = isinstance(condition, IfVersion) and self._is_gone(full)
            return outcomes.Vanished() if gone else outcomes.Conflict()
        self._check_status(response, "write", full)
        self._write_rate.accepted(full, self._runtime.monotonic())
        generation = response.fields().get("generation")
        return outcomes.Applied(str(generation)) if generation else verify_write(self, key, data)

    def _is_gone(self, full: str) -> bool:
        """Whether a condition failed because there is no object: GCS answers 412 to both."""
        query = {"fields": "generation"}
        response = self._client.get().send("GET", self._path(full), query)
        return response.status == 404 and not _is_missing_bucket(response)

    def _probe_races(self, endpoint: str) -> int:
        # Google's own accepts one write a second to an object: a race there would take as many
        # seconds as it has writers, to show what is known.
        return 0 if endpoint == PUBLIC else RACES

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
        failures = in_parallel(self._runtime, self._delete_one, keys)
        return [each for each in failures if each is not None]

    def _delete_one(self, key: str) -> DeleteFailure | None:
        full = self._prefix + key

        def once() -> None:
            response = self._client.get().send("DELETE", self._path(full), {})
            if response.status != 404 or _is_missing_bucket(response):
                self._check_status(response, "delete", full)

        try:
            self._repeated(once, "delete", full)
        except StorageError as error:
            return DeleteFailure(key, str(error))
        return None

    def _upload(
        self, body: bytes, headers: Mapping[str, str], query: Mapping[str, str]
    ) -> Response:
        return self._client.get().send(
            "POST",
            f"/upload/storage/v1/b/{self._bucket}/o",
            {"uploadType": "multipart", **query},
            headers=headers,
            body=body,
        )

    def _path(self, full: str) -> str:
        """The path of an object, its name raw in one segment (failure F24)."""
        return f"/storage/v1/b/{quote(self._bucket, safe='')}/o/{quote(full, safe='')}"

    def _check_found(self, response: Response, key: str, full: str) -> None:
        if response.status == 404 and not _is_missing_bucket(response):
            raise ObjectNotFound(key, self.url)
        self._check_status(response, "read", full)

    def _check_status(self, response: Response, verb: str, key: str) -> None:
        """Raise the library's error for a response that is an HTTP error."""
        if response.status >= 300:
            raise with_retry_after(self._refusal(response, verb, key), response.headers)

    def _refusal(self, response: Response, verb: str, key: str) -> StorageError:
        reason, message = _reason_and_message(response)
        status = response.status
        what = (
            f"cannot {verb} {key!r} in bucket {self._bucket!r} at {self._endpoint()}: "
            f"{redacted(f'{status} {reason} {message}')}"
        ).rstrip(". ")
        if _is_throttled(response):
            return TransientStorageError(
                f"{what}. GCS takes about one write a second to one object, and more requests to a "
                "bucket only little by little; try again later. Many writers of one queue: use a "
                "broker or a topic."
            )
        if status in (408, 409) or status >= 500:
            return TransientStorageError(f"{what}. The store failed; try again later.")
        if status == 404:
            return PermanentStorageError(
                f"{what}. Create bucket {self._bucket!r} or correct the store URL."
            )
        if status == 401:
            return PermanentStorageError(f"{what}. Renew or correct the Google credentials.")
        if status == 403:
            return PermanentStorageError(
                f"{what}. Allow these credentials to {verb} objects of bucket {self._bucket!r} "
                "(roles/storage.objectUser has all that is needed)."
            )
        return PermanentStorageError(
            f"{what}. Check that GCS's JSON API answers at this endpoint, and the bucket."
        )

    def _endpoint(self) -> str:
        return self._client.get().endpoint

    def _client_errors(self) -> tuple[type[BaseException], ...]:
        auth = load("google.auth.exceptions", scheme="gs", extra="gcs")
        return (urllib3.exceptions.HTTPError, OSError, auth.GoogleAuthError)

    def _error(self, error: BaseException, verb: str, key: str) -> StorageError:
        auth = load("google.auth.exceptions", scheme="gs", extra="gcs")
        what = f"cannot {verb} {key!r} in bucket {self._bucket!r}"
        name = type(error).__name__
        if (
            isinstance(error, auth.GoogleAuthError)
            and not isinstance(error, auth.TransportError)
            and not getattr(error, "retryable", False)
        ):
            return PermanentStorageError(
                f"{what}: the Google credentials gave no token ({name}). Renew them: 'gcloud auth "
                "application-default login', or GOOGLE_APPLICATION_CREDENTIALS."
            )
        return TransientStorageError(
            f"{what} at {self._endpoint()}: {name}: {redacted(str(error)).rstrip('.')}. Check the "
            "endpoint and the network, or try again later."
        )

    def _generation(self, found: Any) -> str:
        """The version of an object that was read."""
        if not found:
            raise self._unversioned(
                "no generation",
                "Use Google Cloud Storage itself, or take the proxy before it away.",
            )
        return str(found)


class _Throttled(Exception):
    """A write was refused for its rate: it was not applied, and may be sent again."""


class WriteRate:
    """When an object may be written again, learned from the writes that were refused.

    A write that is refused delays its sender until the next one is accepted, and all that it
    gathers meanwhile. A sender that waits first is not refused, and its write has all that came
    meanwhile. Times are monotonic seconds.

    Thread-safe: threads may at most lose one observation of each other. It pickles as its rate.

    Args:
        every_s: Seconds between two writes of one object that the store accepts.
    """

    REMEMBERED_S = 600.0
    """For so long after a refusal a store counts as one that refuses. Then a write is tried at
    once, in case the store has become another one."""
    MAX_KEYS = 1_000
    """Objects remembered; those that are written under a condition are few."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._accepted: dict[str, float] = {}
        self._refused: dict[str, float] = {}

    def accepted(self, key: str, now: float) -> None:
        """A write of the object was applied."""
        self._keep(self._accepted, key, now)

    def refused(self, key: str, now: float) -> None:
        """A write of the object was refused for its rate."""
        self._keep(self._refused, key, now)

    def due(self, key: str, now: float) -> float:
        """Seconds until the next write of the object is accepted; 0 where none is known of."""
        refused, accepted = self._refused.get(key), self._accepted.get(key)
        if refused is None or accepted is None or now - refused > self.REMEMBERED_S:
            return 0.0
        return max(0.0, accepted + self._every_s - now)

    def _keep(self, times: dict[str, float], key: str, now: float) -> None:
        if len(times) >= self.MAX_KEYS and key not in times:
            times.clear()
        times[key] = now

    def __getstate__(self) -> float:
        return self._every_s  # another process has another clock

    def __setstate__(self, every_s: float) -> None:
        WriteRate.__init__(self, every_s)


def expected_generation(condition: Absent | IfVersion) -> str:
    """The generation on whose condition an object is written; ``0`` is no object.

    A version that is no generation matches no object, and must become neither "no object" nor no
    condition at all.
    """
    if not isinstance(condition, IfVersion):
        return "0"
    version = condition.version
    # No object has the generation 1: generations are microseconds since 1970.
    return version if version.isdecimal() and version != "0" else "1"


def upload(full: str, data: bytes | memoryview) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an upload: the object's description, which has its checksum, and it.

    No cache may keep it: of public objects GCS otherwise serves an hour-old manifest.
    """
    about = {"name": full, "md5Hash": as_base64(md5(data)), "cacheControl": "no-store"}
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


def read_object(
    key: str, byte_range: tuple[int, int] | None, max_bytes: int | None, response: Any
) -> bytes:
    """An object, or the part of it that was asked for, of a response of urllib3.

    A server that knows no ranges sends the whole object. A body that broke off is an HTTPError.
    """

    def read(most: int | None) -> bytes:
        if most is None:
            content: bytes = response.read()
            _check_whole(response.headers, content)
            return content
        parts = []
        for part in response.stream(CHUNK_BYTES, decode_content=True):
            parts.append(part[:most])
            most -= len(parts[-1])
            if not most:
                response.close()  # the rest of the body is on its way
                break
        return b"".join(parts)

    whole = byte_range is not None and response.status == 200
    size = _size(response.headers)
    return read_part(key, read, size, byte_range, max_bytes, whole=whole)


def _check_whole(headers: Mapping[str, str], content: bytes) -> None:
    """Refuse a body that broke off, which urllib3 does not always see."""
    size = _size(headers)
    if size is not None and size != len(content):
        raise urllib3.exceptions.ProtocolError(f"{len(content)} of {size} bytes arrived")


def _size(headers: Mapping[str, str]) -> int | None:
    sent = headers.get("content-length", "")
    # What is compressed on the way has another size when it is unpacked.
    return int(sent) if sent.isdecimal() and "content-encoding" not in headers else None


def _created_ms(about: Mapping[str, Any]) -> int:
    """When an object was written, by its description; 0 where that does not say.

    Milliseconds since the Unix epoch, in whole seconds, as in the headers of a read.
    """
    when = about.get("timeCreated")
    return 0 if not when else int(datetime.fromisoformat(when).timestamp()) * 1000


def _date_ms(header: str | None) -> int | None:
    """A date in a header, milliseconds since the Unix epoch; None where there is none."""
    return None if not header else int(parsedate_to_datetime(header).timestamp()) * 1000


def sent_md5(headers: Mapping[str, str]) -> bytes | None:
    """The MD5 of the whole object, by the headers of a read; None where they have none."""
    for each in headers.get("x-goog-hash", "").split(","):
        name, _, value = each.strip().partition("=")
        if name == "md5":
            try:
                return b64decode(value, validate=True)
            except binascii.Error:
                return b""
    return None


def page_of(response: Response, root: str) -> Page:
    """A page of a listing, its keys without the root.

    A response that is no page raises: taken for an empty one, it would hide all the objects that
    follow.
    """
    page = response.fields()
    if not page and b"".join(response.body.split()) != b"{}":
        raise ValueError("it is no page of a listing")
    objects = [
        ObjectInfo(item["name"][len(root) :], int(item["size"]), _created_ms(item))
        for item in page.get("items", ())
    ]
    token = str(page.get("nextPageToken") or "") or None
    return Page(objects, token, _date_ms(response.headers.get("date")))


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response: its status, its headers, and its body where it was wanted."""

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
    """Sends requests with credentials, each once.

    Only where the service refused the token does google-auth send a request again, with a new
    one; a refused request was not carried out.
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
        read: Callable[[Any], bytes] | None = None,
    ) -> Response:
        """The response to one request, also where it is an HTTP error; the connection's and the
        credentials' errors are raised as they are.

        ``read`` reads the body of a success. Default: all of it, at most
        ``MAX_PAGE_BYTES``.
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
                content = response.read(MAX_ERROR_BYTES)
                if len(content) == MAX_ERROR_BYTES:
                    response.close()
            elif read is not None:
                content = read(response)
            else:
                content = response.read(MAX_PAGE_BYTES + 1)
                if len(content) > MAX_PAGE_BYTES:
                    raise urllib3.exceptions.ProtocolError(
                        f"the response has more than {MAX_PAGE_BYTES} bytes"
                    )
                _check_whole(response.headers, content)
        except BaseException:
            response.close()  # the rest of the body is on its way
            raise
        response.release_conn()
        return Response(response.status, response.headers, content)


def connect(name: str, options: StoreOptions) -> GcsClient:
    """A client with the credentials that the options name, else with the application default ones;
    without any to an emulator.
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
    # A token must not be sent in the clear. Emulators ask for none.
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


def _reason_and_message(response: Response) -> tuple[str, str]:
    error = response.fields().get("error")
    if not isinstance(error, dict):
        return "", response.body[:200].decode(errors="replace").strip()
    reasons = error.get("errors")
    first = reasons[0] if isinstance(reasons, list) and reasons else None
    reason = first.get("reason", "") if isinstance(first, dict) else ""
    return str(reason), str(error.get("message", ""))


def _is_throttled(response: Response) -> bool:
    """Whether the request was refused for its rate, and so surely not carried out."""
    if response.status == 403:
        reason, _ = _reason_and_message(response)
        return reason in ("rateLimitExceeded", "userRateLimitExceeded")
    return response.status == 429


def _is_missing_bucket(response: Response) -> bool:
    """Whether it is not the object that is missing."""
    _, message = _reason_and_message(response)
    return response.status == 404 and "bucket does not exist" in message.lower()
