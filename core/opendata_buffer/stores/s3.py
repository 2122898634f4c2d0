"""Objects in an S3 bucket, through boto3."""

from __future__ import annotations

import builtins
import re
import threading
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import boto3
import botocore.exceptions as boto
import botocore.session
import urllib3.exceptions
from botocore import UNSIGNED
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    DeferredRefreshableCredentials,
)
from botocore.httpchecksum import (  # type: ignore[attr-defined]
    _CHECKSUM_CLS,
    StreamingChecksumBody,
)
from botocore.parsers import ResponseParserError
from botocore.response import StreamingBody

from opendata_buffer import outcomes
from opendata_buffer.config import StoreOptions, redacted, remember_secret
from opendata_buffer.errors import (
    InvalidInput,
    ObjectNotFound,
    PermanentStorageError,
    StorageError,
    TransientStorageError,
    UnsafeStore,
)
from opendata_buffer.hints import Action, Hint
from opendata_buffer.runtime import Retries
from opendata_buffer.stores.base import Blob, DeleteFailure, ObjectInfo
from opendata_buffer.stores.clients import (
    AWS_ENVIRONMENT,
    ProcessClient,
    check_resolved,
    service_credential,
)
from opendata_buffer.stores.http import (
    GARBLED,
    MAX_ERROR_BYTES,
    OF_A_PROXY,
    Answer,
    CloudStore,
    Page,
    Read,
    epoch_ms,
    header_ms,
    time_left,
    with_retry_after,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

_PAGE = 1_000  # most keys of one page of a listing

_STORES = "AWS S3, Cloudflare R2, a recent MinIO or Ceph"


_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
"""A name that S3 gives to a new bucket. Old buckets may have others, so they are not refused."""

_ANY_BUCKET_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
"""A name that a bucket may have in S3 or in another store that speaks its protocol."""


class S3Store(CloudStore):
    """A bucket, or the part of it below ``root``; see :class:`.CloudStore`. Versions are ETags."""

    _SCHEME = "s3"
    _KEYS = "S3 keys"
    _CLOUD = "AWS"
    _USE = (
        f"Use a store that has ETags ({_STORES}), take the proxy before it away, or use a local "
        "directory."
    )
    _CHECK = "Check that an S3 store answers at this endpoint, and the bucket."

    def _prepare(self) -> None:
        if not _ANY_BUCKET_NAME.fullmatch(self._bucket):
            raise InvalidInput(
                f"store {self.url!r} names the bucket {self._bucket!r}: a bucket's name has only "
                "letters, digits, dots, hyphens and underscores"
            )
        self._client = ProcessClient(connect, AWS_ENVIRONMENT, self._options)
        self._direct = DirectGet()
        self._unordered = self._is_directory = self._bucket.endswith("--x-s3")

    def _get(self, read: Read) -> Blob | None:
        client = self._client.get()
        arguments = {"Bucket": self._bucket, "Key": read.name, **read.range_header}
        if read.if_changed is not None:
            arguments["IfNoneMatch"] = read.if_changed
        try:
            response = self._direct.get(client, arguments)
            status = response.get("Status", 200)
        except boto.ClientError as error:
            status = _status_of(error)
            if status == 416:  # the empty range at the end of an object
                about = client.head_object(Bucket=self._bucket, Key=read.name)
                return Blob(b"", self._version(about.get("ETag")), _modified_ms(about))
            if status != 304 and not _is_no_such_key(error):
                raise
        if status == 304:
            return None
        if status == 404:
            raise ObjectNotFound(read.key, self.url)
        body = response["Body"]
        # A store that knows no ranges sends the whole object.
        whole = read.byte_range is not None and "ContentRange" not in response
        try:
            data = read.part_of(body.read, response.get("ContentLength"), whole=whole)
        except boto.FlexibleChecksumError:
            raise self._garbled(read) from None
        finally:
            body.close()  # gives the connection back
        return Blob(data, self._version(response.get("ETag")), _modified_ms(response))

    def _put(self, name: str, data: bytes, **conditions: str) -> str | None:
        # The checksum is a header and not left to boto3, which over https would send a trailer in
        # aws-chunked encoding; many stores that look like S3 do not know that (failure F36).
        response = self._client.get().put_object(
            Bucket=self._bucket,
            Key=name,
            Body=data,
            ChecksumCRC32=b64encode(zlib.crc32(data).to_bytes(4, "big")).decode(),
            **conditions,  # type: ignore[arg-type]  # named as put_object names them
        )
        return response.get("ETag")

    def _put_if(self, name: str, data: bytes, version: str | None) -> Answer:
        conditions = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}

        def once() -> Answer:
            try:
                return self._put(name, data, **conditions)
            except boto.ClientError as error:
                status = _status_of(error)
                if status == 412:
                    return outcomes.LostRace()
                if version is not None and _is_no_such_key(error):
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

        # 409 means that another operation was under way and this one was not applied: the same
        # put may simply be sent again (failure F3).
        policy = Retries(
            self._runtime, base_ms=20, max_ms=200, deadline_ms=2_000, retry_on=(_Busy,)
        )
        try:
            return policy(once)
        except _Busy:
            return outcomes.LostRace()

    def _page(self, prefix: str, start_after: str, token: str | None, wanted: int | None) -> Page:
        # EncodingType is left to boto3: only then does it also decode the keys (failure F24).
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": prefix}
        if self._is_directory:  # it refuses other prefixes
            request["Prefix"] = prefix[: prefix.rfind("/") + 1]
        if start_after:
            request["StartAfter"] = self._prefix + start_after
        if wanted is not None:
            request["MaxKeys"] = min(wanted, _PAGE)
        if token is not None:
            request["ContinuationToken"] = token
        page = page_of(self._client.get().list_objects_v2(**request), self._prefix)
        inside = prefix[len(self._prefix) :]
        return replace(page, objects=[i for i in page.objects if i.key.startswith(inside)])

    def _delete(self, keys: builtins.list[str]) -> builtins.list[DeleteFailure]:
        try:
            response = self._client.get().delete_objects(
                Bucket=self._bucket,
                Delete={"Objects": [{"Key": self._prefix + key} for key in keys], "Quiet": True},
            )
        except boto.ClientError as error:
            if _status_of(error) not in (405, 501) and _code_of(error) not in _NO_BULK:
                raise
            return self._delete_each(self._delete_one, keys)
        return [
            DeleteFailure(
                item.get("Key", "")[len(self._prefix) :],
                f"{item.get('Code')} {item.get('Message', '')}".strip(),
            )
            for item in response.get("Errors", ())
            if item.get("Code") not in ("NoSuchKey", "NoSuchVersion")
        ]

    def _delete_one(self, name: str) -> None:
        try:
            self._client.get().delete_object(Bucket=self._bucket, Key=name)
        except boto.ClientError as error:
            if _code_of(error) != "NoSuchKey":
                raise

    def _endpoint(self) -> str:
        return redacted(self._client.get().meta.endpoint_url)

    def _doubtful(self) -> str:
        if self._options.endpoint_url is not None or ".amazonaws.com" not in self._endpoint():
            return super()._doubtful()
        region = self._client.get().meta.region_name
        name = ""
        if not _BUCKET_NAME.fullmatch(self._bucket):
            name = (
                f", the bucket's name {self._bucket!r} (S3 accepts lower-case letters, digits, "
                "dots and hyphens in new names)"
            )
        return f"the region {region!r}{name}"

    def _client_errors(self) -> tuple[type[BaseException], ...]:
        return _CLIENT_ERRORS

    def _error(self, error: BaseException, verb: str, name: str) -> StorageError:
        what = self._cannot(verb, name, self._endpoint())
        if isinstance(error, boto.ClientError):
            return with_retry_after(self._answered(error, verb, what), _headers_of(error))
        if isinstance(error, RecursionError):
            fix = "It is redirected without end."
            hint = Hint(Action.SET_REGION)
            return PermanentStorageError(f"{what}: {redacted(str(error)).rstrip('.')}. {fix}", hint)
        if isinstance(error, _NO_CREDENTIALS):
            fix = "Provide AWS credentials: the environment, a profile, or a role of this machine."
        elif isinstance(error, boto.ParamValidationError):
            fix = "Correct the bucket's name."
        elif isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
            fix = "Set AWS_CA_BUNDLE or correct the endpoint."
        else:
            return self._unanswered(what, error)
        return PermanentStorageError(f"{what}: {redacted(str(error)).rstrip('.')}. {fix}")

    def _answered(self, error: boto.ClientError, verb: str, what: str) -> StorageError:
        """Return the error for a response that is an HTTP error."""
        code, status = _code_of(error), _status_of(error)
        message = error.response.get("Error", {}).get("Message") or ""
        what = f"{what}: {code or status} {message}".rstrip(". ")
        if code in _THROTTLED:
            status = 429
        elif code in _CREDENTIALS:
            status = 401
        if status == 409:
            hint = "Another operation is under way there and nothing was changed; try again."
            return TransientStorageError(f"{what}. {hint}")
        if code in _GARBLED:
            return TransientStorageError(f"{what}. {GARBLED}")
        if status == 404 and _is_of_a_proxy(error):
            return TransientStorageError(f"{what}. {OF_A_PROXY}")
        if code == "RequestTimeTooSkewed":
            return PermanentStorageError(f"{what}. Set this machine's clock.")
        if error.operation_name == "AssumeRole" and status in (400, 403):
            return PermanentStorageError(what, Hint(Action.CORRECT_ROLE))
        if 300 <= status < 400 or (status == 400 and "Region" in message):
            return PermanentStorageError(what, Hint(Action.SET_REGION))
        if status == 403 and verb == "read":
            what += ". Without s3:ListBucket, S3 gives this answer for a missing object too"
        return self._refusal(what, status, verb)


