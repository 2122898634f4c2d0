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
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from opendata_buffer.broker.client import Connection, Lost, Refused
from opendata_buffer.broker.finder import Finder
from opendata_buffer.broker.host import Host
from opendata_buffer.broker.messages import parse_metadata
from opendata_buffer.broker.network import (
    Network,
    WebSocketNetwork,
    listen_for,
    require_websockets,
)
from opendata_buffer.broker.requests import MAX_REASON_CHARS
from opendata_buffer.config import WorkerConfig
from opendata_buffer.consumer.descriptors import BatchDescriptor, PooledBatch
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.consumer.read_ahead import read_ahead
from opendata_buffer.errors import (
    ClaimLost,
    Closed,
    Fenced,
    InvalidInput,
    OpenDataBufferError,
    PoisonBatch,
    TransientStorageError,
)
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.runtime import Moment, Runtime, SystemRuntime
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
        self,
        worker: Worker,
        descriptor: BatchDescriptor,
        token: int,
        delivery_count: int,
        claimed: Moment,
    ) -> None:
        self._worker = worker
        self._token = token
        self._over = False
        self._asked = False
        self._beaten = claimed
        self.sequence = descriptor.sequence
        self.location = descriptor.location
        self.metadata: tuple[Metadata, ...] = descriptor.metadata
        self.delivery_count = delivery_count
        self.entries: Sequence[bytes] = ()

    def done(self) -> None:
        """It is worked off and leaves the queue; kept by storage when this returns.

        Raises:
            ClaimLost: The claim had lapsed: another worker got or gets the batch, too. Or nobody
                can tell, because no broker answered for as long as a claim lasts.
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
        self._worker._finish(self, how, reason, rest_ms)
        self._over = True


class Worker:
    """One of the workers of a queue. Thread-safe, not fork-safe.

    It knows nothing of transactions: on a partition of a topic it is handed the batches of
    undecided and of rolled back ones as any others, and their acknowledgements as empty batches.

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
        self._pid = os.getpid()
        self._runtime = runtime or SystemRuntime()
        self._store = store or open_store(config.store, config.store_options)
        if network is None:
            require_websockets()
            network = WebSocketNetwork(self._runtime, listen_for(self._store))
        self._network = network
        self._fetch = FetchHandle.of(config, store=self._store, runtime=self._runtime)
        self._pace = self._fetch.pace()
        self._finder = Finder(self._store, config, self._runtime, network.connect)
        self.name = (
            config.name or f"{os.uname().nodename}-{os.getpid()}-{self._runtime.ulid()[-6:]}"
        )
        self._condition = self._runtime.condition()
        self._tokens: dict[int, int] = {}
        # Weak: a batch that its user dropped without a word must not be kept by heartbeats for
        # ever. The next one gives it back.
        self._batches: WeakValueDictionary[int, ClaimedBatch] = WeakValueDictionary()
        self._closed = False
        self._beat_again = False
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
            Closed: The worker was closed, or made before this process was forked.
        """
        if max < 1:
            raise InvalidInput(f"max is {max!r}: use a whole number of at least 1")
        deadline = None if timeout is None else self._runtime.monotonic() + timeout
        while True:
            # Half of a claim's time: the claim counts from when it was asked for.
            left = min(WAIT_S, self._config.claim_timeout_ms / 2000)
            if deadline is not None:
                left = min(left, deadline - self._runtime.monotonic())
            asked = Moment.now(self._runtime)
            reply = self._ask(
                {
                    "op": "claim",
                    "max": max,
                    "wait_ms": int((0.0 if left < 0 else left) * 1000),
                    "worker": self.name,
                    "timeout_ms": self._config.claim_timeout_ms,
                    "max_deliveries": self._config.max_deliveries,
                }
            )
            batches = self._claimed(reply, asked)
            if batches or (deadline is not None and self._runtime.monotonic() >= deadline):
                return batches

    def close(self, timeout: float | None = 10.0) -> None:
        """Give back what is claimed, and end. Free to repeat; in a fork it does nothing."""
        if self._pid != os.getpid():
            return  # What is claimed is the parent's to finish.
        with self._condition:
            if self._closed:
                return
            self._closed = True
            tokens = dict(self._tokens)
            self._condition.notify_all()
        connection = self._finder.close()
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

    def _claimed(self, reply: dict[str, Any], asked: Moment) -> list[ClaimedBatch]:
        made = []
        for each in reply["batches"]:
            descriptor = BatchDescriptor(
                each["sequence"], each["location"], parse_metadata(each["metadata"])
            )
            batch = ClaimedBatch(self, descriptor, each["token"], each["deliveries"], asked)
            made.append((batch, descriptor))
            # All of them before the first is fetched: they need heartbeats meanwhile.
            with self._condition:
                self._tokens[each["token"]] = descriptor.sequence
                self._batches[each["token"]] = batch
        found = read_ahead(
            self._read_or_why_not,
            [descriptor for _, descriptor in made],
            self._decode_or_why_not,
            runtime=self._runtime,
            pace=self._pace,
        )
        fetched = []
        try:
            for (batch, _), entries in zip(made, found, strict=True):
                if isinstance(entries, PoisonBatch):
                    with suppress(ClaimLost):
                        batch.reject(str(entries))
                    continue
                batch.entries = entries
                fetched.append(batch)
        except BaseException:
            # Nobody gets to see these: kept alive by heartbeats they would never be done.
            self._give_back([batch for batch, _ in made])
            raise
        # After a pause of this process somebody else may have them, and have done them.
        lapsed = [batch for batch in fetched if not self._is_sure_of(batch)]
        self._give_back(lapsed)
        return [batch for batch in fetched if batch not in lapsed]

    def _read_or_why_not(self, descriptor: BatchDescriptor) -> PooledBatch | PoisonBatch:
        try:
            return self._fetch.fetch_pooled(descriptor)
        except PoisonBatch as error:
            return error

    def _decode_or_why_not(
        self, _: BatchDescriptor, stored: PooledBatch | PoisonBatch
    ) -> Sequence[bytes] | PoisonBatch:
        if isinstance(stored, PoisonBatch):
            return stored
        try:
            return self._fetch.decode(stored).entries
        except PoisonBatch as error:
            return error

    def _give_back(self, batches: Sequence[ClaimedBatch]) -> None:
        connection = self._finder.connection
        for batch in batches:
            self._drop(batch)
            if connection is not None and not batch._over:
                connection.tell(_finish_body(batch.sequence, batch._token, "release", "", 0))

    def _finish(self, batch: ClaimedBatch, how: str, reason: str, rest_ms: int) -> None:
        try:
            self._ask(_finish_body(batch.sequence, batch._token, how, reason, rest_ms), batch)
        except ClaimLost:
            self._drop(batch)
            if not (batch._asked and self._is_sure_of(batch)):
                raise
            # The claim cannot have lapsed: an earlier attempt to end it has landed.
        self._drop(batch)

    def _is_sure_of(self, batch: ClaimedBatch) -> bool:
        """Whether too little time has passed since the last heartbeat that a broker answered."""
        now = Moment.now(self._runtime)
        age_ms = batch._beaten.age_ms(now)
        return batch._beaten.precedes(now) and age_ms < self._config.claim_timeout_ms

    def _drop(self, batch: ClaimedBatch) -> None:
        with self._condition:
            self._tokens.pop(batch._token, None)
            self._batches.pop(batch._token, None)

    def _ask(self, body: dict[str, Any], batch: ClaimedBatch | None = None) -> dict[str, Any]:
        """Ask the broker, or the next one.

        Args:
            body: The request. It is repeated when its answer is lost: a claim that nobody heard
                of lapses by itself.
            batch: Whose claim it is to end; notes that an attempt may have landed.
        """
        if self._pid != os.getpid():
            raise Closed(
                f"this worker belongs to process {self._pid}, which forked this one: its "
                "heartbeats are not here. Make a worker in each process, after the fork."
            )
        patience_s = self._config.cas_deadline_ms / 1000
        limit_s = patience_s + body.get("wait_ms", 0) / 1000
        deadline = self._runtime.monotonic() + limit_s
        while True:
            connection = self._find(min(deadline, self._runtime.monotonic() + patience_s))
            try:
                reply = connection.ask(body)
            except (TransientStorageError, Fenced):
                # Fenced, too: the write may have landed before, and its answer been lost.
                if batch is not None:
                    batch._asked = True
                raise
            match reply:
                case Lost():
                    if batch is not None:
                        batch._asked = True
                    self._finder.forget(connection)
                case Refused(why):
                    if batch is not None and why != "unsent":
                        batch._asked = True
                    if why in ("unsent", "moved"):
                        self._finder.forget(connection)
                    if why != "unsent":
                        self._runtime.sleep(LOOK_S)
                case _:
                    return reply
            if self._runtime.monotonic() >= deadline:
                raise TransientStorageError(
                    f"no broker of {self._store.url} answered within {limit_s:g} s. Try again."
                )

    def _find(self, deadline: float) -> Connection:
        while True:
            connection = self._finder.find()
            if self._closed:
                raise Closed("the worker was closed: claim() needs an open one")
            if connection is not None:
                return connection
            if self._runtime.monotonic() >= deadline:
                raise TransientStorageError(
                    f"no broker of {self._store.url} hands out batches: {self._finder.reason}. "
                    "Try again."
                )
            self._runtime.sleep(LOOK_S)

    def _beat(self) -> None:
        every = self._config.claim_timeout_ms / 1000 / BEATS_PER_CLAIM
        while True:
            with self._condition:
                if self._closed:
                    return
                self._condition.wait(LOOK_S if self._beat_again else every)
            self._beat_once()

    def _beat_once(self) -> None:
        with self._condition:
            tokens = [each for each in self._tokens if each in self._batches]
            dropped = {each: at for each, at in self._tokens.items() if each not in tokens}
            connection = self._finder.connection
        if not tokens and not dropped:
            return
        now = Moment.now(self._runtime)
        try:
            if connection is None:
                connection = self._find(self._runtime.monotonic())
            # Asked, not told: a broker that went without a sound would be told for ever.
            answer = connection.ask({"op": "beat", "tokens": tokens})
            for token, sequence in dropped.items():
                connection.tell(_finish_body(sequence, token, "release", "", 0))
        except OpenDataBufferError as error:
            log.debug("a heartbeat was not sent: %s", error)
            return
        if isinstance(answer, Refused):
            # The next beat finds the broker that is announced now. It comes at once: claims do
            # not wait for as long as between two of them.
            self._finder.forget(connection)
            with self._condition:
                self._beat_again = not self._beat_again
        elif isinstance(answer, dict):
            with self._condition:
                self._beat_again = False
                for token in dropped:
                    self._tokens.pop(token, None)
                for token in tokens:
                    batch = self._batches.get(token)
                    # A broker answers heartbeats of lapsed claims, too: one that comes too late
                    # renews nothing, and must not make the worker sure of its claim again.
                    if batch is not None and self._is_sure_of(batch):
                        batch._beaten = now


def _finish_body(sequence: int, token: int, how: str, reason: str, rest_ms: int) -> dict[str, Any]:
    return {
        "op": "finish",
        "n": 0,
        "how": how,
        "sequence": sequence,
        "token": token,
        "reason": reason[:MAX_REASON_CHARS],
        "rest_ms": rest_ms,
    }
