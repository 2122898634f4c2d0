"""How the broker's cost grows with its clients: sessions and their messages, without a network."""

from __future__ import annotations

import time

import pytest

from opendata_buffer.broker import protocol
from opendata_buffer.broker.broker import Broker
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from tests.support.faults import HarshPlan, HarshStore
from tests.unit.broker.local import RUNTIME, Client, eventually

CONFIG = ProducerConfig(store="memory://scale")
ROUNDS = 3
PATIENT_MS = 600_000
"""How long a request holds here: on a busy machine two seconds pass before all are asked."""

AT_ONCE = 2_000
"""As many ask within a few writes of the broker; not all ten thousand at one moment."""


def asked(count: int) -> tuple[float, int]:
    """Milliseconds of processor time for each append, and compare-and-swaps of all of them."""
    # With a store that takes its time the requests of many pile up, as they do in production.
    store = HarshStore(MemoryStore(), RUNTIME, HarshPlan(cas_ms=30))
    queue = Queue(store, CONFIG, runtime=RUNTIME, role="broker")
    broker = Broker(store, queue, RUNTIME, "ingest")
    clients = [Client(broker) for _ in range(count)]
    broker.start()
    reader = Queue(store, CONFIG, runtime=RUNTIME, role="consumer")
    epoch = reader.claim_epoch(None).epoch
    began = time.process_time()
    for number in range(1, ROUNDS + 1):
        for first in range(0, count, AT_ONCE):
            some = clients[first : first + AT_ONCE]
            for place, client in enumerate(some, first):
                client.clock = broker.clock()
                client.ask(f"{place:06}-{number}.batch", valid_ms=PATIENT_MS)
            eventually(lambda: all(len(each.answers) == number for each in some), 600)  # noqa: B023
        manifest = reader.read() or Manifest.empty()
        assert manifest.next_sequence == count * number
        # As with a consumer: the manifest's own length is another cost.
        reader.dequeue(manifest.next_sequence - 1, epoch)
    cost = time.process_time() - began
    broker.stop(10)
    answers = [answer for client in clients for answer in client.answers]
    assert sorted(each["sequence"] for each in answers) == list(range(count * ROUNDS))
    return 1000 * cost / (count * ROUNDS), broker.commits


@pytest.mark.slow
def test_ten_thousand_clients_cost_ten_thousand_times_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "VALID_MS", PATIENT_MS)
    found = {count: asked(count) for count in (100, 1_000, 10_000)}
    for count, (each_ms, commits) in found.items():
        print(f"{count} clients: {each_ms:.3f} ms of CPU for each append, {commits} writes")
    # No cost that grows faster than the number of clients; room for a machine that is busy.
    assert found[10_000][0] < 4 * found[100][0]
    # Many share one write.
    assert found[10_000][1] < ROUNDS * 10_000 / 20
