"""Loads the package websockets, one thread at a time.

A process that hosts a broker dials from one thread while it opens its port in another. Two
threads that import modules of one package at the same moment can each see the other's half
loaded, and fail with an ImportError.
"""

from __future__ import annotations

import os
import threading

__all__ = ["load_websockets"]


class _Loading:
    lock = threading.Lock()


def _renew() -> None:
    # A child that was forked while another thread loads would wait for ever.
    _Loading.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def load_websockets() -> None:
    """Import all of websockets that is used here; cheap when it is done already.

    Raises:
        ImportError: The extra ``broker`` is not installed.
    """
    with _Loading.lock:
        import websockets.asyncio.server
        import websockets.exceptions
        import websockets.sync.client  # noqa: F401
