"""What an error of boto3 means for the caller, and how to say it."""

from __future__ import annotations

import botocore.exceptions as boto
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.redaction import redacted

__all__ = ["BUSY", "NETWORK", "NotS3", "code_of", "status_of", "storage_error"]


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
