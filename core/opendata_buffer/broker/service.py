"""What a broker does with what its clients send: one group commit for all of them.

While one compare-and-swap is on its way, requests of all clients pile up; the next one takes
them all. A request is answered after its compare-and-swap has landed and never before. The
service has one thread; sessions hand it requests and are called back with answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from opendata_buffer import metrics
from opendata_buffer.broker.foreman import Foreman
from opendata_buffer.broker.lookup import Landed, look_up
from opendata_buffer.broker.messages import (
    MAX_OPEN_REQUESTS,
    AppendRequest,
    clock_body,
    error_body,
    moment_of,
    parse_append,
    parse_renewal,
    whole,
)
from opendata_buffer.broker.requests import parse_beat, parse_claim, parse_finish
from opendata_buffer.broker.wire import BrokerEnd, ProtocolError
from opendata_buffer.commit.gaps import Gaps
from opendata_buffer.errors import CommitStateUnknown, QueueFull
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Condition, Moment, Runtime, Task

__all__ = ["Service", "Session"]

log = logging.getLogger(__name__)

Body = dict[str, Any]

MAX_WAITING_ENTRIES = 100_000
"""Entries that wait for the next compare-and-swap, of all sessions; beyond it they are refused."""

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""The same for the bytes of their messages: metadata may be large."""


@dataclass(frozen=True, slots=True)
class _Expired:
    """A guard's answer: some requests of the group became too old to be appended."""


