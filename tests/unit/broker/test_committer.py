"""Appends through a broker or directly, for all producers of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from opendata_buffer.assembly import open_committer
from opendata_buffer.broker.client import (
    ChannelClosed,
    Connection,
    DiscoveryRecord,
    Lease,
    Lost,
    Refused,
)
from opendata_buffer.broker.committer import SEARCH_S, BrokeredCommitter
from opendata_buffer.errors import (
    CommitStateUnknown,
    OpenDataBufferError,
    PermanentStorageError,
    QueueFull,
    TransientStorageError,
)
from opendata_buffer.producer.committer import Committer
from opendata_buffer.producer.group_commit import GroupCommitter
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, SystemRuntime, Task
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import (
    BROKER,
    CONFIG,
    RUNTIME,
    Direct,
    FakeConnection,
    Hooked,
    NetworkOf,
    announce,
    connect,
    entries,
    eventually,
    queued,
    soon,
)


def committer(  # type: ignore[no-untyped-def]
    store: MemoryStore, direct: Direct, connecting=None, runtime: Runtime = RUNTIME
) -> BrokeredCommitter:
    network = NetworkOf(connecting or connect)
    made = BrokeredCommitter(store, CONFIG, runtime, None, network, lambda: direct)
    assert made.join()
    return made


def test_a_process_without_a_broker_searches_once_and_appends_directly() -> None:
    store, looks = Hooked("_broker.json"), list[None]()
    store.on_read = lambda: looks.append(None)
    direct = Direct(store)
    ours = committer(store, direct)
    for number in range(5):
        assert ours.append(entries(str(number)), begin_by=soon()) == number
    assert direct.used == 5
    assert len(looks) == 1
    ours.close()
    assert direct.closed == 1


def test_a_process_that_meets_another_writer_searches_for_a_broker_again() -> None:
    store, looks = Hooked("_broker.json"), list[None]()
    store.on_read = lambda: looks.append(None)
    direct = Direct(store)
    ours = committer(store, direct)
    ours.append(entries("a"), begin_by=soon())
    Queue(store, CONFIG, runtime=RUNTIME, role="other").append(entries("other"))
    ours.append(entries("b"), begin_by=soon())
    assert direct.conflicts == 1
    ours.append(entries("c"), begin_by=soon())
    assert len(looks) == 2


# The clock moves only when a thread sleeps, so no machine is too slow for a deadline.
CLOCK = ManualRuntime()


def later(seconds: float = 60.0) -> float:
    return CLOCK.monotonic() + seconds


def scripted(
    store: MemoryStore, *connections: FakeConnection, same: bool = False
) -> tuple[BrokeredCommitter, Direct]:
    """Connect to another broker each time, announced by the time the previous one is lost."""
    announce(store, name=BROKER.id)
    left = list(connections)
    for each in connections[:-1]:
        before = each.before

        def succeed(before: Callable[[], None] = before) -> None:
            before()
            if not same:
                announce(store)

        each.before = succeed

    def connecting(broker_record: DiscoveryRecord) -> Connection:
        if not left:
            raise ChannelClosed("none left")
        return left.pop(0)  # type: ignore[return-value]

    direct = Direct(store)
    return committer(store, direct, connecting, CLOCK), direct


def test_the_next_broker_looks_for_the_append_from_where_it_may_have_landed() -> None:
    first, second = FakeConnection(Lost(4, 0.0)), FakeConnection(Lost(9, 0.0))
    third = FakeConnection(5)
    ours, direct = scripted(MemoryStore(), first, second, third)
    assert ours.append(entries("a"), begin_by=later()) == 5
    assert (first.asked, second.asked, third.asked) == ([None], [4], [4])
    assert direct.used == 0


def test_a_broker_that_fell_silent_is_not_asked_again_before_it_renews_its_record() -> None:
    store = MemoryStore()
    ours, _ = scripted(store, FakeConnection(Lost(0, 0.0)), FakeConnection(7), same=True)
    # The broker accepts connections and never answers, so each attempt would cost a second.
    for number in range(3):
        assert ours.append(entries(str(number)), begin_by=later()) == number
        CLOCK.sleep(SEARCH_S)
    assert len(queued(store)) == 3
    lease = Lease(store, CONFIG, RUNTIME)
    announced = lease.read()
    assert announced is not None
    assert lease.beat(announced) is not None
    assert ours.append(entries("x"), begin_by=later()) == 7


def test_no_other_broker_is_asked_while_the_lost_one_may_still_write() -> None:
    store = MemoryStore()
    safe_at = CLOCK.monotonic() + 0.3
    ours, _ = scripted(store, FakeConnection(Lost(0, safe_at)))
    assert ours.append(entries("a"), begin_by=later()) == 0
    assert CLOCK.monotonic() >= safe_at
    assert queued(store) == ["ingest/a.batch"]


def test_the_outcome_is_unknown_if_a_consumer_may_have_taken_the_batch() -> None:
    store = MemoryStore()
    queue = Queue(store, CONFIG, runtime=RUNTIME, role="other")

    def land_and_take() -> None:
        queue.append(entries("a"))
        queue.dequeue(0, queue.claim_epoch(None).epoch)

    ours, _ = scripted(store, FakeConnection(Lost(0, 0.0), before=land_and_take))
    with pytest.raises(CommitStateUnknown, match="dequeued since"):
        ours.append(entries("a"), begin_by=later())
    assert queued(store) == []


def test_a_refused_append_is_sent_again_or_to_another_broker() -> None:
    again = FakeConnection(Refused("expired"), Refused("expired"), Refused("moved"))
    successor = FakeConnection(3)
    ours, direct = scripted(MemoryStore(), again, successor)
    assert ours.append(entries("a"), begin_by=later()) == 3
    assert again.asked == [None] * 3
    assert again.is_over
    assert direct.used == 0


@pytest.mark.parametrize(
    "error", [TransientStorageError("no answer"), QueueFull("m", 2, 1, 1, None)], ids=repr
)
def test_an_error_of_a_later_attempt_does_not_hide_that_the_first_may_have_landed(
    error: OpenDataBufferError,
) -> None:
    """Raised as it is, it would let the producer append the batch a second time."""
    store = MemoryStore()
    other = Queue(store, CONFIG, runtime=RUNTIME, role="dead broker")
    dead = FakeConnection(Lost(0, 0.0), before=lambda: other.append(entries("a")))
    ours, direct = scripted(store, dead, FakeConnection(error, Lost(0, 0.0)))
    assert ours.append(entries("a"), begin_by=later()) == 0
    assert queued(store) == ["ingest/a.batch"]
    assert direct.used == 0


def test_an_append_in_doubt_that_cannot_be_verified_is_unknown() -> None:
    refused = PermanentStorageError("forbidden")
    ours, _ = scripted(MemoryStore(), FakeConnection(Lost(0, 0.0)), FakeConnection(refused))
    with pytest.raises(CommitStateUnknown, match="forbidden"):
        ours.append(entries("a"), begin_by=later())


def test_a_broker_that_refuses_one_append_stays_connected() -> None:
    connection = FakeConnection(Refused("large"), Refused("busy"), 7)
    ours, direct = scripted(MemoryStore(), connection)
    assert ours.append(entries("a"), begin_by=later()) == 0
    # An append that no broker accepts is made directly; a busy broker is asked again.
    assert direct.used == 1
    assert ours.append(entries("b"), begin_by=later()) == 7
    assert direct.used == 1
    assert not connection.is_over


HOST = replace(CONFIG, broker="host")


def test_broker_off_never_asks_a_broker() -> None:
    ours = open_committer(MemoryStore(), replace(CONFIG, broker="off"), RUNTIME, None)
    assert isinstance(ours, GroupCommitter)
    ours.close()


class Exhausted(SystemRuntime):
    """Cannot start its first thread."""

    def __init__(self) -> None:
        self.refused = False

    def spawn(self, target: Callable[[], None], name: str) -> Task:
        if not self.refused:
            self.refused = True
            raise RuntimeError("can't start new thread")
        return super().spawn(target, name)


def test_a_producer_does_not_wait_for_an_earlier_one_that_failed_to_start() -> None:
    store, runtime = MemoryStore(), Exhausted()
    with pytest.raises(RuntimeError, match="new thread"):
        open_committer(store, HOST, runtime, None)
    made: list[Committer] = []

    def open_next() -> None:
        made.append(open_committer(store, HOST, runtime, None))

    threading.Thread(target=open_next, daemon=True).start()
    eventually(lambda: made)
    made[0].close()
