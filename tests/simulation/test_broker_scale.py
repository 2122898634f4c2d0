"""How the broker's cost grows with its clients: sessions and their messages, without a network."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from opendata_buffer.broker import protocol as messages
from opendata_buffer.broker.broker import Service
from opendata_buffer.broker.protocol import append_body
from opendata_buffer.broker.secure_channel import BrokerEnd, ClientEnd
from opendata_buffer.broker.server import Session
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.entries import NewEntry
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.faults import FaultPlan, FaultyStore

RUNTIME = SystemRuntime()
CONFIG = ProducerConfig(store="memory://scale")
SECRET = b"s" * 32
ROUNDS = 3
PATIENT_MS = 600_000
"""How long a request holds here: on a busy machine two seconds pass before all are asked."""


class Client:
    """A client with its end of the wire; what it sends costs as much as a real one's."""

    def __init__(self, service: Service, number: int) -> None:
        self._end = ClientEnd(SECRET, 1, b"b" * 32)
        self._broker = BrokerEnd(SECRET, 1, b"a" * 32)
        self.session = Session(service, self._broker, self._take)
        self._end.finish(self.session.welcome(self._end.prove(self._broker.hello())))
        self.number = number
        self.sequences: list[int] = []

    def ask(self, service: Service, turn: int) -> None:
        entry = NewEntry(f"ingest/{self.number:06}-{turn}.batch")
        body = append_body(turn, [entry], service.clock(), PATIENT_MS, None)
        self.session.received(self._end.seal(body))

    def _take(self, body: dict[str, object]) -> None:
        answer = self._end.open(self._broker.seal(body))
        assert answer["op"] == "done", answer
        self.sequences.append(answer["sequence"])


def asked(count: int) -> tuple[float, int]:
    """Milliseconds of processor time for each append, and compare-and-swaps of all of them."""
    # With a store that takes its time the requests of many pile up, as they do in production.
    store = FaultyStore(MemoryStore(), RUNTIME, FaultPlan(cas_ms=30))
    queue = Queue(store, CONFIG, runtime=RUNTIME, role="broker")
    service = Service(queue, RUNTIME, "ingest")
    clients = [Client(service, number) for number in range(count)]
    service.start()
    reader = Queue(store, CONFIG, runtime=RUNTIME, role="consumer")
    epoch = reader.claim_epoch(None).epoch
    began = time.process_time()
    for turn in range(ROUNDS):
        for some in _portions(clients):
            for client in some:
                client.ask(service, turn)
            _await(some, turn + 1)
        manifest = reader.read() or Manifest.empty()
        assert manifest.next_sequence == count * (turn + 1)
        # As with a consumer: the manifest's own length is another cost.
        reader.dequeue(manifest.next_sequence - 1, epoch)
    cost = time.process_time() - began
    service.stop(10)
    assert sorted(each for client in clients for each in client.sequences) == list(
        range(count * ROUNDS)
    )
    return 1000 * cost / (count * ROUNDS), service.commits


def _portions(clients: list[Client]) -> Iterator[list[Client]]:
    # As many as ask within a few turns of the broker; not all ten thousand at one moment.
    for first in range(0, len(clients), 2_000):
        yield clients[first : first + 2_000]


def _await(clients: list[Client], answers: int) -> None:
    end = time.monotonic() + PATIENT_MS / 1000
    while any(len(each.sequences) < answers for each in clients):
        assert time.monotonic() < end, "not all were answered"
        time.sleep(0.005)


@pytest.mark.slow
def test_ten_thousand_clients_cost_ten_thousand_times_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "VALID_MS", PATIENT_MS)
    found = {count: asked(count) for count in (100, 1_000, 10_000)}
    for count, (each_ms, commits) in found.items():
        print(f"{count} clients: {each_ms:.3f} ms of CPU for each append, {commits} writes")
    # No cost that grows faster than the number of clients; room for a machine that is busy.
    assert found[10_000][0] < 4 * found[100][0]
    # Many share one write.
    assert found[10_000][1] < ROUNDS * 10_000 / 20
