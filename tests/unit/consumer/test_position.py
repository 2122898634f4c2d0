from __future__ import annotations

import pickle

import pytest

import opendata_buffer
from opendata_buffer.consumer.cursors import Position
from opendata_buffer.errors import InvalidInput

ID = "01JD5T4R3KXBMZ7QV9N2WG8Y00"


@pytest.mark.parametrize("position", [Position(ID, 0), Position(ID, 2**63), Position("", 41)])
def test_a_position_prints_parses_and_pickles(position: Position) -> None:
    assert Position.parse(str(position)) == position
    assert pickle.loads(pickle.dumps(position)) == position
    assert Position.of(str(position)) == Position.of(position) == position


def test_a_position_is_one_short_string_and_a_public_name() -> None:
    assert str(opendata_buffer.Position(ID, 41)) == f"{ID}:41"
    assert Position.of(41) == Position("", 41)


@pytest.mark.parametrize("text", ["", ":", f"{ID}:", f"{ID}:-1", f"{ID}:1:2", "1.5", "٤١", " 1"])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="use '<queue id>:<sequence>'"):
        Position.parse(text)


@pytest.mark.parametrize("given", [True, -1, 1.5, b"1"])
def test_what_is_no_sequence_is_refused(given: object) -> None:
    with pytest.raises(InvalidInput, match="last_acked_sequence is"):
        Position.of(given)  # type: ignore[arg-type]
