"""One opened queue: entries read from it, positions acknowledged to it."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_source.options import SourceOptions
from buffer_source.partition_stream import EVERYTHING, QueueCursor, stable_end_of
from buffer_source.partitions import PartitionOffset, first_since, oldest_ms
from opendata_buffer import outcomes
from opendata_buffer.broker.discovery import BrokerPause
from opendata_buffer.errors import DataLoss, InvalidInput
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import BatchDescriptor, Metadata
from opendata_buffer.stores.base import PutOutcome
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.world import World


@pytest.fixture
def world(runtime: ManualRuntime) -> World:
    return World(runtime)


def claim(
    world: World, start: PartitionOffset | None = None, queue_id: str = "", **options: str
) -> QueueCursor:
    given = SourceOptions.from_spark({"path": "/world", "gcEnabled": "false", **options})

    def once(call: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    stable_end = 0 if start is None else stable_end_of(start, given)
    return QueueCursor.open(given, world.store, world.runtime, once, start, stable_end, queue_id)


def test_a_query_that_loses_a_race_for_its_queue_asks_the_broker_beside_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.produce(1)
    asked: list[str] = []
    put_if = world.store.put_if

    def lost(key: str, *rest: Any) -> PutOutcome:
        if key != "ingest/manifest":
            return put_if(key, *rest)
        monkeypatch.setattr(world.store, "put_if", put_if)
        return outcomes.Conflict()

    def ask(pause: BrokerPause, writes: int) -> bool:
        asked.append(pause._config.manifest_path)
        return True

    monkeypatch.setattr(BrokerPause, "ask", ask)
    cursor = claim(world)
    assert asked == [], "no race was lost"
    cursor.read_until(1)
    monkeypatch.setattr(world.store, "put_if", lost)
    assert cursor.acknowledge(PartitionOffset(1, 0), 1)
    assert asked == ["ingest/manifest"]


@pytest.mark.parametrize(
    ("wanted", "run_end", "begin"),
    [
        ("earliest", EVERYTHING, 3),
        ("earliest", 5, 3),
        ("3", 3, 3),
        ("latest", EVERYTHING, 8),
        ("latest", 5, 5),
        ("latest", 1, 3),
        ("latest", 9, 8),
        ("6", 4, 6),
        ("8", EVERYTHING, 8),
    ],
)
def test_what_starting_offsets_mean_in_a_queue_of_3_to_7(
    world: World, wanted: str, run_end: int, begin: int
) -> None:
    world.produce(8)
    claim(world, PartitionOffset(3, 0))
    cursor = claim(world, startingOffsets=wanted, acknowledge="false")
    assert cursor.starting_offset(run_end) == begin
    if begin == 3 and run_end > 3:
        taking = claim(world, startingOffsets=wanted)
        assert taking.starting_offset(run_end) == begin


def test_a_start_that_is_not_queued_is_an_error_or_the_oldest_one(world: World) -> None:
    world.produce(4)
    with pytest.raises(DataLoss, match=r"sequence 0 is needed .* starts at 1"):
        claim(world, PartitionOffset(1, 0), startingOffsets="0").starting_offset(EVERYTHING)
    with pytest.raises(InvalidInput, match=r"ends at 3: use a sequence up to 4"):
        claim(world, startingOffsets="5").starting_offset(EVERYTHING)
    allowed = claim(world, PartitionOffset(1, 0), startingOffsets="0", failOnDataLoss="false")
    assert allowed.starting_offset(EVERYTHING) == 1


def test_a_new_query_may_begin_at_a_time(world: World) -> None:
    began = world.runtime.now_ms()
    world.produce(2)
    world.runtime.advance(60)
    world.produce(2)
    found = [
        claim(world, acknowledge="false", startingTimestamp=str(began + later)).starting_offset(
            EVERYTHING
        )
        for later in (0, 1, 60_000, 60_001)
    ]
    assert found == [0, 2, 2, 4]


def ingested(sequence: int, *times: int) -> BatchDescriptor:
    ranges = tuple(Metadata(number, time) for number, time in enumerate(times))
    return BatchDescriptor(sequence, "in/no time", ranges)


def test_the_first_batch_with_a_late_enough_record_is_where_a_time_begins() -> None:
    queued = [ingested(3, 100), ingested(4, 90, 250), ingested(5, 300)]
    assert [first_since(queued, since, 6) for since in (100, 200, 301)] == [3, 4, 6]
    assert first_since([], 0, 6) == 6
    # A batch of unknown time rather comes too often.
    assert first_since([ingested(3, 100), ingested(4)], 200, 6) == 4


def test_a_time_before_all_that_is_queued_is_warned_of_with_both_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first_since([ingested(3, 1_000, 90)], 90, 6)
    first_since([ingested(0, 1_000)], 90, 6)  # nothing has left this queue
    first_since([ingested(3)], 90, 6)
    assert not caplog.messages
    assert first_since([ingested(3, 61_000), ingested(4, 1 << 62)], 90, 6) == 3
    assert first_since([ingested(4, 1 << 62)], 90, 6) == 4
    (line, other) = caplog.messages
    assert "is 1970-01-01T00:00:00.090+00:00" in line
    assert "queued, 3 at 'in/no time', begins at 1970-01-01T00:01:01.000+00:00" in line
    assert f"begins at {1 << 62} ms" in other


def test_a_batch_is_as_old_as_its_records_else_as_its_name(runtime: ManualRuntime) -> None:
    name = batch_key("ingest", runtime.ulid())
    ranges = (Metadata(0, 7_000, b""), Metadata(3, 5_000, b""), Metadata(9, 9_000, b""))
    batch = BatchDescriptor(4, name, ranges)
    assert oldest_ms(batch) == 5_000
    assert (first_since([batch], 9_000, 9), first_since([batch], 9_001, 9)) == (4, 9)
    batch = BatchDescriptor(4, name, ())
    assert oldest_ms(batch) == runtime.now_ms()
    assert first_since([batch], runtime.now_ms() + 1, 9) == 9
    assert oldest_ms(BatchDescriptor(4, "elsewhere/data", ())) is None
