"""Numbers and words from where they stand: what is read, and what is left to the exact reader."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from opendata_buffer.values.numbers import bare, floats
from tests.unit.values.cut import spans


def read(dtype: pa.DataType, *texts: bytes) -> list[Any]:
    """The values; the word ``doubtful`` in place of one that is."""
    found = bare(spans(*texts), dtype)
    values = found.array.to_pylist()
    doubtful = [False] * len(values) if found.doubtful is None else found.doubtful.tolist()
    assert found.array.type == dtype
    return ["doubtful" if bad else value for value, bad in zip(values, doubtful, strict=True)]


def test_integers_of_json_are_read_and_all_else_is_doubtful() -> None:
    assert read(pa.int64(), b"0", b"-7", b"null", b"123456789012345678") == [
        0, -7, None, 123456789012345678,
    ]  # fmt: skip
    odd = [b"007", b"0x1F", b"1.0", b"1e3", b"-", b"--1", b"[1]", b"true", b"1234567890123456789"]
    assert read(pa.int64(), b"5", *odd) == [5] + ["doubtful"] * len(odd)
    assert read(pa.int8(), b"127", b"-128", b"128", b"-129") == [127, -128, "doubtful", "doubtful"]


def test_numbers_of_json_are_read_and_all_else_is_doubtful() -> None:
    assert read(pa.float64(), b"1", b"-2.5", b"1e3", b"1.5E-3", b"null") == [
        1,
        -2.5,
        1e3,
        1.5e-3,
        None,
    ]
    odd = [
        b"1.",
        b".5",
        b"01",
        b"-.5",
        b"1.e5",
        b"nan",
        b"Infinity",
        b"1e400",
        b"-0",
        b"1e",
        b"true",
    ]
    assert read(pa.float64(), b"5", *odd) == [5] + ["doubtful"] * len(odd)


def test_a_number_of_32_bits_in_the_middle_of_two_is_doubtful() -> None:
    assert read(pa.float32(), b"0.5", b"16777217", b"null") == [0.5, "doubtful", None]


def test_words() -> None:
    assert read(pa.bool_(), b"true", b"false", b"null", b"tru", b"1", b"falsy") == [
        True, False, None, "doubtful", "doubtful", "doubtful",
    ]  # fmt: skip
    assert read(pa.string(), b"null", b"1") == [None, "doubtful"]


def test_decimals_are_exact_or_rounded_as_spark_does_it() -> None:
    dtype = pa.decimal128(5, 2)
    assert [str(each) for each in read(dtype, b"1.5", b"1e2", b"null")] == [
        "1.50",
        "100.00",
        "None",
    ]
    assert [str(each) for each in read(dtype, b"1.005", b"1000", b"01")] == [
        "1.01", "doubtful", "doubtful",
    ]  # fmt: skip


def test_the_same_numbers_are_doubtful_whoever_has_read_them() -> None:
    wide = pa.array([0.5, -0.0, float("inf"), None], pa.float64())
    found = floats(wide, pa.float64())
    assert found.array is wide
    assert found.doubtful is not None
    assert found.doubtful.tolist() == [False, True, True, False]
    narrow = floats(pa.array([0.5, None]), pa.float32())
    assert (narrow.array.to_pylist(), narrow.doubtful) == ([0.5, None], None)
