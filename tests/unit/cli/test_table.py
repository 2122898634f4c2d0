from __future__ import annotations

import pyarrow as pa

from opendata_buffer.cli.table import as_table
from opendata_buffer.consumer.fetch import ArrowBatch


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
