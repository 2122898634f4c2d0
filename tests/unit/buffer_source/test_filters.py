from __future__ import annotations

import datetime

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from buffer_source.filters import push
from opendata_buffer.formats.manifest import Metadata, QueueEntry

S = ("sequence",)
T = ("ingestion_time",)


def at(second: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(second, tz=datetime.UTC)


def entry(sequence: int, *seconds: int) -> QueueEntry:
    return QueueEntry(
        sequence, "ingest/x", tuple(Metadata(i, s * 1000) for i, s in enumerate(seconds))
    )


@pytest.mark.parametrize(
    ("pushed", "kept"),
    [
        (EqualTo(S, 2), [2]),
        (In(S, (1, 3, 9)), [1, 3]),
        (GreaterThan(S, 2), [3, 4]),
        (GreaterThanOrEqual(S, 2), [2, 3, 4]),
        (LessThan(S, 2), [0, 1]),
        (LessThanOrEqual(S, 2), [0, 1, 2]),
        (IsNotNull(S), [0, 1, 2, 3, 4]),
        (EqualTo(("Sequence",), 2), [2]),
    ],
)
def test_filters_on_sequence_are_answered_for_good(pushed: Filter, kept: list[int]) -> None:
    predicates, left = push([pushed])
    assert left == []
    entries = [entry(sequence) for sequence in range(5)]
    assert [each.sequence for each in entries if all(p(each) for p in predicates)] == kept


@pytest.mark.parametrize(
    ("pushed", "kept"),
    [
        (EqualTo(T, at(20)), [1, 2]),
        (In(T, (at(10), at(40))), [0, 3]),
        (GreaterThan(T, at(30)), [3]),
        (GreaterThanOrEqual(T, at(30)), [2, 3]),
        (LessThan(T, at(20)), [0, 1]),
        (LessThanOrEqual(T, at(10)), [0, 1]),
    ],
)
def test_filters_on_time_drop_batches_that_cannot_match(pushed: Filter, kept: list[int]) -> None:
    predicates, left = push([pushed])
    assert left == [pushed]
    entries = [entry(0, 10), entry(1, 20, 5), entry(2, 20, 30), entry(3, 40), entry(4)]
    entries.append(QueueEntry(5, "ingest/x", (Metadata(0, (1 << 63) - 1),)))
    assert [each.sequence for each in entries if all(p(each) for p in predicates)] == kept


@pytest.mark.parametrize(
    "filter_",
    [
        Not(EqualTo(S, 2)),
        IsNull(S),
        EqualTo(S, "2"),
        EqualTo(S, None),
        EqualTo(S, True),
        In(S, (1, None)),
        EqualTo(("value",), b"x"),
        EqualTo(("sequence", "field"), 2),
        EqualTo(T, datetime.datetime(2020, 1, 1)),
        IsNotNull(T),
    ],
)
def test_what_is_not_understood_is_left_to_spark(filter_: Filter) -> None:
    assert push([filter_]) == ([], [filter_])
