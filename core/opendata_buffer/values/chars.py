"""The characters of one text and how far they were read: spaces, strings, escapes of JSON. Pure.

Where something is wrong, :attr:`Chars.at` stays where the parser behind Spark stands then: behind
what broke it.
"""

from __future__ import annotations

import re

__all__ = ["BadJson", "Chars"]

_SPACES = re.compile(r"[ \t\r\n]*")
_PLAIN = {
    '"': re.compile(r'[^"\\\x00-\x1f]*'),
    "'": re.compile(r"[^'\\\x00-\x1f]*"),
}
_HEX = re.compile("[0-9a-fA-F]{4}")
_ESCAPES = {
    '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
}  # fmt: skip


class BadJson(Exception):
    """The text is not JSON at this place."""


class Chars:
    """A text that is read from its first character to its last.

    Args:
        text: One record.

    Attributes:
        text: As given.
        at: Index behind what was read.
    """

    __slots__ = ("at", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def bad(self, what: str) -> BadJson:
        """What to raise for something wrong right before here."""
        return BadJson(f"{what} (character {self.at})")

    def skip_spaces(self) -> None:
        """Go to the next character that is no space.

        Raises:
            BadJson: It is a control character.
        """
        found = _SPACES.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        if self.at < len(self.text) and self.text[self.at] < " ":
            self.at += 1
            raise self.bad("a control character is not allowed here")

    def take(self) -> str:
        """The character here; the text must not be over."""
        char = self.text[self.at]
        self.at += 1
        return char

    def next_char(self) -> str:
        """The next character that is no space.

        Raises:
            BadJson: There is none.
        """
        self.skip_spaces()
        if self.at >= len(self.text):
            raise self.bad("it ends too early")
        return self.take()

    def string(self, quote: str) -> str:
        """The text of a string, from behind its first quote to behind its last.

        Raises:
            BadJson: It has no end, a raw control character or a wrong escape.
        """
        plain, parts = _PLAIN[quote], []
        while True:
            found = plain.match(self.text, self.at)
            assert found is not None
            parts.append(found.group())
            self.at = found.end()
            char = self.of_string()
            if char == quote:
                return "".join(parts)
            if char != "\\":
                raise self.bad("a string has a raw control character")
            parts.append(self.escaped())

    def of_string(self) -> str:
        """The next character of a string, whatever it is.

        Raises:
            BadJson: There is none.
        """
        if self.at >= len(self.text):
            raise self.bad("a string has no end")
        return self.take()

    def escaped(self) -> str:
        """What stands behind a backslash means.

        Raises:
            BadJson: Nothing.
        """
        if self.at >= len(self.text):
            raise self.bad("it ends in an escape")
        char = self.take()
        if char == "u":
            found = _HEX.match(self.text, self.at)
            if found is None:
                # It stops behind the first character that is no digit.
                while self.at < len(self.text) and self.take() in "0123456789abcdefABCDEF":
                    pass
                raise self.bad(r"four hexadecimal digits are expected behind \u")
            self.at = found.end()
            return chr(int(found.group(), 16))
        if char not in _ESCAPES:
            raise self.bad(f"\\{char} is no escape")
        return _ESCAPES[char]
