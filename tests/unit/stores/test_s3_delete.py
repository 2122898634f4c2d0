"""Deletion; what a real server does with it is in the contract suite."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import botocore.exceptions as boto
import pytest

from opendata_buffer.errors import StorageError, TransientStorageError
from opendata_buffer.stores.base import DeleteFailure
from opendata_buffer.stores.s3 import chunks, delete_objects


def explain(error: Exception, key: str) -> StorageError:
    return TransientStorageError(f"{key}: {error}")


def refusal(status: int, code: str) -> boto.ClientError:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(answer, "DeleteObjects")


def raising(error: Exception) -> Any:
    def call(**_: object) -> None:
        raise error

    return call


def test_keys_come_in_groups_of_a_thousand() -> None:
    assert [len(chunk) for chunk in chunks([str(each) for each in range(2_001)])] == [1000, 1000, 1]
    assert list(chunks([])) == []


def test_what_the_store_reports_is_returned_and_missing_objects_count_as_deleted() -> None:
    client: Any = SimpleNamespace(
        delete_objects=lambda **_: {
            "Errors": [
                {"Key": "r/a", "Code": "AccessDenied", "Message": "no"},
                {"Key": "r/b", "Code": "NoSuchKey"},
            ]
        }
    )
    assert delete_objects(client, "bucket", "r/", ["a", "b", "c"], explain) == [
        DeleteFailure("a", "AccessDenied no")
    ]


@pytest.mark.parametrize("error", [refusal(501, "NotImplemented"), refusal(400, "MalformedXML")])
def test_a_store_without_bulk_deletion_is_asked_one_by_one(error: Exception) -> None:
    asked: list[str] = []

    def one(Bucket: str, Key: str) -> None:
        asked.append(Key)
        if Key == "r/b":
            raise refusal(403, "AccessDenied")
        if Key == "r/c":
            raise refusal(404, "NoSuchKey")

    client: Any = SimpleNamespace(delete_objects=raising(error), delete_object=one)
    (failure,) = delete_objects(client, "bucket", "r/", ["a", "b", "c"], explain)
    assert asked == ["r/a", "r/b", "r/c"]
    assert failure.key == "b"


def test_a_request_that_fails_fails_for_each_of_its_keys() -> None:
    client: Any = SimpleNamespace(delete_objects=raising(ConnectionResetError("reset")))
    failures = delete_objects(client, "bucket", "", ["a", "b"], explain)
    assert [(each.key, each.reason) for each in failures] == [
        ("a", "2 objects: reset"),
        ("b", "2 objects: reset"),
    ]
