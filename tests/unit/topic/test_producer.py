"""Writing to a topic."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest

from opendata_buffer import TopicProducer
from opendata_buffer.errors import Closed, Drained, FlushFailed, InvalidInput, TransientStorageError
from opendata_buffer.producer.batching import Durable
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic import partitioner as partitioners
from opendata_buffer.topic.producer import STICKY_BYTES, ProducerPool
from tests.unit.topic.in_memory import NAMES, WAIT_S, Faulty, producing, records, topic_in

ENTRIES = [b"%d" % number for number in range(500)]
KEYS = [b"key %d" % (number % 23) for number in range(500)]


def opened(store: MemoryStore, **settings: Any) -> TopicProducer:
    return TopicProducer(producing(**settings), store=store, refresh_s=0.0)


def with_topic(partitions: int, store: Any = None) -> Any:
    made = store or MemoryStore()
    topic_in(made, partitions)
    return made


def by_length(keys: Any, partitions: Any) -> Any:
    """A custom partitioner of a user."""
    return pa.compute.binary_length(pa.array(keys)).to_numpy(zero_copy_only=False) % len(partitions)


@pytest.mark.parametrize(
    "partitioner", [partitioners.modulo, partitioners.rendezvous, by_length, None, "one by one"]
)
def test_records_are_in_the_partition_of_their_key_and_in_order(partitioner: Any) -> None:
    store, names = with_topic(4), NAMES[:4]
    own = partitioner if callable(partitioner) else partitioners.modulo
    wanted: dict[str, list[bytes]] = {name: [] for name in names}
    for entry, index in zip(ENTRIES, own(KEYS, names), strict=True):
        wanted[names[index]].append(entry)
    with opened(store) as producer:
        if partitioner == "one by one":
            for entry, key in zip(ENTRIES, KEYS, strict=True):
                handle = producer.send(bytearray(entry), key=key)
            handle.result(WAIT_S)
        else:
            for begin in range(0, 500, 100):
                part = slice(begin, begin + 100)
                entries, keys = pa.array(ENTRIES[part]), pa.array(KEYS[part])
                call = producer.produce(entries, keys=keys, partitioner=partitioner)
            durable = call.result(WAIT_S)
            assert all(where.location.startswith(f"{name}/") for name, where in durable.items())
    assert {name: records(store, name) for name in names} == wanted


def test_without_keys_each_call_goes_to_one_partition_round_robin() -> None:
    store = with_topic(3)
    with opened(store) as producer:
        for number in range(6):
            producer.produce([b"%d a" % number, b"%d b" % number])
    found = [records(store, name) for name in NAMES[:3]]
    assert len(set(chain(*found))) == 12
    for each in found:
        assert [record[1:] for record in each] == [b" a", b" b", b" a", b" b"]


def test_single_records_without_keys_fill_a_batch_before_the_next_partition() -> None:
    class Ahead(SystemRuntime):
        by_s = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.by_s

    store, runtime = with_topic(3), Ahead()
    config = producing(flush_interval_ms=600_000)
    with TopicProducer(config, store=store, runtime=runtime) as producer:
        for record in (b"1", b"1", b"x" * STICKY_BYTES, b"2"):
            producer.send(record)
        runtime.by_s = 600.0
        producer.send(b"3")
        producer.send(b"k" * STICKY_BYTES, key=b"k")  # not a part of that batch
        producer.send(b"3")
    found = {tuple(each[:1] for each in records(store, name)) for name in NAMES[:3]}
    assert {tuple(r for r in each if r != b"k") for each in found} == {
        (b"1", b"1", b"x"),
        (b"2",),
        (b"3", b"3"),
    }


def test_a_partition_can_be_named() -> None:
    store = with_topic(3)
    with opened(store) as producer:
        producer.produce([b"x"], partition=NAMES[2], keys=[b"any"])
        for call in (partial(producer.produce, [b"y"]), partial(producer.send, b"y")):
            with pytest.raises(InvalidInput, match=rf"'p-00009-04v2'.*{', '.join(NAMES[:3])}"):
                call(partition="p-00009-04v2")
        producer.produce([b"z"], partition="2")
        producer.send(b"one", partition="2", key=b"any")
    assert records(store, NAMES[2]) == [b"x", b"z", b"one"]


def test_a_call_with_one_invalid_part_is_refused_as_a_whole() -> None:
    store = with_topic(4)
    with opened(store, max_batch_bytes=1_000) as producer:
        keys = [b"key %d" % number for number in range(9)]
        for entries, message in (
            (pa.array([b"x"] * 8 + [None]), "null"),
            ([b"x"] * 8 + [b"y" * 2_000], "a batch has at most 1000"),
        ):
            with pytest.raises(InvalidInput, match=message):
                producer.produce(entries, keys=keys)
        with pytest.raises(InvalidInput, match="key 1 is null"):
            producer.produce([b"x", b"y"], keys=pa.array([b"k", None]))
        with pytest.raises(InvalidInput, match="partitioner modulo maps keys: give keys="):
            producer.produce([b"x"], partitioner=partitioners.modulo)
        with pytest.raises(InvalidInput):
            producer.send("text", key=b"k")
        with pytest.raises(InvalidInput, match="keys"):
            asyncio.run(producer.produce_async([b"a"], keys=[]))
        producer.flush(WAIT_S)
        assert producer.produce([]).result(0) == {}
    assert [records(store, name) for name in NAMES[:4]] == [[], [], [], []]


def test_added_partitions_are_written_and_draining_ones_are_not() -> None:
    store = MemoryStore()
    topic = topic_in(store, 2)
    with opened(store) as producer:
        producer.produce([b"1"], partition="0").result(WAIT_S)
        topic.expand(3)
        topic.drain("0")
        assert producer.description.active == NAMES[1:3]
        for number in range(4):
            producer.produce([b"%d" % number]).result(WAIT_S)
    assert [len(records(store, name)) for name in NAMES[:3]] == [1, 2, 2]


def test_a_late_call_to_a_removed_partition_is_refused() -> None:
    store = MemoryStore()
    topic = topic_in(store, 2)
    producer = TopicProducer(producing(), store=store, refresh_s=3_600.0)
    topic.drain("1")
    topic.remove_drained(0)
    handle = producer.produce([b"late"], partition="1")
    with pytest.raises(Drained, match="Nothing was written"):
        handle.result(WAIT_S)
    producer.produce([b"x"], partition="0").result(WAIT_S)
    with pytest.raises(FlushFailed, match=r"1 produce\(\) calls"):
        producer.close()
    assert [records(store, name) for name in NAMES[:2]] == [[b"x"], []]


class Gate(MemoryStore):
    """Stores the first batch of one partition, or of any, only while the gate is open."""

    def __init__(self, partition: str = "") -> None:
        super().__init__()
        self.partition = partition
        self.open = threading.Event()
        self.began = threading.Event()

    def put(self, key: str, data: bytes | memoryview) -> None:
        passes = self.partition and self.began.is_set()
        if key.startswith(self.partition) and key.endswith(".batch") and not passes:
            self.began.set()
            assert self.open.wait(WAIT_S)
        super().put(key, data)


def test_a_call_with_an_older_list_keeps_the_order_in_a_draining_partition() -> None:
    store = Gate(NAMES[1])
    topic = topic_in(store, 2)
    divides, divided = threading.Event(), threading.Event()

    def slowly(keys: Any, partitions: Any) -> Any:
        divides.set()
        assert divided.wait(WAIT_S)
        return [partitions.index(NAMES[1])] * len(keys)

    with opened(store, flush_interval_ms=1) as producer:
        producer.produce([b"first"], partition="1")
        assert store.began.wait(WAIT_S)

        def produce() -> None:
            handle = producer.produce([b"second"], keys=[b"k"], partitioner=slowly)
            handle.result(WAIT_S)

        second = threading.Thread(target=produce)
        second.start()
        assert divides.wait(WAIT_S)
        topic.drain("1")
        producer.produce([b"x"], partition="0").result(WAIT_S)
        divided.set()
        second.join(0.3)  # it would be durable by now if it had its own producer
        store.open.set()
        second.join(WAIT_S)
    assert records(store, NAMES[1]) == [b"first", b"second"]


def test_a_partition_that_cannot_be_written_does_not_delay_the_others() -> None:
    store = with_topic(2, Faulty())
    store.fail("put_if", f"{NAMES[1]}/manifest", TransientStorageError("busy"))
    producer = opened(store)
    stuck = producer.produce([b"x"], partition="1")
    assert producer.produce([b"y"], partition="0").result(WAIT_S)
    assert not stuck.done()
    with pytest.raises(TimeoutError):
        producer.flush(timeout=0.05)
    assert producer.buffered_bytes > 0
    with pytest.raises(FlushFailed):
        producer.close(timeout=0.05)
    assert records(store, NAMES[0]) == [b"y"]
    store.heal()  # its thread must not run during later tests


def test_a_topic_producer_needs_a_topic_and_refuses_a_data_prefix() -> None:
    with pytest.raises(InvalidInput, match="topic create"):
        opened(MemoryStore())
    with pytest.raises(InvalidInput, match="data_path_prefix is 'mine'"):
        opened(with_topic(1), data_path_prefix="mine")


def test_a_closed_producer_refuses_records() -> None:
    producer = opened(with_topic(2))
    for _ in range(2):
        producer.close()
    for call in (producer.send, producer.produce, lambda x: asyncio.run(producer.produce_async(x))):
        with pytest.raises(Closed):
            call([b"x"])


def test_an_async_call_waits_for_room_without_blocking_the_event_loop() -> None:
    store, names = with_topic(2, Gate()), NAMES[:2]
    keys = [b"a", b"b"]
    assert list(partitioners.modulo(keys, names)) == [0, 1]

    async def run() -> dict[str, Durable]:
        # Each partition has room for 100 bytes, and the first call takes all of it.
        full = await producer.produce_async([b"a" * 90, b"b" * 90], keys=keys)
        assert set(full.parts) == set(names)
        waiting = asyncio.create_task(producer.produce_async([b"c", b"d"], keys=keys))
        for _ in range(20):
            await asyncio.sleep(0)  # other tasks run
        assert not waiting.done()
        store.open.set()
        return await (await waiting)

    settings = producing(max_buffered_bytes=200, flush_size_bytes=1)
    with TopicProducer(settings, store=store, refresh_s=1_000) as producer:
        durable = asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert set(durable) == set(names)
    assert records(store, names[0]) == [b"a" * 90, b"c"]
    assert records(store, names[1]) == [b"b" * 90, b"d"]


class FakeProducer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.closing = threading.Event()
        self.closed = threading.Event()
        self.gate: threading.Event | None = None
        self.lost = 0
        self.slow = False

    def flush(self, timeout: float | None) -> None:
        if self.lost:
            raise FlushFailed(self.lost, f"{self.name} is down", unknown_calls=1)
        if self.slow:
            raise TimeoutError("not durable")

    def close(self, timeout: float | None = None) -> None:
        self.closing.set()
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        self.closed.set()
        self.flush(timeout)


class Factory:
    def __init__(self) -> None:
        self.made: list[FakeProducer] = []
        self.down: set[str] = set()
        self.gate: threading.Event | None = None

    def __call__(self, name: str) -> Any:
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        if name in self.down:
            raise TransientStorageError(f"{name} does not answer")
        self.made.append(FakeProducer(name))
        return self.made[-1]

    def of(self, name: str) -> FakeProducer:
        (found,) = [each for each in self.made if each.name == name]
        return found


@pytest.fixture
def factory() -> Factory:
    return Factory()


@pytest.fixture
def pool(factory: Factory) -> ProducerPool:
    return ProducerPool(factory, SystemRuntime())


def test_threads_that_use_one_partition_at_once_share_its_producer(
    pool: ProducerPool, factory: Factory
) -> None:
    factory.gate = threading.Event()
    found: list[Any] = []

    def use() -> None:
        with pool.using(["a"]) as producers:
            found.append(producers["a"])

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    factory.gate.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert found == [factory.of("a")] * 8


def test_a_producer_that_cannot_be_opened_is_an_error_and_is_opened_later(
    pool: ProducerPool, factory: Factory
) -> None:
    factory.down = {"b"}
    with pytest.raises(TransientStorageError, match="b does not answer"), pool.using(["a", "b"]):
        raise AssertionError("not reached")
    factory.down = set()
    with pool.using(["a", "b"]) as found:
        assert set(found) == {"a", "b"}
    assert len(factory.made) == 2


def test_the_producer_of_a_draining_partition_is_closed_once_it_is_unused(
    pool: ProducerPool, factory: Factory
) -> None:
    pool.open_all(["a", "b"])
    assert pool.has(["a", "b", "a"])
    with pool.using(["a", "b"]):
        pool.keep(["a"])
        with pool.using(["b"]) as found:  # a caller with an old list
            assert found == {"b": factory.of("b")}
        assert not factory.of("b").closed.wait(0.05)
    assert factory.of("b").closed.wait(WAIT_S)
    assert not factory.of("a").closed.is_set()
    with pool.using(["b"]) as found:  # the same call later opens another producer
        assert found["b"] is factory.made[-1]
    assert len(factory.made) == 3


def test_losses_of_a_removed_partition_are_raised_at_every_flush(
    pool: ProducerPool, factory: Factory
) -> None:
    with pool.using(["a", "b"]):
        factory.of("b").lost = 2
    pool.keep(["a"])
    assert factory.of("b").closed.wait(WAIT_S)
    for call in (pool.flush, pool.flush, pool.close):
        with pytest.raises(FlushFailed, match=r"2 produce\(\) calls .* b is down") as failed:
            call(None)
        assert failed.value.unknown_calls == 1
    assert factory.of("a").closed.is_set()


def closing_b(pool: ProducerPool, factory: Factory) -> threading.Event:
    """Start to close the producer of ``b``, which ends when the event is set."""
    with pool.using(["b"]):
        factory.of("b").gate = gate = threading.Event()
    pool.keep(["a"])
    assert factory.of("b").closing.wait(WAIT_S)
    return gate


def test_no_other_producer_of_a_partition_is_opened_while_one_is_closing(
    pool: ProducerPool, factory: Factory
) -> None:
    gate = closing_b(pool, factory)
    opened = threading.Thread(target=pool.open_all, args=[["b"]])
    opened.start()
    opened.join(0.1)
    assert len(factory.made) == 1, "its records could overtake those of the first one"
    gate.set()
    opened.join(WAIT_S)
    assert [each.name for each in factory.made] == ["b", "b"]


def test_a_producer_that_an_older_list_removes_is_kept_by_a_newer_list(
    pool: ProducerPool, factory: Factory
) -> None:
    with pool.using(["a", "b"]):
        pool.keep(["a"])
        pool.keep(["a", "b"])
    assert not factory.of("b").closed.wait(0.05)
    with pool.using(["b"]) as found:
        assert found == {"b": factory.of("b")}
    pool.keep(["a"])
    assert factory.of("b").closed.wait(WAIT_S)


def test_a_call_that_waits_while_the_pool_closes_opens_no_producer(
    pool: ProducerPool, factory: Factory
) -> None:
    gate = closing_b(pool, factory)
    refused = threading.Event()

    def use() -> None:
        with pytest.raises(Closed), pool.using(["b"]):
            raise AssertionError("not reached")
        refused.set()

    waiting, closing = (threading.Thread(target=each) for each in (use, lambda: pool.close(None)))
    waiting.start()
    waiting.join(0.1)
    closing.start()
    closing.join(0.1)
    gate.set()
    for thread in (waiting, closing):
        thread.join(WAIT_S)
    assert refused.is_set()
    assert len(factory.made) == 1


def test_one_key_for_a_call_chooses_the_same_partition_as_keys_do() -> None:
    store = MemoryStore()
    topic_in(store, 4)
    with TopicProducer(producing(), store=store) as producer:
        for key in ("customer-7", b"customer-8"):
            one = producer.produce([b"a", b"b"], key=key).result(WAIT_S)
            many = producer.produce([b"a", b"b"], keys=[key, key]).result(WAIT_S)
            assert list(one) == list(many)
            assert list(producer.produce(b"a", key=key).result(WAIT_S)) == list(one)
        with pytest.raises(InvalidInput, match="key and keys are both given"):
            producer.produce([b"a"], key="a", keys=["b"])
        with pytest.raises(InvalidInput, match="use metadata"):
            producer.produce([b"a"], headers={})  # type: ignore[call-arg]
        assert producer.produce(entries=[b"a"], partition=0).result(WAIT_S)


def test_the_delivery_callback_of_a_topic_gets_the_places_in_all_partitions() -> None:
    found: list[Any] = []
    store = MemoryStore()
    topic_in(store, 4)
    with TopicProducer(producing(), store=store) as producer:
        handle = producer.produce(
            [b"a"] * 50,
            keys=[str(n) for n in range(50)],
            on_delivery=lambda *given: found.append(given),
        )
        producer.flush()
        assert found == [(None, handle.result(0))]
        assert len(handle.result(0)) > 1
