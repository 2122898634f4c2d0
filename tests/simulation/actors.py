"""Actors that run in simulated processes: producers, consumers, and the Spark sink's driver.

An actor outlives its processes. It remembers what a real system would have stored elsewhere, such
as the position of the source or the transaction of the sink.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from buffer_sink.committer import Group, QueueCommitter, UploadedBatch, claim
from buffer_sink.options import SinkOptions
from opendata_buffer import Consumer, Producer, outcomes
from opendata_buffer.config import ConsumerConfig, ProducerConfig
from opendata_buffer.consumer.batches import ConsumedBatch
from opendata_buffer.consumer.fetch import fetch_many
from opendata_buffer.consumer.isolation import TransactionFilter
from opendata_buffer.errors import (
    CommitStateUnknown,
    DataLoss,
    Fenced,
    FlushFailed,
    ObjectNotFound,
    OpenDataBufferError,
    PoisonBatch,
    QueueFull,
    StorageError,
)
from opendata_buffer.formats.batch import Transaction, batch_key, encode_batch, later_ulid
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest, Metadata, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.producer.batching import WriteHandle
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.base import Blob
from tests.simulation.cluster import MANIFEST, PASSING, PREFIX, Cluster, Node
from tests.support.model import Record

T = TypeVar("T")

FAILURES = (*PASSING, CommitStateUnknown, FlushFailed, QueueFull)
"""Errors that a producer may raise while storage fails for a long time."""


def payload(records: list[Record]) -> bytes:
    """Return the metadata payload that the model expects for these records."""
    return f"{records[0].producer}:{records[0].number}+{len(records)}".encode()


def produce(cluster: Cluster, producer: Producer, records: list[Record]) -> WriteHandle:
    """Produce records in one call: with metadata, or by a method that takes no lock."""
    entries = [record.encode() for record in records]
    if cluster.chance(0.3):
        return producer.produce(entries, metadata=payload(records))
    cluster.model.produced_plain(records)
    if len(entries) == 1 and cluster.chance(0.5):
        return producer.send(entries[0])
    return producer.produce(entries)


def open_producer(cluster: Cluster, node: Node, config: ProducerConfig) -> Producer:
    return cluster.patiently(node, lambda: cluster.producer(node, config))


def end(cluster: Cluster, name: str, flush: Callable[[], None]) -> None:
    """Flush or close a producer, and log an error about records that were not written."""
    try:
        flush()
    except FlushFailed as error:
        cluster.log(f"{name}: {error}")


class Counting:
    """Writes ``count`` records, each at most once."""

    def __init__(self, cluster: Cluster, name: str, count: int) -> None:
        self._cluster = cluster
        self.name = name
        self._count = count
        self._next = 0

    @property
    def done(self) -> bool:
        return self._next >= self._count


class PlainProducer(Counting):
    """Produces numbered records without transactions, and never repeats one."""

    def live(self, node: Node, config: ProducerConfig) -> None:
        producer = open_producer(self._cluster, node, config)
        while not self.done:
            size = 1 + self._cluster.draw(3)
            records = [Record(self.name, self._next + n) for n in range(size)]
            # Counted before the call, because a record without an answer counts as produced.
            self._next += size
            watch(self._cluster, produce(self._cluster, producer, records), records)
            if self._cluster.chance(0.1):
                end(self._cluster, self.name, producer.flush)
            if self._cluster.chance(0.7):
                self._cluster.work(node)
        end(self._cluster, self.name, producer.close)


class TransactionalProducer:
    """Produces numbered transactions, and repeats those that it does not know to be durable."""

    SIZE = 2

    def __init__(self, cluster: Cluster, name: str, transactions: int) -> None:
        self._cluster = cluster
        self.name = name
        self._transactions = transactions
        self._confirmed = 0
        self._durable: set[int] = set()

    @property
    def done(self) -> bool:
        return self._confirmed >= self._transactions

    @property
    def records(self) -> int:
        """The number of records once all transactions are durable."""
        return self._transactions * self.SIZE

    def live(self, node: Node, config: ProducerConfig) -> None:
        """Run one process: it opens producers one after the other until everything is durable."""
        while not self.done:
            producer = open_producer(self._cluster, node, config)
            self._produce(node, producer)
            end(self._cluster, self.name, producer.close)

    def _produce(self, node: Node, producer: Producer) -> None:
        for number in range(self._confirmed, self._transactions):
            first = number * self.SIZE
            records = [Record(self.name, first + n) for n in range(self.SIZE)]
            try:
                handle = producer.produce(
                    [record.encode() for record in records],
                    metadata=payload(records),
                    transaction=Transaction(self.name, number),
                )
            except FlushFailed:
                return
            watch(self._cluster, handle, records, lambda number=number: self._settled(number))
            if self._cluster.chance(0.3):
                try:
                    handle.result()
                except FAILURES:
                    return
            self._cluster.work(node)

    def _settled(self, number: int) -> None:
        self._durable.add(number)
        while self._confirmed in self._durable:
            self._confirmed += 1
        if any(number > self._confirmed for number in self._durable):
            self._cluster.fail(f"{self.name}: {self._durable} durable without {self._confirmed}")


class SinkDriver:
    """The driver of a Spark query that writes: many uploads and one append per micro-batch.

    With ``slow_s`` each micro-batch takes that many seconds.
    """

    SIZE = 2

    def __init__(
        self, cluster: Cluster, name: str, batches: int, *, most_uploads: int = 3, slow_s: float = 0
    ) -> None:
        self._cluster = cluster
        self.name = name
        self._batches = batches
        self._most_uploads = most_uploads
        self._slow_s = slow_s
        self.refused = 0
        """Number of micro-batches that were refused because they took too long."""
        self.waited_s: list[float] = []
        """Seconds that each committed micro-batch took, by the true clock."""
        self._committed = 0

    @property
    def done(self) -> bool:
        return self._committed >= self._batches

    @property
    def records(self) -> int:
        """The number of records once all micro-batches, which differ in size, are committed."""
        return self._first(self._batches)

    def _first(self, batch: int) -> int:
        return sum(self.SIZE * (1 + n % self._most_uploads) for n in range(batch))

    def live(self, node: Node, config: ProducerConfig) -> None:
        """Run one process, which starts the query again after a failed commit."""
        options = SinkOptions(queue=config, max_write_duration_ms=int(self._cluster.write_s * 1000))
        committer = QueueCommitter(node.store, options, node.runtime)
        while not self.done:
            try:
                self._micro_batch(node, config, committer, self._committed)
            except FAILURES as error:
                self._cluster.log(f"{self.name}: {error}")
                self.refused += "from its plan to its commit" in str(error)
                committer = QueueCommitter(node.store, options, node.runtime)
            self._cluster.work(node)

    def _micro_batch(
        self, node: Node, config: ProducerConfig, committer: QueueCommitter, batch: int
    ) -> None:
        transaction = Transaction(self.name, batch)
        # The plan of a write does this before the tasks upload.
        options = SinkOptions(queue=config, grace_ms=self._cluster.grace_ms)
        claim(options, node.store, node.runtime)
        began, planned = self._cluster.simulation.now, Moment.now(node.runtime)
        records = [Record(self.name, n) for n in range(self._first(batch), self._first(batch + 1))]
        uploads = []
        for start in range(0, len(records), self.SIZE):
            part = records[start : start + self.SIZE]
            name = later_ulid(node.runtime.ulid(), int(self._cluster.write_s * 1000))
            location = batch_key(PREFIX, name, transaction)
            data = encode_batch([record.encode() for record in part])
            node.store.put(location, data)
            if self._slow_s:
                node.runtime.sleep(self._slow_s * self.SIZE / len(records))
            ranges = (Metadata(0, node.runtime.now_ms(), payload(part)),)
            uploads.append(UploadedBatch(location, len(part), ranges))
        appended = committer.append(Group(planned, tuple(uploads), transaction))
        self._committed = batch + 1
        self.waited_s.append(self._cluster.simulation.now - began)
        if appended:
            for n, upload in enumerate(uploads):
                part = records[n * self.SIZE : (n + 1) * self.SIZE]
                sequence = self._cluster.model.sequences[upload.location]
                self._cluster.model.reported_durable(part, sequence, upload.location)


class GoProducer(Counting):
    """OpenData's Go client: plain batches named ``<prefix>/<run ULID>/<16 hex digits>``.

    The names of all batches of a run carry the time of its start. If an append gets no answer, the
    client appends the same location again, and gives the batch up after some attempts. It does not
    report a batch durable if the collector may have deleted it before the append.
    """

    def live(self, node: Node, config: ProducerConfig) -> None:
        """Run one process."""
        # An upload before there is a manifest would make this library refuse the queue (failure
        # F51).
        self._cluster.patiently(
            node,
            lambda: claim_for_writing(
                node.store, config, runtime=node.runtime, grace_ms=self._cluster.grace_ms
            ),
        )
        run = node.runtime.ulid()
        model, number = self._cluster.model, 0
        # Names of this client end with the batch's number, not with ".batch".
        model.may_repeat = lambda location: not location.endswith(".batch")
        while not self.done:
            record = Record(self.name, self._next)
            self._next += 1
            location = f"{PREFIX}/{run}/{number:016x}"
            number += 1
            try:
                self._append(node, config, location, record)
            except FAILURES as error:
                self._cluster.log(f"{self.name}: {error}")
            self._cluster.work(node)

    def _append(self, node: Node, config: ProducerConfig, location: str, record: Record) -> None:
        monotonic, wall = node.runtime.monotonic(), node.runtime.now_ms()
        node.store.put(location, encode_batch([record.encode()]))
        ranges = (Metadata(0, node.runtime.now_ms(), payload([record])),)
        condition: str | None
        for _ in range(5):
            try:
                found = node.store.get(MANIFEST)
                assert isinstance(found, Blob)
                manifest, condition = Manifest.parse(found.data), found.version
            except ObjectNotFound:
                manifest, condition = Manifest.empty(), None
            after = manifest.append([NewEntry(location, ranges)]).raw
            if isinstance(node.store.put_if(MANIFEST, after, condition), outcomes.Applied):
                break
            self._cluster.work(node)
        else:
            return
        took_ms = max((node.runtime.monotonic() - monotonic) * 1000, node.runtime.now_ms() - wall)
        if took_ms < self._cluster.grace_s * 500:
            sequence = self._cluster.model.sequences[location]
            self._cluster.model.reported_durable([record], sequence, location)


class Reader:
    """One process of a consumer that writes batches and its position in one transaction.

    It starts at the position of its sink, and ends when it is fenced or another process has written
    to the sink.
    """

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self._cluster = cluster
        self._model = cluster.model
        self._node = node
        self._position = self._model.sink.position
        self._filter = TransactionFilter(PREFIX)
        if self._model.sink.state is not None:
            self._filter = TransactionFilter.from_dict(self._model.sink.state, PREFIX)
        self._idle_s = 0.05

    def live(self, config: ConsumerConfig, *, hangs: bool = False) -> None:
        """Read from the claim of the queue until another consumer fences it.

        A consumer that ``hangs`` reads nothing; only its collector keeps running.
        """
        try:
            consumer = self._until_done(
                lambda: Consumer(
                    config, self._position, store=self._node.store, runtime=self._node.runtime
                )
            )
        except DataLoss as error:
            if self._model.sink.position == self._position:
                self._cluster.fail(error)
            return
        if hangs:
            self._node.runtime.sleep(1e6)
        try:
            read = self._serial if self._cluster.chance(0.5) else self._read_ahead
            read(consumer)
        except Fenced as error:
            self._cluster.log(f"{self._node.name}: {error}")
        try:
            consumer.close()
        except (Fenced, *PASSING) as error:
            self._cluster.log(f"{self._node.name}: closed without acknowledging: {error}")

    def _serial(self, consumer: Consumer) -> None:
        while True:
            try:
                batch = consumer.next_batch()
                if batch is None:
                    consumer.flush()
                    self._idle()
                    continue
                if not self._deliver(batch):
                    return
                self._until_done(lambda batch=batch: consumer.ack(batch.sequence))
            except PASSING:
                self._node.runtime.sleep(0.5)
            except PoisonBatch as error:
                if not self._skip(consumer, error):
                    return
                self._until_done(lambda error=error: consumer.ack(error.sequence))

    def _read_ahead(self, consumer: Consumer) -> None:
        handle = consumer.fetch_handle()
        pending: list[BatchDescriptor] = []
        acked = self._position
        while True:
            try:
                if self._position is not None and self._position != acked:
                    consumer.ack_through(self._position)
                    acked = self._position
                if not pending:
                    pending = consumer.next_descriptors(1 + self._cluster.draw(8))
                if not pending:
                    self._idle()
                    continue
                batches = fetch_many(
                    handle.fetch,
                    list(pending),
                    concurrency=1 + self._cluster.draw(4),
                    max_in_flight_bytes=1_000_000,
                    runtime=self._node.runtime,
                )
                with closing(batches):
                    for batch in batches:
                        if not self._deliver(batch):
                            return
                        pending.pop(0)
            except PASSING:
                self._node.runtime.sleep(0.5)
            except PoisonBatch as error:
                if not self._skip(consumer, error):
                    return
                pending.pop(0)

    def _until_done(self, call: Callable[[], T]) -> T:
        return self._cluster.patiently(self._node, call)

    def _idle(self) -> None:
        self._node.runtime.sleep(self._idle_s)
        self._idle_s = min(60 if self._cluster.calm else 5, self._idle_s * 1.5)

    def _deliver(self, batch: ConsumedBatch) -> bool:
        self._idle_s = 0.05
        passed_by = range((self._position or 0) + 1, batch.sequence)
        if self._position is not None and not self._model.repeats.keys() >= {*passed_by}:
            self._cluster.fail(f"{self._node.name}: {batch.sequence} follows {self._position}")
        records = self._model.check_batch(
            batch.sequence, batch.location, batch.entries, batch.metadata
        )
        # Time passes between reading and writing, so a zombie writes late.
        self._node.runtime.sleep(self._cluster.uniform(0, 0.05))
        passed = self._filter.offer(batch.sequence, batch.location)
        return self._write(batch.sequence, records if passed else [])

    def _skip(self, consumer: Consumer, error: PoisonBatch) -> bool:
        """Skip a batch that was not reported durable. A repeat of it must still be delivered."""
        self._model.poison(error.sequence, error.location)
        self._until_done(lambda: consumer.skip(error.sequence))
        self._filter.skip(error.sequence, error.location)
        return self._write(error.sequence, [])

    def _write(self, sequence: int, records: list[Record]) -> bool:
        state = self._filter.to_dict()
        if not self._model.write_sink(self._position, sequence, records, state):
            self._cluster.log(f"{self._node.name}: overtaken at {sequence}")
            return False
        self._cluster.log(f"{self._node.name}: wrote batch {sequence}, {len(records)} records")
        self._position = sequence
        return True


def watch(
    cluster: Cluster,
    handle: WriteHandle,
    records: list[Record],
    settled: Callable[[], None] = lambda: None,
) -> None:
    """Tell the model as soon as the handle reports the records durable.

    Fail the simulation on an error that storage cannot cause.
    """

    def done(_: object) -> None:
        try:
            durable = handle.result()
        except OpenDataBufferError as error:
            if not isinstance(error, FAILURES):
                cluster.fail(f"{records[0]} failed with {error!r}")
            return
        cluster.model.reported_durable(records, durable.sequence, durable.location)
        settled()

    handle.add_done_callback(done)


def collect_garbage(cluster: Cluster, node: Node) -> None:
    """Run the collector as an operator's cron job, which belongs to no epoch."""
    collector = GarbageCollector(node.store, cluster.consumer_config(), runtime=node.runtime)
    while True:
        try:
            collector.run_once()
        except StorageError as error:
            cluster.log(f"{node.name}: {error}")
        node.runtime.sleep(cluster.uniform(5, 60))


