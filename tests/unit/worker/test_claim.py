"""What a worker knows of a claim."""

from __future__ import annotations

import pytest

from opendata_buffer.broker.protocol import MAX_REASON_CHARS, parse_finish
from opendata_buffer.broker.worker import Claim
from opendata_buffer.runtime import Moment

ASKED = Moment(wall_ms=1_000_000, monotonic=50.0)


def claim() -> Claim:
    return Claim(sequence=7, token=3, beaten=ASKED)


@pytest.mark.parametrize(
    ("wall_ms", "monotonic", "sure"),
    [
        (1_000_000, 50.0, True),
        (1_029_999, 79.999, True),
        (1_030_000, 60.0, False),  # the machine slept, and its monotonic clock with it
        (1_010_000, 80.0, False),  # the wall clock was set back meanwhile
        (999_999, 51.0, False),  # nobody knows how far
        (1_000_001, 49.0, False),  # the machine was started anew
    ],
)
def test_a_claim_is_sure_for_its_time_by_both_clocks(
    wall_ms: int, monotonic: float, sure: bool
) -> None:
    assert claim().is_sure(Moment(wall_ms, monotonic), 30_000) is sure


def test_a_heartbeat_renews_it() -> None:
    held = claim()
    late = Moment(1_031_000, 81.0)
    assert not held.is_sure(late, 30_000)
    held.beaten = Moment(1_020_000, 70.0)
    assert held.is_sure(late, 30_000)


@pytest.mark.parametrize("how", ["done", "release", "reject"])
def test_its_end_is_what_a_broker_reads(how: str) -> None:
    body = claim().end(how, reason="torn" * MAX_REASON_CHARS, rest_ms=500)
    read = parse_finish(body, 0.0, lambda _: None)
    assert (read.how, read.sequence, read.token, read.rest_ms) == (how, 7, 3, 500)
    assert read.reason == body["reason"]
    assert len(read.reason) == MAX_REASON_CHARS
