"""One partition as the consumer of a topic reads it."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.consumer.fetch import ArrowBatch, ConsumedBatch
from opendata_buffer.errors import Drained, InvalidInput, QueueReset
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.messages.message_ids import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.partition_consumer import PartitionPosition, PartitionReader
from opendata_buffer.topic.topic import Topic
from tests.unit.topic.world import consuming

NAME = "p-00000"
ME = b"\x07" * 6


class World:
    def __init__(self) -> None:
        self.runtime = ManualRuntime()
        self.store = MemoryStore(now_ms=self.runtime.now_ms)
        self.config = Topic.config_of(NAME, consuming())
        self._queue = Queue(self.store, self.config, runtime=self.runtime, role="test")

    def append(self, *records: bytes, message: tuple[int, int] | None = None) -> None:
        identity = None if message is None else build_uuid(ME, *message)
        location = batch_key(NAME, self.runtime.ulid(), message=identity)
        self.store.put(location, encode_batch(list(records)))
        self._queue.append([NewEntry(location)], read_first=True)

    def manifest(self) -> Manifest:
        got = self.store.get(f"{NAME}/manifest")
        assert isinstance(got, Blob)
        return Manifest.parse(got.data)

    def reader(
        self, position: Any = None, *, allow_data_loss: bool = False, **settings: Any
    ) -> PartitionReader:
        return PartitionReader(
            NAME,
            Topic.config_of(NAME, consuming(**settings)),
            None if position is None else PartitionPosition.of(position),
            "read_committed",
            store=self.store,
            runtime=self.runtime,
            allow_data_loss=allow_data_loss,
            program="test",
        )


def test_a_batch_is_fetched_as_bytes_or_as_an_array() -> None:
    world = World()
    world.append(b"a", b"")
    reader = world.reader()
    assert reader.look()
    (descriptor,) = reader.ready
    stored = reader.read(descriptor)
    as_bytes, as_array = (reader.decode(stored, arrow=arrow) for arrow in (False, True))
    assert isinstance(as_bytes, ConsumedBatch)
    assert isinstance(as_array, ArrowBatch)
    assert as_bytes.entries == as_array.values.to_pylist() == [b"a", b""]


def taken(reader: PartitionReader) -> list[bytes]:
    found: list[bytes] = []
    while reader.ready:
        batch = reader.decode(reader.read(reader.ready.popleft()), arrow=False)
        assert isinstance(batch, ConsumedBatch)
        found += batch.entries
    return found


def test_a_transaction_comes_when_it_is_committed_and_stays_queued_until_it_is_processed() -> None:
    world = World()
    world.append(b"a")
    world.append(b"t1", message=(2, CONTINUE_TXN))
    world.append(b"b")
    reader = world.reader()
    assert reader.look()
    assert taken(reader) == [b"a", b"b"]
    reader.ack(0)
    reader.ack(2)
    reader.let_go()
    assert world.manifest().first_sequence == 1
    assert not reader.finished
    assert not reader.look()
    world.append(b"t2", message=(3, CONTINUE_TXN))
    world.append(message=(4, ACK_TXN))
    assert reader.look()
    assert taken(reader) == [b"t1", b"t2"]
    reader.ack(1)
    reader.ack(3)
    reader.let_go()
    assert reader.finished
    assert world.manifest().entry_count == 0


def test_one_that_resumes_goes_on_behind_what_was_saved() -> None:
    world = World()
    world.append(b"t1", message=(2, CONTINUE_TXN))
    world.append(b"a")
    world.append(b"t2", message=(3, CONTINUE_TXN))
    world.append(b"b")
    reader = world.reader()
    reader.look()
    assert taken(reader) == [b"a", b"b"]
    saved = str(reader.position_after(1))
    reader.ack(1)
    assert str(reader.position) == saved
    world.append(message=(4, ACK_TXN))
    again = world.reader(saved)
    again.look()
    assert taken(again) == [b"b", b"t1", b"t2"]


def test_manifests_are_written_now_and_then() -> None:
    world = World()
    for number in range(5):
        world.append(b"%d" % number)
    reader = world.reader(ack_interval=3)
    reader.look()
    seen = []
    for sequence in range(5):
        reader.ack(sequence)
        seen.append(world.manifest().first_sequence)
    assert seen == [0, 0, 3, 3, 3]
    reader.close()
    assert world.manifest().first_sequence == 5  # closing writes out what is acknowledged


def test_f28_behind_a_gap_it_goes_on_if_that_is_allowed() -> None:
    world = World()
    for number in range(4):
        world.append(b"%d" % number)
    reader = world.reader(allow_data_loss=True)
    queue = Queue(world.store, world.config, runtime=world.runtime, role="test")
    queue.dequeue(1, world.manifest().epoch)
    reader.look()
    assert taken(reader) == [b"2", b"3"]
    saved = reader.position_after(2)
    reader.ack(2)
    assert reader.position == saved
    assert saved.sequence == 2
    again = world.reader(saved)
    again.look()
    assert taken(again) == [b"3"]


def test_a_batch_that_is_given_up_is_passed_by() -> None:
    world = World()
    for record in (b"a", b"b", b"c"):
        world.append(record)
    world.store.delete_many([world.manifest().entries()[1].location])
    reader = world.reader()
    reader.look()
    reader.skip(1)
    assert taken(reader) == [b"a", b"c"]
    reader.ack(0)
    with pytest.raises(InvalidInput, match="was not delivered"):
        reader.skip(1)
    reader.ack(2)
    reader.let_go()
    assert world.manifest().entry_count == 0


def test_f4_a_position_of_another_queue_is_refused() -> None:
    world = World()
    world.append(b"t", message=(2, CONTINUE_TXN))
    world.append(b"a")
    reader = world.reader()
    reader.look()
    reader.ack(1)
    own = reader.position
    assert own is not None
    for position in (
        PartitionPosition("01J5T4R3KXBMZ7QV9N2WG8Y000", 1, 0, own.transactions),
        PartitionPosition("01J5T4R3KXBMZ7QV9N2WG8Y000", 1),
    ):
        with pytest.raises(QueueReset):
            world.reader(position)
    with pytest.raises(QueueReset, match="its queue ends at 1"):
        world.reader(PartitionPosition(own.queue_id, 7, 0, own.transactions))


def test_a_partition_that_was_closed_for_good_is_not_opened() -> None:
    world = World()
    assert Queue(world.store, world.config, runtime=world.runtime, role="test").seal()
    with pytest.raises(Drained):
        world.reader()
