"""Run the writers, readers, and services of a simulated deployment on the library's real code.

Each program is an object that outlives its processes. The simulation kills and replaces a process
at any moment and calls :meth:`live` again for the next one. Attributes of the program survive, as a
database or a Spark checkpoint would. Local variables of :meth:`live` are lost with the process, as
its memory would be.

There is one class for each kind of user:

* Writers: a plain producer, a publisher with transactions, the driver of a Spark query, and
  OpenData's v1 client. Each tells the oracle which records were confirmed.
* Readers: a Python consumer, workers, a Spark query, and a v1 consumer. Each tells the oracle which
  batches it received and which errors named a loss. A log has named readers that run at the same
  time. A queue has one consumer, so its readers take turns.
* Services: a collector and a process that only serves as a broker.

For example, :class:`PythonReader` stores records and position together, so the oracle expects each
batch once. :class:`WorkerReader` finishes a batch after its work, so a crash in between delivers
the batch twice, and the oracle allows that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from buffer_sink.committer import Group, QueueCommitter, TopicCommitter, TopicWrite, UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset
from opendata_buffer import Consumer, Producer, Publisher, TopicConsumer, TopicProducer, outcomes
from opendata_buffer.admin.readers import add_v1, delete_reader, reader_of, view_of
from opendata_buffer.admin.target import Target
from opendata_buffer.broker.election import LeaderElection
from opendata_buffer.broker.worker import Worker
from opendata_buffer.config import ConsumerConfig, QueueConfig, WorkerConfig
from opendata_buffer.consumer.fetch import FetchHandle
from opendata_buffer.consumer.place import Place
from opendata_buffer.errors import (
    BatchMissing,
    BatchUnreadable,
    ClaimLost,
    CorruptData,
    DataLoss,
    Drained,
    Fenced,
    InvalidInput,
    ObjectNotFound,
    OpenDataBufferError,
    PoisonBatch,
    QueueReset,
)
from opendata_buffer.formats.batch import (
    Transaction,
    batch_key,
    decode_batch,
    encode_batch,
    later_ulid,
    name_time_ms,
    parse_location,
)
from opendata_buffer.formats.manifest import BatchDescriptor, Manifest, Metadata, NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.quarantine import quarantine
from opendata_buffer.queue.reader_admin import reset_reader
from opendata_buffer.runtime import Moment
from opendata_buffer.stores.base import Blob
from opendata_buffer.topic.partitioner import modulo
from opendata_buffer.topic.topic import Topic
from tests.simulation.deployment import GRACE_S, ONE, REPLACED, TROUBLE, URL, Deployment, Node
from tests.simulation.oracle import record_of
from tests.support.v1_consumer import V1Consumer

LEAST_CALLS = 10
"""Calls that each writer makes even in the shortest history."""


# ---- writers


class Writer:
    """Write until the operator has finished the script, and then a few more records."""

    role = "writer"

    def __init__(self, deployment: Deployment, number: int) -> None:
        self.deployment = deployment
        self.name = f"{self.role}{number}"
        self.calls = 0
        """Calls that were confirmed."""
        self._last_calls = 2

    @property
    def done(self) -> bool:
        """Return whether it has written enough."""
        deployment = self.deployment
        return deployment.script_done and self.calls >= LEAST_CALLS and self._last_calls <= 0

    def confirmed(self) -> None:
        """Count a call that was confirmed."""
        self.calls += 1
        if self.deployment.script_done:
            self._last_calls -= 1

    def start(self) -> None:
        """Start the program in the deployment."""
        task = self.deployment.keep_alive(
            self.name, self.live, finished=lambda: self.done, takeovers=False
        )
        self.deployment.writers.append(task)

    def live(self, node: Node) -> None:
        """Run one process."""
        raise NotImplementedError

    def rest(self, node: Node) -> None:
        """Wait until the next call."""
        slowly = 4 if self.deployment.slowly else 1
        node.runtime.sleep(slowly * self.deployment.uniform(0.5, 3.5))


class PlainWriter(Writer):
    """A producer without transactions. It never writes a record twice."""

    role = "producer"

    def live(self, node: Node) -> None:
        deployment = self.deployment
        kind: Any = TopicProducer if deployment.is_topic else Producer
        producer = deployment.patiently(
            node,
            lambda: kind(deployment.producer_config(), store=node.store, runtime=node.runtime),
        )
        number = 0
        while not self.done and not deployment.over:
            records = [record_of(node.name, number + n) for n in range(1 + deployment.draw(2))]
            number += len(records)
            options: dict[str, Any] = {}
            if deployment.is_topic:
                key = b"key %d" % deployment.draw(6)
                options = {"keys": [key] * len(records), "partitioner": modulo}
            try:
                producer.produce(records, **options).result(60)
            except (*TROUBLE, Drained, TimeoutError) as error:
                deployment.log(f"{node.name}: {error}")
            else:
                deployment.oracle.acknowledge(records)
                self.confirmed()
            self.rest(node)
        with suppress(*TROUBLE):
            producer.close(30)


class TransactionWriter(Writer):
    """A named publisher: readers receive whole committed transactions and nothing else."""

    role = "publisher"

    def live(self, node: Node) -> None:
        deployment = self.deployment
        number = 0
        try:
            publisher = deployment.patiently(
                node,
                lambda: Publisher(
                    URL,
                    self.name,
                    config=deployment.producer_config(),
                    store=node.store,
                    runtime=node.runtime,
                    entropy=deployment.simulation.random.randbytes,
                ),
            )
            while not self.done and not deployment.over:
                number = self._transaction(node, publisher, number)
                self.rest(node)
            publisher.close(30)
        except (*TROUBLE, *REPLACED, InvalidInput) as error:
            deployment.log(f"{node.name}: {error}")

    def _transaction(self, node: Node, publisher: Publisher, number: int) -> int:
        deployment, written = self.deployment, []
        rolls_back = deployment.chance(0.25)
        for _ in range(1 + deployment.draw(3)):
            record = record_of(node.name, number)
            number += 1
            written.append(record)
            options = {"keys": [b"key %d" % deployment.draw(6)], "partitioner": modulo}
            publisher.publish_uncommitted([record], **(options if deployment.is_topic else {}))
        if rolls_back:
            publisher.abort()
            deployment.oracle.roll_back(written)
            deployment.happened["rolled back"] += 1
            return number
        publisher.apply(publisher.build_ack_intents())
        deployment.oracle.acknowledge(written)
        deployment.happened["transactions"] += 1
        self.confirmed()
        return number


class SparkSinkWriter(Writer):
    """The driver of a Spark query that repeats each micro-batch until it is committed."""

    role = "query"

    def __init__(self, deployment: Deployment, number: int) -> None:
        super().__init__(deployment, number)
        self._committed = 0
        """The next micro-batch according to the checkpoint."""

    def live(self, node: Node) -> None:
        deployment = self.deployment
        kind: Any = TopicCommitter if deployment.is_topic else QueueCommitter
        options = SinkOptions(queue=deployment.config(QueueConfig), max_write_duration_ms=20_000)
        try:
            committer = kind(node.store, options, node.runtime)
            while not self.done and not deployment.over:
                batch = self._committed
                records = self._records(batch)
                deployment.oracle.may_repeat(records)
                committer.append(self._group(node, batch, records))
                if self._committed == batch:
                    self._committed = batch + 1
                deployment.oracle.acknowledge(records)
                deployment.happened["Spark sink"] += 1
                self.confirmed()
                self.rest(node)
            if deployment.is_topic:  # it ends what earlier runs left undecided
                committer.append(self._group(node, self._committed, []))
        except (*TROUBLE, *REPLACED) as error:
            deployment.log(f"{node.name}: {error}")

    def _records(self, batch: int) -> list[bytes]:
        """Return the rows of a micro-batch, which are the same in every attempt."""
        return [record_of(self.name, 3 * batch + row) for row in range(1 + batch % 3)]

    def _group(self, node: Node, batch: int, records: Sequence[bytes]) -> Group:
        txn, planned, uploads = Transaction(self.name, batch), Moment.now(node.runtime), []
        write = None
        if self.deployment.is_topic:
            topic = Topic.open(URL, store=node.store, runtime=node.runtime)
            write = TopicWrite.planned(topic.description, node.runtime)
        for row, record in enumerate(records):
            ulid = later_ulid(node.runtime.ulid(), 20_000)
            name, clock = None, 0
            if write is not None:
                name = write.active[(row + batch) % len(write.active)]
                clock = write.clock(0, row)
                key = write.location(name, ulid, txn, clock)
            else:
                key = batch_key(self.deployment.prefix, ulid, txn)
            node.store.put(key, encode_batch([record]))
            metadata = (Metadata(0, node.runtime.now_ms(), b""),)
            uploads.append(UploadedBatch(key, 1, metadata, name, clock))
        return Group(planned, tuple(uploads), txn, self.name, write)


class V1Writer(Writer):
    """OpenData's Go client: it writes plain batches, and repeats an append that got no answer."""

    role = "v1-producer"

    def live(self, node: Node) -> None:
        deployment, number = self.deployment, 0
        run = node.runtime.ulid()
        while not self.done and not deployment.over:
            names = deployment.names()
            if deployment.is_topic:
                topic = Topic.open(URL, store=deployment.memory, runtime=deployment.director)
                names = topic.description.active
            partition = names[deployment.draw(len(names))]
            record = record_of(node.name, number)
            number += 1
            with suppress(*TROUBLE):
                self.append(node, partition, run, number, record)
            self.rest(node)

    def append(self, node: Node, partition: str, run: str, number: int, record: bytes) -> None:
        """Store one batch and queue it, up to five times."""
        deployment = self.deployment
        config = deployment.config(QueueConfig, partition)
        location = f"{config.data_path_prefix}/{run}/{number:016x}"
        started, wall_ms = node.runtime.monotonic(), node.runtime.now_ms()
        node.store.put(location, encode_batch([record]))
        entry = NewEntry(location, (Metadata(0, node.runtime.now_ms(), b""),))
        for _ in range(5):
            condition: str | None
            try:
                found = node.store.get(config.manifest_path)
                assert isinstance(found, Blob)
                manifest, condition = Manifest.parse(found.data), found.version
            except ObjectNotFound:
                manifest, condition = Manifest.empty(), None
            if manifest.sealed:
                return  # its partition has left; a real client would see a failed append
            after = manifest.append([entry]).raw
            outcome = node.store.put_if(config.manifest_path, after, condition)
            if isinstance(outcome, outcomes.Applied):
                break
            node.runtime.sleep(deployment.uniform(0.2, 2))
        else:
            return
        # After such a long time a collector may have deleted the batch before it was queued.
        took_s = max(node.runtime.monotonic() - started, (node.runtime.now_ms() - wall_ms) / 1000)
        if took_s < GRACE_S / 2:
            deployment.oracle.acknowledge([record])
            deployment.happened["v1 producers"] += 1
            self.confirmed()