Actor = PlainProducer | TransactionalProducer | SinkDriver | GoProducer


def run_readers(cluster: Cluster) -> None:
    """Keep one consumer alive, and start a second one next to it now and then."""
    cluster.supervise(
        "reader",
        lambda node: Reader(cluster, node).live(cluster.consumer_config()),
        lambda: False,
        zombies=True,
    )


def run_services(cluster: Cluster, actors: list[Actor], *, zombies: bool = False) -> None:
    """Run the producers until all are done, some of them together in one process.

    With ``zombies``, a process may be replaced while it still runs.
    """
    processes: list[list[Actor]] = [[]]
    for actor in actors:
        if processes[-1] and cluster.chance(0.6):
            processes.append([])
        processes[-1].append(actor)
    supervisors = [
        cluster.supervise(
            f"service{n}",
            lambda node, together=together: _serve(cluster, together, node),
            lambda together=together: all(actor.done for actor in together),
            zombies=zombies,
        )
        for n, together in enumerate(processes)
    ]
    for supervisor in supervisors:
        supervisor.join()


def _serve(cluster: Cluster, actors: list[Actor], node: Node) -> None:
    """Run one process whose producers share one committer."""
    config = cluster.producer_config()
    tasks = [
        node.runtime.spawn(lambda actor=actor: actor.live(node, config), actor.name)
        for actor in actors
        if not actor.done
    ]
    for task in tasks:
        task.join()
