from __future__ import annotations

import struct
import time
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.scalars import (
    Unfit,
    base64_bytes,
    date_reader,
    decimal_of,
    float32_of,
    java_double,
    java_string,
    java_text,
    json_string,
    timestamp_reader,
)


def test_decimals_are_rounded_half_up_to_their_scale() -> None:
    assert decimal_of("1.005", 10, 2) == Decimal("1.01")
    assert decimal_of("-1.005", 10, 2) == Decimal("-1.01")
    assert str(decimal_of("-0.001", 10, 2)) == "0.00"
    assert decimal_of("1e3", 10, 2) == 1000
    assert [str(decimal_of(zero, 10, 2)) for zero in ("0e308", "-0.0E+99999")] == ["0.00"] * 2
    assert decimal_of("99999999.994", 10, 2) == Decimal("99999999.99")


@pytest.mark.parametrize(
    "text",
    ["99999999.995", "1e8", "1e999999999", "1e9999999999", "x", "", " 1", "1_0", "NaN", "."],
)
def test_what_is_no_decimal_or_has_too_many_digits_does_not_fit(text: str) -> None:
    with pytest.raises(Unfit):
        decimal_of(text, 10, 2)


def test_a_long_text_that_is_no_decimal_is_refused_at_once_and_not_shown_whole() -> None:
    # With a second way to take its digits, each digit more would take longer than the one before.
    began = time.process_time()
    with pytest.raises(Unfit) as refused:
        decimal_of("1" * 100_000 + "x", 10, 2)
    assert time.process_time() - began < 10
    assert len(str(refused.value)) < 100


@given(st.floats(width=32, allow_nan=False))
def test_a_number_of_32_bits_is_what_its_text_says(number: float) -> None:
    assert float32_of(repr(number)) == number


def test_a_number_beside_the_middle_of_two_is_rounded_once() -> None:
    # Just above the middle of 1 and the next number of 32 bits; of 64 bits it is the middle.
    text = "1.00000005960464477540"
    assert struct.unpack("f", struct.pack("f", float(text)))[0] == 1.0
    assert float32_of(text) == 1.0000001192092896


def test_a_number_of_32_bits_may_have_any_number_of_digits() -> None:
    middle = "1.000000059604644775390625"
    assert float32_of(middle + "0" * 5000) == 1.0
    assert float32_of(middle + "0" * 5000 + "1") == 1.0000001192092896


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.0, "1.0"), (0.1, "0.1"), (-0.0, "-0.0"), (1e7, "1.0E7"), (9999999.0, "9999999.0"),
     (0.001, "0.001"), (1e-4, "1.0E-4"), (1.5e300, "1.5E300"), (123456.789, "123456.789"),
     (float("nan"), '"NaN"'), (float("-inf"), '"-Infinity"'), (100.0, "100.0")],
)  # fmt: skip
def test_numbers_are_written_as_java_writes_them(number: float, text: str) -> None:
    assert java_double(number) == text


def test_half_a_pair_is_a_question_mark_and_two_halves_are_one_character() -> None:
    assert java_string("a\ud83d\ude00b\ud800") == "a😀b?"
    assert json_string('a"\n\x01\ud83d\ude00') == '"a\\"\\n\\u0001😀"'
    assert json_string("\ud800") == '"\\uD800"'
    assert java_text(b"a\xed\xa0\x80\xff") == "a\ufffd\ufffd"


def test_base64_needs_its_padding() -> None:
    assert base64_bytes("YWI=") == b"ab"
    for text in ("YWI", "!!!!", "YQ="):
        with pytest.raises(Unfit):
            base64_bytes(text)


def test_dates_and_times_without_a_format_are_read_leniently_and_with_one_strictly() -> None:
    assert date_reader(ValueOptions())("2020-1-1") == 18_262
    assert date_reader(ValueOptions())("100") == 100
    with pytest.raises(Unfit):
        date_reader(ValueOptions(date_format="yyyy-MM-dd"))("2020-1-1")
    zoned, local = pa.timestamp("us", "UTC"), pa.timestamp("us")
    assert timestamp_reader(zoned, ValueOptions(time_zone="+01:00"))("1970-01-01 01:00:00") == 0
    assert timestamp_reader(zoned, ValueOptions())("1970-01-01T00:00:01GMT+00:00") == 1_000_000
    assert timestamp_reader(zoned, ValueOptions(timestamp_format="s"))("5") == 5_000_000
    with pytest.raises(Unfit):
        timestamp_reader(local, ValueOptions())("1970-01-01T00:00:00Z")
