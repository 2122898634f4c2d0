"""Records become rows, and no record changes the row of another one."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendata_buffer.errors import InvalidInput
from opendata_buffer.values import Decoder, ValueOptions, infer
from tests.values import corpus

AS_CSV = ValueOptions(format="csv")


def records(*given: bytes) -> pa.BinaryArray:
    return pa.array(given, pa.binary())


def rows(schema: pa.Schema, values: pa.BinaryArray, **options: Any) -> list[dict[str, Any]]:
    arrays = Decoder(schema, ValueOptions(**options)).decode(values).arrays
    for each in arrays:
        each.validate(full=True)
    found: list[dict[str, Any]] = pa.table(arrays, schema=schema).to_pylist()
    return found


CORPORA = [
    pytest.param(corpus.JSON, corpus.JSON_SCHEMA, "json", id="json"),
    pytest.param(corpus.CSV, corpus.CSV_SCHEMA, "csv", id="csv"),
]


@pytest.mark.parametrize(("cases", "schema", "value_format"), CORPORA)
def test_a_record_alone_or_among_others_becomes_its_row(
    cases: list[corpus.Case], schema: pa.Schema, value_format: str
) -> None:
    wanted = corpus.table(cases, schema)
    for (record, _), row in zip(cases, wanted, strict=True):
        assert rows(schema, records(record), format=value_format) == [row], record
    values = records(*(record for record, _ in cases))
    assert rows(schema, values, format=value_format) == wanted
    assert rows(schema, values.slice(3, 20), format=value_format) == wanted[3:23]
    assert rows(schema, values.slice(0, 0), format=value_format) == []


GOOD = b'{"i":%d,"s":"x","os":[{"n":1.5}]}'
SCHEMA = pa.schema(
    [("i", pa.int32()), ("s", pa.string()), ("os", pa.list_(pa.struct([("n", pa.float64())])))]
)
CSV_SCHEMA = pa.schema([("i", pa.int32()), ("s", pa.string())])
PIECES = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\n", b"\r", b" ", b"\x00", b"\xff", b"null",
    b"1", b'"i"', b'"s"', b'"os"', b'{"i":1}', b'{"i":1,', b'"s":"x"}', b"{}", b"\xef\xbb\xbf",
    b'{"s":"', b'"}', b'{"os":[', b"]}", b"NaN", b"1,x", b"1,x\n2,y", b'1,"x', b'y"', b'1,"',
]  # fmt: skip
_joined = st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join)
_cut = st.integers(0, len(GOOD)).map(lambda end: (GOOD % 1)[:end])
_other = st.one_of(_joined, _cut, _joined.map(lambda text: GOOD % 1 + text), st.binary(max_size=4))


CASES = [
    (ValueOptions(), SCHEMA, GOOD, {"s": "x", "os": [{"n": 1.5}]}),
    (AS_CSV, CSV_SCHEMA, b'%d,"x ""y"""', {"s": 'x "y"'}),
]


@given(st.lists(st.none() | _other, max_size=30), st.sampled_from(CASES))
def test_every_valid_record_has_its_row_at_its_index(
    mixed: list[bytes | None], case: tuple[ValueOptions, pa.Schema, bytes, dict[str, Any]]
) -> None:
    options, schema, good, row = case
    decoder = Decoder(schema, options)
    values = [good % at if each is None else each for at, each in enumerate(mixed)]
    found = decoder.decode(records(*values))
    table = pa.table(found.arrays, schema=schema).to_pylist()
    for at, each in enumerate(mixed):
        if each is None:
            assert (table[at], at in found.malformed) == ({"i": at, **row}, False)
        else:
            alone = decoder.decode(records(each))
            assert pa.table(alone.arrays, schema=schema).to_pylist() == [table[at]]
            assert (at in found.malformed) == (0 in alone.malformed)


BEHIND = b'{"i":7,"s":"x"}'


@pytest.mark.parametrize(
    "record",
    [
        b'{"i":1}{"i":2}\x00}',
        b'{"i":1}{"i":2}\x00{}',
        b'{"s":"\x00"}',
        b'{"s":"}',
        b'{"more":"}',
        b'{"more":{"a":{}',
        b'{"more":[{}',
        b'{"i":1}}',
        b'{"i":1} null {}',
        b'{"i":1}\nnull\n{"i":2}',
        b'{"i":1},{}',
    ],
)
@pytest.mark.parametrize("threads", [False, True])
def test_no_record_ends_another_one_or_takes_its_row(record: bytes, threads: bool) -> None:
    """Each of these would be a row, or part of one, if only its neighbours fitted."""
    decoder = Decoder(SCHEMA, ValueOptions())
    for others in ([], [BEHIND, b"{}"], [b'{"c":1}}', BEHIND], [BEHIND] * 100_000):
        given = [BEHIND, record, *others, record]
        found = decoder.decode(records(*given), threads=threads)
        good = [at for at, each in enumerate(given) if each == BEHIND]
        table = pa.table(found.arrays, schema=SCHEMA)
        assert table.take(good)["i"].unique().to_pylist() == [7]
        assert {1, len(given) - 1} <= found.malformed.keys()
        assert not found.malformed.keys() & {*good}
        assert table["i"].null_count == len(given) - len(good)


