# ruff: noqa: E501
"""JSON and CSV records that are awkward in one way or another: chosen by hand, and generated.

Each is read with :data:`SCHEMA`, which has a column of every type. What Spark makes of the chosen
ones lies in ``tests/golden/values`` (``python -m tests.values.golden`` writes it);
``tests/spark/test_values.py`` asks Spark itself, about all.
"""

from __future__ import annotations

import random
import re

__all__ = [
    "CORRUPT",
    "CSV_SCHEMA",
    "SCHEMA",
    "VALUES",
    "chosen",
    "csv_chosen",
    "csv_generated",
    "generated",
]

CORRUPT = "_corrupt_record"
SCHEMA = (
    "a INT, b BIGINT, c STRING, d DOUBLE, e FLOAT, f BOOLEAN, g DECIMAL(10,2), h TINYINT, "
    "i SMALLINT, j DATE, k TIMESTAMP, l TIMESTAMP_NTZ, m BINARY, n ARRAY<INT>, "
    "o STRUCT<x: INT, y: STRING>, p MAP<STRING, INT>, q ARRAY<STRUCT<x: INT, y: DOUBLE>>, "
    f"{CORRUPT} STRING"
)
NAMES = "abcdefghijklmnopq"

VALUES = [
    "null", "true", "false", "0", "-0", "1", "-1", "7", "127", "128", "255", "256", "-128", "-129",
    "32767", "32768", "-32769", "2147483647", "2147483648", "-2147483649", "9223372036854775807",
    "9223372036854775808", "-9223372036854775808", "-9223372036854775809",
    "123456789012345678901234567890", "0.0", "-0.0", "1.0", "1.5", "-2.25", "0.1", "1e3", "1E3",
    "1e+3", "25e-1", "1e400", "-1e400", "1e-400", "3.4028236e38", "16777217", "1.005", "99999999.99",
    "99999999.995", "100000000", "12345.675", "01", "1.", ".5", "-", "+1", "1e", "NaN", "Infinity",
    "-Infinity", "+Infinity", "-INF", "+INF", "nan", "tru", "True", "nulll", "undefined",
    '""', '" "', '"x"', '"1"', '"1.5"', '" 1"', '"true"', '"null"', '"NaN"', '"Infinity"', '"+INF"',
    '"-INF"', '"-Infinity"', '"1e3"', '"1_000"', '".5"', '"5."', '"+5"', '"0x10"',
    r'"\u0041\n\t\"\\\/\b\f\r"', r'"\ud83d\ude00"', r'"\ud800"', r'"\udc00\ud800"', r'"\u12"',
    r'"\q"', '"é€😀"', "'single'", "'it\"s'", '"a\tb"', '"a\nb"', '"\x7f"',
    '"2020-01-01"', '"2020-1-1"', '"2020"', '"2020-02-30"', '"2020-02-29"', '"0000-01-01"',
    '"9999-12-31"', '"10000-01-01"', '"-0001-01-01"', '"+2020-01-01"', '" 2020-01-01 "', '"100"',
    '"-5"', '"18628"', '"2020-01-01 junk"', '"2020-01-01T"', '"2020-01-01T10"', '"2020-01-01 10:20"',
    '"2020-01-01 10:20:30"', '"2020-01-01T10:20:30Z"', '"2020-01-01T10:20:30.123456Z"',
    '"2020-01-01T10:20:30.123456789Z"', '"2020-01-01T10:20:30.5+02:00"',
    '"2020-01-01T10:20:30.+02:00"', '"2020-01-01T10:20:30 Europe/Berlin"',
    '"2020-03-29T02:30:00 Europe/Berlin"', '"2020-10-25T02:30:00 Europe/Berlin"',
    '"2020-01-01T10:20:30UTC+2"', '"2020-01-01T10:20:30PST"', '"2020-01-01T10:20:30+19:00"',
    '"2020-01-01T10:20:30-0330"', '"2020-01-01T10:20:30+5"', '"2020-01-01T10:20:30+5:30"',
    '"2020-01-01T24:00:00Z"', '"2020-01-01T10:60:00Z"', '"2020-01-01T10:20:60Z"', '"2020-01-01T10Z"',
    '"2020-01-01t10:20:30z"', '"2020-01-01T10:20:30GMT+01:00"', '"Nowhere/City"',
    '"2020-01-01T10:20:30Nowhere/City"', '"1969-12-31T23:59:59.999999Z"', '"0001-01-01T00:00:00Z"',
    '"YWJj"', '"YWI="', '"YQ=="', '"YQ"', '"YQ="', '"Y Q = ="', '"!!!!"', '"YWJjZA"',
    "[]", "[1]", "[1,2,3]", "[1,null,3]", '[1,"x",3]', "[1.5]", "[1,[2]]", "[1,2", "[1,]", "[,1]",
    "[[1],[2]]", '[{"x":1,"y":2}]', '[{"x":"bad","y":2},{"x":3}]', "[null]", '[{"x":1},null]',
    "[{}]", "{}", '{"x":1}', '{"x":1,"y":"z"}', '{"x":"bad","y":"z"}', '{"x":1,"x":2}',
    '{"x":1,"y":{"z":[1,2.50]}}', '{"x":null}', '{"X":1}', '{"x":1.0}', '{"x":1,"z":{"w":[1]}}',
    '{"x":{"y":1}}', '{"":1}', '{"x":tru}', '{"x":1', '{"x" 1}', "{'x':1}", '{x:1}',
    '{ "x" : 1 , "y" : "a b" }', '[ 1 , 2 ]', '{"y":1.50e2}', '{"y":[true,false,null]}',
    '{"y":"\\u0001\\u001f"}',
]  # fmt: skip
"""Values as they stand in a record; each is tried in each column."""

