"""Objects in a Google Cloud Storage bucket, through its JSON API."""

from __future__ import annotations

import binascii
import builtins
import json
import uuid
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

import urllib3.exceptions

from opendata_buffer import outcomes
from opendata_buffer.concurrency import together
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.formats.keys import check_key
from opendata_buffer.retry import full_jitter
from opendata_buffer.runtime import Runtime, SystemRuntime
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
    listed,
    looked_up,
    not_modified,
    unversioned,
)
from opendata_buffer.stores.clients import GCS_ENVIRONMENT, ProcessClient, load
from opendata_buffer.stores.gcs_client import (
    PUBLIC,
    Answer,
    GcsClient,
    answer_error,
    connect,
    is_missing_bucket,
    is_throttled,
    network_error,
    read_object,
)
from opendata_buffer.stores.http import (
    Root,
    as_base64,
    check_md5,
    in_time,
    md5,
    repeated,
    with_pause,
)
from opendata_buffer.stores.probe import PROBE_DEADLINE_MS, RACES, SAFE, probe_conditional_writes

__all__ = [
    "GcsStore",
    "WriteRate",
    "SlowDown",
    "created_ms",
    "date_ms",
    "download",
    "expected_generation",
    "page_of",
    "told_md5",
    "until_let_through",
    "upload",
]


# ---- How often a store takes writes of one object, learned from the writes that it refused. ----


REMEMBERED_S = 600.0
"""So long after a refusal its store counts as one that refuses. Then a write is tried at once, in
case it has become another one; at most one in ten minutes is refused for that."""

MOST_KEYS = 1_000
"""Objects remembered; those that are written under a condition are few."""


class WriteRate:
    """When an object may be written again. Times are monotonic seconds.

    A write that is refused costs its sender until the next one is let through, and holds what
    has come meanwhile out. Who waits instead, and gathers, is refused no more, and has all that
    has come in the write.

    Thread-safe: what threads may lose of each other is one observation. It pickles as its rate.

    Args:
        every_s: Seconds between two writes of one object that the store takes.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._taken: dict[str, float] = {}
        self._refused: dict[str, float] = {}

    def taken(self, key: str, now: float) -> None:
        """A write of the object was carried out."""
        _keep(self._taken, key, now)

    def refused(self, key: str, now: float) -> None:
        """A write of the object was refused for its rate."""
        _keep(self._refused, key, now)

    def due(self, key: str, now: float) -> float:
        """Seconds until the next write of the object is taken; 0 where it is as far as known."""
        refused, taken = self._refused.get(key), self._taken.get(key)
        if refused is None or taken is None or now - refused > REMEMBERED_S:
            return 0.0
        return max(0.0, taken + self._every_s - now)

    def __getstate__(self) -> float:
        return self._every_s  # another process has another clock

    def __setstate__(self, every_s: float) -> None:
        WriteRate.__init__(self, every_s)


def _keep(times: dict[str, float], key: str, now: float) -> None:
    if len(times) >= MOST_KEYS and key not in times:
        times.clear()
    times[key] = now


# ---- What GCS is asked ----
#
# Queries, headers and bodies of its JSON API. Pure but for a random mark.


_NO_GENERATION = "1"
"""No object has it: generations are microseconds since 1970."""


def download(
    if_changed: str | None, byte_range: tuple[int, int] | None
) -> tuple[dict[str, str | int], dict[str, str]]:
    """Query and headers of a read.

    Args:
        if_changed: The generation of an object that need not be sent again.
        byte_range: Start and end, the end exclusive.
    """
    query: dict[str, str | int] = {"alt": "media"}
    if if_changed is not None and if_changed.isdecimal():
        query["ifGenerationNotMatch"] = if_changed
    if byte_range is None:
        return query, {}
    return query, {"Range": f"bytes={byte_range[0]}-{byte_range[1] - 1}"}


def expected_generation(condition: Absent | IfVersion) -> str:
    """What a conditional write expects; ``0`` is no object.

    What is no generation matches no object, and the question is asked all the same.
    """
    if not isinstance(condition, IfVersion):
        return "0"
    version = condition.version
    return version if version.isdecimal() and version != "0" else _NO_GENERATION


def upload(full: str, data: bytes | memoryview) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an upload: the object's description, which has its checksum, and it.

    No cache may keep it: for what anybody may read, GCS otherwise hands out an hour-old manifest.
    """
    about = {"name": full, "md5Hash": as_base64(md5(data)), "cacheControl": "no-store"}
    mark = f"part-{uuid.uuid4().hex}".encode()
    body = b"".join(
        (
            b"--" + mark + b"\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n",
            json.dumps(about).encode(),
            b"\r\n--" + mark + b"\r\nContent-Type: application/octet-stream\r\n\r\n",
            data,
            b"\r\n--" + mark + b"--\r\n",
        )
    )
    return body, {"Content-Type": f"multipart/related; boundary={mark.decode()}"}


