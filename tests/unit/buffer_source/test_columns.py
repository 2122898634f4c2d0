"""Columns and the runs of metadata they are made of."""

from __future__ import annotations

import pyarrow as pa
import pytest

from buffer_source.columns import COLUMNS, Piece, Runs
from opendata_buffer.consumer.fetch import Records
from opendata_buffer.formats.manifest import Metadata


def piece(count: int, begin: int = 0, sequence: int = 5) -> Piece:
    metadata = (Metadata(0, 1_000, b"m"),)
    batch = Records(begin + count, iter(()), sequence, "ingest/a", metadata)
    values = pa.array([b"x"] * count, pa.binary())
    return Piece(batch, values, Runs.of(metadata, count), begin, "p-00001")


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("value", pa.binary(), b"x"),
        ("value", pa.string(), "x"),
        ("metadata", pa.binary(), b"m"),
        ("metadata", pa.string(), "m"),
        ("sequence", pa.int64(), 5),
        ("index", pa.int32(), 7),
        ("record_index", pa.int32(), 7),
        ("ingestion_time", pa.int64(), 1_000_000),
        ("location", pa.string(), "ingest/a"),
        ("partition", pa.string(), "p-00001"),
    ],
)
def test_each_column_has_one_value_for_each_row(
    name: str, dtype: pa.DataType, expected: object
) -> None:
    array = COLUMNS[name].builder(dtype).build(piece(2, begin=7))
    assert (len(array), array.type, array[0].as_py()) == (2, dtype, expected)


def test_arrays_that_are_kept_between_pieces_are_not_mixed_up() -> None:
    sequences = COLUMNS["sequence"].builder(pa.int64())
    got = [sequences.build(piece(count, sequence=of)).to_pylist() for count, of in [(3, 1), (2, 1)]]
    got.append(sequences.build(piece(3, sequence=2)).to_pylist())
    assert got == [[1, 1, 1], [1, 1], [2, 2, 2]]
    indexes = COLUMNS["index"].builder(pa.int32())
    assert indexes.build(piece(2, begin=5000)).to_pylist() == [5000, 5001]
    assert indexes.build(piece(2, begin=1)).to_pylist() == [1, 2]


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
