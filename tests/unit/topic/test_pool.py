"""One producer for each partition, opened when needed and closed when it drains."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from opendata_buffer.errors import Closed, FlushFailed, TransientStorageError
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.topic.producer import ProducerPool
from tests.unit.topic.world import WAIT_S


class FakeProducer:
    def __init__(self, name: str) -> None:
        self.name = name
        self.closing = threading.Event()
        self.closed = threading.Event()
        self.gate: threading.Event | None = None
        self.flushed = 0
        self.lost = 0
        self.slow = False
        self.buffered_bytes = 10

    def flush(self, timeout: float | None) -> None:
        self.flushed += 1
        if self.lost:
            raise FlushFailed(self.lost, f"{self.name} is down")
        if self.slow:
            raise TimeoutError("not durable")

    def close(self, timeout: float | None = None) -> None:
        self.closing.set()
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        self.closed.set()
        if self.lost:
            raise FlushFailed(self.lost, f"{self.name} is down")


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


def test_a_producer_is_opened_once_and_kept(pool: ProducerPool, factory: Factory) -> None:
    for _ in range(3):
        with pool.using(["a", "b"]) as found:
            assert [found["a"], found["b"]] == [factory.of("a"), factory.of("b")]
    assert len(factory.made) == 2
    assert pool.buffered_bytes == 20


def test_threads_that_want_one_partition_at_once_share_its_producer(
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


def test_one_that_cannot_be_opened_is_an_error_and_tried_again(
    pool: ProducerPool, factory: Factory
) -> None:
    factory.down = {"b"}
    with pytest.raises(TransientStorageError, match="b does not answer"), pool.using(["a", "b"]):
        raise AssertionError("not reached")
    factory.down = set()
    with pool.using(["a", "b"]) as found:
        assert set(found) == {"a", "b"}
    assert len(factory.made) == 2


def test_a_partition_that_drains_loses_its_producer_once_nobody_uses_it(
    pool: ProducerPool, factory: Factory
) -> None:
    with pool.using(["a", "b"]):
        pool.keep(["a"])
        assert not factory.of("b").closed.wait(0.05)
    assert factory.of("b").closed.wait(WAIT_S)
    assert not factory.of("a").closed.is_set()
    with pool.using(["b"]) as found:  # a caller with an old list: another one
        assert found["b"] is factory.made[-1]
    assert len(factory.made) == 3


def test_what_a_partition_lost_that_has_left_is_told_at_every_flush(
    pool: ProducerPool, factory: Factory
) -> None:
    with pool.using(["a", "b"]):
        factory.of("b").lost = 2
    pool.keep(["a"])
    assert factory.of("b").closed.wait(WAIT_S)
    for call in (pool.flush, pool.flush, pool.close):
        with pytest.raises(FlushFailed, match=r"2 produce\(\) calls .* b is down"):
            call(None)
    assert factory.of("a").closed.is_set()


def test_losses_of_several_partitions_are_added_up(pool: ProducerPool, factory: Factory) -> None:
    with pool.using(["a", "b", "c"]):
        factory.of("a").lost, factory.of("c").lost = 1, 4
        factory.of("b").slow = True
    with pytest.raises(FlushFailed, match=r"5 produce\(\) calls"):
        pool.flush(1)
    assert factory.of("b").flushed == 1
    factory.of("a").lost = factory.of("c").lost = 0
    with pytest.raises(TimeoutError):
        pool.flush(1)


def test_what_is_opened_ahead_is_there_when_it_is_used(
    pool: ProducerPool, factory: Factory
) -> None:
    assert pool.has([])
    assert not pool.has(["a", "b"])
    pool.open_all(["a", "b"])
    assert pool.has(["a", "b", "a"])
    with pool.using(["b"]) as found:
        assert found == {"b": factory.of("b")}
    assert len(factory.made) == 2


def test_a_closed_pool_opens_nothing(pool: ProducerPool, factory: Factory) -> None:
    with pool.using(["a"]):
        pass
    pool.close(None)
    pool.close(None)
    assert factory.of("a").closed.is_set()
    with pytest.raises(Closed), pool.using(["a"]):
        raise AssertionError("not reached")


def test_a_caller_with_an_old_list_gets_the_producer_that_is_about_to_leave(
    pool: ProducerPool, factory: Factory
) -> None:
    with pool.using(["b"]):
        pool.keep(["a"])
        with pool.using(["b"]) as found:
            assert found == {"b": factory.of("b")}
        assert not factory.of("b").closed.is_set()
    assert factory.of("b").closed.wait(WAIT_S)


def test_no_other_producer_of_a_partition_is_opened_while_one_is_closing(
    pool: ProducerPool, factory: Factory
) -> None:
    with pool.using(["b"]):
        factory.of("b").gate = gate = threading.Event()
    pool.keep(["a"])
    assert factory.of("b").closing.wait(WAIT_S)
    opened = threading.Thread(target=pool.open_all, args=[["b"]])
    opened.start()
    opened.join(0.1)
    assert len(factory.made) == 1, "its records could overtake those of the first one"
    gate.set()
    opened.join(WAIT_S)
    assert [each.name for each in factory.made] == ["b", "b"]


def test_a_producer_that_an_old_list_sent_away_stays_where_a_newer_list_has_it(
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


def test_nothing_is_opened_behind_the_end_by_who_waited_for_it(
    pool: ProducerPool, factory: Factory
) -> None:
    with pool.using(["b"]):
        factory.of("b").gate = gate = threading.Event()
    pool.keep(["a"])
    assert factory.of("b").closing.wait(WAIT_S)
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
