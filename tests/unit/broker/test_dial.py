"""Opening channels: who is not there, who is silent."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from websockets.sync import client as websockets_client

from opendata_buffer.broker.client import ChannelClosed, ChannelRefused
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.broker.network import dial


def announced(port: int) -> DiscoveryRecord:
    return DiscoveryRecord(1, "id", f"127.0.0.1:{port}", b"s" * 32)


def test_an_address_where_nobody_listens_is_told_from_one_that_is_not_reached() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ChannelRefused, match="no process listens"):
            dial(announced(taken.getsockname()[1]), 30.0)


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
            dial(announced(silent.getsockname()[1]), 0.3)
        assert not isinstance(caught.value, ChannelRefused)
    assert limits == [0.3]


def test_a_name_that_does_not_resolve_is_not_reached() -> None:
    with pytest.raises(ChannelClosed):
        dial(DiscoveryRecord(1, "id", "no-such-host.invalid:1", b"s" * 32), 1.0)


@pytest.mark.parametrize("address", ["broker..svc:7420", "127.0.0.1:99999", "[::1:7420", "host:x"])
def test_an_address_that_is_none_is_not_reached(address: str) -> None:
    with pytest.raises(ChannelClosed):
        dial(DiscoveryRecord(1, "id", address, b"s" * 32), 1.0)


def test_without_a_thread_to_spare_nothing_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*where: Any, **options: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(websockets_client, "connect", connect)
    with pytest.raises(ChannelClosed, match="can't start new thread"):
        dial(announced(1), 1.0)
