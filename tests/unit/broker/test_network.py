"""The real network: a port of this process, and connections to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from opendata_buffer.broker.broker import Service
from opendata_buffer.broker.client import Appended
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.broker.network import WebSocketNetwork, listen_for
from opendata_buffer.broker.server import Listen, own_address
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.local import LocalStore
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import CONFIG, RUNTIME, entries, soon


def test_what_is_listened_on_is_reached() -> None:
    network = WebSocketNetwork(RUNTIME, Listen())
    port = network.listen()
    service = Service(Queue(MemoryStore(), CONFIG, runtime=RUNTIME, role="x"), RUNTIME, "ingest")
    service.start()
    broker_record = DiscoveryRecord(1, "id", port.address, b"s" * 32)
    port.open(service, broker_record)
    connection = network.connect(broker_record)
    assert connection.append(entries("a"), since=None, begin_by=soon()) == Appended(0)
    connection.close()
    service.stop(5)
    port.close()


def test_a_queue_on_one_machine_is_served_there_and_a_shared_one_to_every_machine(
    tmp_path: Path,
) -> None:
    assert listen_for(MemoryStore()) == listen_for(LocalStore(tmp_path)) == Listen()
    shared: Any = Shared()
    network = WebSocketNetwork(RUNTIME, listen_for(shared))
    port = network.listen()
    # A loopback address, or 0.0.0.0, would mean another process on each machine.
    assert port.address.rpartition(":")[0] == own_address() != "0.0.0.0"
    port.close()


class Shared:
    """A store that several machines reach."""

    url = "s3://bucket/orders"
