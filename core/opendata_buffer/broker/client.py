"""The record that announces a broker, and a connection to it.

``<prefix>/_broker.json`` is a hint and no permission. A broker whose record was replaced may still
append, and a client that finds none appends alone: the manifest's compare-and-swap keeps both
right. Whether a broker lives shows without comparing two machines' clocks: ``beat`` changes within
a time on the watcher's clock.

A connection sends requests, and hands each answer to its caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from opendata_buffer import outcomes
from opendata_buffer.broker import protocol
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.formats.batch import BROKER_RECORD_NAME
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.cas import CasStore, sidecar_object
from opendata_buffer.queue.sidecar import Sidecar
from opendata_buffer.runtime import Runtime, deadline, wait_for
from opendata_buffer.stores.base import Put

log = logging.getLogger(__name__)

SECRET_BYTES = 32

DISCOVERY_RECORD = Sidecar(
    "a broker's discovery record",
    "Nothing depends on it: a broker that is started replaces it.",
    confidential=True,
)


@dataclass(frozen=True, slots=True)
class DiscoveryRecord:
    """The broker that serves, or the last one that did.

    Attributes:
        term: Rises with each broker; the larger one is right.
        id: Of the broker, a ULID drawn at its start.
        address: ``host:port`` for clients; empty once the broker has left.
        secret: Known to every process that can read the queue's bucket; a new one for each term.
        certificate: SHA-256 of the certificate that its port shows, in hexadecimal digits. Empty in
            the record of an earlier release, which could do without TLS.
        beat: Counts the broker's renewals of the record.
        seen_ms: When it last renewed it, milliseconds since the Unix epoch, for people.
        fault: Why the object is not readable; ``id`` is its version then, and ``term`` 0.
        others: Fields of later versions, kept when the object is written again.
    """

    term: int
    id: str
    address: str
    secret: bytes = field(repr=False)  # records are logged and appear in errors
    certificate: str = field(default="", repr=False)
    beat: int = 0
    seen_ms: int = 0
    fault: str = ""
    others: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def serves(self) -> bool:
        """Whether it names an address. The broker may have died since."""
        return bool(self.address)

    def same_broker(self, other: DiscoveryRecord | None) -> bool:
        """Whether both are of one broker in one term."""
        return other is not None and (self.term, self.id) == (other.term, other.id)

    def to_json(self) -> bytes:
        """The object's bytes."""
        return DISCOVERY_RECORD.encode_value(self, fault=None)

    @classmethod
    def from_json(cls, data: bytes) -> DiscoveryRecord:
        """The record in an object's bytes; ``CorruptData`` where they are none of this version."""
        fields = DISCOVERY_RECORD.decode(data)
        found = fields.into(cls, fault="")
        if found.serves and len(found.secret) != SECRET_BYTES:
            raise fields.wrong("secret", f"{SECRET_BYTES} bytes in hexadecimal digits")
        return found


class Lease:
    """Reads and changes a queue's discovery record by compare-and-swap, each within ``deadline_ms``
    milliseconds. Not thread-safe."""

    def __init__(
        self, store: CasStore, config: QueueConfig, runtime: Runtime, *, deadline_ms: int = 5_000
    ) -> None:
        self._runtime = runtime
        self._object = sidecar_object(
            DISCOVERY_RECORD,
            DiscoveryRecord,
            store,
            f"{config.data_path_prefix}/{BROKER_RECORD_NAME}",
            runtime,
            config.with_timeout(min(deadline_ms, config.timeout_ms)),
            if_unreadable=lambda error, at: DiscoveryRecord(0, at, "", b"", fault=str(error)),
        )

    def read(self) -> DiscoveryRecord | None:
        """The record; None where no broker ever served, or the object was deleted. One that is not
        readable serves nowhere and has a ``fault``, and can be replaced as any other."""
        found = self._object.read()
        return found if isinstance(found, DiscoveryRecord) else None

    def take(self, mine: DiscoveryRecord, over: DiscoveryRecord | None) -> DiscoveryRecord | None:
        """Replace the record ``over`` by one with the next term, and return it as it was written;
        None when another broker was faster."""
        wanted = replace(mine, term=1 if over is None else over.term + 1)

        def decide(before: DiscoveryRecord | None) -> DiscoveryRecord | None:
            if before is not None and wanted.same_broker(before):
                return before  # A write of ours whose answer was lost.
            same = before is None if over is None else over.same_broker(before)
            return wanted if same else before

        return self._change(decide, wanted)

    def beat(self, mine: DiscoveryRecord) -> DiscoveryRecord | None:
        """Raise ``beat``; None when another broker's record is there, or none."""
        after = replace(mine, beat=mine.beat + 1, seen_ms=self._runtime.now_ms())
        return self._change(lambda before: after if mine.same_broker(before) else before, mine)

    def leave(self, mine: DiscoveryRecord) -> None:
        """Take the address out of the record, unless it is another broker's by now."""
        self.beat(replace(mine, address="", secret=b"", certificate=""))

    def _change(
        self,
        decide: Callable[[DiscoveryRecord | None], DiscoveryRecord | None],
        mine: DiscoveryRecord,
    ) -> DiscoveryRecord | None:
        outcome = self._object.update(decide)
        value = outcome.value if isinstance(outcome, outcomes.Applied) else None
        return value if value is not None and mine.same_broker(value) and value.serves else None