WHOLE = [
    "", " ", "\n", "\t \r\n", "null", "true", "1", '"x"', "[]", "[1]", '[{"a":1}]', "{}", "{ }",
    "{", "}", "{}}", "{}{}", '{"a":1}{"a":2}', '{"a":1} x', '{"a":1},', ' {"a":1} ', '\n{"a":1}\n',
    '{"a":1,}', '{,"a":1}', '{"a":1,,"b":2}', '{"a":1 "b":2}', '{"a"}', '{"a":}', '{"a":,"b":2}',
    '{"a":1,"a":2}', '{"a":1,"a":null}', '{"a":1,"a":"x"}', '{"a":"x","a":1}', '{"A":1}',
    '{"a":1,"A":2}', '{"z":1,"a":2}', '{"z":{"a":5},"a":2}', '{"z":[{"a":5}],"a":2}', '{"":1,"a":2}',
    r'{"\u0061":3}', r'{"a\n":3}', '{"a" : 1 , "c" :"x"}', '{\t"a"\n:\r1}', '{"a":1,"c":"x',
    '{"a":1,"c":"x"', '{"a":1,"c":', '{"a":1,"c"', '{"a":1,"c', '{"a":1,', '{"a":1', '{"a":',
    '{"a"', '{"', '{"c":"x\x01y","a":1}', '{"c":"x\x01,"a":1}', '{"c":"x\x01","a":1}',
    '{"z":"x\x01y","a":1}', '{"c":"\\q","a":1}', '{"z":"\\q","a":1}', '{"a":"\\q","b":1}',
    "{'a':1,'c':'x'}", "{a:1}", "{'a\":1}", '/* c */{"a":1}', '{"a":1/* c */}', '{"a":1}//c',
    '# c\n{"a":1}', '\ufeff{"a":1}', '\u00a0{"a":1}', '{"a":1\u00a0}', '\x00{"a":1}', '{"a":1\x00}',
    '{"a":1}\x00', '\x0b{"a":1}', '{"o":{"x":1,"y":"z"},"a":1}', '{"o":{"x":tru},"a":1}',
    '{"o":{"x":1,},"a":1}', '{"o":{"x":1;"y":2},"a":1,"b":2}', '{"n":[1,tru],"a":1}',
    '{"n":[1,"x",{"a":4}],"a":1}', '{"n":[1 2],"a":1}', '{"n":{"a":3},"a":1}', '{"n":[[{"a":3}]],"b":1}',
    '{"p":{"k":1,"k":2},"a":1}', '{"p":{"k":"x","l":2},"a":1}', '{"p":{"k":[1,{"a":9}]},"a":1}',
    '{"q":[{"x":1},{"x":"y"}],"a":1}', '{"q":[{"x":1},5],"a":1}', '{"q":[{"x":[{"a":1}]}],"b":2}',
    '{"a":truex,"b":1}', '{"f":true"b":1}', '{"f":true}', '{"f":nul,"a":1}', '{"a":1x,"b":2}',
    '{"a":1.5.2}', '{"a":--1}', '{"a":1e5}', '{"a":1,"b":1 2}', '{"_corrupt_record":"x","a":1}',
    '{"a":1,"_corrupt_record":5}', '{"a":"x","_corrupt_record":"y"}', '{"a":1]', '[{"a":1}', '{"n":[1}',
    '{"n":[1},"a":2}', '{"a":[1,2],"b":3}', '{"a":{"b":3},"b":4}', '{"a":{"b":3}', '{"a":[{"b":3}]',
    '{"c":[1, 2 , {"x" : "y"}]}', '{"c":{"x":1.10,"y":1e2,"z":-0}}', '{"c":1.10}', '{"c":1e2}',
    '{"c":-0}', '{"c":-0.0}', '{"c":12345678901234567890}', '{"c":true}', '{"c":NaN}',
    '{"c":[NaN,Infinity,-INF]}', '{"c":0.00001}', '{"c":12345678.9}', '{"c":1e21}', '{"c":{"a":"é/\\u00e9"}}',
    '{"c":{"a":"\\ud800"},"a":1}', '{"c":{"a":1,"a":2}}', '{"c":[1,2}', '{"c":{"x":tru},"a":1}',
]  # fmt: skip


