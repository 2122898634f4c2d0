"""The field of a malformed record that does not fit, in the words of an error."""

from __future__ import annotations

import pyarrow as pa
import pytest

from opendata_buffer.values import Decoder, ValueOptions

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.int8()),
        ("name", pa.string()),
        ("on", pa.bool_()),
        ("price", pa.decimal128(6, 2)),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("data", pa.binary()),
        ("address", pa.struct([("zip", pa.string()), ("geo", pa.struct([("lat", pa.float64())]))])),
        ("tags", pa.list_(pa.string())),
        ("lines", pa.list_(pa.struct([("count", pa.int32())]))),
    ]
)


def reason(record: bytes, schema: pa.Schema = SCHEMA, value_format: str = "json") -> str:
    """Return why a record is malformed; fail if it is not."""
    decoder = Decoder(schema, ValueOptions(format=value_format))
    decoded = decoder.decode(pa.array([record], pa.binary()))
    return decoder.explain(record, decoded.malformed[0])


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (b'{"id":1,"name":5}', "field 'name' must be STRING, and is the number 5"),
        (b'{"id":"1"}', "field 'id' must be LONG, and is the text '1'"),
        (b'{"id":1.5}', "field 'id' must be LONG, and is the number 1.5"),
        (b'{"small":300}', "field 'small' must be BYTE, and is the number 300"),
        (b'{"on":"yes"}', "field 'on' must be BOOLEAN, and is the text 'yes'"),
        (b'{"id":true}', "field 'id' must be LONG, and is true"),
        (b'{"id":[1]}', "field 'id' must be LONG, and is an array"),
        (b'{"id":{"a":1}}', "field 'id' must be LONG, and is an object"),
        (b'{"day":"2020-13-01"}', "field 'day' must be DATE, and is the text '2020-13-01'"),
        (
            b'{"at":"2020-01-01T00:00:00"}',
            "field 'at' must be TIMESTAMP, with an offset such as Z, and is the text '2020-01-01T0"
            "0:00:00'",
        ),
        (
            b'{"local":"2020-01-01T00:00:00Z"}',
            "field 'local' must be TIMESTAMP_NTZ, without an offset, and is the text '2020-01-01T0"
            "0:00:00Z'",
        ),
        (b'{"data":"?"}', "field 'data' must be BINARY in base64, and is the text '?'"),
        (b'{"address":"here"}', "field 'address' must be an object, and is the text 'here'"),
        (b'{"address":{"zip":8001}}', "field 'address.zip' must be STRING, and is the number 8001"),
        (
            b'{"address":{"zip":"8001","geo":{"lat":"N"}}}',
            "field 'address.geo.lat' must be DOUBLE, and is the text 'N'",
        ),
        (b'{"tags":["a",1]}', "field 'tags[1]' must be STRING, and is the number 1"),
        (b'{"tags":"a"}', "field 'tags' must be an ARRAY of STRING, and is the text 'a'"),
        (
            b'{"lines":[{"count":1},{"count":"2"}]}',
            "field 'lines[1].count' must be INT, and is the text '2'",
        ),
        (b'{"id":1,"id":2}', "field 'id' is there twice"),
        (b'{"name":1%s}' % (b"0" * 200), "field 'name' must be STRING, and is the number 1000000"),
        (b'{"id":1}{"id":2}', "it is more than one JSON object"),
        (b"[1]", "it is not a JSON object"),
        (b'{"id":1', "its JSON object does not end, or something follows it"),
        (b'{"id" 1}', "Missing a colon after a name of object member."),
    ],
)
def test_the_reason_names_the_field_its_column_and_its_value(record: bytes, says: str) -> None:
    assert reason(record).startswith(says)


def test_the_first_field_that_does_not_fit_is_named_in_the_order_of_the_schema() -> None:
    assert reason(b'{"name":1,"other":{},"id":"x"}').startswith("field 'id' must be LONG")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (b"x,y", "field 'id' must be LONG, and is the text 'x'"),
        (b"1,y", "field 'day' must be DATE, and is the text 'y'"),
        (b"1,2020-01-01,3", "it has 3 fields, and the schema has 2 columns"),
        (b'1,"2020', "it is not one line, or a quote is not closed"),
    ],
)
def test_the_reason_for_a_line_of_csv_names_the_column(record: bytes, says: str) -> None:
    schema = pa.schema([("id", pa.int64()), ("day", pa.date32())])
    assert reason(record, schema, "csv") == says


def test_a_deep_record_is_explained_without_a_recursion_error() -> None:
    record = b'{"id":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert reason(record)
