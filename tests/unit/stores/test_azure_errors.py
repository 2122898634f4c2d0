"""What Azure's errors mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from azure.core.exceptions import ClientAuthenticationError, HttpResponseError, ServiceRequestError

from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.stores.azure import code_of, status_of, storage_error

WHERE = {"verb": "write", "key": "k", "container": "box", "endpoint": "https://host"}


def answer(status: int, code: str) -> HttpResponseError:
    error: Any = HttpResponseError("What happened.\nRequestId:1\nTime:2")
    error.status_code = status
    error.error_code = SimpleNamespace(value=code)
    found: HttpResponseError = error
    return found


@pytest.mark.parametrize(
    ("status", "code", "kind", "message"),
    [
        (503, "ServerBusy", TransientStorageError, "try again later"),
        (429, "", TransientStorageError, "overloaded"),
        (409, "ContainerBeingDeleted", TransientStorageError, "Try again later"),
        (412, "ConditionNotMet", TransientStorageError, "changed while it was read"),
        (400, "Md5Mismatch", TransientStorageError, "garbled"),
        (404, "ContainerNotFound", PermanentStorageError, "Create container 'box'"),
        (403, "AuthenticationFailed", PermanentStorageError, "Renew.*AZURE_STORAGE_KEY"),
        (403, "AuthorizationPermissionMismatch", PermanentStorageError, "Data Contributor"),
        (412, "LeaseIdMissing", PermanentStorageError, "break the lease"),
        (409, "BlobImmutableDueToPolicy", PermanentStorageError, "immutability"),
    ],
)
def test_an_answer_is_an_error_with_a_fix(
    status: int, code: str, kind: type[StorageError], message: str
) -> None:
    error = storage_error(answer(status, code), **WHERE)
    assert type(error) is kind
    assert "RequestId" not in str(error)
    with pytest.raises(kind, match=f"cannot write 'k' in container 'box' .*{status}.*{message}"):
        raise error


def test_without_an_answer_it_may_be_tried_again_and_shows_no_secret() -> None:
    error = storage_error(ServiceRequestError("at https://me:hunter2@proxy"), **WHERE)
    assert isinstance(error, TransientStorageError)
    assert "hunter2" not in str(error)
    assert isinstance(storage_error(OSError("reset"), **WHERE), TransientStorageError)


def test_missing_credentials_are_permanent_and_say_what_to_provide() -> None:
    error = storage_error(ClientAuthenticationError("none\nof\nall"), **WHERE)
    with pytest.raises(PermanentStorageError, match=r"none\. Log in .'az login'"):
        raise error


def test_status_and_code_of_what_has_none() -> None:
    assert (status_of(OSError()), code_of(OSError())) == (0, "")
    assert (status_of(answer(404, "BlobNotFound")), code_of(answer(1, "x"))) == (404, "x")
