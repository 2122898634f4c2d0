from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.values import spans as spans_module
from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.spans import Bytes, Spans, bare, from_texts


def spans(*texts: bytes) -> Spans:
    lengths = np.array([len(each) for each in texts], np.int64)
    begins = np.concatenate([[3], 3 + np.cumsum(lengths)[:-1]]).astype(np.int64)
    return Spans(Bytes(np.frombuffer(b"???" + b"".join(texts), np.uint8)), begins, lengths)


def read(dtype: pa.DataType, *texts: bytes) -> list[Any]:
    """The values; the word ``doubtful`` in place of one that is."""
    found = bare(spans(*texts), dtype)
    values = found.array.to_pylist()
    doubtful = [False] * len(values) if found.doubtful is None else found.doubtful.tolist()
    assert found.array.type == dtype
    return ["doubtful" if bad else value for value, bad in zip(values, doubtful, strict=True)]


def test_an_arrow_that_takes_no_views_gets_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "VIEWS", False)
    texts = ["", "é", "longer than twelve bytes", "twelve bytes"]
    cut = spans(*(each.encode() for each in texts))
    assert cut.texts().to_pylist() == texts
    valid = np.array([True, False, True, False])
    assert cut.texts(valid).to_pylist() == ["", None, "longer than twelve bytes", None]


@given(st.lists(st.text(max_size=40), min_size=1))
def test_texts_of_any_length_are_cut_out(texts: list[str]) -> None:
    assert spans(*(each.encode() for each in texts)).texts().to_pylist() == texts


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


@pytest.mark.parametrize("zone", ["UTC", "+02:00"])
def test_times_in_bulk_are_what_they_are_one_by_one(zone: str) -> None:
    texts = [
        "2020-01-01T00:00:00Z", "2020-01-01 00:00:00.123456Z", "2020-01-01T10:00:00+05:30",
        "2020-01-01 10:00:00", "2020-1-1", "2020-01-01T10Z", "2020-01-01T10:00:00+23:00",
        "2020-02-30T10:00:00Z", "", "x", "2020-01-01T10:00:00.1234567Z", "0001-01-01T00:00:00Z",
    ]  # fmt: skip
    options = ValueOptions(time_zone=zone)
    dtype = pa.timestamp("us", "UTC")

    def answers(*some: str) -> list[int | str | None]:
        found = from_texts(pa.array(some), dtype, options)
        doubtful = [False] * len(some) if found.doubtful is None else found.doubtful.tolist()
        values = found.array.cast(pa.int64()).to_pylist()
        return ["doubtful" if bad else value for value, bad in zip(values, doubtful, strict=True)]

    alone = [answers(each)[0] for each in texts]
    assert answers(*texts) == alone
    assert alone.count("doubtful") == 5
    assert answers(*texts[:2]) == alone[:2]