# ---- Sending a conditional write again that GCS refused for its rate ----
#
# One a second is let through.


_PATIENCE_MS = 5_000

T = TypeVar("T")


class SlowDown(Exception):
    """A write was refused for its rate: it was not done, and may be sent again."""


def until_let_through(runtime: Runtime, once: Callable[[], T]) -> T:
    """Repeat a write that raises :class:`SlowDown`, for five seconds.

    Evenly: the next write is let through within a second, and whoever waits longer after each
    refusal, as after other errors, comes seconds too late.

    Raises:
        SlowDown: Of the last attempt.
    """
    policy = full_jitter(
        runtime,
        base_ms=100,
        max_ms=400,
        deadline_ms=_PATIENCE_MS,
        retry_on=(SlowDown,),
        pause=lambda _: 0.1 + 0.3 * runtime.random(),
    )
    return policy(once)


# ---- What is read off an answer of GCS. Pure. ----


def created_ms(about: Mapping[str, Any]) -> int:
    """When an object was written, by its description; 0 where that does not say.

    Milliseconds since the Unix epoch, in whole seconds, as the headers of a read tell it.
    """
    when = about.get("timeCreated")
    return 0 if not when else int(datetime.fromisoformat(when).timestamp()) * 1000


def date_ms(header: str | None) -> int | None:
    """A date in a header, milliseconds since the Unix epoch; None where there is none."""
    return None if not header else int(parsedate_to_datetime(header).timestamp()) * 1000


def told_md5(headers: Mapping[str, str]) -> bytes | None:
    """The MD5 of the whole object, by the headers of a read; None where they have none."""
    for each in headers.get("x-goog-hash", "").split(","):
        name, _, value = each.strip().partition("=")
        if name == "md5":
            try:
                return b64decode(value, validate=True)
            except binascii.Error:
                return b""
    return None


def page_of(answer: Answer, root: str) -> tuple[list[ObjectInfo], str, int | None]:
    """What a page of a listing tells.

    Args:
        answer: With the status of a success.
        root: What stands before every key.

    Returns:
        Objects, their keys without the root; the token of the next page, empty at the last; and
        the service's clock, milliseconds since the Unix epoch.

    Raises:
        ValueError, LookupError, TypeError: It is no page of a listing. Taken for an empty one, it
            would hide all the objects that follow.
    """
    page = answer.fields()
    if not page and b"".join(answer.body.split()) != b"{}":
        raise ValueError("it is no page of a listing")
    objects = [
        ObjectInfo(item["name"][len(root) :], int(item["size"]), created_ms(item))
        for item in page.get("items", ())
    ]
    return objects, str(page.get("nextPageToken") or ""), date_ms(answer.headers.get("date"))


_PAGE = 1_000
"""Most keys of one page of a listing."""

_PACE_S = 1.0
"""Between two writes of one object that Google takes."""

_FIELDS = "nextPageToken,items(name,size,timeCreated)"


