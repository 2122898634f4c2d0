"""A broker that lives is told apart from one that does not; claims are counted."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from opendata_buffer.admin.broker import BrokerStatus, ask_broker, read_claims
from opendata_buffer.broker import network as dial_module
from opendata_buffer.broker.claims import Claims, claims_key, encode
from opendata_buffer.broker.client import Connection
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.broker.network import connect
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import CorruptData
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import RUNTIME, connected, entries, serving, soon

CONFIG = QueueConfig(store="memory://unused")


def dial(broker_record: DiscoveryRecord) -> Connection:
    return connect(broker_record, RUNTIME)


def test_a_broker_that_lives_tells_its_counters() -> None:
    with serving() as (_, broker_record, _), connected(broker_record) as client:
        client.append(entries("a", "b", "c"), since=None, begin_by=soon())
        client.append(entries("d"), since=None, begin_by=soon())
        found = ask_broker(broker_record, dial)
    assert (found.term, found.id, found.address) == (1, "id", broker_record.address)
    assert (found.alive, found.reason) == (True, "")
    assert (found.clients, found.commits, found.appended) == (2, 2, 4)
    assert (found.waiting, found.conflicts, found.group_size) == (0, 0, 2.0)
    assert found.floors == 0
    assert found.commit_rate is not None
    assert found.commit_rate > 0


def test_a_broker_whose_port_refuses_is_not_alive_and_says_why() -> None:
    with serving() as (_, broker_record, _):
        pass
    found = ask_broker(broker_record, dial)
    assert found.alive is False
    assert "no process listens" in found.reason
    assert (found.clients, found.group_size, found.commit_rate) == (None, None, None)


def test_a_suspended_broker_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_module, "CONNECT_S", 0.3)
    # Its kernel accepts, and nobody ever answers.
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = ask_broker(DiscoveryRecord(1, "id", address, b"s" * 32), dial)
    assert found.alive is False


def test_somebody_else_on_the_port_is_not_the_broker() -> None:
    with serving(secret=b"t" * 32) as (_, broker_record, _):
        found = ask_broker(replace(broker_record, secret=b"s" * 32), dial)
    assert found.alive is False


@pytest.mark.parametrize("address", ["", "127.0.0.1:9"])
def test_one_that_has_left_or_cannot_be_asked_is_neither(address: str) -> None:
    broker_record = DiscoveryRecord(3, "id", address, b"s" * 32 if address else b"")
    found = ask_broker(broker_record, None if address else dial)
    assert found == BrokerStatus(term=3, id="id", address=address, seen_ms=0)
    assert found.alive is None


def test_claims_are_counted() -> None:
    store = MemoryStore()
    assert read_claims(store, CONFIG) is None
    claims = Claims(epoch=1, frontier=5).claim([5, 6, 7], "one", 1_000).finish(6)
    claims = claims.release(5).claim([5], "two", 1_000)
    store.put(claims_key("ingest"), encode(claims))
    found = read_claims(store, CONFIG)
    assert found is not None
    assert (found.frontier, found.held, found.done) == (5, 2, 1)
    assert (found.oldest_held, found.oldest_worker, found.oldest_deliveries) == (5, "two", 2)


def test_claims_that_are_none_are_an_error() -> None:
    store = MemoryStore()
    store.put(claims_key("ingest"), b"garbage")
    with pytest.raises(CorruptData):
        read_claims(store, CONFIG)
