"""One client's connection to the broker, without the network: what each message asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opendata_buffer.broker.messages import (
    MAX_OPEN_REQUESTS,
    moment_of,
    parse_append,
    parse_renewal,
    whole,
)
from opendata_buffer.broker.requests import (
    ClaimRequest,
    FinishRequest,
    parse_beat,
    parse_claim,
    parse_finish,
)
from opendata_buffer.broker.service import Body, Service, Waiting
from opendata_buffer.broker.wire import BrokerEnd, ProtocolError
from opendata_buffer.runtime import Moment

__all__ = ["Session"]


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
        self._pending: dict[int, Waiting] = {}
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
                work: ClaimRequest | FinishRequest
                if op == "claim":
                    work = parse_claim(body, now, self.answer, lambda: not self._closed)
                else:
                    work = parse_finish(body, now, self.answer)
                self._begin()
                foreman.submit(work)
            case "floor":
                self._begin()
                if not self._service.ask_floor(self, whole(body, "n")):
                    raise ProtocolError("a client asks for the floor twice")
            case "over":
                self._service.end_floor(self)
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

    def remember(self, waiting: Waiting) -> None:
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
        self._service.end_floor(self)
        if self._end.ready:
            self._service.sessions -= 1

    def _say(self, body: Body) -> None:
        if not self._closed:
            self._send({**body, "clock": self._service.clock()})
