"""A broker and its clients, without a network."""

from __future__ import annotations

from functools import cache
from typing import Any

from opendata_buffer.broker.broker import Broker, Session, SharedQueue
from opendata_buffer.broker.protocol import VALID_MS, append_body
from opendata_buffer.broker.secure_channel import BrokerEnd, ClientEnd, KeyPair
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from tests.unit.broker.local import CONFIG, eventually


class SameKeys(KeyPair):
    """Both sides' pair in a test of thousands of clients: what they agree on is computed once."""

    agree = staticmethod(cache(KeyPair.of(b"k" * 32).agree))  # type: ignore[assignment]


KEYS = SameKeys.of(b"k" * 32)
NAME = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


class Client:
    """A client of a broker, with a wire and no network."""

    def __init__(self, broker: Broker, *, may_write: bool = True, nonce: bytes = b"a" * 32) -> None:
        end = BrokerEnd(b"s" * 32, 1, KEYS, nonce, NAME)
        self.end = ClientEnd(b"s" * 32, 1, KEYS, KEYS.share)
        self.answers: list[dict[str, Any]] = []
        self.session = Session(broker, end, self.answers.append)
        self.end.finish(self.session.welcome(self.end.prove(end.hello())))
        self.session.may_write = may_write
        self.clock = broker.clock()
        self.number = 0

    def send(self, body: dict[str, Any]) -> None:
        self.session.received(self.end.seal(body))

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
    brokers.append(Broker(store, queue, runtime, "ingest"))
    return brokers[-1]
