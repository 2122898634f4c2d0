"""A connection to a broker, and its unanswered requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer.broker.client import (
    SILENCE_S,
    Answer,
    ChannelClosed,
    Connection,
    DiscoveryRecord,
    Lost,
    Refused,
)
from opendata_buffer.broker.protocol import (
    MAX_ENTRIES,
    MAX_MESSAGE_BYTES,
    MAX_OPEN_REQUESTS,
    BrokerEnd,
    error_body,
)
from opendata_buffer.errors import QueueFull
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.runtime import Task
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import NAME, connect, entries, eventually, serving

BROKER = DiscoveryRecord(1, "id", "somewhere:1", b"s" * 32)


SOON = 60.0  # on a clock that begins at zero


@pytest.fixture(autouse=True)
def patient() -> None:
    """Keep the real time limits, because these tests move the clock."""


class Scripted:
    """A channel whose peer gives the answers of a test.

    From the first append on, a read that times out moves the clock by its time limit. The clock
    does not move between an answer and its caller, which may be slow. So the broker has been
    silent exactly as long as the client has waited, on every machine.
    """

    def __init__(
        self, answer: Callable[[dict[str, Any]], dict[str, Any] | None], *, waits: bool = False
    ) -> None:
        self.runtime = ManualRuntime()
        self.client: Connection | None = None
        self._waits = waits
        self._end = BrokerEnd(BROKER.secret, 1, "", b"a" * 32, NAME)
        self._answer = answer
        self._condition = threading.Condition()
        self._inbox = [self._end.hello()]
        self.closed = False
        self.heard: list[str] = []

    def send(self, message: bytes) -> None:
        with self._condition:
            if self.closed:
                raise ChannelClosed("closed")
            if not self._end.is_ready:
                self._end.admit(message)
            else:
                body = self._end.decode(message)
                self.heard.append(body["op"])
                if body["op"] == "ping" and len(self.heard) == 1:
                    answer = {"op": "pong", "next": 5}
                else:
                    answer = self._answer(body)
                if answer is not None:
                    self._inbox.append(self._end.encode({**answer, "clock": [1.0, 1]}))
            self._condition.notify_all()

    def receive(self, timeout: float | None) -> bytes | None:
        with self._condition:
            while not self._condition.wait_for(lambda: self._inbox or self.closed, 0.001):
                if "append" in self.heard and not self._waits and self._is_awaited():
                    self.runtime.advance(timeout or 0.0)
                    return None
            if self._inbox:
                return self._inbox.pop(0)
            raise ChannelClosed("closed")

    def _is_awaited(self) -> bool:
        client = self.client
        if client is None or client._sending:
            return False
        return any(request.answer is None for request in list(client._pending.values()))

    def close(self) -> None:
        with self._condition:
            self.closed = True
            self._condition.notify_all()


def connection(channel: Scripted) -> Connection:
    channel.client = Connection(channel, BROKER, channel.runtime)
    return channel.client


def append(client: Connection, since: int | None = None, begin_by: float = SOON) -> Answer:
    return client.append(entries("a"), since=since, begin_by=begin_by)


def done(body: dict[str, Any]) -> dict[str, Any]:
    return {"op": "done", "n": body["n"], "sequence": 7, "next": 8}


def test_each_answer_reaches_its_caller() -> None:
    full = QueueFull("ingest/manifest", 9, 8, 3, None)
    answers: list[dict[str, Any]] = [
        {"op": "done", "sequence": 7, "next": 8},
        {"op": "refused", "why": "moved"},
        {"op": "lost", "since": 3},
        {"op": "failed", "error": error_body(full)},
    ]
    client = connection(Scripted(lambda body: {**answers.pop(0), "n": body["n"]}))
    assert append(client) == 7
    assert append(client) == Refused("moved")
    lost = append(client)
    assert isinstance(lost, Lost)
    assert lost.since == 3
    with pytest.raises(QueueFull, match="more than the limit of 8"):
        append(client)
    assert not client.is_over
    client.close()
    assert client.is_over


@pytest.mark.parametrize(
    ("since", "begin_by", "lost"),
    [
        (None, SOON, Lost(since=5, safe_at=2.0)),
        (3, SOON, Lost(since=3, safe_at=2.0)),
        (None, 0.5, Lost(since=5, safe_at=0.5)),
    ],
)
def test_a_silent_broker_is_asked_once_and_then_lost(
    since: int | None, begin_by: float, lost: Lost
) -> None:
    channel = Scripted(lambda body: None)
    client = connection(channel)
    assert append(client, since, begin_by) == lost
    assert channel.heard == ["ping", "append", "ping"]
    assert channel.runtime.monotonic() == 2 * SILENCE_S


def test_the_client_waits_for_a_slow_broker_that_answers_heartbeats() -> None:
    late: list[int] = []

    def answer(body: dict[str, Any]) -> dict[str, Any] | None:
        if body["op"] == "append":
            late.append(body["n"])
            return None
        if channel.heard.count("ping") < 3:
            return {"op": "pong", "next": 5}
        return {"op": "done", "n": late[0], "sequence": 5, "next": 6}

    channel = Scripted(answer)
    client = connection(channel)
    assert append(client) == 5


def test_a_waiting_append_is_renewed_until_its_own_deadline_is_near() -> None:
    def answers(pings: int, begin_by: float) -> tuple[Scripted, Answer]:
        def answer(body: dict[str, Any]) -> dict[str, Any] | None:
            if body["op"] == "ping" and channel.heard.count("ping") <= pings:
                return {"op": "pong", "next": 5}
            return None

        channel = Scripted(answer)
        return channel, append(connection(channel), begin_by=begin_by)

    channel, lost = answers(2, 60.0)
    assert channel.heard[:4] == ["ping", "append", "ping", "renew"]
    # It counts from the last clock that the broker sent, and not from the first one.
    assert lost == Lost(since=5, safe_at=SILENCE_S + 2.0)
    channel, lost = answers(2, 2.2)
    assert "renew" not in channel.heard
    assert lost == Lost(since=5, safe_at=2.0)


def test_open_requests_are_lost_when_the_connection_ends() -> None:
    channel = Scripted(lambda body: channel.close())
    assert append(connection(channel), since=3) == Lost(since=3, safe_at=2.0)


def test_nothing_is_sent_without_time_left_or_after_the_end() -> None:
    channel = Scripted(lambda body: None)
    client = connection(channel)
    assert append(client, begin_by=-1.0) == Refused("late")
    client.close()
    assert append(client) == Refused("unsent")
    assert client.stats(1.0) is None
    assert channel.heard == ["ping"]


def test_connecting_to_a_broker_that_sends_nothing_fails() -> None:
    class Silent(Scripted):
        def receive(self, timeout: float | None) -> bytes | None:
            return None

    channel = Silent(lambda body: None)
    with pytest.raises(ChannelClosed, match="sent nothing"):
        Connection(channel, BROKER, ManualRuntime())
    assert channel.closed


def test_more_entries_than_a_broker_accepts_are_not_sent() -> None:
    channel = Scripted(lambda body: None)
    client = connection(channel)
    many = entries("a") * (MAX_ENTRIES + 1)
    assert client.append(many, since=None, begin_by=SOON) == Refused("large")
    huge = [NewEntry("ingest/a", (Metadata(0, 0, bytes(MAX_MESSAGE_BYTES)),))]
    assert client.append(huge, since=None, begin_by=SOON) == Refused("large")
    assert channel.heard == ["ping"]


def test_more_requests_than_a_broker_accepts_wait_for_room() -> None:
    asked: list[int] = []
    channel = Scripted(lambda body: asked.append(body["n"]), waits=True)
    client = connection(channel)

    threads = [
        threading.Thread(target=append, args=(client,)) for _ in range(MAX_OPEN_REQUESTS + 5)
    ]
    for thread in threads:
        thread.start()
    # These have no time limit, so they wait for room.
    channel.runtime.await_waits(5)
    eventually(lambda: len(asked) >= MAX_OPEN_REQUESTS)
    assert len(asked) == MAX_OPEN_REQUESTS
    client.close()
    for thread in threads:
        thread.join()


def test_a_caller_that_is_interrupted_takes_up_no_room() -> None:
    channel = Scripted(done)
    client = connection(channel)
    really_send = channel.send

    def interrupted(message: bytes) -> None:
        really_send(message)
        if threading.current_thread() is threading.main_thread():  # the reader renews
            raise KeyboardInterrupt

    channel.send = interrupted  # type: ignore[method-assign]
    for _ in range(MAX_OPEN_REQUESTS):
        with pytest.raises(KeyboardInterrupt):
            append(client)
    channel.send = really_send  # type: ignore[method-assign]
    assert len(client._pending) == 0
    assert append(client) == 7
    client.close()


def test_an_abandoned_connection_closes_itself() -> None:
    with serving() as (broker, broker_record, _):
        client = connect(broker_record)
        eventually(lambda: broker.sessions == 1)
        client.abandon()
        assert eventually(lambda: client.is_over and broker.sessions == 0)


def test_connecting_fails_and_closes_the_channel_if_no_thread_can_start() -> None:
    channel = Scripted(lambda body: None)

    def spawn(target: object, name: str) -> Task:
        raise RuntimeError("can't start new thread")

    channel.runtime.spawn = spawn  # type: ignore[method-assign]
    with pytest.raises(ChannelClosed, match="can't start new thread"):
        connection(channel)
    assert channel.closed


@pytest.mark.parametrize(
    "body", [{"op": "sing"}, {"op": "done", "sequence": "7"}, {}, {"op": 3}], ids=str
)
def test_a_message_that_no_broker_sends_ends_the_connection(
    body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    client = connection(Scripted(lambda asked: {"n": asked["n"], **body}))
    assert append(client) == Lost(since=5, safe_at=2.0)
    assert client.is_over
    assert "unknown message" in caplog.text
