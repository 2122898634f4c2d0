"""What an error of Azure's SDK means for the caller, and how to say it."""

from __future__ import annotations

from typing import Any

from opendata_buffer.errors import PermanentStorageError, StorageError, TransientStorageError
from opendata_buffer.redaction import redacted

__all__ = ["code_of", "is_missing", "status_of", "storage_error"]

_CREDENTIALS = {
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
    "KeyBasedAuthenticationNotPermitted",
    "NoAuthenticationInformation",
}
_HOW = (
    "Log in ('az login'), give this machine a managed identity, or set AZURE_STORAGE_KEY, "
    "AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING"
)


def status_of(error: Any) -> int:
    """The HTTP status of an answer; 0 where there was none."""
    return int(getattr(error, "status_code", None) or 0)


def code_of(error: Any) -> str:
    """Azure's error code, such as ``BlobNotFound``; empty where there is none."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def is_missing(error: Any) -> bool:
    """Whether the answer is Azure's that there is no such blob.

    Azure always names its errors. A 404 without a name is that of a proxy, and not of a container
    that is missing: then the blob would be, too.
    """
    return status_of(error) == 404 and code_of(error) not in ("", "ContainerNotFound")


def storage_error(
    error: Exception, *, verb: str, key: str, container: str, endpoint: str
) -> StorageError:
    """The error of this library for one of Azure's, with the fix in its message.

    Args:
        error: What azure-core, azure-identity or the socket raised.
        verb: ``read``, ``write``, ``list`` or ``delete``.
        key: The full key, or prefix.
        container: The container.
        endpoint: The account's URL.
    """
    status, code = status_of(error), code_of(error)
    # Behind the first line come request ids and dates, and of credentials all that was tried.
    said = redacted((str(error).strip().splitlines() or [""])[0]).rstrip(".")
    what = f"cannot {verb} {key!r} in container {container!r} at {endpoint}: "
    if not status:
        if "Credential" in type(error).__name__ or "Authentication" in type(error).__name__:
            return PermanentStorageError(f"{what}{said}. {_HOW}.")
        return TransientStorageError(
            f"{what}{type(error).__name__}: {said}. Check the endpoint and the network, or try "
            "again later."
        )
    what += f"{status} {code} {said}".rstrip(". ")
    if status < 300 or (status == 404 and not code):
        return TransientStorageError(
            f"{what}. That is no answer of Azure's: check what answers at the endpoint (a proxy?), "
            "or try again later."
        )
    if status in (408, 429) or status >= 500:
        return TransientStorageError(f"{what}. The store failed or is overloaded; try again later.")
    if code in ("ContainerBeingDeleted", "OperationTimedOut"):
        return TransientStorageError(f"{what}. Try again later.")
    if status == 304 or code in ("ConditionNotMet", "InvalidRange"):
        return TransientStorageError(f"{what}. The object changed while it was read; try again.")
    if code == "Md5Mismatch":
        return TransientStorageError(f"{what}. The bytes were garbled on the way; try again.")
    if status == 404:
        return PermanentStorageError(
            f"{what}. Create container {container!r} or correct the store URL."
        )
    if code in _CREDENTIALS or status == 401:
        return PermanentStorageError(f"{what}. Renew or correct the Azure credentials. {_HOW}.")
    if status == 403:
        return PermanentStorageError(
            f"{what}. Allow these credentials to {verb} blobs of container {container!r} (role "
            "'Storage Blob Data Contributor'), and look at the account's firewall."
        )
    if code.startswith("Lease"):
        return PermanentStorageError(f"{what}. Somebody holds a lease on it: break the lease.")
    return PermanentStorageError(
        f"{what}. Check the container, its policies (immutability, archive tier), and that "
        "Azure Blob Storage answers at this endpoint."
    )
