"""A broker: group commit, write pauses, and its queue."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from opendata_buffer import metrics, outcomes
from opendata_buffer.broker.broker import (
    FRESH_S,
    MAX_WAITING_BYTES,
    Landed,
    Service,
    SharedQueue,
    find_earlier_attempt,
)
from opendata_buffer.broker.protocol import VALID_MS, append_body
from opendata_buffer.broker.secure_channel import ProtocolError
from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import CommitStateUnknown, Fenced
from opendata_buffer.formats.entries import Metadata, NewEntry
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Absent, IfVersion, PutOutcome
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import CONFIG, eventually, queued
from tests.unit.broker.wired import Client, made


def test_requests_that_wait_enter_with_one_write_in_the_order_they_came() -> None:
    store = MemoryStore()
    service = made(store)
    clients = [Client(service), Client(service)]
    for number in range(3):
        for who, client in enumerate(clients):
            client.ask(f"{number}-{who}")
    service.start()
    assert clients[0].answered(3)[0] == {"op": "done", "n": 1, "sequence": 0, "next": 1}
    assert clients[1].answered(3)[-1]["sequence"] == 5
    assert queued(store) == [f"ingest/{n}-{who}" for n in range(3) for who in range(2)]
    assert service.commits == 1


def test_a_request_older_than_it_holds_is_refused_and_not_appended() -> None:
    store, runtime = MemoryStore(), ManualRuntime()
    service = made(store, runtime)
    client = Client(service)
    client.ask("late", valid_ms=1_000)
    client.ask("young", valid_ms=2_000)
    runtime.advance(1.5)
    service.start()
    assert client.answered(2) == [
        {"op": "refused", "n": 1, "why": "expired"},
        {"op": "done", "n": 2, "sequence": 0, "next": 1},
    ]
    assert queued(store) == ["ingest/young"]


def test_a_request_that_grows_old_while_the_write_loses_races_is_not_written() -> None:
    runtime = ManualRuntime()

    class Slow(MemoryStore):
        """Each conditional write takes a second, and the first ones lose their races."""

        races = 2

        def put_if(self, key: str, data: bytes, condition: Any) -> Any:
            runtime.advance(1.0)
            if self.races and key == CONFIG.manifest_path:
                self.races -= 1
                Queue(self.inner, CONFIG, runtime=SystemRuntime(), role="other").append(
                    [NewEntry(f"ingest/other{self.races}")]
                )
            return super().put_if(key, data, condition)

        @property
        def inner(self) -> MemoryStore:
            other = MemoryStore.__new__(MemoryStore)
            other.__dict__ = self.__dict__
            return other

    store = Slow()
    service = made(store, runtime)
    client = Client(service)
    client.ask("a", valid_ms=1_500)
    service.start()
    assert client.answered()[0]["why"] == "expired"
    assert queued(store) == ["ingest/other1", "ingest/other0"]


def test_a_request_that_is_renewed_while_a_slow_write_is_under_way_is_written() -> None:
    runtime = ManualRuntime()
    clients: list[Client] = []

    class Slow(MemoryStore):
        """A write takes three seconds; who waits meanwhile hears the broker and holds on."""

        def put_if(self, key: str, data: bytes, condition: Any) -> Any:
            if key == CONFIG.manifest_path and not clients:
                clients.extend([Client(service), Client(service), Client(service)])
                for number, each in enumerate(clients):
                    each.ask(f"waiting{number}")
                runtime.advance(1.5)
                holds_on, forges, _ = clients
                holds_on.send({"op": "renew", "n": [1, 7], "clock": service.clock()})
                later = [runtime.monotonic() + 100, runtime.now_ms() + 100_000]
                forges.send({"op": "renew", "n": [1], "clock": later})
                runtime.advance(1.5)
            return super().put_if(key, data, condition)

    store = Slow()
    service = made(store, runtime)
    first = Client(service)
    first.ask("first")
    service.start()
    assert first.answered()[0]["op"] == "done"
    holds_on, forges, silent = clients
    assert holds_on.answered()[0]["op"] == "done"
    assert silent.answered()[0]["why"] == "expired"
    # Nobody holds on by a clock that the broker has not shown yet.
    assert forges.answered()[0]["why"] == "expired"
    assert queued(store) == ["ingest/first", "ingest/waiting0"]
    with pytest.raises(ProtocolError, match="renewal"):
        silent.send({"op": "renew", "n": "all", "clock": service.clock()})


def test_a_doubtful_request_is_looked_up_before_it_is_appended() -> None:
    store = MemoryStore()
    Queue(store, CONFIG, runtime=SystemRuntime(), role="x").append([NewEntry("ingest/a")])
    service = made(store)
    client = Client(service)
    client.ask("a", since=0)
    client.ask("b", since=0)
    service.start()
    assert [each["sequence"] for each in client.answered(2)] == [0, 1]
    assert queued(store) == ["ingest/a", "ingest/b"]


def test_a_doubtful_request_that_a_consumer_may_have_taken_is_unknown() -> None:
    store = MemoryStore()
    queue = Queue(store, CONFIG, runtime=SystemRuntime(), role="x")
    queue.append([NewEntry("ingest/a"), NewEntry("ingest/b")])
    epoch = queue.claim_epoch(None).epoch
    queue.dequeue(0, epoch)
    service = made(store)
    client = Client(service)
    client.ask("c", since=0)
    service.start()
    (answer,) = client.answered()
    assert answer["error"]["name"] == "CommitStateUnknown"
    assert answer["error"]["values"]["locations"] == ["ingest/c"]
    assert queued(store) == ["ingest/b"]


def test_a_full_queue_takes_what_fits() -> None:
    store = MemoryStore()
    config = ProducerConfig(store="memory://unused", max_manifest_bytes=150)
    service = made(store, config=config)
    client = Client(service)
    for number in range(8):
        client.ask(f"{number}")
    service.start()
    answers = client.answered(8)
    done = [each["n"] for each in answers if each["op"] == "done"]
    full = [each["error"]["name"] for each in answers if each["op"] == "failed"]
    assert done
    assert set(full) == {"QueueFull"}
    assert len(done) + len(full) == 8
    assert queued(store) == [f"ingest/{number - 1}" for number in done]


def test_what_waits_when_a_broker_leaves_is_refused_and_so_is_what_comes() -> None:
    store = MemoryStore()
    service = made(store)
    client = Client(service)
    client.ask("a")
    service.stop()
    service.start()
    client.ask("b")
    assert [each["why"] for each in client.answered(2)] == ["moved", "moved"]
    assert queued(store) == []


def test_counters_are_told_to_who_asks() -> None:
    service = made(MemoryStore())
    service.start()
    client = Client(service)
    client.ask("a", "b")
    client.answered()
    client.send({"op": "stats"})
    stats = client.answered(2)[1]
    assert (stats["clients"], stats["commits"], stats["appended"], stats["next"]) == (1, 1, 2, 2)
    json.dumps(stats)
    service.stop(5)
    client.session.close()
    client.session.close()
    assert service.sessions == 0


def test_groups_entries_clients_and_what_waits_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits: list[int] = []
    appended: list[int] = []
    monkeypatch.setattr(metrics.broker_commits, "add", commits.append)
    monkeypatch.setattr(metrics.broker_entries_appended, "add", appended.append)
    service = made(MemoryStore())
    client = Client(service)
    client.ask("a", "b")
    client.ask("c")
    assert (service.sessions, service.entries_waiting) == (1, 3)
    service.start()
    gauges = (metrics.broker_clients, metrics.broker_waiting_entries)
    assert all(id(service) in gauge._owners for gauge in gauges)
    assert [each["op"] for each in client.answered(2)] == ["done", "done"]
    assert (commits, appended) == ([1], [3])
    client.session.close()
    assert (service.sessions, service.entries_waiting) == (0, 0)
    service.stop(5)
    assert not any(id(service) in gauge._owners for gauge in gauges)


def test_an_error_that_nobody_foresaw_reaches_the_clients_and_the_service_goes_on() -> None:
    class Broken(MemoryStore):
        broken = True

        def put_if(self, key: str, data: bytes, condition: Any) -> Any:
            if self.broken and key == CONFIG.manifest_path:
                self.broken = False
                raise ZeroDivisionError("by zero")
            return super().put_if(key, data, condition)

    store = Broken()
    service = made(store)
    service.start()
    client = Client(service)
    client.ask("a")
    assert "ZeroDivisionError" in client.answered()[0]["error"]["text"]
    client.ask("b")
    assert client.answered(2)[1]["op"] == "done"


class Stalling(MemoryStore):
    """The answer to the first write of the manifest is lost, three seconds later."""

    def __init__(self, runtime: ManualRuntime, *, lands: bool) -> None:
        super().__init__()
        self._runtime = runtime
        self._lands = lands
        self.stalled = False

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        if self.stalled or not key.endswith("manifest"):
            return super().put_if(key, data, condition)
        self.stalled = True
        self._runtime.advance(3)
        if self._lands:
            super().put_if(key, data, condition)
        return outcomes.Unknown("injected")


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "not landed"])
def test_while_storage_stalls_no_client_is_told_that_the_outcome_is_unknown(lands: bool) -> None:
    """The requests became too old to be tried again; who sent them may look, and try."""
    runtime = ManualRuntime()
    store = Stalling(runtime, lands=lands)
    service = made(store, runtime)
    client = Client(service)
    client.ask("a")
    service.start()
    (first,) = client.answered(1)
    if lands:
        assert first == {"op": "done", "n": 1, "sequence": 0, "next": 1}
    else:
        assert first == {"op": "lost", "n": 1, "since": 0}
        client.clock = service.clock()
        client.ask("a", since=0)
        assert client.answered(2)[1]["sequence"] == 0
    assert queued(store) == ["ingest/a"]


def test_bytes_that_wait_are_bounded_like_entries() -> None:
    service = made(MemoryStore())
    client = Client(service)
    large = [NewEntry("ingest/large", (Metadata(0, 0, bytes(2 * 1024 * 1024)),))]
    count = MAX_WAITING_BYTES // (2 * 1024 * 1024)
    for number in range(count):
        client.send(append_body(number, large, client.clock, VALID_MS, None))
    refused = [each for each in client.answered(1) if each.get("why") == "busy"]
    assert 0 < len(refused) < count
    assert service.stats()["waiting"] == count - len(refused)


def test_one_clients_nonsense_does_no_harm_to_who_shares_its_write() -> None:
    store = MemoryStore()
    service = made(store)
    hostile, honest = Client(service), Client(service)
    hostile.number = 1
    nonsense = append_body(1, [NewEntry("ingest/x")], [0.0, -(10**400)], VALID_MS, None)
    with suppress(ProtocolError):
        hostile.send(nonsense)
    honest.ask("a")
    service.start()
    assert honest.answered()[0]["op"] == "done"
    assert queued(store) == ["ingest/a"]


def test_of_an_append_that_may_have_landed_each_client_is_told_its_own_batches() -> None:
    class Doubting(Queue):
        def append(self, entries: Any, **_: Any) -> Any:
            locations = tuple(each.location for each in entries)
            raise CommitStateUnknown(self.key, None, locations, None, "nobody can tell")

    store, runtime = MemoryStore(), ManualRuntime()
    service = Service(Doubting(store, CONFIG, runtime=runtime, role="broker"), runtime, "ingest")
    clients = [Client(service), Client(service)]
    for name, client in zip("ab", clients, strict=True):
        client.ask(name)
    service.start()
    for name, client in zip("ab", clients, strict=True):
        (answer,) = client.answered()
        assert answer["error"]["name"] == "CommitStateUnknown"
        assert answer["error"]["values"]["locations"] == [f"ingest/{name}"]
    service.stop(5)


ASKED = [NewEntry("ingest/b"), NewEntry("ingest/c")]


def manifest(*locations: str) -> Manifest:
    return Manifest.empty().append([NewEntry(each) for each in locations])


def test_it_is_found_by_its_end_when_a_consumer_took_its_beginning() -> None:
    guard = find_earlier_attempt("m", ASKED, since=0)
    taken = manifest("ingest/a", "ingest/b", "ingest/c").drop_through(1)
    assert guard(taken) == Landed(1)


def test_what_may_have_been_taken_is_unknown_and_says_what_is_known() -> None:
    guard = find_earlier_attempt("m", ASKED, since=1)
    with pytest.raises(CommitStateUnknown, match="may or may not have landed") as caught:
        guard(manifest("ingest/a", "ingest/x", "ingest/y").drop_through(1))
    assert caught.value.sequence == 1
    assert caught.value.next_sequence == 3
    assert caught.value.locations == ("ingest/b", "ingest/c")


SHARED_CONFIG = ProducerConfig(store="memory://shared")


def entry(number: int) -> NewEntry:
    return NewEntry(f"ingest/{number:06}")


class Watched(MemoryStore):
    """Notes who writes. A write of the thread that appends lasts, when told so, until ``held``."""

    def __init__(self) -> None:
        super().__init__()
        self.writers: list[str] = []
        self.reads = 0
        self.held: Callable[[], object] | None = None
        self.holds = threading.Event()

    def get(self, key: str, **options: Any) -> Any:
        self.reads += 1
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: Absent | IfVersion) -> PutOutcome:
        who = threading.current_thread().name
        held = self.held
        if held is not None and who == "appends":
            self.held, who = None, "held"
            self.holds.set()
            eventually(held)
        self.writers.append(who)
        return super().put_if(key, data, condition)


def test_two_threads_write_in_turns_and_lose_no_race() -> None:
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
            # An append is under way when this thread asks for its turn.
            store.held = lambda: len(queue._calls) > 1
            assert store.holds.wait(60)
            queue.dequeue(manifest.next_sequence - 1, epoch)
    finally:
        over.set()
        thread.join()
    assert appended == list(range(len(appended)))
    assert queue.conflicts == 0
    # Who writes all the time waits behind who came meanwhile.
    held = [number for number, who in enumerate(store.writers) if who == "held"]
    assert len(held) == 20
    assert {store.writers[number + 1] for number in held} == {threading.current_thread().name}
    # Its own manifest is in memory: what was written needs no reading.
    assert store.reads <= 3


def test_what_was_written_just_now_is_not_read_again_and_later_it_is() -> None:
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


def test_another_consumer_is_noticed_by_a_write_from_memory() -> None:
    runtime, store = ManualRuntime(), MemoryStore()
    queue = SharedQueue(store, SHARED_CONFIG, runtime=runtime)
    epoch = queue.claim_epoch(None).epoch
    queue.append([entry(0)])
    Queue(store, SHARED_CONFIG, runtime=runtime, role="consumer").claim_epoch(None)
    with pytest.raises(Fenced):
        queue.dequeue(0, epoch)
    # Who failed holds nobody up.
    assert queue.append([entry(1)]) == 1