_Stop: TypeAlias = Landed | _Expired
_Guard: TypeAlias = Callable[[Manifest], _Stop | None]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits for its turn."""

    session: Session
    request: AppendRequest
    heard: Moment

    def is_late(self, now: Moment) -> bool:
        heard = self.heard
        # A clock that runs backwards tells no age: the client sends the request again.
        return not heard.precedes(now) or heard.age_ms(now) > self.request.valid_ms


class Service:
    """The broker of one queue.

    Args:
        queue: What it writes; nobody else in the process may use it.
        runtime: Clocks and threads.
        data_path_prefix: Locations must lie below it.
        on_conflict: Called after a write that lost a race: is another broker at work?
        foreman: Hands batches to workers; None when this broker does not.
    """

    def __init__(
        self,
        queue: Queue,
        runtime: Runtime,
        data_path_prefix: str,
        on_conflict: Callable[[], None] = lambda: None,
        foreman: Foreman | None = None,
    ) -> None:
        self._queue = queue
        self._runtime = runtime
        self.data_path_prefix = data_path_prefix
        self._on_conflict = on_conflict
        self.foreman = foreman
        self._condition = runtime.condition()
        self._waiting: list[_Waiting] = []
        self._entries = 0
        self._bytes = 0
        self._next = 0
        self._leaving = False
        self._gaps = Gaps()
        self._task: Task | None = None
        self.sessions = 0
        self.commits = 0
        self.appended = 0
        self._since = runtime.monotonic()

    def start(self) -> None:
        """Read the queue's end and begin to serve.

        Raises:
            OpenDataBufferError: The manifest cannot be read.
        """
        manifest = self._queue.read()
        self._next = 0 if manifest is None else manifest.next_sequence
        self._since = self._runtime.monotonic()
        metrics.broker_clients.watch(self, Service.clients_now, self._queue.labels)
        metrics.broker_waiting_entries.watch(self, Service.waiting_now, self._queue.labels)
        self._task = self._runtime.spawn(self._run, "opendata-buffer-broker")

    def stop(self, timeout: float | None = None) -> None:
        """Refuse what waits and everything that comes; end after the write under way."""
        with self._condition:
            self._leaving = True
            self._condition.notify_all()
        metrics.broker_clients.unwatch(self)
        metrics.broker_waiting_entries.unwatch(self)
        if self.foreman is not None:
            self.foreman.stop(timeout)
        if self._task is not None:
            self._task.join(timeout)

    def lock(self) -> Condition:
        """A new lock for a session."""
        return self._runtime.condition()

    def now(self) -> float:
        """Monotonic seconds."""
        return self._runtime.monotonic()

    def clock(self) -> list[float]:
        """The clock that every message carries."""
        return clock_body(Moment.now(self._runtime))

    @property
    def next_sequence(self) -> int:
        """The queue's end, as far as the broker knows; it is never behind this."""
        return self._next

    def submit(self, session: Session, request: AppendRequest, message_bytes: int) -> None:
        """Append when its turn comes; the session gets the answer."""
        size = len(request.entries)
        waiting = _Waiting(session, request, request.heard)
        session.remember(waiting)
        with self._condition:
            if self._leaving:
                why = "moved"
            elif (
                self._entries + size > MAX_WAITING_ENTRIES
                or self._bytes + message_bytes > MAX_WAITING_BYTES
            ):
                why = "busy"
            else:
                self._waiting.append(waiting)
                self._entries += size
                self._bytes += message_bytes
                self._condition.notify_all()
                return
        self._refuse(waiting, why)

    def clients_now(self) -> float:
        """Connections that have shaken hands."""
        return self.sessions

    def waiting_now(self) -> float:
        """Entries that wait for the next write."""
        return self._entries

    def stats(self) -> Body:
        """Counters for ``status`` and metrics."""
        return {
            "clients": self.sessions,
            "waiting": self._entries,
            "commits": self.commits,
            "appended": self.appended,
            "conflicts": self._queue.conflicts,
            "attempts": self._queue.attempts,
            "next": self._next,
            "serving_s": self._runtime.monotonic() - self._since,
        }

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._waiting and not self._leaving:
                    self._condition.wait()
                group, self._waiting = self._waiting, []
                self._entries = self._bytes = 0
                leaving = self._leaving
            if leaving:
                for each in group:
                    self._refuse(each, "moved")
                return
            began, conflicts = self._runtime.monotonic(), self._queue.conflicts
            try:
                self._commit(group)
            except Exception as error:
                # A thread that dies would leave every client waiting until it gives up.
                log.exception("group commit failed")
                self._fail(group, error)
            now = self._runtime.monotonic()
            if self._queue.conflicts > conflicts:
                self._gaps.lost(now)
                self._on_conflict()
            self._let_others_in(self._gaps.wrote(began, now))

    def _let_others_in(self, seconds: float) -> None:
        until = self._runtime.monotonic() + seconds
        with self._condition:
            while not self._leaving and (left := until - self._runtime.monotonic()) > 0:
                self._condition.wait(left)

    def _commit(self, group: Sequence[_Waiting]) -> None:
        fresh = []
        for each in group:
            if each.request.since is None:
                fresh.append(each)
            else:
                # Alone: whether it has landed before is a question to the whole write.
                self._append([each])
        if fresh:
            self._append(fresh)

    def _append(self, group: Sequence[_Waiting]) -> None:
        """Append requests in one write, in order; answer each."""
        while group:
            group = self._without_late(group)
            if not group:
                return
            entries = [entry for each in group for entry in each.request.entries]
            try:
                outcome: int | _Stop = self._queue.append(
                    entries, guard=self._guard(group, entries)
                )
            except QueueFull as error:
                if len(group) == 1:
                    self._fail(group, error)
                    return
                # Half of them may fit; all together never would, also into an empty queue.
                half = len(group) // 2
                self._append(group[:half])
                group = group[half:]
                continue
            except Exception as error:
                self._fail(group, error)
                return
            if isinstance(outcome, _Expired):
                continue
            self.commits += 1
            metrics.broker_commits.add(1)
            metrics.broker_entries_appended.add(len(entries))
            first = outcome.sequence if isinstance(outcome, Landed) else outcome
            for each in group:
                self._done(each, first)
                first += len(each.request.entries)
            if self.foreman is not None:
                self.foreman.appended()
            return

    def _guard(self, group: Sequence[_Waiting], entries: Sequence[NewEntry]) -> _Guard:
        since = group[0].request.since
        search = None if since is None else look_up(self._queue.key, entries, since)

        def guard(before: Manifest) -> _Stop | None:
            # On each attempt: while the last one was on its way, a client may have waited long
            # enough to ask another broker.
            now = Moment.now(self._runtime)
            if any(each.is_late(now) for each in group):
                return _Expired()
            return None if search is None else search(before)

        return guard

    def _without_late(self, group: Sequence[_Waiting]) -> list[_Waiting]:
        now = Moment.now(self._runtime)
        kept = []
        for each in group:
            if each.is_late(now):
                self._refuse(each, "expired")
            else:
                kept.append(each)
        return kept

    def _may_be_found(self, error: CommitStateUnknown) -> bool:
        """Whether a later look can tell: nothing was dequeued where the append may be.

        The requests became too old while storage did not answer. Their clients can ask again,
        and the next attempt looks first; a local committer would go on looking, too.
        """
        seen = self._queue.last_seen
        first = 0 if seen is None else seen.first_sequence
        return error.sequence is not None and first <= error.sequence

    def _done(self, each: _Waiting, sequence: int) -> None:
        size = len(each.request.entries)
        self._next = max(self._next, sequence + size)
        self.appended += size
        each.session.answer(
            {"op": "done", "n": each.request.number, "sequence": sequence, "next": self._next}
        )

    def _refuse(self, each: _Waiting, why: str) -> None:
        each.session.answer({"op": "refused", "n": each.request.number, "why": why})

    def _fail(self, group: Sequence[_Waiting], error: BaseException) -> None:
        if isinstance(error, CommitStateUnknown) and self._may_be_found(error):
            for each in group:
                since = each.request.since if each.request.since is not None else error.sequence
                each.session.answer({"op": "lost", "n": each.request.number, "since": since})
            return
        for each in group:
            told = error
            if isinstance(error, CommitStateUnknown):
                # Of the group's locations each client is told its own.
                locations = tuple(entry.location for entry in each.request.entries)
                told = CommitStateUnknown(
                    error.key, error.sequence, locations, error.next_sequence, error.reason
                )
            each.session.answer(
                {"op": "failed", "n": each.request.number, "error": error_body(told)}
            )


