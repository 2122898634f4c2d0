"""Objects in an S3 bucket, through boto3."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import botocore.exceptions as boto
import urllib3.exceptions

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
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
    read_part,
    strong_etag,
    unversioned,
    weak_or_none,
)
from opendata_buffer.stores.clients import AWS_ENVIRONMENT, ProcessClient
from opendata_buffer.stores.http import Root, as_base64, crc32, in_time
from opendata_buffer.stores.probe import PROBE_DEADLINE_MS, SAFE, probe_conditional_writes
from opendata_buffer.stores.s3_client import (
    BUSY,
    NETWORK,
    DirectGet,
    S3Pair,
    code_of,
    connect,
    status_of,
    storage_error,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = [
    "BODY_LOST",
    "BodyLost",
    "Busy",
    "S3Store",
    "chunks",
    "conditional_upload",
    "delete_objects",
    "download",
    "modified_ms",
    "page_of",
    "read_body",
    "until_whole",
    "upload",
    "while_busy",
]


# ---- What S3 is asked: arguments of boto3's calls. Pure. ----


def download(
    bucket: str, full: str, if_changed: str | None, byte_range: tuple[int, int] | None
) -> dict[str, Any]:
    """Of ``get_object``.

    Args:
        bucket: The bucket.
        full: The full key.
        if_changed: The ETag of an object that need not be sent again.
        byte_range: Start and end, the end exclusive.
    """
    arguments: dict[str, Any] = {"Bucket": bucket, "Key": full}
    if if_changed is not None:
        arguments["IfNoneMatch"] = if_changed
    if byte_range is not None:
        arguments["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
    return arguments


def upload(bucket: str, full: str, data: bytes) -> dict[str, Any]:
    """Of ``put_object``.

    The checksum is a header and not left to boto3, which over https would send a trailer in
    aws-chunked encoding; many stores that look like S3 do not know that (failure F36).
    """
    return {
        "Bucket": bucket,
        "Key": full,
        "Body": data,
        "ChecksumCRC32": as_base64(crc32(data)),
    }


def conditional_upload(
    bucket: str, full: str, data: bytes, condition: Absent | IfVersion
) -> dict[str, Any]:
    """Of ``put_object``, which writes only while the condition holds."""
    if isinstance(condition, IfVersion):
        return {**upload(bucket, full, data), "IfMatch": condition.version}
    return {**upload(bucket, full, data), "IfNoneMatch": "*"}


# ---- Deleting objects of a bucket, a thousand in one request where the store can. ----


_BULK = 1_000
"""Most keys of one DeleteObjects request."""


def chunks(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """The keys in groups of one request each."""
    iterator = iter(keys)
    while chunk := list(islice(iterator, _BULK)):
        yield chunk


def delete_objects(
    client: S3Client,
    bucket: str,
    root: str,
    keys: Sequence[str],
    explain: Callable[..., StorageError],
) -> list[DeleteFailure]:
    """Delete at most 1,000 objects; a missing one counts as deleted.

    Args:
        client: Repeats requests that fail.
        bucket: Its name.
        root: What stands before every key, with its slash.
        keys: Relative to the root.
        explain: Makes an error of the library of one of boto3's; takes it, and ``key=``.

    Returns:
        What could not be deleted, and why.
    """
    objects = [{"Key": root + key} for key in keys]
    try:
        answer = client.delete_objects(
            Bucket=bucket,
            Delete={"Objects": objects, "Quiet": True},  # type: ignore[typeddict-item]
        )
    except NETWORK as error:
        if isinstance(error, boto.ClientError) and _has_no_bulk(error):
            return list(_delete_singly(client, bucket, root, keys, explain))
        reason = str(explain(error, key=f"{len(keys)} objects"))
        return [DeleteFailure(key, reason) for key in keys]
    return [
        DeleteFailure(
            item.get("Key", "")[len(root) :],
            f"{item.get('Code')} {item.get('Message', '')}".strip(),
        )
        for item in answer.get("Errors", ())
        if item.get("Code") not in ("NoSuchKey", "NoSuchVersion")
    ]


def _delete_singly(
    client: S3Client,
    bucket: str,
    root: str,
    keys: Sequence[str],
    explain: Callable[..., StorageError],
) -> Iterator[DeleteFailure]:
    for key in keys:
        try:
            client.delete_object(Bucket=bucket, Key=root + key)
        except NETWORK as error:
            if not isinstance(error, boto.ClientError) or code_of(error) != "NoSuchKey":
                yield DeleteFailure(key, str(explain(error, key=key)))


def _has_no_bulk(error: boto.ClientError) -> bool:
    return status_of(error) in (405, 501) or code_of(error) in (
        "InvalidRequest",
        "MalformedXML",
        "MissingContentMD5",
        "NotImplemented",
    )


# ---- Sending again what boto3 does not ----
#
# Writes that met another one, reads whose body broke off.


BODY_LOST = (
    boto.FlexibleChecksumError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    boto.ReadTimeoutError,
    urllib3.exceptions.HTTPError,
)
"""Errors of an answer that began and whose body did not come through."""

T = TypeVar("T")


class Busy(Exception):
    """409: not applied, another write was under way."""

    def __init__(self, error: boto.ClientError) -> None:
        super().__init__(str(error))
        self.error = error


class BodyLost(Exception):
    """The answer began and its body broke off.

    Args:
        error: What is raised when no further attempt is made.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def while_busy(runtime: Runtime, once: Callable[[], T]) -> T:
    """Repeat a write that was answered with 409, for two seconds.

    409 means that another operation was under way and this one was not applied: the same put may
    simply be sent again (failure F3).

    Raises:
        Busy: Of the last attempt.
    """
    policy = full_jitter(runtime, base_ms=20, max_ms=200, deadline_ms=2_000, retry_on=(Busy,))
    return policy(once)


