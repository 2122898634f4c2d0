"""Producing into a topic."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer import outcomes
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import Closed, Drained, FlushFailed, InvalidInput
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.producer.handle import Durable
from opendata_buffer.stores.base import (
    Absent,
    IfVersion,
    PutOutcome,
)
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic import partitioner as mapping
from opendata_buffer.topic.description import name_of
from opendata_buffer.topic.producer import TopicProducer
from tests.unit.topic.world import URL, WAIT_S, producing, records, topic_in

ENTRIES = [b"%d" % number for number in range(500)]
KEYS = [b"key %d" % (number % 23) for number in range(500)]


def opened(store: MemoryStore, **settings: Any) -> TopicProducer:
    return TopicProducer(producing(**settings), store=store, refresh_s=0.0)


@pytest.mark.parametrize("partitioner", [mapping.modulo, mapping.rendezvous, None])
def test_records_are_where_their_keys_are_mapped_to_and_in_order(partitioner: Any) -> None:
    store = MemoryStore()
    names = topic_in(store, 4).description.names
    with opened(store) as producer:
        for begin in range(0, 500, 100):
            part = slice(begin, begin + 100)
            handle = producer.produce(
                pa.array(ENTRIES[part]), keys=pa.array(KEYS[part]), partitioner=partitioner
            )
        places = handle.watcher.await_durable(WAIT_S)
    assert set(places) == set(names)
    assert all(where.location.startswith(f"{name}/") for name, where in places.items())
    wanted: dict[str, list[bytes]] = {name: [] for name in names}
    for entry, index in zip(ENTRIES, (partitioner or mapping.modulo)(KEYS, names), strict=True):
        wanted[names[index]].append(entry)
    assert {name: records(store, name) for name in names} == wanted


def test_without_keys_calls_stay_together_and_go_to_all_partitions_in_turn() -> None:
    store = MemoryStore()
    names = topic_in(store, 3).description.names
    with opened(store) as producer:
        for number in range(6):
            producer.produce([b"%d a" % number, b"%d b" % number])
    found = [records(store, name) for name in names]
    assert [len(each) for each in found] == [4, 4, 4]
    assert sorted(record for each in found for record in each) == sorted(
        b"%d %c" % (n, c) for n in range(6) for c in b"ab"
    )
    for each in found:
        assert [record[-1:] for record in each] == [b"a", b"b", b"a", b"b"]


def test_a_partition_can_be_named() -> None:
    store = MemoryStore()
    topic_in(store, 3)
    with opened(store) as producer:
        producer.produce([b"x"], partition="p-00002-0bvb", keys=[b"any"])
        with pytest.raises(
            InvalidInput, match=r"'p-00009-04v2'.*p-00000-04pn, p-00001-05mv, p-00002-0bvb"
        ):
            producer.produce([b"y"], partition="p-00009-04v2")
        producer.produce([b"z"], partition="2")
    assert records(store, "p-00002-0bvb") == [b"x", b"z"]


def test_a_partitioner_of_the_user_s_own() -> None:
    store = MemoryStore()
    topic_in(store, 3)

    def by_length(keys: Any, partitions: Any) -> Any:
        return pa.compute.binary_length(keys).to_numpy(zero_copy_only=False) % len(partitions)

    with opened(store) as producer:
        producer.produce([b"x", b"y"], keys=pa.array([b"1", b"22"]), partitioner=by_length)
    assert (records(store, "p-00001-05mv"), records(store, "p-00002-0bvb")) == ([b"x"], [b"y"])


def test_what_is_wrong_with_one_part_is_refused_as_a_whole() -> None:
    store = MemoryStore()
    topic_in(store, 4)
    with opened(store, max_batch_bytes=1_000) as producer:
        keys = [b"key %d" % number for number in range(9)]
        for entries, message in (
            (pa.array([b"x"] * 8 + [None]), "null"),
            ([b"x"] * 8 + [b"y" * 2_000], "max_batch_bytes"),
        ):
            with pytest.raises(InvalidInput, match=message):
                producer.produce(entries, keys=keys)
        with pytest.raises(InvalidInput, match="key 1 is null"):
            producer.produce([b"x", b"y"], keys=pa.array([b"k", None]))
        with pytest.raises(InvalidInput, match="partitioner modulo maps keys: give keys="):
            producer.produce([b"x"], partitioner=mapping.modulo)
        with pytest.raises(InvalidInput, match="one bytes: give a list"):
            producer.produce(b"x")  # type: ignore[arg-type]
        producer.flush(WAIT_S)
        assert producer.produce([]).watcher.await_durable(0) == {}
    assert [records(store, name_of(number, number)) for number in range(4)] == [[], [], [], []]


def test_added_partitions_are_written_and_draining_ones_are_not() -> None:
    store = MemoryStore()
    topic = topic_in(store, 2)
    with opened(store) as producer:
        producer.produce([b"1"], partition="p-00000-04pn").watcher.await_durable(WAIT_S)
        topic.expand(3)
        topic.drain("p-00000-04pn")
        assert producer.description.active == ["p-00001-05mv", "p-00002-0bvb"]
        for number in range(4):
            producer.produce([b"%d" % number]).watcher.await_durable(WAIT_S)
    assert records(store, "p-00000-04pn") == [b"1"]
    assert len(records(store, "p-00001-05mv")) == len(records(store, "p-00002-0bvb")) == 2


def test_a_partition_that_has_left_refuses_what_comes_late_and_says_so() -> None:
    store = MemoryStore()
    topic = topic_in(store, 2)
    producer = TopicProducer(producing(), store=store, refresh_s=3_600.0)
    topic.drain("p-00001-05mv")
    topic.remove_drained(0)
    handle = producer.produce([b"late"], partition="p-00001-05mv")
    with pytest.raises(Drained, match="Nothing was written"):
        handle.watcher.await_durable(WAIT_S)
    producer.produce([b"x"], partition="p-00000-04pn").watcher.await_durable(WAIT_S)
    with pytest.raises(FlushFailed, match=r"1 produce\(\) calls"):
        producer.close()
    assert (records(store, "p-00001-05mv"), records(store, "p-00000-04pn")) == ([], [b"x"])


class SlowBatch(MemoryStore):
    """The first batch of one partition is uploaded when it may be."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.began = threading.Event()

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key.startswith("p-00001-05mv/") and key.endswith(".batch") and not self.began.is_set():
            self.began.set()
            assert self.may.wait(WAIT_S)
        super().put(key, data)


