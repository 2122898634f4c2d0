"""Handwritten records with their rows, which define the meaning of ``valueFormat``.

A row only lists its columns that are not null. None means that the record is malformed.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, TypeAlias

import pyarrow as pa

Case: TypeAlias = "tuple[bytes, dict[str, Any] | None]"

JSON_SCHEMA = pa.schema(
    {
        "b": pa.bool_(),
        "i8": pa.int8(),
        "i16": pa.int16(),
        "i": pa.int32(),
        "l": pa.int64(),
        "f": pa.float32(),
        "d": pa.float64(),
        "n": pa.decimal128(5, 2),
        "s": pa.string(),
        "raw": pa.binary(),
        "day": pa.date32(),
        "at": pa.timestamp("us", "UTC"),
        "local": pa.timestamp("us"),
        "list": pa.list_(pa.field("element", pa.int32())),
        "o": pa.struct({"x": pa.int32(), "day": pa.date32()}),
        "os": pa.list_(
            pa.field(
                "element", pa.struct({"at": pa.timestamp("us", "UTC"), "n": pa.decimal128(3, 1)})
            )
        ),
        "_corrupt_record": pa.string(),
    }
)
_NOON = datetime(2024, 2, 29, 12, 0, tzinfo=UTC)

JSON: list[Case] = [
    # Objects.
    (b"{}", {}),
    (b" { }\r\n", {}),
    (b'\t{"i":1} ', {"i": 1}),
    (b'{\n  "i": 1,\n  "s": "x"\n}', {"i": 1, "s": "x"}),
    (b'{"s":"x","i":1}', {"i": 1, "s": "x"}),
    (b"", None),
    (b"  ", None),
    (b"null", None),
    (b" null ", None),
    (b"1", None),
    (b'"x"', None),
    (b"[]", None),
    (b'[{"i":1}]', None),
    (b'{"i":1}{"i":2}', None),
    (b'{"i":1}\n{"i":2}', None),
    (b'{"i":1} null', None),
    (b'{"i":1} x', None),
    (b'{"i":1},"s":{}', None),
    (b'{"i":1}}', None),
    (b'{"i":1', None),
    (b'{"i":', None),
    (b'{"i"', None),
    (b"{", None),
    (b'"i":1}', None),
    (b'{"i":1,}', None),
    (b'{"i" 1}', None),
    (b"{'i':1}", None),
    (b"{i:1}", None),
    (b'{"i":1}// comment', None),
    (b'\xef\xbb\xbf{"i":1}', None),
    (b'{"i":1}\x00', None),
    # Fields: absent, unknown, repeated, or in another case.
    (b'{"unknown":[{"i":9}],"i":1}', {"i": 1}),
    (b'{"":1,"i":1}', {"i": 1}),
    (b'{"unknown":1,"unknown":2}', {}),
    (b'{"I":1}', {}),
    (b'{"i":1,"i":2}', None),
    (b'{"\\u0069":1}', {"i": 1}),
    (b'{"i":null,"s":null,"o":null,"list":null,"os":null}', {}),
    # Booleans and texts.
    (b'{"b":true}', {"b": True}),
    (b'{"b":false}', {"b": False}),
    (b'{"b":True}', None),
    (b'{"b":1}', None),
    (b'{"b":"true"}', None),
    (b'{"s":""}', {"s": ""}),
    (b'{"s":"\\"\\\\\\/\\b\\f\\n\\r\\t"}', {"s": '"\\/\b\f\n\r\t'}),
    (b'{"s":"\\u00e9\\ud83d\\ude00"}', {"s": "é😀"}),
    (b'{"s":"\xc3\xa9"}', {"s": "é"}),
    (b'{"s":"\\ud83d"}', None),
    (b'{"s":"\\x"}', None),
    (b'{"s":"\xff"}', None),
    (b'{"unknown":"\xff"}', None),
    (b'{"s":"a\nb"}', None),
    (b'{"s":1}', None),
    (b'{"s":true}', None),
    (b'{"s":{}}', None),
    (b'{"s":[]}', None),
    # Numbers.
    (b'{"i8":127,"i16":-32768,"i":2147483647}', {"i8": 127, "i16": -32768, "i": 2147483647}),
    (b'{"l":-9223372036854775808}', {"l": -(2**63)}),
    (b'{"i8":128}', None),
    (b'{"i16":32768}', None),
    (b'{"i":2147483648}', None),
    (b'{"l":9223372036854775808}', None),
    (b'{"i":1.0}', None),
    (b'{"i":1e2}', None),
    (b'{"i":"1"}', None),
    (b'{"i":01}', None),
    (b'{"i":+1}', None),
    (b'{"i":-0}', {"i": 0}),
    (b'{"d":1}', {"d": 1.0}),
    (b'{"d":-1.5e3}', {"d": -1500.0}),
    (b'{"d":1e400}', None),
    (b'{"f":0.5}', {"f": 0.5}),
    (b'{"f":1e39}', None),
    (b'{"d":NaN}', None),
    (b'{"d":-Infinity}', None),
    (b'{"d":"NaN"}', None),
    (b'{"d":.5}', None),
    (b'{"n":1.5}', {"n": Decimal("1.50")}),
    (b'{"n":"1.5"}', {"n": Decimal("1.50")}),
    (b'{"n":-999.99}', {"n": Decimal("-999.99")}),
    (b'{"n":1000}', None),
    (b'{"n":1.555}', None),
    (b'{"n":"x"}', None),
    # Binary, dates, times.
    (b'{"raw":"AP8="}', {"raw": b"\x00\xff"}),
    (b'{"raw":""}', {"raw": b""}),
    (b'{"raw":"AP8"}', None),
    (b'{"raw":"A P8="}', None),
    (b'{"raw":[0]}', None),
    (b'{"day":"2024-02-29"}', {"day": date(2024, 2, 29)}),
    (b'{"day":"2023-02-29"}', None),
    (b'{"day":"2024-2-9"}', None),
    (b'{"day":"2024-02-29T00:00:00"}', None),
    (b'{"day":19782}', None),
    (b'{"at":"2024-02-29T12:00:00Z"}', {"at": _NOON}),
    (b'{"at":"2024-02-29 13:00:00+01:00"}', {"at": _NOON}),
    (b'{"at":"2024-02-29T12:00:00.123456Z"}', {"at": _NOON.replace(microsecond=123456)}),
    (b'{"at":"2024-02-29T12:00:00.123456789Z"}', {"at": _NOON.replace(microsecond=123456)}),
    (b'{"at":"2024-02-29T12:00:00"}', None),
    (b'{"at":"2024-02-29"}', None),
    (b'{"at":"2024-02-30T12:00:00Z"}', None),
    (b'{"at":"2024-02-29T24:00:00Z"}', None),
    (b'{"at":"noon"}', None),
    (b'{"at":1709208000}', None),
    (b'{"local":"2024-02-29T12:00:00"}', {"local": _NOON.replace(tzinfo=None)}),
    (b'{"local":"2024-02-29"}', {"local": datetime(2024, 2, 29)}),
    (b'{"local":"2024-02-29T12:00:00Z"}', None),
    # Arrays and structs.
    (b'{"list":[]}', {"list": []}),
    (b'{"list":[1,null,3]}', {"list": [1, None, 3]}),
    (b'{"list":[1,"2"]}', None),
    (b'{"list":{}}', None),
    (b'{"list":1}', None),
    (b'{"o":{}}', {"o": {"x": None, "day": None}}),
    (b'{"o":{"x":1,"more":[]}}', {"o": {"x": 1, "day": None}}),
    (b'{"o":{"day":"2024-02-29"}}', {"o": {"x": None, "day": date(2024, 2, 29)}}),
    (b'{"o":{"day":"today"}}', None),
    (b'{"o":{"x":1,"x":2}}', None),
    (b'{"o":[]}', None),
    (
        b'{"os":[{"at":"2024-02-29T12:00:00Z","n":1.5},null,{}]}',
        {"os": [{"at": _NOON, "n": Decimal("1.5")}, None, {"at": None, "n": None}]},
    ),
    (b'{"os":[{"n":1.5},{"n":100}]}', None),
    (b'{"deep":' + b"[" * 100_000 + b"]" * 100_000 + b',"i":1}', {"i": 1}),
]

CSV_SCHEMA = pa.schema(
    {
        "i": pa.int32(),
        "s": pa.string(),
        "d": pa.float64(),
        "n": pa.decimal128(5, 2),
        "b": pa.bool_(),
        "day": pa.date32(),
        "at": pa.timestamp("us", "UTC"),
        "_corrupt_record": pa.string(),
    }
)

CSV: list[Case] = [
    (b"1,x,1.5,2.5,true,2024-02-29,2024-02-29T12:00:00Z",
     {"i": 1, "s": "x", "d": 1.5, "n": Decimal("2.50"), "b": True, "day": date(2024, 2, 29),
      "at": _NOON}),
    (b",,,,,,", {}),
    (b"", {}),
    (b"1,,,,,,\n", {"i": 1}),
    (b"1,,,,,,\r\n", {"i": 1}),
    (b' 1 ," x ",,,,,', {"i": 1, "s": " x "}),
    (b'"1","a,b",,,,,', {"i": 1, "s": "a,b"}),
    (b'1,"a ""b""",,,,,', {"i": 1, "s": 'a "b"'}),
    (b'1,"a\nb",,,,,', {"i": 1, "s": "a\nb"}),
    (b'1,"",,,,,', {"i": 1, "s": ""}),
    (b"1,\\,,,,,", {"i": 1, "s": "\\"}),
    (b"1,\xc3\xa9,,,,,", {"i": 1, "s": "é"}),
    (b"1,,,,False,,", {"i": 1, "b": False}),
    (b"1", None),
    (b"1,,,,,", None),
    (b"1,,,,,,,", None),
    (b"1,,,,,,\n2,,,,,,", None),
    (b'1,"a,,,,,', None),
    (b'1,,,,,,"', None),
    (b'1,,,,,,\n2,"', None),
    (b"x,,,,,,", None),
    (b"1.0,,,,,,", None),
    (b"2147483648,,,,,,", None),
    (b"1,\xff,,,,,", None),
    (b"\xef\xbb\xbf1,,,,,,", None),
    (b"1,,nan,,,,", None),
    (b"1,,1e400,,,,", None),
    (b"1,,,1000,,,", None),
    (b"1,,,1.555,,,", None),
    (b"1,,,,yes,,", None),
    (b"1,,,,,29.02.2024,", None),
    (b"1,,,,,,2024-02-29T12:00:00", None),
]  # fmt: skip


def table(cases: list[Case], schema: pa.Schema) -> list[dict[str, Any]]:
    """Return all columns of the rows of these records."""
    rows = []
    for record, row in cases:
        found = dict.fromkeys(schema.names) | (row or {})
        if row is None:
            found["_corrupt_record"] = record.decode("utf-8", "replace")
        rows.append(found)
    return rows
