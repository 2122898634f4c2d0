"""Claim batches from a queue that several workers share, and finish, release or reject them.

Each batch goes to one worker, oldest first. It goes to another worker if it is released or if its
worker's heartbeats stop (in Kafka a share group; in SQS the visibility timeout). A batch is
processed at least once, and twice only after a claim has lapsed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, Self, Unpack
from weakref import WeakValueDictionary

from opendata_buffer import errors
from opendata_buffer.arguments import checked
from opendata_buffer.broker.client import Connection, Lost, Refused
from opendata_buffer.broker.committer import Discovery
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork, listen_for
from opendata_buffer.broker.protocol import MAX_REASON_CHARS, parse_metadata
from opendata_buffer.config import WorkerConfig, WorkerSettings
from opendata_buffer.consumer.batches import HasRecords
from opendata_buffer.consumer.fetch import FetchHandle, ReadAhead, or_poison
from opendata_buffer.consumer.opening import check_reader
from opendata_buffer.familiar_names import OF_CLAIMED_BATCHES, OF_WORKERS, FamiliarNames
from opendata_buffer.formats.manifest import BatchDescriptor, Metadata
from opendata_buffer.internal_parts import take_parts
from opendata_buffer.queue.not_found import require_queue
from opendata_buffer.runtime import Closeable, Moment, Runtime, SystemRuntime, in_parallel
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.open import open_store

log = logging.getLogger(__name__)

SEARCH_S = 0.25
"""Seconds between two searches for a broker."""

WAIT_S = 20.0
"""Seconds that one claim waits at the broker; a worker that waits longer claims again."""

BEATS_PER_CLAIM = 4
"""Heartbeats within one ``claim_timeout_ms``: three may be lost before the claim is lost."""


@dataclass(slots=True, eq=False)
class Claim:
    """A worker's knowledge of its claim of a batch.

    Attributes:
        sequence: The batch.
        token: Names the claim to the broker.
        beaten: When the last answered heartbeat was sent, or when the claim was asked for.
        asked: Whether an attempt to end the claim may have been stored.
        over: Whether it is known that the claim has ended.
    """

    sequence: int
    token: int
    beaten: Moment
    asked: bool = False
    over: bool = False

    def is_sure(self, now: Moment, timeout_ms: int) -> bool:
        """Return whether the claim cannot have lapsed.

        It cannot if less than its timeout has passed since ``beaten``.
        """
        return self.beaten.precedes(now) and self.beaten.age_ms(now) < timeout_ms

    def end(self, how: str, *, reason: str = "", rest_ms: int = 0) -> dict[str, Any]:
        """Write the request that ends the claim.

        Args:
            how: ``done``, ``release`` or ``reject``.
            reason: Why it is rejected; cut to :data:`MAX_REASON_CHARS` characters.
            rest_ms: Milliseconds for which a released batch is not handed out.

        Returns:
            The body of the request.
        """
        return {
            "op": "finish",
            "how": how,
            "sequence": self.sequence,
            "token": self.token,
            "reason": reason[:MAX_REASON_CHARS],
            "rest_ms": rest_ms,
        }


class DispatcherClient:
    """Sends a worker's requests to the announced broker, and to the next one after a change.

    Args:
        discovery: Finds the broker.
        runtime: Clock and threads.
        timeout_s: Seconds without any broker after which a request fails.
        url: The queue's URL, for errors.
    """

    def __init__(self, discovery: Discovery, runtime: Runtime, timeout_s: float, url: str) -> None:
        self._discovery = discovery
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._url = url

    def ask(self, body: dict[str, Any], claim: Claim | None = None) -> dict[str, Any]:
        """Send a request, and wait for its answer. If the answer is lost, ask the next broker.

        Args:
            body: The request.
            claim: The claim that the request ends. It is marked once an attempt may have been
                stored.

        Returns:
            The answer.

        Raises:
            Fenced: Another consumer took the queue.
            TransientStorageError: No broker answered in time.
            OpenDataBufferError: The error that the broker answered with.
        """
        limit_s = self._timeout_s + body.get("wait_ms", 0) / 1000
        deadline = self._runtime.monotonic() + limit_s
        while True:
            connection = self.find(min(deadline, self._runtime.monotonic() + self._timeout_s))
            try:
                reply = connection.ask(body)
            except (errors.TransientStorageError, errors.Fenced):
                # Also after Fenced: an earlier write may have landed and its answer been lost.
                if claim is not None:
                    claim.asked = True
                raise
            if isinstance(reply, dict):
                return reply
            why = "lost" if isinstance(reply, Lost) else reply.why
            if claim is not None and why != "unsent":
                claim.asked = True
            if why in ("unsent", "moved", "lost"):
                self._discovery.forget(connection)
            if why not in ("unsent", "lost"):
                self._runtime.sleep(SEARCH_S)
            if self._runtime.monotonic() >= deadline:
                raise errors.TransientStorageError(
                    f"no broker of {self._url} answered within {limit_s:g} s. Try again."
                )

    def find(self, deadline: float) -> Connection:
        """Connect to the announced broker, after at least one search.

        Args:
            deadline: When to stop searching, monotonic seconds.

        Returns:
            The connection.

        Raises:
            TransientStorageError: No broker was found in time.
            Closed: The worker was closed.
        """
        while True:
            connection = self._discovery.find()
            if self._discovery.is_closed:
                raise errors.Closed("the worker was closed: claim() needs an open one")
            if connection is not None:
                return connection
            if self._runtime.monotonic() >= deadline:
                raise errors.TransientStorageError(
                    f"no broker of {self._url} hands out batches: {self._discovery.reason}. "
                    "Try again."
                )
            self._runtime.sleep(SEARCH_S)


class ClaimedBatch(HasRecords):
    """A batch that belongs to this worker until it finishes it or the claim lapses.

    Args:
        worker: The worker that has the claim.
        descriptor: The batch's entry in the queue.
        claim: The claim.
        delivery_count: How often the batch was handed out, including this time.

    Attributes:
        sequence: Its position in the queue.
        location: Key of its object.
        values: Its records. ``entries`` is the RFC's name for them.
        metadata: Ranges of records with their ingestion time and payload.
        delivery_count: How often it was handed out, including this time.
    """

    _instead = OF_CLAIMED_BATCHES

    def __init__(
        self, worker: Worker, descriptor: BatchDescriptor, claim: Claim, delivery_count: int
    ) -> None:
        self._worker = worker
        self._claim = claim
        self.sequence = descriptor.sequence
        self.location = descriptor.location
        self.metadata: tuple[Metadata, ...] = descriptor.metadata
        self.delivery_count = delivery_count
        self.values: Sequence[bytes] = ()

    @property
    def entries(self) -> Sequence[bytes]:
        """The records, under the name that they have in OpenData RFC 0001."""
        return self.values

    def ack(self) -> None:
        """Call :meth:`done`, which has this name for other kinds of batches."""
        self.done()

    def done(self) -> None:
        """Take the batch out of the queue. This is stored when the call returns.

        Raises:
            ClaimLost: The claim had lapsed, so another worker got or gets the batch, too. Or this
                is not known, because no broker answered for as long as a claim lasts.
            TransientStorageError: The outcome is not known; call it again.
        """
        self._finish("done")

    @checked
    def release(self, *, delay: float = 0.0) -> None:
        """Give the batch back, so that it is handed out again.

        Args:
            delay: Seconds before which it is not handed out, at most 3,600. Default 0.

        Raises:
            ClaimLost: The claim had lapsed.
            TransientStorageError: The outcome is not known; call it again, or let the claim lapse.
        """
        self._finish("release", rest_ms=max(0, round(delay * 1_000)))

    @checked
    def reject(self, reason: str) -> None:
        """Copy the batch to the quarantine, and take it out of the queue.

        Args:
            reason: Why, stored in the quarantine; cut to 4,096 characters.

        Raises:
            ClaimLost: The claim had lapsed.
            TransientStorageError: The outcome is not known; call it again.
        """
        self._finish("reject", reason=reason)

    def _finish(self, how: str, *, reason: str = "", rest_ms: int = 0) -> None:
        if not self._claim.over:
            self._worker._finish(self._claim, self._claim.end(how, reason=reason, rest_ms=rest_ms))


class Worker(FamiliarNames, Closeable):
    """A worker of a queue that several workers share. Thread-safe, not fork-safe.

    ::

        with Worker("s3://bucket/jobs") as worker:
            for batch in worker:                           # waits for the next one
                for record in batch:
                    run(record.value)
                batch.ack()

    :meth:`claim` claims several batches at once, or waits for a limited time.

    With ``config.reader`` it is a worker of one reader of a log. Workers of two readers share
    nothing: each batch goes to a worker of each reader.

    A worker does not read transactions. On a partition of a topic it gets the batches of open and
    of rolled back transactions like any others, and their markers as empty batches.

    Args:
        config: The queue's URL, or a :class:`.WorkerConfig`.
        **settings: Fields of the configuration, by name.

    Raises:
        InvalidInput: A setting or the URL is wrong, or the queue does not exist and
            ``config.create_if_missing`` is off.
        StorageError: The store cannot be reached.
    """

    _instead = OF_WORKERS

    @checked
    def __init__(
        self,
        config: WorkerConfig | str | PathLike[str],
        **settings: Unpack[WorkerSettings],
    ) -> None:
        given, parts = take_parts(settings, "store", "runtime", "network")
        config = WorkerConfig.of(config, given)
        self._config = config
        self._pid = os.getpid()
        self._runtime: Runtime = parts.runtime or SystemRuntime()
        self._store: Store = parts.store or open_store(config.store, config.store_options)
        if not config.create_if_missing:
            require_queue(self._store, config, self._runtime)
        check_reader(self._store, config, self._runtime)
        network = parts.network or WebSocketNetwork(self._runtime, listen_for(self._store))
        self._fetch = FetchHandle.of(config, store=self._store, runtime=self._runtime)
        self._pace = self._fetch.adaptive_concurrency()
        self._discovery = Discovery(self._store, config, self._runtime, network.connect)
        self._client = DispatcherClient(
            self._discovery, self._runtime, config.timeout_ms / 1000, self._store.url
        )
        self.name = (
            config.name or f"{os.uname().nodename}-{os.getpid()}-{self._runtime.ulid()[-6:]}"
        )
        self._condition = self._runtime.condition()
        self._claims: dict[int, Claim] = {}
        # Weak references: if the user drops a batch without finishing it, heartbeats must not keep
        # it for ever. The next heartbeat releases it.
        self._batches: WeakValueDictionary[int, ClaimedBatch] = WeakValueDictionary()
        self._closed = False
        self._beat_soon = False
        self._election = None
        if config.broker == "host":
            self._election = LeaderElection(self._store, config, self._runtime, network)
        self._beating = self._runtime.spawn(self._beat, "opendata-buffer-worker")

    @checked
    def claim(self, max: int = 1, timeout: float | None = None) -> list[ClaimedBatch]:  # noqa: A002
        """Claim and fetch the oldest batches that no worker holds.

        A batch that cannot be read goes to the quarantine, and another one is claimed instead.

        Args:
            max: Maximum number of batches, at least 1; a broker hands out at most 1,000 at once.
                Default 1. There are fewer if the queue has fewer.
            timeout: Seconds to wait for the first batch. None (default) waits until there is one.

        Returns:
            The batches; empty if none came in time.

        Raises:
            InvalidInput: ``max`` is less than 1.
            Fenced: Another consumer took the queue.
            TransientStorageError: No broker could be reached within ``timeout_ms``.
            Closed: The worker was closed, or made before this process was forked.
        """
        if max < 1:
            raise errors.InvalidInput(f"max is {max!r}: use a whole number of at least 1")
        deadline = None if timeout is None else self._runtime.monotonic() + timeout
        while True:
            # Wait for at most half of a claim's time: the claim counts from when it was asked for.
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

    @checked
    def close(self, timeout: float | None = 10.0) -> None:
        """Release all claimed batches, and end. May be repeated. In a fork, do nothing.

        Args:
            timeout: Seconds to wait until the claims are released, and then for each thread to end.
                Default 10; None waits without a limit.
        """
        if self._pid != os.getpid():
            return  # The parent finishes the claimed batches.
        with self._condition:
            if self._closed:
                return
            self._closed = True
            claims = list(self._claims.values())
            self._condition.notify_all()
        connection = self._discovery.close()
        if connection is not None:
            self._give_back(connection, claims, timeout)
            connection.close()
        if self._election is not None:
            self._election.stop(timeout)
        self._beating.join(timeout)

    def __iter__(self) -> Self:
        """Claim batch after batch. Wait for the next one; stop when the worker is closed."""
        return self

    def __next__(self) -> ClaimedBatch:
        while not self._closed:
            with self._until_closed():
                for batch in self.claim(1):
                    return batch
        raise StopIteration

    def __aiter__(self) -> Self:
        """Claim batch after batch without blocking the event loop, until the worker is closed.

        Call ``await batch.ack_async()`` to finish one.
        """
        return self

    async def __anext__(self) -> ClaimedBatch:
        while not self._closed:
            with self._until_closed():
                for batch in await asyncio.to_thread(self.claim, 1, 1.0):
                    return batch
        raise StopAsyncIteration

    @contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Ignore ``Closed`` if another thread has closed the worker."""
        try:
            yield
        except errors.Closed:
            if not self._closed:
                raise

    def _claimed(self, reply: dict[str, Any], asked: Moment) -> list[ClaimedBatch]:
        made = []
        for each in reply["batches"]:
            descriptor = BatchDescriptor(
                each["sequence"], each["location"], parse_metadata(each["metadata"])
            )
            claim = Claim(descriptor.sequence, each["token"], beaten=asked)
            batch = ClaimedBatch(self, descriptor, claim, each["deliveries"])
            made.append((batch, descriptor))
            # Note all claims before fetching the first batch: they need heartbeats from now on.
            with self._condition:
                self._claims[claim.token] = claim
                self._batches[claim.token] = batch
        decode = or_poison(self._fetch._decode)
        found = ReadAhead(
            or_poison(self._fetch._fetch_pooled),
            [descriptor for _, descriptor in made],
            lambda _, stored: decode(stored),
            runtime=self._runtime,
            adaptive=self._pace,
        ).results()
        fetched = []
        try:
            for (batch, _), result in zip(made, found, strict=True):
                if isinstance(result, errors.PoisonBatch):
                    with suppress(errors.ClaimLost):
                        batch.reject(str(result))
                    continue
                batch.values = result.values
                fetched.append(batch)
        except BaseException:
            # The caller does not get these batches, and heartbeats would hold them for ever.
            self._release([batch for batch, _ in made])
            raise
        # If this process was paused, another worker may have received and finished some of them.
        lapsed = [batch for batch in fetched if not self._is_sure_of(batch._claim)]
        self._release(lapsed)
        return [batch for batch in fetched if batch not in lapsed]

    def _release(self, batches: Sequence[ClaimedBatch]) -> None:
        connection = self._discovery.connection
        for batch in batches:
            self._drop(batch._claim)
        if connection is not None:
            claims = [batch._claim for batch in batches if not batch._claim.over]
            self._give_back(connection, claims, self._config.timeout_ms / 1000)

    def _give_back(
        self, connection: Connection, claims: Sequence[Claim], timeout: float | None
    ) -> None:
        """Release claims; a claim that is not released in time lapses."""
        until = None if timeout is None else self._runtime.monotonic() + timeout

        def release(claim: Claim) -> None:
            left = None if until is None else until - self._runtime.monotonic()
            if left is None or left > 0:
                with suppress(errors.OpenDataBufferError):
                    connection.ask(self._signed(claim.end("release")), left)

        in_parallel(self._runtime, release, claims)

    def _finish(self, claim: Claim, end: dict[str, Any]) -> None:
        try:
            self._ask(end, claim)
        except errors.ClaimLost:
            self._drop(claim)
            if not (claim.asked and self._is_sure_of(claim)):
                raise
            # The claim cannot have lapsed, so an earlier attempt to end it has landed.
        self._drop(claim)
        claim.over = True

    def _is_sure_of(self, claim: Claim) -> bool:
        return claim.is_sure(Moment.now(self._runtime), self._config.claim_timeout_ms)

    def _drop(self, claim: Claim) -> None:
        with self._condition:
            self._claims.pop(claim.token, None)
            self._batches.pop(claim.token, None)

    def _ask(self, body: dict[str, Any], claim: Claim | None = None) -> dict[str, Any]:
        if self._pid != os.getpid():
            raise errors.Closed(
                f"this worker belongs to process {self._pid}, which forked this one: its "
                "heartbeats are not here. Make a worker in each process, after the fork."
            )
        return self._client.ask(self._signed(body), claim)

    def _signed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request, with the name of the reader that this worker belongs to."""
        return {**body, "reader": self._config.reader} if self._config.reader else body

    def _beat(self) -> None:
        every = self._config.claim_timeout_ms / 1000 / BEATS_PER_CLAIM
        while True:
            with self._condition:
                if self._closed:
                    return
                self._condition.wait(SEARCH_S if self._beat_soon else every)
            self._beat_once()

    def _beat_once(self) -> None:
        with self._condition:
            held: list[Claim] = []
            dropped: list[Claim] = []
            for claim in self._claims.values():
                (held if claim.token in self._batches else dropped).append(claim)
            connection = self._discovery.connection
        if not held and not dropped:
            return
        now = Moment.now(self._runtime)
        try:
            if connection is None:
                connection = self._client.find(self._runtime.monotonic())
            # Wait for an answer: otherwise a dead broker would get heartbeats for ever.
            beat = {"op": "beat", "tokens": [each.token for each in held]}
            answer = connection.ask(self._signed(beat))
            if dropped:
                # Use a separate thread: the next heartbeat must not wait for the answers.
                timeout_s = self._config.timeout_ms / 1000
                release = partial(self._give_back, connection, dropped, timeout_s)
                self._runtime.spawn(release, "opendata-buffer-release")
        except (errors.OpenDataBufferError, RuntimeError) as error:  # RuntimeError: no thread left
            log.debug("a heartbeat was not sent: %s", error)
            return
        if isinstance(answer, Refused):
            # The next heartbeat finds the broker that is announced now. Send it soon: the claims
            # could lapse within the usual pause between two heartbeats.
            self._discovery.forget(connection)
            with self._condition:
                self._beat_soon = not self._beat_soon
        elif isinstance(answer, dict):
            with self._condition:
                self._beat_soon = False
                for claim in dropped:
                    self._claims.pop(claim.token, None)
                for claim in held:
                    # A broker also answers heartbeats of lapsed claims. A heartbeat that comes too
                    # late renews nothing, and must not make the worker sure of its claim again.
                    if claim.token in self._batches and self._is_sure_of(claim):
                        claim.beaten = now
