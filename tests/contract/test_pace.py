"""A producer where the store takes one write of an object only so often (GCS: one a second)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.pace import durations
from opendata_buffer.stores import gcs

EVERY_S = 0.5
"""Instead of a second: what counts is how many of these a record waits."""


def test_a_record_waits_for_one_turn_and_hardly_a_write_is_refused(
    real_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "_PACE_S", EVERY_S)
    delays, refused = durations(3.0, EVERY_S, real_server("fake-gcs-server"))
    assert len(delays) == 60
    # It may be late by the machine, never by the store: without the pace about ten were refused,
    # and half of all records waited for two turns.
    assert refused <= 2
    assert sorted(delays)[len(delays) // 2] < 2 * EVERY_S
