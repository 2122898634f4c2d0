"""A topic in a real session: schema, partitions that are added, transactions, batch reads."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from opendata_buffer.config import ProducerConfig, QueueConfig
from opendata_buffer.formats.batch import encode_batch
from opendata_buffer.formats.keys import batch_key
from opendata_buffer.formats.manifest import Metadata, NewEntry
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.queue.queue import Queue
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.producer import TopicProducer
from opendata_buffer.topic.publisher import Publisher
from opendata_buffer.topic.topic import Topic
from tests.spark.queues import Query

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def append(store: str, partition: str, *values: int, message: uuid.UUID | None = None) -> None:
    """One batch of one record for each value; an empty one without values."""
    opened, runtime = open_store(store), SystemRuntime()
    entries = []
    for records in [[b"%d" % value] for value in values] or [[]]:
        location = batch_key(partition, runtime.ulid(), message=message)
        opened.put(location, encode_batch(records))
        entries.append(NewEntry(location, (Metadata(0, runtime.now_ms(), b"m"),)))
    config = Topic.config_of(partition, QueueConfig(store=store))
    Queue(opened, config, runtime=runtime, role="test").append(entries)


def all_queued(store: str) -> int:
    topic = Topic.open(store)
    found = 0
    for name in topic.read().names:
        config = Topic.config_of(name, QueueConfig(store=store))
        manifest = Queue(topic.store, config, runtime=SystemRuntime(), role="test").read()
        found += 0 if manifest is None else manifest.entry_count
    return found


def test_a_topic_grows_under_a_query_that_goes_on_after_a_restart(
    spark: SparkSession, store: str, checkpoint: str
) -> None:
    topic = Topic.create(store, 2)
    query = Query(spark, store, checkpoint)
    with TopicProducer(ProducerConfig(store=store)) as producer:
        producer.produce([b"%d" % number for number in range(10)])
    with query.running(maxBatchesPerTrigger="1") as run:
        run.processAllAvailable()
        assert sorted(query.sink.values) == list(range(10))
        topic.expand(3)
        append(store, "p-00002-0bvb", 10, 11)
        run.processAllAvailable()
        assert sorted(query.sink.values) == list(range(12))
    append(store, "p-00002-0bvb", 12)
    append(store, "p-00000-04pn", 13)
    query.available_now()
    assert sorted(query.sink.values) == list(range(14))
    assert all_queued(store) == 0


def test_what_a_publisher_commits_is_read_and_nothing_else(
    spark: SparkSession, store: str, checkpoint: str
) -> None:
    Topic.create(store, 2)
    query = Query(spark, store, checkpoint)
    with Publisher(store, "billing") as publisher:
        publisher.publish_committed([b"1"], partition="0")
        for value, partition in ((b"2", "0"), (b"3", "1")):
            publisher.publish_uncommitted([value], partition=partition)
        publisher.commit(60)
        for value, partition in ((b"4", "0"), (b"5", "1")):
            publisher.publish_uncommitted([value], partition=partition)
        publisher.build_ack_intents(60)
        query.available_now()
        assert sorted(query.sink.values) == [1, 2, 3]
        publisher.abort()
        publisher.publish_uncommitted([b"6"], partition="1")
        publisher.commit(60)
    query.available_now()
    assert sorted(query.sink.values) == [1, 2, 3, 6]
    assert all_queued(store) == 0


def test_a_batch_read_shows_partitions_and_what_is_committed(
    spark: SparkSession, store: str, checkpoint: str
) -> None:
    Topic.create(store, 3)
    append(store, "p-00000-04pn", 1, 2)
    append(store, "p-00002-0bvb", 3)
    append(store, "p-00002-0bvb", 4, message=build_uuid(b"writer", 2, CONTINUE_TXN))

    def rows(**options: str) -> list[tuple[str, int, bytes]]:
        frame = spark.read.format("opendata-buffer").options(**options).load(store)
        assert "partition:string" in frame.schema.simpleString()
        found = frame.select("partition", "sequence", "value").collect()
        return sorted((row[0], row[1], bytes(row[2])) for row in found)

    committed = [("p-00000-04pn", 0, b"1"), ("p-00000-04pn", 1, b"2"), ("p-00002-0bvb", 0, b"3")]
    assert rows() == committed
    assert rows(isolationLevel="read_uncommitted") == [*committed, ("p-00002-0bvb", 1, b"4")]
    one = spark.read.format("opendata-buffer").option("dataPathPrefix", "p-00002-0bvb").load(store)
    assert "partition" not in one.columns
    assert one.count() == 1
