"""Spark's rows become blocks: columns, partitions, and metadata."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, IntegerType, MapType, StringType, StructField, StructType

from buffer_sink.committer import TopicWrite
from buffer_sink.options import SinkOptions
from buffer_sink.rows import (
    COALESCED_BYTES,
    Block,
    BlockBuilder,
    Columns,
    PartitionRouter,
    check_one_queue,
    check_schema,
    check_topic,
    coalesced,
)
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import Compression, decode_batch, seal_block
from opendata_buffer.formats.manifest import Metadata
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic import partitioner as partitioners

TYPES = {
    "binary": BinaryType(),
    "string": StringType(),
    "lower": StringType("UTF8_LCASE"),
    "int": IntegerType(),
    "struct": StructType([StructField("a", IntegerType())]),
    "map": MapType(StringType(), StringType()),
}


def schema(columns: str) -> StructType:
    """Parse ``name type, name type``, because Spark's own DDL parser needs a session."""
    fields = [column.split() for column in columns.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, kind in fields])


def builder(
    metadata: bool = False, *, target: int = 1000, limit: int = 10_000, ranges: int = 1000
) -> BlockBuilder:
    options = SinkOptions(
        queue=QueueConfig(store="memory://x"),
        target_batch_bytes=target,
        max_batch_bytes=limit,
        max_metadata_ranges=ranges,
    )
    return BlockBuilder(Columns(0, 1 if metadata else None), options, "task 3")


def rows(values: list[bytes | None], metadata: list[bytes | None] | None = None) -> pa.RecordBatch:
    columns = {"value": pa.array(values, pa.binary())}
    if metadata is not None:
        columns["metadata"] = pa.array(metadata, pa.binary())
    return pa.record_batch(columns)


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
def test_input_columns_may_have_any_order_and_case(ddl: str, columns: Columns) -> None:
    assert check_schema(schema(ddl)) == columns


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("carrier string, delay int", "column 'carrier' .string. cannot be written"),
        ("value string, delay int", "column 'delay' .int. cannot be written"),
        ("metadata string", "column 'value' is missing"),
        ("value int", "column 'value' has type int"),
        ("value struct", "column 'value' has type struct<a:int>"),
        ("value binary, metadata map", "column 'metadata' has type map"),
        ("value string, VALUE string", "'value' is there twice"),
        ("value string, partition int", "column 'partition' has type int, not STRING: cast it"),
        ("value string, partition binary", "'partition' has type binary, not STRING: cast it"),
        ("value string, key int", "column 'key' has type int, not BINARY or STRING: cast it"),
    ],
)
def test_the_error_about_a_column_that_cannot_be_written_shows_the_fix(
    ddl: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        check_schema(schema(ddl))
    if "cast it" not in message and "twice" not in message:
        assert "to_json(struct(*)) AS value" in str(caught.value)


def test_small_rows_become_one_block_in_the_v1_format() -> None:
    (block,) = blocks(builder(), rows([b"a", b""]), rows([b"bc"]))
    assert b"".join(block.pieces) == b"\x01\0\0\0a" + b"\0\0\0\0" + b"\x02\0\0\0bc"
    assert block.records == 3
    assert block.metadata == (Metadata(0, 0, b""),)


def test_the_error_about_a_record_above_the_limit_names_its_row() -> None:
    made = builder(target=20, limit=50)
    assert len(blocks(made, rows([b"x" * 46]))) == 1
    with pytest.raises(InvalidInput, match="47 bytes in row 3 of task 3"):
        blocks(made, rows([b"a", b"b", b"x" * 47]))


def test_the_error_about_a_null_names_its_row() -> None:
    made = builder()
    blocks(made, rows([b"a", b"b"]))
    with pytest.raises(
        InvalidInput, match=r"null in row 3 of task 3.*IS NOT NULL.*tombstones.*json"
    ):
        blocks(made, rows([b"c", None, None]))


def test_text_is_written_as_utf_8() -> None:
    batch = pa.record_batch({"value": pa.array(["é", ""]), "metadata": pa.array(["ü", "ü"])})
    (block,) = blocks(builder(metadata=True), batch)
    assert records(block) == ["é".encode(), b""]
    assert block.metadata == (Metadata(0, 0, "ü".encode()),)


def test_f35_metadata_that_changes_with_every_row_is_refused() -> None:
    unique = [str(number).encode() for number in range(11)]
    assert len(blocks(builder(metadata=True, ranges=11), rows(unique, unique))) == 1
    with pytest.raises(InvalidInput, match="changes more than 10 times in task 3"):
        blocks(builder(metadata=True, ranges=10), rows(unique, unique))


@given(
    data=st.lists(
        st.lists(st.tuples(st.binary(max_size=30), st.sampled_from([b"", b"x", b"y"]))), max_size=5
    ),
    target=st.integers(1, 100),
)
def test_every_row_is_written_once_in_order_with_its_metadata(
    data: list[list[tuple[bytes, bytes]]], target: int
) -> None:
    # A slice starts within its arrays.
    batches = [
        rows([b"cut off", *(v for v, _ in part)], [b"z", *(m for _, m in part)]).slice(1)
        for part in data
    ]
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


def test_key_and_partition_columns_are_found_and_allowed_only_for_a_topic() -> None:
    columns = check_schema(schema("key binary, Value string, partition string"))
    assert columns == Columns(1, None, key=0, partition=2)
    with pytest.raises(InvalidInput, match="column 'key' cannot be written to a single queue"):
        check_one_queue(columns)
    check_one_queue(Columns(0, 1))


NAMES = ("p-00000", "p-00002", "p-00003", "p-00004", "p-00005")
WRITE = TopicWrite(NAMES, ("p-00001",), b"\x01" * 6, "write-x")
KEYED = Columns(0, None, key=1)
CHOSEN = Columns(0, None, partition=1)


def router(columns: Columns = KEYED, partitioner: str | None = "rendezvous") -> PartitionRouter:
    return PartitionRouter(columns, partitioner, WRITE, task=3, runtime=ManualRuntime())


def routed_rows(
    values: list[Any], second: list[Any] | None = None, kind: Any = None
) -> pa.RecordBatch:
    columns = {"value": pa.array(values, pa.string())}
    if second is not None:
        columns["second"] = pa.array(second, kind or pa.string())
    return pa.record_batch(columns)


def values_by_partition(found: dict[str, pa.RecordBatch]) -> dict[str, list[str]]:
    return {name: part.column(0).to_pylist() for name, part in found.items()}


@pytest.mark.parametrize("kind", [pa.string(), pa.binary()])
@pytest.mark.parametrize("partitioner", ["modulo", "rendezvous"])
def test_rows_go_to_the_partition_of_the_partitioner_and_keep_their_order(
    partitioner: str, kind: Any
) -> None:
    keys = [str(number % 17) for number in range(200)]
    values = [f"{key}/{number}" for number, key in enumerate(keys)]
    given = routed_rows(
        values, [key.encode() for key in keys] if kind == pa.binary() else keys, kind
    )
    indices = getattr(partitioners, partitioner)(keys, NAMES)
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for value, index in zip(values, indices, strict=True):
        wanted[NAMES[index]].append(value)
    assert values_by_partition(router(partitioner=partitioner).split(given)) == wanted
    assert len(wanted) > 1


def test_the_partition_column_chooses_the_partition() -> None:
    given = routed_rows(["a", "b", "c"], ["p-00005", "p-00000", "p-00005"])
    found = values_by_partition(router(CHOSEN, None).split(given))
    assert found == {"p-00005": ["a", "c"], "p-00000": ["b"]}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("p-00009", "'p-00009', which the topic does not have"),
        ("p-00001", "'p-00001', which is being drained"),
        ("", "'', which the topic does not have"),
        (None, "null"),
    ],
)
def test_the_error_about_a_partition_that_cannot_be_written_names_its_row(
    name: str | None, why: str
) -> None:
    routes = router(CHOSEN, None)
    routes.split(routed_rows(["a"] * 10, ["p-00000"] * 10))
    with pytest.raises(InvalidInput) as refused:
        routes.split(routed_rows(["a", "b"], ["p-00000", name]))
    assert f"partition is {why}, in row 11 of task 3" in str(refused.value)
    assert "p-00000, p-00002, ..., p-00005" in str(refused.value)


