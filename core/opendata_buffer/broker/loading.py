"""Loads all of websockets at once.

A process that hosts a broker dials from one thread while it opens its port in another: both want
modules of one package at the same moment.
"""

from __future__ import annotations

from opendata_buffer.late import late_imports

__all__ = ["load_websockets"]


def load_websockets() -> None:
    """Import all that websockets and the connections through it use; cheap when it is done.

    Raises:
        ImportError: The extra ``broker`` is not installed.
    """
    with late_imports():
        # The standard library imports the codec of host names when the first one is looked up.
        import encodings.idna  # noqa: F401

        import websockets.asyncio.server
        import websockets.exceptions
        import websockets.sync.client  # noqa: F401