# ---- readers


class Reader:
    """Read everything under one name: as a queue's consumer, or as a named reader of a log."""

    role = "reader"
    once = True
    committed = False
    one_process = False
    feature = ""

    def __init__(self, deployment: Deployment, number: int) -> None:
        self.deployment = deployment
        self.program = f"{self.role}{number}"
        self.reader = self.program if deployment.is_log else ""
        """The name by which it reads a log; empty for a queue."""
        self.view = self.reader or "the queue"
        """The name by which the oracle knows it. All programs of one queue share it."""
        deployment.oracle.reader(self.view, once=self.once, committed=self.committed)

    def start(self) -> None:
        """Start the program in the deployment. Programs of one queue take turns."""
        deployment = self.deployment
        may_run: Callable[[], bool] = partial(deployment.may_read, self.program)
        if not deployment.is_log:
            deployment.turns.append(self.program)
            may_run = partial(deployment.has_turn, self.program)
            if len(deployment.turns) > 1:
                # The next program receives batches again that this one did not acknowledge.
                deployment.oracle.reader(self.view, once=False)
        takeovers = self.once and not self.one_process
        deployment.keep_alive(self.program, self.live, may_run=may_run, takeovers=takeovers)

    def register(self, queue: Target) -> None:
        """Register the reader in a log, at the oldest batch."""
        reset_reader(view_of(queue), self.reader, view_of(queue).first_sequence)

    def live(self, node: Node) -> None:
        """Run one process."""
        raise NotImplementedError

    def deliver(
        self, partition: str, sequence: int, location: str, records: Sequence[bytes], epoch: int = 0
    ) -> None:
        """Tell the oracle about a batch."""
        self.deployment.log(f"{self.program} got {partition} {sequence}: {records}")
        self.deployment.oracle.deliver(
            self.view, partition, sequence, location, records, epoch=epoch
        )
        if self.feature:
            self.deployment.happened[self.feature] += bool(records)

    def name_loss(self, error: DataLoss) -> None:
        """Tell the oracle which sequences an error names as lost."""
        partition = self.deployment.partition_of(error.key)
        self.deployment.log(f"{self.program}: {error}")
        oracle = self.deployment.oracle
        oracle.name_loss(self.view, partition, error.needed, error.oldest)
        if error.open_from is not None:
            oracle.give_up_between(self.view, partition, error.open_from, error.needed)

    def continue_log(self, error: DataLoss) -> None:
        """Set the reader past the lost batches, exactly as the error advises."""
        deployment = self.deployment
        partition = deployment.partition_of(error.key)

        def reset(node: Node) -> None:
            queue = deployment.target(node).queue(partition)
            # More may be gone by now, or another instance may have moved on: then it starts again.
            with suppress(InvalidInput, DataLoss):
                reset_reader(view_of(queue), self.reader, error.oldest)

        deployment.operate(reset, crashes=False)


