"""The simulated network: delays, cuts, resets."""

from __future__ import annotations

import pytest

from opendata_buffer.broker.broker import Service
from opendata_buffer.broker.client import ChannelClosed, ChannelRefused
from opendata_buffer.broker.discovery_record import DiscoveryRecord
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.manifest import NewEntry
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
        self.service = Service(queue, self.broker, "ingest")
        self.service.start()
        port = self.network.listen(self.broker)
        broker_record = DiscoveryRecord(1, "id", port.address, b"s" * 32)
        port.open(self.service, broker_record)
        return broker_record

    def run(self, main) -> None:  # type: ignore[no-untyped-def]
        def body() -> None:
            main()
            self.ran = True

        self.simulation.run(body)
        assert self.ran


def test_a_message_takes_its_delay() -> None:
    world = World()

    def main() -> None:
        channel = world.network.dial(world.client, world.listen(), 1.0)
        began = world.simulation.now
        assert channel.receive(0.2) is None
        assert channel.receive(1.0) is not None
        assert 0.2 < world.simulation.now - began < 0.3

    world.run(main)


def test_an_append_goes_there_and_its_answer_back() -> None:
    world = World()

    def main() -> None:
        connection = world.network.connect(world.client)(world.listen())
        answer = connection.append([NewEntry("ingest/a")], since=None, begin_by=10.0)
        assert getattr(answer, "sequence", None) == 0
        connection.close()

    world.run(main)


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


def test_a_port_that_is_closed_ends_its_connections() -> None:
    world = World()

    def main() -> None:
        broker_record = world.listen()
        port = world.network.listen(world.broker)
        port.open(world.service, broker_record)
        other = DiscoveryRecord(1, "id", port.address, b"s" * 32)
        channel = world.network.dial(world.client, other, 1.0)
        port.close()
        with pytest.raises(ChannelClosed):
            # Its hello may have been on its way.
            all(channel.receive(5.0) for _ in range(2))

    world.run(main)