class _Busy(Exception):
    """409: the write was not applied, because another operation was running."""


def _modified_ms(response: Mapping[str, Any]) -> int:
    return epoch_ms(response.get("LastModified"))


def page_of(response: Mapping[str, Any], root: str) -> Page:
    """Read a page of a listing.

    Args:
        response: The response of ListObjectsV2, as boto3 parses it.
        root: The store's root in the bucket. Keys are returned without it.

    Returns:
        The page.

    Raises:
        ValueError: The response is not a page. As an empty page it would hide the rest of the
            listing.
    """
    if response.keys() <= {"ResponseMetadata"}:
        raise ValueError("it is no page of a listing")
    token: str | None = response.get("NextContinuationToken")
    more = bool(response.get("IsTruncated"))
    if more and not token:
        raise ValueError("more objects follow, and it does not say where: ListObjectsV2 is unknown")
    objects = [
        ObjectInfo(item["Key"][len(root) :], item["Size"], _modified_ms(item), item.get("ETag", ""))
        for item in response.get("Contents", ())
    ]
    date = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    return Page(objects, token if more else None, header_ms(date))


_NOT_OF_SESSION = (
    "endpoint_url", "connect_timeout_ms", "read_timeout_ms", "max_attempts", "max_connections",
)  # fmt: skip