RENEW_S = 0.5
"""Seconds: an append whose clock is so much older than the broker's newest one is renewed."""

Reply = dict[str, Any]
"""The body of an answer that is not about an append."""

_OTHER_ANSWERS = {"claimed", "finished", "beaten", "given", "granted"}

_ANSWERS = {"done", "refused", "lost", "failed"} | _OTHER_ANSWERS

CONNECT_S = 3.0
"""Seconds for a connection and its handshake. A suspended broker accepts and sends no hello; with
hundreds of handshakes at once a broker on a busy machine takes more than a second for the last."""

SILENCE_S = 0.75
"""Seconds without any message, while an answer is due, before the broker is sent a ping. Without
an answer for as long again, the connection ends."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The entries were not appended and will not be. ``why`` is ``expired``, ``moved``, ``busy``,
    ``unsent``, ``late`` for its own deadline, or ``large``: no broker takes it."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """No answer: the entries may be in the queue, at ``since`` or later. From ``safe_at`` on,
    monotonic seconds, this broker begins no write of them."""

    since: int
    safe_at: float


Answer = int | Refused | Lost
"""To an append; the first sequence of the entries that are in the queue."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request that waits for its answer; ``lost`` is the result where none comes.

    It carries the broker's clock that arrived at ``clock_at``, for ``valid_s`` seconds, and no
    write of it begins after ``begin_by``.
    """

    lost: Lost
    clock_at: float = 0.0
    valid_s: float = 0.0
    begin_by: float = float("-inf")
    answer: Answer | Reply | OpenDataBufferError | None = None


class ChannelClosed(Exception):
    """The other side, or the network, ended the connection."""


class ChannelRefused(ChannelClosed):
    """No process listens at the address: the one that did has ended."""


class Channel(Protocol):
    """Messages of bytes, in order, both ways. One thread at a time sends, and one receives; any may
    call ``close``, which ends both."""

    def send(self, message: bytes) -> None:
        """Send; raises :class:`ChannelClosed`."""

    def receive(self, timeout: float | None) -> bytes | None:
        """The next message, None after ``timeout`` seconds; raises :class:`ChannelClosed`."""

    def close(self) -> None:
        """End the connection; free to repeat."""


class Connection:
    """A connection after its handshake, over a new ``channel``. Thread-safe; a thread of its own
    reads. Before :meth:`show_may_write` the broker takes no request but :meth:`stats`.

    Raises ChannelClosed where the other side ends it or sends nothing, ProtocolError where it is
    not the announced broker.
    """

    def __init__(self, channel: Channel, broker_record: DiscoveryRecord, runtime: Runtime) -> None:
        self.broker_record = broker_record
        self._channel = channel
        self._runtime = runtime
        # The channel has checked that this is the broker's certificate.
        self._end = protocol.ClientEnd(
            broker_record.secret, broker_record.term, broker_record.certificate
        )
        self._condition = runtime.condition()
        self._pending: dict[int, _Request] = {}
        self._number = 0
        self._clock: Any = None
        """The broker's, as received at ``_clock_at``; every append sends it back to the broker."""
        self._clock_at = 0.0
        self._next = 0
        """Sequence of the queue's next entry, as the broker last reported it."""
        self._stats: dict[str, Any] | None = None
        self._sending = False
        self.is_over = False
        """Whether it has ended; every append on it is answered then."""
        self._abandoned = False
        try:
            channel.send(self._end.prove(self._receive_first()))
            self._transmit({"op": "ping"})
            answer = self._receive_first()
            with self._condition:
                self._take(answer)
            runtime.spawn(self._read, "opendata-buffer-broker-client")
        except RuntimeError as error:
            # No thread is left: its owner goes on without a broker.
            channel.close()
            raise ChannelClosed(f"no thread is left to read from the broker: {error}") from error
        except BaseException:
            channel.close()
            raise

    def show_may_write(self, store: Put, manifest_path: str) -> None:
        """Show the broker, by one small object, that this process may write in the queue. Raises
        what the store raises here or at the broker, ChannelClosed without an answer."""
        key = protocol.write_proof_folder(manifest_path) + self._end.proof_name
        with deadline(self._runtime, CONNECT_S):
            store.put(key, self._end.write_proof())
        if not isinstance(self.ask({"op": "written"}, CONNECT_S), dict):
            raise ChannelClosed(f"the broker did not say whether it found {key!r}")

    def append(self, entries: Sequence[NewEntry], *, since: int | None, begin_by: float) -> Answer:
        """Have entries appended, contiguous and in order, all or none. Blocks for the answer, and
        raises what :meth:`.Queue.append` raised at the broker. No write begins after ``begin_by``,
        monotonic seconds. An earlier attempt may have landed at ``since`` or later.
        """
        if len(entries) > protocol.MAX_ENTRIES:
            return Refused("large")
        with self._condition:
            self._await_room(begin_by)
            if self._runtime.monotonic() >= begin_by:
                return Refused("late")
            if self.is_over:
                return Refused("unsent")
            valid_s = min(protocol.VALID_MS / 1000, begin_by - self._clock_at)
            lost = Lost(self._next if since is None else since, self._clock_at + valid_s)
            request = _Request(lost, self._clock_at, valid_s, begin_by)
            number = self._enter(request)
            body = protocol.append_body(number, entries, self._clock, int(valid_s * 1000), since)
        answer = self._complete(number, request, body)
        return answer if isinstance(answer, Answer) else Refused("unknown")

    def ask(self, body: Mapping[str, Any], timeout: float | None = None) -> Reply | Refused | Lost:
        """Ask for anything else. Blocks for the answer, and raises it where it is an error; one
        that does not come within ``timeout`` seconds is :class:`Lost`."""
        with self._condition:
            self._await_room(None)
            if self.is_over:
                return Refused("unsent")
            request = _Request(Lost(self._next, self._clock_at))
            number = self._enter(request)
        answer = self._complete(number, request, {**body, "n": number}, timeout)
        return Refused("unknown") if isinstance(answer, int) else answer

    def stats(self, timeout: float) -> dict[str, Any] | None:
        """The broker's counters; None without an answer within ``timeout`` seconds."""
        deadline = self._runtime.monotonic() + timeout
        self._stats = None
        self._transmit({"op": "stats"})
        with self._condition:
            self._wait_for(lambda: self._stats is not None, deadline)
            return self._stats

    def close(self) -> None:
        """End it; appends that wait for an answer are lost. Free to repeat."""
        with self._condition:
            self._finish()

    def abandon(self) -> None:
        """It is used no more: the thread that reads ends it within a second. Takes no lock and
        closes nothing, because finalizers run in the middle of other calls."""
        self._abandoned = True

    def _enter(self, request: _Request) -> int:
        self._number += 1
        self._pending[self._number] = request
        return self._number

    def _complete(
        self, number: int, request: _Request, body: dict[str, Any], timeout: float | None = None
    ) -> Answer | Reply:
        until = None if timeout is None else self._runtime.monotonic() + timeout
        try:
            try:
                sent = self._transmit(body)
            except protocol.ProtocolError as error:
                log.warning("a request was not sent to the broker: %s", error)
                request.answer, sent = Refused("large"), True
            with self._condition:
                if not sent:
                    request.answer = Refused("unsent")
                wait_for(
                    self._runtime, self._condition, lambda: request.answer is not None, until=until
                )
                if request.answer is None:
                    request.answer = request.lost
        finally:
            # Also after an interrupt: a request that is left here would take up room for ever.
            with self._condition:
                del self._pending[number]
                self._condition.notify_all()
        if isinstance(request.answer, OpenDataBufferError):
            raise request.answer
        return request.answer

    def _await_room(self, until: float | None) -> None:
        # At one more request the broker would close the connection.
        self._wait_for(lambda: len(self._pending) < protocol.MAX_OPEN_REQUESTS, until)

    def _wait_for(self, is_true: Callable[[], bool], until: float | None) -> None:
        """Wait, with the lock, until that is true or the connection has ended."""
        wait_for(self._runtime, self._condition, lambda: self.is_over or is_true(), until=until)

    def _receive_first(self) -> bytes:
        message = self._channel.receive(CONNECT_S)
        if message is None:
            raise ChannelClosed(f"the broker sent nothing for {CONNECT_S:g} s")
        return message

    def _transmit(self, body: dict[str, Any], *, waits: bool = True) -> bool:
        """Encode and send, without the lock: while a suspended broker blocks this thread, the
        thread that reads must notice that.

        Returns:
            False when nothing was sent: the connection had ended, or without ``waits`` another
            thread sends.
        """
        with self._condition:
            while self._sending and not self.is_over:
                if not waits:
                    return False
                self._condition.wait()
            if self.is_over:
                return False
            message = self._end.encode(body)
            self._sending = True
        try:
            self._channel.send(message)
        except ChannelClosed:
            self.close()
        finally:
            with self._condition:
                self._sending = False
                self._condition.notify_all()
        return True

    def _read(self) -> None:
        asked = False
        try:
            while not self.is_over and not self._abandoned:
                message = self._channel.receive(SILENCE_S)
                if message is not None:
                    asked = False
                    with self._condition:
                        self._take(message)
                        renewed = self._renew()
                        clock = self._clock
                    if renewed:
                        self._transmit({"op": "renew", "clock": clock, "n": renewed}, waits=False)
                elif not self._pending:
                    asked = False
                elif asked:
                    log.warning("%s does not answer", self.broker_record)
                    return
                else:
                    asked = True
                    self._transmit({"op": "ping"}, waits=False)
        except ChannelClosed:
            pass
        except protocol.ProtocolError as error:
            log.warning("connection to %s ended: %s", self.broker_record, error)
        finally:
            with self._condition:
                self._finish()

    def _take(self, message: bytes) -> None:
        """Process a message of the broker; with the lock. Raises ProtocolError where a broker sends
        no such message."""
        body = self._end.decode(message)
        # The clock first: an answer that is waited for lets the next append begin at once.
        self._clock, self._clock_at = body.get("clock"), self._runtime.monotonic()
        if isinstance(following := body.get("next"), int):
            self._next = max(self._next, following)
        number = body.get("n")
        request = self._pending.get(number) if isinstance(number, int) else None
        match body:
            case {"op": "done", "sequence": int(sequence)} if request is not None:
                request.answer = sequence
            case {"op": "refused", "why": str(why)} if request is not None:
                request.answer = Refused(why)
            case {"op": "lost", "since": int(since)} if request is not None:
                # The broker has begun its last write of it; the answer to that write follows.
                request.answer = Lost(since, self._clock_at)
            case {"op": "failed", "error": error} if request is not None:
                request.answer = protocol.error_of(error)
            case {"op": str(op)} if request is not None and op in _OTHER_ANSWERS:
                request.answer = body
            case {"op": "stats"}:
                self._stats = body
            case {"op": "pong"}:
                return
            case {"op": str(op)} if request is None and op in _ANSWERS:
                return  # Its caller waits no longer.
            case _:
                raise protocol.ProtocolError(
                    f"unknown message {str(body.get('op'))[:50]!r} of the broker"
                )
        self._condition.notify_all()

    def _renew(self) -> list[int]:
        """Renew the appends that wait for a slow write, by the clock that was just received, and
        return their numbers; with the lock. Otherwise one that came during a write of more than two
        seconds would be refused, sent again as the next write begins, and never be written."""
        renewed = []
        now = self._clock_at
        for number, request in self._pending.items():
            is_old = now - request.clock_at >= RENEW_S
            if request.answer is None and is_old and now + request.valid_s <= request.begin_by:
                # First here: this client asks no other broker while this one may still write it.
                request.clock_at = now
                request.lost = Lost(request.lost.since, now + request.valid_s)
                renewed.append(number)
        return renewed

    def _finish(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._channel.close()
        for request in self._pending.values():
            if request.answer is None:
                request.answer = request.lost
        self._condition.notify_all()
