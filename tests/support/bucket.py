"""A bucket of S3 in virtual time, and processes that use it: for counting requests and seconds.

Everything that runs is the product's own code. Only the clock, the threads and the objects are
simulated, so an hour takes a second, and each run gives the same numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset
from opendata_buffer import Consumer, Producer, TopicConsumer
from opendata_buffer.config import ConsumerConfig, ProducerConfig, QueueConfig
from opendata_buffer.consumer.loop import BatchLoop
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.internal_parts import internals
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_admin import enable_readers
from opendata_buffer.runtime import wait_for
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic
from tests.support.probing import ProbingStore
from tests.support.simulation import SimRuntime, Simulation

URL = "memory://simulation"
READER = "billing"
SPARK_DELAY_S = 0.01
"""Spark's pause between two triggers that found nothing (spark.sql.streaming.pollingDelay)."""


@dataclass
class Spent:
    """What a process has spent.

    Attributes:
        requests: Number of requests by operation.
        seconds: Time.
    """

    requests: Counter[str]
    seconds: float = 0.0

    @property
    def total(self) -> int:
        """Return the number of requests."""
        return self.requests.total()


class SimulatedBucket:
    """A bucket with a queue, or with a topic.

    Args:
        partitions: Number of the topic's partitions; 0 for a queue.
        is_log: Whether the queues are logs, with :data:`READER` as their reader.
    """

    def __init__(self, partitions: int = 0, *, is_log: bool = False) -> None:
        self.simulation = Simulation(1, max_steps=50_000_000)
        self.objects = MemoryStore("simulation", now_ms=self.simulation.now_ms)
        self.is_log = is_log
        self.prefixes: Sequence[str] = ["ingest"]
        self._partitions = partitions
        self._writer = self.simulation.process("writer")
        self._random = random.Random(7)
        self.appended_at = 0.0
        """When :meth:`append_later` has appended."""

    def run(self, main: Callable[[], None]) -> None:
        """Run a function in the simulation, next to one batch in each queue."""

        def prepared() -> None:
            self._prepare()
            main()

        self.simulation.run(prepared)

    def process(self, name: str) -> tuple[ProbingStore, SimRuntime]:
        """Start a process; return its client of the bucket, and its clock and threads."""
        runtime = self.simulation.process(name)
        return ProbingStore(self.objects, runtime), runtime

    @contextmanager
    def spent(self, store: ProbingStore) -> Iterator[Spent]:
        """Count what a block spends. The result is complete after the block."""
        began, before = self.simulation.now, store.operations.copy()
        found = Spent(Counter())
        yield found
        found.requests = store.operations - before
        found.seconds = self.simulation.now - began

    def append(self, prefix: str) -> None:
        """Append one batch, without requests that are counted."""
        location = batch_key(prefix, self._writer.ulid())
        self.objects.put(location, encode_batch([b"record"]))
        config = QueueConfig(store=URL, data_path_prefix=prefix)
        queue = Queue(self.objects, config, runtime=self._writer, role="producer")
        queue.append([NewEntry(location, (Metadata(0, self._writer.now_ms(), b""),))])
        self.appended_at = self.simulation.now

    def append_later(self, least_s: float, most_s: float) -> None:
        """Append one batch to any queue after random seconds."""

        def body() -> None:
            self._writer.sleep(self._random.uniform(least_s, most_s))
            self.append(self._random.choice(self.prefixes))

        self._writer.spawn(body, "append later")

    def produce(self) -> tuple[ProbingStore, Spent]:
        """Start a producer, and measure until its first record is durable."""
        store, runtime = self.process("producer")
        config = ProducerConfig(store=URL, broker="off")
        with self.spent(store) as first:
            producer = Producer(config, **internals(store=store, runtime=runtime))
            producer.send(b"record").result(60)
        producer.close()
        return store, first

    def consume(self) -> tuple[ProbingStore, Spent]:
        """Start a consumer, and measure until its first batch is there."""
        store, runtime = self.process("consumer")
        with self.spent(store) as first:
            consumer = Consumer(
                ConsumerConfig(store=URL), **internals(store=store, runtime=runtime)
            )
            batch = consumer.next_batch()
        assert batch is not None
        batch.ack()
        consumer.close()
        return store, first

    def wait_in_python(self, seconds: float) -> Spent:
        """Wait with a consumer that has read everything."""
        store, runtime = self.process("consumer")
        config = ConsumerConfig(store=URL, reader=READER if self.is_log else "")
        kind: type[BatchLoop] = TopicConsumer if self._partitions else Consumer
        with kind(config, **internals(store=store, runtime=runtime)) as consumer:  # type: ignore[call-arg]
            while (batch := consumer.next_batch()) is not None:
                batch.ack()
            with self.spent(store) as found:
                assert consumer.next_batch(timeout=seconds) is None
        return found

    def _prepare(self) -> None:
        config = QueueConfig(store=URL)
        if self._partitions:
            topic = Topic.create(config, self._partitions, store=self.objects, runtime=self._writer)
            self.prefixes = topic.description.names
        for prefix in self.prefixes:
            config = QueueConfig(store=URL, data_path_prefix=prefix)
            # Like any process that reaches this place: it probes the store, and notes that.
            store, _ = self.process("creator")
            claim = claim_for_writing(store, config, runtime=self._writer)
            self.append(prefix)
            if self.is_log:
                enable_readers(self.objects, config, claim, self._writer)