def test_a_caller_with_an_old_list_overtakes_nothing_in_a_partition_that_begins_to_drain() -> None:
    store = SlowBatch()
    topic = topic_in(store, 2)
    divides, divided = threading.Event(), threading.Event()

    def slowly(keys: Any, partitions: Any) -> Any:
        divides.set()
        assert divided.wait(WAIT_S)
        return [partitions.index("p-00001-05mv")] * len(keys)

    with opened(store, flush_interval_ms=1) as producer:
        producer.produce([b"first"], partition="p-00001-05mv")
        assert store.began.wait(WAIT_S)

        def produce() -> None:
            handle = producer.produce([b"second"], keys=[b"k"], partitioner=slowly)
            handle.watcher.await_durable(WAIT_S)

        second = threading.Thread(target=produce)
        second.start()
        assert divides.wait(WAIT_S)
        topic.drain("p-00001-05mv")
        producer.produce([b"x"], partition="p-00000-04pn").watcher.await_durable(WAIT_S)
        divided.set()
        second.join(0.3)  # if it opens a producer of its own, it is durable by now
        store.may.set()
        second.join(WAIT_S)
    assert records(store, "p-00001-05mv") == [b"first", b"second"]


class FullPartition(MemoryStore):
    """One manifest that nobody gets written while it is full."""

    full = True

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        if self.full and key == "p-00001-05mv/manifest":
            return outcomes.Conflict()
        return super().put_if(key, data, condition)


def test_a_partition_that_takes_nothing_does_not_hold_the_others_up() -> None:
    store = FullPartition()
    topic_in(store, 2)
    producer = opened(store)
    stuck = producer.produce([b"x"], partition="p-00001-05mv")
    assert producer.produce([b"y"], partition="p-00000-04pn").watcher.await_durable(WAIT_S)
    assert stuck.watcher.result() is None
    with pytest.raises(TimeoutError):
        producer.flush(timeout=0.05)
    assert producer.buffered_bytes > 0
    with pytest.raises(FlushFailed):
        producer.close(timeout=0.05)
    assert records(store, "p-00000-04pn") == [b"y"]
    store.full = False  # or its thread would go on beside the tests that follow


def test_the_partitions_share_the_buffer() -> None:
    store = MemoryStore()
    topic_in(store, 4)
    producer = opened(store, max_buffered_bytes=4_000, max_buffered_inputs=2)
    with producer:
        one = producer._open("p-00000-04pn")
        assert (one._config.max_buffered_bytes, one._config.max_buffered_inputs) == (1_000, 1)
        one.close()