def run_of(epoch: int) -> int:
    """Return the number of the first run of deliveries with an epoch."""
    return 1_000 * epoch


class PythonReader(Reader):
    """A Python consumer that stores records and position in one transaction of its database.

    With ``keeps_position=False`` it uses the position that the log stores, so an operator can move
    it.
    """

    feature = "named readers"

    def __init__(
        self,
        deployment: Deployment,
        number: int,
        *,
        isolation: str = "read_uncommitted",
        keeps_position: bool = True,
    ) -> None:
        self.isolation = isolation
        self.once = keeps_position
        self.committed = isolation == "read_committed"
        if isolation == "read_committed":
            self.role = "committed-reader"
            self.feature = "read-committed"
        super().__init__(deployment, number)
        self.positions: dict[str, str] = {}
        self.wanted: tuple[str, float] | None = None
        """Partition, and share of its entries before the place to which it shall seek."""
        self.seeks = 0
        """How often a running consumer of this reader moved itself."""
        self.accepts_loss = False
        """Whether the user let it continue after a loss, as the docs demand after a repair."""

    def live(self, node: Node) -> None:
        deployment = self.deployment
        seen = dict(self.positions)
        config = deployment.consumer_config(reader=self.reader)
        kind: Any = TopicConsumer if deployment.is_topic else Consumer
        start: Any = (seen if deployment.is_topic else seen.get(ONE)) if self.once else None
        try:
            consumer = deployment.patiently(
                node,
                lambda: kind(
                    config,
                    start,
                    store=node.store,
                    runtime=node.runtime,
                    isolation=self.isolation,
                ),
            )
        except (DataLoss, QueueReset) as error:
            self._start_again(error, seen)
            return
        except REPLACED as error:
            deployment.log(f"{node.name}: {error}")
            return
        try:
            self._read(node, consumer, seen)
        except (DataLoss, QueueReset) as error:
            self._start_again(error, seen)
        except REPLACED as error:
            deployment.log(f"{node.name}: {error}")
        with suppress(*TROUBLE, *REPLACED, DataLoss, QueueReset):
            consumer.close()

    def _start_again(self, error: DataLoss | QueueReset, seen: dict[str, str]) -> None:
        """Continue after a loss, without a position."""
        deployment = self.deployment
        if seen != self.positions:
            return  # another instance has read on since this one got its positions
        if isinstance(error, DataLoss):
            self.name_loss(error)
            self.positions.pop(deployment.partition_of(error.key), None)
            if self.reader:
                self.continue_log(error)
        elif self.accepts_loss:
            deployment.log(f"{self.program}: {error}")
            self.positions.clear()
        else:
            deployment.fail(f"{self.program}: {error}")
        deployment.director.sleep(1)

    def _read(self, node: Node, consumer: Any, seen: dict[str, str]) -> None:
        deployment = self.deployment
        while not deployment.over:
            try:
                if self.wanted is not None:
                    self._seek(node, consumer, *self.wanted)
                batch = consumer.next_batch()
                if batch is None:
                    consumer.flush()
                    deployment.idle(node)
                    continue
                partition = batch.partition
                position = str(
                    consumer.position_of(batch if deployment.is_topic else batch.sequence)
                )
                node.runtime.sleep(deployment.uniform(0, 0.1))
                if self.positions.get(partition) != seen.get(partition):
                    deployment.log(f"{node.name}: another instance has written {partition!r}")
                    return
                seen[partition] = self.positions[partition] = position
                self.deliver(
                    partition,
                    batch.sequence,
                    batch.location,
                    batch.entries,
                    self._epoch(consumer, partition),
                )
                consumer.ack(batch if deployment.is_topic else batch.sequence)
            except PoisonBatch as error:
                self._pass_by(node, consumer, error)
            except TROUBLE as error:
                deployment.log(f"{node.name}: {error}")
                node.runtime.sleep(0.5)

    def _seek(self, node: Node, consumer: Any, partition: str, share: float) -> None:
        """Move the running consumer: it skips what lies before the place, or reads it again."""
        deployment = self.deployment
        self.wanted = None
        view = view_of(deployment.target(node).queue(partition))
        at = view.first_sequence + int(share * (view.next_sequence - view.first_sequence + 1))
        # If the process dies now, the next one begins at the place or where this one was.
        deployment.oracle.may_skip(self.view, partition, at)
        place = {partition: at} if deployment.is_topic else at
        try:
            deployment.patiently(node, lambda: consumer.seek(place))
        except (InvalidInput, DataLoss) as error:
            deployment.log(f"{node.name} did not move to {at}: {error}")
            return
        self.seeks += 1
        deployment.log(f"{node.name} moved to {partition} {at}")
        deployment.oracle.moved(self.view, partition, at, self._epoch(consumer, partition))

    def _epoch(self, consumer: Any, partition: str) -> int:
        """Return the number of a run of deliveries, which a reset, a restart, and a seek begin."""
        if self.once:
            return 0
        found = consumer._readers[partition] if self.deployment.is_topic else consumer
        return run_of(found.epoch) + self.seeks

    def _pass_by(self, node: Node, consumer: Any, error: PoisonBatch) -> None:
        """Copy an unreadable batch to the quarantine, and continue after it."""
        deployment = self.deployment
        deployment.log(f"{node.name}: {error}")
        records = deployment.oracle.batches.get(error.location, [])
        deployment.oracle.name_records(self.view, records)
        config = deployment.config(QueueConfig, error.partition)
        topic = deployment.is_topic
        reader = consumer._readers[error.partition] if topic else consumer._entries
        entry = next((one for one in reader.ready if one.sequence == error.sequence), None)
        prefix = config.data_path_prefix
        if entry is not None:
            deployment.patiently(
                node,
                lambda: quarantine(node.store, prefix, entry, error, runtime=node.runtime),
            )
        arguments = (error.partition, error.sequence) if deployment.is_topic else (error.sequence,)
        deployment.patiently(node, lambda: consumer.skip(*arguments))


