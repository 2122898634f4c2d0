"""The client of a cloud, created at its first use in a process and shared by its stores."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Hashable
from importlib import import_module
from typing import Any, Generic, TypeVar

from opendata_buffer.config import flaw_of, hide_secrets, redacted, remember_secret
from opendata_buffer.errors import InvalidInput, PermanentStorageError
from opendata_buffer.hints import Setting

_CREDENTIALS = {
    "s3": ("get_credentials", "an instance profile"),
    "az": (
        "get_token",
        "a service principal by AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET",
    ),
    "gs": ("before_request", "a Google service account"),
}
"""By cloud: a method that only this cloud's credentials have, and the alternative to a service
credential that a process may use."""


def service_credential(name: str, scheme: str) -> Any:
    """Return the credentials of a Databricks service credential, which renew themselves.

    Args:
        name: Name of the service credential.
        scheme: The scheme of the store's URL, which decides the cloud.

    Returns:
        A botocore session for AWS, and a credential object for the other clouds.

    Raises:
        InvalidInput: The credential is for another cloud.
        PermanentStorageError: This is not Databricks, or the name yields no credentials.
    """
    method, instead = _CREDENTIALS[scheme]
    failed = []
    for where, find in _CREDENTIAL_SOURCES.items():
        try:
            holder = find()
            if holder is None:
                continue
            found = holder.getServiceCredentialsProvider(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:
            failed.append(f"{where}: {type(error).__name__}: {redacted(str(error)).rstrip('.')}")
            continue
        if not hasattr(found, method):
            raise InvalidInput(
                Setting("service_credential"),
                f" {name!r} is for another cloud than {scheme}://: use one for the store's cloud",
            )
        return found
    if not failed:
        raise PermanentStorageError(
            Setting("service_credential"),
            f" is {name!r}, and only Databricks has such: neither dbutils nor "
            "databricks.service_credentials is here. Use Databricks Runtime 16.2 or later, or "
            "leave it out and let the cloud's own credentials be used",
        )
    raise PermanentStorageError(
        Setting("service_credential"),
        f" {name!r} gives no credentials here ({'; '.join(failed)}). Check the name, and that this "
        "process's user has ACCESS on it in Unity Catalog. Where Databricks gives none to the "
        f"process that plans a query, give the compute {instead}",
    )


def _notebook_dbutils() -> Any:
    spaces = [vars(sys.modules["__main__"])]
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        spaces.append(shell.user_ns)
    found = [space["dbutils"] for space in spaces if "dbutils" in space]
    return found[0].credentials if found else None


_CREDENTIAL_SOURCES: dict[str, Callable[[], Any]] = {
    "dbutils": _notebook_dbutils,  # of a notebook or a job
    "databricks.service_credentials": lambda: import_module("databricks.service_credentials"),
    # Last: outside of Databricks it searches for a workspace, which may take long.
    "databricks.sdk.runtime": lambda: import_module("databricks.sdk.runtime").dbutils.credentials,
}


def check_resolved(secret: str | None, what: str) -> None:
    """Refuse a credential that no request can carry, before it is sent (failure F49).

    Args:
        secret: The value; it is hidden in logs and errors from now on.
        what: Its name and origin, for the message.

    Raises:
        PermanentStorageError: It has a character other than visible ASCII.
    """
    if secret:
        remember_secret(secret)
        if flaw := flaw_of(secret):
            raise PermanentStorageError(f"{what} {flaw}. No request was sent with it.")


def load(module: str, scheme: str = "") -> Any:
    """Import a module of an extra for a store whose URL has this scheme.

    Args:
        module: Full name of the module.
        scheme: The scheme of the store's URL, for the error. Default: the usual one of the module.

    Returns:
        The module.

    Raises:
        InvalidInput: The module is missing. The error names the command that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        usual, extra = ("gs", "gcs") if module.startswith("google.") else ("az", "azure")
        raise InvalidInput(
            f"stores of {scheme or usual}:// need {error.name or module}, which is not installed "
            f"here: in a checkout pip install '.[{extra}]', else pip install 'WHEEL[{extra}]' with "
            "the path of the wheel. On a cluster the executors need it too."
        ) from error


AWS_ENVIRONMENT = ("AWS_",)
"""Prefixes of the variables that boto3 takes settings and credentials from."""

GCS_ENVIRONMENT = ("GOOGLE_", "CLOUDSDK_", "GCE_", "STORAGE_EMULATOR_HOST")
"""The same for google-auth, and the variable with an emulator's address for every client of GCS."""

AZURE_ENVIRONMENT = ("AZURE_", "IDENTITY_", "MSI_")
"""The same for azure-identity and Azure's own command line."""

T = TypeVar("T")