class Session:
    """One client's connection, without the network.

    Args:
        service: The broker.
        end: The broker's end of the wire.
        send: Takes the body of an answer, from any thread; must not block. The transport seals
            bodies in the order in which it sends them.
    """

    def __init__(self, service: Service, end: BrokerEnd, send: Callable[[Body], None]) -> None:
        self._service = service
        self._end = end
        self._send = send
        self._lock = service.lock()
        self._open = 0
        self._pending: dict[int, _Waiting] = {}
        self._closed = False

    def welcome(self, prove: bytes) -> bytes:
        """Answer the client's handshake; its messages may follow.

        Raises:
            ProtocolError: It does not know the secret.
        """
        answer = self._end.welcome(prove)
        self._service.sessions += 1
        return answer

    def received(self, message: bytes) -> None:
        """Take the client's next message.

        Raises:
            ProtocolError: Close the connection; nothing of the message was done.
        """
        body = self._end.open(message)
        match body.get("op"):
            case "append":
                request = parse_append(body, self._service.data_path_prefix)
                self._begin()
                self._service.submit(self, request, len(message))
            case "claim" | "finish" | "beat" as op:
                foreman = self._service.foreman
                if foreman is None:
                    raise ProtocolError("this broker hands out no batches")
                if op == "beat":
                    # A worker counts on its claims from the beats that were answered, and
                    # notices that a broker is gone.
                    if foreman.beat(parse_beat(body)):
                        self._say({"op": "beaten", "n": whole(body, "n")})
                    else:
                        self._say({"op": "refused", "n": whole(body, "n"), "why": "moved"})
                    return
                now = self._service.now()
                parse = parse_claim if op == "claim" else parse_finish
                work = parse(body, now, self.answer)
                self._begin()
                foreman.submit(work)
            case "renew":
                self._renew(parse_renewal(body), moment_of(body.get("clock")))
            case "ping":
                self._say({"op": "pong", "next": self._service.next_sequence})
            case "stats":
                self._say({"op": "stats", **self._service.stats()})
            case other:
                raise ProtocolError(f"a client asks for {str(other)[:50]!r}, which is not known")

    def _begin(self) -> None:
        with self._lock:
            if self._open >= MAX_OPEN_REQUESTS:
                raise ProtocolError(
                    f"a client has {self._open} unanswered requests: more are not taken"
                )
            self._open += 1

    def remember(self, waiting: _Waiting) -> None:
        """An append of this session waits from now on."""
        with self._lock:
            self._pending[waiting.request.number] = waiting

    def _renew(self, numbers: Sequence[int], heard: Moment) -> None:
        """The client waits on: it heard this clock since."""
        with self._lock:
            for number in numbers:
                waiting = self._pending.get(number)
                if waiting is not None and waiting.heard.precedes(heard):
                    waiting.heard = heard

    def answer(self, body: Body) -> None:
        """Answer one request."""
        with self._lock:
            self._open -= 1
            self._pending.pop(body["n"], None)
        self._say(body)

    def close(self) -> None:
        """The connection is gone: answers go nowhere."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._end.ready:
            self._service.sessions -= 1

    def _say(self, body: Body) -> None:
        if not self._closed:
            self._send({**body, "clock": self._service.clock()})