class WorkerReader(Reader):
    """Workers that share the batches of each partition. Each batch is processed at least once."""

    role = "workers"
    once = False
    feature = "workers"

    def __init__(self, deployment: Deployment, number: int) -> None:
        super().__init__(deployment, number)
        deployment.oracle.readers[self.view].in_order = False

    def live(self, node: Node) -> None:
        deployment = self.deployment
        workers: dict[str, Worker] = {}
        try:
            while not deployment.over:
                for partition in deployment.names():
                    if partition not in workers:
                        workers[partition] = self._open(node, partition)
                for partition, worker in [*workers.items()]:
                    self._work(node, partition, worker)
                node.runtime.sleep(deployment.uniform(0.2, 2))
        except (*TROUBLE, *REPLACED) as error:
            deployment.log(f"{node.name}: {error}")
            if isinstance(error, Fenced):
                # A broker that another consumer fenced never takes the queue back (decision 0016).
                # Its operator stops the other consumer and restarts it.
                deployment.restart_brokers()
        for worker in workers.values():
            worker.close()

    def _open(self, node: Node, partition: str) -> Worker:
        deployment = self.deployment
        config = deployment.config(
            WorkerConfig,
            partition,
            reader=self.reader,
            create_if_missing=True,
            claim_timeout_ms=8_000,
            max_deliveries=0,
            gc=deployment.gc(),
            name=node.name,
        )
        return Worker(config, store=node.store, runtime=node.runtime)

    def _work(self, node: Node, partition: str, worker: Worker) -> None:
        try:
            batches = worker.claim(2, timeout=0.5)
        except DataLoss as error:
            self.name_loss(error)
            self.continue_log(error)
            return
        except (*TROUBLE, QueueReset) as error:
            self.deployment.log(f"{node.name}: {error}")
            return
        for batch in batches:
            node.runtime.sleep(self.deployment.uniform(0, 0.5))
            self.deliver(partition, batch.sequence, batch.location, batch.entries)
            try:
                batch.done()
            except (ClaimLost, *TROUBLE) as error:
                self.deployment.log(f"{node.name}: {error}")


