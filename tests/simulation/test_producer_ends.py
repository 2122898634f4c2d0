"""Callers that are interrupted and stores that hang: handles have outcomes, and closes end."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

from opendata_buffer.config import ProducerConfig
from opendata_buffer.errors import FlushFailed, OpenDataBufferError, TransientStorageError
from opendata_buffer.formats.batch import Transaction, decode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.producer.batching import Durable, WriteHandle
from opendata_buffer.producer.producer import Producer
from opendata_buffer.queue import ownership
from opendata_buffer.stores.base import NotModified
from opendata_buffer.stores.memory import MemoryStore
from tests.simulation.scenario import run
from tests.support.faults import HarshPlan, HarshStore
from tests.support.simulation import SimTask, Simulation
from tests.support.tuned import tuned

SHARE = 0.5
"""Of the seeds; see conftest.py."""

CLOSE_S = 10.0


class Service:
    """One process whose callers are interrupted, over a store that now and then never answers."""

    def __init__(self, seed: int) -> None:
        self.simulation = Simulation(seed)
        self.random = self.simulation.random
        self.runtime = self.simulation.process("service")
        self.memory = MemoryStore("simulation", now_ms=self.simulation.now_ms)
        self.store = HarshStore(self.memory, self.runtime, seed=seed)
        self.config = tuned(
            ProducerConfig,
            store="memory://simulation",
            flush_interval_ms=1 + self.random.randrange(100),
            flush_size_bytes=1 + self.random.randrange(100),
            max_buffered_bytes=500 + self.random.randrange(5_000),
            upload_concurrency=1 + self.random.randrange(4),
            delivery_timeout_ms=1_000 + self.random.randrange(30_000),
            timeout_ms=1_000 + self.random.randrange(5_000),
        )
        self.grace_ms = 10_000 + self.random.randrange(100_000)
        self.handles: dict[bytes, WriteHandle] = {}
        self.seen: Counter[str] = Counter()

    def open(self) -> Producer:
        while True:
            began = self.simulation.now
            try:
                return Producer(self.config, store=self.store, runtime=self.runtime)
            except TransientStorageError:
                limit = self.config.timeout_ms / 1000
                assert self.simulation.now - began <= limit + 0.001

    def call(self, producer: Producer, name: int) -> None:
        """One caller's calls, until it is interrupted or refused."""
        try:
            for number in range(100):
                record = b"%d:%d" % (name, number)
                plain = self.random.random() < 0.7
                transaction = None if plain else Transaction(f"app{name}", number)
                self.handles[record] = producer.produce([record], transaction=transaction)
                if self.random.random() < 0.1:
                    producer.flush(self.random.uniform(0.01, 1))
                if self.random.random() < 0.3:
                    self.runtime.sleep(self.random.uniform(0, 0.1))
        except KeyboardInterrupt:
            self.seen["interrupted"] += 1
        except (TimeoutError, OpenDataBufferError):
            self.seen["refused"] += 1

    def main(self) -> None:
        # Which a producer gives to the queue that it creates.
        with patch.object(ownership, "DEFAULT_GRACE_PERIOD_MS", self.grace_ms):
            self.live()

    def live(self) -> None:
        # The first request may hang, too: then the constructor says so and is called again.
        share = self.random.choice((0.0, 0.02, 0.2))
        times = {"put_ms": 50.0, "cas_ms": 50.0, "get_ms": 20.0, "jitter": 0.5}
        self.store.plan = HarshPlan(hangs=share, put_errors=0.1, cas_lost_after=0.1, **times)
        producer = self.open()
        callers: list[SimTask] = []
        for name in range(3):
            caller = self.runtime.spawn(
                lambda name=name: self.call(producer, name),  # type: ignore[misc]
                f"caller {name}",
            )
            callers.append(caller)
            self.simulation.interrupt(caller, after=self.random.randrange(40))
        for caller in callers:
            caller.join()
        self.close(producer)
        self.check()

    def close(self, producer: Producer) -> None:
        """Close, itself interrupted now and then; the last one must end in time."""

        def close() -> None:
            try:
                producer.close(CLOSE_S)
            except KeyboardInterrupt:
                self.seen["close interrupted"] += 1
            except FlushFailed:
                self.seen["close failed"] += 1

        closer = self.runtime.spawn(close, "closer")
        self.simulation.interrupt(closer, after=self.random.randrange(4))
        closer.join()
        began = self.simulation.now
        close()
        took = self.simulation.now - began
        assert took <= CLOSE_S + 1.001, f"close took {took} s"

    def check(self) -> None:
        """Every handle has an outcome, and those that say durable say the truth."""
        places: dict[bytes, tuple[int, str]] = {}
        queued: Counter[bytes] = Counter()
        if any(info.key == "ingest/manifest" for info in self.memory.list("").objects):
            for entry in Manifest.parse(self.data("ingest/manifest")).entries():
                for record in decode_batch(self.data(entry.location)):
                    queued[record] += 1
                    places[record] = (entry.sequence, entry.location)
        assert not [record for record, count in queued.items() if count > 1]
        last: Counter[bytes] = Counter()
        for record, handle in self.handles.items():
            try:
                outcome = handle.result()
            except OpenDataBufferError as error:
                self.seen[type(error).__name__] += 1
                continue
            assert isinstance(outcome, Durable), f"{record!r} has no outcome"
            assert places[record] == (outcome.sequence, outcome.location)
            caller = record.partition(b":")[0]
            assert outcome.sequence >= last[caller], f"{record!r} was overtaken"
            last[caller] = outcome.sequence
            self.seen["durable"] += 1

    def data(self, key: str) -> bytes:
        blob = self.memory.get(key)
        assert not isinstance(blob, NotModified)
        return blob.data


def test_every_handle_has_an_outcome_after_interrupts_and_hanging_stores(seed: int) -> None:
    service = Service(seed)
    run(service.simulation, service.main)
    assert service.handles


def test_interrupts_hit_callers_and_stores_hung() -> None:
    """The scenario above would pass as well if nothing ever happened."""
    seen: Counter[str] = Counter()
    for seed in range(20):
        service = Service(seed)
        service.simulation.run(service.main)
        seen.update(service.seen)
    assert seen["interrupted"] > 20
    assert seen["close interrupted"] > 2
    assert seen["durable"] > 100
    assert seen["Closed"] + seen["TransientStorageError"] > 5
