"""moto's S3 over HTTP, one request at a time, so that conditions also hold in a race.

moto compares ``If-Match`` and then writes, in one thread per request. If two writers arrive
together, the second one overwrites the first one's write although that was confirmed. S3 does not
do that, so a lock closes the gap here::

    with MotoServer() as endpoint:
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="flights")
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def one_by_one(application: Application) -> Application:
    """Return a WSGI application that answers a request before it begins the next one."""
    lock = threading.Lock()

    def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with lock:
            return list(application(environ, start_response))

    return call


class MotoServer:
    """moto's server in a thread of this process, on a free port; needs ``moto[server]``."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server(
            "127.0.0.1",
            0,
            one_by_one(DomainDispatcherApplication(create_backend_app)),
            threaded=True,
            request_handler=MotoRequestHandler,
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
