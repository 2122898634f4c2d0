"""Connections have all the time that a slow machine takes."""

from __future__ import annotations

import pytest

from opendata_buffer.broker import client, dial


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker in the process of the test answers late when the processor is busy elsewhere."""
    for module in (client, dial):
        monkeypatch.setattr(module, "CONNECT_S", 30.0)
