"""Objects in an S3 bucket, through boto3."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import boto3
import botocore.exceptions as boto
import botocore.session
import urllib3.exceptions
from botocore import UNSIGNED
from botocore.config import Config
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    DeferredRefreshableCredentials,
)
from botocore.parsers import ResponseParserError

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import (
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.redaction import redacted
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
from opendata_buffer.stores.clients import AWS_ENVIRONMENT, ProcessClient, service_credential
from opendata_buffer.stores.http import (
    CloudStore,
    DeadlinePassed,
    Page,
    as_base64,
    crc32,
    not_modified,
    read_part,
    strong_etag,
    verify_write,
    with_retry_after,
)
from opendata_buffer.stores.s3_direct_get import DirectGet

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_PAGE = 1_000
"""Most keys of one page of a listing."""

_STORES = "AWS S3, Cloudflare R2, a recent MinIO or Ceph"


class S3Store(CloudStore):
    """A bucket, or the part of it below ``root``. Versions are ETags.

    See :class:`.CloudStore`.
    """

    _KEYS = "S3 keys"
    _BULK = 1_000

    def __init__(
        self,
        bucket: str,
        root: str = "",
        options: StoreOptions | None = None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(bucket, root, options, runtime)
        self._client: ProcessClient[S3Client] = ProcessClient(
            connect, "", self._options, AWS_ENVIRONMENT
        )
        self._direct = DirectGet()

    @property
    def url(self) -> str:
        """``s3://bucket/root``."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

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
        arguments: dict[str, Any] = {"Bucket": self._bucket, "Key": full}
        if if_changed is not None:
            arguments["IfNoneMatch"] = if_changed
        if byte_range is not None:
            arguments["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"

        def once() -> Blob | NotModified:
            try:
                response = self._direct.get(self._client.get(), arguments)
                status = response.get("Status", 200)
            except boto.ClientError as error:
                status = _status_of(error)
                if status == 416:  # the empty range at the end of an object
                    response = self._client.get().head_object(Bucket=self._bucket, Key=full)
                    return Blob(b"", self._etag(response), _modified_ms(response))
                if status != 304 and not _is_no_such_key(error):
                    raise
            if status == 304:
                return not_modified(key, self.url, if_changed)
            if status == 404:
                raise ObjectNotFound(key, self.url)
            body = response["Body"]
            # A store that knows no ranges sends the whole object.
            whole = byte_range is not None and "ContentRange" not in response
            size = response.get("ContentLength")
            try:
                data = read_part(key, body.read, size, byte_range, max_bytes, whole=whole)
            finally:
                body.close()  # gives the connection back
            return Blob(data, self._etag(response), _modified_ms(response))

        return self._repeated(once, "read", full)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See :meth:`opendata_buffer.stores.Put.put`."""
        full = self._full(key)
        content = bytes(data)

        def once() -> None:
            response = self._client.get().put_object(**self._upload(full, content))
            if not response.get("ETag"):
                self._check_put(key, full, content)

        self._repeated(once, "write", full)

    def _upload(self, full: str, data: bytes) -> dict[str, Any]:
        """Arguments of ``put_object``.

        The checksum is a header and not left to boto3, which over https would send a trailer in
        aws-chunked encoding; many stores that look like S3 do not know that (failure F36).
        """
        checksum = as_base64(crc32(data))
        return {"Bucket": self._bucket, "Key": full, "Body": data, "ChecksumCRC32": checksum}

    def _put_if(
        self, key: str, full: str, data: bytes, condition: Absent | IfVersion
    ) -> PutOutcome:
        replaces = isinstance(condition, IfVersion)
        arguments = self._upload(full, data)
        if isinstance(condition, IfVersion):
            arguments["IfMatch"] = condition.version
        else:
            arguments["IfNoneMatch"] = "*"

        def once() -> PutOutcome:
            try:
                response = self._client.get().put_object(**arguments)
            except boto.ClientError as error:
                status = _status_of(error)
                if status == 412:
                    return outcomes.Conflict()
                if replaces and _is_no_such_key(error):
                    return outcomes.Vanished()  # failure F4
                if status in (405, 501):
                    raise UnsafeStore(
                        f"store {self.url!r} at {self._endpoint()} has no conditional writes: it "
                        f"answered {_code_of(error)}. Use a store that has them ({_STORES}) or a "
                        "local directory."
                    ) from error
                if status == 409:
                    raise _Busy from error
                raise
            etag = strong_etag(response.get("ETag"))
            return verify_write(self, key, data) if etag is None else outcomes.Applied(etag)

        # 409 means that another operation was under way and this one was not applied: the same
        # put may simply be sent again (failure F3).
        policy = Retries(
            self._runtime, base_ms=20, max_ms=200, deadline_ms=2_000, retry_on=(_Busy,)
        )
        try:
            return policy(once)
        except _Busy:
            return outcomes.Conflict()

    def _page(self, prefix: str, start_after: str, token: str | None, wanted: int | None) -> Page:
        # EncodingType is left to boto3: only then does it also decode the keys (failure F24).
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": prefix}
        if start_after:
            request["StartAfter"] = self._prefix + start_after
        if wanted is not None:
            request["MaxKeys"] = min(wanted, _PAGE)
        if token is not None:
            request["ContinuationToken"] = token
        return page_of(self._client.get().list_objects_v2(**request), self._prefix)

    def _delete(self, keys: builtins.list[str]) -> builtins.list[DeleteFailure]:
        try:
            response = self._client.get().delete_objects(
                Bucket=self._bucket,
                Delete={"Objects": [{"Key": self._prefix + key} for key in keys], "Quiet": True},
            )
        except boto.ClientError as error:
            if _status_of(error) not in (405, 501) and _code_of(error) not in _NO_BULK:
                raise
            failures = (self._delete_one(key) for key in keys)
            return [each for each in failures if each is not None]
        return [
            DeleteFailure(
                item.get("Key", "")[len(self._prefix) :],
                f"{item.get('Code')} {item.get('Message', '')}".strip(),
            )
            for item in response.get("Errors", ())
            if item.get("Code") not in ("NoSuchKey", "NoSuchVersion")
        ]

    def _delete_one(self, key: str) -> DeleteFailure | None:
        try:
            self._client.get().delete_object(Bucket=self._bucket, Key=self._prefix + key)
        except self._client_errors() as error:
            if not isinstance(error, boto.ClientError) or _code_of(error) != "NoSuchKey":
                return DeleteFailure(key, str(self._error(error, "delete", key)))
        return None

    def _endpoint(self) -> str:
        return redacted(self._client.get().meta.endpoint_url)

    def _client_errors(self) -> tuple[type[BaseException], ...]:
        return _CLIENT_ERRORS

    def _error(self, error: BaseException, verb: str, key: str) -> StorageError:
        what = f"cannot {verb} {key!r} in bucket {self._bucket!r} at {self._endpoint()}"
        if isinstance(error, boto.ClientError):
            refusal = _refusal(error, what, verb, self._bucket)
            return with_retry_after(refusal, _headers_of(error))
        said = redacted(str(error))
        if isinstance(error, RecursionError):
            return PermanentStorageError(
                f"{what}: it is redirected without end. Set endpoint_url to the store itself, and "
                "the bucket's own region."
            )
        if isinstance(error, _NO_CREDENTIALS):
            return PermanentStorageError(
                f"{what}: {said}. Provide AWS credentials: environment variables, a profile, or a "
                "role of this machine."
            )
        if isinstance(error, boto.ParamValidationError):
            return PermanentStorageError(f"{what}: {said}. Correct the bucket's name.")
        if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
            return PermanentStorageError(
                f"{what}: {said}. Set AWS_CA_BUNDLE or correct the endpoint."
            )
        if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
            return TransientStorageError(
                f"{what}: nothing answers there. Check the endpoint (endpoint_url, "
                "AWS_ENDPOINT_URL), region and network."
            )
        # All other failures are of the network, or of a server whose responses are malformed.
        return TransientStorageError(f"{what}: {type(error).__name__}: {said}")

    def _etag(self, response: Mapping[str, Any]) -> str:
        """The version of an object that was read."""
        sent = response.get("ETag")
        etag = strong_etag(sent)
        if etag is None:
            raise self._unversioned(
                f"the weak ETag {sent}" if sent else "no ETag",
                f"Use a store that has ETags ({_STORES}), take the proxy before it away, or use a "
                "local directory.",
            )
        return etag


class _Busy(Exception):
    """409: not applied, another operation was under way."""


def _modified_ms(response: Mapping[str, Any]) -> int:
    """When the object was written, milliseconds since the epoch; 0 when the response has none."""
    when = response.get("LastModified")
    return 0 if when is None else int(when.timestamp() * 1000)


def page_of(response: Mapping[str, Any], root: str) -> Page:
    """A response of ``list_objects_v2``, its keys without the root.

    A response that is no page raises: taken for an empty one, it would hide all the objects that
    follow.
    """
    if response.keys() <= {"ResponseMetadata"}:
        raise ValueError("it is no page of a listing")
    token: str | None = response.get("NextContinuationToken")
    more = bool(response.get("IsTruncated"))
    if more and not token:
        raise ValueError("more objects follow, and it does not say where: ListObjectsV2 is unknown")
    date = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    objects = [
        ObjectInfo(item["Key"][len(root) :], item["Size"], _modified_ms(item))
        for item in response.get("Contents", ())
    ]
    now_ms = int(parsedate_to_datetime(date).timestamp() * 1000) if date else None
    return Page(objects, token if more else None, now_ms)


SESSION_NAME = "opendata-buffer"
"""How a role's log names our requests where the options say nothing else."""


def connect(name: str, options: StoreOptions) -> S3Client:
    """A client with these options, for all buckets; it sends each request once (failure F1)."""
    del name
    default = StoreOptions()
    identity = replace(
        options,
        endpoint_url=None,
        connect_timeout_ms=default.connect_timeout_ms,
        read_timeout_ms=default.read_timeout_ms,
        max_attempts=default.max_attempts,
        max_connections=default.max_connections,
    )
    # A session reads the description of S3 again, which takes a tenth of a second, so it is
    # shared by all clients that differ only in how they connect.
    session = ProcessClient(session_of, "", identity, AWS_ENVIRONMENT)
    try:
        client = _client(session.get(), options, "auto")
        if ".amazonaws.com" in client.meta.endpoint_url:
            return client
        # Hosts such as bucket.localhost or bucket.10.0.0.1 resolve nowhere.
        return _client(session.get(), options, "path")
    except (boto.BotoCoreError, ValueError) as error:
        raise PermanentStorageError(
            f"cannot make an S3 client: {redacted(str(error)).rstrip('.')}. Correct "
            "endpoint_url, region, profile or the AWS configuration files."
        ) from error


def _client(
    session: boto3.session.Session, options: StoreOptions, style: Literal["auto", "path"]
) -> S3Client:
    settings: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "connect_timeout": options.connect_timeout_ms / 1000,
        "read_timeout": options.read_timeout_ms / 1000,
        "max_pool_connections": options.max_connections,
        "tcp_keepalive": True,
        "request_checksum_calculation": "when_supported",
        "response_checksum_validation": "when_supported",
        "s3": {"addressing_style": style},
    }
    if options.anonymous:
        settings["signature_version"] = UNSIGNED
    client = session.client("s3", endpoint_url=options.endpoint_url, config=Config(**settings))
    client.meta.events.register("before-send.s3", _refuse_late)
    return client


