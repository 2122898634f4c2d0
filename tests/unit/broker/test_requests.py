"""What workers ask for, within bounds."""

from __future__ import annotations

import pytest

from opendata_buffer.broker.protocol import MAX_CLAIMED, parse_beat, parse_claim, parse_finish
from opendata_buffer.broker.secure_channel import ProtocolError


def test_requests_out_of_bounds_are_cut_or_refused() -> None:
    claim = {"n": 1, "max": 10**9, "wait_ms": 10**9, "worker": "w", "timeout_ms": 0}
    parsed = parse_claim({**claim, "max_deliveries": 0}, 0.0, print)
    assert (parsed.most, parsed.until, parsed.timeout_ms) == (MAX_CLAIMED, 60.0, 1)
    finish = {"n": 1, "how": "done", "reason": "", "sequence": 1, "token": 1, "rest_ms": 0}
    assert parse_finish(finish, 0.0, print).how == "done"
    assert parse_beat({"tokens": [1, 2]}) == [1, 2]
    for parse, body in (
        (parse_claim, {**claim, "max_deliveries": 0, "worker": "w" * 1_000}),
        (parse_claim, claim),
        (parse_finish, {**finish, "how": "drop"}),
        (parse_finish, {**finish, "token": -1}),
    ):
        with pytest.raises(ProtocolError):
            parse(body, 0.0, print)
    for tokens in (None, ["a"], "12"):
        with pytest.raises(ProtocolError):
            parse_beat({"tokens": tokens})
