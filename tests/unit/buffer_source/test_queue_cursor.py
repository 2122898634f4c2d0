"""One opened queue: entries read from it, positions acknowledged to it."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_source.offsets import Position
from buffer_source.options import SourceOptions
from buffer_source.partition_stream import stable_end_of
from buffer_source.queue_cursor import QueueCursor, first_since, oldest_ms
from opendata_buffer import outcomes
from opendata_buffer.broker.write_pause import BrokerPause
from opendata_buffer.consumer.cursors import BatchDescriptor
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.entries import Metadata
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.world import World


@pytest.fixture
def world(runtime: ManualRuntime) -> World:
    return World(runtime)


def claim(
    world: World, start: Position | None = None, queue_id: str = "", **options: str
) -> QueueCursor:
    given = SourceOptions.from_spark({"path": "/world", "gcEnabled": "false", **options})

    def once(call: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    stable_end = 0 if start is None else stable_end_of(start, given)
    return QueueCursor.open(given, world.store, world.runtime, once, start, stable_end, queue_id)


def sequences(cursor: QueueCursor, begin: int, stop: int) -> list[int]:
    return [each.sequence for each in cursor.entries(begin, stop)]


def test_entries_are_handed_out_once_and_stay_until_they_are_acknowledged(world: World) -> None:
    world.produce(4)
    cursor = claim(world)
    assert sequences(cursor, 0, 3) == [0, 1, 2]
    assert sequences(cursor, 1, 4) == [1, 2, 3]
    assert cursor.acknowledge(Position(2, 0), 2)
    assert [each.sequence for each in cursor.pending(0)] == [2, 3]
    assert world.queued == [2, 3]
    assert not cursor.acknowledge(Position(2, 0), 2)
    assert not cursor.acknowledge(Position(9, 0), 9)


def test_a_query_that_loses_a_race_for_its_queue_asks_the_broker_beside_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.produce(1)
    asked: list[str] = []
    put_if = world.store.put_if

    def lost(*_: Any) -> outcomes.Conflict:
        monkeypatch.setattr(world.store, "put_if", put_if)
        return outcomes.Conflict()

    def ask(pause: BrokerPause, writes: int) -> bool:
        asked.append(pause._config.manifest_path)
        return True

    monkeypatch.setattr(BrokerPause, "ask", ask)
    cursor = claim(world)
    assert asked == [], "no other writer was faster"
    cursor.read_until(1)
    monkeypatch.setattr(world.store, "put_if", lost)
    assert cursor.acknowledge(Position(1, 0), 1)
    assert asked == ["ingest/manifest"]


def test_a_position_of_another_queue_acknowledges_nothing(world: World) -> None:
    world.produce(2)
    cursor = claim(world)
    cursor.read_until(2)
    assert not cursor.owns(Position(1, 0, {}, "another"))
    assert not cursor.acknowledge(Position(1, 0, {}, "another"), 1)
    assert world.queued == [0, 1]


@pytest.mark.parametrize(
    ("wanted", "run_end", "begin"),
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
    world: World, wanted: str, run_end: int | None, begin: int
) -> None:
    world.produce(8)
    cursor = claim(world, Position(3, 0), startingOffsets=wanted)
    assert cursor.starting_offset(run_end) == begin


def test_a_start_that_is_not_queued_is_an_error_or_the_oldest_one(world: World) -> None:
    world.produce(4)
    with pytest.raises(DataLoss, match=r"sequence 0 is needed .* starts at 1"):
        claim(world, Position(1, 0), startingOffsets="0").starting_offset(None)
    with pytest.raises(InvalidInput, match=r"ends at 3: use a sequence up to 4"):
        claim(world, startingOffsets="5").starting_offset(None)
    allowed = claim(world, Position(1, 0), startingOffsets="0", failOnDataLoss="false")
    assert allowed.starting_offset(None) == 1


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


def test_the_times_of_the_records_count_more_than_the_name(runtime: ManualRuntime) -> None:
    ranges = (Metadata(0, 7_000, b""), Metadata(3, 5_000, b""), Metadata(9, 9_000, b""))
    batch = BatchDescriptor(4, batch_key("ingest", runtime.ulid()), ranges)
    assert oldest_ms(batch) == 5_000
    assert first_since([batch], 9_000, 9) == 4
    assert first_since([batch], 9_001, 9) == 9


def test_a_batch_whose_records_have_no_time_is_as_old_as_its_name(runtime: ManualRuntime) -> None:
    batch = BatchDescriptor(4, batch_key("ingest", runtime.ulid()), ())
    assert oldest_ms(batch) == runtime.now_ms()
    assert first_since([batch], runtime.now_ms() + 1, 9) == 9


def test_of_a_foreign_name_without_times_nothing_is_known() -> None:
    batch = BatchDescriptor(4, "elsewhere/data", ())
    assert oldest_ms(batch) is None
