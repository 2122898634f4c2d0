"""When an attempt to write is in doubt, and what ends the doubt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from opendata_buffer.queue.cas import Attempts, OutcomeUnknown


class Marks:
    """Recognises a number, and knows where each attempt would have put it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.place = 0
        self.asked: list[list[int]] = []

    def mark(self) -> int:
        self.place += 10
        return self.place

    def find(self, now: set[int] | None, marks: Sequence[int]) -> bool:
        self.asked.append(list(marks))
        if now is not None and -1 in now:
            raise OutcomeUnknown("wiped")
        return now is not None and self.number in now


def test_before_the_first_attempt_nothing_is_looked_for() -> None:
    proof = Marks(1)
    attempts: Attempts[set[int]] = Attempts(proof)
    assert not attempts.look({1}, "v1")
    assert proof.asked == []
    assert not attempts.in_doubt


def test_f1_a_conflict_is_in_doubt_until_the_object_is_read() -> None:
    attempts: Attempts[set[int]] = Attempts(Marks(1))
    attempts.begin()
    attempts.raced()
    assert attempts.in_doubt
    assert not attempts.look({7}, "v2")
    assert not attempts.in_doubt
    attempts.begin()
    attempts.raced()
    assert attempts.look({1, 7}, "v3")
    assert not attempts.in_doubt


def test_f2_a_lost_answer_is_in_doubt_while_its_version_is_the_current_one() -> None:
    attempts: Attempts[set[int]] = Attempts(Marks(1))
    attempts.begin()
    attempts.lost_answer("v1")
    assert not attempts.look(set(), "v1")  # it may be on its way
    assert attempts.in_doubt
    assert not attempts.look({7}, "v2")  # now it can land no more
    assert not attempts.in_doubt


def test_f2_a_write_of_an_object_that_was_not_there_is_in_doubt_while_it_is_not() -> None:
    attempts: Attempts[set[int]] = Attempts(Marks(1))
    attempts.begin()
    attempts.lost_answer(None)
    assert not attempts.look(None, None)
    assert attempts.in_doubt
    assert not attempts.look({7}, "v1")
    assert not attempts.in_doubt


def test_a_later_attempt_that_landed_ends_the_doubt_about_earlier_ones() -> None:
    attempts: Attempts[set[int]] = Attempts(Marks(1))
    attempts.begin()
    attempts.lost_answer("v1")
    attempts.begin()
    attempts.landed()
    assert not attempts.in_doubt


def test_only_marks_of_attempts_in_doubt_are_asked_about_and_the_first_is_told() -> None:
    proof = Marks(1)
    attempts: Attempts[set[int]] = Attempts(proof)
    for lost_at in ("v1", None, "v1"):
        attempts.begin()
        if lost_at is None:
            attempts.raced()
        else:
            attempts.lost_answer(lost_at)
        assert not attempts.look({7}, "v1")
    assert proof.asked == [[10], [10], [10, 30]]
    assert attempts.first_mark == 10


def test_what_cannot_be_traced_leaves_the_doubt() -> None:
    attempts: Attempts[set[int]] = Attempts(Marks(1))
    attempts.begin()
    attempts.lost_answer("v1")
    with pytest.raises(OutcomeUnknown):
        attempts.look({-1}, "v2")
    assert attempts.in_doubt


def test_a_change_that_may_be_applied_twice_is_never_found() -> None:
    attempts: Attempts[set[int]] = Attempts(None)
    attempts.begin()
    attempts.lost_answer("v1")
    assert not attempts.look({1}, "v2")
    assert (attempts.in_doubt, attempts.first_mark) == (False, 0)
