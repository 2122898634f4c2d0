from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from buffer_sink.blocks import Block, BlockBuilder, Columns, check_one_queue, check_schema
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import Compression, decode_batch, seal_block
from opendata_buffer.formats.manifest import Metadata

TYPES = {
    "binary": BinaryType(),
    "string": StringType(),
    "lower": StringType("UTF8_LCASE"),
    "int": IntegerType(),
    "struct": StructType([StructField("a", IntegerType())]),
    "map": MapType(StringType(), StringType()),
}


def schema(columns: str) -> StructType:
    """From ``name type, name type``; Spark's own DDL parser needs a session."""
    fields = [column.split() for column in columns.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, kind in fields])


def builder(
    metadata: bool = False, *, target: int = 1000, limit: int = 10_000, ranges: int = 1000
) -> BlockBuilder:
    return BlockBuilder(
        Columns(0, 1 if metadata else None),
        where="partition 3",
        target=target,
        limit=limit,
        max_ranges=ranges,
    )


def rows(values: list[bytes | None], metadata: list[bytes | None] | None = None) -> pa.RecordBatch:
    columns = [pa.array(values, pa.binary())]
    if metadata is not None:
        columns.append(pa.array(metadata, pa.binary()))
    return pa.record_batch(columns, names=["value", "metadata"][: len(columns)])


def blocks(made: BlockBuilder, *batches: pa.RecordBatch) -> list[Block]:
    found = [block for number, batch in enumerate(batches) for block in made.add(batch, number)]
    last = made.finish()
    return found + ([last] if last else [])


def records(block: Block) -> list[bytes]:
    return decode_batch(seal_block(block.pieces, block.records, Compression.NONE))


@pytest.mark.parametrize(
    ("ddl", "columns"),
    [
        ("value binary", Columns(0, None)),
        ("value string", Columns(0, None)),
        ("VALUE string", Columns(0, None)),
        ("metadata string, value binary", Columns(1, 0)),
        ("value lower, metadata binary", Columns(0, 1)),
    ],
)
def test_input_columns_in_any_order_and_case(ddl: str, columns: Columns) -> None:
    assert check_schema(schema(ddl)) == columns


