"""A producer where the store takes one write of an object only so often (GCS: one a second)."""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.pace import EVERY_S, durations

NIGHT = int(os.environ.get("OPENDATA_BUFFER_KILLS", "16")) >= 100


def test_a_record_waits_for_one_turn_and_hardly_a_write_is_refused(
    real_server: Callable[[str], str],
) -> None:
    delays, refused = durations(3.0, EVERY_S, real_server("fake-gcs-server"))
    assert len(delays) == 60
    if NIGHT:  # turns are told by the clock: a machine that runs other tests, too, misses some
        # Without the pace about ten were refused, and half of all records waited for two turns.
        assert refused <= 2
        assert sorted(delays)[len(delays) // 2] < 1.75 * EVERY_S