def chosen() -> list[bytes]:
    """Records chosen by hand."""
    records = [each.encode("utf-8", "surrogatepass") for each in WHOLE]
    for value in VALUES:
        for name in NAMES:
            records.append(f'{{"a":1,"{name}":{value},"b":2}}'.encode())
    records += [
        b'{"c":"\xff"}', b'{"c":"a\xc3"}', b'{"z":"\xff","a":1}', b'\xff{"a":1}', b'{"a":1}\xff',
        b'{"c":"\xed\xa0\x80"}', b'{"c":"\xf0\x9f\x98"}', b'{"c":"\xc0\xaf"}', b'{"c\xff":1,"a":2}',
        b'\xef\xbb\xbf{"a":1}', b'\xff\xfe{\x00}\x00', b'\xef\xbb\xbf',
        b'{"z":' + b"1" * 1000 + b',"a":1}', b'{"z":' + b"1" * 1001 + b',"a":1}',
        b'{"z":1.' + b"1" * 1000 + b',"a":1}', b'{"z":1e' + b"1" * 1000 + b',"a":1}',
        b'{"d":' + b"1" * 400 + b"}", b'{"g":1e99999}', b'{"g":1e-99999}', b'{"g":"1e999999999"}',
        b'{"z":' + b"[" * 999 + b"]" * 999 + b',"a":1}', b'{"z":' + b"[" * 1000 + b"]" * 1000 + b',"a":1}',
        b'{"c":' + b"[" * 998 + b"]" * 998 + b',"a":1}',
    ]  # fmt: skip
    return records


