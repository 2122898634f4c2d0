"""What GCS's errors mean."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.stores.gcs_client import (
    Answer,
    answer_error,
    is_missing_bucket,
    is_throttled,
    network_error,
)

WHERE = {"verb": "write", "key": "k", "bucket": "bucket", "endpoint": "https://host"}


def answer(status: int, reason: str = "", message: str = "") -> Answer:
    error = {"message": message, "errors": [{"reason": reason}]}
    return Answer(status, {}, json.dumps({"error": error}).encode())


@pytest.mark.parametrize(
    ("found", "kind", "message"),
    [
        (answer(429, "rateLimitExceeded"), TransientStorageError, "one write a second"),
        (answer(403, "rateLimitExceeded"), TransientStorageError, "broker or a topic"),
        (answer(503, "backendError"), TransientStorageError, "try again later"),
        (answer(408), TransientStorageError, "try again later"),
        (answer(401, "authError", "Invalid Credentials"), PermanentStorageError, "Renew"),
        (answer(403, "forbidden"), PermanentStorageError, "Allow these credentials to write"),
        (answer(404, "notFound"), PermanentStorageError, "Create bucket 'bucket'"),
        (answer(400, "invalid"), PermanentStorageError, "Check that GCS's JSON API answers"),
        (Answer(502, {}, b"<html>bad gateway"), TransientStorageError, "502.*bad gateway"),
        (Answer(500, {}, b'{"error": {"errors": {"a": 1}}}'), TransientStorageError, "500"),
        (
            Answer(500, {}, b'{"error": {"errors": ["a"], "message": 1}}'),
            TransientStorageError,
            "1",
        ),
    ],
)
def test_an_answer_is_an_error_with_a_fix(
    found: Answer, kind: type[StorageError], message: str
) -> None:
    error = answer_error(found, **WHERE)
    assert type(error) is kind
    text = str(error)
    assert text.startswith(f"cannot write 'k' in bucket 'bucket' at https://host: {found.status}")
    with pytest.raises(kind, match=message):
        raise error


def test_only_a_refusal_for_the_rate_surely_wrote_nothing() -> None:
    assert is_throttled(answer(429))
    assert is_throttled(answer(403, "userRateLimitExceeded"))
    assert not is_throttled(answer(403, "forbidden"))
    assert not is_throttled(answer(503))


def test_a_missing_bucket_is_told_from_a_missing_object() -> None:
    assert is_missing_bucket(answer(404, "notFound", "The specified bucket does not exist."))
    assert not is_missing_bucket(answer(404, "notFound", "No such object: bucket/k"))


def test_a_network_error_shows_no_secret() -> None:
    error = network_error(OSError("at https://me:hunter2@proxy"), **WHERE)
    assert "hunter2" not in str(error)
    assert "OSError" in str(error)
