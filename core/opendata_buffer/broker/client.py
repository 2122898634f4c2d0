"""Announce a broker in the discovery record, and connect to it.

Clients have to find the broker, and the store is the only service that they share. So the broker
writes the *discovery record* ``<prefix>/_broker.json`` next to the manifest::

    {"version": 1, "term": 7, "id": "01J5...", "address": "10.0.0.5:41234",
     "secret": "9f...", "certificate": "3a...", "beat": 120, "seen_ms": 1767225600000}

A client reads the record, connects to the address, checks that the process there shows this
certificate, and sends the secret. After that it sends requests on a :class:`Connection`, which
hands each answer to its caller. A thread reads the answers, so a request can be sent while others
wait for their answers.

The record is a hint and gives no permission. A broker whose record was replaced may still append,
and a client that finds no broker appends directly. Both are right, because the compare-and-swap on
the manifest decides. To see whether a broker lives, a watcher checks that ``beat`` changes within
some time on the watcher's own clock. The clocks of two machines are never compared.

**Things that can go wrong:**

* The broker dies or is suspended with requests open. The connection ends after 1.5 seconds without
  a message, and each open append is answered with :class:`Lost`: the entries may be in the queue.
  ``Lost`` also says from when on this broker begins no write of them.
* A write takes longer than a request is valid. While the client receives messages, it renews its
  open appends. Otherwise a slow store would make every append expire before its write begins.
* Two brokers replace the record at the same time. :meth:`Lease.take` lets one of them win. Its term
  is one higher than that of the record before.
* A later release wrote the record, or it is damaged. It reads as a record with a ``fault`` that
  serves nowhere, and can be replaced.
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
        term: Rises with each broker; of two records, the one with the larger term counts.
        id: Id of the broker, a ULID that was drawn at its start.
        address: ``host:port`` for clients; empty once the broker has left.
        secret: Known to every process that can read the queue's bucket; a new one for each term.
        certificate: SHA-256 of the certificate that its port shows, in hexadecimal digits. Empty in
            the record of an earlier release, which could do without TLS.
        beat: Counts the broker's renewals of the record.
        seen_ms: When the broker last renewed it, milliseconds since the Unix epoch, for people.
        fault: Why the object cannot be read. Then ``id`` is its version, and ``term`` is 0.
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
        """Whether the record names an address. The broker may have died since."""
        return bool(self.address)

    def same_broker(self, other: DiscoveryRecord | None) -> bool:
        """Return whether both records are of the same broker in the same term."""
        return other is not None and (self.term, self.id) == (other.term, other.id)

    def to_json(self) -> bytes:
        """Return the object's bytes."""
        return DISCOVERY_RECORD.encode_value(self, fault=None)

    @classmethod
    def from_json(cls, data: bytes) -> DiscoveryRecord:
        """Parse the bytes of the record's object.

        Args:
            data: The bytes.

        Returns:
            The record. Unknown fields are kept.

        Raises:
            CorruptData: The bytes are not a record, or are of another version.
        """
        fields = DISCOVERY_RECORD.decode(data)
        found = fields.into(cls, fault="")
        if found.serves and len(found.secret) != SECRET_BYTES:
            raise fields.wrong("secret", f"{SECRET_BYTES} bytes in hexadecimal digits")
        return found


class Lease:
    """Reads and changes a queue's discovery record by compare-and-swap. Not thread-safe.

    Args:
        store: The queue's store.
        config: The queue's settings.
        runtime: Clock and threads.
        deadline_ms: Most milliseconds of each read or change.
    """

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
        """Return the record; None if no broker ever served, or the object was deleted.

        A record that cannot be read has a ``fault`` and no address, and can be replaced like any
        other.
        """
        found = self._object.read()
        return found if isinstance(found, DiscoveryRecord) else None

    def take(self, mine: DiscoveryRecord, over: DiscoveryRecord | None) -> DiscoveryRecord | None:
        """Replace a record by one of the next term.

        Args:
            mine: The record to write; its term is set here.
            over: The record to replace; None if the queue has no record.

        Returns:
            The record as it was written; None when another broker was faster.
        """
        wanted = replace(mine, term=1 if over is None else over.term + 1)

        def decide(before: DiscoveryRecord | None) -> DiscoveryRecord | None:
            if before is not None and wanted.same_broker(before):
                return before  # This is our own write, whose answer was lost.
            same = before is None if over is None else over.same_broker(before)
            return wanted if same else before

        return self._change(decide, wanted)

    def beat(self, mine: DiscoveryRecord) -> DiscoveryRecord | None:
        """Raise ``beat`` in the record.

        Args:
            mine: The record as this broker last wrote it.

        Returns:
            The record as it was written; None if it was deleted, or is another broker's.
        """
        after = replace(mine, beat=mine.beat + 1, seen_ms=self._runtime.now_ms())
        return self._change(lambda before: after if mine.same_broker(before) else before, mine)

    def leave(self, mine: DiscoveryRecord) -> None:
        """Remove the address from the record, unless it is another broker's by now."""
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
"""Seconds. An append is renewed once its clock is this much older than the broker's newest one."""