def generated(count: int, seed: int = 11) -> list[bytes]:
    """Records made of the same pieces, many of them broken somewhere; the same for a seed."""
    rng = random.Random(seed)
    usual = {
        "a": lambda: str(rng.randint(-(10**6), 10**6)),
        "b": lambda: str(rng.randint(-(10**18), 10**18)),
        "c": lambda: '"' + "".join(rng.choices("abc xyzé/", k=rng.randint(0, 20))) + '"',
        "d": lambda: repr(round(rng.uniform(-1e6, 1e6), rng.randint(0, 6))),
        "e": lambda: repr(round(rng.uniform(-100, 100), 3)),
        "f": lambda: rng.choice(("true", "false")),
        "g": lambda: f"{rng.uniform(-1e6, 1e6):.{rng.randint(0, 4)}f}",
        "h": lambda: str(rng.randint(-128, 127)),
        "i": lambda: str(rng.randint(-32768, 32767)),
        "j": lambda: f'"{rng.randint(1900, 2100)}-{rng.randint(1, 12):02}-{rng.randint(1, 29):02}"',
        "k": lambda: f'"{_time(rng)}{rng.choice(("Z", "", "+01:00"))}"',
        "l": lambda: f'"{_time(rng)}"',
        "m": lambda: rng.choice(('"YWJj"', '"YWI="', '""')),
        "n": lambda: str([rng.randint(0, 99) for _ in range(rng.randint(0, 4))]),
        "o": lambda: f'{{"x":{rng.randint(0, 9)},"y":"{rng.choice("abc")}"}}',
        "p": lambda: f'{{"{rng.choice("klm")}":{rng.randint(0, 9)}}}',
        "q": lambda: f'[{{"x":{rng.randint(0, 9)},"y":{rng.random():.3f}}}]',
    }
    records = []
    for _ in range(count):
        names = [name for name in NAMES if rng.random() < 0.5]
        if rng.random() < 0.3:
            rng.shuffle(names)
        odd = rng.random() < 0.4
        space = rng.choice(("", "", " "))
        members = []
        for name in names:
            value = rng.choice(VALUES) if odd and rng.random() < 0.15 else usual[name]()
            if odd and rng.random() < 0.05:
                name = rng.choice((name.upper(), "zz", "a", ""))
            members.append(f'"{name}":{space}{value}')
        record = ("{" + f",{space}".join(members) + "}").encode()
        if odd and record and rng.random() < 0.3:
            record = _broken(record, rng)
        records.append(record)
    return [each for each in records if not ON_PURPOSE.search(each)]


ON_PURPOSE = re.compile(rb'(?:^|[",])T?[0-9]{1,2}:[0-9]')
"""A time without a date, to which Spark adds the day: one of the differences that the docs list."""


def _time(rng: random.Random) -> str:
    text = (
        f"{rng.randint(1950, 2050)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        f"{rng.choice('T ')}{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}"
    )
    return text + rng.choice(("", ".5", ".123", ".123456"))


def _broken(record: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(record))
    kind = rng.randrange(5)
    if kind == 0:
        return record[:at]
    if kind == 1:
        return record[:at] + record[at + 1 :]
    if kind == 2:
        return (
            record[:at]
            + rng.choice((b'"', b",", b"{", b"}", b"]", b"\\", b"1", b" "))
            + record[at:]
        )
    if kind == 3:
        return record[:at] + bytes([rng.randrange(256)]) + record[at + 1 :]
    other = rng.randrange(len(record))
    return record[:at] + record[other:]


# ---- CSV -----------------------------------------------------------------------------------------

CSV_NAMES = "abcdefghijkl"
CSV_SCHEMA = (
    "a INT, b BIGINT, c STRING, d DOUBLE, e FLOAT, f BOOLEAN, g DECIMAL(10,2), h TINYINT, "
    f"i SMALLINT, j DATE, k TIMESTAMP, l TIMESTAMP_NTZ, {CORRUPT} STRING"
)

