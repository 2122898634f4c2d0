"""The cursors of a consumer, move by move."""

from __future__ import annotations

import pickle

import pytest

from opendata_buffer.consumer.cursors import Cursors, Position, check_data_loss
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.manifest import Manifest


def test_a_new_consumer_has_nothing_before_its_cursor() -> None:
    cursors = Cursors.at(0)
    assert cursors.last_acked is None
    assert cursors.last_handed_out is None
    assert Cursors.at(5).last_acked == 4


def test_f26_first_ack_must_have_been_handed_out() -> None:
    with pytest.raises(InvalidInput, match=r"ack sequence 3: it was not handed out\. Nothing can"):
        Cursors.at(0).ack(3)


def test_f26_first_ack_must_be_contiguous() -> None:
    cursors = Cursors.at(0).hand_out(3)
    with pytest.raises(InvalidInput, match="cannot ack sequence 3: 0 comes first"):
        cursors.ack(3)
    assert cursors.ack(0).ack(1).last_acked == 1


@pytest.mark.parametrize("sequence", [4, 2**63, 2**64])
def test_f27_ack_through_stops_at_what_was_handed_out(sequence: int) -> None:
    cursors = Cursors.at(0).hand_out(3)
    with pytest.raises(InvalidInput, match=r"was not handed out\. Sequences 0 to 3 can"):
        cursors.ack_through(sequence)
    assert cursors.ack_through(3).next_ack == 4


@pytest.mark.parametrize("sequence", [-1, 0, 2])
def test_f27_ack_through_rejects_what_is_acknowledged(sequence: int) -> None:
    cursors = Cursors.at(0).hand_out(5).ack_through(2)
    with pytest.raises(InvalidInput, match="everything through 2 is acknowledged already"):
        cursors.ack_through(sequence)


def test_ack_through_moves_over_everything() -> None:
    cursors = Cursors.at(7).hand_out(9).ack_through(9)
    assert (cursors.last_acked, cursors.undequeued) == (9, 3)
    assert cursors.dequeued().undequeued == 0
    assert cursors.hand_out(8).last_handed_out == 9, "nothing moves back"


def test_f25_ack_passes_over_skipped_sequences() -> None:
    cursors = Cursors.at(0).hand_out(0).skip(1).hand_out(2).ack(0)
    assert cursors.last_acked == 0, "a skipped entry leaves the queue with the next ack only"
    assert cursors.ack(2).last_acked == 2
    assert cursors.ack(2).skipped == frozenset()


def test_f25_a_skipped_sequence_can_be_acknowledged_itself() -> None:
    assert Cursors.at(0).skip(0).ack(0).last_acked == 0


def test_f25_skip_takes_the_next_or_a_handed_out_sequence() -> None:
    cursors = Cursors.at(0).hand_out(4).ack(0)
    assert cursors.skip(3).last_handed_out == 4
    assert cursors.skip(5).last_handed_out == 5
    for sequence in (0, 6):
        with pytest.raises(InvalidInput, match=f"skip sequence {sequence}: only sequences 1 to 5"):
            cursors.skip(sequence)
    with pytest.raises(InvalidInput, match="only sequence 7 can"):
        Cursors.at(7).skip(8)


def test_a_jump_forgets_what_was_lost() -> None:
    cursors = Cursors.at(0).hand_out(1).skip(1).jump(10)
    assert cursors == Cursors.at(10)


ID = "01JD5T4R3KXBMZ7QV9N2WG8Y00"


@pytest.mark.parametrize("position", [Position(ID, 0), Position(ID, 2**63), Position("", 41)])
def test_a_position_prints_parses_and_pickles(position: Position) -> None:
    assert str(Position(ID, 41)) == f"{ID}:41"
    assert Position.of(41) == Position("", 41)
    assert Position.parse(str(position)) == position
    assert pickle.loads(pickle.dumps(position)) == position
    assert Position.of(str(position)) == Position.of(position) == position


@pytest.mark.parametrize("text", ["", ":", f"{ID}:", f"{ID}:-1", f"{ID}:1:2", "1.5", "٤١", " 1"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="use '<queue id>:<sequence>'"):
        Position.parse(text)


@pytest.mark.parametrize("given", [True, -1, 1.5, b"1"])
def test_what_is_no_sequence_is_refused(given: object) -> None:
    with pytest.raises(InvalidInput, match="last_acked_sequence is"):
        Position.of(given)  # type: ignore[arg-type]


def go_on(cursors: Cursors, oldest: int, *, allowed: bool) -> Cursors:
    manifest = Manifest.starting_at(oldest, 1)
    return check_data_loss(
        cursors, manifest, "in/manifest", allowed=allowed, cause="Somebody else."
    )


def test_what_left_the_queue_behind_the_cursor_was_handed_out_and_is_no_gap() -> None:
    cursors = Cursors.at(2).hand_out(4)
    for oldest in (0, 2, 4, 5):
        assert go_on(cursors, oldest, allowed=False) is cursors


def test_f28_what_was_not_handed_out_and_is_gone_is_an_error_that_says_how_that_can_be() -> None:
    with pytest.raises(DataLoss, match=r"sequence 5 is needed .* starts at 7.*Somebody else\."):
        go_on(Cursors.at(2).hand_out(4), 7, allowed=False)


def test_a_loss_that_is_allowed_is_logged_and_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    found = go_on(Cursors.at(2).hand_out(4), 7, allowed=True)
    assert (found.next_ack, found.next_hand_out) == (7, 7)
    assert "in/manifest starts at 7, sequences 5 to 6 are gone unread" in caplog.text
