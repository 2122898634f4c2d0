"""Sending again what GCS refused for its rate."""

from __future__ import annotations

from itertools import pairwise

import pytest

from opendata_buffer.stores.gcs import SlowDown, until_let_through
from opendata_buffer.testing.runtime import ManualRuntime


def test_a_refused_write_is_sent_again_evenly_until_it_is_let_through(
    runtime: ManualRuntime,
) -> None:
    sent: list[float] = []

    def once() -> str:
        sent.append(runtime.monotonic())
        if len(sent) < 10:
            raise SlowDown
        return "written"

    assert until_let_through(runtime, once) == "written"
    pauses = [later - earlier for earlier, later in pairwise(sent)]
    assert len(pauses) == 9
    assert all(0.1 <= pause <= 0.4 + 1e-9 for pause in pauses)


def test_after_five_seconds_it_is_given_up(runtime: ManualRuntime) -> None:
    def once() -> None:
        raise SlowDown

    with pytest.raises(SlowDown):
        until_let_through(runtime, once)
    assert 4.5 <= runtime.monotonic() <= 5.5


def test_another_error_is_raised_at_once(runtime: ManualRuntime) -> None:
    def once() -> None:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        until_let_through(runtime, once)
    assert runtime.monotonic() == 0
