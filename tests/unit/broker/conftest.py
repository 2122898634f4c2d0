"""Fixtures that relax the time limits of brokers and stop the brokers of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opendata_buffer.admin import broker_status
from opendata_buffer.broker import client, committer, network, protocol
from tests.unit.broker import local


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relax the time limits, because a broker in the test's process answers late on a busy machine.

    Tests of silent brokers and of requests that expire move the clock themselves.
    """
    for module in (client, network):
        monkeypatch.setattr(module, "CONNECT_S", 30.0)
    monkeypatch.setattr(client, "SILENCE_S", 30.0)
    monkeypatch.setattr(broker_status, "STATS_S", 30.0)
    monkeypatch.setattr(committer, "FIND_S", 60.0)
    monkeypatch.setattr(network, "HANDSHAKE_S", 30.0)
    monkeypatch.setattr(protocol, "VALID_MS", 60_000)


@pytest.fixture(autouse=True)
def _brokers_stop() -> Iterator[None]:
    yield
    while local.brokers:
        local.brokers.pop().stop(5)
