"""Where a query without a checkpoint begins."""

from __future__ import annotations

import pytest

from buffer_source.options import SourceOptions
from buffer_source.queue_cursor import first_of_offset, first_since, within
from opendata_buffer.consumer.fetch import BatchDescriptor
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.entries import Metadata


def asked(wanted: str, **options: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": "/q", "startingOffsets": wanted, **options})


@pytest.mark.parametrize(
    ("wanted", "target", "first"),
    [
        ("earliest", None, 3),
        ("earliest", 5, 3),
        ("latest", None, 8),
        ("latest", 5, 5),
        ("latest", 1, 3),
        ("latest", 9, 8),
        ("3", None, 3),
        ("6", 4, 6),
        ("8", None, 8),
    ],
)
def test_what_starting_offsets_mean_in_a_queue_of_3_to_7(
    wanted: str, target: int | None, first: int
) -> None:
    assert first_of_offset(asked(wanted), 3, 8, target) == first


def test_a_sequence_beyond_the_end_is_refused_with_those_that_are_not() -> None:
    with pytest.raises(InvalidInput, match=r"ends at 7: use a sequence up to 8"):
        first_of_offset(asked("9"), 3, 8, None)


def test_a_sequence_that_is_gone_is_a_loss_or_the_oldest_one() -> None:
    with pytest.raises(DataLoss, match=r"sequence 2 is needed .* starts at 3"):
        first_of_offset(asked("2"), 3, 8, None)
    assert first_of_offset(asked("2", failOnDataLoss="false"), 3, 8, None) == 3


def taken_in(sequence: int, *times: int) -> BatchDescriptor:
    return BatchDescriptor(
        sequence, "in/no time", tuple(Metadata(n, t) for n, t in enumerate(times))
    )


def test_the_first_batch_with_a_late_enough_record_is_where_a_time_begins() -> None:
    queued = [taken_in(3, 100), taken_in(4, 90, 250), taken_in(5, 300)]
    assert first_since(queued, 200, 6) == 4
    assert first_since(queued, 100, 6) == 3
    assert first_since(queued, 301, 6) == 6
    assert first_since([], 0, 6) == 6


def test_a_batch_of_unknown_time_rather_comes_too_often() -> None:
    assert first_since([taken_in(3, 100), taken_in(4)], 200, 6) == 4


def test_a_run_that_ends_early_does_not_begin_behind_its_end() -> None:
    assert within(9, 3, None) == 9
    assert within(9, 3, 5) == 5
    assert within(9, 3, 2) == 3
