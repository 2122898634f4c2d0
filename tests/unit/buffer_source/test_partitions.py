from __future__ import annotations

import json
from typing import Any

import pytest

from buffer_source.partitions import (
    INITIAL,
    ONLY,
    PartitionOffset,
    SourceOffset,
    oldest_ms,
    sequence_since,
)
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import batch_key
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest, Metadata, NewEntry
from opendata_buffer.testing.runtime import ManualRuntime

TRANSACTIONS = {"v": 1, "apps": {"a": 3}, "tail": None}

RECORDED_V1 = (
    '{"v":1,"queue":"01JZ8T2W5N0000000000000000","next":7,"base":2,'
    '"txn":{"v":1,"apps":{"a":3},"tail":["a",6]}}'
)
"""Return an offset as release 0.1 wrote it to a checkpoint."""


def test_the_json_never_changes_because_checkpoints_contain_it() -> None:
    offset = SourceOffset({ONLY: PartitionOffset(7, 2, TRANSACTIONS, "01J")})
    text = json.dumps(offset.to_json())
    assert text == (
        '{"v": 2, "partitions": {"0": {"queue": "01J", "next": 7, "base": 2, '
        '"txn": {"v": 1, "apps": {"a": 3}, "tail": null}}}}'
    )
    assert SourceOffset.from_json(json.loads(text)) == offset
    assert json.dumps(INITIAL) == '{"v": 2, "at": "start"}'
    assert SourceOffset.from_json(dict(INITIAL)) is None


def test_an_offset_of_version_1_is_the_position_of_the_one_queue() -> None:
    offset = SourceOffset.from_json(json.loads(RECORDED_V1))
    assert offset is not None
    assert offset.only == PartitionOffset(
        7, 2, {"v": 1, "apps": {"a": 3}, "tail": ["a", 6]}, "01JZ8T2W5N0000000000000000"
    )
    assert SourceOffset.from_json({"v": 1, "at": "start"}) is None
    # Before queues had IDs.
    old = SourceOffset.from_json({"v": 1, "next": 7, "base": 2, "txn": {}})
    assert old is not None
    assert old.only == PartitionOffset(7, 2)


def test_an_offset_that_is_read_and_written_has_the_same_text() -> None:
    # Spark compares offsets as text, so another order of keys would run empty batches forever.
    text = json.dumps(
        SourceOffset(
            {"b": PartitionOffset(1 << 40, 0, TRANSACTIONS), "a": PartitionOffset(3, 1, {}, "01J")}
        ).to_json()
    )
    again = SourceOffset.from_json(json.loads(text))
    assert again is not None
    assert json.dumps(again.to_json()) == text
    assert list(json.loads(text)["partitions"]) == ["a", "b"]


def test_missing_batches_are_recorded_only_if_there_are_any() -> None:
    position = PartitionOffset(7, 2, {}, "01J", (3, 5))
    text = json.dumps(SourceOffset({ONLY: position}).to_json())
    assert text.endswith('"base": 2, "txn": {}, "missing": [3, 5]}}}')
    read = SourceOffset.from_json(json.loads(text))
    assert read is not None
    assert read.only == position


def test_an_offset_of_several_partitions_is_refused_for_a_single_queue() -> None:
    with pytest.raises(InvalidInput, match=r"about partitions \['a', 'b'\]"):
        _ = SourceOffset({"a": PartitionOffset(1, 0), "b": PartitionOffset(1, 0)}).only


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (None, "checkpointLocation of its own"),
        ({"n": 3}, "checkpointLocation of its own"),
        ({"v": 3, "next": 1}, "newer release"),
        ({"v": True, "next": 1, "base": 0, "txn": {}}, "newer release"),
        ({"v": 1, "next": -1, "base": 0, "txn": {}}, "damaged"),
        ({"v": 1, "next": True, "base": 0, "txn": {}}, "damaged"),
        ({"v": 1, "next": 1, "base": "0", "txn": {}}, "damaged"),
        ({"v": 1, "next": 1, "base": 0}, "damaged"),
        ({"v": 1, "queue": 5, "next": 1, "base": 0, "txn": {}}, "damaged"),
        ({"v": 1, "at": "elsewhere"}, "damaged"),
        ({"v": 2, "next": 1, "base": 0, "txn": {}}, "damaged"),
        ({"v": 2, "partitions": {}}, "damaged"),
        ({"v": 2, "partitions": {"0": 7}}, "damaged"),
        ({"v": 1, "next": 1, "base": 0, "txn": {}, "missing": 5}, "damaged"),
        ({"v": 1, "next": 1, "base": 0, "txn": {}, "missing": ["5"]}, "damaged"),
        ({"v": 2, "partitions": {"0": {"next": -1, "base": 0, "txn": {}}}}, "damaged"),
    ],
)
def test_a_foreign_offset_is_refused(offset: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        SourceOffset.from_json(offset)


def test_a_micro_batch_begins_at_its_base_or_at_the_end_of_the_previous_one() -> None:
    assert PartitionOffset(9, 4).begin_of(None) == 4
    assert PartitionOffset(9, 4).begin_of(PartitionOffset(7, 4)) == 7
    # A new base is where reading continued after a loss.
    assert PartitionOffset(20, 15).begin_of(PartitionOffset(7, 4)) == 15
    assert PartitionOffset(3, 0).begin_of(PartitionOffset(7, 0)) == 0


def queued(first: int, *times: tuple[int, ...]) -> Manifest:
    """Return batches from a sequence on, with these times of their records."""
    ranges = (tuple(Metadata(at, time) for at, time in enumerate(each)) for each in times)
    entries = [NewEntry("in/no time", each) for each in ranges]
    return Manifest.starting_at(first, 0).append(entries)


def test_a_start_time_begins_at_the_first_batch_with_a_late_enough_record() -> None:
    view = queued(3, (100,), (90, 250), (300,))
    assert [sequence_since(view, since) for since in (100, 200, 301)] == [3, 4, 6]
    assert sequence_since(queued(6), 0) == 6
    # A batch of unknown time is included.
    assert sequence_since(queued(3, (100,), ()), 200) == 4


def test_a_start_time_before_all_queued_batches_logs_a_warning_with_both_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sequence_since(queued(3, (1_000, 90)), 90)
    sequence_since(queued(0, (1_000,)), 90)  # nothing was dequeued from this queue
    sequence_since(queued(3, ()), 90)
    assert not caplog.messages
    assert sequence_since(queued(3, (61_000,), (1 << 62,)), 90) == 3
    assert sequence_since(queued(4, (1 << 62,)), 90) == 4
    (line, other) = caplog.messages
    assert "is 1970-01-01T00:00:00.090+00:00" in line
    assert "queued, 3 at 'in/no time', begins at 1970-01-01T00:01:01.000+00:00" in line
    assert f"begins at {1 << 62} ms" in other


def test_a_batch_has_the_age_of_its_records_or_else_of_its_name(runtime: ManualRuntime) -> None:
    name = batch_key("ingest", runtime.ulid())
    ranges = (Metadata(0, 7_000), Metadata(3, 5_000), Metadata(9, 9_000))
    assert oldest_ms(BatchDescriptor(4, name, ranges)) == 5_000
    assert oldest_ms(BatchDescriptor(4, name)) == runtime.now_ms()
    assert oldest_ms(BatchDescriptor(4, "elsewhere/data")) is None
