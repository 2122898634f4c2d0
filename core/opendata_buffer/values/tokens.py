"""JSON tokens as the parser behind Spark reads them, also where the text is broken.

Spark goes on with the rest of a record when one of its values does not fit, so what it makes of a
broken record depends on where its parser stood when it gave up. :class:`Tokens` therefore stands
where that parser (Jackson's, over characters) stands after each step: it reads the value behind a
name together with the name, and a string only when somebody asks for it or goes on.

Spark's defaults are built in: single quotes and the words ``NaN``, ``Infinity``, ``+INF``,
``-INF`` are accepted, comments, bare names, leading zeros and raw control characters are not.
"""

from __future__ import annotations

import re
from enum import Enum
from string import ascii_lowercase, ascii_uppercase, digits

__all__ = ["BadJson", "Token", "Tokens"]

MOST_DIGITS = 1000
MOST_NESTED = 1000
MOST_NAME = 50_000

_SPACES = re.compile(r"[ \t\r\n]*")
_DIGITS = re.compile("[0-9]*")
_PLAIN = {
    '"': re.compile(r'[^"\\\x00-\x1f]*'),
    "'": re.compile(r"[^'\\\x00-\x1f]*"),
}
_HEX = re.compile("[0-9a-fA-F]{4}")
_ESCAPES = {
    '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
}  # fmt: skip

_PADDING = -2
_BASE64 = {
    **{char: bits for bits, char in enumerate(ascii_uppercase + ascii_lowercase + digits + "+/")},
    "=": _PADDING,
}


class BadJson(Exception):
    """The text is not JSON at this place."""


class Token(Enum):
    """What stands at a place of the text."""

    START_OBJECT = "{"
    END_OBJECT = "}"
    START_ARRAY = "["
    END_ARRAY = "]"
    NAME = "name"
    STRING = "string"
    INT = "integer"
    FLOAT = "number"
    TRUE = "true"
    FALSE = "false"
    NULL = "null"


_WORDS = {
    "t": ("true", Token.TRUE),
    "f": ("false", Token.FALSE),
    "n": ("null", Token.NULL),
    "N": ("NaN", Token.FLOAT),
    "I": ("Infinity", Token.FLOAT),
}


class _Level:
    """An object, an array, or the text itself; ``count`` values of it were begun."""

    __slots__ = ("count", "kind", "name")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.count = 0
        self.name: str | None = None


