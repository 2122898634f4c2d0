"""moto's S3 over HTTP, one request at a time: a store whose conditions hold under a race.

moto compares ``If-Match`` and writes in two steps, in a thread per request. Two writers that
arrive together both pass the comparison, and the second overwrites what the first was told is
written: a compare-and-swap that is none. S3 has no such gap, so here a lock closes it::

    with MotoServer() as endpoint:
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="flights")
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class CallLock:
    """A WSGI application that answers a request before it looks at the next one."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._lock = threading.Lock()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """The whole answer, made while the lock is held."""
        with self._lock:
            return list(self._application(environ, start_response))


class MotoServer:
    """moto's server in a thread of this process; needs ``moto[server]``.

    Args:
        host: Where it listens, on a free port.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server(
            host,
            0,
            CallLock(DomainDispatcherApplication(create_backend_app)),
            threaded=True,
            request_handler=MotoRequestHandler,
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        """``http://host:port``."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> str:
        self._thread.start()
        return self.endpoint

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