def connect(options: StoreOptions) -> S3Client:
    """Make a client for all buckets, which sends each request once (failure F1).

    Args:
        options: How to reach the cloud.

    Returns:
        The client.

    Raises:
        PermanentStorageError: boto3 refuses the options.
    """
    # A session reads the description of S3, which takes a tenth of a second, so clients that differ
    # only in how they connect share a session.
    same = {each: getattr(StoreOptions, each) for each in _NOT_OF_SESSION}
    session = ProcessClient(session_of, AWS_ENVIRONMENT, replace(options, **same))
    try:
        client = _client(session.get(), options, "auto")
        if ".amazonaws.com" in client.meta.endpoint_url:
            return client
        # Hosts such as bucket.localhost resolve nowhere.
        return _client(session.get(), options, "path")
    except (boto.BotoCoreError, ValueError) as error:
        cause = redacted(str(error)).rstrip(".")
    # Without the chain: it may quote a file of credentials that cannot be parsed.
    raise PermanentStorageError(f"cannot make an S3 client: {cause}", Hint(Action.CORRECT_CLIENT))


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
    time_left()  # a response that is returned here would take the place of the store's


def session_of(options: StoreOptions) -> boto3.session.Session:
    """Return a session with the credentials that the options name, or else boto3's chain.

    It fetches no keys. A request does that if it finds no keys, or finds that they are about to
    end.
    """
    # boto3's default session is not thread-safe and would mix the options of different stores.
    if options.service_credential is not None:
        provided = service_credential(options.service_credential, "s3")
        session = boto3.session.Session(botocore_session=provided, region_name=options.region)
    else:
        session = boto3.session.Session(
            aws_access_key_id=options.access_key_id,
            aws_secret_access_key=options.secret_access_key,
            aws_session_token=options.session_token,
            profile_name=options.profile,
            region_name=options.region,
        )
    session.events.register("before-sign", CheckKeys())
    for service in ("sts", "sso"):
        session.events.register(f"before-parameter-build.{service}", _hide_tokens)
    if options.role_arn is None:
        return session
    assumed = botocore.session.Session(profile=options.profile)
    # In front of the chain, which only gives the credentials to assume the role with.
    assumed.get_component("credential_provider").providers.insert(0, _Role(session, options))
    assumed.register("before-sign", CheckKeys())
    return boto3.session.Session(botocore_session=assumed, region_name=session.region_name)


