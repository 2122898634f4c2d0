"""A column, and where it is not to be trusted."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from opendata_buffer.values.found import Found, one_by_one
from opendata_buffer.values.scalars import Unfit


def test_a_column_of_which_nothing_is_doubtful_has_no_mask() -> None:
    array = pa.array([1, 2])
    assert Found.of(array, np.array([False, False])).doubtful is None
    doubtful = Found.of(array, np.array([False, True])).doubtful
    assert doubtful is not None
    assert doubtful.tolist() == [False, True]


def test_texts_are_read_once_each_and_what_is_unfit_is_doubtful() -> None:
    asked = []

    def read(text: str) -> int:
        asked.append(text)
        if not text.isdigit():
            raise Unfit(text)
        return int(text)

    found = one_by_one(pa.array(["7", None, "x", "7"]), pa.int64(), read)
    assert found.array.to_pylist() == [7, None, None, 7]
    assert found.doubtful is not None
    assert found.doubtful.tolist() == [False, False, True, False]
    assert asked == ["7", "x"]
