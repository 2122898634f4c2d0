"""A broker and its clients in one process, over real sockets or without a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from opendata_buffer import outcomes
from opendata_buffer.broker.broker import Broker, Session, SharedQueue
from opendata_buffer.broker.client import (
    SECRET_BYTES,
    ChannelClosed,
    Connection,
    DiscoveryRecord,
    Lease,
    Lost,
)
from opendata_buffer.broker.committer import BrokerPause
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.network import Listen, WebSocketNetwork, WebSocketPort
from opendata_buffer.broker.protocol import VALID_MS, BrokerEnd, ClientEnd, append_body
from opendata_buffer.config import ProducerConfig, QueueConfig
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.queue.cas import CasStore
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import Runtime, SystemRuntime
from opendata_buffer.stores.base import PutOutcome, Store
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime

T = TypeVar("T")

RUNTIME = SystemRuntime()
CONFIG = ProducerConfig(store="memory://unused")
LOOPBACK = Listen()


def entries(*names: str) -> list[NewEntry]:
    return [NewEntry(f"ingest/{name}.batch") for name in names]


def soon(seconds: float = 60.0) -> float:
    return RUNTIME.monotonic() + seconds


def queued(store: Store) -> list[str]:
    manifest = Queue(store, CONFIG, runtime=RUNTIME, role="test").read() or Manifest.empty()
    return [entry.location for entry in manifest.entries()]


def eventually(condition: Callable[[], T | None], seconds: float = 60.0) -> T:
    """Return the first true value of the condition."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.005)
    return found


@contextmanager
def serving(
    store: Store | None = None, listen: Listen = LOOPBACK, secret: bytes = b"s" * SECRET_BYTES
) -> Iterator[tuple[Broker, DiscoveryRecord, WebSocketPort]]:
    """Serve a broker on a port that no discovery record announces."""
    store = store if store is not None else MemoryStore()
    broker = Broker(store, Queue(store, CONFIG, runtime=RUNTIME, role="broker"), RUNTIME, "ingest")
    port = WebSocketPort(listen, RUNTIME)
    broker_record = DiscoveryRecord(1, "id", port.address, secret, certificate=port.certificate)
    _stores[port.address] = store
    try:
        broker.start()
        port.open(broker, broker_record)
        yield broker, broker_record, port
    finally:
        broker.stop(5)
        port.close()


_stores: dict[str, Store] = {}
"""The stores of the brokers that serve in this process, by address."""


def connect(broker_record: DiscoveryRecord) -> Connection:
    return WebSocketNetwork(RUNTIME).connect(broker_record)


@contextmanager
def connected(broker_record: DiscoveryRecord, store: Store | None = None) -> Iterator[Connection]:
    """Connect, and prove that the client may write to the broker's store."""
    with closing(connect(broker_record)) as client:
        client.show_may_write(store or _stores[broker_record.address], CONFIG.manifest_path)
        yield client


def host(store: Store, runtime: Runtime = RUNTIME) -> LeaderElection:
    return LeaderElection(store, CONFIG, runtime, WebSocketNetwork(runtime))


@contextmanager
def hosting(store: Store, runtime: Runtime = RUNTIME) -> Iterator[LeaderElection]:
    """Run a broker that serves when the block begins."""
    election = host(store, runtime)
    try:
        eventually(lambda: election.serving)
        yield election
    finally:
        election.stop(10)


BROKER = DiscoveryRecord(1, "id", "x:1", b"s" * 32)


def announce(
    store: CasStore, *, name: str = "", address: str = "x:1", config: QueueConfig = CONFIG
) -> DiscoveryRecord:
    """Announce a broker that does not exist, replacing the announced one."""
    lease = Lease(store, config, RUNTIME)
    record = DiscoveryRecord(0, name or RUNTIME.ulid(), address, b"s" * SECRET_BYTES)
    taken = lease.take(record, lease.read())
    assert taken is not None
    return taken


class FakeConnection:
    """A connection to a broker that gives these answers in order.

    It calls ``before`` ahead of each answer, to act as the broker in between. A lost answer
    ends the connection, unless the broker ``lives``.
    """

    def __init__(
        self, *answers: Any, record: DiscoveryRecord = BROKER, before: Callable[[], object] = int
    ) -> None:
        self.broker_record = record
        self.answers = list(answers)
        self.before = before
        self.asked: list[Any] = []
        self.timeouts: list[float | None] = []
        self.lives = False
        self.is_over = False

    def append(self, some: object, *, since: int | None, begin_by: float) -> Any:
        return self._answer(since)

    def ask(self, body: dict[str, Any], timeout: float | None = None) -> Any:
        self.timeouts.append(timeout)
        return self._answer(body)

    def _answer(self, asked: object) -> Any:
        self.before()
        self.asked.append(asked)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        self.is_over = isinstance(answer, Lost) and not self.lives
        return answer

    def show_may_write(self, store: object, manifest_path: str) -> None:
        pass

    def close(self) -> None:
        self.is_over = True

    abandon = close