class SparkReader(Reader):
    """A Spark query that records its offsets and commits, and writes each micro-batch once."""

    role = "spark"
    # A query has one driver: its checkpoint allows no second one.
    one_process = True
    feature = "Spark source"

    def __init__(self, deployment: Deployment, number: int) -> None:
        super().__init__(deployment, number)
        self.committed = True
        deployment.oracle.reader(self.view, committed=True)
        self._offsets: dict[int, SourceOffset] = {}
        self._commits: set[int] = set()
        self._accepts_loss = False

    def live(self, node: Node) -> None:
        deployment = self.deployment
        options = SourceOptions(
            queue=deployment.config(QueueConfig),
            one_queue=not deployment.is_topic,
            reader=self.reader,
            create_if_missing=True,
            fail_on_data_loss=not self._accepts_loss,
            gc=deployment.gc(),
            max_batches=1 + deployment.draw(4),
        )
        deployment.oracle.readers[self.view].accepts_loss = self._accepts_loss
        stream = MicroBatchStream(options, node.store, node.runtime)
        try:
            self._run(node, stream)
        except DataLoss as error:
            self.name_loss(error)
            self._accepts_loss = True
        except QueueReset as error:
            deployment.log(f"{node.name}: {error}")
            if not self.accepts_loss:
                deployment.fail(f"{self.program}: {error}")
            self._accepts_loss = True
        except (*TROUBLE, *REPLACED, PoisonBatch) as error:
            deployment.log(f"{node.name}: {error}")
            if isinstance(error, PoisonBatch):
                records = deployment.oracle.batches.get(error.location, [])
                deployment.oracle.name_records(self.view, records)
                self._accepts_loss = True
        with suppress(*TROUBLE, *REPLACED):
            stream.stop()
        node.runtime.sleep(1)

    accepts_loss = False
    """Whether the user let it continue after a loss, as the docs demand after a repair."""

    def _run(self, node: Node, stream: MicroBatchStream) -> None:
        deployment = self.deployment
        batch = max(self._offsets, default=-1)
        if batch >= 0 and batch not in self._commits:
            self._finish(node, stream, batch)
        while not deployment.over:
            start = self._offsets.get(batch)
            end = stream.latest_offset(recorded(start))
            if end == start:
                deployment.idle(node)
                continue
            batch += 1
            self._offsets[batch] = end
            if start is not None:
                stream.commit(start)
            self._finish(node, stream, batch)

    def _finish(self, node: Node, stream: MicroBatchStream, batch: int) -> None:
        start, end = recorded(self._offsets.get(batch - 1)), recorded(self._offsets[batch])
        assert end is not None
        found = []
        for task in stream.plan_input_partitions(start, end):
            for entry in task.batches:
                if entry.part == 0:
                    records = self._fetch(node, entry)
                    if records is not None:
                        found.append((entry, records))
        # The sink knows the batch by its number, and writes it once.
        if batch not in self._commits:
            self._commits.add(batch)
            for entry, records in found:
                partition = entry.partition if self.deployment.is_topic else ONE
                self.deliver(partition, entry.sequence, entry.location, records)

    def _fetch(self, node: Node, entry: Any) -> list[bytes] | None:
        partition = entry.partition if self.deployment.is_topic else ONE
        config = self.deployment.config(ConsumerConfig, partition)
        handle = FetchHandle.of(config, store=node.store, runtime=node.runtime)
        try:
            return list(self.deployment.patiently(node, lambda: handle.fetch(entry)).entries)
        except (BatchMissing, BatchUnreadable) as error:
            # A task does the same with failOnDataLoss=false and corruptBatches=quarantine.
            if not self._accepts_loss:
                raise
            self.deployment.log(f"{node.name}: {error}")
            records = self.deployment.oracle.batches.get(entry.location, [])
            self.deployment.oracle.name_records(self.view, records)
            if isinstance(error, BatchUnreadable):
                copy = partial(
                    quarantine,
                    node.store,
                    config.data_path_prefix,
                    entry,
                    error,
                    runtime=node.runtime,
                )
                self.deployment.patiently(node, copy)
            return None