def until_whole(runtime: Runtime, options: StoreOptions, once: Callable[[], T]) -> T:
    """Repeat a read that raises :class:`BodyLost`, for as long as all its attempts may take; so is
    repeated one whose bytes do not have the checksum that the store told (failure F36).

    Raises:
        BodyLost: Of the last attempt.
    """
    policy = full_jitter(
        runtime,
        base_ms=50,
        max_ms=1_000,
        deadline_ms=options.read_timeout_ms * options.max_attempts,
        retry_on=(BodyLost,),
    )
    return policy(once)


# ---- What is read off an answer of S3, also of servers that leave out what S3 always sends. ----


def read_body(
    key: str,
    response: Mapping[str, Any],
    byte_range: tuple[int, int] | None,
    max_bytes: int | None,
) -> bytes:
    """The bytes asked for, with the connection given back.

    Args:
        key: For errors.
        response: Of ``get_object``.
        byte_range: What was asked for; a store that knows no ranges sends the whole object.
        max_bytes: Most bytes to read.

    Raises:
        CorruptData: There are more.
        TransientStorageError: There are more than were asked for.
    """
    body = response["Body"]
    whole = byte_range is not None and "ContentRange" not in response
    size: int | None = response.get("ContentLength")
    try:
        return read_part(key, body.read, size, byte_range, max_bytes, whole=whole)
    finally:
        body.close()


def modified_ms(response: Mapping[str, Any]) -> int:
    """When the object was written, milliseconds since the epoch; 0 when the answer does not say."""
    when = response.get("LastModified")
    return 0 if when is None else _ms(when)


