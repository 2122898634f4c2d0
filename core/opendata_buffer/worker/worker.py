"""A worker: claims batches, works on them, says how it went.

Several workers share one queue: each batch is handed to one of them, oldest first, and to
another one when it is released or its worker falls silent. What Kafka calls a share group, and
SQS a visibility timeout. A batch is done at least once; twice only after a claim lapsed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

from opendata_buffer.broker.client import ChannelClosed, Connection, Lost, Refused
from opendata_buffer.broker.host import Host
from opendata_buffer.broker.lease import Lease
from opendata_buffer.broker.messages import parse_metadata
from opendata_buffer.broker.network import (
    Network,
    WebSocketNetwork,
    listen_for,
    require_websockets,
)
from opendata_buffer.broker.wire import ProtocolError
from opendata_buffer.config import WorkerConfig
from opendata_buffer.consumer.descriptors import BatchDescriptor
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.errors import (
    ClaimLost,
    Closed,
    CorruptData,
    InvalidInput,
    PoisonBatch,
    StorageError,
    TransientStorageError,
)
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores import Store
from opendata_buffer.stores.factory import open_store

__all__ = ["ClaimedBatch", "Worker"]

log = logging.getLogger(__name__)

WAIT_S = 20.0
"""One claim waits at the broker no longer; a worker that waits longer claims again."""

LOOK_S = 0.25
"""Between two looks for a broker."""

BEATS_PER_CLAIM = 4
"""Heartbeats within one ``claim_timeout_ms``: three may be lost before the claim is."""


class ClaimedBatch:
    """A batch that is this worker's until it says how it went, or falls silent.

    Attributes:
        sequence: Its position in the queue.
        location: Key of its object.
        entries: Its records.
        metadata: Ranges of records with their ingestion time and payload.
        delivery_count: How often it was handed out, this time included.
    """

    def __init__(
        self, worker: Worker, descriptor: BatchDescriptor, token: int, delivery_count: int
    ) -> None:
        self._worker = worker
        self._token = token
        self._over = False
        self.sequence = descriptor.sequence
        self.location = descriptor.location
        self.metadata: tuple[Metadata, ...] = descriptor.metadata
        self.delivery_count = delivery_count
        self.entries: Sequence[bytes] = ()

    def done(self) -> None:
        """It is worked off and leaves the queue; kept by storage when this returns.

        Raises:
            ClaimLost: The claim had lapsed: another worker got or gets the batch, too.
            TransientStorageError: Nobody knows yet; call it again.
        """
        self._finish("done")

    def release(self, rest_ms: int = 0) -> None:
        """Give it back, to be handed out again, not before ``rest_ms`` milliseconds from now.

        Raises:
            ClaimLost: The claim had lapsed.
            TransientStorageError: Nobody knows yet; call it again, or let the claim lapse.
        """
        self._finish("release", rest_ms=rest_ms)

    def reject(self, reason: str) -> None:
        """Nobody can work on it: copy it to the quarantine, with the reason, and pass it by.

        Raises:
            ClaimLost: The claim had lapsed.
            TransientStorageError: Nobody knows yet; call it again.
        """
        self._finish("reject", reason=reason)

    def _finish(self, how: str, *, reason: str = "", rest_ms: int = 0) -> None:
        if self._over:
            return
        self._worker._finish(self.sequence, self._token, how, reason, rest_ms)
        self._over = True


class Worker:
    """One of the workers of a queue. Thread-safe, not fork-safe.

    Args:
        config: Settings.
        store: Use this store instead of opening ``config.store``.
        runtime: Clock and threads; the system's by default.
        network: How brokers are reached; WebSockets by default.

    Raises:
        InvalidInput: A setting or the URL is wrong, or the extra ``broker`` is not installed.
        StorageError: The store cannot be reached.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        store: Store | None = None,
        runtime: Runtime | None = None,
        network: Network | None = None,
    ) -> None:
        self._config = config
        self._runtime = runtime or SystemRuntime()
        self._store = store or open_store(config.store, config.store_options)
        if network is None:
            require_websockets()
            network = WebSocketNetwork(self._runtime, listen_for(self._store))
        self._network = network
        self._fetch = FetchHandle.of(config, store=self._store, runtime=self._runtime)
        self._lease = Lease(self._store, config, self._runtime)
        self.name = (
            config.name or f"{os.uname().nodename}-{os.getpid()}-{self._runtime.ulid()[-6:]}"
        )
        self._condition = self._runtime.condition()
        self._looking = False
        self._connection: Connection | None = None
        self._tokens: dict[int, int] = {}
        self._closed = False
        self._host = None
        if config.broker == "host":
            self._host = Host(
                self._store,
                config,
                self._runtime,
                self._network.listen,
                self._network.connect,
                secrets.token_bytes,
            )
        self._beating = self._runtime.spawn(self._beat, "opendata-buffer-worker")

    def claim(self, max: int = 1, timeout: float | None = None) -> list[ClaimedBatch]:  # noqa: A002
        """The oldest batches that nobody works on, fetched.

        A batch that cannot be read goes to the quarantine, and another one takes its place.

        Args:
            max: Batches, at most; fewer when fewer are there.
            timeout: Seconds to wait for a first one; None waits until there is one.

        Returns:
            Empty when none came in time.

        Raises:
            Fenced: Another consumer took the queue.
            TransientStorageError: No broker could be reached within ``cas_deadline_ms``.
            Closed: The worker was closed.
        """
        if max < 1:
            raise InvalidInput(f"max is {max!r}: use a whole number of at least 1")
        deadline = None if timeout is None else self._runtime.monotonic() + timeout
        while True:
            left = WAIT_S if deadline is None else deadline - self._runtime.monotonic()
            reply = self._ask(
                {
                    "op": "claim",
                    "max": max,
                    "wait_ms": int(min(WAIT_S, 0.0 if left < 0 else left) * 1000),
                    "worker": self.name,
                    "timeout_ms": self._config.claim_timeout_ms,
                    "max_deliveries": self._config.max_deliveries,
                }
            )
            batches = self._claimed(reply)
            if batches or (deadline is not None and self._runtime.monotonic() >= deadline):
                return batches

    def close(self, timeout: float | None = 10.0) -> None:
        """Give back what is claimed, and end. A second call does nothing."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            tokens = dict(self._tokens)
            connection, self._connection = self._connection, None
            self._condition.notify_all()
        if connection is not None:
            for token, sequence in tokens.items():
                connection.tell(_finish_body(sequence, token, "release", "", 0))
            connection.close()
        if self._host is not None:
            self._host.stop(timeout)
        self._beating.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aiter__(self) -> AsyncIterator[ClaimedBatch]:
        """Batch after batch, without blocking the loop; ``await asyncio.to_thread(batch.done)``."""
        while not self._closed:
            try:
                batches = await asyncio.to_thread(self.claim, 1, 1.0)
            except Closed:
                return
            for batch in batches:
                yield batch

    def _claimed(self, reply: dict[str, Any]) -> list[ClaimedBatch]:
        batches = []
        for each in reply["batches"]:
            descriptor = BatchDescriptor(
                each["sequence"], each["location"], parse_metadata(each["metadata"])
            )
            with self._condition:
                self._tokens[each["token"]] = descriptor.sequence
            batch = ClaimedBatch(self, descriptor, each["token"], each["deliveries"])
            try:
                batch.entries = self._fetch.fetch(descriptor).entries
            except PoisonBatch as error:
                batch.reject(str(error))
                continue
            batches.append(batch)
        return batches

    def _finish(self, sequence: int, token: int, how: str, reason: str, rest_ms: int) -> None:
        try:
            self._ask(_finish_body(sequence, token, how, reason, rest_ms), again=False)
        except ClaimLost:
            self._drop(token)
            raise
        self._drop(token)

    def _drop(self, token: int) -> None:
        with self._condition:
            self._tokens.pop(token, None)

    def _ask(self, body: dict[str, Any], *, again: bool = True) -> dict[str, Any]:
        """Ask the broker, or the next one.

        Args:
            body: The request. It is repeated when its answer is lost: a claim that nobody heard
                of lapses by itself.
            again: False for the end of a claim, whose repeat reads as a lost claim when the
                first attempt has landed.
        """
        began = self._runtime.monotonic()
        deadline = began + self._config.cas_deadline_ms / 1000
        lapses = began + self._config.claim_timeout_ms / 1000
        asked = False
        while True:
            connection = self._find(deadline)
            try:
                reply = connection.ask(body)
            except ClaimLost:
                if asked and not again and self._runtime.monotonic() < lapses:
                    return {}  # Too early to have lapsed: the first attempt has landed.
                raise
            match reply:
                case Lost():
                    asked = True
                case Refused("unsent" | "moved"):
                    pass
                case Refused():
                    self._runtime.sleep(LOOK_S)
                    continue
                case _:
                    return reply
            self._forget(connection)

    def _find(self, deadline: float) -> Connection:
        while True:
            with self._condition:
                while self._looking and not self._closed:
                    self._condition.wait()
                if self._closed:
                    raise Closed("the worker was closed: claim() needs an open one")
                if self._connection is not None and not self._connection.is_over:
                    return self._connection
                self._looking = True
            reason = "none is announced; start one, or use broker='host'"
            connection = None
            try:
                announcement = self._lease.read()
                if announcement is not None and announcement.serves:
                    connection = self._network.connect(announcement)
            except (ChannelClosed, ProtocolError, CorruptData, StorageError) as error:
                reason = str(error)
            finally:
                with self._condition:
                    self._looking = False
                    self._connection = connection
                    self._condition.notify_all()
            if connection is not None:
                return connection
            if self._runtime.monotonic() >= deadline:
                raise TransientStorageError(
                    f"no broker of {self._store.url} hands out batches: {reason}. Try again."
                )
            self._runtime.sleep(LOOK_S)

    def _forget(self, connection: Connection) -> None:
        connection.close()
        with self._condition:
            if self._connection is connection:
                self._connection = None

    def _beat(self) -> None:
        every = self._config.claim_timeout_ms / 1000 / BEATS_PER_CLAIM
        while True:
            with self._condition:
                if self._closed:
                    return
                self._condition.wait(every)
                tokens = list(self._tokens)
                connection = self._connection
            if not tokens:
                continue
            try:
                if connection is None or connection.is_over:
                    connection = self._find(self._runtime.monotonic())
                connection.tell({"op": "beat", "tokens": tokens})
            except (Closed, TransientStorageError, ProtocolError) as error:
                log.debug("a heartbeat was not sent: %s", error)


def _finish_body(sequence: int, token: int, how: str, reason: str, rest_ms: int) -> dict[str, Any]:
    return {
        "op": "finish",
        "n": 0,
        "how": how,
        "sequence": sequence,
        "token": token,
        "reason": reason,
        "rest_ms": rest_ms,
    }
