"""The words of options for reading records into columns."""

from __future__ import annotations

from opendata_buffer.values import options
from opendata_buffer.values.modes import BYTES, FORMATS, MODES, PERMISSIVE
from opendata_buffer.values.options import ValueOptions


def test_the_first_word_of_each_is_the_default() -> None:
    assert FORMATS[0] == BYTES
    assert MODES[0] == PERMISSIVE == ValueOptions().mode


def test_who_reads_columns_finds_the_words_beside_the_options() -> None:
    assert (options.FORMATS, options.MODES) == (FORMATS, MODES)
