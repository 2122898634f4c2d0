"""Stores over a server that answers by a script: what the tests of GCS and Azure have in common."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from opendata_buffer.config import StoreOptions
from opendata_buffer.stores.azure import AzureStore
from opendata_buffer.stores.gcs import GcsStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.http_scripts import Reply, ScriptedServer

LOST = Reply(0)
AZURE_DATE = "Thu, 01 Jan 2026 00:00:10 GMT"


def azure_error(status: int, code: str) -> Reply:
    """Azure names its errors in a header."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}!</Message></Error>"
    headers = {"x-ms-error-code": code, "content-type": "application/xml"}
    return Reply(status, body.encode(), headers)


@dataclass(frozen=True)
class Cloud:
    """A cloud's store and the answers of its service.

    Attributes:
        scheme: Of its URLs.
        store: Its class.
        path: Of its endpoint.
        version: What a conditional write may name, before ``written``.
        written: To a write; the version is ``new_version``.
        new_version: Of that answer and of ``found``.
        unversioned: To a write, by a proxy that leaves the version out.
        found: To a read: ``bytes``, written at ``found_ms``.
        found_ms: Milliseconds since 1970.
        garbled: To a read, with the checksum of other bytes.
        failed: The service fails; whether a write was applied, nobody knows.
        last_failed: What is said of the last of these.
        changed: To a conditional write: the object is another one.
        there: To the look after that: there is one.
        gone: There is no such object.
        no_bucket: There is nothing to keep objects in.
        what_to_make: What the error says to that.
        look: How it is looked whether an object is there.
        long_key: What is said of one.
        refused_option: One of S3, with a value.
    """

    scheme: str
    store: type[GcsStore] | type[AzureStore]
    path: str
    version: str
    written: Reply
    new_version: str
    unversioned: Reply
    found: Reply
    found_ms: int
    garbled: Reply
    failed: tuple[Reply, ...]
    last_failed: str
    changed: Reply
    there: Reply
    gone: Reply
    no_bucket: Reply
    what_to_make: str
    look: tuple[str, str]
    long_key: str
    refused_option: tuple[str, str]

    def __str__(self) -> str:
        return self.scheme

    def open(self, url: str, **options: Any) -> GcsStore | AzureStore:
        """A store whose service is at ``url``; nothing waits."""
        settings = StoreOptions(endpoint_url=f"{url}{self.path}", **{"max_attempts": 3, **options})
        return self.store("bucket", "root", settings, runtime=ManualRuntime())


GCS = Cloud(
    scheme="gs",
    store=GcsStore,
    path="",
    version="5",
    written=Reply(200, b'{"generation": "7"}'),
    new_version="7",
    unversioned=Reply(200),
    found=Reply(200, b"bytes", {"x-goog-generation": "7"}),
    found_ms=0,
    garbled=Reply(
        200,
        b"garbled",
        {"x-goog-generation": "7", "x-goog-hash": "crc32c=x,md5=Sru+Srk+Sru+Srk+Sru+Sg=="},
    ),
    failed=(Reply(500), Reply(503)),
    last_failed="503.*The store failed; try again later",
    changed=Reply(412),
    there=Reply(200, b"bytes", {"x-goog-generation": "7"}),
    gone=Reply(404, b'{"error": {"message": "No such object: bucket/key"}}'),
    no_bucket=Reply(
        404,
        b'{"error": {"message": "The specified bucket does not exist.",'
        b' "errors": [{"reason": "notFound"}]}}',
    ),
    what_to_make="Create bucket 'bucket'",
    look=("POST", "GET"),
    long_key="GCS names have at most 1024",
    refused_option=("region", "eu"),
)

_FOUND = {
    "etag": '"7"',
    "last-modified": AZURE_DATE,
    "x-ms-blob-type": "BlockBlob",
    "content-type": "application/octet-stream",
    "content-range": "bytes 0-4/5",
}

AZURE = Cloud(
    scheme="az",
    store=AzureStore,
    path="/testing",
    version='"5"',
    written=Reply(201, b"", {"etag": '"7"', "last-modified": AZURE_DATE}),
    new_version='"7"',
    unversioned=Reply(201, b"", {"last-modified": AZURE_DATE}),
    found=Reply(206, b"bytes", _FOUND),
    found_ms=1_767_225_610_000,
    garbled=Reply(206, b"bites", {**_FOUND, "x-ms-blob-content-md5": "SzpiGLs+OnMD6KFxpg/Pkg=="}),
    failed=(azure_error(500, "InternalError"), azure_error(503, "ServerBusy")),
    last_failed="503 ServerBusy.*try again later",
    changed=azure_error(412, "ConditionNotMet"),
    there=Reply(200, b"", {**_FOUND, "content-length": "5"}),
    gone=azure_error(404, "BlobNotFound"),
    no_bucket=azure_error(404, "ContainerNotFound"),
    what_to_make="Create container 'bucket'",
    look=("PUT", "HEAD"),
    long_key="at most 1024",
    refused_option=("profile", "p"),
)

CLOUDS = (GCS, AZURE)

Script = Callable[..., tuple[Any, ScriptedServer]]
"""Makes a store whose service gives these answers; and that service."""


def scripted(cloud: Cloud, running: ExitStack) -> Script:
    """The service runs until the stack is closed."""

    def make(*replies: Reply, **options: Any) -> tuple[Any, ScriptedServer]:
        server = ScriptedServer(*replies)
        return cloud.open(running.enter_context(server.running()), **options), server

    return make
