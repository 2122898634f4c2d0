# ruff: noqa: E501
from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.values.options import CSV, JSON, ValueOptions, check_type


def test_patterns_are_checked_at_once_and_go_into_tasks() -> None:
    with pytest.raises(InvalidInput, match="option timestampFormat"):
        ValueOptions(timestamp_format="Q")
    options = pickle.loads(pickle.dumps(ValueOptions(date_format="dd.MM.yyyy")))
    assert options == ValueOptions(date_format="dd.MM.yyyy")
    assert hash(options) == hash(ValueOptions(date_format="dd.MM.yyyy"))
    pattern = options.pattern("dateFormat")
    assert pattern is not None
    assert pattern.days("02.01.1970") == 1


def test_a_time_zone_that_nobody_knows_is_refused() -> None:
    with pytest.raises(InvalidInput, match="option timeZone is 'Nowhere'"):
        ValueOptions(time_zone="Nowhere")


@pytest.mark.parametrize(
    "dtype",
    [pa.bool_(), pa.int8(), pa.int64(), pa.float32(), pa.decimal128(38, 2), pa.string(), pa.binary(),
     pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.list_(pa.map_(pa.string(), pa.int8())),
     pa.struct([("x", pa.list_(pa.date32()))])],
)  # fmt: skip
def test_json_is_read_into_all_types_that_have_a_meaning_in_it(dtype: pa.DataType) -> None:
    check_type("c", dtype, JSON)


@pytest.mark.parametrize(
    ("dtype", "value_format"),
    [(pa.duration("us"), JSON), (pa.map_(pa.int32(), pa.string()), JSON), (pa.list_(pa.int8()), CSV),
     (pa.binary(), CSV), (pa.struct([("x", pa.duration("us"))]), JSON)],
)  # fmt: skip
def test_another_type_is_refused_with_those_that_are_read(
    dtype: pa.DataType, value_format: str
) -> None:
    with pytest.raises(InvalidInput, match=r"column 'c.*Types: BOOLEAN, BYTE"):
        check_type("c", dtype, value_format)
