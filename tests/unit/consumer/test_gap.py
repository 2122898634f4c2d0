"""Entries that are gone before they were read."""

from __future__ import annotations

import pytest

from opendata_buffer.consumer.cursors import Frontier, behind_gap
from opendata_buffer.errors import DataLoss
from opendata_buffer.formats.manifest import Manifest


def go_on(frontier: Frontier, oldest: int, *, allowed: bool) -> Frontier:
    manifest = Manifest.starting_at(oldest, 1)
    return behind_gap(frontier, manifest, "in/manifest", allowed=allowed, cause="Somebody else.")


def test_what_left_the_queue_behind_the_cursor_was_handed_out_and_is_no_gap() -> None:
    frontier = Frontier.at(2).hand_out(4)
    for oldest in (0, 2, 4, 5):
        assert go_on(frontier, oldest, allowed=False) is frontier


def test_f28_what_was_not_handed_out_and_is_gone_is_an_error_that_says_how_that_can_be() -> None:
    with pytest.raises(DataLoss, match=r"sequence 5 is needed .* starts at 7.*Somebody else\."):
        go_on(Frontier.at(2).hand_out(4), 7, allowed=False)


def test_a_loss_that_is_allowed_is_told_and_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    found = go_on(Frontier.at(2).hand_out(4), 7, allowed=True)
    assert (found.next_ack, found.next_hand_out) == (7, 7)
    assert "in/manifest starts at 7, sequences 5 to 6 are gone unread" in caplog.text