# Each with the environment it was made in. A change of the environment replaces it, so clients with
# old credentials are dropped; a store that uses the old client keeps it.
_made: dict[Hashable, tuple[Hashable, Any]] = {}
_lock = threading.RLock()  # A client may be made of another one.


def _forget_all() -> None:
    # A forked child must neither use its parent's sockets nor wait for its parent's threads.
    global _lock
    _lock = threading.RLock()
    _made.clear()


os.register_at_fork(after_in_child=_forget_all)


def environment_of(*prefixes: str) -> Hashable:
    """Return the environment variables whose names begin with one of these prefixes."""
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith(prefixes)))


_SECRET_VARIABLE = re.compile("KEY|TOKEN|SECRET|PASSWORD|CONNECTION_STRING|IDENTITY_HEADER")
_PLACE = re.compile("(FILE|PATH|URI|URL|ENDPOINT)$")


def _remember_secrets(prefixes: tuple[str, ...]) -> None:
    """Hide the credentials in environment variables that begin with one of these prefixes."""
    for name, value in os.environ.items():
        is_secret = _SECRET_VARIABLE.search(name) and not _PLACE.search(name)
        if name.startswith(prefixes) and is_secret:
            remember_secret(value)


_LOGGERS = (
    "azure.core.pipeline.policies.http_logging_policy",
    "azure.identity",
    "botocore.auth",
    "botocore.credentials",
    "botocore.endpoint",
    "botocore.hooks",
    "botocore.httpsession",
    "botocore.parsers",
    "botocore.tokens",
    "botocore.utils",
    "google.auth.transport.requests",
    "google.auth.transport.urllib3",
    "msal.token_cache",
    "urllib3.connectionpool",
    "urllib3.util.retry",
)
"""Loggers of the clients, some of which write headers and answers at the level DEBUG."""

_IN_LOGS = re.compile(
    # A header in a dictionary, in a canonical request or in its own line.
    r"((?:x-amz-security-token|x-amz-sso_bearer_token|x-aws-ec2-metadata-token|authorization)['\"]?\s*[:=]\s*)"
    r"(?:b?'(?:[^'\\]|\\.)*'|b?\"(?:[^\"\\]|\\.)*\"|[^\r\n]+)"
    # An answer with new credentials, as XML or JSON, and the signature in a URL.
    r"|(<(?:SecretAccessKey|SessionToken|AccessKeyId)>)[^<]+"
    r"|(['\"](?:SecretAccessKey|SessionToken|Token|AccessKeyId|accessToken|access_token|"
    r"refresh_token|id_token|secretAccessKey|sessionToken|accessKeyId)\\?['\"]\s*:\s*\\?['\"])[^'\"\\]+"
    r"|([?&](?:sig|X-Amz-Security-Token|X-Amz-Signature|X-Amz-Credential)=)[^&\s'\"]+",
    re.IGNORECASE,
)


class _HideSecrets(logging.Filter):
    """Removes credentials from a log record, if the record is written at all."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record's text, and never drop the record."""
        try:
            text = record.getMessage()
        except Exception:
            return True  # a wrong call of the logger, which logging reports
        shown = _IN_LOGS.sub(lambda found: f"{''.join(filter(None, found.groups()))}***", text)
        shown = hide_secrets(shown)
        if shown != text:
            record.msg, record.args = shown, ()
        return True


_hide_secrets = _HideSecrets()


def hide_in_logs() -> None:
    """Keep every logger of a client from showing a credential. A second call does nothing."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_hide_secrets)


class ProcessClient(Generic[T]):
    """One client for all stores of a process that are opened with the same arguments. Thread-safe.

    It pickles as the function and arguments that create it, never with a socket or a secret. A
    forked child creates its own client.

    Args:
        make: A function of a module that creates the client.
        prefixes: Prefixes of the environment variables that the client depends on.
        *arguments: For ``make``.
    """

    def __init__(
        self, make: Callable[..., T], prefixes: tuple[str, ...], *arguments: Hashable
    ) -> None:
        self._from = (make, prefixes, arguments)
        self._held: tuple[int, T] | None = None

    def get(self) -> T:
        """Return the client."""
        held = self._held
        if held is None or held[0] != os.getpid():
            make, prefixes, arguments = self._from
            environment = environment_of(*prefixes)
            _remember_secrets(prefixes)
            hide_in_logs()
            with _lock:
                found = _made.get((make, arguments))
                if found is None or found[0] != environment:
                    found = _made[make, arguments] = (environment, make(*arguments))
            held = self._held = (os.getpid(), found[1])
        return held[1]

    def __reduce__(self) -> tuple[Any, ...]:
        make, prefixes, arguments = self._from
        return (ProcessClient, (make, prefixes, *arguments))
