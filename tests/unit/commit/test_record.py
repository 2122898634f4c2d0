from __future__ import annotations

import pytest

from opendata_buffer.errors import CorruptData, InvalidInput
from opendata_buffer.transactions.commit_record import (
    CommitRecord,
    Verdict,
    began,
    claimed,
    decided,
    verdict,
)


def test_the_record_on_storage() -> None:
    record = CommitRecord(batch=3, next_sequence=7)
    assert record.to_json() == b'{"version": 1, "batch": 3, "next_sequence": 7}'
    assert CommitRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"7",
        b"{}",
        b"\xff",
        b'{"version": 2, "batch": 3, "next_sequence": 7}',
        b'{"version": 1, "batch": -2, "next_sequence": 7}',
        b'{"version": 1, "batch": 3, "next_sequence": -1}',
        b'{"version": 1, "batch": 3, "next_sequence": 7, "query": 5}',
        b'{"version": 1, "batch": true, "next_sequence": 7}',
        b'{"version": 1, "batch": 3, "next_sequence": "7"}',
    ],
)
def test_an_unreadable_record_is_named(raw: bytes) -> None:
    with pytest.raises(CorruptData, match="the commit record is not readable"):
        CommitRecord.from_json(raw)


# Which query an app id belongs to.


def test_the_record_of_an_older_version_has_no_query_and_is_read() -> None:
    record = CommitRecord.from_json(b'{"version": 1, "batch": 3, "next_sequence": 7}')
    assert record == CommitRecord(3, 7, None)
    assert record.to_json() == b'{"version": 1, "batch": 3, "next_sequence": 7}'


def test_the_query_and_fields_of_later_versions_survive_being_written_again() -> None:
    raw = b'{"version": 1, "batch": 3, "next_sequence": 7, "query": "one", "later": [1]}'
    record = CommitRecord.from_json(raw)
    assert (record.query, record.others) == ("one", {"later": [1]})
    assert CommitRecord.from_json(record.raised(4, 9, "one").to_json()) == CommitRecord(
        4, 9, "one", {"later": [1]}
    )


def test_a_record_never_falls_and_is_not_raised_by_another_query() -> None:
    record = CommitRecord(3, 7, "one")
    assert record.raised(2, 9, "one") is record
    assert record.raised(4, 9, "two") is record
    assert record.raised(4, 9, None) == CommitRecord(4, 9, "one")


def test_the_first_query_claims_an_app_id() -> None:
    assert claimed(None, "job", "one") == CommitRecord(-1, 0, "one")
    assert claimed(CommitRecord(3, 7), "job", "one") == CommitRecord(3, 7, "one")
    mine = CommitRecord(3, 7, "one")
    assert claimed(mine, "job", "one") is mine


def test_another_query_is_refused_naming_both_and_the_fix() -> None:
    with pytest.raises(InvalidInput) as refused:
        claimed(CommitRecord(3, 7, "one"), "job", "two")
    for part in ("'job'", "query one", "up to 3", "query two", "txnAppId of its own"):
        assert part in str(refused.value)


def test_a_writer_without_a_query_and_one_named_after_its_query_claim_nothing() -> None:
    theirs = CommitRecord(3, 7, "one")
    assert claimed(theirs, "job", None) is theirs
    assert claimed(None, "job", None) is None
    assert claimed(None, "two", "two") is None


# What decides a write to several partitions.

MINE, THEIRS = "01" * 6, "03" * 6


def test_a_topic_s_record_on_storage() -> None:
    record = CommitRecord(3, 0, "q", {"later": 1}, "run", MINE, {"p-00001": 9, "p-00000": 7})
    assert CommitRecord.from_json(record.to_json()) == record
    assert b'"intents": {"p-00000": 7, "p-00001": 9}' in record.to_json()


@pytest.mark.parametrize(
    "field",
    [
        b'"run": 1',
        b'"producer": "0102"',
        b'"producer": "not hexadecimal."',
        b'"intents": []',
        b'"intents": {"p-00000": 0}',
        b'"intents": {"p-00000": true}',
        b'"intents": {"p-00000": "7"}',
    ],
)
def test_a_topic_s_record_that_is_unreadable_is_named(field: bytes) -> None:
    with pytest.raises(CorruptData, match="the commit record is not readable"):
        CommitRecord.from_json(b'{"version": 1, "batch": 3, "next_sequence": 0, ' + field + b"}")


def test_a_run_claims_the_record_before_it_decides() -> None:
    record = began(None, "q", 0, "q", "run 1")
    assert (record.batch, record.run) == (-1, "run 1")
    after = decided(record, "run 1", 0, MINE, {"p-00000": 3})
    assert after is not None
    assert (after.batch, after.producer, after.intents) == (0, MINE, {"p-00000": 3})
    assert verdict(after, 0, MINE) is Verdict.COMMITTED


def test_a_run_that_was_overtaken_decides_nothing() -> None:
    record = began(began(None, "q", 0, "q", "run 1"), "q", 0, "q", "run 2")
    assert decided(record, "run 1", 0, MINE, {"p-00000": 3}) is record
    assert verdict(record, 0, MINE) is Verdict.OPEN
    after = decided(record, "run 2", 0, THEIRS, {"p-00000": 3})
    assert verdict(after, 0, MINE) is Verdict.REPEATED
    assert decided(after, "run 1", 0, MINE, {"p-00000": 3}) is after


def test_a_claim_keeps_what_was_decided_before() -> None:
    record = decided(began(None, "q", 0, "q", "run 1"), "run 1", 0, MINE, {"p-00000": 3})
    after = began(record, "q", 1, "q", "run 2")
    assert (after.batch, after.producer, after.intents) == (0, MINE, {"p-00000": 3})
    assert verdict(after, 0, MINE) is Verdict.COMMITTED


def test_a_committed_batch_is_not_claimed_again() -> None:
    record = decided(began(None, "q", 4, "q", "run 1"), "run 1", 4, MINE, {"p-00000": 3})
    assert began(record, "q", 4, "q", "run 2") is record
    assert began(record, "q", 3, "q", "run 2") is record
    assert decided(record, "run 1", 4, MINE, {"p-00000": 3}) is record, "a lost answer"


def test_without_a_record_nothing_is_decided() -> None:
    assert decided(None, "run", 0, MINE, {}) is None
    assert verdict(None, 0, MINE) is Verdict.OPEN


def test_a_topic_s_record_belongs_to_one_query_as_well() -> None:
    record = began(None, "job", 0, "one", "run 1")
    with pytest.raises(InvalidInput, match="belongs to query one"):
        began(record, "job", 0, "two", "run 2")
