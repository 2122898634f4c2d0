"""A producer where the store takes one write of an object only so often (GCS: one a second)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.pace import durations
from opendata_buffer.stores import gcs

EVERY_S = 0.5
"""Instead of a second, which would make the test as long again."""


def test_hardly_a_write_is_refused(
    real_server: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "_WRITE_INTERVAL_S", EVERY_S)
    delays, refused = durations(3.0, EVERY_S, real_server("fake-gcs-server"))
    assert len(delays) == 60
    # Without the pace about ten were refused. How long records wait is a line of the benchmarks.
    assert refused <= 4
