"""How far a copy is."""

from __future__ import annotations

import pytest

from opendata_buffer.admin.copy_record import CopyRecord, copy_app, copy_record_key
from opendata_buffer.errors import CorruptData
from opendata_buffer.formats.keys import Transaction, parse_location

RECORD = CopyRecord("s3://b m", "run", 42, {"v": 1}, {"later": True})


def test_a_record_says_all_that_it_read() -> None:
    assert CopyRecord.from_json(RECORD.to_json()) == RECORD


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[" * 9999,
        b'{"version": 2}',
        RECORD.to_json().replace(b"42", b"-1"),
        RECORD.to_json().replace(b"42", b"true"),
        RECORD.to_json().replace(b'"run": "run"', b'"run": 1'),
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptData, match="or delete it: the copy begins anew"):
        CopyRecord.from_json(data)


def test_the_identity_is_that_of_the_source_and_a_legal_name() -> None:
    by_id = copy_app("01J5T4R3KXBMZ7QV9N2WG8YDHP", "a", "m")
    assert by_id == copy_app("01J5T4R3KXBMZ7QV9N2WG8YDHP", "b", "n")
    by_place = {copy_app("", url, path) for url in ("a", "b\ud800") for path in ("m", "n")}
    assert len(by_place) == 4
    for each in (by_id, *by_place):
        assert Transaction(each, 0).app == each


def test_the_record_is_no_batch() -> None:
    assert parse_location(copy_record_key("p", copy_app("x", "", "")), "p") is None
