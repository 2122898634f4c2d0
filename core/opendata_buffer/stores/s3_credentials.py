"""Who asks S3: the session that credentials come from, and are renewed in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.credentials import (
    AssumeRoleCredentialFetcher,
    CredentialProvider,
    DeferredRefreshableCredentials,
)

from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.stores.service_credential import service_credential

__all__ = ["SESSION_NAME", "identity_of", "session_of"]

SESSION_NAME = "opendata-buffer"
"""How a role's log names our requests where the options say nothing else."""


def identity_of(options: StoreOptions) -> StoreOptions:
    """The same options without what says how to connect."""
    default = StoreOptions()
    return replace(
        options,
        endpoint_url=None,
        connect_timeout_ms=default.connect_timeout_ms,
        read_timeout_ms=default.read_timeout_ms,
        max_attempts=default.max_attempts,
        max_connections=default.max_connections,
    )


def session_of(name: str, options: StoreOptions) -> boto3.session.Session:
    """A session with the credentials that the options name, else with those of boto3's chain.

    Neither keys of a role nor of a service credential are fetched here: the first request does,
    and any later one that finds them about to end.

    Raises:
        InvalidInput, PermanentStorageError: The service credential cannot be used.
        BotoCoreError: The profile or the configuration files cannot.
    """
    del name
    session = _source(options)
    if options.role_arn is None:
        return session
    assumed = botocore.session.Session(profile=options.profile)
    # In front of the chain, which is only the source that the role is assumed with.
    assumed.get_component("credential_provider").providers.insert(0, _Role(session, options))
    return boto3.session.Session(botocore_session=assumed, region_name=session.region_name)


def _source(options: StoreOptions) -> boto3.session.Session:
    # boto3's default session is not thread-safe, and would mix what stores with other options do.
    if options.service_credential is not None:
        provided = service_credential(
            options.service_credential, scheme="s3", has="get_credentials"
        )
        return boto3.session.Session(botocore_session=provided, region_name=options.region)
    return boto3.session.Session(
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        profile_name=options.profile,
        region_name=options.region,
    )


class _Role(CredentialProvider):
    """Credentials of a role, fetched when they are needed and again before they end."""

    METHOD = "opendata-buffer-role"
    CANONICAL_NAME = METHOD

    def __init__(self, source: boto3.session.Session, options: StoreOptions) -> None:
        super().__init__()
        self._source = source
        self._options = options

    def load(self) -> DeferredRefreshableCredentials:
        options = self._options
        extra: dict[str, Any] = {"RoleSessionName": options.session_name or SESSION_NAME}
        if options.external_id is not None:
            extra["ExternalId"] = options.external_id
        credentials = self._source.get_credentials()
        if credentials is None:
            raise PermanentStorageError(
                f"there are no AWS credentials to assume role {options.role_arn!r} with: provide "
                "some by environment variables, a profile, or a role of this machine"
            )
        timeouts = Config(
            connect_timeout=options.connect_timeout_ms / 1000,
            read_timeout=options.read_timeout_ms / 1000,
        )
        fetcher = AssumeRoleCredentialFetcher(
            partial(self._source.client, config=timeouts), credentials, str(options.role_arn), extra
        )
        return DeferredRefreshableCredentials(
            refresh_using=fetcher.fetch_credentials, method=self.METHOD
        )