def recorded(offset: SourceOffset | None) -> SourceOffset | None:
    """Return the offset as a checkpoint returns it."""
    if offset is None:
        return None
    return SourceOffset.from_json(json.loads(json.dumps(offset.to_json())))


class V1Client:
    """OpenData's v1 consumer and collector, which know neither owner markers nor logs."""

    def __init__(self, deployment: Deployment, node: Node, partition: str) -> None:
        self.deployment = deployment
        self.node = node
        self.partition = partition
        self.config = deployment.config(QueueConfig, partition)
        self.epoch = 0

    def read(self) -> tuple[Manifest, str | None]:
        """Return the manifest and its version."""
        try:
            found = self.node.store.get(self.config.manifest_path)
        except ObjectNotFound:
            return Manifest.empty(), None
        assert isinstance(found, Blob)
        return Manifest.parse(found.data), found.version

    def claim(self) -> bool:
        """Take the queue over with a higher epoch. Return whether that worked."""
        manifest, version = self.read()
        if manifest.sealed:
            return False
        after = manifest.with_epoch(manifest.epoch + 1)
        outcome = self.node.store.put_if(self.config.manifest_path, after.raw, version)
        self.epoch = after.epoch
        return isinstance(outcome, outcomes.Applied)

    def take(self, through: int) -> list[tuple[int, str]]:
        """Remove all entries up to a sequence from the queue.

        Returns:
            Sequences and locations of the entries that it may have removed.
        """
        manifest, version = self.read()
        count = through + 1 - manifest.first_sequence
        if manifest.epoch != self.epoch or not 0 < count <= manifest.entry_count:
            return []
        entries = manifest.entries(limit=count)
        after = manifest.drop_through(through)
        outcome = self.node.store.put_if(self.config.manifest_path, after.raw, version)
        if not isinstance(outcome, outcomes.Applied | outcomes.Unknown):
            return []
        return [(entry.sequence, entry.location) for entry in entries]

    def collect(self) -> int:
        """Delete old batches that the manifest does not name. Return their number."""
        listing = self.node.store.list(f"{self.config.data_path_prefix}/")
        manifest, _ = self.read()
        named = set(manifest.locations())
        times = [name_time_ms(location) or 0 for location in named]
        oldest = min(times, default=listing.now_ms)
        limit_ms = self.node.runtime.now_ms() - int(GRACE_S * 1000)
        old = []
        for info in listing.objects:
            written = name_time_ms(info.key)
            if parse_location(info.key, self.config.data_path_prefix) is None or written is None:
                continue
            if info.key not in named and written < min(limit_ms, oldest):
                old.append(info.key)
        self.node.store.delete_many(old)
        return len(old)


