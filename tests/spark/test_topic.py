"""A topic in a real session: schema, partitions that are added, transactions, batch reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opendata_buffer.config import ProducerConfig
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.topic.producer import TopicProducer
from opendata_buffer.topic.publisher import Publisher
from opendata_buffer.topic.topic import Topic
from tests.spark.queues import FORMAT, Query, append, manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def all_queued(store: str) -> int:
    return sum(manifest(store, name).entry_count for name in Topic.open(store).read().names)


def test_a_topic_grows_under_a_query_that_goes_on_after_a_restart(query: Query, store: str) -> None:
    topic = Topic.create(store, 2)
    with TopicProducer(ProducerConfig(store=store)) as producer:
        producer.produce([b"%d" % number for number in range(10)])
    with query.running(maxBatchesPerTrigger="1") as run:
        run.processAllAvailable()
        assert sorted(query.sink.values) == list(range(10))
        topic.expand(3)
        append(store, "p-00002-0bvb", [b"10"])
        append(store, "p-00002-0bvb", [b"11"])
        run.processAllAvailable()
        assert sorted(query.sink.values) == list(range(12))
    append(store, "p-00002-0bvb", [b"12"])
    append(store, "p-00000-04pn", [b"13"])
    query.available_now()
    assert sorted(query.sink.values) == list(range(14))
    assert all_queued(store) == 0


def test_what_a_publisher_commits_is_read_and_nothing_else(query: Query, store: str) -> None:
    Topic.create(store, 2)
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
    spark: SparkSession, store: str
) -> None:
    Topic.create(store, 3)
    append(store, "p-00000-04pn", [b"1"])
    append(store, "p-00000-04pn", [b"2"])
    append(store, "p-00002-0bvb", [b"3"])
    append(store, "p-00002-0bvb", [b"4"], message=build_uuid(b"writer", 2, CONTINUE_TXN))

    def rows(**options: str) -> list[tuple[str, int, bytes]]:
        frame = spark.read.format(FORMAT).options(**options).load(store)
        assert "partition:string" in frame.schema.simpleString()
        found = frame.select("partition", "sequence", "value").collect()
        return sorted((row[0], row[1], bytes(row[2])) for row in found)

    committed = [("p-00000-04pn", 0, b"1"), ("p-00000-04pn", 1, b"2"), ("p-00002-0bvb", 0, b"3")]
    assert rows() == committed
    assert rows(isolationLevel="read_uncommitted") == [*committed, ("p-00002-0bvb", 1, b"4")]
    one = spark.read.format(FORMAT).option("dataPathPrefix", "p-00002-0bvb").load(store)
    assert "partition" not in one.columns
    assert one.count() == 1
