"""Where values stand, and the texts that are cut out there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.values import spans as spans_module
from opendata_buffer.values.spans import Bytes
from tests.unit.values.cut import spans


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


def test_a_value_is_compared_with_a_word_by_its_length_too() -> None:
    found = spans(b"true", b"tru", b"truest", b"")
    assert found.are(b"true").tolist() == [True, False, False, False]


@given(st.binary(max_size=30), st.integers(0, 30))
def test_a_text_of_any_length_is_found_where_it_stands(text: bytes, at: int) -> None:
    data = np.frombuffer(b"x" * at + text, np.uint8)
    other = np.frombuffer(b"x" * at + bytes(each ^ 1 for each in text), np.uint8)
    place = np.array([at], np.int64)
    assert Bytes(data).are(place, text).tolist() == [True]
    assert Bytes(other).are(place, text).tolist() == [not text]


def test_the_digits_of_a_number_begin_behind_its_sign() -> None:
    minus, first, second = spans(b"-12", b"34").first_digits()
    assert minus.tolist() == [True, False]
    assert (first.tolist(), second.tolist()) == ([0x31, 0x33], [0x32, 0x34])
