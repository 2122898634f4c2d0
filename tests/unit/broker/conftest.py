"""Connections have all the time that a slow machine takes."""

from __future__ import annotations

import pytest

from opendata_buffer.admin import status as admin_status
from opendata_buffer.broker import client, committer, server
from opendata_buffer.broker import client as calls
from opendata_buffer.broker import network as dial
from opendata_buffer.broker import protocol as messages


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker in the process of the test answers late when the processor is busy elsewhere.

    What becomes of one that is silent, and of a request that grows old, is tested where time is
    the test's own.
    """
    for module in (client, dial):
        monkeypatch.setattr(module, "CONNECT_S", 30.0)
    monkeypatch.setattr(client, "SILENCE_S", 30.0)
    monkeypatch.setattr(admin_status, "STATS_S", 30.0)
    monkeypatch.setattr(committer, "FIND_S", 60.0)
    monkeypatch.setattr(server, "HANDSHAKE_S", 30.0)
    for module in (calls, messages):
        monkeypatch.setattr(module, "VALID_MS", 60_000)
