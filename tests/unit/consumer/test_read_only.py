"""Reading a queue without consuming it."""

from __future__ import annotations

import logging

import pytest

from opendata_buffer.config import ConsumerConfig
from opendata_buffer.consumer.read_only import ReadOnlyReader
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.entries import NewEntry
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

CONFIG = ConsumerConfig(store="memory://read-only")
RUNTIME = ManualRuntime()


class World:
    """A queue whose producer and consumer are writes of its manifest."""

    def __init__(self) -> None:
        self.store = MemoryStore("read-only")

    def manifest(self) -> Manifest:
        got = self.store.get("ingest/manifest")
        assert isinstance(got, Blob)
        return Manifest.parse(got.data)

    def produce(self, count: int) -> None:
        there = self.store.list("").objects
        manifest = self.manifest() if there else Manifest.empty()
        first = manifest.next_sequence
        entries = [NewEntry(f"ingest/{first + n}.batch") for n in range(count)]
        self.store.put("ingest/manifest", manifest.append(entries).raw)

    def acknowledge(self, through: int) -> None:
        self.store.put("ingest/manifest", self.manifest().drop_through(through).raw)

    def reader(self, begin: int | None = None, *, allow_data_loss: bool = False) -> ReadOnlyReader:
        found = ReadOnlyReader(
            CONFIG,
            store=self.store,
            runtime=RUNTIME,
            allow_data_loss=allow_data_loss,
            advice="Begin at the oldest.",
        )
        found.seek(begin)
        return found


@pytest.fixture
def world() -> World:
    return World()


def sequences(reader: ReadOnlyReader, count: int = 100) -> list[int]:
    return [each.sequence for each in reader.next_descriptors(count)]


def test_it_hands_out_each_entry_once_and_changes_nothing(world: World) -> None:
    world.produce(3)
    before = world.manifest(), world.store.list("").objects
    reader = world.reader()
    assert sequences(reader, 2) == [0, 1]
    reader.ack_through(1)
    assert sequences(reader) == [2]
    assert (reader.last_acked_sequence, reader.last_handed_out_sequence) == (1, 2)
    assert reader.next_sequence == reader.manifest().next_sequence == 3
    reader.close()
    assert (world.manifest(), world.store.list("").objects) == before


def test_it_sees_entries_that_are_appended_later(world: World) -> None:
    reader = world.reader()
    assert sequences(reader) == []
    world.produce(1)
    assert sequences(reader) == [0]
    world.acknowledge(0)
    world.produce(2)
    assert sequences(reader) == [1, 2]


def test_without_a_position_it_begins_at_the_oldest_entry(world: World) -> None:
    world.produce(3)
    world.acknowledge(0)
    reader = ReadOnlyReader(CONFIG, store=world.store, runtime=RUNTIME)
    assert (reader.last_acked_sequence, reader.last_handed_out_sequence) == (None, None)
    assert sequences(reader) == [1, 2]


def test_f27_it_begins_at_a_position_that_the_queue_has(world: World) -> None:
    world.produce(3)
    assert sequences(world.reader(1)) == [1, 2]
    assert sequences(world.reader(3)) == []
    with pytest.raises(QueueReset, match=r"cannot resume after sequence 3: .* ends at 2"):
        world.reader(4)


def test_f28_entries_that_were_consumed_before_they_were_handed_out_are_a_loss(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.produce(5)
    strict, lenient = world.reader(), world.reader(allow_data_loss=True)
    assert sequences(strict, 1) == sequences(lenient, 1) == [0]
    world.acknowledge(2)
    with pytest.raises(DataLoss, match=r"sequence 1 is needed but .* starts at 3") as caught:
        sequences(strict)
    assert "consumer was faster" in str(caught.value)
    assert str(caught.value).endswith("Begin at the oldest.")
    with caplog.at_level(logging.WARNING):
        assert sequences(lenient) == [3, 4]
    assert "sequences 1 to 2 are gone unread" in caplog.text
    with pytest.raises(DataLoss):
        world.reader(1)
    assert sequences(world.reader(1, allow_data_loss=True)) == [3, 4]


def test_f28_entries_are_read_again_only_while_they_are_queued(world: World) -> None:
    world.produce(4)
    reader = world.reader()
    assert sequences(reader) == [0, 1, 2, 3]
    assert [each.sequence for each in reader.entries(1, 3)] == [1, 2]
    world.acknowledge(1)
    assert sequences(reader) == []
    assert [each.sequence for each in reader.entries(2, 4)] == [2, 3]
    with pytest.raises(DataLoss, match="sequence 1 is needed"):
        reader.entries(1, 3)


def test_no_manifest_is_an_error_that_says_where_it_looked_and_how_to_fix_it(
    world: World,
) -> None:
    config = ConsumerConfig(store="memory://read-only", data_path_prefix="a/b")
    with pytest.raises(InvalidInput) as raised:
        ReadOnlyReader(config, store=world.store, runtime=RUNTIME).manifest()
    for part in ("'a/b/manifest'", world.store.url, "data_path_prefix", "manifest_path"):
        assert part in str(raised.value)
    assert world.store.list("").objects == ()


def test_f4_a_manifest_that_was_lost_is_no_queue_that_never_was(world: World) -> None:
    world.produce(1)
    claim_for_writing(world.store, CONFIG, runtime=RUNTIME).note(world.manifest(), now=True)
    reader = ReadOnlyReader(CONFIG, store=world.store, runtime=RUNTIME)
    world.store.delete_many(["ingest/manifest"])
    with pytest.raises(QueueReset):
        reader.find()
    lenient = world.reader(allow_data_loss=True)
    assert sequences(lenient) == []
