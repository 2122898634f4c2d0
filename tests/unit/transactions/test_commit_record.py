"""The commit record of an app: its bytes, and the query that owns it."""

from __future__ import annotations

import json

import pytest

from opendata_buffer.errors import CorruptData, InvalidInput
from opendata_buffer.transactions import CommitRecord, claimed

WHOLE = b'{"version": 1, "batch": 3, "next_sequence": 7}'


@pytest.mark.parametrize(
    "raw",
    [
        WHOLE.replace(b"3", b"-2"),
        WHOLE.replace(b"7", b"-1"),
        WHOLE.replace(b"7", b'7, "producer": "0102"'),
        WHOLE.replace(b"7", b'7, "producer": "not hexadecimal."'),
        WHOLE.replace(b"7", b'7, "intents": {"p-00000": 0}'),
        WHOLE.replace(b"7", b'7, "intents": {"p-00000": true}'),
        WHOLE.replace(b"7", b'7, "intents": {"p-00000": "7"}'),
        WHOLE.replace(b"7", b'7, "positions": {"p-00000": 7}'),
    ],
)
def test_the_error_about_an_unreadable_record_names_it(raw: bytes) -> None:
    with pytest.raises(CorruptData, match="the commit record is not readable"):
        CommitRecord.from_json(raw)


def test_the_record_of_an_older_version_has_no_query_and_is_read() -> None:
    assert CommitRecord.from_json(WHOLE) == CommitRecord(3, 7, None)
    assert json.loads(CommitRecord(3, 7, None).to_json()) == json.loads(WHOLE)


def test_a_topic_s_record_on_storage() -> None:
    intents = {"p-00001": 9, "p-00000": 7}
    record = CommitRecord(3, 0, "q", {"later": 1}, "run", "01" * 6, intents)
    assert CommitRecord.from_json(record.to_json()) == record
    assert b'"intents": {"p-00000": 7, "p-00001": 9}' in record.to_json()


def test_the_batch_number_of_a_record_never_falls_and_another_query_cannot_raise_it() -> None:
    record = CommitRecord(3, 7, "one", {"later": [1]})
    assert record.raised(2, 9, "one") is record
    assert record.raised(4, 9, "two") is record
    for query in ("one", None):
        assert record.raised(4, 9, query) == CommitRecord(4, 9, "one", {"later": [1]})


def test_the_first_query_claims_an_app_id() -> None:
    assert claimed(None, "job", "one") == CommitRecord(-1, 0, "one")
    assert claimed(CommitRecord(3, 7), "job", "one") == CommitRecord(3, 7, "one")
    own = CommitRecord(3, 7, "one")
    assert claimed(own, "job", "one") is own


def test_the_error_for_another_query_names_both_queries_and_the_fix() -> None:
    with pytest.raises(InvalidInput) as refused:
        claimed(CommitRecord(3, 7, "one"), "job", "two")
    for part in ("'job'", "query one", "up to 3", "query two", "txnAppId of its own"):
        assert part in str(refused.value)


def test_writers_without_a_query_or_named_after_their_query_claim_nothing() -> None:
    another = CommitRecord(3, 7, "one")
    assert claimed(another, "job", None) is another
    assert claimed(None, "job", None) is None
    assert claimed(None, "two", "two") is None
