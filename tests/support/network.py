"""A simulated network between simulated processes: delays, partitions, and resets.

::

    network = SimNetwork(simulation)
    port = network.listen(broker_runtime)              # opened by a broker's host
    channel = network.open_channel(client_runtime, broker_record, timeout=1.0)
    network.cut(broker_runtime, client_runtime)        # silently loses all messages
    network.kill(broker_runtime)                       # resets its connections

A cut connection is silent, as if a switch had lost its power. The connections of a killed process
are reset, as its kernel would do. A paused process accepts connections and does not answer.

A connection never loses one message and delivers the next, because TCP does not and TLS would
notice. A message that is sent during a cut is lost, and so is everything that its sender sends on
that connection afterwards.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from opendata_buffer.broker.broker import Broker, Session
from opendata_buffer.broker.client import (
    CONNECT_S,
    ChannelClosed,
    ChannelRefused,
    Connection,
    DiscoveryRecord,
)
from opendata_buffer.broker.network import new_broker_end
from opendata_buffer.broker.protocol import ProtocolError
from tests.support.simulation import SimRuntime, SimTask, Simulation


class SimNetwork:
    """Connects the processes of one simulation.

    Args:
        simulation: The simulation of the processes.
        delay_s: Seconds that a message takes.
    """

    def __init__(self, simulation: Simulation, *, delay_s: float = 0.0005) -> None:
        self.simulation = simulation
        self.delay_s = delay_s
        self._ports: dict[str, SimPort] = {}
        self._channels: list[SimChannel] = []
        self._cuts: set[frozenset[str]] = set()
        self._opened = 0

    def listen(self, process: SimRuntime) -> SimPort:
        """Open a port of a process."""
        self._opened += 1
        port = SimPort(self, process, f"{process.name}:{self._opened}")
        self._ports[port.address] = port
        return port

    def open_channel(
        self, process: SimRuntime, broker_record: DiscoveryRecord, timeout: float
    ) -> SimChannel:
        """Open a channel from a process to an announced address.

        Raises:
            ChannelRefused: No process listens there.
            ChannelClosed: The two cannot reach each other.
        """
        port = self._ports.get(broker_record.address)
        host = broker_record.address.partition(":")[0]
        if self.is_cut(process.name, host):
            process.sleep(timeout)
            raise ChannelClosed(f"{broker_record.address} cannot be reached")
        process.sleep(self.delay_s)
        if port is None:
            raise ChannelRefused(f"no process listens at {broker_record.address}")
        ours = SimChannel(self, process)
        theirs = SimChannel(self, port.process)
        ours.peer, theirs.peer = theirs, ours
        self._channels += (ours, theirs)
        port.accept(theirs)
        return ours

    def of(self, process: SimRuntime) -> ProcessNetwork:
        """Return the network as one process sees it, for its producer or worker."""
        return ProcessNetwork(self, process)

    def cut(self, one: SimRuntime, other: SimRuntime) -> None:
        """Silently lose all messages between two processes."""
        self._cuts.add(frozenset((one.name, other.name)))

    def heal(self, one: SimRuntime, other: SimRuntime) -> None:
        """Let messages pass again, except on connections that lost one during the cut.

        The next message on such a connection resets it, as the peer's kernel does with a
        connection that it has given up.
        """
        self._cuts.discard(frozenset((one.name, other.name)))

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cuts

    def kill(self, process: SimRuntime) -> None:
        """Do what the kernel does when a process dies: close its ports, reset its connections."""
        for address in [a for a, port in self._ports.items() if port.process is process]:
            del self._ports[address]
        for channel in [channel for channel in self._channels if channel.process is process]:
            channel.close()
        self._channels = [channel for channel in self._channels if not channel.closed]


class ProcessNetwork:
    """A process's network: a :class:`~opendata_buffer.broker.network.WebSocketNetwork`."""

    def __init__(self, network: SimNetwork, process: SimRuntime) -> None:
        self._network = network
        self._process = process

    def connect(self, broker_record: DiscoveryRecord) -> Connection:
        channel = self._network.open_channel(self._process, broker_record, CONNECT_S)
        return Connection(channel, broker_record, self._process)

    def listen(self) -> SimPort:
        return self._network.listen(self._process)


