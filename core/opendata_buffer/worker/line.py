"""A worker's line to whichever broker hands out batches now."""

from __future__ import annotations

from typing import Any

from opendata_buffer.broker.calls import Lost, Refused
from opendata_buffer.broker.client import Connection
from opendata_buffer.broker.finder import Finder
from opendata_buffer.errors import Closed, Fenced, TransientStorageError
from opendata_buffer.runtime import Runtime
from opendata_buffer.worker.claim import Claim

__all__ = ["LOOK_S", "Line"]

LOOK_S = 0.25
"""Between two looks for a broker."""


class Line:
    """Asks the broker that is announced; when it is gone or replaced, the next one.

    Args:
        finder: Finds brokers, and connects.
        runtime: Clock.
        patience_s: Seconds without any broker after which asking is given up.
        url: The store's, for errors.
    """

    def __init__(self, finder: Finder, runtime: Runtime, patience_s: float, url: str) -> None:
        self._finder = finder
        self._runtime = runtime
        self._patience_s = patience_s
        self._url = url
        self._closed = False

    @property
    def connection(self) -> Connection | None:
        """The one in use; None while there is none."""
        return self._finder.connection

    def forget(self, connection: Connection) -> None:
        """Its broker is the wrong one, or gone: the next call finds another."""
        self._finder.forget(connection)

    def close(self) -> Connection | None:
        """Ask nobody any more; returns the connection in use, for last words."""
        self._closed = True
        return self._finder.close()

    def ask(self, body: dict[str, Any], claim: Claim | None = None) -> dict[str, Any]:
        """What the broker, or the next one, answers.

        Args:
            body: The request. It is repeated when its answer is lost: a claim that nobody heard
                of lapses by itself.
            claim: Which one it is to end; notes that an attempt may have been stored.

        Raises:
            Fenced: Another consumer took the queue.
            TransientStorageError: No broker answered in time.
            Closed: It was closed meanwhile.
        """
        limit_s = self._patience_s + body.get("wait_ms", 0) / 1000
        deadline = self._runtime.monotonic() + limit_s
        while True:
            connection = self.find(min(deadline, self._runtime.monotonic() + self._patience_s))
            try:
                reply = connection.ask(body)
            except (TransientStorageError, Fenced):
                # Fenced, too: the write may have landed before, and its answer been lost.
                if claim is not None:
                    claim.asked = True
                raise
            match reply:
                case Lost():
                    if claim is not None:
                        claim.asked = True
                    self._finder.forget(connection)
                case Refused(why):
                    if claim is not None and why != "unsent":
                        claim.asked = True
                    if why in ("unsent", "moved"):
                        self._finder.forget(connection)
                    if why != "unsent":
                        self._runtime.sleep(LOOK_S)
                case _:
                    return reply
            if self._runtime.monotonic() >= deadline:
                raise TransientStorageError(
                    f"no broker of {self._url} answered within {limit_s:g} s. Try again."
                )

    def find(self, deadline: float) -> Connection:
        """A connection to the broker that is announced.

        Args:
            deadline: Until when it is looked for, monotonic seconds; once in any case.

        Raises:
            TransientStorageError: There was none.
            Closed: It was closed meanwhile.
        """
        while True:
            connection = self._finder.find()
            if self._closed:
                raise Closed("the worker was closed: claim() needs an open one")
            if connection is not None:
                return connection
            if self._runtime.monotonic() >= deadline:
                raise TransientStorageError(
                    f"no broker of {self._url} hands out batches: {self._finder.reason}. Try again."
                )
            self._runtime.sleep(LOOK_S)
