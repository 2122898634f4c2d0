"""The boto3 clients of one store, made when first used in a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import boto3
import botocore.exceptions as boto
from botocore import UNSIGNED
from botocore.config import Config

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.redaction import redacted
from opendata_buffer.runtime import remaining
from opendata_buffer.stores.bounded import DeadlinePassed
from opendata_buffer.stores.clients import AWS_ENVIRONMENT, ProcessClient
from opendata_buffer.stores.s3_credentials import identity_of, session_of
from opendata_buffer.stores.s3_session import S3Session

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = ["S3Pair", "connect"]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class S3Pair:
    """Two clients of one store.

    Attributes:
        data: For reads, listings, deletes and unconditional writes; repeats what failed.
        conditional: For conditional writes: one attempt (failure F1).
    """

    data: S3Client
    conditional: S3Client

    @property
    def endpoint(self) -> str:
        """The endpoint's URL, without secrets."""
        return redacted(self.data.meta.endpoint_url)


def connect(name: str, options: StoreOptions) -> S3Pair:
    """The clients of these options, for all buckets.

    Raises:
        PermanentStorageError: The options or the AWS configuration cannot be used.
    """
    del name
    # A session reads the description of S3 again, which takes a tenth of a second, so it is
    # shared by all that differ in how they connect only.
    session = ProcessClient(session_of, "", identity_of(options), AWS_ENVIRONMENT)
    try:
        return _connect(session.get(), options)
    except (boto.BotoCoreError, ValueError) as error:
        raise PermanentStorageError(
            f"cannot make an S3 client: {redacted(str(error)).rstrip('.')}. Correct "
            "endpoint_url, region, profile or the AWS configuration files."
        ) from error


def _connect(session: boto3.session.Session, options: StoreOptions) -> S3Pair:
    data = _client(session, options, options.max_attempts, "auto")
    if ".amazonaws.com" in data.meta.endpoint_url:
        return S3Pair(data, _client(session, options, 1, "auto"))
    # Hosts such as bucket.localhost or bucket.10.0.0.1 resolve nowhere.
    return S3Pair(
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
    if options.anonymous:
        settings["signature_version"] = UNSIGNED
    client = session.client("s3", endpoint_url=options.endpoint_url, config=Config(**settings))
    client.meta.events.register("before-send.s3", _refuse_late)
    endpoint: Any = client._endpoint  # type: ignore[attr-defined]
    endpoint.http_session = S3Session(endpoint.http_session)
    return client


def _refuse_late(**_: object) -> None:
    # boto3's retries know no deadline: of a call that was left behind they would go on for
    # minutes, holding its thread and its bytes.
    left = remaining()
    if left is not None and left <= 0:
        raise DeadlinePassed