Reply = dict[str, Any]
"""The body of an answer to a request other than an append."""

_OTHER_ANSWERS = {"claimed", "finished", "beaten", "given", "granted"}

_ANSWERS = {"done", "refused", "lost", "failed"} | _OTHER_ANSWERS

CONNECT_S = 3.0
"""Seconds for a connection and its handshake. A suspended broker accepts and sends no hello. A
broker on a busy machine, with hundreds of handshakes at once, takes more than a second for the last
one."""

SILENCE_S = 0.75
"""Seconds without any message, while an answer is due, after which the broker is sent a ping. After
as long again without an answer, the connection ends."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The entries were not appended and will not be.

    Attributes:
        why: ``expired``, ``moved``, ``busy``, ``unsent``; ``late``, because the caller's deadline
            has passed; or ``large``, because no broker takes such a request.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """There was no answer: the entries may be in the queue.

    Attributes:
        since: First sequence at which they may be.
        safe_at: From this time on this broker begins no write of them, monotonic seconds.
    """

    since: int
    safe_at: float


Answer = int | Refused | Lost
"""The answer to an append. A number is the first sequence of the entries, which are in the queue.
"""


@dataclass(slots=True, eq=False)
class _Request:
    """A request that waits for its answer.

    Attributes:
        lost: The result if no answer comes.
        clock_at: When the clock that the request carries was received, monotonic seconds.
        valid_s: Seconds after that clock for which the request is valid.
        begin_by: No write of the request begins after this time, monotonic seconds.
        answer: The answer, once there is one.
    """

    lost: Lost
    clock_at: float = 0.0
    valid_s: float = 0.0
    begin_by: float = float("-inf")
    answer: Answer | Reply | OpenDataBufferError | None = None


class ChannelClosed(Exception):
    """The other side, or the network, ended the connection."""


class ChannelRefused(ChannelClosed):
    """No process listens at the address; the one that did has ended."""


class Channel(Protocol):
    """A way to send and receive messages of bytes, in order.

    One thread at a time sends, and one thread receives. Any thread may call ``close``, which ends
    both.
    """

    def send(self, message: bytes) -> None:
        """Send a message.

        Args:
            message: The bytes of the message.

        Raises:
            ChannelClosed: The connection has ended.
        """

    def receive(self, timeout: float | None) -> bytes | None:
        """Return the next message.

        Args:
            timeout: Seconds to wait; None waits without a limit.

        Returns:
            None when no message came in time.

        Raises:
            ChannelClosed: The connection has ended.
        """

    def close(self) -> None:
        """End the connection. May be repeated."""


class Connection:
    """A connection to a broker after its handshake. Thread-safe.

    A thread reads from it. Before :meth:`show_may_write` the broker accepts no request except
    :meth:`stats`.

    Args:
        channel: A new channel to the broker.
        broker_record: The record that announces the broker.
        runtime: Clock and threads.

    Raises:
        ChannelClosed: The other side ended the connection or sent nothing, or no thread is left to
            read from it.
        ProtocolError: The other side is not the announced broker.
    """

    def __init__(self, channel: Channel, broker_record: DiscoveryRecord, runtime: Runtime) -> None:
        self.broker_record = broker_record
        self._channel = channel
        self._runtime = runtime
        # The channel has already checked that the other side has this certificate.
        self._end = protocol.ClientEnd(
            broker_record.secret, broker_record.term, broker_record.certificate
        )
        self._condition = runtime.condition()
        self._pending: dict[int, _Request] = {}
        self._number = 0
        self._clock: Any = None
        """The broker's clock, as received at ``_clock_at``; every append sends it back to the
        broker."""
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
            # No thread is left. The owner of the connection goes on without a broker.
            channel.close()
            raise ChannelClosed(f"no thread is left to read from the broker: {error}") from error
        except BaseException:
            channel.close()
            raise

    def show_may_write(self, store: Put, manifest_path: str) -> None:
        """Show the broker, with one small object, that this process may write to the queue.

        Args:
            store: Where to put the object.
            manifest_path: Key of the queue's manifest.

        Raises:
            ChannelClosed: The broker gave no answer.
            OpenDataBufferError: The store refused or failed, here or at the broker.
        """
        key = protocol.write_proof_folder(manifest_path) + self._end.proof_name
        with deadline(self._runtime, CONNECT_S):
            store.put(key, self._end.write_proof())
        if not isinstance(self.ask({"op": "written"}, CONNECT_S), dict):
            raise ChannelClosed(f"the broker did not say whether it found {key!r}")

    def append(self, entries: Sequence[NewEntry], *, since: int | None, begin_by: float) -> Answer:
        """Have entries appended, contiguous and in order, all or none. Wait for the answer.

        Args:
            entries: The entries.
            since: First sequence at which an earlier attempt may have landed; None if there was
                none.
            begin_by: No write begins after this time, monotonic seconds.

        Returns:
            The first sequence; or :class:`Refused`; or :class:`Lost`.

        Raises:
            OpenDataBufferError: The error that :meth:`.Queue.append` raised at the broker.
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
        """Send any other request, and wait for the answer.

        Args:
            body: The request.
            timeout: Seconds to wait; None waits until the connection ends.

        Returns:
            The body of the answer; :class:`Refused`; or :class:`Lost` without an answer in time.

        Raises:
            OpenDataBufferError: The error that the broker answered with.
        """
        with self._condition:
            self._await_room(None)
            if self.is_over:
                return Refused("unsent")
            request = _Request(Lost(self._next, self._clock_at))
            number = self._enter(request)
        answer = self._complete(number, request, {**body, "n": number}, timeout)
        return Refused("unknown") if isinstance(answer, int) else answer

    def stats(self, timeout: float) -> dict[str, Any] | None:
        """Return the broker's counters.

        Args:
            timeout: Seconds to wait.

        Returns:
            None without an answer in time.
        """
        deadline = self._runtime.monotonic() + timeout
        self._stats = None
        self._transmit({"op": "stats"})
        with self._condition:
            self._wait_for(lambda: self._stats is not None, deadline)
            return self._stats

    def close(self) -> None:
        """End the connection; appends that wait for an answer are lost. May be repeated."""
        with self._condition:
            self._finish()

    def abandon(self) -> None:
        """Stop using the connection; the thread that reads ends it within a second.

        This takes no lock and closes nothing, because finalizers run in the middle of other calls.
        """
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
            # Remove the request even after an interrupt: otherwise it would use up one of the
            # places for open requests for ever.
            with self._condition:
                del self._pending[number]
                self._condition.notify_all()
        if isinstance(request.answer, OpenDataBufferError):
            raise request.answer
        return request.answer

    def _await_room(self, until: float | None) -> None:
        # The broker would close the connection at one more request.
        self._wait_for(lambda: len(self._pending) < protocol.MAX_OPEN_REQUESTS, until)

    def _wait_for(self, is_true: Callable[[], bool], until: float | None) -> None:
        """Wait, with the lock, until the condition is true or the connection has ended."""
        wait_for(self._runtime, self._condition, lambda: self.is_over or is_true(), until=until)

    def _receive_first(self) -> bytes:
        message = self._channel.receive(CONNECT_S)
        if message is None:
            raise ChannelClosed(f"the broker sent nothing for {CONNECT_S:g} s")
        return message

    def _transmit(self, body: dict[str, Any], *, waits: bool = True) -> bool:
        """Encode and send a message, without holding the lock.

        While a suspended broker blocks this thread, the thread that reads must be able to notice
        that.

        Args:
            body: The message.
            waits: Whether to wait while another thread sends.

        Returns:
            False when nothing was sent: the connection had ended, or another thread was sending.

        Raises:
            ProtocolError: The message is larger than the broker accepts.
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
        """Process a message of the broker. Called with the lock.

        Raises:
            ProtocolError: A broker does not send such a message.
        """
        body = self._end.decode(message)
        # Note the clock first: once the answer is there, the next append may begin at once.
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
                # This answer follows the broker's last write of the entries: it begins no other.
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
                return  # The caller has stopped waiting.
            case _:
                raise protocol.ProtocolError(
                    f"unknown message {str(body.get('op'))[:50]!r} of the broker"
                )
        self._condition.notify_all()

    def _renew(self) -> list[int]:
        """Renew the appends that wait for a slow write. Called with the lock.

        They get the clock that was just received. Without renewal, an append that arrives during a
        write of more than two seconds would be refused when the next write begins, be sent again,
        and never be written.

        Returns:
            The numbers of the renewed appends.
        """
        renewed = []
        now = self._clock_at
        for number, request in self._pending.items():
            is_old = now - request.clock_at >= RENEW_S
            if request.answer is None and is_old and now + request.valid_s <= request.begin_by:
                # Renew it here before the broker does: this client must not ask another broker
                # while this one may still write it.
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