def page_of(
    response: Mapping[str, Any], root: str
) -> tuple[list[ObjectInfo], str | None, int | None]:
    """What ``list_objects_v2`` tells.

    Args:
        response: Its answer.
        root: What stands before every key.

    Returns:
        Objects, their keys without the root; the token of the next page, None at the last; and
        the store's clock, milliseconds since the Unix epoch.

    Raises:
        ValueError, LookupError: It is no page of a listing. Taken for an empty one, it would hide
            all the objects that follow.
    """
    if response.keys() <= {"ResponseMetadata"}:
        raise ValueError("it is no page of a listing")
    token: str | None = response.get("NextContinuationToken")
    more = bool(response.get("IsTruncated"))
    if more and not token:
        raise ValueError("more objects follow, and it does not say where: ListObjectsV2 is unknown")
    date = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    objects = [
        ObjectInfo(item["Key"][len(root) :], item["Size"], _ms(item["LastModified"]))
        for item in response.get("Contents", ())
    ]
    return objects, token if more else None, _ms(parsedate_to_datetime(date)) if date else None


def _ms(when: Any) -> int:
    return int(when.timestamp() * 1000)


_PAGE = 1_000
"""Most keys of one page of a listing."""


class S3Store:
    """A bucket, or the part of it below ``root``. Versions are ETags.

    Two clients, made when first used in a process: one repeats failed reads and unconditional
    writes; the other sends each conditional write once, because the repetition of a write that
    was applied and whose answer was lost fails on its own success (failure F1).

    Every call ends within the caller's :func:`~opendata_buffer.runtime.deadline`, whatever the
    store does. Without one, silence ends it after the timeouts of all its attempts.

    Args:
        bucket: Its name.
        root: Prefix of every key, without slashes around it; may be empty.
        options: Endpoint, region, profile, timeouts.
        runtime: Backoff, names of probe objects.
    """

    def __init__(
        self,
        bucket: str,
        root: str = "",
        options: StoreOptions | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        self._bucket = bucket
        self._root = Root(root, "S3 keys")
        self._options = options if options is not None else StoreOptions()
        self._runtime = runtime if runtime is not None else SystemRuntime()
        self._clients: ProcessClient[S3Pair] = ProcessClient(
            connect, "", self._options, AWS_ENVIRONMENT
        )
        self._direct = DirectGet()

    @property
    def url(self) -> str:
        """``s3://bucket/root``."""
        return f"s3://{self._bucket}/{self._root.prefix}".rstrip("/")

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

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
        arguments = download(self._bucket, full, if_changed, byte_range)

        def once() -> Blob | NotModified:
            client = self._clients.get().data
            try:
                response = self._direct.get(client, arguments)
                if response is None:
                    response = self._direct.through(client, arguments, client.get_object)
                elif response["Status"] == 304:
                    return not_modified(key, self.url, if_changed)
                elif response["Status"] == 404:
                    raise ObjectNotFound(key, self.url)
            except boto.ClientError as error:
                status, code = status_of(error), code_of(error)
                if status == 304:
                    return not_modified(key, self.url, if_changed)
                if status == 416:
                    return self._past_the_end(key, full)
                if status == 404 and code != "NoSuchBucket":
                    raise ObjectNotFound(key, self.url) from None
                raise
            data = read_body(key, response, byte_range, max_bytes)
            return Blob(data, self._etag(response, "a read"), modified_ms(response))

        return self._retried(once, "read", full)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.Put.put`."""
        full = self._root.full(key)
        arguments = upload(self._bucket, full, bytes(data))

        def once() -> None:
            try:
                response = self._clients.get().data.put_object(**arguments)
                if not response.get("ETag"):
                    self._check_written(key, full, len(data))
            except boto.ClientError as error:
                if code_of(error) in BUSY:
                    raise Busy(error) from error
                raise

        try:
            self._ended(lambda: while_busy(self._runtime, once), "write", full)
        except Busy as busy:
            raise self._error(busy.error, "write", full) from busy.error
        except NETWORK as error:
            raise self._error(error, "write", full) from error

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        """See :meth:`opendata_buffer.stores.ConditionalPut.put_if`."""
        full = self._root.full(key)
        try:
            return self._ended(lambda: self._put_if(key, full, data, condition), "write", full)
        except TransientStorageError as error:
            return outcomes.Unknown(str(error))
        except NETWORK as error:
            mapped = self._error(error, "write", full)
            if isinstance(mapped, PermanentStorageError):
                raise mapped from error
            return outcomes.Unknown(str(mapped))

    @property
    def probe_subject(self) -> str:
        """See :class:`opendata_buffer.stores.base.Probed`."""
        return f"{self._clients.get().endpoint}/{self._bucket}"

    @property
    def is_probed(self) -> bool:
        """See :class:`opendata_buffer.stores.base.Probed`."""
        return self.probe_subject in SAFE

    def take_as_probed(self) -> None:
        """See :class:`opendata_buffer.stores.base.Probed`."""
        SAFE.add(self.probe_subject)

    def check_conditional_writes(self, near: str) -> None:
        """See :meth:`opendata_buffer.stores.ConditionalPut.check_conditional_writes`.

        Small writes to an object named ``near`` + ``.probe-<ULID>``, a read, and its deletion.
        """
        check_key("near", near)
        if self.is_probed:
            return
        probe_conditional_writes(
            self,
            near,
            self._runtime,
            name=f"{self.url!r} at {self._clients.get().endpoint}",
            room=len(self._root.prefix.encode()),
            deadline_ms=min(self._options.read_timeout_ms, PROBE_DEADLINE_MS),
        )
        self.take_as_probed()

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Listing:
        """See :meth:`opendata_buffer.stores.List.list`."""
        check_limit(limit)
        objects: list[ObjectInfo] = []
        now_ms: int | None = None
        # EncodingType is left to boto3: only then does it also decode the keys (failure F24).
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._root.prefix + prefix}
        if start_after:
            request["StartAfter"] = self._root.prefix + start_after
        more = True
        while more and (limit is None or len(objects) < limit):
            if limit is not None:
                request["MaxKeys"] = min(limit - len(objects), _PAGE)
            page, token, date = self._list_page(request)
            now_ms = date if now_ms is None else now_ms
            # A store that ignores StartAfter must not hand out what the caller has had.
            objects += [each for each in page if each.key > start_after]
            more = token is not None
            check_goes_on(request.get("ContinuationToken"), token, request["Prefix"], self.url)
            request["ContinuationToken"] = token
        return listed(objects, now_ms, limit, more=more)

    def _list_page(
        self, request: dict[str, Any]
    ) -> tuple[builtins.list[ObjectInfo], str | None, int | None]:
        def once() -> tuple[builtins.list[ObjectInfo], str | None, int | None]:
            response = self._clients.get().data.list_objects_v2(**request)
            return page_of(response, self._root.prefix)

        return self._retried(once, "list", request["Prefix"])

    def delete_many(self, keys: Iterable[str]) -> tuple[DeleteFailure, ...]:
        """See :meth:`opendata_buffer.stores.Delete.delete_many`."""
        legal, failures = self._root.legal(keys)
        for chunk in chunks(legal):
            try:
                failures += self._ended(
                    partial(self._delete, chunk), "delete", f"{len(chunk)} objects"
                )
            except TransientStorageError as error:
                failures += [DeleteFailure(key, str(error)) for key in chunk]
        return tuple(failures)

    def _delete(self, keys: Sequence[str]) -> builtins.list[DeleteFailure]:
        return delete_objects(
            self._clients.get().data,
            self._bucket,
            self._root.prefix,
            keys,
            partial(self._error, verb="delete"),
        )

    # ---- keys, clients, errors

    def _error(self, error: Exception, verb: str, key: str) -> StorageError:
        return storage_error(
            error, verb=verb, key=key, bucket=self._bucket, endpoint=self._clients.get().endpoint
        )

    def _where(self) -> str:
        """Bucket and endpoint; of that, while no client could be made, what is known without."""
        made = self._clients.made
        endpoint = self._options.endpoint_url or "the endpoint of the AWS settings"
        return f"bucket {self._bucket!r} at {endpoint if made is None else made.endpoint}"

    def _ended(self, call: Callable[[], T], verb: str, key: str) -> T:
        """What the call returns or raises, within the caller's deadline."""
        return in_time(self._runtime, call, verb=verb, key=key, where=self._where)

    def _retried(self, once: Callable[[], T], verb: str, key: str) -> T:
        """Run a read; repeat it when its body broke off, which boto3 does not."""

        def mapped() -> T:
            try:
                return once()
            except boto.ClientError as error:
                raise self._error(error, verb, key) from error  # boto3 has repeated it
            except BODY_LOST as error:
                raise BodyLost(self._error(error, verb, key)) from error
            except NETWORK as error:
                raise self._error(error, verb, key) from error

        try:
            return self._ended(lambda: until_whole(self._runtime, self._options, mapped), verb, key)
        except BodyLost as lost:
            raise lost.error from lost.__cause__

    def _etag(self, response: Mapping[str, Any], what: str) -> str:
        """The version in an answer.

        Raises:
            UnsafeStore: There is none, or it is weak.
        """
        etag = strong_etag(response.get("ETag"))
        if etag is None:
            raise unversioned(
                f"{self.url!r} at {self._clients.get().endpoint}",
                f"answers {what} with {weak_or_none(response.get('ETag'))}",
                "Use a store that has ETags (AWS S3, Cloudflare R2, a recent MinIO or Ceph), take "
                "the proxy before it away, or use a local directory.",
            )
        return etag

    # ---- reading and writing

    def _check_written(self, key: str, full: str, size: int) -> None:
        """Make sure that a write was carried out whose answer has no ETag.

        S3 answers with one. A proxy that says 200 in its place must not be believed, or what is
        lost would be acknowledged.
        """
        with suppress(ObjectNotFound):
            found = self._head(key, full)
            if found.get("ETag") and found.get("ContentLength") == size:
                return
        raise TransientStorageError(
            f"cannot write {full!r} in {self._where()}: it was answered without an ETag, and the "
            "object is not there. Check what answers at the endpoint, or try again later."
        )

    def _past_the_end(self, key: str, full: str) -> Blob:
        """The empty range at the end of an object, which S3 answers with an error."""
        response = self._head(key, full)
        return Blob(b"", self._etag(response, "a read"), modified_ms(response))

    def _head(self, key: str, full: str) -> Mapping[str, Any]:
        try:
            return self._clients.get().data.head_object(Bucket=self._bucket, Key=full)
        except boto.ClientError as error:
            if status_of(error) == 404:
                raise ObjectNotFound(key, self.url) from None
            raise

    def _put_if(
        self, key: str, full: str, data: bytes, condition: Absent | IfVersion
    ) -> PutOutcome:
        arguments = conditional_upload(self._bucket, full, data, condition)

        def once() -> PutOutcome:
            try:
                response = self._clients.get().conditional.put_object(**arguments)
            except boto.ClientError as error:
                status, code = status_of(error), code_of(error)
                if status == 412:
                    return outcomes.Conflict()
                if status == 404 and code != "NoSuchBucket" and "IfMatch" in arguments:
                    return outcomes.Vanished()  # failure F4
                if status in (405, 501):
                    raise UnsafeStore(
                        f"store {self.url!r} at {self._clients.get().endpoint} has no conditional "
                        f"writes: it answered {code}. Use a store that has them (AWS S3, "
                        "Cloudflare R2, a recent MinIO or Ceph) or a local directory."
                    ) from error
                if status == 409:
                    raise Busy(error) from error
                raise
            etag = strong_etag(response.get("ETag"))
            return looked_up(self, key, data) if etag is None else outcomes.Applied(etag)

        try:
            return while_busy(self._runtime, once)
        except Busy:
            return outcomes.Conflict()
