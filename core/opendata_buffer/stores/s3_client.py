"""The boto3 clients of one store, made when first used in a process."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import boto3
import botocore
import botocore.exceptions as boto
import botocore.session
import urllib3.exceptions
from botocore import UNSIGNED
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse
from botocore.config import Config
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    DeferredRefreshableCredentials,
)
from botocore.parsers import ResponseParserError
from urllib3.response import HTTPResponse

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.redaction import redacted
from opendata_buffer.runtime import remaining
from opendata_buffer.stores.clients import AWS_ENVIRONMENT, ProcessClient, service_credential
from opendata_buffer.stores.http import (
    MOST_OF_A_PAGE,
    MOST_OF_AN_ERROR,
    PIECE,
    DeadlinePassed,
    TooLong,
    limited,
)

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = [
    "BUSY",
    "DirectGet",
    "NETWORK",
    "NotS3",
    "S3Pair",
    "S3Session",
    "SESSION_NAME",
    "code_of",
    "connect",
    "identity_of",
    "session_of",
    "status_of",
    "storage_error",
]


# ---- Reading an object without what boto3 does beside it. ----
#
# Of the processor time that boto3's ``get_object`` takes, a tenth is the request: the rest chooses
# an endpoint by rules, checks and serialises parameters, and parses the answer into dictionaries,
# the same for each object of a bucket. So the first read of a bucket goes through boto3, which
# resolves all that, and the next ones repeat it with another key: botocore's signer signs (and
# renews credentials), botocore's HTTP session sends (with its connections, proxies, certificates
# and timeouts), and the checksum is compared here (failure F36).
#
# Whatever is not answered with the object, or that there is none or no newer one, is left to boto3,
# which asks again: so errors, retries, redirects to another region and their messages are its own.


_EVENT = "before-sign.s3.GetObject"
_SIGNED_HERE = {"s3v4", "v4", botocore.UNSIGNED}
_CONTEXT = ("auth_type", "client_config", "client_region", "signing")
"""What of a request's context its signature depends on."""

_MOST_OF_AN_ERROR = 1 << 16


@dataclass(frozen=True, slots=True)
class _Route:
    """How a bucket is reached: what boto3 resolved for one of its objects.

    Attributes:
        client: That did it.
        base: URL of the bucket's objects, up to their key.
        signer: botocore's, which has the credentials.
        region: To sign for.
        name: Of the service, to sign for.
        context: Of the request.
    """

    client: S3Client
    base: str
    signer: Any
    region: str
    name: str
    context: Mapping[str, Any]


