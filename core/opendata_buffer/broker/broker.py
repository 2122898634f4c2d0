"""Append for all clients of a queue, in groups, without knowing the network.

A queue has one manifest, and each append replaces it by a compare-and-swap. With many producer
processes most of these writes lose their race, and each lost race costs a read and another write. A
broker avoids that: clients send it their entries, and it is the only process that writes.

**Group commit.** While one compare-and-swap is in flight, requests of all clients wait in a list.
The next compare-and-swap appends all of them. So the cost of a write is shared, and more clients
make larger groups instead of more writes::

    client A   append a1 ──┐                    ┌── done, sequence 10
    client B   append b1 ──┼── one write ───────┼── done, sequence 11
    client C   append c1 ──┘  [a1, b1, c1]      └── done, sequence 12

One thread writes. It calls the sessions with their answers after the write has landed, and never
earlier.

**Gathering.** A client has one append in flight, and sends its next one as soon as it has the
answer. If the broker began the next write at once, for those that wait already, that append would
just miss it, and take two writes instead of one. So the broker waits for :data:`GATHER_SHARE` of a
write first.

**Things that can go wrong:**

* A client waits too long, gives the broker up and asks another one. Both could then append the same
  entries. So every request has a deadline by this broker's own clock, and the guard of each write
  checks it on every attempt (:mod:`opendata_buffer.broker.protocol`).
* A client repeats a request whose outcome it does not know. The guard first searches the manifest
  for the earlier attempt (:func:`find_earlier_attempt`).
* Storage does not say whether a write landed. The broker answers ``lost``, and the client
  searches for its entries with its next request.
* Another process writes the manifest itself, and would lose every race against a broker that writes
  from memory. It asks the broker for a pause (:class:`.WriteFairness`).
* A second broker runs. Both lose races, and the older one reads the discovery record and steps
  down.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from opendata_buffer import metrics
from opendata_buffer.broker import protocol
from opendata_buffer.broker.dispatcher import Dispatcher
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CommitStateUnknown, QueueFull
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.producer.fairness import WriteFairness
from opendata_buffer.queue.ownership import QueueClaim
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Moment, Runtime, Task, wait_for
from opendata_buffer.stores.base import Store

log = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
T = TypeVar("T")

MAX_WAITING_ENTRIES = 100_000
"""Most entries of all sessions that wait for the next compare-and-swap; more are refused as
``busy``."""

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Most bytes of their messages. Metadata may be large, so the number of entries is not enough."""

FRESH_S = 0.2
"""Seconds. A manifest that this process wrote less than this ago is not read again."""

GATHER_SHARE = 0.15
"""Share of the time of a write that the broker waits before the next one, if requests wait.

A client needs a few milliseconds to send its next append, and a write to S3 takes about sixty.
"""

GATHER_S = 0.01
"""Most seconds of that wait, however long the last write took."""

_READS = {"written", "ping", "stats"}
"""Requests that a client may send without showing that it may write, such as the command ``status``
or a broker that stands by."""

_EXPIRED = -1
"""The guard's answer when some requests of the group have become too old to be appended."""

_ANSWERED_LATER = {"written", "append", "claim", "finish", "pause"}


def find_earlier_attempt(
    queue: Queue, entries: Sequence[NewEntry], since: int
) -> Callable[[Manifest], int | None]:
    """Return a guard for :meth:`.Queue.append` that searches for an earlier attempt.

    An earlier attempt that lands after the search makes this write lose its race, and the guard is
    called again with the newer manifest.

    Args:
        queue: The queue to append to.
        entries: The entries of the append.
        since: First sequence at which the earlier attempt may have landed.

    Returns:
        A guard that returns the first sequence of the earlier attempt, or None if it has not
        landed.

    Raises:
        CommitStateUnknown: Raised by the guard: a consumer dequeued entries at sequences where the
            attempt may have been.
    """

    def guard(before: Manifest) -> int | None:
        # Search for the last entry: a consumer dequeues from the front, so it is the last to go.
        last = before.find(entries[-1].location)
        if last is not None:
            return last - len(entries) + 1
        if before.first_sequence <= since:
            return None
        complete, first = queue.find_moved(entries, since)
        if first is not None or complete:
            return first
        raise CommitStateUnknown(
            queue.key,
            since,
            tuple(entry.location for entry in entries),
            before.next_sequence,
            "the broker that was to append it gave no answer, and sequences where it may have been "
            "were dequeued since",
        )

    return guard


