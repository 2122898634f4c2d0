"""The pauses between two looks at an idle queue."""

from __future__ import annotations

import pytest

from opendata_buffer.consumer.pace import FIRST_PAUSE_S, PollPace

REQUEST_S = 0.06


def looks(pace: PollPace, seconds: float, took_s: float = REQUEST_S) -> list[tuple[float, float]]:
    """Look at an empty queue for some seconds; return when each look began, and its pause."""
    found, now = [], 0.0
    while now < seconds:
        pace.looked(False, now, now + took_s)
        found.append((now, pace.pause_s))
        now += took_s + pace.pause_s
    return found


def test_a_queue_is_looked_at_often_at_first_and_then_more_and_more_rarely() -> None:
    pauses = [round(pause, 6) for _, pause in looks(PollPace(2_000), 60)]
    assert pauses == sorted(pauses)
    assert pauses[0] == FIRST_PAUSE_S
    assert sum(pause == FIRST_PAUSE_S for pause in pauses) <= 5


def test_a_record_waits_at_most_a_fifth_of_the_silence_before_it() -> None:
    for began, pause in looks(PollPace(2_000), 60):
        assert pause <= max(FIRST_PAUSE_S, began / 5)


@pytest.mark.parametrize("took_s", [0.001, 0.06, 0.3])
def test_a_record_that_was_just_missed_is_found_within_the_setting(took_s: float) -> None:
    began, pause = looks(PollPace(2_000), 600, took_s)[-1]
    missed_at, found_at = began + took_s / 2, began + took_s + pause + took_s
    assert found_at - missed_at <= 2.0


def test_an_idle_hour_has_fewer_than_two_thousand_looks() -> None:
    assert 1_800 < len(looks(PollPace(2_000), 3_600)) < 1_920


def test_a_batch_makes_the_looks_frequent_again() -> None:
    pace = PollPace(2_000)
    looks(pace, 60)
    assert pace.pause_s > 1.5
    pace.looked(True, 60.0, 60.1)
    assert pace.pause_s == 0
    pace.looked(False, 700.0, 700.1)  # The program worked on the batch for a long time.
    assert pace.pause_s == FIRST_PAUSE_S


def test_a_store_that_answers_slowly_gets_pauses_too() -> None:
    pace = PollPace(2_000)
    assert {pause for _, pause in looks(pace, 60, 1.9)} == {FIRST_PAUSE_S}


def test_the_setting_may_be_shorter_than_the_first_pause() -> None:
    assert max(pause for _, pause in looks(PollPace(50), 5, 0.001)) <= 0.05
