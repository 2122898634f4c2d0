"""A broker and its clients, without a network."""

from __future__ import annotations

from typing import Any

from opendata_buffer.broker.broker import Broker, SharedQueue
from opendata_buffer.broker.protocol import VALID_MS, append_body
from opendata_buffer.broker.secure_channel import BrokerEnd, ClientEnd
from opendata_buffer.broker.server import Session
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import CONFIG, eventually


class Client:
    """A client of a broker, with a wire and no network."""

    def __init__(self, broker: Broker) -> None:
        end = BrokerEnd(b"s" * 32, 1, b"a" * 32)
        self._end = ClientEnd(b"s" * 32, 1, b"b" * 32)
        self.answers: list[dict[str, Any]] = []
        self.session = Session(broker, end, self.answers.append)
        self._end.finish(self.session.welcome(self._end.prove(end.hello())))
        self.clock = broker.clock()
        self.number = 0

    def send(self, body: dict[str, Any]) -> None:
        self.session.received(self._end.seal(body))

    def ask(self, *names: str, since: int | None = None, valid_ms: int = VALID_MS) -> None:
        self.number += 1
        some = [NewEntry(f"ingest/{name}") for name in names]
        self.send(append_body(self.number, some, self.clock, valid_ms, since))

    def answered(self, count: int = 1) -> list[dict[str, Any]]:
        eventually(lambda: len(self.answers) >= count)
        return [{k: v for k, v in each.items() if k != "clock"} for each in self.answers]


brokers: list[Broker] = []
"""That were made by the running test."""


def made(
    store: MemoryStore, runtime: ManualRuntime | None = None, config: ProducerConfig = CONFIG
) -> Broker:
    """With a clock that stands still: no request grows old while a busy machine has it wait."""
    runtime = runtime or ManualRuntime()
    queue = SharedQueue(store, config, runtime=runtime)
    brokers.append(Broker(queue, runtime, "ingest"))
    return brokers[-1]
