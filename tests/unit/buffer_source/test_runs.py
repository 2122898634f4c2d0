from __future__ import annotations

import pyarrow as pa

from buffer_source.columns import Runs
from opendata_buffer.formats.manifest import Metadata

A, B = Metadata(0, 1, b"a"), Metadata(3, 2, b"bbbb")


def test_a_range_reaches_to_the_next_one_and_the_last_to_the_end() -> None:
    assert Runs.of([A, B], 5) == Runs([3, 5], [A, B])


def test_rows_without_a_range_have_none() -> None:
    assert Runs.of([B], 5) == Runs([3, 5], [None, B])
    assert Runs.of([], 2) == Runs([2], [None])


def test_a_cut_is_counted_from_its_first_row() -> None:
    runs = Runs.of([A, B], 5)
    assert runs.cut(1, 4) == Runs([2, 3], [A, B])
    assert runs.cut(3, 5) == Runs([2], [B])


def test_rows_fit_while_their_payloads_do() -> None:
    runs = Runs.of([A, B], 9)
    assert runs.fit(0, 9, 3) == 3
    assert runs.fit(0, 9, 3 + 8) == 5
    assert runs.fit(0, 2, 100) == 2
    # At least one row, else a large payload would stop the task.
    assert runs.fit(3, 9, 1) == 4


def test_runs_expand_to_one_value_for_each_row() -> None:
    values = Runs.of([A, B], 5).expand([7, None], pa.int64())
    assert values.to_pylist() == [7, 7, 7, None, None]