class V1Reader(Reader):
    """A v1 consumer of a queue. It delivers at least once and keeps no position of its own."""

    role = "v1-consumer"
    once = False
    feature = "v1 consumers"

    def live(self, node: Node) -> None:
        deployment = self.deployment
        clients: dict[str, V1Client] = {}
        try:
            while not deployment.over:
                for partition in deployment.names():
                    if partition not in clients:
                        client = V1Client(deployment, node, partition)
                        if client.claim():
                            clients[partition] = client
                for partition, client in clients.items():
                    if not self._consume(node, partition, client):
                        deployment.log(f"{node.name}: fenced")
                        return  # Its supervisor starts it again, and it takes the queue back.
                node.runtime.sleep(deployment.uniform(1, 4))
        except (*TROUBLE, OpenDataBufferError) as error:
            deployment.log(f"{node.name}: {error}")

    def _consume(self, node: Node, partition: str, client: V1Client) -> bool:
        """Deliver the next batches. Return whether it still owns the queue."""
        manifest, _ = client.read()
        if manifest.sealed:
            return True
        if manifest.epoch != client.epoch:
            return False
        entries = manifest.entries(limit=2)
        for entry in entries:
            found = node.store.get(entry.location)
            assert isinstance(found, Blob)
            self.deliver(partition, entry.sequence, entry.location, decode_batch(found.data))
        if entries:
            client.take(entries[-1].sequence)
        return True


