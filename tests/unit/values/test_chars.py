"""The characters of a text: where each step leaves off, also where it fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from opendata_buffer.values.chars import BadJson, Chars


def test_spaces_are_passed_and_control_characters_refused() -> None:
    chars = Chars(" \t\r\na\x01")
    assert chars.next_char() == "a"
    with pytest.raises(BadJson, match=r"control character .* \(character 6\)"):
        chars.skip_spaces()
    with pytest.raises(BadJson, match="ends too early"):
        Chars("  ").next_char()


@pytest.mark.parametrize(
    ("text", "quote", "meant"),
    [
        ('plain"', '"', "plain"),
        ('"', '"', ""),
        ('it is "so"\'', "'", 'it is "so"'),
        (r'\"\\\/\b\f\n\r\t\u00e9\uD83D"', '"', '"\\/\b\f\n\r\té\ud83d'),
    ],
)
def test_a_string_is_read_to_behind_its_quote(text: str, quote: str, meant: str) -> None:
    chars = Chars(text + "rest")
    assert chars.string(quote) == meant
    assert chars.text[chars.at :] == "rest"


@pytest.mark.parametrize(
    ("text", "problem", "left"),
    [
        ("open", "no end", ""),
        ("a\x01b", "raw control character", "b"),
        ("a\\", "ends in an escape", ""),
        ("a\\qb", "is no escape", "b"),
        ("a\\u12xyz", "four hexadecimal digits", "yz"),
    ],
)
def test_a_broken_string_leaves_off_behind_what_broke_it(
    text: str, problem: str, left: str
) -> None:
    chars = Chars(text)
    with pytest.raises(BadJson, match=problem):
        chars.string('"')
    assert chars.text[chars.at :] == left


@pytest.mark.parametrize("read", [Chars.of_string, Chars.escaped, Chars.next_char])
def test_nothing_is_read_behind_the_end(read: Callable[[Chars], str]) -> None:
    with pytest.raises(BadJson):
        read(Chars(""))