class DirectGet:
    """Reads of one bucket. Thread-safe; a pickle or a fork begins anew, with boto3."""

    def __init__(self) -> None:
        self._route: _Route | None = None
        self._asked = threading.local()
        self._watched: S3Client | None = None

    def __reduce__(self) -> tuple[type[DirectGet], tuple[()]]:
        return DirectGet, ()

    def get(self, client: S3Client, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """An answer such as boto3's ``get_object`` gives; None where boto3 is to be asked.

        Args:
            client: Of the bucket; asked how to reach it when :meth:`through` was called.
            arguments: ``Key``, and maybe ``IfNoneMatch`` and ``Range``.

        Returns:
            ``Status`` (200, 206, 304 or 404), and for the first two ``Body``; ``ETag``,
            ``LastModified``, ``ContentLength``, ``ContentRange`` where the answer has them.

        Raises:
            DeadlinePassed: The caller's deadline has passed.
        """
        route = self._route
        if route is None or route.client is not client:
            return None
        request = AWSRequest(
            method="GET",
            url=route.base + _quoted(arguments["Key"]),
            headers={"x-amz-checksum-mode": "ENABLED"},
        )
        for name, header in (("IfNoneMatch", "If-None-Match"), ("Range", "Range")):
            if name in arguments:
                request.headers[header] = arguments[name]
        request.context.update(route.context)
        try:
            route.signer.sign(
                "GetObject", request, region_name=route.region, signing_name=route.name
            )
            prepared = request.prepare()
            prepared.stream_output = True
            # Here what boto3 does at this point, too: a call that was left behind sends nothing.
            client.meta.events.emit("before-send.s3.GetObject", request=prepared)
            answer = client._endpoint.http_session.send(prepared)  # type: ignore[attr-defined]
        except DeadlinePassed:
            raise
        except Exception:
            return None  # boto3 meets it again, and knows what to do
        return _response(answer)

    def through(
        self, client: S3Client, arguments: Mapping[str, Any], get: Callable[..., Any]
    ) -> Any:
        """What boto3's ``get`` returns for these arguments; how it was sent is remembered."""
        if self._watched is not client:
            client.meta.events.register(_EVENT, self._saw)
            self._watched = client
        self._asked.by = (client, arguments["Key"])
        try:
            return get(**arguments)
        finally:
            self._asked.by = None

    def _saw(
        self,
        request: AWSRequest,
        signing_name: str,
        region_name: str,
        signature_version: Any,
        request_signer: Any,
        **_: object,
    ) -> None:
        asked = getattr(self._asked, "by", None)
        if asked is None:
            return  # of another store of this client
        client, key = asked
        suffix = _quoted(key)
        signing = request.context.get("signing", {})
        usual = signature_version in _SIGNED_HERE and "identity_cache" not in signing
        url = request.url or ""
        if not usual or not url.endswith(suffix) or "?" in url:
            self._route = None
            return
        self._route = _Route(
            client,
            url[: len(url) - len(suffix)],
            request_signer,
            signing.get("region", region_name),
            signing.get("signing_name", signing_name),
            {name: request.context[name] for name in _CONTEXT if name in request.context},
        )


def _quoted(key: str) -> str:
    """The key in a URL, as botocore writes it."""
    return quote(key, safe="/~")


def _response(answer: Any) -> dict[str, Any] | None:
    headers, status, raw = answer.headers, answer.status_code, answer.raw
    if status == 304 or (status == 404 and _is_of_a_key(raw)):
        raw.release_conn()
        return {"Status": status}
    if status not in (200, 206):
        raw.close()
        return None
    response: dict[str, Any] = {"Status": status}
    for header in ("ETag", "Content-Range"):
        if (value := headers.get(header)) is not None:
            response[header.replace("-", "")] = value
    try:
        if (value := headers.get("Last-Modified")) is not None:
            response["LastModified"] = parsedate_to_datetime(value)
        if (value := headers.get("Content-Length")) is not None:
            response["ContentLength"] = int(value)
    except ValueError:
        raw.close()
        return None
    checksum = None if status == 206 else _checksum(headers)
    response["Body"] = _Body(raw, response.get("ContentLength"), checksum)
    return response


def _is_of_a_key(raw: Any) -> bool:
    """Whether a 404 says that there is no such object, and not that there is no such bucket."""
    try:
        return b"NoSuchBucket" not in raw.read(_MOST_OF_AN_ERROR)
    except (urllib3.exceptions.HTTPError, OSError):
        return False


def _checksum(headers: Mapping[str, str]) -> tuple[str, str] | None:
    for kind in ("crc32", "sha256", "sha1"):
        found = headers.get(f"x-amz-checksum-{kind}")
        if found is not None and "-" not in found:  # with a dash: of its parts' checksums
            return kind, found
    return None


class _Body:
    """Reads what boto3's ``StreamingBody`` reads, and raises its errors."""

    def __init__(self, raw: Any, size: int | None, checksum: tuple[str, str] | None) -> None:
        self._raw = raw
        self._size = size
        self._checksum = checksum

    def read(self, most: int | None = None) -> bytes:
        """All of it, or what there is up to so many bytes; called once."""
        try:
            data: bytes = self._raw.read(most)
        except urllib3.exceptions.ReadTimeoutError as error:
            raise boto.ReadTimeoutError(endpoint_url=error.url or "", error=error) from error
        except urllib3.exceptions.ProtocolError as error:
            raise boto.ResponseStreamingError(error=error) from error
        if most is not None:
            return data
        if self._size is not None and len(data) != self._size:
            raise boto.IncompleteReadError(actual_bytes=len(data), expected_bytes=self._size)
        if self._checksum is not None:
            kind, said = self._checksum
            found = base64.b64encode(_digest(kind, data)).decode()
            if found != said:
                raise boto.FlexibleChecksumError(
                    error_msg=f"Expected checksum {said} did not match calculated checksum: {found}"
                )
        self._raw.release_conn()
        return data

    def close(self) -> None:
        """Give the connection up, unless all of it was read."""
        self._raw.close()


def _digest(kind: str, data: bytes) -> bytes:
    if kind == "crc32":
        return zlib.crc32(data).to_bytes(4, "big")
    return hashlib.new(kind, data).digest()


# ---- What an error of boto3 means for the caller, and how to say it. ----


class NotS3(boto.BotoCoreError):
    """Something before the store has answered in its place."""

    fmt = "HTTP {status}{to}, and not as S3 says it: {shown!r}"


NETWORK = (
    boto.BotoCoreError,
    boto.ClientError,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    OSError,
)
"""All that boto3 and its connections raise."""

BUSY = {"ConditionalRequestConflict", "OperationAborted"}
"""409: another operation on the object or bucket was under way, and this one was not applied."""

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


def status_of(error: boto.ClientError) -> int:
    """The HTTP status of an answer."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: boto.ClientError) -> str:
    """S3's error code, such as ``NoSuchKey``; the status as text where there was no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def storage_error(
    error: Exception, *, verb: str, key: str, bucket: str, endpoint: str
) -> StorageError:
    """The error of this library for one of boto3, with the fix in its message.

    Args:
        error: What boto3, urllib3 or the socket raised.
        verb: ``read``, ``write``, ``list`` or ``delete``.
        key: The full key, or prefix.
        bucket: The bucket.
        endpoint: The endpoint's URL.
    """
    what = f"cannot {verb} {key!r} in bucket {bucket!r} at {endpoint}"
    if isinstance(error, boto.ClientError):
        return _answer(error, what, verb, bucket)
    said = redacted(str(error))
    if isinstance(error, NotS3):
        before = f"{what}: {said}. Something before the store answers in its place (a proxy, an "
        if error.kwargs["status"] == 404:
            return TransientStorageError(f"{before}ingress): check it, or try again later.")
        return PermanentStorageError(f"{before}ingress): set endpoint_url to the store itself.")
    if isinstance(error, _NO_CREDENTIALS):
        return PermanentStorageError(
            f"{what}: {said}. Provide AWS credentials: environment variables, a profile, or a "
            "role of this machine."
        )
    if isinstance(error, boto.ParamValidationError):
        return PermanentStorageError(f"{what}: {said}. Correct the bucket's name.")
    if isinstance(error, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return PermanentStorageError(f"{what}: {said}. Set AWS_CA_BUNDLE or correct the endpoint.")
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
        return TransientStorageError(
            f"{what}: nothing answers there. Check the endpoint (endpoint_url, AWS_ENDPOINT_URL), "
            "region and network."
        )
    # All other failures are of the network or of a server that answers nonsense.
    return TransientStorageError(f"{what}: {type(error).__name__}: {said}")


def _answer(error: boto.ClientError, what: str, verb: str, bucket: str) -> StorageError:
    code, status = code_of(error), status_of(error)
    message = error.response.get("Error", {}).get("Message", "")
    what = f"{what}: {code or status} {message}".rstrip(". ")
    if status >= 500 and status != 501:
        return TransientStorageError(f"{what}. The store failed; try again later.")
    if status in (408, 429) or code in _THROTTLED:
        return TransientStorageError(f"{what}. The store is overloaded; try again later.")
    if code in BUSY:
        return TransientStorageError(
            f"{what}. Another operation is under way there and nothing was changed; try again."
        )
    if code in _GARBLED:
        return TransientStorageError(f"{what}. The bytes were garbled on the way; try again.")
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
    if status in (301, 307, 400) and ("Region" in message or status != 400):
        return PermanentStorageError(f"{what}. Set the bucket's own region.")
    return PermanentStorageError(
        f"{what} (HTTP {status}). Check that an S3 store answers at this endpoint, and the bucket."
    )


# ---- What comes back from S3, before boto3 sees it: not too long, and from S3. ----
#
# boto3 reads every answer but an object whole, however long it is. It follows a redirect by asking
# for the bucket's region, which is redirected as well, and so on until Python's stack ends. And it
# takes a 404 of a proxy for a missing object.


_SHOWN = 100


class S3Session:
    """botocore's HTTP session. Only objects are left to be read by who asked for them.

    Args:
        session: That sends.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """The answer to one request.

        Raises:
            BotoCoreError: There is none, it is too long, or it is not S3's.
        """
        is_object, request.stream_output = request.stream_output, True
        answer: AWSResponse = self._session.send(request)
        if is_object and answer.status_code < 300:
            return answer
        body = _body(answer, request)
        _check_sender(answer, body)
        answer.raw = HTTPResponse(io.BytesIO(body), preload_content=False)
        return answer


def _body(answer: AWSResponse, request: AWSPreparedRequest) -> bytes:
    most = MOST_OF_A_PAGE if answer.status_code < 300 else MOST_OF_AN_ERROR
    try:
        return b"".join(limited(answer.raw.stream(PIECE), most))
    except TooLong as error:
        answer.raw.close()  # the rest of it is on its way
        raise boto.HTTPClientError(error=error) from error
    except urllib3.exceptions.ReadTimeoutError as error:
        raise boto.ReadTimeoutError(endpoint_url=answer.url, error=error) from error
    except urllib3.exceptions.HTTPError as error:
        raise boto.ConnectionClosedError(
            endpoint_url=answer.url, request=request, error=error
        ) from error


def _check_sender(answer: AWSResponse, body: bytes) -> None:
    """Refuse what S3 does not say: its errors have a code, and its redirects a code or a region."""
    status = answer.status_code
    redirects = 300 <= status < 400 and status != 304
    if b"<Code>" in body or "x-amz-bucket-region" in answer.headers:
        return
    # One without a body may come from a store that says no more.
    if redirects or (status == 404 and body.strip()):
        to = f" to {redacted(answer.headers.get('location', 'nowhere'))!r}" if redirects else ""
        shown = body[:_SHOWN].decode(errors="replace").strip()
        raise NotS3(status=status, to=to, shown=shown)


# ---- Who asks S3: the session that credentials come from, and are renewed in. ----


SESSION_NAME = "opendata-buffer"
"""How a role's log names our requests where the options say nothing else."""


def identity_of(options: StoreOptions) -> StoreOptions:
    """The same options without what says how to connect."""
    default = StoreOptions()
    return replace(
        options,
        endpoint_url=None,
        connect_timeout_ms=default.connect_timeout_ms,
        read_timeout_ms=default.read_timeout_ms,
        max_attempts=default.max_attempts,
        max_connections=default.max_connections,
    )


def session_of(name: str, options: StoreOptions) -> boto3.session.Session:
    """A session with the credentials that the options name, else with those of boto3's chain.

    Neither keys of a role nor of a service credential are fetched here: the first request does,
    and any later one that finds them about to end.

    Raises:
        InvalidInput, PermanentStorageError: The service credential cannot be used.
        BotoCoreError: The profile or the configuration files cannot.
    """
    del name
    session = _source(options)
    if options.role_arn is None:
        return session
    assumed = botocore.session.Session(profile=options.profile)
    # In front of the chain, which is only the source that the role is assumed with.
    assumed.get_component("credential_provider").providers.insert(0, _Role(session, options))
    return boto3.session.Session(botocore_session=assumed, region_name=session.region_name)


def _source(options: StoreOptions) -> boto3.session.Session:
    # boto3's default session is not thread-safe, and would mix what stores with other options do.
    if options.service_credential is not None:
        provided = service_credential(
            options.service_credential, scheme="s3", has="get_credentials"
        )
        return boto3.session.Session(botocore_session=provided, region_name=options.region)
    return boto3.session.Session(
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        profile_name=options.profile,
        region_name=options.region,
    )


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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class S3Pair:
    """Two clients of one store.

    Attributes:
        data: For reads, listings, deletes and unconditional writes; repeats what failed.
        conditional: For conditional writes: one attempt (failure F1).
    """

    data: S3Client
    conditional: S3Client

    @property
    def endpoint(self) -> str:
        """The endpoint's URL, without secrets."""
        return redacted(self.data.meta.endpoint_url)


def connect(name: str, options: StoreOptions) -> S3Pair:
    """The clients of these options, for all buckets.

    Raises:
        PermanentStorageError: The options or the AWS configuration cannot be used.
    """
    del name
    # A session reads the description of S3 again, which takes a tenth of a second, so it is
    # shared by all that differ in how they connect only.
    session = ProcessClient(session_of, "", identity_of(options), AWS_ENVIRONMENT)
    try:
        return _connect(session.get(), options)
    except (boto.BotoCoreError, ValueError) as error:
        raise PermanentStorageError(
            f"cannot make an S3 client: {redacted(str(error)).rstrip('.')}. Correct "
            "endpoint_url, region, profile or the AWS configuration files."
        ) from error


def _connect(session: boto3.session.Session, options: StoreOptions) -> S3Pair:
    data = _client(session, options, options.max_attempts, "auto")
    if ".amazonaws.com" in data.meta.endpoint_url:
        return S3Pair(data, _client(session, options, 1, "auto"))
    # Hosts such as bucket.localhost or bucket.10.0.0.1 resolve nowhere.
    return S3Pair(
        _client(session, options, options.max_attempts, "path"),
        _client(session, options, 1, "path"),
    )


def _client(
    session: boto3.session.Session,
    options: StoreOptions,
    attempts: int,
    style: Literal["auto", "path"],
) -> S3Client:
    settings: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": attempts},
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
    endpoint: Any = client._endpoint  # type: ignore[attr-defined]
    endpoint.http_session = S3Session(endpoint.http_session)
    return client


def _refuse_late(**_: object) -> None:
    # boto3's retries know no deadline: of a call that was left behind they would go on for
    # minutes, holding its thread and its bytes.
    left = remaining()
    if left is not None and left <= 0:
        raise DeadlinePassed
