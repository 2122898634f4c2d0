"""Stores of the three clouds over a server that answers by a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from opendata_buffer.config import StoreOptions
from opendata_buffer.stores.azure import AzureStore
from opendata_buffer.stores.gcs import GcsStore
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer

LOST = Reply(0)
DATE = "Thu, 01 Jan 2026 00:00:10 GMT"
DATE_MS = 1_767_225_610_000


def s3_error(status: int, code: str, message: str = "") -> Reply:
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>" if code else ""
    return Reply(status, body.encode())


def gcs_error(status: int, code: str, message: str = "") -> Reply:
    error = {"message": message, "errors": [{"reason": code}]}
    return Reply(status, json.dumps({"error": error}).encode())


def azure_error(status: int, code: str, message: str = "") -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}!</Message></Error>"
    headers = {"x-ms-error-code": code, "content-type": "application/xml"}
    return Reply(status, body.encode(), headers)


@dataclass(frozen=True)
class Cloud:
    """The store of a cloud, and responses of its service.

    ``path`` is the path of its endpoint. ``version`` is a valid condition of a write. A proxy
    sends the responses ``unversioned`` and ``garbled``, and ``changed`` refuses a condition.
    ``found`` is an object ``bytes`` of the time ``DATE``.
    """

    scheme: str
    store: type[S3Store | GcsStore | AzureStore]
    path: str
    version: str
    written: Reply
    new_version: str
    version_header: str
    unversioned: Reply
    found: Reply
    checksum: Mapping[str, str]
    error: Callable[..., Reply]
    changed: Reply
    gone: Reply
    no_bucket: Reply
    bucket: str = "bucket"

    def __str__(self) -> str:
        return self.scheme

    @property
    def garbled(self) -> Reply:
        """Return ``found`` with the checksum of other bytes."""
        return replace(self.found, headers={**self.found.headers, **self.checksum})

    def found_as(self, version: str | None) -> Reply:
        """Return ``found`` with another version, or without a version."""
        headers = {**self.found.headers, self.version_header: version}
        kept = {name: value for name, value in headers.items() if value is not None}
        return replace(self.found, headers=kept)

    def open(self, url: str, **options: Any) -> S3Store | GcsStore | AzureStore:
        """Open a store whose service is at ``url``, with a clock that never waits."""
        settings = StoreOptions(endpoint_url=f"{url}{self.path}", **{"max_attempts": 3, **options})
        return self.store("bucket", "root", settings, runtime=ManualRuntime())


S3 = Cloud(
    scheme="s3",
    store=S3Store,
    path="",
    version='"5"',
    written=Reply(200, b"", {"etag": '"7"'}),
    new_version='"7"',
    version_header="etag",
    unversioned=Reply(200),
    found=Reply(200, b"bytes", {"etag": '"7"', "last-modified": DATE}),
    checksum={"x-amz-checksum-crc32": "AAAAAA=="},
    error=s3_error,
    changed=Reply(412),
    gone=s3_error(404, "NoSuchKey"),
    no_bucket=s3_error(404, "NoSuchBucket"),
)

GCS = Cloud(
    scheme="gs",
    store=GcsStore,
    path="",
    version="5",
    written=Reply(200, b'{"generation": "7"}'),
    new_version="7",
    version_header="x-goog-generation",
    unversioned=Reply(200, b"<html>Sign in to the guest network"),
    found=Reply(200, b"bytes", {"x-goog-generation": "7", "last-modified": DATE}),
    checksum={"x-goog-hash": "crc32c=x,md5=Sru+Srk+Sru+Srk+Sru+Sg=="},
    error=gcs_error,
    changed=Reply(412),
    gone=gcs_error(404, "notFound", "No such object: bucket/key"),
    no_bucket=gcs_error(404, "notFound", "The specified bucket does not exist."),
)

AZURE = Cloud(
    scheme="az",
    store=AzureStore,
    path="/testing",
    version='"5"',
    written=Reply(201, b"", {"etag": '"7"', "last-modified": DATE}),
    new_version='"7"',
    version_header="etag",
    unversioned=Reply(201, b"", {"last-modified": DATE}),
    found=Reply(
        206,
        b"bytes",
        {
            "etag": '"7"',
            "last-modified": DATE,
            "x-ms-blob-type": "BlockBlob",
            "content-type": "application/octet-stream",
            "content-range": "bytes 0-4/5",
        },
    ),
    checksum={"x-ms-blob-content-md5": "Sru+Srk+Sru+Srk+Sru+Sg=="},
    error=azure_error,
    changed=azure_error(412, "ConditionNotMet"),
    gone=azure_error(404, "BlobNotFound"),
    no_bucket=azure_error(404, "ContainerNotFound"),
    bucket="container",
)

CLOUDS = (S3, GCS, AZURE)


def notebook_credential(monkeypatch: pytest.MonkeyPatch, found: object) -> list[str]:
    """Make a notebook's ``dbutils`` return this service credential, and record requested names."""
    asked: list[str] = []

    def provider(name: str) -> object:
        asked.append(name)
        return found

    dbutils = SimpleNamespace(credentials=SimpleNamespace(getServiceCredentialsProvider=provider))
    monkeypatch.setattr(sys.modules["__main__"], "dbutils", dbutils, raising=False)
    return asked


Script = Callable[..., tuple[Any, ScriptedServer]]
"""The type of functions that open a store over a service with scripted responses."""


def scripted(cloud: Cloud, running: ExitStack) -> Script:
    """Return a function that opens scripted stores. Their services run until the stack closes."""

    def make(*replies: Reply, **options: Any) -> tuple[Any, ScriptedServer]:
        server = ScriptedServer(*replies)
        return cloud.open(running.enter_context(server.running()), **options), server

    return make