def in_order(
    method: Callable[Concatenate[SharedQueue, Parameters], T],
) -> Callable[Concatenate[SharedQueue, Parameters], T]:
    """Wrap methods so that their calls run one at a time, in the order of the calls.

    A lock does not keep the order: a thread that comes back at once may get it again and again,
    while others wait.
    """

    @wraps(method)
    def run(self: SharedQueue, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> T:
        call = object()
        with self._condition:
            self._calls.append(call)
        try:
            with self._condition:
                while self._calls[0] is not call:
                    self._condition.wait()
            return method(self, *args, **kwargs)
        finally:
            with self._condition:
                self._calls.remove(call)
                self._condition.notify_all()

    return run


class SharedQueue(Queue):
    """The queue that a broker and its dispatcher share.

    One thread appends for producers, and another acknowledges for workers. If each had a queue of
    its own, the acknowledging thread would read first and lose every race against the appending
    thread, which writes from memory. Here each call waits for the calls before it, and both write
    from memory.
    """

    # This process writes the manifest more often than any other, so its memory is seldom outdated.
    _changes_from_memory = True
    # A client that lost its connection asks another broker, while this one may still write its
    # request.
    _joins_others = True

    def __init__(
        self,
        store: Store,
        config: QueueConfig,
        *,
        runtime: Runtime,
        claim: QueueClaim | None = None,
    ) -> None:
        super().__init__(store, config, runtime=runtime, role="broker", claim=claim, feeds=True)
        self._condition = runtime.condition()
        self._calls: deque[object] = deque()
        self._written_at = float("-inf")

    @in_order
    def append(self, /, entries: Sequence[NewEntry], **options: Any) -> Any:
        """See :meth:`Queue.append`."""
        found = super().append(entries, **options)
        self._written_at = self._runtime.monotonic()
        return found

    claim_epoch = in_order(Queue.claim_epoch)
    dequeue = in_order(Queue.dequeue)
    close = in_order(Queue.close)
    _read = in_order(Queue.read)

    def read(self) -> Manifest | None:
        """See :meth:`Queue.read`; return the last manifest if this process just wrote it."""
        if self._runtime.monotonic() - self._written_at < FRESH_S:
            return self.last_seen
        return self._read()


class Broker:
    """The broker of one queue.

    Args:
        store: The queue's store.
        queue: The queue; only the broker and its dispatcher use this object.
        runtime: Clock and threads.
        data_path_prefix: The prefix that all locations must be below.
        on_conflict: Called after a write that lost a race: another broker may be at work.
        dispatcher: Assigns batches to workers. Without one, the broker hands out no batches.
    """

    def __init__(
        self,
        store: Store,
        queue: Queue,
        runtime: Runtime,
        data_path_prefix: str,
        on_conflict: Callable[[], None] = lambda: None,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        self._queue = queue
        self.runtime = runtime
        self.data_path_prefix = data_path_prefix
        self._on_conflict = on_conflict
        self.dispatcher = dispatcher
        self.proofs = protocol.WriteProofs(store, queue.key, runtime)
        self._condition = runtime.condition()
        self._waiting: list[protocol.AppendRequest] = []
        self.entries_waiting = 0
        """Entries that wait for the next write."""
        self._bytes = 0
        self.next_sequence = 0
        """The end of the queue as far as the broker knows. The real end is the same or higher."""
        self._leaving = False
        self._fairness = WriteFairness(runtime.random)
        self._pause_requests: list[protocol.PauseRequest] = []
        self._task: Task | None = None
        self.sessions = 0
        """Number of connections that have finished their handshake."""
        self.commits = 0
        self.appended = 0
        self.pauses = 0
        self._since = runtime.monotonic()

    def start(self) -> None:
        """Read the queue's end and begin to serve.

        Raises:
            OpenDataBufferError: The manifest could not be read, as :meth:`.Queue.read`.
        """
        manifest = self._queue.read()
        self.next_sequence = 0 if manifest is None else manifest.next_sequence
        self.proofs.clear()
        self._since = self.runtime.monotonic()
        labels = self._queue.labels
        metrics.broker_clients.watch(self, lambda broker: broker.sessions, labels)
        metrics.broker_waiting_entries.watch(self, lambda broker: broker.entries_waiting, labels)
        self._task = self.runtime.spawn(self._run, "opendata-buffer-broker")

    def stop(self, timeout: float | None = None) -> None:
        """Refuse waiting and later requests, and end after the write in flight.

        Args:
            timeout: Seconds to wait for the threads; None waits without a limit.
        """
        with self._condition:
            self._leaving = True
            self._condition.notify_all()
        metrics.broker_clients.unwatch(self)
        metrics.broker_waiting_entries.unwatch(self)
        if self.dispatcher is not None:
            self.dispatcher.stop(timeout)
        if self._task is not None:
            self._task.join(timeout)

    def clock(self) -> list[float]:
        """Return the clock that every message of this broker carries."""
        return protocol.clock_body(Moment.now(self.runtime))

    def submit(self, request: protocol.AppendRequest, message_bytes: int) -> None:
        """Take an append for the next write; its answer follows once that write has landed.

        It is refused as ``busy`` if all waiting requests together would exceed
        :data:`MAX_WAITING_ENTRIES` or :data:`MAX_WAITING_BYTES`, and as ``moved`` if the broker is
        leaving.

        Args:
            request: The entries to append.
            message_bytes: Size of the client's message, in bytes.
        """
        size = len(request.entries)
        with self._condition:
            if self._leaving:
                why = "moved"
            elif (
                self.entries_waiting + size > MAX_WAITING_ENTRIES
                or self._bytes + message_bytes > MAX_WAITING_BYTES
            ):
                why = "busy"
            else:
                self._waiting.append(request)
                self.entries_waiting += size
                self._bytes += message_bytes
                self._condition.notify_all()
                return
        request.respond("refused", why=why)

    def ask_pause(self, request: protocol.PauseRequest) -> None:
        """Let a client write the manifest itself, once the write under way has landed.

        A broker that is leaving refuses this as ``moved``.
        """
        with self._condition:
            if not self._leaving:
                self._pause_requests.append(request)
                self._condition.notify_all()
                return
        request.respond("refused", why="moved")

    def stats(self) -> protocol.Body:
        """Return the counters for ``status`` and metrics."""
        return {
            "clients": self.sessions,
            "waiting": self.entries_waiting,
            "commits": self.commits,
            "appended": self.appended,
            "conflicts": self._queue.conflicts,
            "attempts": self._queue.attempts,
            "next": self.next_sequence,
            "pauses": self.pauses,
            "serving_s": self.runtime.monotonic() - self._since,
        }

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._leaving and not self._pause_requests:
                    self._condition.wait()
                asking, self._pause_requests = self._pause_requests, []
            # Write the waiting requests between two pauses, however many clients ask for a pause:
            # otherwise the pauses could follow each other without end.
            self._pause_for(asking)
            with self._condition:
                group, self._waiting = self._waiting, []
                self.entries_waiting = self._bytes = 0
                leaving = self._leaving
                asking = self._pause_requests if leaving else []
            if leaving:
                refused: list[protocol.Request] = [*group, *asking]
                for each in refused:
                    each.respond("refused", why="moved")
                return
            if not group:
                continue
            conflicts = self._queue.conflicts
            began = self.runtime.monotonic()
            read_first = self._fairness.begins(began)
            try:
                self._commit(group, read_first)
            except Exception as error:
                # If this thread ended, every client would wait until its timeout.
                log.exception("group commit failed")
                self._fail(group, error)
            now = self.runtime.monotonic()
            if self._queue.conflicts > conflicts:
                self._fairness.lost(now)
                self._on_conflict()
            self._fairness.won(now)
            self._pause_until(now + max(self._fairness.pause(now), self._gather_s(now - began)))

    def _gather_s(self, write_s: float) -> float:
        """Return the seconds to wait for the next appends of clients that were just answered."""
        # Without a request that waits, the next one begins a write as soon as it arrives.
        return min(GATHER_SHARE * write_s, GATHER_S) if self.entries_waiting else 0.0

    def _pause_for(self, asking: Sequence[protocol.PauseRequest]) -> None:
        """Pause once for all clients that have asked, for the sum of their writes."""
        if not asking:
            return
        self.pauses += 1
        now = self.runtime.monotonic()
        until = now + self._fairness.let_in(sum(each.writes for each in asking), now)
        for each in asking:
            each.respond("given")
        self._pause_until(until)

    def _pause_until(self, until: float) -> None:
        with self._condition:
            wait_for(self.runtime, self._condition, lambda: self._leaving, until=until)

    def _commit(self, group: Sequence[protocol.AppendRequest], read_first: bool) -> None:
        for each in group:
            if each.since is not None:
                # Use a separate write: a guard's answer applies to the whole write.
                self._append([each], read_first)
                read_first = False
        self._append([each for each in group if each.since is None], read_first)

    def _append(self, group: Sequence[protocol.AppendRequest], read_first: bool) -> None:
        """Append requests in one write, in order, and answer each of them."""
        while group := self._without_late(group):
            entries = [entry for each in group for entry in each.entries]
            try:
                first = self._queue.append(
                    entries, guard=self._guard(group, entries), read_first=read_first
                )
            except QueueFull as error:
                if len(group) == 1:
                    self._fail(group, error)
                    return
                # Together they do not fit, even into an empty queue. Half of them may.
                half = len(group) // 2
                self._append(group[:half], read_first)
                group, read_first = group[half:], False
                continue
            except Exception as error:
                self._fail(group, error)
                return
            if first == _EXPIRED:
                continue
            self.commits += 1
            metrics.broker_commits.add(1)
            metrics.broker_entries_appended.add(len(entries))
            self.appended += len(entries)
            for each in group:
                end = first + len(each.entries)
                self.next_sequence = max(self.next_sequence, end)
                each.respond("done", sequence=first, next=self.next_sequence)
                first = end
            if self.dispatcher is not None:
                self.dispatcher.appended()
            return

    def _guard(
        self, group: Sequence[protocol.AppendRequest], entries: Sequence[NewEntry]
    ) -> Callable[[Manifest], int | None]:
        since = group[0].since
        search = None if since is None else find_earlier_attempt(self._queue, entries, since)

        def guard(before: Manifest) -> int | None:
            # Check on each attempt: while the last attempt was on its way, a client may have
            # waited long enough to ask another broker.
            now = Moment.now(self.runtime)
            if any(each.is_late(now) for each in group):
                return _EXPIRED
            return None if search is None else search(before)

        return guard

    def _without_late(
        self, group: Sequence[protocol.AppendRequest]
    ) -> list[protocol.AppendRequest]:
        now = Moment.now(self.runtime)
        kept = []
        for each in group:
            if each.is_late(now):
                each.respond("refused", why="expired")
            else:
                kept.append(each)
        return kept

    def _may_be_found(self, error: CommitStateUnknown) -> bool:
        """Return whether the client's next attempt can find out if the entries were appended.

        It can if no entry was dequeued where the append may be. The requests became too old while
        storage did not answer, so their clients ask again.
        """
        seen = self._queue.last_seen
        first = 0 if seen is None else seen.first_sequence
        return error.sequence is not None and first <= error.sequence

    def _fail(self, group: Sequence[protocol.AppendRequest], error: BaseException) -> None:
        if isinstance(error, CommitStateUnknown) and self._may_be_found(error):
            for each in group:
                each.respond("lost", since=error.sequence if each.since is None else each.since)
            return
        for each in group:
            own = error
            if isinstance(error, CommitStateUnknown):
                # Tell each client its own locations, and not those of the whole group.
                locations = tuple(entry.location for entry in each.entries)
                own = CommitStateUnknown(
                    error.key, error.sequence, locations, error.next_sequence, error.reason
                )
            each.respond("failed", error=protocol.error_body(own))


class Session:
    """One client's connection, without the network: carries out each request that arrives.

    A client that has not shown that it may write gets counters, and nothing else.

    Args:
        broker: The broker that serves the client.
        end: The broker's end of the handshake.
        send: Takes the body of an answer, from any thread. It must not block.
    """

    def __init__(
        self, broker: Broker, end: protocol.BrokerEnd, send: Callable[[protocol.Body], None]
    ) -> None:
        self._broker = broker
        self._end = end
        self._send = send
        self._lock = broker.runtime.condition()
        self._open = 0
        self._pending: dict[int, protocol.AppendRequest] = {}
        self._closed = False
        self._has_written = False
        self.may_write = False
        """Whether the client has shown that it may write to the queue."""

    def admit(self, prove: bytes) -> None:
        """Check the client's part of the handshake; its messages may follow.

        Args:
            prove: The client's first message.

        Raises:
            ProtocolError: The client does not know the secret, or speaks another version.
        """
        self._end.admit(prove)
        self._broker.sessions += 1

    def received(self, message: bytes) -> None:
        """Carry out the request in the client's next message.

        Args:
            message: The bytes of the message.

        Raises:
            ProtocolError: The message is not valid or not allowed. Nothing was done.
        """
        body = self._end.decode(message)
        op = str(body.get("op"))
        if not self.may_write and op not in _READS:
            raise protocol.ProtocolError(
                f"a client asks for {op[:50]!r} and has not shown that it may write in the queue"
            )
        if op in _ANSWERED_LATER:
            self._count_open()
        match op:
            case "written":
                self._check_proof(protocol.whole(body, "n"))
            case "append":
                append = protocol.parse_append(body, self._broker.data_path_prefix, self._answer)
                with self._lock:
                    self._pending[append.number] = append
                self._broker.submit(append, len(message))
            case "claim":
                now = self._broker.runtime.monotonic()
                claim = protocol.parse_claim(body, now, self._answer, lambda: not self._closed)
                self._dispatcher(body).submit(claim)
            case "finish":
                self._dispatcher(body).submit(protocol.parse_finish(body, self._answer))
            case "beat":
                # Answer heartbeats. A worker relies on a claim only while its heartbeats are
                # answered, and concludes from missing answers that the broker is gone.
                lives = self._dispatcher(body).beat(protocol.parse_beat(body))
                answer = {"op": "beaten"} if lives else {"op": "refused", "why": "moved"}
                self._send_answer({**answer, "n": protocol.whole(body, "n")})
            case "pause":
                writes = protocol.whole(body, "writes")
                self._broker.ask_pause(
                    protocol.PauseRequest(protocol.whole(body, "n"), self._answer, writes)
                )
            case "renew":
                self._renew(protocol.parse_renewal(body), protocol.moment_of(body.get("clock")))
            case "ping":
                self._send_answer({"op": "pong", "next": self._broker.next_sequence})
            case "stats":
                self._send_answer({"op": "stats", **self._broker.stats()})
            case _:
                raise protocol.ProtocolError(f"unknown request {op[:50]!r} of a client")

    def _count_open(self) -> None:
        """Count one more request that is not answered yet, and refuse it if there are too many."""
        with self._lock:
            if self._open >= protocol.MAX_OPEN_REQUESTS:
                raise protocol.ProtocolError(
                    f"a client has {self._open} unanswered requests: more are not taken"
                )
            self._open += 1

    def _check_proof(self, number: int) -> None:
        """Check in the store that the client may write to the queue, and answer it then."""
        if self._has_written:
            raise protocol.ProtocolError("a client shows for the second time that it may write")
        self._has_written = True
        proven = partial(self._proven, number)
        self._broker.proofs.check(self._end.proof_name, self._end.write_proof(), proven)

    def _renew(self, numbers: Sequence[int], heard: Moment) -> None:
        """Note that the client still waits for these appends, and has received a later clock."""
        with self._lock:
            for number in numbers:
                waiting = self._pending.get(number)
                if waiting is not None and waiting.heard.precedes(heard):
                    waiting.heard = heard

    def _dispatcher(self, body: protocol.Body) -> Dispatcher:
        if self._broker.dispatcher is None:
            raise protocol.ProtocolError("this broker hands out no batches")
        return self._broker.dispatcher.of_reader(protocol.parse_reader(body))

    def _proven(self, number: int, error: Exception | None) -> None:
        if error is None:
            self.may_write = True
            self._answer({"op": "granted", "n": number})
        else:
            self._answer({"op": "failed", "n": number, "error": protocol.error_body(error)})

    def _answer(self, body: protocol.Body) -> None:
        with self._lock:
            self._open -= 1
            self._pending.pop(body["n"], None)
        self._send_answer(body)

    def close(self) -> None:
        """Note that the connection has ended; later answers are dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._end.is_ready:
            self._broker.sessions -= 1

    def _send_answer(self, body: protocol.Body) -> None:
        if not self._closed:
            self._send({**body, "clock": self._broker.clock()})