@pytest.mark.parametrize(
    ("ddl", "says"),
    [
        ("carrier string, delay int", "column 'carrier' .string. cannot be written"),
        ("value string, delay int", "column 'delay' .int. cannot be written"),
        ("metadata string", "column 'value' is missing"),
        ("value int", "column 'value' has type int"),
        ("value struct", "column 'value' has type struct<a:int>"),
        ("value binary, metadata map", "column 'metadata' has type map"),
    ],
)
def test_any_other_column_is_an_error_that_shows_the_fix(ddl: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as caught:
        check_schema(schema(ddl))
    assert "to_json(struct(*)) AS value" in str(caught.value)


def test_two_columns_of_one_name() -> None:
    with pytest.raises(InvalidInput, match="'value' is there twice"):
        check_schema(schema("value string, VALUE string"))


def test_small_rows_make_one_block_of_the_format_s_bytes() -> None:
    (block,) = blocks(builder(), rows([b"a", b""]), rows([b"bc"]))
    assert b"".join(block.pieces) == b"\x01\0\0\0a" + b"\0\0\0\0" + b"\x02\0\0\0bc"
    assert block.records == 3
    assert block.metadata == (Metadata(0, 0, b""),)


def test_strings_are_written_as_utf_8() -> None:
    batch = pa.record_batch([pa.array(["é", ""])], names=["value"])
    (block,) = blocks(builder(), batch)
    assert records(block) == ["é".encode(), b""]


def test_no_rows_make_no_block() -> None:
    assert blocks(builder()) == []
    assert blocks(builder(), rows([])) == []


def test_blocks_are_cut_before_they_exceed_the_target() -> None:
    # 6 bytes a record: three fit into 20 bytes.
    found = blocks(builder(target=20), rows([b"aa", b"bb", b"cc", b"dd"]), rows([b"ee"]))
    assert [records(block) for block in found] == [[b"aa", b"bb", b"cc"], [b"dd", b"ee"]]
    # The time of a block is that of its first rows: those of the first batch, twice.
    assert [block.metadata for block in found] == [(Metadata(0, 0, b""),)] * 2


def test_a_record_larger_than_the_target_has_a_block_of_its_own() -> None:
    found = blocks(builder(target=20), rows([b"a", b"x" * 50, b"b"]))
    assert [records(block) for block in found] == [[b"a"], [b"x" * 50], [b"b"]]


def test_a_record_larger_than_the_limit_is_refused_with_its_row() -> None:
    made = builder(target=20, limit=50)
    assert len(blocks(made, rows([b"x" * 46]))) == 1
    with pytest.raises(InvalidInput, match="47 bytes in row 3 of partition 3"):
        blocks(made, rows([b"a", b"b", b"x" * 47]))


def test_a_null_is_refused_with_its_row() -> None:
    made = builder()
    blocks(made, rows([b"a", b"b"]))
    with pytest.raises(InvalidInput, match=r"null in row 3 of partition 3.*IS NOT NULL"):
        blocks(made, rows([b"c", None, None]))


def test_runs_of_equal_metadata_become_ranges_over_arrow_batches() -> None:
    (block,) = blocks(
        builder(metadata=True),
        rows([b"1", b"2", b"3"], [b"x", b"x", b"y"]),
        rows([b"4", b"5"], [b"y", b"x"]),
    )
    assert block.metadata == (Metadata(0, 0, b"x"), Metadata(2, 0, b"y"), Metadata(4, 0, b"x"))


def test_each_block_begins_with_a_range() -> None:
    found = blocks(builder(metadata=True, target=10), rows([b"1", b"2", b"3"], [b"x"] * 3))
    assert [block.metadata for block in found] == [(Metadata(0, 0, b"x"),)] * 2


def test_null_metadata_is_empty_metadata() -> None:
    (block,) = blocks(builder(metadata=True), rows([b"1", b"2", b"3"], [None, b"", b"x"]))
    assert block.metadata == (Metadata(0, 0, b""), Metadata(2, 0, b"x"))


def test_metadata_may_be_text() -> None:
    batch = pa.record_batch([pa.array([b"1"]), pa.array(["é"])], names=["value", "metadata"])
    (block,) = blocks(builder(metadata=True), batch)
    assert block.metadata == (Metadata(0, 0, "é".encode()),)


def test_f35_metadata_that_changes_with_every_row_is_refused() -> None:
    unique = [str(number).encode() for number in range(11)]
    assert len(blocks(builder(metadata=True, ranges=11), rows(unique, unique))) == 1
    with pytest.raises(InvalidInput, match="changes more than 10 times in partition 3"):
        blocks(builder(metadata=True, ranges=10), rows(unique, unique))


def test_slices_of_an_arrow_array_are_read_where_they_start() -> None:
    batch = rows([b"a", b"b", b"c", b"d"], [b"x", b"x", b"y", b"y"]).slice(1, 2)
    (block,) = blocks(builder(metadata=True), batch)
    assert records(block) == [b"b", b"c"]
    assert block.metadata == (Metadata(0, 0, b"x"), Metadata(1, 0, b"y"))


@given(
    data=st.lists(
        st.lists(st.tuples(st.binary(max_size=30), st.sampled_from([b"", b"x", b"y"]))), max_size=5
    ),
    target=st.integers(1, 100),
)
def test_every_row_comes_out_once_in_order_with_its_metadata(
    data: list[list[tuple[bytes, bytes]]], target: int
) -> None:
    batches = [rows([v for v, _ in part], [m for _, m in part]) for part in data]
    found = blocks(builder(metadata=True, target=target), *batches)
    out: list[tuple[bytes, bytes]] = []
    for block in found:
        values = records(block)
        assert block.size <= target or len(values) == 1
        assert block.metadata[0].start_index == 0
        payloads: list[bytes] = []
        starts = [each.start_index for each in block.metadata[1:]] + [len(values)]
        for each, end in zip(block.metadata, starts, strict=True):
            assert end > len(payloads)
            payloads += [each.payload] * (end - len(payloads))
        assert all(
            a.payload != b.payload for a, b in zip(block.metadata, block.metadata[1:], strict=False)
        )
        out += zip(values, payloads, strict=True)
    assert out == [row for part in data for row in part]


def test_key_and_partition_are_found_and_are_a_topic_s() -> None:
    columns = check_schema(schema("key binary, Value string, partition string"))
    assert columns == Columns(1, None, key=0, partition=2)
    with pytest.raises(InvalidInput, match="column 'key' cannot be written to a single queue"):
        check_one_queue(columns)
    check_one_queue(Columns(0, 1))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("partition int", "column 'partition' has type int, not STRING: cast it"),
        ("partition binary", "column 'partition' has type binary, not STRING: cast it"),
        ("key int", "column 'key' has type int, not BINARY or STRING: cast it"),
    ],
)
def test_a_key_or_partition_of_another_type(column: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        check_schema(schema(f"value string, {column}"))
