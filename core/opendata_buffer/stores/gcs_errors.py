"""What an error of Google Cloud Storage means for the caller, and how to say it."""

from __future__ import annotations

from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.redaction import redacted
from opendata_buffer.stores.gcs_client import Answer

__all__ = ["answer_error", "is_missing_bucket", "is_throttled", "network_error"]

_THROTTLED = {"rateLimitExceeded", "userRateLimitExceeded"}


def _said(answer: Answer) -> tuple[str, str]:
    """Reason and message of an error."""
    error = answer.fields().get("error")
    if not isinstance(error, dict):
        return "", answer.body[:200].decode(errors="replace").strip()
    reasons = error.get("errors")
    first = reasons[0] if isinstance(reasons, list) and reasons else None
    reason = first.get("reason", "") if isinstance(first, dict) else ""
    return str(reason), str(error.get("message", ""))


def is_throttled(answer: Answer) -> bool:
    """Whether the request was refused for its rate, and so surely not carried out.

    One object takes about one write a second.
    """
    return answer.status == 429 or (answer.status == 403 and _said(answer)[0] in _THROTTLED)


def is_missing_bucket(answer: Answer) -> bool:
    """Whether it is not the object that is missing."""
    return answer.status == 404 and "bucket does not exist" in _said(answer)[1].lower()


def answer_error(
    answer: Answer, *, verb: str, key: str, bucket: str, endpoint: str
) -> StorageError:
    """The error of this library for an answer, with the fix in its message.

    Args:
        answer: With the status of an error.
        verb: ``read``, ``write``, ``list`` or ``delete``.
        key: The full key, or prefix.
        bucket: The bucket.
        endpoint: The endpoint's URL.
    """
    reason, message = _said(answer)
    status = answer.status
    what = (
        f"cannot {verb} {key!r} in bucket {bucket!r} at {endpoint}: "
        f"{redacted(f'{status} {reason} {message}')}"
    ).rstrip(". ")
    if is_throttled(answer):
        return TransientStorageError(
            f"{what}. GCS takes about one write a second to one object, and more requests to a "
            "bucket only little by little; try again later. Many writers of one queue: use a "
            "broker or a topic."
        )
    if status in (408, 409) or status >= 500:
        return TransientStorageError(f"{what}. The store failed; try again later.")
    if status == 404:
        return PermanentStorageError(f"{what}. Create bucket {bucket!r} or correct the store URL.")
    if status == 401:
        return PermanentStorageError(f"{what}. Renew or correct the Google credentials.")
    if status == 403:
        return PermanentStorageError(
            f"{what}. Allow these credentials to {verb} objects of bucket {bucket!r} "
            "(roles/storage.objectUser has all that is needed)."
        )
    return PermanentStorageError(
        f"{what}. Check that GCS's JSON API answers at this endpoint, and the bucket."
    )


def network_error(
    error: Exception, *, verb: str, key: str, bucket: str, endpoint: str
) -> TransientStorageError:
    """The error for a request that was not answered. Arguments as there."""
    return TransientStorageError(
        f"cannot {verb} {key!r} in bucket {bucket!r} at {endpoint}: {type(error).__name__}: "
        f"{redacted(str(error)).rstrip('.')}. Check the endpoint and the network, or try again "
        "later."
    )
