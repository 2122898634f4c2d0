"""The election of the process that serves as the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from opendata_buffer.broker import election as election_module
from opendata_buffer.broker.client import ChannelRefused, DiscoveryRecord, Lease
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import WebSocketNetwork, WebSocketPort
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.runtime import Task
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import (
    CONFIG,
    RUNTIME,
    FakeConnection,
    NetworkOf,
    announce,
    connected,
    entries,
    eventually,
    host,
    hosting,
    soon,
)


def test_one_of_two_hosts_serves_and_the_other_takes_over_at_once_when_it_stops() -> None:
    store = MemoryStore()
    hosts = [host(store), host(store)]
    try:
        eventually(lambda: any(each.serving for each in hosts))
        first = next(each for each in hosts if each.serving)
        second = next(each for each in hosts if each is not first)
        assert second.serving is None
        announced = first.serving
        assert announced is not None
        with connected(announced, store) as client:
            assert client.append(entries("a"), since=None, begin_by=soon()) == 0
        first.stop(10)
        assert eventually(lambda: second.serving).term > announced.term
    finally:
        for each in hosts:
            each.stop(10)
    left = Lease(store, CONFIG, RUNTIME).read()
    assert left is not None
    assert not left.serves


def test_a_host_whose_record_was_replaced_steps_down() -> None:
    store = MemoryStore()
    with hosting(store) as ours:
        announced = ours.serving
        announce(store, address="127.0.0.1:1")
        assert eventually(lambda: ours.broker is None or ours.serving != announced)


class Still(ManualRuntime):
    """Runs no thread of an election; the test does their work. Requests made together do run."""

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        runs = name == "opendata-buffer-together"
        return RUNTIME.spawn(target if runs else lambda: None, name)


@pytest.mark.parametrize("data", [b"", b'{"version": 2}', b"x" * 70_000])
def test_an_unreadable_record_is_replaced_once_it_is_not_renewed(data: bytes) -> None:
    store, runtime = MemoryStore(), Still()
    ours = LeaderElection(store, CONFIG, runtime, WebSocketNetwork(RUNTIME))
    try:
        # A later release may write a record that this one cannot read.
        for number in range(5):
            store.put("ingest/_broker.json", data + b" " * number)
            ours._stand_by()
            runtime.advance(election_module.SILENT_S - 0.1)
            ours._stand_by()
            assert ours.serving is None
        runtime.advance(0.2)
        ours._stand_by()
        assert ours.serving == Lease(store, CONFIG, RUNTIME).read()
    finally:
        ours._leave()


class Cut:
    """A store that this process can no longer reach once it is cut off."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.cut = False

    def __getattr__(self, name: str) -> Any:
        if self.cut and name in ("get", "put_if"):
            raise TransientStorageError("cut off")
        return getattr(self._store, name)


@contextmanager
def cut_off(store: MemoryStore) -> Iterator[tuple[LeaderElection, Cut]]:
    behind: Any = Cut(store)
    with hosting(behind) as ours:
        try:
            behind.cut = True
            yield ours, behind
        finally:
            behind.cut = False


def test_a_broker_that_cannot_reach_the_store_steps_down_although_clients_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, seconds in (("BEAT_S", 0.1), ("STAND_BY_S", 0.1), ("SILENT_S", 0.5)):
        monkeypatch.setattr(election_module, name, seconds)
    store = MemoryStore()
    with cut_off(store) as (ours, _), hosting(store):
        assert eventually(lambda: ours.serving is None)


def test_a_broker_whose_renewal_is_late_knows_that_it_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, seconds in (("BEAT_S", 0.05), ("STAND_BY_S", 0.05), ("LATE_S", 1.0)):
        monkeypatch.setattr(election_module, name, seconds)
    with cut_off(MemoryStore()) as (ours, behind):
        cut_at = RUNTIME.monotonic()
        eventually(lambda: ours._steady_since() > cut_at)
        behind.cut = False
        beaten_at = ours._beaten_at
        eventually(lambda: ours._beaten_at > beaten_at)
        # A busy machine may be late again with a renewal.
        assert eventually(lambda: cut_at < ours._steady_since() <= ours._beaten_at)


def refusing(*errors: Exception | None) -> tuple[NetworkOf, list[DiscoveryRecord]]:
    """Return a network that fails with these errors in order, and the addresses it was asked for.

    The last error is raised for all later connections.
    """
    asked: list[DiscoveryRecord] = []

    def connect(broker_record: DiscoveryRecord) -> Any:
        error = errors[min(len(asked), len(errors) - 1)]
        asked.append(broker_record)
        if error is not None:
            raise error
        return FakeConnection()

    return NetworkOf(connect), asked


def test_one_refused_connection_does_not_prove_that_a_broker_has_ended() -> None:
    store = MemoryStore()
    other = announce(store)
    network, asked = refusing(ChannelRefused("its backlog is full"), None)
    ours = LeaderElection(store, CONFIG, RUNTIME, network)
    try:
        eventually(lambda: len(asked) > 1, 10)
        assert other.same_broker(ours.stands_by_for)
        assert ours.serving is None
    finally:
        ours.stop(10)


def test_a_host_that_cannot_start_a_thread_for_a_moment_serves_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(election_module, "SILENT_S", 0.1)
    store = MemoryStore()
    killed = announce(store)
    network, asked = refusing(RuntimeError("can't start new thread"), ChannelRefused("ended"))
    ours = LeaderElection(store, CONFIG, RUNTIME, network)
    try:
        assert eventually(lambda: ours.serving).term == killed.term + 1
        assert len(asked) > 1
    finally:
        ours.stop(10)


def test_a_host_that_cannot_listen_logs_the_reason() -> None:
    class Taken(WebSocketNetwork):
        def listen(self) -> WebSocketPort:
            raise InvalidInput("the port is taken")

    ours = LeaderElection(MemoryStore(), CONFIG, RUNTIME, Taken(RUNTIME))
    assert "the port is taken" in str(eventually(lambda: ours.failure))
    ours.stop(10)