class SimulatedQuery:
    """A query with Spark's default trigger, which calls the source in a loop.

    Args:
        bucket: The bucket.
        offset: Where the query starts; None for a new one.
        **options: Options of the source.
    """

    def __init__(
        self, bucket: SimulatedBucket, offset: SourceOffset | None = None, **options: str
    ) -> None:
        self.store, self._runtime = bucket.process("query")
        self._bucket = bucket
        reader = {"reader": READER} if bucket.is_log else {}
        given = SourceOptions.from_spark({"path": "/queue", **reader, **options})
        self.stream = MicroBatchStream(given, self.store, self._runtime)
        self.offset = offset
        self.found_at = 0.0
        """When a trigger knew the end of the last micro-batch."""

    def trigger(self) -> bool:
        """Run one trigger; return whether it had a micro-batch."""
        end = self.stream.latest_offset(self.offset)
        self.stream.report()
        if end == self.offset:
            self._runtime.sleep(SPARK_DELAY_S)
            return False
        self.found_at = self._bucket.simulation.now
        if self.offset is not None:
            self.stream.commit(self.offset)
        self.stream.plan_input_partitions(self.offset, end)
        self.offset = end
        return True

    def drain(self) -> None:
        """Read what there is."""
        while self.trigger():
            pass

    def idle(self, seconds: float) -> Spent:
        """Run triggers that find nothing, and count their requests."""
        until = self._bucket.simulation.now + seconds
        with self._bucket.spent(self.store) as found:
            while self._bucket.simulation.now < until:
                assert not self.trigger()
        return found

    def delay(self, least_s: float, most_s: float) -> float:
        """Let a batch come after random seconds.

        Args:
            least_s: The least of them.
            most_s: The most of them.

        Returns:
            The seconds from the append until a trigger has the batch.
        """
        self._bucket.append_later(least_s, most_s)
        while not self.trigger():
            pass
        delay = self.found_at - self._bucket.appended_at
        self.drain()
        return delay


def load(producers: int, flush_interval_ms: int, seconds: float) -> tuple[Spent, int]:
    """Run producers and a consumer for some seconds, as fast as the flush interval allows.

    The size of a batch does not matter for the number of requests.

    Args:
        producers: Number of producers, each in a process of its own.
        flush_interval_ms: Their flush interval.
        seconds: How long they produce.

    Returns:
        All requests of all processes, and the number of records, of which each producer sends one
        per flush interval.
    """
    bucket = SimulatedBucket()
    stores: list[ProbingStore] = []
    records = 0

    def produce(store: ProbingStore, runtime: SimRuntime, ended: Callable[[], None]) -> None:
        config = ProducerConfig(store=URL, broker="off", flush_interval_ms=flush_interval_ms)
        with Producer(config, **internals(store=store, runtime=runtime)) as producer:
            for _ in range(int(seconds * 1000 / flush_interval_ms)):
                producer.send(b"record")
                runtime.sleep(flush_interval_ms / 1000)
        ended()

    def main() -> None:
        nonlocal records
        store, runtime = bucket.process("consumer")
        stores.append(store)
        condition = runtime.condition()
        left = producers

        def ended() -> None:
            nonlocal left
            with condition:
                left -= 1
                condition.notify_all()

        with Consumer(
            ConsumerConfig(store=URL), **internals(store=store, runtime=runtime)
        ) as reader:
            for number in range(producers):
                own, process = bucket.process(f"producer {number}")
                stores.append(own)

                def body(own: ProbingStore = own, process: SimRuntime = process) -> None:
                    produce(own, process, ended)

                process.spawn(body, "produce")
            while True:
                batch = reader.next_batch(timeout=1.0)
                if batch is not None:
                    records += len(batch.values)
                    batch.ack()
                elif not left:
                    break
            with condition:
                wait_for(runtime, condition, lambda: not left)

    bucket.run(main)
    total: Counter[str] = Counter()
    for store in stores:
        total += store.operations
    return Spent(total, seconds), records - 1
