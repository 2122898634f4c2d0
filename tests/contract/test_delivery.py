"""The simulation's delivery scenario in real time, on a real S3 server.

Each producer and each consumer has a proxy of its own in front of the server, which loses some
requests and some answers, and from some request on everything: for the store that process is dead,
whatever it still tries, and another one takes its place. Consumers also take over from one that
is alive. The seed says when what is lost; threads and server add an order of their own, so a seed
does not repeat a run.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    ProducerConfig,
    StoreOptions,
)
from opendata_buffer.consumer.consumer import Consumer
from opendata_buffer.consumer.isolation import TransactionFilter
from opendata_buffer.errors import (
    CommitStateUnknown,
    Conflict,
    DataLoss,
    Fenced,
    FlushFailed,
    OpenDataBufferError,
    PoisonBatch,
    StorageError,
)
from opendata_buffer.formats.batch import Transaction
from opendata_buffer.producer.producer import Producer
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.stores.probe import SAFE
from opendata_buffer.stores.s3 import S3Store
from tests.http_scripts import Asked, FaultProxy, Reply
from tests.simulation.conftest import seeds
from tests.support.model import Record, Sink

pytestmark = pytest.mark.slow

LIMIT_S = 300.0
"""How long anything may take before the test gives up."""

GRACE_MS = 3_000
URL = "s3://bucket/delivery"
PRODUCING = ProducerConfig(
    store=URL,
    broker="off",
    flush_interval_ms=2,
    store_options=StoreOptions(timeout_ms=5_000),
)
CONSUMING = ConsumerConfig(
    create_if_missing=True,
    store=URL,
    store_options=StoreOptions(timeout_ms=5_000),
    gc=GarbageCollectorConfig(interval_ms=300, grace_period_ms=GRACE_MS),
)
TROUBLE = (StorageError, Conflict, CommitStateUnknown, FlushFailed)


class Node(FaultProxy):
    """One process's way to the store, which knows nothing more after so many requests.

    The last one is carried out or not.
    """

    def __init__(
        self, name: str, target: str, root: str, dice: random.Random, requests: int
    ) -> None:
        super().__init__(target)
        self.name = name
        self.gone = threading.Event()
        """It is dead, has ended, or shall be replaced."""
        self.wake = threading.Event()
        """It is dead, or what it waits for has come."""
        self.dead = False
        self.healed = False
        self.lost = 0
        self._dice = dice
        self._until_loss = dice.randint(4, 30)
        self._left = requests
        self._under_way = 0
        self._lock = threading.Lock()
        self.store = S3Store("bucket", root, StoreOptions(endpoint_url=self.url, max_attempts=2))
        # Or each of them tries the server's conditions first.
        SAFE.add(f"{self.store._endpoint()}/bucket")

    def heal(self) -> None:
        """Lose nothing more: whatever still tries to reach the store comes to its end."""
        self.healed = True

    def answer(self, asked: Asked) -> Reply:
        if self.healed:
            return self.passed_on(asked)
        with self._lock:
            self._left -= 1
            if self._left < 0:
                return Reply(0)
            last = self._left == 0
            self._until_loss -= 1
            loses = last or self._until_loss == 0
            if loses:
                self.lost += 1
                self._until_loss = self._dice.randint(4, 30)
                if self.lost % 2:
                    return self._ended(Reply(0)) if last else Reply(0)
            self._under_way += 1
        reply = self.passed_on(asked)
        with self._lock:
            self._under_way -= 1
            return self._ended(Reply(0) if loses else reply)

    def _ended(self, reply: Reply) -> Reply:
        # What was on its way at that moment is carried out before the next one begins: of two
        # that write one transaction at the same time a reader might take both for one.
        if self._left <= 0 and not self._under_way:
            self.dead = True
            self.gone.set()
            self.wake.set()
        return reply


class Writer:
    """What a producer writes over all its lives: transactions of two records, or calls.

    One that ``repeats`` writes again what the life before it has no answer about.
    """

    CALLS = 10
    SIZE = 2

    def __init__(self, name: str, *, repeats: bool) -> None:
        self.name = name
        self.repeats = repeats
        self.next = 0

    @property
    def done(self) -> bool:
        return self.next >= self.CALLS

    def records(self, number: int) -> list[Record]:
        return [Record(self.name, number * self.SIZE + each) for each in range(self.SIZE)]


class World:
    """A queue on a server, its writers, and the system that its consumer writes to."""

    def __init__(self, endpoint: str, root: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.writers = [Writer("a", repeats=True), Writer("b", repeats=True)]
        self.writers.append(Writer("plain", repeats=False))
        self.sink = Sink()
        self.durable: dict[Record, str] = {}
        self.skipped: set[str] = set()
        self.changed = threading.Condition()
        """Guards what the nodes share; told of each change."""
        self.over = False
        self.nodes: list[Node] = []
        self.fenced = 0
        self.errors: list[BaseException] = []
        self.direct = S3Store("bucket", root, StoreOptions(endpoint_url=endpoint))
        self._endpoint = endpoint
        self._root = root
        self._threads: list[threading.Thread] = []

    def spawn(self, body: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                body()
            except BaseException as error:
                with self.changed:
                    self.errors.append(error)
                    self.changed.notify_all()

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait, with the lock, until it is so or anything went wrong."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition() or bool(self.errors), LIMIT_S)
        if self.errors:
            raise self.errors[0]

    def supervise(
        self,
        name: str,
        live: Callable[[Node], None],
        done: Callable[[], bool],
        requests: tuple[int, int],
    ) -> None:
        """Start another life whenever the last one is gone, until all is done."""

        def lives() -> None:
            while not done() and not self.errors:
                with self.changed:
                    most = self.dice.randint(*requests)
                    node = Node(name, self._endpoint, self._root, self.dice, most)
                    self.nodes.append(node)

                def life(node: Node = node) -> None:
                    try:
                        with node.running(), suppress(*TROUBLE):
                            live(node)
                    finally:
                        node.gone.set()

                self.spawn(life)
                assert node.gone.wait(LIMIT_S)

        self.spawn(lives)

    def lives_of(self, name: str) -> int:
        return sum(node.name == name for node in self.nodes)

    # Writers.

    def produce(self, writer: Writer, node: Node) -> None:
        claim_for_writing(node.store, PRODUCING, grace_ms=GRACE_MS)
        producer = Producer(PRODUCING, store=node.store)
        try:
            while not writer.done:
                number = writer.next
                if not writer.repeats:
                    writer.next += 1  # what is never heard of counts as produced
                records = writer.records(number)
                node.wake.clear()
                if node.dead:  # before or after the call above, and nothing would wake it
                    return
                handle = producer.produce(
                    [each.encode() for each in records],
                    transaction=Transaction(writer.name, number) if writer.repeats else None,
                )
                handle.add_done_callback(lambda _: node.wake.set())
                assert node.wake.wait(LIMIT_S)
                if not handle.done():
                    return  # it died
                durable = handle.result()
                with self.changed:
                    self.durable |= dict.fromkeys(records, durable.location)
                    # The next life may have begun.
                    writer.next = max(writer.next, number + 1)
                    self.changed.notify_all()
        finally:
            with suppress(*TROUBLE):
                producer.close(0 if node.dead else None)

    # Readers.

    def consume(self, node: Node) -> None:
        with self.changed:
            position, state = self.sink.position, self.sink.state
            batches = self.dice.randint(4, 12)
        rule = TransactionFilter("ingest")
        if state is not None:
            rule = TransactionFilter.from_json(state, "ingest")
        try:
            consumer = Consumer(CONSUMING, position, store=node.store)
        except DataLoss:
            assert self.sink.position != position, "the one before has not acknowledged since"
            return
        fetch = consumer.fetch_handle()

        def write(sequence: int, records: list[Record]) -> bool:
            nonlocal position
            with self.changed:
                if self.over:
                    return False  # what comes from the dead after the end is not looked at
                written = self.sink.write(position, sequence, records, rule.to_json())
                self.changed.notify_all()
            position = sequence
            return written

        try:
            while not self.over and not node.dead:
                found = consumer.next_descriptors(4)
                for each in found:
                    try:
                        batch = fetch.fetch(each)
                    except PoisonBatch:
                        # One that nobody was told of: it came so late that the collector had been
                        # there, and its producer uploads it again.
                        consumer.skip(each.sequence)
                        rule.skip(each.sequence, each.location)
                        if not write(each.sequence, []):
                            return
                        self.skipped.add(each.location)
                        continue
                    passed = rule.offer(each.sequence, each.location)
                    records = [Record.decode(entry) for entry in batch.entries] if passed else []
                    if not write(each.sequence, records):
                        return  # overtaken
                    batches -= 1
                    if batches == 0:
                        node.gone.set()  # another one takes over while this one goes on
                if found:
                    consumer.ack_through(found[-1].sequence)
                else:
                    with self.changed:
                        self.changed.wait(0.02)
        except Fenced:
            with self.changed:
                self.fenced += 1
        finally:
            with suppress(OpenDataBufferError):
                consumer.close()

    # The end.

    def run(self) -> None:
        self.supervise("reader", self.consume, lambda: self.over, (50, 120))
        for writer in self.writers:
            self.supervise(
                writer.name,
                lambda node, writer=writer: self.produce(writer, node),  # type: ignore[misc]
                lambda writer=writer: writer.done,  # type: ignore[misc]
                # Fewer than it has to write: its first life ends before its work does.
                (14, 2 * Writer.CALLS),
            )
        try:
            self.until(lambda: all(writer.done for writer in self.writers) and self.all_read())
            self.await_collected()
        finally:
            with self.changed:
                self.over = True
                self.changed.notify_all()
            for node in self.nodes:
                node.heal()
                node.gone.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        assert not self.errors, self.errors

    def all_read(self) -> bool:
        return self.durable.keys() <= set(self.sink.records)

    def await_collected(self) -> None:
        """The consumer's collector takes what was read, and what nobody ever appended."""
        end = time.monotonic() + LIMIT_S
        while left := [
            each.key for each in self.direct.list("").objects if each.key.endswith(".batch")
        ]:
            assert time.monotonic() < end, left
            time.sleep(0.1)  # ages are by the server's clock

    def check(self) -> None:
        for writer in self.writers:
            read = [each.number for each in self.sink.records if each.producer == writer.name]
            expected = [each.number for n in range(Writer.CALLS) for each in writer.records(n)]
            if writer.repeats:
                assert read == expected, writer.name
            assert read == sorted(set(read)), "once, and in order"
            durable = {each.number for each in self.durable if each.producer == writer.name}
            assert durable <= set(read)
        assert not self.skipped & set(self.durable.values())


@pytest.mark.parametrize("seed", seeds(0.01, default=1))
def test_what_is_durable_arrives_once_and_in_order_and_nothing_is_left(
    real_server: Callable[[str], str], tmp_path: Path, seed: int
) -> None:
    world = World(real_server("versitygw"), f"{tmp_path.name}-{seed}", seed)
    world.run()
    world.check()
    assert len(world.durable) >= 2 * Writer.CALLS * Writer.SIZE
    assert world.lives_of("reader") >= 2
    assert all(world.lives_of(writer.name) >= 2 for writer in world.writers)
