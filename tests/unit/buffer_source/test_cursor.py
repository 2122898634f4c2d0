"""One claimed queue: entries handed out of it, positions acknowledged to it."""

from __future__ import annotations

from typing import Any

import pytest

from buffer_source.cursor import Cursor
from buffer_source.offsets import Position
from buffer_source.options import SourceOptions
from opendata_buffer import outcomes
from opendata_buffer.broker.yielding_queue import YieldingQueue
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.buffer_source.world import World


@pytest.fixture
def world(runtime: ManualRuntime) -> World:
    return World(runtime)


def claim(
    world: World, start: Position | None = None, queue_id: str = "", **options: str
) -> Cursor:
    given = SourceOptions.from_spark({"path": "/world", "gcEnabled": "false", **options})

    def once(call: Any, *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return Cursor.open(given, world.store, world.runtime, once, start, queue_id)


def sequences(cursor: Cursor, begin: int, stop: int) -> list[int]:
    return [each.sequence for each in cursor.between(begin, stop)]


def test_entries_are_handed_out_once_and_stay_until_they_are_acknowledged(world: World) -> None:
    world.produce(4)
    cursor = claim(world)
    assert sequences(cursor, 0, 3) == [0, 1, 2]
    assert sequences(cursor, 1, 4) == [1, 2, 3]
    assert cursor.acknowledge(Position(2, 0), 2)
    assert [each.sequence for each in cursor.waiting(0)] == [2, 3]
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

    def take_floor(queue: YieldingQueue) -> bool:
        asked.append(queue.key)
        return True

    monkeypatch.setattr(YieldingQueue, "_take_floor", take_floor)
    cursor = claim(world)
    assert asked == [], "nobody was faster"
    cursor.hand_out(1)
    monkeypatch.setattr(world.store, "put_if", lost)
    assert cursor.acknowledge(Position(1, 0), 1)
    assert asked == ["ingest/manifest"]


def test_a_position_of_another_queue_acknowledges_nothing(world: World) -> None:
    world.produce(2)
    cursor = claim(world)
    cursor.hand_out(2)
    assert not cursor.owns(Position(1, 0, {}, "another"))
    assert not cursor.acknowledge(Position(1, 0, {}, "another"), 1)
    assert world.queued == [0, 1]


def test_claiming_behind_a_position_drops_what_is_before_it(world: World) -> None:
    world.produce(3)
    claim(world, Position(2, 0))
    assert world.queued == [2]


def test_f4_the_queue_of_another_id_is_neither_claimed_nor_emptied(world: World) -> None:
    world.produce(3)
    claim(world)
    epoch = world.manifest().epoch
    with pytest.raises(QueueReset, match="is about queue another, and manifest"):
        claim(world, Position(2, 0), "another")
    assert (world.queued, world.manifest().epoch) == ([0, 1, 2], epoch)


def test_f4_where_a_loss_is_allowed_reading_begins_anew(world: World) -> None:
    world.produce(3)
    old = Position(2, 0, {}, "another")
    cursor = claim(world, old, "another", failOnDataLoss="false")
    assert cursor.resume(old) == (0, 0)
    assert cursor.resume(Position(1, 0, {}, cursor.queue_id)) == (1, 0)
    assert world.queued == [0, 1, 2]


def test_what_is_not_queued_is_an_error(world: World) -> None:
    world.produce(4)
    cursor = claim(world, Position(2, 0))
    with pytest.raises(DataLoss, match=r"needs sequences 0 to 3 .* 2 are left"):
        cursor.between(0, 4)
    with pytest.raises(QueueReset, match="went backwards"):
        cursor.between(2, 9)
    allowed = claim(world, failOnDataLoss="false")
    assert sequences(allowed, 0, 9) == [2, 3]


@pytest.mark.parametrize(
    ("wanted", "target", "first"),
    [("earliest", None, 1), ("latest", None, 4), ("latest", 2, 2), ("latest", 0, 1), ("3", 1, 3)],
)
def test_what_starting_offsets_mean(
    world: World, wanted: str, target: int | None, first: int
) -> None:
    world.produce(4)
    cursor = claim(world, Position(1, 0), startingOffsets=wanted)
    assert cursor.first(target) == first


def test_a_start_that_is_not_queued_is_an_error(world: World) -> None:
    world.produce(4)
    with pytest.raises(DataLoss, match="sequence 0 is needed"):
        claim(world, Position(1, 0), startingOffsets="0").first(None)
    with pytest.raises(InvalidInput, match="use a sequence up to 4"):
        claim(world, startingOffsets="5").first(None)


def test_a_queue_that_does_not_exist_is_made_only_when_asked(world: World) -> None:
    with pytest.raises(InvalidInput, match=r"there is no queue .* createIfMissing to true"):
        claim(world)
    assert world.store.list("").objects == ()
    assert claim(world, createIfMissing="true").end == 0
    assert claim(world).end == 0
