"""A connection to a broker: appends go out as they come, answers find their callers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from opendata_buffer.broker.announcement import Announcement
from opendata_buffer.broker.calls import Answer, Appended, Lost, OpenCall, OpenCalls, Refused, Reply
from opendata_buffer.broker.messages import MAX_ENTRIES, append_body
from opendata_buffer.broker.wire import ClientEnd, ProtocolError
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.runtime import Runtime

__all__ = ["Channel", "ChannelClosed", "ChannelRefused", "Connection", "Dial"]

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""For a connection and its handshake. A suspended broker accepts, and never says hello. One that
shakes hands with hundreds at once, on a busy machine, needs more than a second for the last."""

SILENCE_S = 0.75
"""Without any message for so long, while an answer is due, the broker is asked for a sign of
life; without one for as long again, it is taken for dead."""


class ChannelClosed(Exception):
    """The other side, or the network, ended the connection."""


class ChannelRefused(ChannelClosed):
    """Nobody listens at the address: the process that did has ended."""


class Channel(Protocol):
    """Messages of bytes, in order, both ways.

    One thread at a time sends, and one receives; ``close`` may be called by any, and ends both.
    """

    def send(self, message: bytes) -> None:
        """Send; raises :class:`ChannelClosed`."""
        ...

    def receive(self, timeout: float | None) -> bytes | None:
        """The next message, None after ``timeout`` seconds; raises :class:`ChannelClosed`."""
        ...

    def close(self) -> None:
        """End the connection; free to repeat."""
        ...


Dial = Callable[[Announcement, float], Channel]
"""Opens a channel within some seconds; raises :class:`ChannelClosed`."""


