"""Filters of a batch read that a queue can answer before anything is fetched. Pure.

A batch has one sequence, so a filter on ``sequence`` is answered for good. A batch has many
ingestion times, so a filter on ``ingestion_time`` only tells which batches cannot have a
matching row, and Spark filters the rows of the others.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from buffer_source.rows import time_micros
from opendata_buffer.formats.manifest import Metadata, QueueEntry

__all__ = ["Predicate", "push"]

Predicate = Callable[[QueueEntry], bool]
"""Whether an entry may have rows that match."""

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)


def push(filters: Sequence[Filter]) -> tuple[list[Predicate], list[Filter]]:
    """Split filters into predicates on entries and what Spark still has to check on rows."""
    predicates: list[Predicate] = []
    left: list[Filter] = []
    for each in filters:
        column = _column(each)
        if column == "sequence" and (test := _test(each, _integer)) is not None:
            predicates.append(_on_sequence(test))
        elif column == "sequence" and isinstance(each, IsNotNull):
            continue  # It never is.
        else:
            left.append(each)
            if column == "ingestion_time" and (test := _test(each, _micros)) is not None:
                predicates.append(_on_time(test))
    return predicates, left


def _column(each: Filter) -> str | None:
    path: tuple[str, ...] = getattr(each, "attribute", ())
    return path[0].lower() if len(path) == 1 else None


def _test(each: Filter, convert: Callable[[Any], int | None]) -> Callable[[int], bool] | None:
    """The filter as a test of one value; None when it cannot be one."""
    if isinstance(each, In):
        values = {convert(value) for value in each.value}
        return None if None in values else values.__contains__
    value = convert(getattr(each, "value", None))
    if value is None:
        return None
    match each:
        case EqualTo():
            return lambda actual: actual == value
        case GreaterThan():
            return lambda actual: actual > value
        case GreaterThanOrEqual():
            return lambda actual: actual >= value
        case LessThan():
            return lambda actual: actual < value
        case LessThanOrEqual():
            return lambda actual: actual <= value
    return None


def _on_sequence(test: Callable[[int], bool]) -> Predicate:
    return lambda entry: test(entry.sequence)


def _on_time(test: Callable[[int], bool]) -> Predicate:
    def may_match(entry: QueueEntry) -> bool:
        # Rows without a time, or with one that is shown as null, match no comparison.
        return any(_matches(each, test) for each in entry.metadata)

    return may_match


def _matches(metadata: Metadata, test: Callable[[int], bool]) -> bool:
    micros = time_micros(metadata)
    return micros is not None and test(micros)


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _micros(value: Any) -> int | None:
    if not isinstance(value, datetime.datetime) or value.tzinfo is None:
        return None
    return (value - _EPOCH) // _MICROSECOND
