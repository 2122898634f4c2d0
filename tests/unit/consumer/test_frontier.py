"""The cursors of a consumer, move by move."""

from __future__ import annotations

import pytest

from opendata_buffer.consumer.cursors import Frontier
from opendata_buffer.errors import InvalidInput


def test_a_new_frontier_has_nothing_before_its_cursor() -> None:
    frontier = Frontier.at(0)
    assert frontier.last_acked is None
    assert frontier.last_handed_out is None
    assert Frontier.at(5).last_acked == 4


def test_f26_first_ack_must_have_been_handed_out() -> None:
    with pytest.raises(InvalidInput, match=r"ack sequence 3: it was not handed out\. Nothing can"):
        Frontier.at(0).ack(3)


def test_f26_first_ack_must_be_contiguous() -> None:
    frontier = Frontier.at(0).hand_out(3)
    with pytest.raises(InvalidInput, match="cannot ack sequence 3: 0 comes first"):
        frontier.ack(3)
    assert frontier.ack(0).ack(1).last_acked == 1


def test_an_ack_is_given_once() -> None:
    frontier = Frontier.at(0).hand_out(3).ack(0)
    with pytest.raises(InvalidInput, match="everything through 0 is acknowledged already"):
        frontier.ack(0)


@pytest.mark.parametrize("sequence", [4, 2**63, 2**64])
def test_f27_ack_through_stops_at_what_was_handed_out(sequence: int) -> None:
    frontier = Frontier.at(0).hand_out(3)
    with pytest.raises(InvalidInput, match=r"was not handed out\. Sequences 0 to 3 can"):
        frontier.ack_through(sequence)
    assert frontier.ack_through(3).next_ack == 4


@pytest.mark.parametrize("sequence", [-1, 0, 2])
def test_f27_ack_through_rejects_what_is_acknowledged(sequence: int) -> None:
    frontier = Frontier.at(0).hand_out(5).ack_through(2)
    with pytest.raises(InvalidInput, match="everything through 2 is acknowledged already"):
        frontier.ack_through(sequence)


def test_ack_through_moves_over_everything() -> None:
    frontier = Frontier.at(7).hand_out(9).ack_through(9)
    assert (frontier.last_acked, frontier.undequeued) == (9, 3)
    assert frontier.dequeued().undequeued == 0


def test_handing_out_again_moves_nothing_back() -> None:
    assert Frontier.at(0).hand_out(5).hand_out(2).last_handed_out == 5


def test_f25_ack_passes_over_skipped_sequences() -> None:
    frontier = Frontier.at(0).hand_out(0).skip(1).hand_out(2).ack(0)
    assert frontier.last_acked == 0, "a skipped entry leaves the queue with the next ack only"
    assert frontier.ack(2).last_acked == 2
    assert frontier.ack(2).skipped == frozenset()


def test_f25_a_skipped_sequence_can_be_acknowledged_itself() -> None:
    assert Frontier.at(0).skip(0).ack(0).last_acked == 0


def test_f25_skip_takes_the_next_or_a_handed_out_sequence() -> None:
    frontier = Frontier.at(0).hand_out(4).ack(0)
    assert frontier.skip(3).last_handed_out == 4
    assert frontier.skip(5).last_handed_out == 5
    for sequence in (0, 6):
        with pytest.raises(InvalidInput, match=f"skip sequence {sequence}: only sequences 1 to 5"):
            frontier.skip(sequence)
    with pytest.raises(InvalidInput, match="only sequence 7 can"):
        Frontier.at(7).skip(8)


def test_a_jump_forgets_what_was_lost() -> None:
    frontier = Frontier.at(0).hand_out(1).skip(1).jump(10)
    assert frontier == Frontier.at(10)