def _hide_tokens(params: dict[str, Any], **_: object) -> None:
    """Hide the token that keys are requested with, before boto3 logs the request."""
    for name in ("WebIdentityToken", "accessToken"):
        if isinstance(token := params.get(name), str):
            remember_secret(token)


class CheckKeys:
    """Refuses AWS credentials that no request can carry, before a request is signed with them.

    boto3 calls it for every request, so it also sees renewed keys.

    Raises:
        PermanentStorageError: A key is not visible ASCII. The error names the value and where boto3
            found it.
    """

    _PARTS = (
        ("access_key", "access key id", "AWS_ACCESS_KEY_ID"),
        ("secret_key", "secret access key", "AWS_SECRET_ACCESS_KEY"),
        ("token", "session token", "AWS_SESSION_TOKEN"),
    )

    def __init__(self) -> None:
        self._checked: object = None

    def __call__(self, **event: Any) -> None:
        """Called by boto3 for the event ``before-sign``."""
        credentials = event["request_signer"]._credentials
        if credentials is None or event["signature_version"] is UNSIGNED:
            return
        found = credentials.get_frozen_credentials()
        if found == self._checked:
            return
        method = getattr(credentials, "method", None)
        for field, name, variable in self._PARTS:
            what = f"{variable} of the environment"
            if method != "env":
                what = f"the {name} of the AWS credentials (found by {method or 'boto3'})"
            check_resolved(getattr(found, field), what)
        self._checked = found


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
        extra: dict[str, Any] = {"RoleSessionName": options.session_name or "opendata-buffer"}
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
"""All errors that boto3 and its connections raise."""

_NO_BULK = {"InvalidRequest", "MalformedXML", "MissingContentMD5", "NotImplemented"}
"""Error codes of stores that cannot delete several objects in one request."""

_THROTTLED = {"RequestTimeout", "RequestTimeoutException", "Throttling", "ThrottlingException"}
"""Error codes that come with status 400; other refusals because of the rate have 429 or 503."""
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


def _headers_of(error: boto.ClientError) -> Mapping[str, str]:
    return error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})


