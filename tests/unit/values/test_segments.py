from __future__ import annotations

import numpy as np
import pytest

from opendata_buffer.values.segments import Segments
from opendata_buffer.values.spans import Bytes

# Two records of three segments each: a literal, a value and what is behind; "??" is between them.
TEXT = b"k=one  ??k=three "
EDGES = np.array([[0, 2, 5, 7], [9, 11, 16, 17]], np.int32)


def of(text: bytes = TEXT) -> Segments:
    return Segments(Bytes(np.frombuffer(text, np.uint8)), EDGES)


def test_one_segment_of_all_records_is_a_column() -> None:
    values, literals = of().texts([1, 0])
    assert values.to_pylist() == ["one", "three"]
    assert literals.to_pylist() == ["k=", "k="]
    assert len(of()) == 2


def test_a_segment_is_a_span_of_each_record() -> None:
    spans = of().spans(1)
    assert spans.begin.tolist() == [2, 11]
    assert spans.length.tolist() == [3, 5]
    assert spans.texts().to_pylist() == ["one", "three"]
    (cut,) = of().texts([1])
    spans = of().spans(1, cut)
    assert spans.texts() is cut
    assert spans.texts(np.array([True, False])).to_pylist() == ["one", None]


def test_records_with_another_text_between_their_values_are_told_from_the_others() -> None:
    assert of().are([0], [b"k="]) is None
    good = of(TEXT.replace(b"k=t", b"k:t")).are([0], [b"k="])
    assert good is not None
    assert good.tolist() == [True, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(TEXT, None), (b"k=one x??k=three ", [False, True]), (b"k=one  ??k=three!", [True, False])],
)
def test_records_with_more_than_spaces_behind_are_told_from_the_others(
    text: bytes, expected: list[bool] | None
) -> None:
    good = of(text).blank(2)
    assert (None if good is None else good.tolist()) == expected


def test_some_of_the_records_have_the_same_segments() -> None:
    assert of().filter(np.array([False, True])).texts([1])[0].to_pylist() == ["three"]
    none = of().filter(np.array([False, False]))
    assert none.texts([1])[0].to_pylist() == []
    assert none.are([0], [b"k="]) is None
    assert none.blank(2) is None
