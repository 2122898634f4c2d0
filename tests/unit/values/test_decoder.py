# ruff: noqa: E501
from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer.errors import InvalidInput
from opendata_buffer.values.decoder import Decoder
from opendata_buffer.values.exact_json import ExactJson
from opendata_buffer.values.options import ValueOptions
from tests.values import corpus
from tests.values.compare import plain
from tests.values.schemas import SCHEMAS

SCHEMA = SCHEMAS["json"]


def decoded(
    records: list[bytes], schema: pa.Schema, library: str = "msgspec", piece: int = 500
) -> pa.Table:
    decoder = Decoder(schema, ValueOptions(), library=library)
    values = pa.array(records, pa.binary())
    return pa.concat_tables(
        pa.table(decoder.decode(values.slice(at, piece)).arrays, schema=schema)
        for at in range(0, len(values), piece)
    )


def exactly(records: list[bytes], schema: pa.Schema) -> pa.Table:
    exact = ExactJson([each for each in schema if each.name != corpus.CORRUPT], ValueOptions())
    rows = [exact.read(each) for each in records]
    columns: list[list[Any]] = [
        list(each) for each in zip(*(row.values for row in rows), strict=True)
    ]
    texts = [
        record.decode("utf-8", "replace") if row.problem else None
        for record, row in zip(records, rows, strict=True)
    ]
    arrays = [
        pa.array(texts if each.name == corpus.CORRUPT else columns.pop(0), each.type)
        for each in schema
    ]
    return pa.table(arrays, schema=schema)


def assert_equal(records: list[bytes], fast: pa.Table, exact: pa.Table) -> None:
    for name in exact.column_names:
        for record, one, other in zip(records, plain(fast[name]), plain(exact[name]), strict=True):
            assert one == other, f"{record!r}: column {name}"


GENERATED = 3000
"""Of the corpus that Spark reads all of, in ``tests/spark/test_values.py``."""


@pytest.mark.parametrize("library", ["msgspec", "json"])
def test_every_record_of_the_corpus_is_read_as_the_exact_reader_reads_it(library: str) -> None:
    records = [*corpus.chosen(), *corpus.generated(GENERATED)]
    assert_equal(records, decoded(records, SCHEMA, library), exactly(records, SCHEMA))


def alike(rng: random.Random, count: int) -> list[bytes]:
    """Records of two shapes, some of them odd in one place."""
    records = []
    for number in range(count):
        value = rng.choice(corpus.VALUES) if rng.random() < 0.3 else str(number)
        name = rng.choice(("x", "y é", "", "longer than twelve bytes")) if number % 5 else "a\\n"
        at = f"20{rng.randint(10, 30)}-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}"
        if rng.random() < 0.7:
            record = f'{{"a":{value},"c":"{name}","d":{rng.random()},"j":"{at}","o":{{"x":1,"y":"z"}},"f":true}}'
        else:
            record = f'{{"c": "{name}", "zz": {value}, "k": "{at}T10:20:30Z", "h": {number % 300}, "g": 1.{number}}}'
        if rng.random() < 0.05:
            record = record[: rng.randrange(len(record))]
        records.append(record.encode() + b" " * rng.choice((0, 0, 3)))
    return records


@pytest.mark.parametrize("seed", range(3))
def test_records_that_share_shapes_are_read_as_the_exact_reader_reads_them(seed: int) -> None:
    records = alike(random.Random(seed), 2000)
    schema = pa.schema([SCHEMA.field(name) for name in (*"acdfghjko", corpus.CORRUPT)])
    decoder = Decoder(schema, ValueOptions())
    values = pa.array(records, pa.binary())
    fast = pa.concat_tables(
        pa.table(decoder.decode(values.slice(at, 400)).arrays, schema=schema)
        for at in range(0, len(values), 400)
    )
    assert decoder.shapes == 2, "or nothing was read in bulk"
    assert_equal(records, fast, exactly(records, schema))


def test_what_is_rescued_in_bulk_is_what_the_exact_reader_rescues() -> None:
    records = alike(random.Random(9), 2000)
    options = ValueOptions(rescued_column="rest")
    fields = [SCHEMA.field(name) for name in "cdjkh"]
    exact = ExactJson(fields, options)
    rows = [exact.read(each) for each in records]
    decoder = Decoder(pa.schema([*fields, ("rest", pa.string())]), options)
    values = pa.array(records, pa.binary())
    pieces = [decoder.decode(values.slice(at, 400)).arrays for at in range(0, 2000, 400)]
    assert decoder.shapes >= 1, "or nothing was read in bulk"
    rescued = [each for piece in pieces for each in piece[-1].to_pylist()]
    assert sum(each is not None for each in rescued) > 1000
    assert rescued == [each.rescued for each in rows]
    for at, field in enumerate(fields):
        fast = plain(pa.chunked_array([piece[at] for piece in pieces]))
        assert fast == plain(pa.chunked_array([pa.array([r.values[at] for r in rows], field.type)]))


def test_columns_come_in_the_order_of_the_schema_and_the_text_of_malformed_records_in_its_own() -> (
    None
):
    schema = pa.schema([("why", pa.string()), ("a", pa.int64()), ("rest", pa.string())])
    options = ValueOptions(corrupt_column="why", rescued_column="rest")
    records = [b'{"a":1}', b'{"a":', b'{"a":2,"z":[]}', b'{"a":"x"}']
    columns = Decoder(schema, options).decode(pa.array(records, pa.binary()))
    assert [each.to_pylist() for each in columns.arrays] == [
        [None, '{"a":', None, None],
        [1, None, 2, None],
        [None, None, '{"z":[]}', '{"a":"x"}'],
    ]
    assert list(columns.malformed) == [1]
    assert "ends too early" in columns.malformed[1]


def test_a_record_that_does_not_fit_its_own_shape_is_read_nevertheless() -> None:
    schema = pa.schema([("a", pa.int64())])
    records = [b'{"a":1}' + b" " * 2000] * 100
    columns = Decoder(schema, ValueOptions()).decode(pa.array(records, pa.binary()))
    assert columns.arrays[0].to_pylist() == [1] * 100


def test_no_records_are_no_rows() -> None:
    columns = Decoder(SCHEMA, ValueOptions()).decode(pa.array([], pa.binary()))
    assert [len(each) for each in columns.arrays] == [0] * len(SCHEMA)


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (pa.schema([("a", pa.int8()), ("a", pa.int8())]), {}, "'a' twice"),
        (pa.schema([("_corrupt_record", pa.int8())]), {}, "make it STRING"),
        (pa.schema([("a", pa.duration("us"))]), {}, "column 'a' is of type"),
        (pa.schema([("a", pa.int8())]), {"rescued_column": "r"}, "no such column"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(
    schema: pa.Schema, options: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        Decoder(schema, ValueOptions(**options))


@pytest.mark.parametrize("name", ["", 'a"b', "a\\b", "a\tb", "a\x00b"])
def test_a_column_may_have_any_name(name: str) -> None:
    schema = pa.schema([(name, pa.int64()), ("s", pa.struct([(name, pa.list_(pa.int64()))]))])
    record = json.dumps({name: 1, "s": {name: [2, 3]}}).encode()
    read = Decoder(schema, ValueOptions()).decode(pa.array([record], pa.binary()))
    assert [each.to_pylist() for each in read.arrays] == [[1], [{name: [2, 3]}]]
    assert not read.malformed