class Connection:
    """A connection that has shaken hands. Thread-safe; one thread of its own reads.

    Args:
        channel: Open, and nothing received from it yet.
        announcement: Whose channel it is.
        runtime: Clock and threads.
        nonce: Random bytes, for this connection alone.

    Raises:
        ChannelClosed: The other side ended it, or said nothing.
        ProtocolError: The other side is not the announced broker.
    """

    def __init__(
        self, channel: Channel, announcement: Announcement, runtime: Runtime, nonce: bytes
    ) -> None:
        self.announcement = announcement
        self._channel = channel
        self._runtime = runtime
        self._end = ClientEnd(announcement.secret, announcement.term, nonce)
        self._condition = runtime.condition()
        self._calls = OpenCalls()
        self._stats: dict[str, Any] | None = None
        self._sending = False
        self._over = False
        self._abandoned = False
        try:
            channel.send(self._end.prove(self._first_words()))
            self._end.finish(self._first_words())
            self._transmit({"op": "ping"})
            answer = self._first_words()
            with self._condition:
                self._take(answer)
            runtime.spawn(self._read, "opendata-buffer-broker-client")
        except RuntimeError as error:
            # No thread is left for it: its owner does as without a broker.
            channel.close()
            raise ChannelClosed(f"nothing can read what the broker says: {error}") from error
        except BaseException:
            channel.close()
            raise

    @property
    def is_over(self) -> bool:
        """Whether it has ended; every append on it is answered then."""
        return self._over

    def append(self, entries: Sequence[NewEntry], *, since: int | None, begin_by: float) -> Answer:
        """Have entries appended, contiguous and in order, all or none. Blocks for the answer.

        Args:
            entries: At least one.
            since: Where an earlier attempt may have landed, or None when there was none.
            begin_by: No write of it begins after this, monotonic seconds.

        Raises:
            OpenDataBufferError: What the queue raised; see :meth:`.Queue.append`.
        """
        if len(entries) > MAX_ENTRIES:
            return Refused("large")
        with self._condition:
            self._await_room(begin_by)
            if self._runtime.monotonic() >= begin_by:
                return Refused("late")
            if self._over:
                return Refused("unsent")
            number, call = self._calls.begin_append(since, begin_by)
            valid_ms = int(call.valid_s * 1000)
            body = append_body(number, entries, self._calls.clock, valid_ms, since)
        answer = self._complete(number, call, body)
        return answer if isinstance(answer, Appended | Refused | Lost) else Refused("unknown")

    def ask(self, body: Mapping[str, Any], timeout: float | None = None) -> Reply | Refused | Lost:
        """Ask for anything else. Blocks for the answer.

        Args:
            body: The question.
            timeout: Seconds; a later answer is :class:`Lost`.

        Raises:
            OpenDataBufferError: What the broker answers with.
        """
        with self._condition:
            self._await_room(None)
            if self._over:
                return Refused("unsent")
            number, call = self._calls.begin()
        answer = self._complete(number, call, {**body, "n": number}, timeout)
        return Refused("unknown") if isinstance(answer, Appended) else answer

    def tell(self, body: Mapping[str, Any]) -> None:
        """Say something that is not answered."""
        self._transmit(dict(body))

    def post(self, body: Mapping[str, Any], until: float | None) -> bool:
        """Ask for something and wait for no answer; only for room, where much is unanswered.

        Args:
            body: The question.
            until: How long to wait for room, monotonic seconds.

        Returns:
            Whether it was sent, as far as is known.
        """
        with self._condition:
            self._await_room(until)
            if self._over or self._calls.is_full:
                return False
            number, _ = self._calls.begin(posted=True)
        return self._transmit({**body, "n": number})

    def await_posted(self, until: float | None) -> None:
        """Wait until all that was posted is answered, or the connection has ended.

        A connection that is closed while answers come in may take along what was sent on it.
        """
        with self._condition:
            while not self._over and any(each.posted for each in self._calls):
                left = None if until is None else until - self._runtime.monotonic()
                if left is not None and left <= 0:
                    return
                self._condition.wait(left)

    def stats(self, timeout: float) -> dict[str, Any] | None:
        """The broker's counters; None without an answer within ``timeout`` seconds."""
        deadline = self._runtime.monotonic() + timeout
        self._stats = None
        self._transmit({"op": "stats"})
        with self._condition:
            while self._stats is None and not self._over:
                left = deadline - self._runtime.monotonic()
                if left <= 0:
                    break
                self._condition.wait(left)
            return self._stats

    def close(self) -> None:
        """End it; appends that wait for an answer are lost. Free to repeat."""
        with self._condition:
            self._finish()

    def abandon(self) -> None:
        """Nobody uses it any more: the thread that reads ends it within a second.

        Takes no lock and closes nothing: garbage is collected in the middle of anything.
        """
        self._abandoned = True

    def _complete(
        self, number: int, call: OpenCall, body: dict[str, Any], timeout: float | None = None
    ) -> Answer | Reply:
        until = None if timeout is None else self._runtime.monotonic() + timeout
        try:
            try:
                sent = self._transmit(body)
            except ProtocolError as error:
                log.warning("the broker is not asked: %s", error)
                call.answer, sent = Refused("large"), True
            with self._condition:
                if not sent:
                    call.answer = Refused("unsent")
                while call.answer is None:
                    left = None if until is None else until - self._runtime.monotonic()
                    if left is not None and left <= 0:
                        call.answer = call.lost
                    else:
                        self._condition.wait(left)
        finally:
            # Also after an interrupt: what is left behind would take up room for ever.
            with self._condition:
                self._calls.end(number)
                self._condition.notify_all()
        if isinstance(call.answer, OpenDataBufferError):
            raise call.answer
        return call.answer

    def _await_room(self, until: float | None) -> None:
        """With the lock."""
        while self._calls.is_full and not self._over:
            left = None if until is None else until - self._runtime.monotonic()
            if left is not None and left <= 0:
                return
            self._condition.wait(left)

    def _first_words(self) -> bytes:
        message = self._channel.receive(CONNECT_S)
        if message is None:
            raise ChannelClosed(f"the broker said nothing for {CONNECT_S:g} s")
        return message

    def _transmit(self, body: dict[str, Any], *, patient: bool = True) -> bool:
        """Seal and send, without the lock: a suspended broker takes nothing, and the thread that
        reads must notice that while another one waits here.

        Returns:
            False when the connection had ended before anything was sent, or, for one who is not
            patient, while another thread sends.
        """
        with self._condition:
            while self._sending and not self._over:
                if not patient:
                    return False
                self._condition.wait()
            if self._over:
                return False
            # Sealed messages are numbered: they go out in the order in which they are sealed.
            message = self._end.seal(body)
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
            while not self._over and not self._abandoned:
                message = self._channel.receive(SILENCE_S)
                if message is not None:
                    asked = False
                    with self._condition:
                        self._take(message)
                    self._renew()
                elif not self._calls:
                    asked = False
                elif asked:
                    log.warning("%s gives no sign of life", self.announcement)
                    return
                else:
                    asked = True
                    self._transmit({"op": "ping"}, patient=False)
        except ChannelClosed:
            pass
        except ProtocolError as error:
            log.warning("connection to %s ended: %s", self.announcement, error)
        finally:
            with self._condition:
                self._finish()

    def _renew(self) -> None:
        with self._condition:
            clock, renewed = self._calls.clock, self._calls.renew()
        if renewed:
            self._transmit({"op": "renew", "clock": clock, "n": renewed}, patient=False)

    def _take(self, message: bytes) -> None:
        """With the lock."""
        body = self._end.open(message)
        heard = self._calls.hear(body, self._runtime.monotonic())
        if body.get("op") == "stats":
            self._stats = body
        if heard:
            self._condition.notify_all()

    def _finish(self) -> None:
        if self._over:
            return
        self._over = True
        self._channel.close()
        self._calls.lose()
        self._condition.notify_all()
