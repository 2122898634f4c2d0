"""Base64 inside of a string of JSON."""

from __future__ import annotations

from base64 import b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.values.base64_string import read_base64
from opendata_buffer.values.chars import BadJson, Chars


@given(st.binary(max_size=40))
def test_what_others_wrote_is_read_to_behind_the_quote(data: bytes) -> None:
    chars = Chars(b64encode(data).decode() + '"rest')
    assert read_base64(chars, '"') == data
    assert chars.text[chars.at :] == "rest"


def test_spaces_between_groups_are_passed_escaped_ones_too() -> None:
    assert read_base64(Chars(' YWJj\\n\\u0020ZGVm "'), '"') == b"abcdef"


@pytest.mark.parametrize(
    ("text", "problem", "left"),
    [
        ('YW?j"', "no base64", 'j"'),
        ('YW"', "lacks its padding", '"'),
        ('YWJ"', "lacks its padding", '"'),
        ('YW=j"', "lacks its padding", '"'),
        ('=WJj"', "no base64", 'WJj"'),
        ('YW Jj"', "no base64", 'Jj"'),
        ("YWJj", "no end", ""),
    ],
)
def test_it_leaves_off_behind_the_character_that_is_wrong(
    text: str, problem: str, left: str
) -> None:
    chars = Chars(text)
    with pytest.raises(BadJson, match=problem):
        read_base64(chars, '"')
    assert chars.text[chars.at :] == left