def test_threads_give_the_rows_that_one_thread_gives() -> None:
    decoder = Decoder(SCHEMA, ValueOptions())
    given = [b'{"i":%d,"s":"%s","os":[{"n":%d}]}' % (at, b"x" * 90, at) for at in range(60_000)]
    longest = b'{"i":1,"s":"%s"}' % (b"x" * (3 << 20))
    pretty = b'{\n"i":1,\n"s":"y"\n}'
    for more in ([], [longest], [pretty], [b"no", longest, pretty]):
        values = records(*given[:30_000], *more, *given[30_000:])
        alone, together = decoder.decode(values), decoder.decode(values, threads=True)
        assert together.malformed == alone.malformed
        assert together.arrays == alone.arrays
        assert len(alone.malformed) == more.count(b"no")


def test_the_record_null_does_not_end_the_process() -> None:
    # Arrow's reader crashes if the first value of a text is null.
    code = """
import pyarrow as pa
from opendata_buffer.values import Decoder, ValueOptions, infer
for first in (b"null", b" null", b"null null", b"\\nnull {}"):
    values = pa.array([first, b"{}"], pa.binary())
    found = Decoder(pa.schema([("i", pa.int32())]), ValueOptions()).decode(values)
    print(sorted(found.malformed), infer(values, ValueOptions()).names)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[0] []\n" * 4)


def test_many_malformed_records_take_time_linear_in_their_number() -> None:
    def seconds(count: int) -> float:
        values = records(*(b'{"i":"%d","s":"%s"}' % (at, b"x" * 200) for at in range(count)))
        began = time.process_time()
        assert len(Decoder(SCHEMA, ValueOptions()).decode(values).malformed) == count
        return time.process_time() - began

    seconds(100)
    assert seconds(4000) < 8 * 4 * max(seconds(500), 0.02)


def test_records_with_more_bytes_than_arrow_reads_at_once_are_read() -> None:
    text = b"x" * (1 << 20)
    values = records(*(b'{"i":%d,"s":"%s"}' % (at, text) for at in range(9)), b"no")
    found = rows(SCHEMA, values)
    assert [each["i"] for each in found] == [*range(9), None]
    assert all(len(each["s"]) == len(text) for each in found[:9])


def test_a_malformed_record_has_its_reason() -> None:
    found = Decoder(SCHEMA, ValueOptions()).decode(
        records(b"", b'{"i":"x"}', b"\xff", b'{"i":1}{}')
    )
    assert found.malformed == {
        0: "it is not a JSON object",
        1: "Column(/i) changed from number to string",
        2: "it is not UTF-8",
        3: "it is more than one JSON object",
    }


def test_options_of_csv_are_applied() -> None:
    schema = pa.schema([("a", pa.int32()), ("b", pa.string())])
    options = {"format": "csv", "sep": ";", "quote": "'", "null_value": "-"}
    values = records(b"1;'x;y'", b"-;-", b"1;'-'", b'1;"', b"1;")
    assert rows(schema, values, **options) == [
        {"a": 1, "b": "x;y"}, {"a": None, "b": None}, {"a": 1, "b": "-"}, {"a": 1, "b": '"'},
        {"a": 1, "b": ""},
    ]  # fmt: skip
    values = records(b'1,x"y', b'1,"x,y', b"2,z")
    assert rows(schema, values, format="csv", quote="") == [
        {"a": 1, "b": 'x"y'}, {"a": None, "b": None}, {"a": 2, "b": "z"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "value_format", "message"),
    [
        ([("a", pa.int8()), ("a", pa.int8())], "json", "schema has the column 'a' twice"),
        ([("_corrupt_record", pa.int8()), ("a", pa.int8())], "json", "make it STRING"),
        ([("_corrupt_record", pa.string())], "json", "no column that is filled from records"),
        ([("a", pa.map_(pa.string(), pa.int8()))], "json", "'a' is of type map<"),
        ([("a", pa.list_(pa.struct([("x", pa.uint8())])))], "json", "'a[].x' is of type uint8"),
        ([("a", pa.struct([]))], "json", "'a' is of type struct<>"),
        ([("a", pa.timestamp("ns"))], "json", "'a' is of type timestamp[ns], which json records"),
        ([("a", pa.binary())], "csv", "'a' is of type binary, which csv records are not read"),
        ([("a", pa.list_(pa.int8()))], "csv", "use from_csv on value"),
    ],
)
def test_unsupported_types_of_columns_are_refused(
    schema: list[tuple[str, pa.DataType]], value_format: str, message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        Decoder(pa.schema(schema), ValueOptions(format=value_format))
    assert message in str(caught.value)


def test_types_nested_deeper_than_fifty_levels_are_refused() -> None:
    dtype = pa.int8()
    for _ in range(49):
        dtype = pa.list_(dtype)
    deepest = rows(pa.schema([("a", dtype)]), records(b'{"a":%s}' % (b"[" * 49 + b"]" * 49)))
    assert str(deepest[0]["a"]) == "[" * 49 + "]" * 49
    with pytest.raises(InvalidInput, match="is of type list"):
        Decoder(pa.schema([("a", pa.list_(dtype))]), ValueOptions())


LIST = pa.list_(pa.string())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([b'{"b":1,"a":"x"}'], {"b": pa.int64(), "a": pa.string()}),
        ([b'{"a":1}', b'{"a":1.5}'], {"a": pa.float64()}),
        ([b'{"a":1}', b'{"a":"x"}'], {"a": pa.int64()}),
        ([b'{"a":true}', b'{"a":null}', b"{}"], {"a": pa.bool_()}),
        ([b'{"a":null}'], {"a": pa.string()}),
        ([b'{"a":"2024-01-01T00:00:00Z"}'], {"a": pa.string()}),
        ([b'{"a":[1,null]}', b'{"a":[2.5]}'], {"a": pa.list_(pa.float64())}),
        ([b'{"a":[]}'], {"a": LIST}),
        ([b'{"a":{"x":1}}', b'{"a":{"y":""}}'],
         {"a": pa.struct([("x", pa.int64()), ("y", pa.string())])}),
        ([b'{"a":{"x":{}},"b":1,"":2}', b"{}"], {"b": pa.int64()}),
        ([b'{"a":1}', b"no", b"", b"{}{}"], {"a": pa.int64()}),
        ([b'{"a":1,"_corrupt_record":2}'], {"a": pa.int64()}),
        ([b'{"a":%s}' % (b"[" * 100_000 + b"]" * 100_000), b'{"b":1}'], {"b": pa.int64()}),
    ],
)  # fmt: skip
def test_columns_are_inferred_from_the_fields_of_records(
    given: list[bytes], expected: dict[str, pa.DataType]
) -> None:
    fields = [*expected.items(), ("_corrupt_record", pa.string())]
    assert infer(records(*given), ValueOptions()) == pa.schema(fields)
    kept = infer(records(*given), ValueOptions(mode="FAILFAST"))
    assert kept == pa.schema(list(expected.items()))


def test_records_without_fields_give_an_empty_schema() -> None:
    for found in ((), (b"no", b"", b"{}", b"null"), (b'{"_corrupt_record":1}',)):
        assert infer(records(*found), ValueOptions()).names == []


def test_a_type_found_in_a_later_text_widens_the_first() -> None:
    given = [b'{"a":1,"l":[],"o":{"x":1}}'] * 300 + [b'{"a":1.5,"l":[1],"o":{"y":[true]}}'] * 300
    assert infer(records(*given), ValueOptions(mode="FAILFAST")) == pa.schema(
        [
            ("a", pa.float64()),
            ("l", pa.list_(pa.int64())),
            ("o", pa.struct([("x", pa.int64()), ("y", pa.list_(pa.bool_()))])),
        ]
    )


def test_lines_of_csv_have_numbered_columns() -> None:
    lines = [b"1,x,1.5,2024-01-01,true,,2024-01-01T00:00:00Z", b"3,y,2,2024-01-01,false,,", b"bad"]
    types = [
        pa.int64(), pa.string(), pa.float64(), pa.date32(), pa.bool_(), pa.string(),
        pa.timestamp("us", "UTC"),
    ]  # fmt: skip
    assert infer(records(*lines), ValueOptions(format="csv", mode="FAILFAST")) == pa.schema(
        [(f"_c{place}", each) for place, each in enumerate(types)]
    )
    mixed = infer(records(*[b"1"] * 300, b"x", b"bad,"), AS_CSV)
    assert mixed.field("_c0").type == pa.string()
    assert infer(records(b"a\rb,c\n", b"1,2"), AS_CSV).names == []


@given(st.lists(_other, max_size=10), st.sampled_from(["json", "csv"]))
def test_any_records_are_read_with_the_schema_that_was_inferred(
    given: list[bytes], value_format: str
) -> None:
    options = ValueOptions(format=value_format)
    schema = infer(records(*given), options)
    if schema.names:
        arrays = Decoder(schema, options).decode(records(*given)).arrays
        assert [len(each) for each in arrays] == [len(given)] * len(schema)
