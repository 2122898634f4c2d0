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

from opendata_buffer.values.base64_string import read_base64
from opendata_buffer.values.chars import Chars

__all__ = ["Token", "Tokens"]

MOST_DIGITS = 1000
MOST_NESTED = 1000
MOST_NAME = 50_000

_DIGITS = re.compile("[0-9]*")


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
    """

    def __init__(self, text: str) -> None:
        self._chars = Chars(text)
        self.token: Token | None = None
        self.begin = 0
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
            self._value = self._chars.string(quote)
        return self._value

    def base64(self) -> bytes:
        """The bytes of a string that is base64.

        Raises:
            BadJson: It is not. We are then inside the string, behind the character that was
                wrong, and going on means to go to the next quote.
        """
        if not self._open:  # In single quotes, and read already.
            return read_base64(Chars(self._value.replace("\\", "-") + '"'), '"')
        found = read_base64(self._chars, self._open)
        self._open = ""
        return found

    def since(self, begin: int) -> str:
        """What was read from this index on, as it stands."""
        return self._chars.text[begin : self._chars.at]

    def next(self) -> Token | None:
        """Go on to the next token; None at the end of the text.

        Raises:
            BadJson: There is none that could stand here.
        """
        chars = self._chars
        if self.token is Token.NAME:
            # None where the value could not be read: to Spark that is the end of the text.
            self.token, self._behind_name = self._behind_name, None
            self._enter(self.token)
            return self.token
        if self._open:
            _ = self.value
        chars.skip_spaces()
        if chars.at >= len(chars.text):
            if len(self._levels) > 1:
                raise chars.bad("it ends too early")
            self.token = None
            return None
        char = chars.take()
        if char in "]}":
            self._leave(char)
            return self.token
        level = self._levels[-1]
        level.count += 1
        if level.kind and level.count > 1:
            if char != ",":
                raise chars.bad(f"a comma is expected and {char!r} found")
            char = chars.next_char()
        if level.kind == "{":
            level.name = self._read_name(char)
            self.token = Token.NAME
            chars.skip_spaces()
            if chars.next_char() != ":":
                raise chars.bad("a colon is expected behind a name")
            char = chars.next_char()
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
        chars = self._chars
        if token in (Token.START_OBJECT, Token.START_ARRAY):
            if len(self._levels) > MOST_NESTED:
                raise chars.bad(f"it is nested deeper than {MOST_NESTED}")
            self._levels.append(_Level(token.value))

    def _leave(self, char: str) -> None:
        chars = self._chars
        kind = self._levels[-1].kind
        if {"{": "}", "[": "]"}.get(kind) != char:
            raise chars.bad(f"{char!r} closes nothing")
        self._levels.pop()
        self.begin = chars.at - 1
        self.token = Token.END_OBJECT if char == "}" else Token.END_ARRAY
        self._value = char

    # ---- values ------------------------------------------------------------------------------

    def _read_name(self, char: str) -> str:
        chars = self._chars
        if char not in "\"'":
            raise chars.bad(f"a name in quotes is expected and {char!r} found")
        name = chars.string(char)
        if len(name) > MOST_NAME:
            raise chars.bad(f"a name is longer than {MOST_NAME}")
        return name

    def _begin_value(self, char: str) -> Token:
        chars = self._chars
        self.begin = chars.at - 1
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
            self._value = chars.string(char)
            return Token.STRING
        if char in "0123456789":
            return self._read_number(char, "")
        if char in "+-":
            if chars.at >= len(chars.text):
                raise chars.bad("it ends behind a sign")
            after = chars.take()
            if char == "-" and after in "0123456789":
                return self._read_number(after, "-")
            if after == "I" and chars.at < len(chars.text):
                second = chars.take()
                if second in "Nn":
                    self._read_word(char + ("INF" if second == "N" else "Infinity"), 3)
                    return Token.FLOAT
        elif _may_go_on(char):
            self._skip_word()
        raise chars.bad(f"a value is expected and {char!r} found")

    def _read_word(self, word: str, known: int) -> None:
        chars = self._chars
        for expected in word[known:]:
            if chars.at >= len(chars.text) or chars.text[chars.at] != expected:
                self._skip_word()
                raise chars.bad(f"{word!r} is expected")
            chars.at += 1
        if chars.at < len(chars.text) and _may_go_on(chars.text[chars.at]):
            self._skip_word()
            raise chars.bad(f"{word!r} is expected")
        self._value = word

    def _skip_word(self) -> None:
        """A wrong word is read to its end, for the message of Spark's parser."""
        chars = self._chars
        while chars.at < len(chars.text) and _may_go_on(chars.text[chars.at]):
            chars.at += 1

    def _read_number(self, first: str, sign: str) -> Token:
        chars = self._chars
        text, begin = chars.text, chars.at - 1
        chars.at = _end_of_digits(text, chars.at)
        if first == "0" and chars.at - begin > 1:
            raise chars.bad("a number has leading zeros")
        digits, token = chars.at - begin, Token.INT
        if text.startswith(".", chars.at):
            token, after = Token.FLOAT, chars.at + 1
            chars.at = _end_of_digits(text, after)
            if chars.at == after:
                chars.at += 1
                raise chars.bad("a digit is expected behind a decimal point")
            digits += chars.at - after
        if text.startswith(("e", "E"), chars.at):
            token, after = Token.FLOAT, chars.at + 1
            if text.startswith(("+", "-"), after):
                after += 1
            chars.at = _end_of_digits(text, after)
            if chars.at == after:
                chars.at += 1
                raise chars.bad("a digit is expected in an exponent")
            digits += chars.at - after
        if digits > MOST_DIGITS:
            raise chars.bad(f"a number has more than {MOST_DIGITS} digits")
        self._value = sign + text[begin : chars.at]
        if len(self._levels) == 1 and chars.at < len(text):
            if text[chars.at] not in " \t\r\n":
                raise chars.bad("a space is expected behind a number")
            chars.at += 1
        return token


def _end_of_digits(text: str, begin: int) -> int:
    found = _DIGITS.match(text, begin)
    assert found is not None
    return found.end()


def _may_go_on(char: str) -> bool:
    """Whether a word does not end before this character."""
    return char.isalnum() or char in "_$"
