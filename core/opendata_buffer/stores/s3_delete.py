"""Deleting objects of a bucket, a thousand in one request where the store can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import botocore.exceptions as boto

from opendata_buffer.errors import StorageError
from opendata_buffer.stores import DeleteFailure
from opendata_buffer.stores.s3_errors import NETWORK, code_of, status_of

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = ["chunks", "delete_objects"]

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
