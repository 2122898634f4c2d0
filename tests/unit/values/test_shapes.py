# ruff: noqa: E501
from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from opendata_buffer.values.options import ValueOptions
from opendata_buffer.values.records import Records
from opendata_buffer.values.shapes import learn

FIELDS = [
    pa.field("id", pa.int64()),
    pa.field("name", pa.string()),
    pa.field("at", pa.struct([("x", pa.float64()), ("y", pa.string())])),
    pa.field("none", pa.int32()),
]
SAMPLE = b'{"id": 1, "name": "n", "z": true, "at": {"x": 1.5, "y": "q"}, "last": 7}'


def cut(
    sample: bytes, records: list[bytes]
) -> tuple[list[int], list[dict[str, object]], list[bool]]:
    """Rows that were taken, their columns, and which of them are doubtful."""
    shape = learn(sample, FIELDS, ValueOptions())
    assert shape is not None
    of = Records(pa.array(records, pa.binary()))
    rows, places = shape.cut(of, of.plain)
    arrays, doubtful = shape.columns(places, FIELDS, ValueOptions())
    table = pa.table(arrays, schema=pa.schema(FIELDS))
    return rows.tolist(), table.to_pylist(), doubtful.tolist()


def test_records_of_a_shape_are_cut_at_once() -> None:
    other = b'{"id": -20, "name": "\xc3\xa9 long name, longer than twelve", "z": null, "at": {"x": 2, "y": ""}, "last": 0}   '
    rows, columns, doubtful = cut(SAMPLE, [SAMPLE, other])
    assert rows == [0, 1]
    assert doubtful == [False, False]
    assert columns[1] == {
        "id": -20, "name": "é long name, longer than twelve", "at": {"x": 2.0, "y": ""}, "none": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        SAMPLE.replace(b'"id"', b'"Id"'),
        SAMPLE.replace(b": 1,", b":1,"),
        SAMPLE.replace(b'"n"', b'"\\n"'),
        SAMPLE.replace(b'"n"', b'"\n"'),
        SAMPLE.replace(b'"n"', b"null"),
        SAMPLE[:-1],
        SAMPLE + b" x",
        b" " + SAMPLE,
        SAMPLE.replace(b'"z": true', b'"z": "true"'),
        SAMPLE.replace(b", ", b" ,"),
        b"",
    ],
)
def test_a_record_of_another_shape_is_not_taken(other: bytes) -> None:
    rows, _, _ = cut(SAMPLE, [other, SAMPLE, other])
    assert rows == [1]


@pytest.mark.parametrize(
    "other",
    [
        SAMPLE.replace(b'"id": 1', b'"id": 1.5'),
        SAMPLE.replace(b"true", b"trux"),
        SAMPLE.replace(b"true", b"01"),
        SAMPLE.replace(b": 7", b": 7,"),
        SAMPLE + b"}",
        SAMPLE.replace(b'"id": 1', b'"id": {}'),
        SAMPLE.replace(b'"x": 1.5', b'"x": NaN'),
    ],
)
def test_a_value_that_does_not_fit_makes_its_record_doubtful(other: bytes) -> None:
    rows, _, doubtful = cut(SAMPLE, [SAMPLE, other])
    assert rows == [0, 1]
    assert doubtful == [False, True]


@pytest.mark.parametrize(
    "sample",
    [b"{}", b"", b"[1]", b'{"id":"x"}', b'{"name":"a\\n"}', b'{"id":1,"id":2}', b'{"z":[1]}', b'{"id":1',
     b'{"id":1}}', b'{"at":1,"name":{"x":1}}'],
)  # fmt: skip
def test_there_is_nothing_to_learn_from_an_odd_record(sample: bytes) -> None:
    assert learn(sample, FIELDS, ValueOptions()) is None


def test_with_a_rescued_column_fields_that_no_column_takes_are_kept_as_they_stand() -> None:
    options = ValueOptions(rescued_column="_rescued")
    sample = SAMPLE.replace(b'"last": 7', b'"last": "l"')
    for each, expected in (
        (SAMPLE, '{"z":true,"last":7}'),
        (sample, '{"z":true,"last":"l"}'),
        (b'{"at": {"x": 1, "w": 2}}', None),
    ):
        shape = learn(each, FIELDS, options)
        assert shape is not None
        records = Records(pa.array([each, each.replace(b"true", b"trux")], pa.binary()))
        _, places = shape.cut(records, records.plain)
        arrays, doubtful = shape.columns(places, FIELDS, options)
        assert arrays[len(FIELDS)][0].as_py() == expected
        assert doubtful.tolist() == [False, expected is not None]


def test_an_object_or_array_that_is_to_be_rescued_is_left_to_others() -> None:
    options = ValueOptions(rescued_column="_rescued")
    for sample in (b'{"id":1,"z":{"y":1}}', b'{"id":1,"z":[1]}'):
        assert learn(sample, FIELDS, options) is None


def test_a_slice_of_an_array_is_cut_as_an_array_of_its_own() -> None:
    array = pa.array([b"x", SAMPLE, SAMPLE, b"y"], pa.binary()).slice(1, 2)
    records = Records(array)
    shape = learn(SAMPLE, FIELDS, ValueOptions())
    assert shape is not None
    rows, _ = shape.cut(records, np.ones(2, np.bool_))
    assert rows.tolist() == [0, 1]
