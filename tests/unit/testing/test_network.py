"""The simulated network: delays, cuts, resets."""

from __future__ import annotations

import pytest

from opendata_buffer.broker.broker import Broker
from opendata_buffer.broker.client import ChannelClosed, ChannelRefused
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.queue import Queue
from opendata_buffer.stores.memory import MemoryStore
from tests.support.network import SimNetwork
from tests.support.simulation import Simulation

CONFIG = QueueConfig(store="memory://unused")


def test_a_cut_is_silent_and_a_death_is_not() -> None:
    simulation = Simulation(seed=1)
    network = SimNetwork(simulation, delay_s=0.25)
    broker, client = simulation.process("broker"), simulation.process("client")
    store = MemoryStore()
    queue = Queue(store, CONFIG, runtime=broker, role="broker")
    service = Broker(store, queue, broker, "ingest")
    ran: list[bool] = []

    def main() -> None:
        service.start()
        port = network.listen(broker)
        record = DiscoveryRecord(1, "id", port.address, b"s" * 32)
        port.open(service, record)
        channel = network.open_channel(client, record, 1.0)
        assert channel.receive(1.0) is not None
        network.cut(broker, client)
        channel.send(b"lost")
        assert channel.receive(5.0) is None
        with pytest.raises(ChannelClosed) as caught:
            network.open_channel(client, record, 1.0)
        assert not isinstance(caught.value, ChannelRefused)
        network.heal(broker, client)
        simulation.kill(broker)
        network.kill(broker)
        with pytest.raises(ChannelClosed):
            channel.receive(5.0)
        with pytest.raises(ChannelRefused):
            network.open_channel(client, record, 1.0)
        ran.append(True)

    simulation.run(main)
    assert ran
