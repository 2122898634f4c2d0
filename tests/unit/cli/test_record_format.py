"""How records are written out."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from opendata_buffer.cli.record_format import TOKENS, as_json, as_table, by_format, text_or_base64
from opendata_buffer.consumer.fetch import ArrowBatch
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.entries import Metadata

BATCH = ArrowBatch(
    pa.array([b"a", b"\n\xff", "ü".encode()], pa.binary()),
    41,
    "ingest/x.batch",
    (Metadata(1, 1_767_225_600_123, b"m"), Metadata(2, 2**63 - 1, b"\xfe")),
)


def test_json_tells_all_of_each_record() -> None:
    lines = bytes(as_json("ingest")(BATCH)).split(b"\n")
    assert lines.pop() == b""
    where = {"partition": "ingest", "sequence": 41, "location": "ingest/x.batch"}
    assert [json.loads(line) for line in lines] == [
        {**where, "index": 0, "time": None, "metadata": "", "value": "a"},
        {
            **where, "index": 1, "time": "2026-01-01T00:00:00.123Z", "metadata": "m",
            "value_base64": "Cv8=",
        },
        # A time that no calendar has is in 'manifest dump'.
        {**where, "index": 2, "time": None, "metadata_base64": "/g==", "value": "ü"},
    ]  # fmt: skip


def test_text_is_text_and_everything_else_is_base64() -> None:
    assert text_or_base64("value", b"") == {"value": ""}
    assert text_or_base64("value", b"\xff") == {"value_base64": "/w=="}


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("%s|", b"a|\n\xff|\xc3\xbc|"),
        ("%o.%i %S\\n", b"41.0 1\n41.1 2\n41.2 2\n"),
        ("%R%s", b"\0\0\0\1a\0\0\0\2\n\xff\0\0\0\2\xc3\xbc"),
        ("%T %M;", b"-1 0;1767225600123 1;9223372036854775807 1;"),
        ("%m,", b",m,\xfe,"),
        ("%p %l%%\\t\\x41\\\\\\0\\r", b"q ingest/x.batch%\tA\\\0\r" * 3),
        ("ü%i", "ü0ü1ü2".encode()),
    ],
)
def test_a_format_shows_what_it_names(template: str, shown: bytes) -> None:
    assert bytes(by_format(template, "q")(BATCH)) == shown


@pytest.mark.parametrize("template", ["%k", "100%", "\\q%s", "%s\\", "\\x4%s", "text", ""])
def test_a_format_that_cannot_be_meant_is_refused(template: str) -> None:
    with pytest.raises(InvalidInput, match="shows nothing of a record") as raised:
        by_format(template, "q")
    for token, (what, _) in TOKENS.items():
        assert f"%{token} {what}" in str(raised.value)


# ---- tables


def batch(sequence: int, *records: bytes) -> ArrowBatch:
    return ArrowBatch(pa.array(records, pa.binary()), sequence, "ingest/x.batch", ())


def test_records_are_rows_under_the_names_of_the_first_batch() -> None:
    render = as_table()
    first = render(batch(7, b'{"id":1,"name":"n","tags":[1]}', b'{"id":200}', b"no JSON"))
    assert first.decode().splitlines() == [
        "_sequence  _index   id  name  tags  _corrupt_record",
        "        7       0    1  n     [1]",
        "        7       1  200",
        "        7       2                   no JSON",
    ]
    assert render(batch(8, b'{"id":3,"other":4}')).decode() == "        8       0    3\n"


def test_a_value_is_cut_and_shows_no_control_character() -> None:
    long = as_table()(batch(1, b'{"a":"' + b"x" * 100 + b'"}')).decode().splitlines()[1]
    assert long.endswith("x" * 39 + "…")
    assert "\x1b" not in as_table()(batch(1, b'{"a":"\\u001b[31m"}')).decode()


def test_a_batch_without_objects_shows_its_texts() -> None:
    render = as_table()
    assert "plain" in render(batch(1, b"plain")).decode()
    assert "id" in render(batch(2, b'{"id":1}')).decode()
