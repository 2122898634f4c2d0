"""The boto3 clients of one store, made when first used in a process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import boto3
import botocore.exceptions as boto
from botocore.config import Config

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import PermanentStorageError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = ["S3Clients"]

_Pair: TypeAlias = "tuple[S3Client, S3Client]"
_Key: TypeAlias = tuple[int, StoreOptions, tuple[tuple[str, str], ...]]

_pairs: dict[_Key, _Pair] = {}
_lock = threading.Lock()


def _forget_all() -> None:
    # A forked child must not use its parent's sockets, nor wait for its parent's threads.
    global _lock
    _lock = threading.Lock()
    _pairs.clear()


os.register_at_fork(after_in_child=_forget_all)


class S3Clients:
    """Two clients: :attr:`data` repeats what failed, :attr:`conditional` sends once.

    Thread-safe; pickles as its options, and a forked child makes clients of its own.
    """

    def __init__(self, options: StoreOptions) -> None:
        self._options = options
        self._forget()

    @property
    def data(self) -> S3Client:
        """For reads, listings, deletes and unconditional writes."""
        return self._both()[0]

    @property
    def conditional(self) -> S3Client:
        """For conditional writes: one attempt (failure F1)."""
        return self._both()[1]

    @property
    def endpoint(self) -> str:
        """The endpoint's URL."""
        return self.data.meta.endpoint_url

    def __getstate__(self) -> StoreOptions:
        return self._options  # sockets and locks belong to a process

    def __setstate__(self, options: StoreOptions) -> None:
        self._options = options
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._clients: _Pair | None = None

    def _both(self) -> _Pair:
        clients = self._clients
        if clients is None or self._pid != os.getpid():
            self._pid = os.getpid()
            clients = self._clients = _shared(self._options)
        return clients


def _shared(options: StoreOptions) -> _Pair:
    """The clients of these options: one connection pool for all stores of a process.

    What boto3 reads of the environment is part of the key, so a changed endpoint or credential
    is honoured by the next store that is opened.
    """
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    key = (os.getpid(), options, environment)
    with _lock:
        if key not in _pairs:
            _pairs[key] = _connect(options)
        return _pairs[key]


def _connect(options: StoreOptions) -> _Pair:
    try:
        # A session of our own: boto3's default one is not thread-safe.
        session = boto3.session.Session(profile_name=options.profile, region_name=options.region)
        data = _client(session, options, options.max_attempts, "auto")
        if ".amazonaws.com" in data.meta.endpoint_url:
            return data, _client(session, options, 1, "auto")
        # Hosts such as bucket.localhost or bucket.10.0.0.1 resolve nowhere.
        return (
            _client(session, options, options.max_attempts, "path"),
            _client(session, options, 1, "path"),
        )
    except (boto.BotoCoreError, ValueError) as error:
        raise PermanentStorageError(
            f"cannot make an S3 client: {error}. Correct endpoint_url, region, profile or the "
            "AWS configuration files."
        ) from error


def _client(
    session: boto3.session.Session,
    options: StoreOptions,
    attempts: int,
    style: Literal["auto", "path"],
) -> S3Client:
    settings: dict[str, Any] = {
        "retries": {"mode": "standard", "total_max_attempts": attempts},
        "connect_timeout": options.connect_timeout_ms / 1000,
        "read_timeout": options.read_timeout_ms / 1000,
        "max_pool_connections": options.max_connections,
        "tcp_keepalive": True,
        "request_checksum_calculation": "when_supported",
        "response_checksum_validation": "when_supported",
        "s3": {"addressing_style": style},
    }
    return session.client("s3", endpoint_url=options.endpoint_url, config=Config(**settings))
