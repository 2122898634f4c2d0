"""Decoded batches become record batches: columns, metadata ranges, and malformed records."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from buffer_source.planner import PartitionBatch
from buffer_source.schema import check_schema, default_schema
from buffer_source.task import RowBuilder
from opendata_buffer.consumer.fetch import Records
from opendata_buffer.consumer.rows import MAX_TIME_MS, MIN_TIME_MS
from opendata_buffer.errors import InvalidInput, MalformedRecord
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.values import ValueOptions
from tests.unit.buffer_source.structs import struct

LOCATION = "ingest/01JZ0000000000000000000000.batch"


def batch(
    records: list[bytes], *metadata: Metadata, sequence: int = 5, array: int = 1 << 30
) -> Records:
    """Return a batch whose records come in arrays of ``array`` records."""
    return of_values(pa.array(records, pa.binary()), *metadata, sequence=sequence, array=array)


def of_values(
    values: pa.BinaryArray, *metadata: Metadata, sequence: int = 5, array: int = 1 << 30
) -> Records:
    arrays = (values.slice(begin, array) for begin in range(0, len(values), array))
    return Records(len(values), arrays, sequence, LOCATION, metadata)


def rows(of: Records, wanted: StructType | None = None, **limits: int) -> list[dict[str, object]]:
    builder = RowBuilder(wanted if wanted is not None else default_schema(), **limits)
    return pa.Table.from_batches(builder.pieces(of), schema=builder.schema).to_pylist()


def test_one_batch_becomes_rows() -> None:
    got = rows(batch([b"a", b"", b"c"], Metadata(0, 1_000, b"m"), Metadata(2, 2_001, b"")))
    first = datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)
    second = datetime.datetime(1970, 1, 1, 0, 0, 2, 1000, tzinfo=datetime.UTC)
    assert got == [
        {"value": b"a", "metadata": b"m", "sequence": 5, "index": 0, "ingestion_time": first},
        {"value": b"", "metadata": b"m", "sequence": 5, "index": 1, "ingestion_time": first},
        {"value": b"c", "metadata": b"", "sequence": 5, "index": 2, "ingestion_time": second},
    ]


def test_the_arrow_schema_is_exactly_sparks() -> None:
    wanted = default_schema(topic=True)
    builder = RowBuilder(wanted)
    (piece,) = builder.pieces(batch([b"a"], Metadata(0, 5, b"")))
    assert piece.schema.equals(to_arrow_schema(wanted, timezone="UTC"))


def test_columns_may_be_any_subset_in_any_order_and_case() -> None:
    wanted = struct("index integer", "Value string", "location string", "partition string")
    of_batch = [("location", LOCATION), ("partition", "p-00001")]
    pieces = RowBuilder(wanted).pieces(batch([b"a", b"b"]), "p-00001")
    got = pa.Table.from_batches(pieces).to_pylist()
    assert [list(row.items()) for row in got] == [
        [("index", row), ("Value", value), *of_batch] for row, value in enumerate("ab")
    ]


def test_the_metadata_of_the_opentelemetry_exporter_is_decoded() -> None:
    said = [b"\1\1\1\0", b"\1\2\1\0", b"\1\3\2\0", b"\1\x63\1\0", b"\2\1\1\0", b"\1\1\1", b""]
    ranges = [Metadata(at, 0, payload) for at, payload in enumerate(said, 1)]
    wanted = struct("otel_encoding string", "otel_signal string")
    found = [tuple(row.values()) for row in rows(batch([b""] * 8, *ranges), wanted)]
    otlp = "otlp_protobuf"
    assert found[:4] == [(None, None), (otlp, "metrics"), (otlp, "logs"), (None, "traces")]
    assert found[4:] == [(otlp, None), (None, None), (None, None), (None, None)]


def test_metadata_can_be_read_as_text() -> None:
    got = rows(batch([b"a"], Metadata(0, 0, "é".encode())), struct("metadata string"))
    assert got == [{"metadata": "é"}]
    with pytest.raises(InvalidInput, match="read metadata as binary"):
        rows(batch([b"a"], Metadata(0, 0, b"\xff")), struct("metadata string"))


def test_the_error_about_a_record_that_is_not_utf8_has_its_sequence_and_row() -> None:
    records = [b"ok"] * 7 + ["ü".encode("latin-1")] + [b"ok"] * 3
    with pytest.raises(InvalidInput, match=r"record 7 of batch 5 .*not UTF-8.*as BINARY"):
        rows(batch(records), struct("value string"))
    with pytest.raises(InvalidInput, match="record 7 of batch 5"):
        rows(batch(records), struct("value string"), piece_rows=3)


@pytest.mark.parametrize(
    ("time_ms", "expected"),
    [
        (-(1 << 63), None),
        (MIN_TIME_MS - 1, None),
        (MIN_TIME_MS, datetime.datetime(1, 1, 2, tzinfo=datetime.UTC)),
        (MAX_TIME_MS, datetime.datetime(9999, 12, 30, 23, 59, 59, 999000, tzinfo=datetime.UTC)),
        (MAX_TIME_MS + 1, None),
        ((1 << 63) - 1, None),
    ],
)
def test_times_that_spark_cannot_hold_are_null(
    time_ms: int, expected: datetime.datetime | None
) -> None:
    got = rows(batch([b"a"], Metadata(0, time_ms, b"")))
    assert got[0]["ingestion_time"] == expected


def test_record_batches_are_split_by_bytes_and_never_within_a_record() -> None:
    records = [b"x" * 40] * 10 + [b"y" * 500] + [b""] * 5
    pieces = list(RowBuilder(struct("value binary"), piece_bytes=100).pieces(batch(records)))
    assert [len(piece) for piece in pieces] == [2, 2, 2, 2, 2, 1, 5]
    assert pa.Table.from_batches(pieces)["value"].to_pylist() == records


def test_one_large_metadata_payload_does_not_split_the_rows_without_it() -> None:
    ranges = (Metadata(0, 0, b"s"), Metadata(100, 0, b"B" * 1000), Metadata(102, 0, b"s"))
    made = batch([b"x"] * 500, *ranges)
    built = list(RowBuilder(default_schema(), piece_bytes=1000).pieces(made))
    assert [piece.num_rows for piece in built] == [100, 1, 1, 398]


def test_a_sliced_array_is_read_from_its_offset() -> None:
    values = pa.array([b"skip"] * 3 + [b"a", b"bb", b"ccc"], pa.binary()).slice(3)
    got = rows(of_values(values), struct("value binary"), piece_bytes=2)
    assert [row["value"] for row in got] == [b"a", b"bb", b"ccc"]


@given(
    st.lists(st.binary(max_size=20), max_size=40),
    st.lists(st.tuples(st.integers(0, 60), st.integers(-(1 << 63), (1 << 63) - 1)), max_size=8),
    st.integers(1, 60),
    st.integers(1, 10),
    st.integers(1, 50),
    st.integers(1, 5),
)
def test_record_batches_agree_with_a_row_by_row_model(
    records: list[bytes],
    ranges: list[tuple[int, int]],
    piece_bytes: int,
    piece_rows: int,
    array: int,
    parts: int,
) -> None:
    metadata = [
        Metadata(start, time, str(number).encode()) for number, (start, time) in enumerate(ranges)
    ]
    owner: list[Metadata | None] = [None] * len(records)
    for each in metadata:
        owner[each.start_index :] = [each] * len(owner[each.start_index :])
    expected = [
        {
            "value": record,
            "metadata": None if owner[index] is None else owner[index].payload,  # type: ignore[union-attr]
            "sequence": 5,
            "index": index,
        }
        for index, record in enumerate(records)
    ]
    wanted = struct("value binary", "metadata binary", "sequence long", "index integer")
    made = batch(records, *metadata, array=array)
    assert rows(made, wanted, piece_bytes=piece_bytes, piece_rows=piece_rows) == expected
    for part in PartitionBatch(5, LOCATION).shared_by(parts):
        cut = part.rows(len(records))
        builder = RowBuilder(wanted, piece_bytes=piece_bytes, piece_rows=piece_rows)
        pieces = builder.pieces(batch(records, *metadata, array=array), rows=cut)
        table = pa.Table.from_batches(pieces, schema=builder.schema)
        assert table.to_pylist() == expected[cut.start : cut.stop]


def test_records_after_the_part_of_a_task_are_not_decoded() -> None:
    decoded = []

    def arrays() -> Iterator[pa.BinaryArray]:
        for number in range(10):
            decoded.append(number)
            yield pa.array([b"x"] * 10, pa.binary())

    made = Records(100, arrays(), 5, LOCATION, ())
    pieces = list(RowBuilder(struct("value binary")).pieces(made, rows=range(15, 25)))
    assert [piece.num_rows for piece in pieces] == [5, 5]
    assert decoded == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("value binary,colour string", "column 'colour'.*Columns: value, metadata"),
        ("values binary", "Did you mean 'value'"),
        ("value long", "wants column 'value' as BIGINT: it is BINARY or STRING"),
        ("index long", "it is INT"),
        ("value binary,Value binary", "twice"),
    ],
)
def test_an_unsupported_schema_is_refused(ddl: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_schema(struct(*ddl.split(",")))


def test_a_nullable_column_cannot_be_declared_not_null() -> None:
    for name, kind in (("metadata", "binary"), ("ingestion_time", "timestamp")):
        with pytest.raises(InvalidInput, match=f"'{name}' NOT NULL: .* Leave NOT NULL out"):
            check_schema(StructType().add(name, kind, nullable=False))
    check_schema(StructType().add("value", "binary", nullable=False))


def test_a_schema_without_columns_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no column"):
        check_schema(StructType())


def test_cached_arrays_are_not_mixed_up_between_batches() -> None:
    builder = RowBuilder(struct("sequence long", "index integer"), piece_rows=3)
    for sequence, count in ((1, 3), (1, 2), (2, 5000)):
        made = builder.pieces(batch([b"x"] * count, sequence=sequence))
        assert pa.Table.from_batches(made).to_pylist() == [
            {"sequence": sequence, "index": index} for index in range(count)
        ]


RECORDS = [b'{"a":1}', b'{"a":', b'{"a":3}', b'{"a":"x","b":"y"}']
SCHEMA = struct("_index int", "a bigint", "b string", "_corrupt_record string")


def in_mode(mode: str) -> list[dict[str, object]]:
    array = pa.array(RECORDS, pa.binary())
    batch = Records(4, iter([array]), 7, "ingest/x.batch", ())
    builder = RowBuilder(SCHEMA, ValueOptions(mode=mode), piece_rows=3)
    return pa.Table.from_batches(builder.pieces(batch), schema=builder.schema).to_pylist()


def test_permissive_keeps_a_row_of_nulls_and_the_text() -> None:
    assert in_mode("PERMISSIVE") == [
        {"_index": 0, "a": 1, "b": None, "_corrupt_record": None},
        {"_index": 1, "a": None, "b": None, "_corrupt_record": '{"a":'},
        {"_index": 2, "a": 3, "b": None, "_corrupt_record": None},
        {"_index": 3, "a": None, "b": None, "_corrupt_record": '{"a":"x","b":"y"}'},
    ]


def test_dropmalformed_drops_records_and_logs_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert [each["_index"] for each in in_mode("DROPMALFORMED")] == [0, 2]
    assert (
        "1 malformed records left out; in batch 7 the first is record 3, at 'ingest/x.batch'"
        in caplog.text
    )


def test_the_failfast_error_has_batch_record_reason_and_first_bytes() -> None:
    with pytest.raises(MalformedRecord) as caught:
        in_mode("FAILFAST")
    error = caught.value
    assert (error.sequence, error.index, error.head) == (7, 1, b'{"a":')
    assert (
        "record 1 of batch 7 at 'ingest/x.batch' is malformed: its JSON object does not end"
        in str(error)
    )
