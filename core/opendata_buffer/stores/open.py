"""Opens the store that a URL names.

To add a store, write its class and add one line to :data:`SCHEMES`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Location:
    """The parts of a URL after its scheme: ``host/root`` after two slashes."""

    url: str
    scheme: str
    host: str
    root: str


@dataclass(frozen=True, slots=True)
class Scheme:
    """How to open the stores of one URL scheme.

    Attributes:
        open: Returns the store at a location.
        example: Such a URL; empty for another spelling of a scheme.
        environment: Prefixes of the environment variables that the store depends on.
        place: The service's word for the URL's host.
    """

    open: Callable[[Location, StoreOptions], Store]
    example: str = ""
    environment: tuple[str, ...] = ()
    place: str = "bucket"


# Each cloud's client takes 100 ms to import, so only a process that uses a cloud imports it.


def _open_s3(at: Location, options: StoreOptions) -> Store:
    from opendata_buffer.stores.s3 import S3Store

    return S3Store(at.host, at.root, options)


def _open_gcs(at: Location, options: StoreOptions) -> Store:
    from opendata_buffer.stores.gcs import GcsStore

    return GcsStore(at.host, at.root, options)


def _open_azure(at: Location, options: StoreOptions) -> Store:
    from opendata_buffer.stores.azure import AzureStore

    return AzureStore(at.host.partition("@")[0], at.root, options)


def _open_abfss(at: Location, options: StoreOptions) -> Store:
    from opendata_buffer.stores.azure import AzureStore, blob_host

    container, has_account, account = at.host.partition("@")
    if not has_account or not container:
        raise InvalidInput(
            f"store {at.url!r} lacks {'a container' if has_account else 'an account'}: use "
            "abfss://container@account.dfs.core.windows.net[/root], or az://container[/root]"
        )
    return AzureStore(container, at.root, options, host=blob_host(account))


def _open_memory(at: Location, options: StoreOptions) -> Store:
    if at.root:
        raise InvalidInput(f"store {at.url!r} has a path: use memory://name")
    return MemoryStore.named(at.host)


SCHEMES = {
    "s3": Scheme(_open_s3, "s3://bucket[/root]", AWS_ENVIRONMENT),
    "s3a": Scheme(_open_s3, environment=AWS_ENVIRONMENT),
    "gs": Scheme(_open_gcs, "gs://bucket[/root]", GCS_ENVIRONMENT),
    "az": Scheme(_open_azure, "az://container[/root]", AZURE_ENVIRONMENT, "container"),
    "abfss": Scheme(
        _open_abfss,
        "abfss://container@account.dfs.core.windows.net[/root]",
        AZURE_ENVIRONMENT,
        "container",
    ),
    "memory": Scheme(_open_memory, "memory://name", place="store"),
}
"""All schemes of URLs but ``file``, whose URLs have another form."""

_NAMES = ("file", *SCHEMES)
# A name that contains a colon is a path, unless it looks like a URL or starts like one of ours.
_SCHEME = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]*):(?=/)|(?i:({'|'.join(_NAMES)}):)")
_EXAMPLES = [scheme.example for scheme in SCHEMES.values() if scheme.example]
_USAGE = f"use a directory, file:///dir, {', '.join(_EXAMPLES[:-1])} or {_EXAMPLES[-1]}"

_cache: dict[tuple[str, StoreOptions], tuple[Hashable, Store]] = {}


@checked
def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """Open the store that a URL names.

    One process gets the same object for the same URL and options. Opening reads and writes nothing,
    so the first operation reports a missing bucket. After the environment variables of the cloud
    changed, a new object is returned; earlier ones keep working.

    ::

        store = open_store("s3://bucket/orders", StoreOptions(region="eu-central-1"))

    Args:
        url: ``s3://bucket[/root]`` (``s3a://`` is the same), ``gs://bucket[/root]``,
            ``az://container[/root]``, ``abfss://container@account.dfs.core.windows.net[/root]``,
            ``file:///dir``, a path (made absolute now), or ``memory://name``.
        options: How to reach a cloud. Default: the values of :class:`StoreOptions`.

    Returns:
        The store.

    Raises:
        InvalidInput: The URL does not name a store, or carries credentials (failure F37).
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
        # No lock is needed: two threads that open one URL both get the object that was put first.
        return _cache.setdefault(key, made)[1]
    # Keep only the newest one. Otherwise each rotation of credentials would leave a store with its
    # connections behind.
    _cache[key] = made
    return made[1]


def _environment(url: str) -> Hashable:
    """Return the environment variables on which a store also depends."""
    name, colon, _ = url.partition(":")
    scheme = SCHEMES.get(name.lower())
    if colon and scheme is not None and scheme.environment:
        return environment_of(*scheme.environment)
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
    name = (match[1] or match[2]).lower()
    if name == "dbfs":  # LocalStore refuses it and names the fix
        return _open_directory(f"/dbfs/{url[match.end() :].lstrip('/')}")
    if name == "file":
        return _open_file(url)
    scheme = SCHEMES.get(name)
    if scheme is None:
        import difflib  # only needed for a wrong name

        near = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InvalidInput(f"store {url!r} has the unknown scheme {name!r}: {hint}{_USAGE}")
    rest = url[match.end() :]
    if not rest.startswith("//"):
        raise InvalidInput(f"store {url!r} lacks '//' after the scheme: {_USAGE}")
    host, _, path = rest[2:].partition("/")
    if not host:
        raise InvalidInput(f"store {url!r} names no {scheme.place}: {_USAGE}")
    return scheme.open(Location(url, name, host, path.strip("/")), options)


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