class SimChannel:
    """One end of a connection: a :class:`~opendata_buffer.broker.client.Channel`."""

    peer: SimChannel

    def __init__(self, network: SimNetwork, process: SimRuntime) -> None:
        self._network = network
        self.process = process
        self.closed = False
        self._lost_a_message = False
        self._receiver: SimTask | None = None
        self._inbox: deque[tuple[float, bytes]] = deque()

    def send(self, message: bytes) -> None:
        network, peer = self._network, self.peer
        if self.closed:
            raise ChannelClosed("the connection was reset")
        if network.is_cut(self.process.name, peer.process.name):
            self._lost_a_message = True
        elif self._lost_a_message:
            self.close()
            raise ChannelClosed("the connection was reset")
        else:
            arrives_at = network.simulation.now + network.delay_s
            peer._inbox.append((arrives_at, message))
            peer._wake(arrives_at)

    def receive(self, timeout: float | None) -> bytes | None:
        simulation = self._network.simulation
        deadline = None if timeout is None else self.process.monotonic() + timeout
        while True:
            if self._inbox and self._inbox[0][0] <= simulation.now:
                return self._inbox.popleft()[1]
            if self.closed and not self._inbox:
                raise ChannelClosed("the connection was reset")
            until = [arrives_at for arrives_at, _ in islice(self._inbox, 1)]
            if deadline is not None:
                left = deadline - self.process.monotonic()
                if left <= 0:
                    return None
                until.append(simulation.now + left)
            # This needs no lock, because threads run one at a time and change only at scheduling
            # points. A message wakes its receiver once, when it arrives.
            self._receiver = simulation.current
            try:
                simulation.block(min(until, default=None), "a message")
            finally:
                self._receiver = None

    def close(self) -> None:
        """Close both ends, unless a cut hides this from the other one."""
        self._end()
        if not self._network.is_cut(self.process.name, self.peer.process.name):
            self.peer._end()

    def _end(self) -> None:
        self.closed = True
        self._wake(self._network.simulation.now)

    def _wake(self, at: float) -> None:
        if self._receiver is not None:
            self._network.simulation.wake(self._receiver, at)


class SimPort:
    """A listening port: a :class:`~opendata_buffer.broker.network.WebSocketPort`."""

    certificate = ""

    def __init__(self, network: SimNetwork, process: SimRuntime, address: str) -> None:
        self._network = network
        self.process = process
        self.address = address
        self._active: tuple[Broker, DiscoveryRecord] | None = None
        self._clients: list[SimChannel] = []

    def open(self, broker: Broker, broker_record: DiscoveryRecord) -> None:
        self._active = (broker, broker_record)

    def shut(self) -> None:
        self._active = None
        clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def close(self) -> None:
        self.shut()
        self._network._ports.pop(self.address, None)

    def accept(self, channel: SimChannel) -> None:
        """Serve a client that has connected."""
        active = self._active
        if active is None:
            channel.close()
            return
        self._clients.append(channel)
        self.process.spawn(lambda: self._serve(channel, *active), f"{self.address} client")

    def _serve(self, channel: SimChannel, broker: Broker, broker_record: DiscoveryRecord) -> None:
        end = new_broker_end(broker, broker_record)
        order = self.process.condition()

        def send(body: dict[str, object]) -> None:
            with order:
                try:
                    channel.send(end.encode(body))
                except ChannelClosed:
                    channel.close()

        session = Session(broker, end, send)
        try:
            channel.send(end.hello())
            prove = channel.receive(2.0)
            if prove is not None:
                session.admit(prove)
                while (message := channel.receive(None)) is not None:
                    session.received(message)
        except (ChannelClosed, ProtocolError):
            pass
        finally:
            session.close()
            channel.close()
