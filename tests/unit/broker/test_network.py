"""WebSocket connections to brokers."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.sync import client as websockets_client

from opendata_buffer.broker.client import ChannelClosed, ChannelRefused
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.broker.network import (
    Listen,
    WebSocketNetwork,
    WebSocketPort,
    listen_for,
    open_channel,
    own_address,
)
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import RUNTIME


def test_a_queue_on_one_machine_is_served_there_and_a_shared_one_to_every_machine(
    tmp_path: Path,
) -> None:
    assert listen_for(MemoryStore()) == listen_for(LocalStore(tmp_path)) == Listen()
    shared: Any = SimpleNamespace(url="s3://bucket/orders")
    port = WebSocketNetwork(RUNTIME, listen_for(shared)).listen()
    # A loopback address, or 0.0.0.0, would mean another process on each machine.
    assert port.address.rpartition(":")[0] == own_address() != "0.0.0.0"
    # It listens there, and on no other interface.
    assert isinstance(port, WebSocketPort)
    with socket.socket(fileno=os.dup(port.descriptors()[0])) as listening:
        assert listening.getsockname()[0] == own_address()
    port.close()


def announced(port: int) -> DiscoveryRecord:
    return DiscoveryRecord(1, "id", f"127.0.0.1:{port}", b"s" * 32)


def test_an_address_where_no_process_listens_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ChannelRefused, match="no process listens"):
            open_channel(announced(taken.getsockname()[1]), 30.0)


def test_a_port_that_accepts_and_says_nothing_costs_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []
    really_connect = websockets_client.connect

    def connect(*where: Any, open_timeout: float, **options: Any) -> Any:
        limits.append(open_timeout)
        return really_connect(*where, open_timeout=open_timeout, **options)

    monkeypatch.setattr(websockets_client, "connect", connect)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ChannelClosed) as caught:
            open_channel(announced(silent.getsockname()[1]), 0.3)
        assert not isinstance(caught.value, ChannelRefused)
    assert limits == [0.3]


@pytest.mark.parametrize(
    "address",
    ["no-such-host.invalid:1", "broker..svc:7420", "127.0.0.1:99999", "[::1:7420", "host:x"],
)
def test_an_address_that_does_not_resolve_or_is_none_is_not_reached(address: str) -> None:
    with pytest.raises(ChannelClosed):
        open_channel(DiscoveryRecord(1, "id", address, b"s" * 32), 1.0)


def test_without_a_thread_to_spare_nothing_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*where: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(websockets_client, "connect", connect)
    with pytest.raises(ChannelClosed, match="can't start new thread"):
        open_channel(announced(1), 1.0)
