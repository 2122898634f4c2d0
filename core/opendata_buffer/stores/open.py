"""Opens the store that a URL names."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from opendata_buffer.arguments import checked
from opendata_buffer.config import StoreOptions, check_no_secrets
from opendata_buffer.errors import InvalidInput
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.clients import (
    AWS_ENVIRONMENT,
    AZURE_ENVIRONMENT,
    GCS_ENVIRONMENT,
    environment_of,
)
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore

_SCHEMES = ("file", "s3", "s3a", "gs", "az", "abfss", "memory")
# A name with a colon in it is a path unless it looks like a URL or starts like one of ours.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(?=/)|(?i:(file|s3|s3a|gs|az|abfss|memory):)")
_USAGE = (
    "use a directory, file:///dir, s3://bucket[/root], gs://bucket[/root], az://container[/root], "
    "abfss://container@account.dfs.core.windows.net[/root] or memory://name"
)

_CALLED = {"memory": "store", "az": "container", "abfss": "container"}
_ENVIRONMENTS = {
    "s3": AWS_ENVIRONMENT,
    "s3a": AWS_ENVIRONMENT,
    "gs": GCS_ENVIRONMENT,
    "az": AZURE_ENVIRONMENT,
    "abfss": AZURE_ENVIRONMENT,
}
_cache: dict[tuple[str, StoreOptions], tuple[Hashable, Store]] = {}


@checked
def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """The store a URL names; the same object for the same URL and options in one process.

    Opening reads and writes nothing: what is missing is reported by the first operation. After a
    change of the cloud's environment variables it is another object; those opened before go on.

    Args:
        url: ``s3://bucket[/root]`` (``s3a://`` is the same), ``gs://bucket[/root]``,
            ``az://container[/root]``, ``abfss://container@account.dfs.core.windows.net[/root]``,
            ``file:///dir``, a path (made absolute now), or ``memory://name``.
        options: How to reach a cloud. Default: the values of :class:`StoreOptions`.

    Raises:
        InvalidInput: Not a URL of a store, or one that carries credentials (failure F37).
    """
    options = options if options is not None else StoreOptions()
    if not isinstance(url, str) or not url:
        raise InvalidInput(f"store is {url!r}: {_USAGE}")
    key, environment = (url, options), _environment(url)
    found = _cache.get(key)
    if found is not None and found[0] == environment:
        return found[1]
    made = (environment, _open(url, options))
    if found is None:
        # Without a lock: of two threads that open one URL, both get what was put first.
        return _cache.setdefault(key, made)[1]
    # Only the newest is kept: credentials that rotate would leave a store with its connections
    # behind each time.
    _cache[key] = made
    return made[1]


def _environment(url: str) -> Hashable:
    """The environment variables on which a store also depends."""
    scheme, colon, _ = url.partition(":")
    if colon and scheme.lower() in _ENVIRONMENTS:
        return environment_of(*_ENVIRONMENTS[scheme.lower()])
    if "://" in url or os.path.isabs(url):
        return None
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise InvalidInput(
            f"store {url!r} is relative, and the directory this process runs in is gone: use an "
            "absolute path"
        ) from None


def _open(url: str, options: StoreOptions) -> Store:
    check_no_secrets("store", url)
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in url):
        raise InvalidInput(f"store {url!r} has a control character: {_USAGE}")
    match = _SCHEME.match(url)
    if match is None:
        return _open_directory(url)
    scheme = (match[1] or match[2]).lower()
    if scheme == "dbfs":  # refused there, with the fix
        return _open_directory(f"/dbfs/{url[match.end() :].lstrip('/')}")
    if scheme not in _SCHEMES:
        import difflib  # only where a name is wrong

        near = difflib.get_close_matches(scheme, _SCHEMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InvalidInput(f"store {url!r} has the unknown scheme {scheme!r}: {hint}{_USAGE}")
    if scheme == "file":
        return _open_file(url)
    rest = url[match.end() :]
    if not rest.startswith("//"):
        raise InvalidInput(f"store {url!r} lacks '//' after the scheme: {_USAGE}")
    host, _, path = rest[2:].partition("/")
    if not host:
        raise InvalidInput(f"store {url!r} names no {_CALLED.get(scheme, 'bucket')}: {_USAGE}")
    if scheme == "memory":
        if path:
            raise InvalidInput(f"store {url!r} has a path: use memory://name")
        return MemoryStore.named(host)
    # boto3 takes 100 ms to import, the others as much: only a process that uses a cloud loads it.
    if scheme == "gs":
        from opendata_buffer.stores.gcs import GcsStore

        return GcsStore(host, path.strip("/"), options)
    if scheme in ("az", "abfss"):
        return _open_azure(url, scheme, host, path.strip("/"), options)
    from opendata_buffer.stores.s3 import S3Store

    return S3Store(host, path.strip("/"), options)


def _open_azure(url: str, scheme: str, host: str, root: str, options: StoreOptions) -> Store:
    from opendata_buffer.stores.azure import AzureStore, blob_host  # as the other clouds

    container, at, account = host.partition("@")
    if scheme == "az":
        return AzureStore(container, root, options)
    if not at or not container:
        raise InvalidInput(
            f"store {url!r} lacks {'a container' if at else 'an account'}: use "
            "abfss://container@account.dfs.core.windows.net[/root], or az://container[/root]"
        )
    return AzureStore(container, root, options, host=blob_host(account))


def _open_file(url: str) -> Store:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise InvalidInput(
            f"store {url!r} names the host {parts.hostname!r}: local directories have "
            "none, use three slashes as in file:///dir"
        )
    if not url[len("file:") :].startswith("/"):
        raise InvalidInput(f"store {url!r} is not absolute: use file:///dir or a plain path")
    if parts.query or parts.fragment:
        raise InvalidInput(
            f"store {url!r} has '?' or '#': write them as %3F and %23, or use a plain path"
        )
    return _open_directory(unquote(parts.path))


def _open_directory(path: str) -> Store:
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise InvalidInput(
            f"store {path!r} starts with '~', and the home directory it means is not known: "
            f"{str(error).rstrip('.')}. Write the path out, or ./{path} for that very name"
        ) from None
    return LocalStore(expanded.absolute())