class NetworkOf(WebSocketNetwork):
    """Connects with a function of the test."""

    def __init__(self, connect: Callable[[DiscoveryRecord], Connection]) -> None:
        super().__init__(RUNTIME)
        self._connect = connect

    def connect(self, broker_record: DiscoveryRecord) -> Connection:
        return self._connect(broker_record)


class Direct:
    """Appends without a broker, and counts the appends."""

    tag = "DIRECT"

    def __init__(self, store: Store) -> None:
        self._queue = Queue(store, CONFIG, runtime=RUNTIME, role="producer")
        self.used = 0
        self.closed = 0

    @property
    def attempts(self) -> int:
        return self._queue.attempts

    @property
    def conflicts(self) -> int:
        return self._queue.conflicts

    def append(self, entries: Sequence[NewEntry], *, begin_by: float) -> int:
        self.used += 1
        return self._queue.append(entries)

    def close(self) -> None:
        self.closed += 1


class Hooked(MemoryStore):
    """A store that calls the hooks of a test for all keys with one suffix.

    ``on_read`` is called before each read, and ``on_write`` before each compare-and-swap. The next
    ``lost_requests`` compare-and-swaps are not applied, and the answers of the next
    ``lost_answers`` ones are lost.
    """

    def __init__(self, at: str = CONFIG.manifest_path) -> None:
        super().__init__()
        self._at = at
        self.on_read: Callable[[], object] = lambda: None
        self.on_write: Callable[[], object] = lambda: None
        self.lost_requests = 0
        self.lost_answers = 0

    def get(self, key: str, **options: Any) -> Any:
        if key.endswith(self._at):
            self.on_read()
        return super().get(key, **options)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        if not key.endswith(self._at):
            return super().put_if(key, data, condition)
        self.on_write()
        if self.lost_requests:
            self.lost_requests -= 1
            return outcomes.Unknown("injected")
        outcome = super().put_if(key, data, condition)
        if self.lost_answers:
            self.lost_answers -= 1
            return outcomes.Unknown("injected")
        return outcome


class Overtaken(MemoryStore):
    """A store in which a broker is announced, and another writer wins one race.

    It is also a network on which that broker cannot be reached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.overtaken_at = ""
        self.asked: list[str] = []

    def announce(self, config: QueueConfig) -> None:
        announce(self, address="somewhere:1", config=config)

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        if key == self.overtaken_at:
            self.overtaken_at = ""
            return outcomes.LostRace()
        return super().put_if(key, data, condition)

    def open_pause(self, store: CasStore, config: QueueConfig, runtime: Runtime) -> BrokerPause:
        return BrokerPause(store, config, runtime, network=self)

    def connect(self, broker_record: DiscoveryRecord) -> Connection:
        self.asked.append(broker_record.address)
        raise ChannelClosed("no network")


NAME = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


class Client:
    """A client that is connected to a broker without a network."""

    def __init__(self, broker: Broker, *, may_write: bool = True, nonce: bytes = b"a" * 32) -> None:
        end = BrokerEnd(b"s" * 32, 1, "", nonce, NAME)
        self.end = ClientEnd(b"s" * 32, 1, "")
        self.answers: list[dict[str, Any]] = []
        self.session = Session(broker, end, self.answers.append)
        self.session.admit(self.end.prove(end.hello()))
        self.session.may_write = may_write
        self.clock = broker.clock()
        self.number = 0

    def send(self, body: dict[str, Any]) -> None:
        self.session.received(self.end.encode(body))

    def ask(self, *names: str, since: int | None = None, valid_ms: int = VALID_MS) -> None:
        self.number += 1
        some = [NewEntry(f"ingest/{name}") for name in names]
        self.send(append_body(self.number, some, self.clock, valid_ms, since))

    def answered(self, count: int = 1) -> list[dict[str, Any]]:
        eventually(lambda: len(self.answers) >= count)
        return [{k: v for k, v in each.items() if k != "clock"} for each in self.answers]


brokers: list[Broker] = []
"""The brokers that the running test created."""


def made(
    store: MemoryStore, runtime: ManualRuntime | None = None, config: ProducerConfig = CONFIG
) -> Broker:
    """Create a broker whose clock stands still, so that no request expires on a busy machine."""
    runtime = runtime or ManualRuntime()
    queue = SharedQueue(store, config, runtime=runtime)
    brokers.append(Broker(store, queue, runtime, "ingest"))
    return brokers[-1]