class Tokens:
    """The tokens of one text, one after the other.

    Args:
        text: One record.

    Attributes:
        token: Where we are; None before the first and behind the last token.
        begin: Index of the token's first character.
        at: Index behind what was read.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.token: Token | None = None
        self.begin = 0
        self.at = 0
        self._behind_name: Token | None = None
        self._value = ""  # Text of a number or word, or of a string that was read.
        self._open = ""  # Quote of a string that was begun and not read.
        self._levels = [_Level("")]

    @property
    def name(self) -> str | None:
        """The name that the value we are at belongs to."""
        if self.token in (Token.START_OBJECT, Token.START_ARRAY):
            return self._levels[-2].name
        return self._levels[-1].name

    @property
    def value(self) -> str:
        """The text of the token; reads a string to its end.

        Raises:
            BadJson: The string has no end, a raw control character or a wrong escape.
        """
        if self._open:
            quote, self._open = self._open, ""
            self._value = self._rest_of_string(quote)
        return self._value

    def base64(self) -> bytes:
        """The bytes of a string that is base64.

        Raises:
            BadJson: It is not. We are then inside the string, behind the character that was
                wrong, and going on means to go to the next quote.
        """
        if not self._open:  # In single quotes, and read already.
            return Tokens(self._value.replace("\\", "-") + '"')._base64('"')
        found = self._base64(self._open)
        self._open = ""
        return found

    def next(self) -> Token | None:
        """Go on to the next token; None at the end of the text.

        Raises:
            BadJson: There is none that could stand here.
        """
        if self.token is Token.NAME:
            # None where the value could not be read: to Spark that is the end of the text.
            self.token, self._behind_name = self._behind_name, None
            self._enter(self.token)
            return self.token
        if self._open:
            _ = self.value
        self._skip_spaces()
        if self.at >= len(self.text):
            if len(self._levels) > 1:
                raise self._bad("it ends too early")
            self.token = None
            return None
        char = self._take()
        if char in "]}":
            self._leave(char)
            return self.token
        level = self._levels[-1]
        level.count += 1
        if level.kind and level.count > 1:
            if char != ",":
                raise self._bad(f"a comma is expected and {char!r} found")
            char = self._next_char()
        if level.kind == "{":
            level.name = self._read_name(char)
            self.token = Token.NAME
            self._skip_spaces()
            if self._next_char() != ":":
                raise self._bad("a colon is expected behind a name")
            char = self._next_char()
            self._behind_name = self._begin_value(char)
            return self.token
        found = self._begin_value(char)
        self._enter(found)
        self.token = found
        return found

    def skip(self) -> None:
        """Go to the end of the object or array that begins here; elsewhere do nothing."""
        if self.token not in (Token.START_OBJECT, Token.START_ARRAY):
            return
        depth = 1
        while depth:
            found = self.next()
            if found in (Token.START_OBJECT, Token.START_ARRAY):
                depth += 1
            elif found in (Token.END_OBJECT, Token.END_ARRAY):
                depth -= 1

    # ---- levels ------------------------------------------------------------------------------

    def _enter(self, token: Token | None) -> None:
        if token in (Token.START_OBJECT, Token.START_ARRAY):
            if len(self._levels) > MOST_NESTED:
                raise self._bad(f"it is nested deeper than {MOST_NESTED}")
            self._levels.append(_Level(token.value))

    def _leave(self, char: str) -> None:
        kind = self._levels[-1].kind
        if {"{": "}", "[": "]"}.get(kind) != char:
            raise self._bad(f"{char!r} closes nothing")
        self._levels.pop()
        self.begin = self.at - 1
        self.token = Token.END_OBJECT if char == "}" else Token.END_ARRAY
        self._value = char

    # ---- characters --------------------------------------------------------------------------

    def _skip_spaces(self) -> None:
        found = _SPACES.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        if self.at < len(self.text) and self.text[self.at] < " ":
            self.at += 1
            raise self._bad("a control character is not allowed here")

    def _take(self) -> str:
        char = self.text[self.at]
        self.at += 1
        return char

    def _next_char(self) -> str:
        self._skip_spaces()
        if self.at >= len(self.text):
            raise self._bad("it ends too early")
        return self._take()

    def _bad(self, what: str) -> BadJson:
        return BadJson(f"{what} (character {self.at})")

    # ---- values ------------------------------------------------------------------------------

    def _read_name(self, char: str) -> str:
        if char not in "\"'":
            raise self._bad(f"a name in quotes is expected and {char!r} found")
        name = self._rest_of_string(char)
        if len(name) > MOST_NAME:
            raise self._bad(f"a name is longer than {MOST_NAME}")
        return name

    def _begin_value(self, char: str) -> Token:
        self.begin = self.at - 1
        if char == '"':
            self._open = char
            return Token.STRING
        if char == "{":
            self._value = char
            return Token.START_OBJECT
        if char == "[":
            self._value = char
            return Token.START_ARRAY
        if char in _WORDS:
            word, token = _WORDS[char]
            self._read_word(word, 1)
            return token
        if char == "'":  # Read at once: nobody would remember the quote.
            self._value = self._rest_of_string(char)
            return Token.STRING
        if char in "0123456789":
            return self._read_number(char, "")
        if char in "+-":
            if self.at >= len(self.text):
                raise self._bad("it ends behind a sign")
            after = self._take()
            if char == "-" and after in "0123456789":
                return self._read_number(after, "-")
            if after == "I" and self.at < len(self.text):
                second = self._take()
                if second in "Nn":
                    self._read_word(char + ("INF" if second == "N" else "Infinity"), 3)
                    return Token.FLOAT
        elif _may_go_on(char):
            self._skip_word()
        raise self._bad(f"a value is expected and {char!r} found")

    def _read_word(self, word: str, known: int) -> None:
        for expected in word[known:]:
            if self.at >= len(self.text) or self.text[self.at] != expected:
                self._skip_word()
                raise self._bad(f"{word!r} is expected")
            self.at += 1
        if self.at < len(self.text) and _may_go_on(self.text[self.at]):
            self._skip_word()
            raise self._bad(f"{word!r} is expected")
        self._value = word

    def _skip_word(self) -> None:
        """A wrong word is read to its end, for the message of Spark's parser."""
        while self.at < len(self.text) and _may_go_on(self.text[self.at]):
            self.at += 1

    def _read_number(self, first: str, sign: str) -> Token:
        text, begin = self.text, self.at - 1
        self.at = self._digits(self.at)
        if first == "0" and self.at - begin > 1:
            raise self._bad("a number has leading zeros")
        digits, token = self.at - begin, Token.INT
        if text.startswith(".", self.at):
            token, after = Token.FLOAT, self.at + 1
            self.at = self._digits(after)
            if self.at == after:
                self.at += 1
                raise self._bad("a digit is expected behind a decimal point")
            digits += self.at - after
        if text.startswith(("e", "E"), self.at):
            token, after = Token.FLOAT, self.at + 1
            if text.startswith(("+", "-"), after):
                after += 1
            self.at = self._digits(after)
            if self.at == after:
                self.at += 1
                raise self._bad("a digit is expected in an exponent")
            digits += self.at - after
        if digits > MOST_DIGITS:
            raise self._bad(f"a number has more than {MOST_DIGITS} digits")
        self._value = sign + text[begin : self.at]
        if len(self._levels) == 1 and self.at < len(text):
            if text[self.at] not in " \t\r\n":
                raise self._bad("a space is expected behind a number")
            self.at += 1
        return token

    def _digits(self, begin: int) -> int:
        found = _DIGITS.match(self.text, begin)
        assert found is not None
        return found.end()

    def _rest_of_string(self, quote: str) -> str:
        plain, parts = _PLAIN[quote], []
        while True:
            found = plain.match(self.text, self.at)
            assert found is not None
            parts.append(found.group())
            self.at = found.end()
            if self.at >= len(self.text):
                raise self._bad("a string has no end")
            char = self._take()
            if char == quote:
                return "".join(parts)
            if char != "\\":
                raise self._bad("a string has a raw control character")
            parts.append(self._escaped())

    def _base64(self, quote: str) -> bytes:
        found = bytearray()
        while True:
            char = self._of_string()
            while char <= " ":
                char = self._of_string()
            if char == quote:
                return bytes(found)
            bits = self._six_bits(char, 0)
            if bits is None:
                continue
            bits = bits << 6 | self._sure_bits(self._of_string(), 1)
            char = self._of_string()
            if char == quote:
                self.at -= 1
                raise self._bad("base64 lacks its padding")
            third = self._six_bits(char, 2)
            if third == _PADDING:
                if self._six_bits(self._of_string(), 3) != _PADDING:
                    raise self._bad("base64 lacks its padding")
                found.append(bits >> 4 & 0xFF)
                continue
            assert third is not None
            bits = bits << 6 | third
            char = self._of_string()
            if char == quote:
                self.at -= 1
                raise self._bad("base64 lacks its padding")
            last = self._six_bits(char, 3)
            if last == _PADDING:
                found += (bits >> 2 & 0xFFFF).to_bytes(2, "big")
                continue
            assert last is not None
            found += (bits << 6 | last).to_bytes(3, "big")

    def _sure_bits(self, char: str, index: int) -> int:
        bits = self._six_bits(char, index)
        assert bits is not None
        return bits

    def _six_bits(self, char: str, index: int) -> int | None:
        """What a character of base64 stands for; None for an escaped space before a group."""
        if char == "\\":
            char = self._escaped()
            if char <= " " and index == 0:
                return None
        bits = _BASE64.get(char, -1)
        if bits < 0 and not (bits == _PADDING and index >= 2):
            raise self._bad(f"{char!r} is no base64")
        return bits

    def _of_string(self) -> str:
        if self.at >= len(self.text):
            raise self._bad("a string has no end")
        return self._take()

    def _escaped(self) -> str:
        if self.at >= len(self.text):
            raise self._bad("it ends in an escape")
        char = self._take()
        if char == "u":
            found = _HEX.match(self.text, self.at)
            if found is None:
                # It stops behind the first character that is no digit.
                while self.at < len(self.text) and self._take() in "0123456789abcdefABCDEF":
                    pass
                raise self._bad(r"four hexadecimal digits are expected behind \u")
            self.at = found.end()
            return chr(int(found.group(), 16))
        if char not in _ESCAPES:
            raise self._bad(f"\\{char} is no escape")
        return _ESCAPES[char]


def _may_go_on(char: str) -> bool:
    """Whether a word does not end before this character."""
    return char.isalnum() or char in "_$"
