"""A status asks the broker that is announced, and recognises one that does not answer."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from opendata_buffer.admin.broker_status import ask_broker
from opendata_buffer.broker import network as dial_module
from opendata_buffer.broker.client import Connection, DiscoveryRecord
from opendata_buffer.broker.network import WebSocketNetwork
from tests.unit.broker.local import RUNTIME as BROKER_RUNTIME
from tests.unit.broker.local import serving


def connect(broker_record: DiscoveryRecord) -> Connection:
    return WebSocketNetwork(BROKER_RUNTIME).connect(broker_record)


def test_a_suspended_broker_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_module, "CONNECT_S", 0.3)
    # Its kernel accepts the connection, and the process never answers.
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = ask_broker(DiscoveryRecord(1, "id", address, b"s" * 32), connect)
    assert found.alive is False


def test_another_process_on_the_port_is_not_the_broker() -> None:
    with serving(secret=b"t" * 32) as (_, broker_record, _):
        found = ask_broker(replace(broker_record, secret=b"s" * 32), connect)
    assert found.alive is False