def test_the_error_about_a_null_key_names_its_row() -> None:
    routes = router()
    routes.split(routed_rows(["a"] * 10, ["k"] * 10))
    with pytest.raises(
        InvalidInput, match=r"key is null in row 12 of task 3.*coalesce\(key, value\)"
    ):
        routes.split(routed_rows(["a", "b", "c"], ["k", "k", None]))


def test_small_batches_are_merged_and_large_ones_are_not() -> None:
    small = [routed_rows([f"{number}/{row}" for row in range(100)]) for number in range(50)]
    large = routed_rows(["x" * COALESCED_BYTES])
    found = list(coalesced([*small, large, small[0]]))
    assert [len(each) for each in found] == [5_001, 100]
    assert found[0].column(0).to_pylist()[:5_000] == [
        value for each in small for value in each.column(0).to_pylist()
    ]
    assert list(coalesced([])) == []


@pytest.mark.parametrize(
    ("columns", "partitioner", "message"),
    [
        (Columns(0, None), "modulo", "column 'key' is missing: partitioner 'modulo'"),
        (KEYED, None, "rows of one key would go anywhere"),
        (KEYED, "random", "Set option partitioner to 'modulo'"),
        (CHOSEN, "modulo", "column 'partition' and option partitioner"),
        (Columns(0, None, 1, 2), None, "column 'partition' and column 'key' both choose"),
    ],
)
def test_columns_that_do_not_fit_the_partitioner_are_refused(
    columns: Columns, partitioner: str | None, message: str
) -> None:
    for fits in ((Columns(0, None), None), (Columns(0, None), "random"), (KEYED, "modulo")):
        check_topic(*fits)
    check_topic(CHOSEN, None)
    with pytest.raises(InvalidInput, match=message):
        check_topic(columns, partitioner)
