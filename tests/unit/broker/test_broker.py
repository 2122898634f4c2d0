"""A broker: group commit, write pauses, and its queue."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from opendata_buffer import metrics
from opendata_buffer.broker.broker import (
    FRESH_S,
    MAX_WAITING_BYTES,
    Broker,
    SharedQueue,
    find_earlier_attempt,
)
from opendata_buffer.broker.protocol import VALID_MS, ProtocolError, append_body
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import CommitStateUnknown, Fenced
from opendata_buffer.formats.manifest import Manifest, Metadata, NewEntry
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.support.tuned import tuned
from tests.unit.broker.local import CONFIG, Client, Hooked, eventually, made, queued


def test_waiting_requests_are_appended_with_one_write_in_their_order() -> None:
    store = MemoryStore()
    broker = made(store)
    clients = [Client(broker), Client(broker)]
    for number in range(3):
        for who, client in enumerate(clients):
            client.ask(f"{number}-{who}")
    broker.start()
    assert clients[0].answered(3)[0] == {"op": "done", "n": 1, "sequence": 0, "next": 1}
    assert clients[1].answered(3)[-1]["sequence"] == 5
    assert queued(store) == [f"ingest/{n}-{who}" for n in range(3) for who in range(2)]
    assert broker.commits == 1


def test_an_expired_request_is_refused_and_not_appended() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    broker = made(store, runtime)
    client = Client(broker)
    client.ask("late", valid_ms=1_000)
    client.ask("young", valid_ms=2_000)
    runtime.advance(1.5)
    broker.start()
    assert client.answered(2) == [
        {"op": "refused", "n": 1, "why": "expired"},
        {"op": "done", "n": 2, "sequence": 0, "next": 1},
    ]
    assert queued(store) == ["ingest/young"]


def test_a_request_that_expires_while_the_write_loses_races_is_not_written() -> None:
    runtime = ManualRuntime()

    store = Hooked()

    def lose_the_race() -> None:
        """Take a second for each write, and let another writer win the race."""
        runtime.advance(1.0)
        store.on_write = lambda: None
        Queue(store, CONFIG, runtime=SystemRuntime(), role="other").append(
            [NewEntry(f"ingest/other{int(runtime.monotonic())}")]
        )
        store.on_write = lose_the_race

    store.on_write = lose_the_race
    broker = made(store, runtime)
    client = Client(broker)
    client.ask("a", valid_ms=1_500)
    broker.start()
    assert client.answered()[0]["why"] == "expired"
    assert queued(store) == ["ingest/other1", "ingest/other2"]


@pytest.mark.parametrize("dequeued", [False, True])
def test_f2_a_group_has_not_landed_if_only_its_last_entry_was_appended_elsewhere(
    dequeued: bool,
) -> None:
    runtime, store = ManualRuntime(), Hooked()

    def append_the_last_elsewhere() -> None:
        """One client got no answer and found another broker. The other client waits."""
        store.on_write = lambda: None
        runtime.advance(1.5)
        other = Queue(store, CONFIG, runtime=SystemRuntime(), role="other")
        other.append([NewEntry("ingest/first"), NewEntry("ingest/cut off")])
        if dequeued:
            other.dequeue(0, other.claim_epoch(None).epoch)

    store.on_write = append_the_last_elsewhere
    broker = made(store, runtime)
    waits, cut_off = Client(broker), Client(broker)
    waits.ask("waits", valid_ms=2_000)
    cut_off.ask("cut off", valid_ms=1_000)
    broker.start()
    (answer,) = waits.answered()
    if dequeued:  # the group may have landed, and this entry may have been dequeued
        assert answer["error"]["name"] == "CommitStateUnknown"
        return
    assert (answer["op"], answer["sequence"]) == ("done", 2)
    assert cut_off.answered()[0]["why"] == "expired"
    assert queued(store) == ["ingest/first", "ingest/cut off", "ingest/waits"]


def test_an_append_that_follows_an_answer_at_once_is_in_the_next_write() -> None:
    runtime, store = ManualRuntime(), Hooked()
    broker = made(store, runtime)
    answered, waits = Client(broker), Client(broker)

    def take_60_ms() -> None:
        store.on_write = lambda: None
        waits.ask("meanwhile")
        runtime.advance(0.06)

    store.on_write = take_60_ms
    answered.ask("first")
    broker.start()
    answered.answered()
    answered.ask("second")
    assert queued(store) == ["ingest/first"], "the broker gathers requests before it writes again"
    eventually(lambda: runtime.advance(0.001) or len(queued(store)) > 1)
    assert queued(store) == ["ingest/first", "ingest/meanwhile", "ingest/second"]
    answered.answered(2)
    assert broker.commits == 2


def test_a_client_that_is_alone_does_not_wait_for_others() -> None:
    runtime, store = ManualRuntime(), Hooked()
    broker = made(store, runtime)
    client = Client(broker)
    store.on_write = lambda: runtime.advance(0.06)
    broker.start()
    for number in range(3):
        client.ask(str(number))
        client.answered(number + 1)  # although the clock stands still
    assert runtime.monotonic() - broker._since == pytest.approx(3 * 0.06)


def test_a_request_that_is_renewed_during_a_slow_write_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opendata_buffer.broker.broker.GATHER_S", 0.0)  # the clock stands still
    runtime = ManualRuntime()
    clients: list[Client] = []

    def take_three_seconds() -> None:
        store.on_write = lambda: None
        clients.extend([Client(broker), Client(broker), Client(broker)])
        for number, each in enumerate(clients):
            each.ask(f"waiting{number}")
        runtime.advance(1.5)
        holds_on, forges, _ = clients
        holds_on.send({"op": "renew", "n": [1, 7], "clock": broker.clock()})
        # An older clock does not shorten the renewal.
        holds_on.send({"op": "renew", "n": [1], "clock": holds_on.clock})
        later = [runtime.monotonic() + 100, runtime.now_ms() + 100_000]
        forges.send({"op": "renew", "n": [1], "clock": later})
        runtime.advance(1.5)

    store = Hooked()
    store.on_write = take_three_seconds
    broker = made(store, runtime)
    first = Client(broker)
    first.ask("first")
    broker.start()
    assert first.answered()[0]["op"] == "done"
    holds_on, forges, silent = clients
    assert holds_on.answered()[0]["op"] == "done"
    assert silent.answered()[0]["why"] == "expired"
    # A client cannot renew with a clock that the broker has not sent yet.
    assert forges.answered()[0]["why"] == "expired"
    assert queued(store) == ["ingest/first", "ingest/waiting0"]
    with pytest.raises(ProtocolError, match="renewal"):
        silent.send({"op": "renew", "n": "all", "clock": broker.clock()})


def test_a_request_in_doubt_is_looked_up_and_unknown_if_a_consumer_may_have_taken_it() -> None:
    store = MemoryStore()
    queue = Queue(store, CONFIG, runtime=SystemRuntime(), role="x")
    queue.append([NewEntry("ingest/a")])
    broker = made(store)
    client = Client(broker)
    client.ask("a", since=0)
    client.ask("b", since=0)
    broker.start()
    assert [each["sequence"] for each in client.answered(2)] == [0, 1]
    assert queued(store) == ["ingest/a", "ingest/b"]
    queue.dequeue(0, queue.claim_epoch(None).epoch)
    client.ask("c", since=0)
    answer = client.answered(3)[2]
    assert answer["error"]["name"] == "CommitStateUnknown"
    values = answer["error"]["values"]
    assert values["locations"] == ["ingest/c"]
    assert (values["sequence"], values["next_sequence"]) == (0, 2)
    assert queued(store) == ["ingest/b"]


def test_a_full_queue_accepts_the_requests_that_fit() -> None:
    store = MemoryStore()
    config = tuned(ProducerConfig, store="memory://unused", max_manifest_bytes=150)
    broker = made(store, config=config)
    client = Client(broker)
    for number in range(8):
        client.ask(f"{number}")
    broker.start()
    answers = client.answered(8)
    done = [each["n"] for each in answers if each["op"] == "done"]
    full = [each["error"]["name"] for each in answers if each["op"] == "failed"]
    assert done
    assert set(full) == {"QueueFull"}
    assert len(done) + len(full) == 8
    assert queued(store) == [f"ingest/{number - 1}" for number in done]


def test_a_broker_that_stops_refuses_waiting_and_new_requests() -> None:
    store = MemoryStore()
    broker = made(store)
    client = Client(broker)
    client.ask("a")
    broker.stop()
    broker.start()
    client.ask("b")
    client.send({"op": "pause", "n": 3, "writes": 1})
    assert [each["why"] for each in client.answered(3)] == ["moved"] * 3
    assert queued(store) == []


def test_metrics_count_groups_entries_clients_and_waiting_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits: list[int] = []
    appended: list[int] = []
    monkeypatch.setattr(metrics.broker_commits, "add", commits.append)
    monkeypatch.setattr(metrics.broker_entries_appended, "add", appended.append)
    broker = made(MemoryStore())
    client = Client(broker)
    client.ask("a", "b")
    client.ask("c")
    assert (broker.sessions, broker.entries_waiting) == (1, 3)
    broker.start()
    gauges = (metrics.broker_clients, metrics.broker_waiting_entries)
    assert all(id(broker) in gauge._owners for gauge in gauges)
    assert [each["op"] for each in client.answered(2)] == ["done", "done"]
    assert (commits, appended) == ([1], [3])
    client.send({"op": "stats"})
    stats = json.loads(json.dumps(client.answered(3)[2]))
    assert (stats["clients"], stats["commits"], stats["appended"], stats["next"]) == (1, 1, 3, 3)
    client.session.close()
    client.session.close()
    assert (broker.sessions, broker.entries_waiting) == (0, 0)
    broker.stop(5)
    assert not any(id(broker) in gauge._owners for gauge in gauges)


def test_an_unexpected_error_reaches_the_clients_and_the_broker_keeps_serving() -> None:
    store = Hooked()
    store.on_write = lambda: 1 / 0
    broker = made(store)
    broker.start()
    client = Client(broker)
    client.ask("a")
    assert "ZeroDivisionError" in client.answered()[0]["error"]["text"]
    store.on_write = lambda: None
    client.ask("b")
    assert client.answered(2)[1]["op"] == "done"


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "not landed"])
def test_no_client_gets_an_unknown_outcome_while_storage_stalls(lands: bool) -> None:
    """The requests are too old to be retried here; their clients may look them up and retry."""
    runtime = ManualRuntime()
    store = Hooked()
    store.lost_answers, store.lost_requests = int(lands), int(not lands)

    def stall() -> None:
        store.on_write = lambda: None
        runtime.advance(3)

    store.on_write = stall
    broker = made(store, runtime)
    client = Client(broker)
    client.ask("a")
    broker.start()
    (first,) = client.answered(1)
    if lands:
        assert first == {"op": "done", "n": 1, "sequence": 0, "next": 1}
    else:
        assert first == {"op": "lost", "n": 1, "since": 0}
        client.clock = broker.clock()
        client.ask("a", since=0)
        assert client.answered(2)[1]["sequence"] == 0
    assert queued(store) == ["ingest/a"]


def test_waiting_bytes_are_bounded_like_entries() -> None:
    broker = made(MemoryStore())
    client = Client(broker)
    large = [NewEntry("ingest/large", (Metadata(0, 0, bytes(2 * 1024 * 1024)),))]
    count = MAX_WAITING_BYTES // (2 * 1024 * 1024)
    for number in range(count):
        client.send(append_body(number, large, client.clock, VALID_MS, None))
    refused = [each for each in client.answered(1) if each.get("why") == "busy"]
    assert 0 < len(refused) < count
    assert broker.stats()["waiting"] == count - len(refused)


def test_each_client_learns_about_its_own_batches_of_an_append_that_may_have_landed() -> None:
    class Doubting(Queue):
        def append(self, entries: Any, **_: Any) -> Any:
            locations = tuple(each.location for each in entries)
            raise CommitStateUnknown(self.key, None, locations, None, "no answer")

    store, runtime = MemoryStore(), ManualRuntime()
    queue = Doubting(store, CONFIG, runtime=runtime, role="broker")
    broker = Broker(store, queue, runtime, "ingest")
    clients = [Client(broker), Client(broker)]
    for name, client in zip("ab", clients, strict=True):
        client.ask(name)
    broker.start()
    for name, client in zip("ab", clients, strict=True):
        (answer,) = client.answered()
        assert answer["error"]["name"] == "CommitStateUnknown"
        assert answer["error"]["values"]["locations"] == [f"ingest/{name}"]
    broker.stop(5)


def test_an_earlier_attempt_is_recognized_by_its_end_if_its_beginning_was_dequeued() -> None:
    a, b, c = (NewEntry(f"ingest/{name}") for name in "abc")
    queue = Queue(MemoryStore(), CONFIG, runtime=ManualRuntime(), role="broker")
    guard = find_earlier_attempt(queue, [b, c], since=0)
    assert guard(Manifest.empty().append([a, b, c]).drop_through(1)) == 1


SHARED_CONFIG = ProducerConfig(store="memory://shared")


def entry(number: int) -> NewEntry:
    return NewEntry(f"ingest/{number:06}")


class Watched(MemoryStore):
    """Notes which thread writes. Writes of the appending thread last until ``held`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[str] = []
        self.reads = 0
        self.held: Callable[[], object] | None = None
        self.holds = threading.Event()

    def get(self, key: str, **options: Any) -> Any:
        self.reads += 1
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        who = threading.current_thread().name
        held = self.held
        if held is not None and who == "appends":
            self.held, who = None, "held"
            self.holds.set()
            eventually(held)
        self.writers.append(who)
        return super().put_if(key, data, condition)


def test_two_threads_take_turns_to_write_and_lose_no_race() -> None:
    store = Watched()
    queue = SharedQueue(store, SHARED_CONFIG, runtime=ManualRuntime())
    epoch = queue.claim_epoch(None).epoch
    over = threading.Event()
    appended: list[Any] = []

    def append() -> None:
        while not over.is_set():
            appended.append(queue.append([entry(len(appended))]))

    thread = threading.Thread(target=append, name="appends")
    thread.start()
    try:
        for _ in range(20):
            before = len(appended)
            eventually(lambda before=before: len(appended) > before)  # type: ignore[misc]
            manifest = queue.read()
            assert manifest is not None
            store.holds.clear()
            # An append is under way when this thread begins its call.
            store.held = lambda: len(queue._calls) > 1
            assert store.holds.wait(60)
            queue.dequeue(manifest.next_sequence - 1, epoch)
    finally:
        over.set()
        thread.join()
    assert appended == list(range(len(appended)))
    assert queue.conflicts == 0
    # A thread that writes all the time must wait for a thread that came meanwhile.
    held = [number for number, who in enumerate(store.writers) if who == "held"]
    assert len(held) == 20
    assert {store.writers[number + 1] for number in held} == {threading.current_thread().name}
    # The manifest that it wrote is in memory, so it needs no read.
    assert store.reads <= 3


def test_a_manifest_that_was_just_written_is_read_again_only_later() -> None:
    runtime, store = ManualRuntime(), MemoryStore()
    queue = SharedQueue(store, SHARED_CONFIG, runtime=runtime)
    queue.append([entry(0)])
    Queue(store, SHARED_CONFIG, runtime=runtime, role="other").append([entry(1)])
    manifest = queue.read()
    assert manifest is not None
    assert manifest.entry_count == 1
    runtime.advance(FRESH_S)
    manifest = queue.read()
    assert manifest is not None
    assert manifest.entry_count == 2


def test_a_write_from_memory_detects_another_consumer() -> None:
    runtime, store = ManualRuntime(), MemoryStore()
    queue = SharedQueue(store, SHARED_CONFIG, runtime=runtime)
    epoch = queue.claim_epoch(None).epoch
    queue.append([entry(0)])
    Queue(store, SHARED_CONFIG, runtime=runtime, role="consumer").claim_epoch(None)
    with pytest.raises(Fenced):
        queue.dequeue(0, epoch)
    # A failed call lets the next one in.
    assert queue.append([entry(1)]) == 1
