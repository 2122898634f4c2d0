"""A topic whose partitions are logs: named readers, and added and removed partitions."""

from __future__ import annotations

from typing import Any

import pytest

from opendata_buffer import TopicConsumer
from opendata_buffer.admin.target import Target
from opendata_buffer.admin.transactions import abort, list_open
from opendata_buffer.config import ConsumerConfig, QueueConfig
from opendata_buffer.errors import DataLoss, Fenced, InvalidInput, TransientStorageError
from opendata_buffer.formats.batch import batch_key, encode_batch
from opendata_buffer.formats.manifest import NewEntry
from opendata_buffer.gc import GarbageCollector
from opendata_buffer.messages import ACK_TXN, CONTINUE_TXN, build_uuid
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.queue import Queue
from opendata_buffer.queue.reader_positions import position_object
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.consumer import MAX_PREFETCH, REFRESH_S
from opendata_buffer.topic.description import DRAIN_S
from opendata_buffer.topic.topic import Topic, partition_config, seal_partition
from tests.support.logs import DAY_MS, become_log
from tests.unit.topic.in_memory import NAMES, URL, Faulty, consuming, manifest_of

ONE = b"one..."
RETENTION_MS: int = 3_600_000


class LogTopic:
    """A topic of two logs with small segments."""

    retention_ms: int | None = RETENTION_MS

    def __init__(self) -> None:
        self.runtime = ManualRuntime()
        self.store = Faulty(now_ms=self.runtime.now_ms)
        self.queues: dict[int, Queue] = {}
        self.topic = Topic.create(URL, 2, store=self.store, runtime=self.runtime)
        for number in range(2):
            config = self.config(number)
            become_log(self.store, config, self.runtime, retention_ms=self.retention_ms)

    def config(self, number: int) -> QueueConfig:
        return partition_config(NAMES[number], QueueConfig(store=URL))

    def append(self, partition: int, *values: int, message: Any = None) -> None:
        """Append each value as a batch of its own. A message without values is one empty batch."""
        identity = None if message is None else build_uuid(*message)
        if partition not in self.queues:
            config = self.config(partition)
            self.queues[partition] = Queue(self.store, config, runtime=self.runtime, role="test")
        for records in [[b"%d" % value] for value in values] or [[]]:
            location = batch_key(NAMES[partition], self.runtime.ulid(), message=identity)
            self.store.put(location, encode_batch(records))
            self.queues[partition].append([NewEntry(location)])

    def consumer(self, reader: str, positions: Any = None, **options: Any) -> TopicConsumer:
        return TopicConsumer(
            consuming(ack_interval=1, reader=reader),
            positions,
            store=self.store,
            runtime=self.runtime,
            refresh_s=0.0,
            **options,
        )

    def at(self, reader: str, partition: int) -> int:
        """Return the position of a reader in a partition."""
        config = self.config(partition)
        found = position_object(Log(self.store, config, self.runtime), reader).read()
        return found.next  # type: ignore[union-attr]

    def moved(self, partition: int) -> int:
        return manifest_of(self.store, NAMES[partition]).first_sequence


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Log, "most_entries", 16)
    monkeypatch.setattr(Log, "left_entries", 4)


@pytest.fixture
def logs(small_segments: None) -> LogTopic:
    return LogTopic()


def drained(consumer: TopicConsumer) -> list[int]:
    """Read and acknowledge all values."""
    found: list[int] = []
    while (batch := consumer.next_batch()) is not None:
        found += [int(bytes(each)) for each in batch.entries]
        batch.ack()
    return found


def test_each_of_two_readers_of_a_topic_reads_everything(logs: LogTopic) -> None:
    logs.append(0, *range(0, 60, 2))
    logs.append(1, *range(1, 60, 2))
    billing, audit = logs.consumer("billing"), logs.consumer("audit")
    assert sorted(drained(billing)) == list(range(60))
    assert logs.moved(0) > 0
    assert (logs.at("billing", 0), logs.at("audit", 0)) == (30, 0)
    logs.append(0, 60)
    assert drained(billing) == [60]
    assert sorted(drained(audit)) == list(range(61))
    again = logs.consumer("billing")
    assert drained(again) == []
    logs.append(0, 61)
    with pytest.raises(Fenced, match=r"_readers/billing.json"):
        billing.next_batch()


def test_a_partition_that_is_added_to_a_topic_of_logs_is_a_log(logs: LogTopic) -> None:
    billing = logs.consumer("billing")
    logs.topic.expand(3)
    index = Log(logs.store, logs.config(2), logs.runtime).need()
    assert (index.retention_ms, index.reader_expiry_ms) == (RETENTION_MS, DAY_MS)
    logs.append(2, *range(40))
    assert logs.moved(2) > 0
    logs.runtime.advance(1)
    assert drained(billing) + drained(billing) == list(range(40))
    assert drained(logs.consumer("audit")) == list(range(40))
    logs.topic.expand(3)  # a repeated call adds nothing
    with pytest.raises(InvalidInput, match="has 3 already"):
        logs.topic.expand(1)


def test_a_partition_is_removed_when_all_readers_have_read_it(logs: LogTopic) -> None:
    logs.append(0, *range(40))
    billing, audit = logs.consumer("billing"), logs.consumer("audit")
    assert len(drained(billing)) == 40
    logs.topic.drain("0")
    logs.runtime.advance(2 * DRAIN_S)
    assert drained(billing) == []
    assert NAMES[0] in logs.topic.read().names, "the other reader has not read it"
    assert len(drained(audit)) == 40
    logs.runtime.advance(2 * REFRESH_S)
    drained(audit)
    assert logs.topic.read().names == [NAMES[1]]
    assert manifest_of(logs.store, NAMES[0]).sealed
    logs.append(1, 40)
    for consumer in (billing, audit):
        assert drained(consumer) + drained(consumer) == [40]
        assert consumer.partitions == [NAMES[1]]