CSV_VALUES = [
    *(each for each in VALUES if "{" not in each and "[" not in each),
    *(each[1:-1] for each in VALUES if each.startswith('"') and "\\" not in each),
    "", " ", " 1", "1 ", "+5", "007", "0x10", "1_000", "NaN", "Inf", "-Inf", "+Inf", "1d", "1f", "TRUE",
    "False", "yes", "T", '""', '"a,b"', '"a""b"', '"a\\"b"', '"a\\\\"', '"a\\\\b"', '"a\\b"', '"a\nb"',
    '"a" ', ' "a"', '"a"b', '"a"b"c"', '"a" b', '"a" "b"', '"', '"a', '"a\\"', 'a"b', 'a"', '"a"b,c"d"',
    '"""a"""', '"\\"', '""a', "a\tb", "a\rb", "\\", "\\,", "'a,b'", "é", "#", "# c", "\u00a0", "\ufeff",
]  # fmt: skip

CSV_WHOLE = [
    "", " ", "\n", ",", ",,,,,,,,,,,", "1", "1,2", "1,2,x", "1\n2", "1,2\n3", "1,2,x,1.5,2.5,true,3.5,4,5",
    "1,2,x,1.5,2.5,true,3.5,4,5,2020-01-01,2020-01-01 10:20:30,2020-01-01 10:20:30",
    "1,2,x,1.5,2.5,true,3.5,4,5,2020-01-01,2020-01-01 10:20:30,2020-01-01 10:20:30,",
    "1,2,x,1.5,2.5,true,3.5,4,5,2020-01-01,2020-01-01 10:20:30,2020-01-01 10:20:30,more,and more",
    "1,2,x,1.5,2.5,true,3.5,4,5,2020-01-01,2020-01-01 10:20:30,2020-01-01 10:20:30\n",
    "1,2,x,1.5,2.5,true,3.5,4,5,2020-01-01,2020-01-01 10:20:30,2020-01-01 10:20:30\r\n",
    "a,b,c,d,e,f,g,h,i,j,k,l", "x,y,z,x,y,z,x,y,z,x,y,z",
]  # fmt: skip

_CSV_USUAL = [
    "1",
    "2",
    "x",
    "1.5",
    "2.5",
    "true",
    "3.5",
    "4",
    "5",
    "2020-01-01",
    "2020-01-01 10:20:30",
    "2020-01-01 10:20:30",
]


def csv_chosen() -> list[bytes]:
    """CSV records chosen by hand: each value in each column, in the middle of good ones."""
    records = [each.encode() for each in CSV_WHOLE]
    for value in CSV_VALUES:
        for number in range(len(CSV_NAMES)):
            row = list(_CSV_USUAL)
            row[number] = value
            records.append(",".join(row).encode("utf-8", "surrogatepass"))
    return records


def csv_generated(count: int, seed: int = 11) -> list[bytes]:
    """CSV records made of the same values, some broken somewhere; the same for a seed."""
    rng = random.Random(seed)
    records = []
    for _ in range(count):
        row = [
            str(rng.randint(-(10**6), 10**6)), str(rng.randint(-(10**18), 10**18)),
            "".join(rng.choices("abc xyzé/", k=rng.randint(0, 20))),
            repr(round(rng.uniform(-1e6, 1e6), rng.randint(0, 6))), repr(round(rng.uniform(-100, 100), 3)),
            rng.choice(("true", "false")), f"{rng.uniform(-1e6, 1e6):.{rng.randint(0, 4)}f}",
            str(rng.randint(-128, 127)), str(rng.randint(-32768, 32767)),
            f"{rng.randint(1900, 2100)}-{rng.randint(1, 12):02}-{rng.randint(1, 29):02}",
            _time(rng) + rng.choice(("Z", "", "+01:00")), _time(rng),
        ]  # fmt: skip
        odd = rng.random() < 0.4
        if odd:
            row = [rng.choice(CSV_VALUES) if rng.random() < 0.1 else each for each in row]
        record = ",".join(row).encode()
        if odd and rng.random() < 0.3:
            record = _broken(record, rng)
        records.append(record)
    # The other difference: a field in quotes that goes on behind them with the escape character.
    return [each for each in records if not ON_PURPOSE.search(each) and b'"\\' not in each]
