"""Which process serves as the broker."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.broker import election as host_module
from opendata_buffer.broker.client import Appended, ChannelRefused
from opendata_buffer.broker.discovery_record import DiscoveryRecord, Lease
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import ListeningPort, WebSocketNetwork
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import (
    CONFIG,
    RUNTIME,
    NetworkOf,
    connected,
    entries,
    eventually,
    host,
    soon,
)


def test_of_two_hosts_one_serves_and_the_other_takes_over_at_once_when_it_leaves() -> None:
    store = MemoryStore()
    hosts = [host(store), host(store)]
    try:
        eventually(lambda: any(each.serving for each in hosts))
        first = next(each for each in hosts if each.serving)
        second = next(each for each in hosts if each is not first)
        assert second.serving is None
        announced = first.serving
        assert announced is not None
        with connected(announced) as client:
            assert client.append(entries("a"), since=None, begin_by=soon()) == Appended(0)
        first.stop(10)
        eventually(lambda: second.serving)
        assert second.serving is not None
        assert second.serving.term > announced.term
    finally:
        for each in hosts:
            each.stop(10)


def test_a_host_whose_announcement_was_replaced_steps_down() -> None:
    store = MemoryStore()
    ours = host(store)
    try:
        eventually(lambda: ours.serving)
        announced = ours.serving
        assert announced is not None
        lease = Lease(store, CONFIG, RUNTIME)
        other = type(announced)(0, "other", "127.0.0.1:1", b"o" * 32)
        eventually(lambda: lease.take(other, lease.read()))
        eventually(lambda: ours.service is None or ours.serving != announced)
    finally:
        ours.stop(10)


def test_a_broker_that_died_without_a_word_is_replaced_once_its_port_refuses() -> None:
    store = MemoryStore()
    lease = Lease(store, CONFIG, RUNTIME)
    dead = lease.take(DiscoveryRecord(0, "dead", "127.0.0.1:9", b"d" * 32), None)
    assert dead is not None
    ours = host(store)
    try:
        eventually(lambda: ours.serving)
        assert ours.serving is not None
        assert ours.serving.term == dead.term + 1
    finally:
        ours.stop(10)


def test_who_stops_leaves_no_address_behind() -> None:
    store = MemoryStore()
    ours = host(store)
    eventually(lambda: ours.serving)
    ours.stop(10)
    left = Lease(store, CONFIG, RUNTIME).read()
    assert left is not None
    assert not left.serves


class Cut:
    """A store that this process reaches no more, once it is cut."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.cut = False

    def __getattr__(self, name: str) -> Any:
        if self.cut and name in ("get", "put_if"):
            raise TransientStorageError("cut off")
        return getattr(self._store, name)


def test_a_broker_that_clients_reach_and_that_does_not_reach_the_store_steps_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_module, "BEAT_S", 0.1)
    monkeypatch.setattr(host_module, "STAND_BY_S", 0.1)
    monkeypatch.setattr(host_module, "SILENT_S", 0.5)
    store = MemoryStore()
    behind: Any = Cut(store)
    ours = host(behind)
    other = None
    try:
        eventually(lambda: ours.serving)
        other = host(store)
        behind.cut = True
        eventually(lambda: other.serving)
        eventually(lambda: ours.serving is None)
    finally:
        behind.cut = False
        for each in (ours, other):
            if each is not None:
                each.stop(10)


def test_a_broker_whose_sign_of_life_comes_late_knows_that_it_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_module, "BEAT_S", 0.05)
    monkeypatch.setattr(host_module, "STAND_BY_S", 0.05)
    monkeypatch.setattr(host_module, "LATE_S", 1.0)
    behind: Any = Cut(MemoryStore())
    ours = host(behind)
    try:
        eventually(lambda: ours.serving)
        behind.cut = True
        cut_at = RUNTIME.monotonic()
        eventually(lambda: ours._steady_since() > cut_at)
        behind.cut = False
        beaten_at = ours._beaten_at
        eventually(lambda: ours._beaten_at > beaten_at)
        # A busy machine may be late with a sign of life once more.
        eventually(lambda: cut_at < ours._steady_since() <= ours._beaten_at)
    finally:
        behind.cut = False
        ours.stop(10)


def test_one_refused_connection_does_not_prove_that_a_broker_has_ended() -> None:
    store = MemoryStore()
    other = Lease(store, CONFIG, RUNTIME).take(
        DiscoveryRecord(0, "other", "127.0.0.1:9", b"o" * 32), None
    )
    asked = 0

    class Open:
        def close(self) -> None:
            pass

    def connect(_: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise ChannelRefused("its backlog is full")
        return Open()

    ours = LeaderElection(store, CONFIG, RUNTIME, NetworkOf(connect))
    try:
        eventually(lambda: asked > 1, 10)
        assert other is not None
        assert other.same_broker(ours.stands_by_for)
        assert ours.serving is None
    finally:
        ours.stop(10)


def test_a_host_that_cannot_listen_says_why() -> None:
    class Taken(WebSocketNetwork):
        def listen(self) -> ListeningPort:
            raise InvalidInput("the port is taken")

    ours = LeaderElection(MemoryStore(), CONFIG, RUNTIME, Taken(RUNTIME))
    eventually(lambda: ours.failure)
    assert "the port is taken" in str(ours.failure)
    ours.stop(10)


def test_a_host_that_has_no_thread_left_for_a_moment_goes_on_and_serves_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_module, "SILENT_S", 0.1)
    store = MemoryStore()
    lease = Lease(store, CONFIG, RUNTIME)
    assert lease.take(DiscoveryRecord(0, "dead", "127.0.0.1:9", b"d" * 32), None)
    asked = 0

    def connect(_: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise RuntimeError("can't start new thread")
        raise ChannelRefused("nobody listens")

    ours = LeaderElection(store, CONFIG, RUNTIME, NetworkOf(connect))
    try:
        eventually(lambda: ours.serving)
        assert asked > 1
    finally:
        ours.stop(10)
