from __future__ import annotations

import datetime

import pyarrow as pa
import pytest

from opendata_buffer.consumer.batches import ArrowBatch, ConsumedBatch
from opendata_buffer.errors import InvalidInput, MalformedRecord
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.values import ValueOptions

RECORDS = [b'{"id":1,"name":"n"}', b'{"id":"x"}', b'{"id":3}']
BATCH = ArrowBatch(
    pa.array(RECORDS, pa.binary()),
    7,
    "ingest/x.batch",
    (Metadata(0, 1000, b"a"), Metadata(2, 2000, b"b")),
)


def test_records_become_rows_with_the_requested_columns() -> None:
    schema = pa.schema(
        [("_index", pa.int32()), ("id", pa.int64()), ("_metadata", pa.string()),
         ("_ingestion_time", pa.timestamp("ms", "UTC")), ("_sequence", pa.int64()),
         ("_location", pa.string()), ("_corrupt_record", pa.string())]
    )  # fmt: skip
    table = BATCH.to_table(schema)
    assert table.schema == schema
    assert table.column("id").to_pylist() == [1, None, 3]
    assert table.column("_metadata").to_pylist() == ["a", "a", "b"]
    assert table.column("_corrupt_record").to_pylist() == [None, '{"id":"x"}', None]
    last = table.slice(2).to_pylist()[0]
    assert (last["_index"], last["_sequence"], last["_location"]) == (2, 7, "ingest/x.batch")
    assert last["_ingestion_time"] == datetime.datetime(1970, 1, 1, 0, 0, 2, tzinfo=datetime.UTC)


def test_a_missing_schema_is_inferred_from_the_records() -> None:
    table = BATCH.to_table()
    assert table.schema.names == ["id", "name", "_corrupt_record"]
    assert table.schema.field("id").type == pa.int64()
    assert table.column("id").to_pylist() == [1, None, 3]
    assert table.column("_corrupt_record").to_pylist() == [None, '{"id":"x"}', None]


def test_malformed_records_are_dropped_or_an_error() -> None:
    schema = pa.schema([("id", pa.int64())])
    dropped = BATCH.to_table(schema, ValueOptions(mode="DROPMALFORMED"))
    assert dropped.column("id").to_pylist() == [1, 3]
    with pytest.raises(MalformedRecord, match="record 1 of batch 7"):
        BATCH.to_table(schema, ValueOptions(mode="FAILFAST"))


def test_metadata_that_is_not_utf_8_is_an_error_as_in_read_and_in_spark() -> None:
    batch = ArrowBatch(BATCH.values, 7, "ingest/x.batch", (Metadata(0, 1000, b"\xff"),))
    text = pa.schema([("id", pa.int64()), ("_metadata", pa.string())])
    with pytest.raises(InvalidInput, match=r"metadata of batch 7 .* is not UTF-8"):
        batch.to_table(text)
    raw = pa.schema([("id", pa.int64()), ("_metadata", pa.binary())])
    assert batch.to_table(raw).column("_metadata").to_pylist() == [b"\xff"] * 3
    empty = ArrowBatch(BATCH.values[:0], 7, "ingest/x.batch", batch.metadata)
    assert empty.to_table(text) == text.empty_table()


def test_a_time_outside_of_datetime_is_null_as_in_read_and_in_spark() -> None:
    batch = ArrowBatch(BATCH.values, 7, "ingest/x.batch", (Metadata(0, 2**62, b""),))
    schema = pa.schema([("id", pa.int64()), ("_ingestion_time", pa.timestamp("us", "UTC"))])
    assert batch.to_table(schema).column("_ingestion_time").to_pylist() == [None] * 3


def test_lines_of_csv_become_rows() -> None:
    lines = pa.array([b"1,a", b"2,b"], pa.binary())
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    options = ValueOptions(format="csv")
    table = ArrowBatch(lines, 1, "x", ()).to_table(schema, options)
    assert table.to_pylist() == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


def test_a_table_without_columns_or_with_a_wrong_type_is_refused() -> None:
    empty = ArrowBatch(pa.array([b"plain"], pa.binary()), 1, "x", ())
    with pytest.raises(InvalidInput, match="no record that shows which columns"):
        empty.to_table()
    with pytest.raises(InvalidInput, match="'_index' is of type string: make it int32 or int64"):
        empty.to_table(pa.schema([("_index", pa.string())]))


SAME = ConsumedBatch(RECORDS, 7, "ingest/x.batch", BATCH.metadata)


@pytest.mark.parametrize("batch", [BATCH, SAME], ids=["arrow", "consumed"])
def test_a_batch_is_a_collection_of_its_records(batch: ArrowBatch | ConsumedBatch) -> None:
    assert len(batch) == 3
    assert [record.value for record in batch] == RECORDS
    assert list(batch) == list(batch.records())
    assert [record.metadata for record in batch] == [b"a", b"a", b"b"]
    assert [bytes(value) for value in SAME.values] == BATCH.values.to_pylist()


@pytest.mark.parametrize("batch", [BATCH, SAME], ids=["arrow", "consumed"])
def test_an_index_is_a_record_and_a_slice_a_list_of_them(batch: ArrowBatch | ConsumedBatch) -> None:
    records = list(batch)
    assert [batch[index] for index in range(3)] == records
    assert [batch[index] for index in range(-3, 0)] == records
    assert batch[1:] == records[1:]
    assert batch[::-1] == records[::-1]
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"a batch of 3 records has no record {index}"):
            batch[index]
    with pytest.raises(InvalidInput, match=r"index of a record is 'value' .*number or a slice"):
        batch["value"]  # type: ignore[call-overload]


def test_a_record_has_the_metadata_of_its_range_whatever_their_order() -> None:
    ranges = (Metadata(2, 3, b"c"), Metadata(0, 1, b"a"), Metadata(2, 4, b"d"), Metadata(9, 5))
    batch = ConsumedBatch(RECORDS, 7, "ingest/x.batch", ranges)
    assert [batch[index] for index in range(3)] == list(batch)
    assert ConsumedBatch(RECORDS, 7, "x", ())[0].ingestion_time_ms is None


def test_a_batch_without_records_is_true() -> None:
    """Otherwise it would end a loop such as ``while batch := consumer.next_batch(5)``."""
    empty = ConsumedBatch([], 7, "ingest/x.batch", ())
    assert len(empty) == 0
    assert empty
    assert empty.as_arrow()


def test_the_name_of_the_rfc_for_the_records_still_works() -> None:
    assert SAME.entries is SAME.values
