"""Credentials of a Databricks service credential: found by its name, in each process anew.

Databricks has two places for them: ``dbutils`` in a notebook or a job, and a module of its own in
the Python workers of executors, where there is no ``dbutils``. Both give, for one name, what the
cloud's own library takes as credentials and renews by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.redaction import redacted

__all__ = ["service_credential"]


_IDENTITIES = {
    "s3": "an instance profile",
    "az": "a service principal by AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET",
    "gs": "a Google service account",
}
"""What it may have of its own, by cloud."""


def service_credential(name: str, *, scheme: str, has: str) -> Any:
    """What a service credential gives: for AWS a botocore session, else a credential object.

    Args:
        name: As in Unity Catalog.
        scheme: Of the store's URL, for messages.
        has: A method that such an object has for this cloud, and for no other.

    Raises:
        InvalidInput: It is a credential for another cloud.
        PermanentStorageError: This is not Databricks, or the name gives nothing here.
    """
    failed = []
    for where, find in _PLACES:
        try:
            provider = find()
            if provider is None:
                continue
            found = provider(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:
            failed.append(f"{where}: {type(error).__name__}: {redacted(str(error)).rstrip('.')}")
            continue
        if not hasattr(found, has):
            raise InvalidInput(
                f"service_credential {name!r} is for another cloud than {scheme}://: use one for "
                "the store's cloud"
            )
        return found
    if not failed:
        raise PermanentStorageError(
            f"service_credential is {name!r}, and only Databricks has such: neither dbutils nor "
            "databricks.service_credentials is here. Use Databricks Runtime 16.2 or later, or "
            "leave it out and let the cloud's own credentials be used"
        )
    raise PermanentStorageError(
        f"service_credential {name!r} gives no credentials here ({'; '.join(failed)}). Check the "
        "name, and that whoever runs this has ACCESS on it in Unity Catalog. Where Databricks "
        f"gives none to the process that plans a query, give the compute {_IDENTITIES[scheme]}"
    )


def _of_the_notebook() -> Callable[[str], Any] | None:
    """``dbutils`` as a notebook has it, where this is its process."""
    spaces = [vars(sys.modules["__main__"])]
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        spaces.append(shell.user_ns)
    for space in spaces:
        if "dbutils" in space:
            return _getter(space["dbutils"].credentials)
    return None


def _of_executors() -> Callable[[str], Any]:
    return _getter(import_module("databricks.service_credentials"))


def _of_the_driver() -> Callable[[str], Any]:
    # Last: outside of Databricks it looks for a workspace to talk to, which may take long.
    return _getter(import_module("databricks.sdk.runtime").dbutils.credentials)


def _getter(holder: Any) -> Callable[[str], Any]:
    found: Callable[[str], Any] = holder.getServiceCredentialsProvider
    return found


_PLACES: tuple[tuple[str, Callable[[], Callable[[str], Any] | None]], ...] = (
    ("dbutils", _of_the_notebook),
    ("databricks.service_credentials", _of_executors),
    ("databricks.sdk.runtime", _of_the_driver),
)
