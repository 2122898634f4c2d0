"""Base64 in a string of JSON, as the parser behind Spark reads it: character by character. Pure.

It differs from other readers in where it stops: behind the character that is wrong, in the middle
of the string, so that what follows is no longer taken for a string.
"""

from __future__ import annotations

from string import ascii_lowercase, ascii_uppercase, digits

from opendata_buffer.values.chars import Chars

__all__ = ["read_base64"]

_PADDING = -2
_BITS = {
    **{char: bits for bits, char in enumerate(ascii_uppercase + ascii_lowercase + digits + "+/")},
    "=": _PADDING,
}


def read_base64(chars: Chars, quote: str) -> bytes:
    """The bytes of a string, from behind its first quote to behind its last.

    Raises:
        BadJson: It is no base64, or has no end.
    """
    found = bytearray()
    while True:
        char = chars.of_string()
        while char <= " ":
            char = chars.of_string()
        if char == quote:
            return bytes(found)
        bits = _six_bits(chars, char, 0)
        if bits is None:
            continue
        bits = bits << 6 | _sure_bits(chars, chars.of_string(), 1)
        third = _sure_bits(chars, _padded(chars, quote), 2)
        if third == _PADDING:
            if _six_bits(chars, chars.of_string(), 3) != _PADDING:
                raise chars.bad("base64 lacks its padding")
            found.append(bits >> 4 & 0xFF)
            continue
        bits = bits << 6 | third
        last = _sure_bits(chars, _padded(chars, quote), 3)
        if last == _PADDING:
            found += (bits >> 2 & 0xFFFF).to_bytes(2, "big")
            continue
        found += (bits << 6 | last).to_bytes(3, "big")


def _padded(chars: Chars, quote: str) -> str:
    """The third or fourth character of a group, which must not end the string."""
    char = chars.of_string()
    if char == quote:
        chars.at -= 1
        raise chars.bad("base64 lacks its padding")
    return char


def _sure_bits(chars: Chars, char: str, index: int) -> int:
    bits = _six_bits(chars, char, index)
    assert bits is not None
    return bits


def _six_bits(chars: Chars, char: str, index: int) -> int | None:
    """What a character of base64 stands for; None for an escaped space before a group."""
    if char == "\\":
        char = chars.escaped()
        if char <= " " and index == 0:
            return None
    bits = _BITS.get(char, -1)
    if bits < 0 and not (bits == _PADDING and index >= 2):
        raise chars.bad(f"{char!r} is no base64")
    return bits
