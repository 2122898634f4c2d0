"""Connections have all the time that a slow machine takes, and brokers end with their test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from opendata_buffer.admin import status as admin_status
from opendata_buffer.broker import client, committer, network, protocol
from tests.unit.broker import local


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker in the process of the test answers late when the processor is busy elsewhere.

    Silent brokers and requests that grow old are tested where time is the test's own.
    """
    for module in (client, network):
        monkeypatch.setattr(module, "CONNECT_S", 30.0)
    monkeypatch.setattr(client, "SILENCE_S", 30.0)
    monkeypatch.setattr(admin_status, "STATS_S", 30.0)
    monkeypatch.setattr(committer, "FIND_S", 60.0)
    monkeypatch.setattr(network, "HANDSHAKE_S", 30.0)
    monkeypatch.setattr(protocol, "VALID_MS", 60_000)


@pytest.fixture(autouse=True)
def _brokers_stop() -> Iterator[None]:
    yield
    while local.brokers:
        local.brokers.pop().stop(5)