class V1LogReader(Reader):
    """A v1 consumer that is a reader of a log: it consumes a queue of its own, which others feed.

    Its operator does what ``status`` advises if feeding has stopped: delete the reader, and add it
    again with another prefix.
    """

    role = "v1-log-reader"
    once = False
    feature = "v1 readers"

    def __init__(self, deployment: Deployment, number: int) -> None:
        super().__init__(deployment, number)
        deployment.oracle.readers[self.view].accepts_loss = True
        self.accepts_loss = True
        self.prefix = f"{self.program}-0"

    def register(self, queue: Target) -> None:
        """Add the reader at the oldest batch, unless an attempt without an answer has done so."""
        if self.reader not in view_of(queue).index.v1:
            add_v1(queue, self.reader, self.prefix, Place("earliest"))

    def live(self, node: Node) -> None:
        deployment = self.deployment
        consumer = V1Consumer(node.store, self.prefix)
        following: int | None = None
        try:
            if consumer.read()[1] is None or not consumer.claim():
                return  # A consumer that starts before 'readers add' would create the queue.
            while not deployment.over and consumer.read()[0].epoch == consumer.epoch:
                entries = consumer.next_entries(3)
                for entry in entries:
                    if following not in (None, entry.sequence):
                        deployment.fail(f"{self.program} got {entry.sequence} after {following}")
                    following = entry.sequence + 1
                    self._receive(node, consumer, entry)
                if following is not None:
                    # Also without a new entry: the last write may have been lost.
                    consumer.dequeue(following - 1)
                if not entries and self._was_moved(node):
                    return
                deployment.idle(node)
        except (*TROUBLE, OpenDataBufferError) as error:
            deployment.log(f"{node.name}: {error}")

    def _receive(self, node: Node, consumer: V1Consumer, entry: BatchDescriptor) -> None:
        deployment, oracle = self.deployment, self.deployment.oracle
        known = oracle.entries[ONE].get(entry.sequence)
        if known != entry.location and not oracle.repeats_allowed:
            deployment.fail(f"{self.program} got {entry}, and the log has {known}")
        try:
            found = node.store.get(entry.location)
            assert isinstance(found, Blob)
            records = decode_batch(found.data)
        except (ObjectNotFound, CorruptData):
            if consumer.read()[0].epoch == consumer.epoch:  # Otherwise it was overtaken.
                oracle.name_records(self.view, oracle.batches.get(entry.location, ()))
            return
        self.deliver(ONE, entry.sequence, entry.location, records)

    def _was_moved(self, node: Node) -> bool:
        """Let the operator add the reader again if feeding has stopped. Return whether it was."""
        deployment = self.deployment
        queue = deployment.target(node)
        status = reader_of(queue, view_of(queue), self.reader)
        if not status.stopped:
            return False
        deployment.log(f"{self.program}: {status.stopped}")
        deployment.happened["v1 readers stopped"] += 1
        before, number = self.prefix.rsplit("-", 1)
        self.prefix = f"{before}-{int(number) + 1}"

        def add_again(node: Node) -> None:
            queue = deployment.target(node)
            view = view_of(queue)
            if self.reader in view.index.v1 and view.index.v1[self.reader] != self.prefix:
                delete_reader(queue, self.reader)
            if self.reader not in view_of(queue).index.v1:
                at = max(view.first_sequence, min(status.next_sequence, view.next_sequence))
                add_v1(queue, self.reader, self.prefix, Place("n", at))

        deployment.operate(add_again)
        return True


# ---- services


def run_collector(deployment: Deployment, node: Node) -> None:
    """Run the collector as an operator's cron job, which belongs to no epoch."""
    while not deployment.over:
        for partition in deployment.names():
            config = deployment.consumer_config(partition)
            collector = GarbageCollector(node.store, config, runtime=node.runtime)
            try:
                collector.run_once()
            except OpenDataBufferError as error:
                deployment.log(f"{node.name}: {error}")
        node.runtime.sleep(deployment.uniform(10, 25))


def host_brokers(deployment: Deployment, node: Node) -> None:
    """Run a process that serves as the broker of each partition that has no broker."""
    hosts: dict[str, LeaderElection] = {}
    network: Any = deployment.network.of(node.runtime)
    while not deployment.over:
        for partition in deployment.names():
            if partition not in hosts:
                config = deployment.producer_config(partition)
                hosts[partition] = LeaderElection(node.store, config, node.runtime, network)
        node.runtime.sleep(2)
    for host in hosts.values():
        host.stop(5)