def _refuse_late(**_: object) -> None:
    # A call that its caller has left behind must send nothing more.
    left = remaining()
    if left is not None and left <= 0:
        raise DeadlinePassed


def session_of(name: str, options: StoreOptions) -> boto3.session.Session:
    """A session with the credentials that the options name, else with those of boto3's chain.

    Neither keys of a role nor of a service credential are fetched here: the first request does,
    and any later one that finds them about to end.
    """
    del name
    # boto3's default session is not thread-safe, and would mix what stores with other options do.
    if options.service_credential is not None:
        provided = service_credential(
            options.service_credential, scheme="s3", has="get_credentials"
        )
        session = boto3.session.Session(botocore_session=provided, region_name=options.region)
    else:
        session = boto3.session.Session(
            aws_access_key_id=options.access_key_id,
            aws_secret_access_key=options.secret_access_key,
            aws_session_token=options.session_token,
            profile_name=options.profile,
            region_name=options.region,
        )
    if options.role_arn is None:
        return session
    assumed = botocore.session.Session(profile=options.profile)
    # In front of the chain, which is only the source that the role is assumed with.
    assumed.get_component("credential_provider").providers.insert(0, _Role(session, options))
    return boto3.session.Session(botocore_session=assumed, region_name=session.region_name)


class _Role(CredentialProvider):
    """Credentials of a role, fetched when they are needed and again before they end."""

    METHOD = "opendata-buffer-role"
    CANONICAL_NAME = METHOD

    def __init__(self, source: boto3.session.Session, options: StoreOptions) -> None:
        super().__init__()
        self._source = source
        self._options = options

    def load(self) -> DeferredRefreshableCredentials:
        options = self._options
        extra: dict[str, Any] = {"RoleSessionName": options.session_name or SESSION_NAME}
        if options.external_id is not None:
            extra["ExternalId"] = options.external_id
        credentials = self._source.get_credentials()
        if credentials is None:
            raise PermanentStorageError(
                f"there are no AWS credentials to assume role {options.role_arn!r} with: provide "
                "some by environment variables, a profile, or a role of this machine"
            )
        timeouts = Config(
            connect_timeout=options.connect_timeout_ms / 1000,
            read_timeout=options.read_timeout_ms / 1000,
        )
        fetcher = AssumeRoleCredentialFetcher(
            partial(self._source.client, config=timeouts), credentials, str(options.role_arn), extra
        )
        return DeferredRefreshableCredentials(
            refresh_using=fetcher.fetch_credentials, method=self.METHOD
        )