class GcsStore:
    """A bucket, or the part of it below ``root``. Versions are generations.

    Requests are sent once; reads and unconditional writes that failed are repeated here, and
    conditional ones only if they were refused for their rate: the repetition of one whose answer
    was lost would fail on its own success (failure F1).

    Every call ends within the caller's :func:`~opendata_buffer.runtime.deadline`, whatever the
    store does. Without one, silence ends it after the timeouts of all its attempts.

    Args:
        bucket: Its name.
        root: Prefix of every key, without slashes around it; may be empty.
        options: Endpoint and timeouts. ``region``, keys and roles are S3's alone.
        runtime: Backoff, names of probe objects, threads that delete.

    Raises:
        InvalidInput: google-auth is not installed, or the options are another store's.
    """

    def __init__(
        self,
        bucket: str,
        root: str = "",
        options: StoreOptions | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        load("google.auth", scheme="gs", extra="gcs")
        self._bucket = bucket
        self._root = Root(root, "GCS names")
        self._options = options if options is not None else StoreOptions()
        self._options.check_s3_only("gs")
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._pace = WriteRate(_PACE_S)
        self._client: ProcessClient[GcsClient] = ProcessClient(
            connect, "", self._options, GCS_ENVIRONMENT
        )

    @property
    def url(self) -> str:
        """``gs://bucket/root``."""
        return f"gs://{self._bucket}/{self._root.prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"GcsStore({self.url!r})"

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
        query, headers = download(if_changed, byte_range)

        def once() -> Blob | NotModified:
            client = self._client.get()
            answer = client.send(
                "GET",
                client.object_url(self._bucket, full),
                query,
                headers=headers,
                read=partial(read_object, key, byte_range, max_bytes),
            )
            if answer.status == 304:
                return not_modified(key, self.url, if_changed)
            if answer.status == 416:  # an empty range at the end of the object
                answer = self._sent(
                    "GET", client.object_url(self._bucket, full), {}, key=key, verb="read"
                )
                found = answer.fields()
                return Blob(b"", self._generation(found.get("generation")), created_ms(found))
            self._expect_found(answer, key, full)
            version = self._generation(answer.headers.get("x-goog-generation"))
            if version == if_changed:  # a server that ignores the condition
                return NotModified()
            if byte_range is None:
                what = f"{full!r} in bucket {self._bucket!r}"
                check_md5(answer.body, told_md5(answer.headers), what)
            last_modified_ms = date_ms(answer.headers.get("last-modified")) or 0
            return Blob(answer.body, version, last_modified_ms)

        return self._repeated(once, "read", full)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.Put.put`."""
        full = self._root.full(key)
        body, headers = upload(full, data)

        def once() -> None:
            answer = self._send_object({}, body, headers)
            if answer.status >= 300:
                raise self._error(answer, "write", full)
            # A proxy that says 200 in GCS's place must not be believed: what is lost would be
            # acknowledged.
            if not answer.fields().get("generation"):
                found = looked_up(self, key, bytes(data))
                if isinstance(found, outcomes.Unknown):
                    raise TransientStorageError(f"cannot write {full!r}: {found.reason}")

        self._repeated(once, "write", full)

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.ConditionalPut.put_if`."""
        full = self._root.full(key)
        try:
            return self._ended(lambda: self._put_if(key, data, condition), "write", full)
        except TransientStorageError as error:
            return outcomes.Unknown(str(error))

    def write_due(self, key: str) -> float:
        """See :meth:`opendata_buffer.stores.Paced.write_due`."""
        return self._pace.due(self._root.full(key), self._runtime.monotonic())

    @property
    def probe_subject(self) -> str:
        """See :class:`opendata_buffer.stores.base.Probed`."""
        return f"{self._client.get().endpoint}/{self._bucket}"

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
        endpoint = self._client.get().endpoint
        if self.is_probed:
            return
        probe_conditional_writes(
            self,
            near,
            self._runtime,
            name=f"{self.url!r} at {endpoint}",
            room=len(self._root.prefix.encode()),
            deadline_ms=min(self._options.read_timeout_ms, PROBE_DEADLINE_MS),
            # Google's own lets one write a second to an object through: a race there would take
            # as many seconds as it has writers, to show what is known. Others are tried.
            races=0 if endpoint == PUBLIC else RACES,
        )
        self.take_as_probed()

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.List.list`."""
        check_limit(limit)
        objects: list[ObjectInfo] = []
        now_ms: int | None = None
        query: dict[str, str | int] = {"prefix": self._root.prefix + prefix, "fields": _FIELDS}
        if start_after:
            query["startOffset"] = self._root.prefix + start_after  # which itself is listed, too
        more = True
        while more and (limit is None or len(objects) < limit):
            query["maxResults"] = _PAGE if limit is None else min(limit - len(objects) + 1, _PAGE)
            page, token, date = self._list_page(query)
            now_ms = date if now_ms is None else now_ms
            objects += [each for each in page if each.key > start_after]
            more = bool(token)
            check_goes_on(query.get("pageToken"), token, str(query["prefix"]), self.url)
            query["pageToken"] = token
        return listed(objects, now_ms, limit, more=more)

    def _list_page(
        self, query: dict[str, str | int]
    ) -> tuple[builtins.list[ObjectInfo], str, int | None]:
        prefix = str(query["prefix"])

        def once() -> tuple[builtins.list[ObjectInfo], str, int | None]:
            answer = self._sent("GET", f"/storage/v1/b/{self._bucket}/o", query, prefix, "list")
            return page_of(answer, self._root.prefix)

        return self._repeated(once, "list", prefix)

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.Delete.delete_many`."""
        failures = together(self._runtime, self._delete, keys)
        return tuple(each for each in failures if each is not None)

    def _delete(self, key: str) -> DeleteFailure | None:
        def once(full: str) -> None:
            client = self._client.get()
            answer = client.send("DELETE", client.object_url(self._bucket, full), {})
            if answer.status >= 300 and (answer.status != 404 or is_missing_bucket(answer)):
                raise self._error(answer, "delete", full)

        try:
            full = self._root.full(key)
            self._repeated(partial(once, full), "delete", full)
        except (InvalidInput, StorageError) as error:
            return DeleteFailure(key, str(error))
        return None

    # ---- keys, errors, repetition

    def _where(self, verb: str, key: str) -> dict[str, str]:
        return {
            "verb": verb,
            "key": key,
            "bucket": self._bucket,
            "endpoint": self._client.get().endpoint,
        }

    def _error(self, answer: Answer, verb: str, key: str) -> StorageError:
        return with_pause(answer_error(answer, **self._where(verb, key)), answer.headers)

    def _ended(self, call: Callable[[], T], verb: str, key: str) -> T:
        """What the call returns or raises, in our errors, within the caller's deadline."""
        auth = load("google.auth.exceptions", scheme="gs", extra="gcs")

        def mapped() -> T:
            try:
                return call()
            except (urllib3.exceptions.HTTPError, OSError, auth.TransportError) as error:
                raise network_error(error, **self._where(verb, key)) from error
            except auth.GoogleAuthError as error:
                if getattr(error, "retryable", False):
                    raise network_error(error, **self._where(verb, key)) from error
                raise PermanentStorageError(
                    f"cannot {verb} {key!r} in bucket {self._bucket!r}: the Google credentials "
                    f"gave no token ({type(error).__name__}). Renew them: 'gcloud auth "
                    "application-default login', or GOOGLE_APPLICATION_CREDENTIALS."
                ) from error

        return in_time(
            self._runtime, mapped, verb=verb, key=key, where=lambda: f"bucket {self._bucket!r}"
        )

    def _repeated(self, once: Callable[[], T], verb: str, key: str) -> T:
        """Send what may be sent again until it succeeds, at most ``max_attempts`` times."""
        return repeated(self._runtime, self._options, lambda: self._ended(once, verb, key))

    def _expect_found(self, answer: Answer, key: str, full: str) -> None:
        if answer.status == 404 and not is_missing_bucket(answer):
            raise ObjectNotFound(key, self.url)
        if answer.status >= 300:
            raise self._error(answer, "read", full)

    def _sent(
        self, method: str, path: str, query: dict[str, str | int], key: str, verb: str
    ) -> Answer:
        answer = self._client.get().send(method, path, query)
        if answer.status >= 300:
            if verb == "read":
                self._expect_found(answer, key, self._root.prefix + key)
            raise self._error(answer, verb, key)
        return answer

    # ---- writing

    def _send_object(
        self, query: dict[str, str | int], body: bytes, headers: dict[str, str]
    ) -> Answer:
        return self._client.get().send(
            "POST",
            f"/upload/storage/v1/b/{self._bucket}/o",
            {"uploadType": "multipart", **query},
            headers=headers,
            body=body,
        )

    def _put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        full = self._root.full(key)
        expected = expected_generation(condition)
        body, headers = upload(full, data)

        def once() -> Answer:
            answer = self._send_object({"ifGenerationMatch": expected}, body, headers)
            if is_throttled(answer):
                self._pace.refused(full, self._runtime.monotonic())
                raise SlowDown
            return answer

        try:
            answer = until_let_through(self._runtime, once)
        except SlowDown:
            # No conflict: the condition was never looked at.
            return outcomes.Unknown(f"writes of {full!r} were refused for their rate for too long")
        if answer.status == 412:
            gone = isinstance(condition, IfVersion) and self._is_gone(full)
            return outcomes.Vanished() if gone else outcomes.Conflict()
        if answer.status >= 300:
            raise self._error(answer, "write", full)
        self._pace.taken(full, self._runtime.monotonic())
        generation = answer.fields().get("generation")
        return outcomes.Applied(str(generation)) if generation else looked_up(self, key, data)

    def _is_gone(self, full: str) -> bool:
        """Whether a condition failed because there is no object: GCS answers 412 to both."""
        client = self._client.get()
        path = client.object_url(self._bucket, full)
        answer = client.send("GET", path, {"fields": "generation"})
        return answer.status == 404 and not is_missing_bucket(answer)

    def _generation(self, found: Any) -> str:
        """The version in an answer.

        Raises:
            UnsafeStore: There is none.
        """
        if not found:
            raise unversioned(
                f"{self.url!r} at {self._client.get().endpoint}",
                "answers without a generation",
                "Use Google Cloud Storage itself, or take the proxy before it away.",
            )
        return str(found)
