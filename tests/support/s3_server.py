"""A small S3 over HTTP whose answers can be lost, delayed, or corrupted on purpose.

::

    with S3Server() as server:
        store = S3Store(server.bucket, options=StoreOptions(endpoint_url=server.endpoint))
        server.inject(Fault(Answer.CLOSE), method="PUT")
        store.put_if("key", b"bytes", None)  # Unknown: applied, but without an answer

Signatures are not checked, but boto3 needs some credentials to make them.
"""

from __future__ import annotations

import base64
import hashlib
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import formatdate
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote_plus, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from opendata_buffer.runtime import SystemRuntime

_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_HANG_S = 60.0


class Answer(Enum):
    """The answer to a faulty request, if it is not an HTTP status."""

    CLOSE = "the connection is closed without an answer"
    RESET = "the connection is reset"
    HANG = "there is no answer until the server stops"
    TRUNCATE = "the body breaks off after half of it"
    CORRUPT = "one bit of the body is flipped"


@dataclass(frozen=True, slots=True)
class Fault:
    """An HTTP status with S3's ``code``, or an :class:`Answer`; it may be ``applied``."""

    answer: int | Answer
    applied: bool = True
    code: str = "InternalError"


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    modified_ms: int
    crc32: str


@dataclass(slots=True)
class _Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class S3Server:
    """The server; a context manager that listens on a free port of 127.0.0.1.

    It has one bucket. Stores that only look like S3 ignore conditions: the ``ignored_conditions``
    are ``if-match``, ``if-none-match`` or both (failure F12).
    """

    def __init__(
        self,
        bucket: str = "bucket",
        *,
        now_ms: Callable[[], int] | None = None,
        page_size: int = 1_000,
        ignored_conditions: frozenset[str] = frozenset(),
    ) -> None:
        self.bucket = bucket
        self.page_size = page_size
        self.is_directory = bucket.endswith("--x-s3")
        self.ignored_conditions = ignored_conditions
        self.requests: list[Request] = []
        self._now_ms = now_ms if now_ms is not None else SystemRuntime().now_ms
        self._objects: dict[str, _Object] = {}
        self._faults: list[tuple[str, str, str, Fault]] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        server = self

        class Handler(_Handler):
            s3 = server

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def __enter__(self) -> S3Server:
        self._thread = SystemRuntime().spawn(
            lambda: self._http.serve_forever(poll_interval=0.01), "s3-server"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def flip(self, key: str, at: int = 0) -> None:
        """Flip one bit of a stored object, as a disk might. Its checksum stays."""
        found = self._objects[key]
        data = bytes([*found.data[:at], found.data[at] ^ 1, *found.data[at + 1 :]])
        self._objects[key] = replace(found, data=data)

    def inject(
        self, fault: Fault, *, method: str = "PUT", key: str = "", ends: str = "", times: int = 1
    ) -> None:
        """Let the next ``times`` requests fail whose key contains ``key`` and ends with ``ends``.

        For example, ``manifest`` matches the manifest but not the probes next to it.
        """
        with self._lock:
            self._faults.extend([(method, key, ends, fault)] * times)

    def objects(self) -> dict[str, bytes]:
        """The stored objects, by key."""
        with self._lock:
            return {key: found.data for key, found in self._objects.items()}

    def count(self, method: str) -> int:
        """Return the number of requests with this method so far."""
        with self._lock:
            return sum(request.method == method for request in self.requests)

    # ---- called by the handler

    def _arrived(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for position, (method, key, ends, fault) in enumerate(self._faults):
                if method != request.method:
                    continue
                if key in request.key and request.key.endswith(ends):
                    del self._faults[position]
                    return fault
        return None

    def _serve(self, request: Request, bucket: str, body: bytes) -> _Reply:
        if bucket != self.bucket:
            return _error(404, "NoSuchBucket")
        with self._lock:
            if request.method == "PUT":
                return self._put(request, body)
            if request.method == "DELETE":
                self._objects.pop(request.key, None)
                return _Reply(204)
            if request.method == "POST" and "delete" in request.query:
                return self._delete_many(body)
            if request.method in ("GET", "HEAD") and request.key:
                return self._get(request)
            if "session" in request.query and self.is_directory:
                return _Reply(200, _SESSION, {"Content-Type": "application/xml"})
            if request.method == "GET" and request.query.get("list-type") == ["2"]:
                return self._list(request)
        return _error(501, "NotImplemented")

    def _put(self, request: Request, body: bytes) -> _Reply:
        found = self._objects.get(request.key)
        matches, none_match = self._conditions(request)
        if matches is not None:
            if found is None:
                return _error(404, "NoSuchKey")
            if found.etag != matches:
                return _error(412, "PreconditionFailed")
        if none_match == "*" and found is not None:
            return _error(412, "PreconditionFailed")
        sent = request.headers.get("x-amz-checksum-crc32")
        if sent is not None and sent != _crc32(body):
            return _error(400, "BadDigest")
        etag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        self._objects[request.key] = _Object(body, etag, self._now_ms(), _crc32(body))
        return _Reply(200, headers={"ETag": etag})

    def _get(self, request: Request) -> _Reply:
        found = self._objects.get(request.key)
        if found is None:
            return _error(404, "NoSuchKey")
        headers = {
            "ETag": found.etag,
            "Last-Modified": formatdate(found.modified_ms / 1000, usegmt=True),
        }
        _, none_match = self._conditions(request)
        if none_match == found.etag:
            return _Reply(304, headers=headers)
        asked = request.headers.get("range")
        if asked is None:
            if request.headers.get("x-amz-checksum-mode") == "ENABLED":
                headers["x-amz-checksum-crc32"] = found.crc32
            return _Reply(200, found.data, headers)
        first, last = (int(part) for part in asked.removeprefix("bytes=").split("-"))
        if first >= len(found.data):
            return _error(416, "InvalidRange")
        part = found.data[first : last + 1]
        end = first + len(part) - 1
        headers["Content-Range"] = f"bytes {first}-{end}/{len(found.data)}"
        return _Reply(206, part, headers)

    def _conditions(self, request: Request) -> tuple[str | None, str | None]:
        names = ("if-match", "if-none-match")
        matches, none_match = (
            None if name in self.ignored_conditions else request.headers.get(name) for name in names
        )
        return matches, none_match

    def _list(self, request: Request) -> _Reply:
        (prefix,) = request.query.get("prefix", [""])
        (after,) = request.query.get("start-after", [""])
        (after,) = request.query.get("continuation-token", [after])
        (most,) = request.query.get("max-keys", ["1000"])
        found = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
        if self.is_directory:  # as S3 Express: any order, and only whole folders
            if not f"/{prefix}".endswith("/") or "start-after" in request.query:
                return _error(400, "InvalidRequest")
            found = sorted(
                (key for key in self._objects if key.startswith(prefix)),
                key=lambda key: zlib.crc32(key.encode()),
            )
            found = found[found.index(after) + 1 if after else 0 :]
        size = min(int(most), self.page_size)
        page, more = found[:size], len(found) > size
        items = "".join(
            f"<Contents><Key>{quote_plus(key, safe='/')}</Key>"
            f"<LastModified>{_iso(self._objects[key].modified_ms)}</LastModified>"
            f"<ETag>{escape(self._objects[key].etag)}</ETag>"
            f"<Size>{len(self._objects[key].data)}</Size></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        body = (
            f'{_XML}<ListBucketResult xmlns="{_NAMESPACE}"><EncodingType>url</EncodingType>'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{items}</ListBucketResult>"
        )
        return _Reply(200, body.encode(), {"Content-Type": "application/xml"})

    def _delete_many(self, body: bytes) -> _Reply:
        for item in ElementTree.fromstring(body).iter(f"{{{_NAMESPACE}}}Key"):
            self._objects.pop(item.text or "", None)
        answer = f'{_XML}<DeleteResult xmlns="{_NAMESPACE}"/>'
        return _Reply(200, answer.encode(), {"Content-Type": "application/xml"})


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    s3: S3Server
    protocol_version = "HTTP/1.1"
    # Otherwise each body waits 40 ms until the preceding headers are acknowledged.
    disable_nagle_algorithm = True

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = urlsplit(self.path)
        bucket, _, key = parts.path.removeprefix("/").partition("/")
        request = Request(
            self.command,
            unquote(key),
            parse_qs(parts.query, keep_blank_values=True),
            {name.lower(): value for name, value in self.headers.items()},
        )
        fault = self.s3._arrived(request)
        if fault is None:
            self._reply(self.s3._serve(request, unquote(bucket), body))
            return
        reply = _Reply(500)
        if fault.applied:
            reply = self.s3._serve(request, unquote(bucket), body)
        self._spoil(fault, reply)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle  # noqa: N815

    def _spoil(self, fault: Fault, reply: _Reply) -> None:
        if isinstance(fault.answer, int):
            self._reply(_error(fault.answer, fault.code))
        elif fault.answer is Answer.CORRUPT:
            reply.body = bytes([reply.body[0] ^ 1]) + reply.body[1:]
            self._reply(reply)
        elif fault.answer is Answer.TRUNCATE:
            self._reply(reply, sent=len(reply.body) // 2)
        else:
            if fault.answer is Answer.HANG:
                self.s3._stopped.wait(_HANG_S)
            if fault.answer is Answer.RESET:
                # Lingering for zero seconds makes close() send RST instead of FIN.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.rfile.close()
        if not self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _reply(self, reply: _Reply, sent: int | None = None) -> None:
        self.send_response_only(reply.status)
        self.send_header("Date", formatdate(self.s3._now_ms() / 1000, usegmt=True))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.status not in (204, 304):
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD" and reply.status not in (204, 304):
            self.wfile.write(reply.body if sent is None else reply.body[:sent])
        if sent is not None:
            self._hang_up()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing, because requests are in :attr:`S3Server.requests`."""


_SESSION = (
    f'{_XML}<CreateSessionResult xmlns="{_NAMESPACE}"><Credentials><SessionToken>t</SessionToken>'
    "<SecretAccessKey>s</SecretAccessKey><AccessKeyId>a</AccessKeyId>"
    "<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
).encode()


def _crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def _iso(milliseconds: int) -> str:
    when = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return when.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _error(status: int, code: str) -> _Reply:
    body = f"{_XML}<Error><Code>{code}</Code><Message>From the test server.</Message></Error>"
    return _Reply(status, body.encode(), {"Content-Type": "application/xml"})
