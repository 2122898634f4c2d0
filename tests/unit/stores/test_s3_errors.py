"""Each answer of S3, and what it means for the caller."""

from __future__ import annotations

import botocore.exceptions as boto
import pytest
import urllib3.exceptions

from opendata_buffer.errors import PermanentStorageError, TransientStorageError
from opendata_buffer.stores.s3_client import code_of, status_of, storage_error


def answer(status: int, code: str, message: str = "") -> boto.ClientError:
    return boto.ClientError(
        {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status},  # type: ignore[typeddict-item]
        },
        "PutObject",
    )


def said(error: Exception, verb: str = "write") -> Exception:
    return storage_error(error, verb=verb, key="in/m", bucket="bkt", endpoint="https://s3.test")


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (answer(500, "InternalError"), "try again later"),
        (answer(503, "SlowDown"), "try again later"),
        (answer(502, "502"), "try again later"),
        (answer(429, "TooManyRequests"), "overloaded"),
        (answer(408, "RequestTimeout"), "overloaded"),
        (answer(400, "RequestTimeout"), "overloaded"),
        (answer(400, "BadDigest"), "garbled"),
        (answer(400, "XAmzContentChecksumMismatch"), "garbled"),
        (boto.EndpointConnectionError(endpoint_url="https://s3.test"), "Check the endpoint"),
        (boto.ConnectTimeoutError(endpoint_url="https://s3.test"), "Check the endpoint"),
        (boto.ReadTimeoutError(endpoint_url="https://s3.test"), "ReadTimeoutError"),
        (boto.ConnectionClosedError(endpoint_url="https://s3.test"), "ConnectionClosedError"),
        (boto.CredentialRetrievalError(provider="iam", error_msg="slow"), "slow"),
        (urllib3.exceptions.ProtocolError("broken"), "broken"),
        (ConnectionResetError("reset"), "reset"),
    ],
)
def test_what_may_pass_is_transient(error: Exception, fix: str) -> None:
    mapped = said(error)
    assert type(mapped) is TransientStorageError
    assert str(mapped).startswith("cannot write 'in/m' in bucket 'bkt' at https://s3.test: ")
    assert fix in str(mapped)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (answer(404, "NoSuchBucket"), "Create bucket 'bkt' or correct the store URL."),
        (answer(403, "AccessDenied"), "Allow these credentials to write objects"),
        (answer(403, "InvalidAccessKeyId"), "Renew or correct the AWS credentials."),
        (answer(400, "ExpiredToken"), "Renew or correct the AWS credentials."),
        (answer(403, "RequestTimeTooSkewed"), "Set this machine's clock."),
        (answer(301, "PermanentRedirect"), "Set the bucket's own region."),
        (
            answer(400, "AuthorizationHeaderMalformed", "the Region 'a' is wrong; expecting 'b'"),
            "Set the bucket's own region.",
        ),
        (answer(400, "EntityTooLarge"), "EntityTooLarge (HTTP 400)."),
        (answer(501, "NotImplemented"), "NotImplemented (HTTP 501)."),
        (boto.NoCredentialsError(), "Provide AWS credentials"),
        (boto.UnauthorizedSSOTokenError(), "Provide AWS credentials"),
        (boto.ParamValidationError(report="Invalid bucket name"), "Correct the bucket's name."),
        (
            boto.SSLError(endpoint_url="https://s3.test", error="CERTIFICATE_VERIFY_FAILED"),
            "Set AWS_CA_BUNDLE",
        ),
    ],
)
def test_what_stays_is_permanent_and_names_the_fix(error: Exception, fix: str) -> None:
    mapped = said(error)
    assert type(mapped) is PermanentStorageError
    assert str(mapped).startswith("cannot write 'in/m' in bucket 'bkt' at https://s3.test: ")
    assert fix in str(mapped)


def test_a_denied_read_may_be_a_missing_object() -> None:
    denied = answer(403, "AccessDenied")
    assert "s3:ListBucket" in str(said(denied, "read"))
    assert "s3:ListBucket" not in str(said(denied))


def test_an_answer_without_a_body_has_no_code() -> None:
    bare = boto.ClientError({}, "GetObject")
    assert (status_of(bare), code_of(bare)) == (0, "")
    assert (status_of(answer(404, "NoSuchKey")), code_of(answer(404, "NoSuchKey"))) == (
        404,
        "NoSuchKey",
    )
