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


class World:
    def __init__(self) -> None:
        self.simulation = Simulation(seed=1)
        self.network = SimNetwork(self.simulation, delay_s=0.25)
        self.broker = self.simulation.process("broker")
        self.client = self.simulation.process("client")
        self.ran = False

    def listen(self) -> DiscoveryRecord:
        queue = Queue(MemoryStore(), CONFIG, runtime=self.broker, role="broker")
        self.serving_broker = Broker(queue, self.broker, "ingest")
        self.serving_broker.start()
        port = self.network.listen(self.broker)
        broker_record = DiscoveryRecord(1, "id", port.address, b"s" * 32)
        port.open(self.serving_broker, broker_record)
        return broker_record

    def run(self, main) -> None:  # type: ignore[no-untyped-def]
        def body() -> None:
            main()
            self.ran = True

        self.simulation.run(body)
        assert self.ran


def test_a_cut_is_silent_and_a_death_is_not() -> None:
    world = World()

    def main() -> None:
        broker_record = world.listen()
        channel = world.network.dial(world.client, broker_record, 1.0)
        assert channel.receive(1.0) is not None
        world.network.cut(world.broker, world.client)
        channel.send(b"lost")
        assert channel.receive(5.0) is None
        with pytest.raises(ChannelClosed) as caught:
            world.network.dial(world.client, broker_record, 1.0)
        assert not isinstance(caught.value, ChannelRefused)
        world.network.heal(world.broker, world.client)
        world.simulation.kill(world.broker)
        world.network.kill(world.broker)
        with pytest.raises(ChannelClosed):
            channel.receive(5.0)
        with pytest.raises(ChannelRefused):
            world.network.dial(world.client, broker_record, 1.0)

    world.run(main)