def test_it_needs_a_topic_and_no_place_of_its_own() -> None:
    with pytest.raises(InvalidInput, match="topic create"):
        opened(MemoryStore())
    store = MemoryStore()
    topic_in(store, 1)
    with pytest.raises(InvalidInput, match="data_path_prefix is 'mine'"):
        TopicProducer(ProducerConfig(store=URL, data_path_prefix="mine"), store=store)


def test_a_closed_producer_accepts_nothing() -> None:
    store = MemoryStore()
    topic_in(store, 2)
    producer = opened(store)
    producer.close()
    producer.close()
    with pytest.raises(Closed):
        producer.produce([b"x"])


def test_an_error_in_the_block_is_not_hidden_by_the_one_of_closing() -> None:
    store = FullPartition()
    topic_in(store, 2)
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        opened(store, delivery_timeout_ms=50, cas_deadline_ms=2_000) as producer,
    ):
        producer.produce([b"x"], partition="p-00001-05mv")
        raise ZeroDivisionError


def test_every_partition_is_a_queue_of_v1() -> None:
    store = MemoryStore()
    topic_in(store, 1)
    with opened(store) as producer:
        producer.produce([b"x"])
    got = store.get("p-00000-04pn/manifest")
    manifest = Manifest.parse(got.data)  # type: ignore[union-attr]
    assert manifest.entries()[0].location.startswith("p-00000-04pn/")


def test_records_that_are_sent_one_by_one_are_where_their_keys_are_mapped_to() -> None:
    store = MemoryStore()
    names = topic_in(store, 4).description.names
    with opened(store) as producer:
        handles = [
            producer.send(bytearray(entry), key=key)
            for entry, key in zip(ENTRIES, KEYS, strict=True)
        ]
        places = [handle.watcher.await_durable(WAIT_S) for handle in handles]
    wanted: dict[str, list[bytes]] = {name: [] for name in names}
    for entry, index, where in zip(ENTRIES, mapping.modulo(KEYS, names), places, strict=True):
        wanted[names[index]].append(entry)
        assert where.location.startswith(f"{names[index]}/")
    assert {name: records(store, name) for name in names} == wanted


def test_a_record_without_a_key_goes_to_the_next_partition_or_to_the_one_that_is_named() -> None:
    store = MemoryStore()
    names = topic_in(store, 3).description.names
    with opened(store) as producer:
        for number in range(6):
            producer.send(b"%d" % number)
        producer.send(b"named", partition="2", key=b"any")
        with pytest.raises(InvalidInput, match="partition is 'p-00009-04v2'"):
            producer.send(b"nowhere", partition="p-00009-04v2")
        with pytest.raises(InvalidInput):
            producer.send("text", key=b"k")  # type: ignore[arg-type]
    found = [records(store, name) for name in names]
    assert [len(each) for each in found] == [2, 2, 3]
    assert found[2][-1] == b"named"
    with pytest.raises(Closed):
        producer.send(b"late")


class Gate(MemoryStore):
    """Stores batches only while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key.endswith(".batch"):
            assert self.open.wait(WAIT_S)
        super().put(key, data)


def test_in_asyncio_a_call_waits_for_room_in_its_partitions_and_the_loop_goes_on() -> None:
    store = Gate()
    names = topic_in(store, 2).description.names
    keys = [b"a", b"b"]
    assert list(mapping.modulo(keys, names)) == [0, 1]

    async def run() -> dict[str, Durable]:
        # Each partition has 100 bytes of room: the first call takes all of it.
        full = await producer.produce_async([b"a" * 90, b"b" * 90], keys=keys)
        assert set(full.watcher.parts) == set(names)
        waiting = asyncio.create_task(producer.produce_async([b"c", b"d"], keys=keys))
        for _ in range(20):
            await asyncio.sleep(0)  # the loop turns
        assert not waiting.done()
        store.open.set()
        return await (await waiting)

    settings = producing(max_buffered_bytes=200, flush_size_bytes=1)
    with TopicProducer(settings, store=store, refresh_s=1_000) as producer:
        places = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert set(places) == set(names)
    assert records(store, names[0]) == [b"a" * 90, b"c"]
    assert records(store, names[1]) == [b"b" * 90, b"d"]


def test_in_asyncio_what_is_wrong_is_refused_as_a_whole() -> None:
    store = MemoryStore()
    topic_in(store, 2)

    async def run() -> None:
        with pytest.raises(InvalidInput, match="keys"):
            await producer.produce_async([b"a"], keys=[])
        assert await (await producer.produce_async([])) == {}

    with opened(store) as producer:
        asyncio.run(run())
    with pytest.raises(Closed):
        asyncio.run(producer.produce_async([b"late"]))
