from __future__ import annotations

import logging

import pyarrow as pa
import pytest

from buffer_source.rows import RowBuilder
from opendata_buffer.consumer.fetch import Records
from opendata_buffer.errors import MalformedRecord
from opendata_buffer.values import ValueOptions
from tests.unit.buffer_source.structs import struct

RECORDS = [b'{"a":1}', b'{"a":', b'{"a":3}', b'{"a":"x","b":"y"}']
SCHEMA = struct("_index int", "a bigint", "b string", "_corrupt_record string")


def rows(mode: str) -> list[dict[str, object]]:
    array = pa.array(RECORDS, pa.binary())
    batch = Records(4, iter([array]), 7, "ingest/x.batch", ())
    builder = RowBuilder(SCHEMA, ValueOptions(mode=mode), piece_rows=3)
    return pa.Table.from_batches(builder.pieces(batch), schema=builder.schema).to_pylist()


def test_permissive_keeps_a_row_of_nulls_and_the_text() -> None:
    assert rows("PERMISSIVE") == [
        {"_index": 0, "a": 1, "b": None, "_corrupt_record": None},
        {"_index": 1, "a": None, "b": None, "_corrupt_record": '{"a":'},
        {"_index": 2, "a": 3, "b": None, "_corrupt_record": None},
        {"_index": 3, "a": None, "b": None, "_corrupt_record": '{"a":"x","b":"y"}'},
    ]


def test_dropmalformed_leaves_records_out_and_says_how_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert [each["_index"] for each in rows("DROPMALFORMED")] == [0, 2]
    assert (
        "1 malformed records of batch 7 at 'ingest/x.batch' left out, the first is record 3"
        in caplog.text
    )


def test_failfast_names_batch_record_reason_and_its_first_bytes() -> None:
    with pytest.raises(MalformedRecord) as caught:
        rows("FAILFAST")
    error = caught.value
    assert (error.sequence, error.index, error.head) == (7, 1, b'{"a":')
    assert "record 1 of batch 7 at 'ingest/x.batch' is malformed: Invalid value" in str(error)
