"""The boto3 clients of one store, made when first used in a process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Literal

import boto3
import botocore.exceptions as boto
from botocore.config import Config

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import PermanentStorageError

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = ["S3Clients"]


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
        self._lock = threading.Lock()
        self._clients: tuple[S3Client, S3Client] | None = None

    def _both(self) -> tuple[S3Client, S3Client]:
        if self._pid != os.getpid():
            self._forget()  # forked: the parent still uses these sockets, maybe this lock
        clients = self._clients
        if clients is None:
            with self._lock:
                clients = self._clients
                if clients is None:
                    clients = self._clients = self._connect()
        return clients

    def _connect(self) -> tuple[S3Client, S3Client]:
        try:
            # A session of our own: boto3's default one is not thread-safe.
            session = boto3.session.Session(
                profile_name=self._options.profile, region_name=self._options.region
            )
            data = self._client(session, self._options.max_attempts, "auto")
            if ".amazonaws.com" in data.meta.endpoint_url:
                return data, self._client(session, 1, "auto")
            # Hosts such as bucket.localhost or bucket.10.0.0.1 resolve nowhere.
            return (
                self._client(session, self._options.max_attempts, "path"),
                self._client(session, 1, "path"),
            )
        except (boto.BotoCoreError, ValueError) as error:
            raise PermanentStorageError(
                f"cannot make an S3 client: {error}. Correct endpoint_url, region, profile or "
                "the AWS configuration files."
            ) from error

    def _client(
        self, session: boto3.session.Session, attempts: int, style: Literal["auto", "path"]
    ) -> S3Client:
        options = self._options
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