def test_a_partition_without_a_reader_is_not_closed_while_it_retains_batches(
    logs: LogTopic,
) -> None:
    logs.append(0, 1)
    assert not seal_partition(logs.topic, NAMES[0])
    assert seal_partition(logs.topic, NAMES[1])
    assert not manifest_of(logs.store, NAMES[0]).sealed


def transaction(logs: LogTopic, clock: int, *values: int) -> None:
    """Append batches of one writer's transaction, or its acknowledgement if there are no values."""
    for number, value in enumerate(values):
        logs.append(0, value, message=(b"writer", clock + number, CONTINUE_TXN))
    if not values:
        logs.append(0, message=(b"writer", clock, ACK_TXN))


def test_a_transaction_over_segments_is_read_after_its_commit_even_after_a_restart(
    logs: LogTopic,
) -> None:
    logs.append(0, *range(30))
    transaction(logs, 1, 100, 101)
    logs.append(0, *range(30, 60))
    transaction(logs, 3, 102)
    first = logs.consumer("billing")
    assert drained(first) == list(range(60))
    saved = first.positions
    first.close()
    assert logs.at("billing", 0) == 30, "the position is where the open transaction begins"
    logs.append(0, *range(60, 90))
    assert logs.moved(0) <= 30, "it stays in the manifest, where its writer looks for it"
    transaction(logs, 4)
    logs.append(0, *range(90, 120))
    assert logs.moved(0) > 100, "it is moved once it is decided"
    again = logs.consumer("billing", saved)
    assert drained(again)[:33] == [*range(60, 90), 100, 101, 102]
    assert logs.at("billing", 0) == 124


def test_a_first_start_of_a_reader_does_not_pass_batches_that_a_saved_position_needs(
    logs: LogTopic,
) -> None:
    logs.append(0, 1)
    with logs.consumer("billing") as first:
        batch = first.next_batch()
        saved = {batch.partition: str(batch.position)}
        batch.ack()
    transaction(logs, 2, 100)
    transaction(logs, 1)  # which rolls the transaction back
    with logs.consumer("billing") as late:  # it loaded its positions before the first one was saved
        assert late.next_batch() is None
        late.flush()
    assert logs.at("billing", 0) == 1
    logs.runtime.advance(RETENTION_MS / 1000 + 1)
    config = partition_config(NAMES[0], ConsumerConfig(store=URL))
    GarbageCollector(logs.store, config, runtime=logs.runtime).run_once()
    again = logs.consumer("billing", saved)
    logs.append(0, 2)
    assert drained(again) == [2]


def test_an_open_transaction_of_a_log_is_found_and_aborted(logs: LogTopic) -> None:
    logs.append(0, *range(30))
    transaction(logs, 2, 100, 101)
    logs.append(0, *range(30, 90))
    scope = Target(logs.store, QueueConfig(store=URL), logs.runtime, logs.topic)
    (found,) = list_open(scope)
    assert (found.first_sequence, found.batches) == (30, 2)
    abort(scope, found.producer, force=True)
    assert list_open(scope) == []
    logs.append(0, *range(90, 120))
    assert logs.moved(0) > 32
    assert drained(logs.consumer("billing")) == list(range(120))


def test_all_batches_before_a_gap_are_delivered_before_the_error_about_the_gap(
    logs: LogTopic,
) -> None:
    logs.append(0, *range(300))
    end = logs.moved(0)
    assert end > 2 * MAX_PREFETCH
    # A v1 consumer takes entries that are not in a segment yet.
    left = manifest_of(logs.store, NAMES[0]).drop_through(end + 2)
    logs.store.put(f"{NAMES[0]}/manifest", left.raw)
    consumer = logs.consumer("slow")
    for number in range(end):
        batch = consumer.next_batch()
        assert batch is not None
        assert [int(record) for record in batch.entries] == [number]
        batch.ack()
    with pytest.raises(DataLoss) as lost:
        consumer.next_batch()
    assert (lost.value.needed, lost.value.oldest) == (end, end + 3)


def test_batches_that_a_commit_releases_are_delivered_after_an_error_of_the_store(
    logs: LogTopic,
) -> None:
    logs.append(0, 0, message=(ONE, 2, CONTINUE_TXN))
    logs.append(0, *range(1, 40))
    logs.append(0, message=(ONE, 3, ACK_TXN))
    logs.append(0, *range(40, 140))
    assert logs.moved(0) > 100
    first = f"{NAMES[0]}/_log/{0:020d}-"
    reads, found = list[str](), list[int]()

    def fail_once(operation: str, key: str) -> None:
        """Refuse to read the first segment again for the batch that the commit releases."""
        if operation == "get" and key.startswith(first) and key.endswith(".segment"):
            reads.append(key)
            if len(reads) == 2:
                raise TransientStorageError("injected")

    def read() -> None:
        while (batch := consumer.next_batch()) is not None:
            found.extend(int(record) for record in batch.entries)
            batch.ack()

    logs.store.before = fail_once
    consumer = logs.consumer("slow")
    with pytest.raises(TransientStorageError):
        read()
    read()
    assert sorted(found) == [*range(140)]