def _status_of(error: boto.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code_of(error: boto.ClientError) -> str:
    """Return S3's error code, such as ``NoSuchKey``; the status as text if there was no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def _is_of_a_proxy(error: boto.ClientError) -> bool:
    """Return whether a 404 has a body that is not S3's; the object may then exist."""
    headers = _headers_of(error)
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    is_head = error.operation_name.startswith("Head")
    return _code_of(error) == "404" and has_body and not is_head


def _is_no_such_key(error: boto.ClientError) -> bool:
    is_404 = _status_of(error) == 404 and _code_of(error) != "NoSuchBucket"
    return is_404 and not _is_of_a_proxy(error)


_EVENT = "before-sign.s3.GetObject"
_SIGNATURES = {"s3v4", "v4", UNSIGNED}
_CONTEXT = ("auth_type", "client_config", "client_region", "signing")
"""The parts of a request's context that its signature depends on."""


@dataclass(frozen=True, slots=True)
class _Route:
    """The result of boto3's routing for one object of a bucket."""

    client: S3Client
    base: str
    sign: Callable[[AWSRequest], None]
    context: Mapping[str, Any]


class DirectGet:
    """Reads from one bucket without the work that boto3 repeats for each read (decision 0028).

    The first read goes through boto3, and later ones repeat its request with another key. Only the
    responses 200, 206, 304, and "no such object" are used. After any other response, boto3 sends
    the request again, so errors and redirects to another region are boto3's own. Thread-safe; a
    pickle or a fork starts again with boto3.
    """

    def __init__(self) -> None:
        self._route: _Route | None = None
        self._current = threading.local()
        self._watched: S3Client | None = None

    def __reduce__(self) -> tuple[type[DirectGet], tuple[()]]:
        return DirectGet, ()

    def get(self, client: S3Client, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Read an object, like boto3's ``get_object``.

        A response without a body has a ``Status``, which is 304 or 404 (no such object).

        Args:
            client: The client.
            arguments: The arguments of ``get_object``.

        Returns:
            The response.

        Raises:
            botocore.exceptions.ClientError: As ``get_object``, with boto3's other errors.
        """
        if (response := self._send(client, arguments)) is not None:
            return response
        if self._watched is not client:
            client.meta.events.register(_EVENT, self._remember)
            self._watched = client
        self._current.request = (client, arguments["Key"])
        try:
            return client.get_object(**arguments)
        finally:
            self._current.request = None

    def _send(self, client: S3Client, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the response; None if boto3 has to send the request."""
        route = self._route
        if route is None or route.client is not client:
            return None
        headers = {"x-amz-checksum-mode": "ENABLED"}
        for name, header in (("IfNoneMatch", "If-None-Match"), ("Range", "Range")):
            if name in arguments:
                headers[header] = arguments[name]
        url = route.base + _quoted(arguments["Key"])
        request = AWSRequest(method="GET", url=url, headers=headers)
        request.context.update(route.context)
        try:
            route.sign(request)
            prepared = request.prepare()
            prepared.stream_output = True
            # Like boto3 at this point: a call that is past its deadline sends nothing.
            client.meta.events.emit("before-send.s3.GetObject", request=prepared)
            answer = client._endpoint.http_session.send(prepared)  # type: ignore[attr-defined]
        except Exception:
            return None  # boto3 meets the same error, also that the time is up, and handles it
        return _response(answer)

    def _remember(
        self,
        request: AWSRequest,
        signing_name: str,
        region_name: str,
        signature_version: Any,
        request_signer: Any,
        **_: object,
    ) -> None:
        """Keep how boto3 sends this request. Called before it signs."""
        current = getattr(self._current, "request", None)
        if current is None:
            return  # of another store of this client
        client, key = current
        suffix = _quoted(key)
        signing = request.context.get("signing", {})
        usual = signature_version in _SIGNATURES and "identity_cache" not in signing
        url = request.url or ""
        if not usual or not url.endswith(suffix) or "?" in url:
            self._route = None
            return
        sign = partial(
            request_signer.sign,
            "GetObject",
            region_name=signing.get("region", region_name),
            signing_name=signing.get("signing_name", signing_name),
        )
        context = {name: request.context[name] for name in _CONTEXT if name in request.context}
        self._route = _Route(client, url.removesuffix(suffix), sign, context)


def _quoted(key: str) -> str:
    """Return a key as botocore writes it in a URL."""
    return quote(key, safe="/~")


def _response(answer: Any) -> dict[str, Any] | None:
    headers, status, raw = answer.headers, answer.status_code, answer.raw
    if status == 304 or (status == 404 and _is_missing_object(raw)):
        raw.release_conn()
        return {"Status": status}
    if status not in (200, 206):
        raw.close()
        return None
    response = {"ETag": headers.get("ETag")}
    if "Content-Range" in headers:
        response["ContentRange"] = headers["Content-Range"]
    size = headers.get("Content-Length")
    try:
        if "Last-Modified" in headers:
            response["LastModified"] = parsedate_to_datetime(headers["Last-Modified"])
        response["ContentLength"] = size if size is None else int(size)
    except ValueError:
        raw.close()
        return None
    response["Body"] = StreamingBody(raw, size)
    for name, kind in _CHECKSUM_CLS.items():
        sent = headers.get(f"x-amz-checksum-{name}")
        # A checksum is of the whole object, or with a dash of the checksums of its parts.
        if status == 200 and sent is not None and "-" not in sent:
            response["Body"] = StreamingChecksumBody(raw, size, kind(), sent)
    return response


def _is_missing_object(raw: Any) -> bool:
    """Return whether a 404 is S3's own for a missing object, and not a bucket's or a proxy's."""
    try:
        body: bytes = raw.read(MAX_ERROR_BYTES)
    except (urllib3.exceptions.HTTPError, OSError):
        return False
    return not body.strip() or b"NoSuchKey" in body
