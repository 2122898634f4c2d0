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
from opendata_buffer.redaction import redacted
from opendata_buffer.runtime import remaining
from opendata_buffer.stores.bounded import DeadlinePassed

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = ["S3Clients", "aws_environment"]

_Pair: TypeAlias = "tuple[S3Client, S3Client]"
_Environment: TypeAlias = tuple[tuple[str, str], ...]

# Each with the environment it was made in. A changed one replaces them: of credentials that rotate
# every hour nothing is left behind, and who still uses the old clients keeps them.
_pairs: dict[StoreOptions, tuple[_Environment, _Pair]] = {}
_sessions: dict[tuple[str | None, str | None], tuple[_Environment, boto3.session.Session]] = {}
_lock = threading.Lock()


def _forget_all() -> None:
    # A forked child must not use its parent's sockets, nor wait for its parent's threads.
    global _lock
    _lock = threading.Lock()
    _pairs.clear()
    _sessions.clear()


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
        """The endpoint's URL, without secrets."""
        return redacted(self.data.meta.endpoint_url)

    @property
    def known_endpoint(self) -> str:
        """The same, but while no client could be made, what is known without one."""
        if self._clients is not None:
            return redacted(self._clients[0].meta.endpoint_url)
        return self._options.endpoint_url or "the endpoint of the AWS settings"

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


def aws_environment() -> _Environment:
    """The environment variables that boto3 takes settings and credentials from."""
    return tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))


def _shared(options: StoreOptions) -> _Pair:
    """The clients of these options: one connection pool for all stores of a process.

    What boto3 reads of the environment is compared, so a changed endpoint or credential is
    honoured by the next store that is opened.
    """
    environment = aws_environment()
    with _lock:
        found = _pairs.get(options)
        if found is not None and found[0] == environment:
            return found[1]
        try:
            session = _session(options.profile, options.region, environment)
            pair = _connect(session, options)
        except (boto.BotoCoreError, ValueError) as error:
            raise PermanentStorageError(
                f"cannot make an S3 client: {redacted(str(error)).rstrip('.')}. Correct "
                "endpoint_url, region, profile or the AWS configuration files."
            ) from error
        _pairs[options] = (environment, pair)
        return pair


def _session(
    profile: str | None, region: str | None, environment: _Environment
) -> boto3.session.Session:
    # boto3's default session is not thread-safe, so this one is made under the lock. It is kept,
    # because each session reads the description of S3 again, which takes a tenth of a second.
    found = _sessions.get((profile, region))
    if found is not None and found[0] == environment:
        return found[1]
    session = boto3.session.Session(profile_name=profile, region_name=region)
    _sessions[profile, region] = (environment, session)
    return session


def _connect(session: boto3.session.Session, options: StoreOptions) -> _Pair:
    data = _client(session, options, options.max_attempts, "auto")
    if ".amazonaws.com" in data.meta.endpoint_url:
        return data, _client(session, options, 1, "auto")
    # Hosts such as bucket.localhost or bucket.10.0.0.1 resolve nowhere.
    return (
        _client(session, options, options.max_attempts, "path"),
        _client(session, options, 1, "path"),
    )


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
    client = session.client("s3", endpoint_url=options.endpoint_url, config=Config(**settings))
    client.meta.events.register("before-send.s3", _refuse_late)
    return client


def _refuse_late(**_: object) -> None:
    # boto3's retries know no deadline: of a call that was left behind they would go on for
    # minutes, holding its thread and its bytes.
    left = remaining()
    if left is not None and left <= 0:
        raise DeadlinePassed
