"""Whose turn it is."""

from __future__ import annotations

from opendata_buffer.topic.consumer import in_turn


def test_a_backlog_waits_for_those_that_have_little() -> None:
    waiting = {"a": "a" * 100, "b": "bb", "c": "", "d": "d"}
    found = "".join(item for _, item in in_turn(waiting, None, 8))
    assert found == "abdabaaa"


def test_the_one_behind_the_last_begins() -> None:
    waiting = {"a": "aa", "b": "bb", "c": "cc"}
    for last, order in (("a", "bca"), ("c", "abc"), ("gone", "abc"), (None, "abc")):
        assert "".join(item for _, item in in_turn(waiting, last, 3)) == order


def test_names_come_with_their_items() -> None:
    assert in_turn({"a": [1], "b": [2]}, None, 9) == [("a", 1), ("b", 2)]
    assert in_turn({}, None, 9) == []
