"""Open requests to a broker, without a connection: what each answer means to whoever waits."""

from __future__ import annotations

import pytest

from opendata_buffer.broker.client import RENEW_S, Appended, Lost, PendingRequests, Refused
from opendata_buffer.broker.protocol import MAX_OPEN_REQUESTS, VALID_MS, error_body
from opendata_buffer.broker.secure_channel import ProtocolError
from opendata_buffer.errors import QueueFull

VALID_S = VALID_MS / 1000
CLOCK = [1.0, 1]


@pytest.fixture(autouse=True)
def patient() -> None:
    """Nobody needs patience where time is the test's own."""


def heard(at: float = 10.0) -> PendingRequests:
    """Of a broker whose queue goes on at sequence 5, heard at some time."""
    calls = PendingRequests()
    assert calls.hear({"op": "pong", "next": 5, "clock": CLOCK}, at) is False
    return calls


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ({"op": "done", "sequence": 7}, Appended(7)),
        ({"op": "refused", "why": "moved"}, Refused("moved")),
        # Its last write of it has begun: from now on it begins none.
        ({"op": "lost", "since": 3}, Lost(since=3, safe_at=11.0)),
        ({"op": "claimed", "n": 1, "batches": []}, {"op": "claimed", "n": 1, "batches": []}),
    ],
)
def test_an_answer_is_for_the_call_of_its_number(said: dict, meaning: object) -> None:  # type: ignore[type-arg]
    calls = heard()
    number, call = calls.begin_append(None, begin_by=60.0)
    _, other = calls.begin()
    assert calls.hear({"n": number, **said}, 11.0) is True
    assert call.answer == meaning
    assert other.answer is None


def test_an_error_of_the_queue_comes_back_as_that_error() -> None:
    calls = heard()
    number, call = calls.begin_append(None, begin_by=60.0)
    full = QueueFull("ingest/manifest", 9, 8, 3, None)
    assert calls.hear({"op": "failed", "n": number, "error": error_body(full)}, 11.0) is True
    assert isinstance(call.answer, QueueFull)
    assert str(call.answer) == str(full)


def test_an_append_that_is_lost_may_lie_where_the_queue_went_on_or_where_it_was_tried_before() -> (
    None
):
    calls = heard(at=10.0)
    _, first = calls.begin_append(None, begin_by=60.0)
    _, again = calls.begin_append(3, begin_by=60.0)
    _, hurried = calls.begin_append(None, begin_by=10.5)
    calls.lose()
    assert first.answer == Lost(since=5, safe_at=10.0 + VALID_S)
    assert again.answer == Lost(since=3, safe_at=10.0 + VALID_S)
    assert hurried.answer == Lost(since=5, safe_at=10.5)


def test_an_answer_that_came_is_not_lost_with_the_connection() -> None:
    calls = heard()
    number, call = calls.begin_append(None, begin_by=60.0)
    calls.hear({"op": "done", "n": number, "sequence": 5}, 11.0)
    calls.lose()
    assert call.answer == Appended(5)


def test_the_end_of_the_queue_never_goes_back() -> None:
    calls = heard()
    calls.hear({"op": "pong", "next": 4}, 11.0)
    _, call = calls.begin()
    assert call.lost.since == 5


def test_a_call_is_renewed_by_a_later_word_while_its_deadline_leaves_time_for_it() -> None:
    calls = heard(at=10.0)
    number, call = calls.begin_append(None, begin_by=60.0)
    _, near = calls.begin_append(None, begin_by=10.0 + VALID_S)
    calls.begin()
    calls.hear({"op": "pong", "clock": [2.0, 2]}, 10.0 + RENEW_S - 0.1)
    assert calls.renew() == []
    calls.hear({"op": "pong", "clock": [3.0, 3]}, 10.0 + RENEW_S)
    assert calls.renew() == [number]
    assert calls.clock == [3.0, 3]
    assert call.lost.safe_at == 10.0 + RENEW_S + VALID_S
    assert near.lost.safe_at == 10.0 + VALID_S
    assert calls.renew() == []  # once for each word that is new enough


def test_there_is_room_again_when_a_call_has_ended() -> None:
    calls = heard()
    number, _ = calls.begin()
    for _ in range(MAX_OPEN_REQUESTS - 1):
        calls.begin()
    assert calls.is_full
    calls.end(number)
    assert not calls.is_full
    assert len(calls) == MAX_OPEN_REQUESTS - 1


def test_what_was_posted_ends_with_its_answer_because_nobody_waits_for_it() -> None:
    calls = heard()
    number, _ = calls.begin(posted=True)
    assert [each.posted for each in calls] == [True]
    assert calls.hear({"op": "given", "n": number}, 11.0) is True
    assert len(calls) == 0
    # Again, it is an answer to nothing.
    assert calls.hear({"op": "given", "n": number}, 11.0) is False


@pytest.mark.parametrize(
    "said", [{"op": "sing"}, {"op": "done", "n": 1, "sequence": "7"}, {}, {"op": 3, "n": 1}]
)
def test_what_no_broker_says_is_refused(said: dict) -> None:  # type: ignore[type-arg]
    calls = heard()
    calls.begin()
    with pytest.raises(ProtocolError, match="the broker says"):
        calls.hear(said, 11.0)
