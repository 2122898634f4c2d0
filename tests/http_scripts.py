"""HTTP servers for tests: one answers by a script, the other one loses answers."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Reply:
    """An answer. Status 0 closes the connection without an answer."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A request that arrived."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class _Server:
    """A server on a free port."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        """All requests, in order of arrival."""
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self) -> None:
                if self.headers.get("transfer-encoding") == "chunked":
                    raise AssertionError("a body of unknown length")
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(self.command, self.path, headers, body)
                reply = owner.answer(asked)
                self.close_connection = reply.status == 0
                if reply.status == 0:
                    return
                self.send_response_only(reply.status)
                sent = {"content-length": str(len(reply.body)), **reply.headers}
                if "transfer-encoding" in sent:
                    del sent["content-length"]
                for name, value in sent.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one  # noqa: N815

            def log_message(self, *args: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def answer(self, asked: Asked) -> Reply:
        raise NotImplementedError

    @contextmanager
    def running(self) -> Iterator[str]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self.url
        finally:
            self._http.shutdown()
            thread.join()
            self._http.server_close()


class ScriptedServer(_Server):
    """A server that answers with ``replies``, in order, and then repeats the last one."""

    def __init__(self, *replies: Reply) -> None:
        super().__init__()
        self.replies = list(replies)

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


class FaultProxy(_Server):
    """A proxy that passes requests on to a server and can lose answers."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = urlsplit(target).netloc
        self._lost: set[str] = set()

    def lose(self, *methods: str) -> None:
        """Lose every answer to these methods from now on. The requests still take effect."""
        self._lost = set(methods)

    def answer(self, asked: Asked) -> Reply:
        return self.passed_on(asked)

    def passed_on(self, asked: Asked) -> Reply:
        """Pass a request on, and return the answer of the target."""
        connection = http.client.HTTPConnection(self._target, timeout=30)
        connection.putrequest(asked.method, asked.path, skip_host=True, skip_accept_encoding=True)
        for name, value in asked.headers.items():
            connection.putheader(name, value)
        connection.endheaders(asked.body or None)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        self.asked.append(asked)
        if asked.method in self._lost:
            return Reply(0)
        kept = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "keep-alive", "transfer-encoding")
            and not (name.lower() == "content-length" and asked.method != "HEAD")
        }
        return Reply(answer.status, body, kept)
