"""What a client's messages ask of the broker, and what it may not ask."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer.broker.broker import Service
from opendata_buffer.broker.dispatcher import Dispatcher
from opendata_buffer.broker.secure_channel import ProtocolError
from opendata_buffer.broker.server import MAX_OPEN_REQUESTS
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import CONFIG, eventually, queued
from tests.unit.broker.wired import Client, made


def test_a_client_with_too_many_open_requests_is_sent_away() -> None:
    service = made(MemoryStore())
    client = Client(service)
    for number in range(MAX_OPEN_REQUESTS):
        client.ask(f"{number}")
    with pytest.raises(ProtocolError, match="unanswered requests"):
        client.ask("more")


def test_what_is_not_known_is_refused() -> None:
    client = Client(made(MemoryStore()))
    with pytest.raises(ProtocolError, match="'delete', which is not known"):
        client.send({"op": "delete"})


def test_while_a_client_has_the_floor_nothing_is_written_and_behind_it_what_waited_is() -> None:
    store = MemoryStore()
    service = made(store, SystemRuntime())
    guest, client = Client(service), Client(service)
    guest.send({"op": "floor", "n": 1})
    client.ask("a")
    service.start()
    assert guest.answered() == [{"op": "given", "n": 1}]
    # The broker's thread waits for the guest: nothing can have been written.
    assert queued(store) == []
    assert client.answers == []
    guest.send({"op": "over"})
    assert client.answered()[0]["op"] == "done"
    assert queued(store) == ["ingest/a"]
    service.stop(5)


def test_between_two_guests_the_broker_writes_what_waits_without_losing_a_race() -> None:
    store = MemoryStore()
    service = made(store, SystemRuntime())
    first, second, client = (Client(service) for _ in range(3))
    client.ask("a")
    service.start()
    client.answered()
    first.send({"op": "floor", "n": 1})
    first.answered()
    second.send({"op": "floor", "n": 1})
    client.clock = service.clock()
    client.ask("b")
    guest = Queue(store, CONFIG, runtime=SystemRuntime(), role="guest")
    guest.append([NewEntry("ingest/guest")])
    first.send({"op": "over"})
    second.answered()
    assert queued(store) == ["ingest/a", "ingest/guest", "ingest/b"]
    # Behind a guest the broker reads, instead of writing from memory.
    assert service.stats()["conflicts"] == 0
    service.stop(5)


def test_a_renewal_by_an_older_clock_takes_nothing_back() -> None:
    runtime = ManualRuntime()
    service = made(MemoryStore(), runtime)
    client = Client(service)
    older = client.clock
    runtime.advance(1.5)
    client.clock = service.clock()
    client.ask("a", valid_ms=2_000)
    client.send({"op": "renew", "n": [1], "clock": older})
    runtime.advance(1.0)
    service.start()
    assert client.answered()[0]["op"] == "done"
    service.stop(5)


def test_a_guest_that_is_gone_holds_up_nobody() -> None:
    store = MemoryStore()
    service = made(store, SystemRuntime())
    holder, waiting, client = Client(service), Client(service), Client(service)
    holder.send({"op": "floor", "n": 1})
    waiting.send({"op": "floor", "n": 1})
    client.ask("a")
    service.start()
    holder.answered()
    waiting.session.close()
    holder.session.close()
    assert client.answered()[0]["op"] == "done"
    assert waiting.answers == []
    assert service.stats()["floors"] == 1
    service.stop(5)


def test_a_client_that_waits_no_longer_is_told_so() -> None:
    service = made(MemoryStore(), SystemRuntime())
    client = Client(service)
    client.send({"op": "floor", "n": 1})
    client.send({"op": "over"})
    assert client.answered() == [{"op": "refused", "n": 1, "why": "over"}]
    client.send({"op": "over"})
    client.send({"op": "floor", "n": 2})
    with pytest.raises(ProtocolError, match="asks for a second pause"):
        client.send({"op": "floor", "n": 3})


def test_a_broker_that_leaves_gives_the_floor_to_nobody() -> None:
    service = made(MemoryStore(), SystemRuntime())
    first, second, third = (Client(service) for _ in range(3))
    first.send({"op": "floor", "n": 1})
    second.send({"op": "floor", "n": 1})
    service.start()
    first.answered()
    service.stop()
    eventually(lambda: second.answers)
    third.send({"op": "floor", "n": 1})
    for each in (second, third):
        assert each.answered() == [{"op": "refused", "n": 1, "why": "moved"}]


def claim(number: int) -> dict[str, Any]:
    return {
        "op": "claim",
        "n": number,
        "max": 1,
        "wait_ms": 60_000,
        "worker": "worker",
        "timeout_ms": 600_000,
        "max_deliveries": 0,
    }


def test_a_batch_is_not_handed_to_a_worker_that_is_gone() -> None:
    store, runtime = MemoryStore(), SystemRuntime()
    consumer = ConsumerConfig(store="memory://unused")
    queue = Queue(store, CONFIG, runtime=runtime, role="broker")
    service = Service(queue, runtime, "ingest", dispatcher=Dispatcher(store, consumer, runtime))
    service.start()
    gone, waiting, producer = (Client(service) for _ in range(3))
    gone.send(claim(1))
    gone.session.close()
    waiting.send(claim(1))
    producer.ask("a")
    (batch,) = waiting.answered()[0]["batches"]
    assert batch["deliveries"] == 1
    service.stop(5)