_CLIENT_ERRORS = (
    boto.BotoCoreError,
    boto.ClientError,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    OSError,
    RecursionError,  # boto3 follows redirects to other regions without end
)
"""All that boto3 and its connections raise."""

_BUSY = {"ConditionalRequestConflict", "OperationAborted"}
"""409: another operation on the object or bucket was under way, and this one was not applied."""

_NO_BULK = {"InvalidRequest", "MalformedXML", "MissingContentMD5", "NotImplemented"}
"""Of stores that cannot delete several objects by one request."""

_THROTTLED = {
    "RequestLimitExceeded",
    "RequestTimeout",
    "RequestTimeoutException",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequestsException",
}
_GARBLED = {
    "BadDigest",
    "IncompleteBody",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_CREDENTIALS = {
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.ProfileNotFound,
    boto.ConfigNotFound,
    boto.SSOError,
    boto.TokenRetrievalError,
)


def _headers_of(error: BaseException) -> Mapping[str, str]:
    response = error.response if isinstance(error, boto.ClientError) else {}
    return response.get("ResponseMetadata", {}).get("HTTPHeaders", {})


def _status_of(error: boto.ClientError) -> int:
    """The HTTP status of an error."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code_of(error: boto.ClientError) -> str:
    """S3's error code, such as ``NoSuchKey``; the status as text where there was no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _is_of_a_proxy(error: boto.ClientError) -> bool:
    """Whether a 404 has a body that is not S3's: a proxy answered in its place, and the object
    may be there."""
    headers = _headers_of(error)
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    is_head = error.operation_name.startswith("Head")
    return _code_of(error) == "404" and has_body and not is_head


def _is_no_such_key(error: boto.ClientError) -> bool:
    """Whether there is no such object."""
    is_404 = _status_of(error) == 404 and _code_of(error) != "NoSuchBucket"
    return is_404 and not _is_of_a_proxy(error)


def _refusal(error: boto.ClientError, what: str, verb: str, bucket: str) -> StorageError:
    code, status = _code_of(error), _status_of(error)
    message = error.response.get("Error", {}).get("Message", "")
    what = f"{what}: {code or status} {message}".rstrip(". ")
    if status >= 500 and status != 501:
        return TransientStorageError(f"{what}. The store failed; try again later.")
    if status in (408, 429) or code in _THROTTLED:
        return TransientStorageError(f"{what}. The store is overloaded; try again later.")
    if code in _BUSY:
        return TransientStorageError(
            f"{what}. Another operation is under way there and nothing was changed; try again."
        )
    if code in _GARBLED:
        return TransientStorageError(f"{what}. The bytes were garbled on the way; try again.")
    if status == 404 and _is_of_a_proxy(error):
        return TransientStorageError(
            f"{what}. That is not S3's answer (a proxy, an ingress?): check what answers at the "
            "endpoint, or try again later."
        )
    if code == "NoSuchBucket":
        return PermanentStorageError(f"{what}. Create bucket {bucket!r} or correct the store URL.")
    if code == "RequestTimeTooSkewed":
        return PermanentStorageError(f"{what}. Set this machine's clock.")
    if code in _CREDENTIALS:
        return PermanentStorageError(f"{what}. Renew or correct the AWS credentials.")
    if error.operation_name == "AssumeRole":
        return PermanentStorageError(
            f"{what}. Let these credentials assume the role (sts:AssumeRole, and its trust "
            "policy), and correct role_arn and external_id."
        )
    if status in (401, 403):
        hint = ""
        if verb == "read":
            hint = " Without s3:ListBucket, S3 gives this answer for a missing object too."
        return PermanentStorageError(
            f"{what}. Allow these credentials to {verb} objects of bucket {bucket!r}.{hint}"
        )
    if 300 <= status < 400 or (status == 400 and "Region" in message):
        return PermanentStorageError(
            f"{what}. Set the bucket's own region, and endpoint_url to the store itself."
        )
    return PermanentStorageError(
        f"{what} (HTTP {status}). Check that an S3 store answers at this endpoint, and the bucket."
    )
