"""A topic in a real session: schema, new partitions, transactions, and batch reads."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opendata_buffer import Publisher, TopicProducer
from opendata_buffer.config import ProducerConfig
from opendata_buffer.consumer.isolation import ReadCommitted
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.messages import CONTINUE_TXN, build_uuid
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.partitioner import modulo
from opendata_buffer.topic.topic import Topic
from opendata_buffer.transactions import CommitRecord
from tests.spark.queues import FORMAT, Pipe, Query, append, manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def all_queued(store: str) -> int:
    return sum(manifest(store, name).entry_count for name in Topic.open(store).read().names)


def test_a_topic_grows_under_a_query_that_continues_after_a_restart(
    query: Query, store: str
) -> None:
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


def test_only_committed_transactions_of_a_publisher_are_read(query: Query, store: str) -> None:
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


def test_a_batch_read_returns_partitions_and_only_committed_records(
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


# ---- writes to a topic in a real session


@pytest.fixture
def topic(store: str) -> Topic:
    return Topic.create(store, 3)


def root(topic: Topic) -> Path:
    return Path(topic.url.removeprefix("file://"))


def delivered(topic: Topic) -> dict[str, list[list[str]]]:
    """Return the records of each batch that a reader delivers, by partition."""
    found: dict[str, list[list[str]]] = {}
    store = open_store(topic.url)
    for name in topic.read().names:
        there = manifest(topic.url, name)
        reader, where = ReadCommitted(name), dict(enumerate(there.locations()))
        found[name] = []
        for sequence, location in where.items():
            for offered in reader.offer(sequence, location, lambda *_: ()):
                blob: Any = store.get(where[offered])
                found[name].append([record.decode() for record in decode_batch(blob.data)])
        assert reader.stable_end(there.next_sequence) == there.next_sequence, "undecided"
    return found


def values(topic: Topic) -> list[str]:
    found = delivered(topic)
    return sorted(record for value in found.values() for batch in value for record in batch)


@pytest.fixture
def pipe(spark: SparkSession, topic: Topic, tmp_path: Path) -> Pipe:
    return Pipe(spark, topic.url, tmp_path)


def record_of(topic: Topic) -> Path:
    (only,) = (root(topic) / "_topic").glob("app=*/_commit.json")
    return only


def test_a_stream_is_written_to_all_partitions_and_continues_after_a_restart(
    pipe: Pipe, topic: Topic
) -> None:
    pipe.feed(*(f"a{number}" for number in range(30)))
    pipe.feed(*(f"b{number}" for number in range(30)))
    pipe.run()
    assert all(delivered(topic).values()), "every partition has some of the 30 rows"
    pipe.feed("c")
    topic.expand(4)
    pipe.feed(*(f"d{number}" for number in range(40)))
    pipe.run(pipe.frame.repartition(2))
    wanted = [f"{letter}{number}" for letter in "ab" for number in range(30)]
    assert values(topic) == sorted([*wanted, "c", *(f"d{number}" for number in range(40))])
    assert delivered(topic)["p-00003-04vf"], "the new partition has rows"
    assert CommitRecord.from_json(record_of(topic).read_bytes()).batch == 3


def test_a_restart_completes_a_decision_that_was_not_carried_out(pipe: Pipe, topic: Topic) -> None:
    pipe.feed(*(str(number) for number in range(20)))
    pipe.run()
    # As if the driver had died after it wrote the record, before any acknowledgement.
    for name in topic.read().names:
        path = root(topic) / name / "manifest"
        entries = manifest(topic.url, name).entries()
        kept = [entry for entry in entries if entry.metadata]
        assert len(kept) == len(entries) - 1, "the acknowledgement"
        bare = Manifest.empty().append(kept)  # type: ignore[arg-type]
        path.write_bytes(bare.raw)
        (path.parent / "_owner.json").unlink()
    pipe.forget_commit(0)
    pipe.options = {"gcGracePeriodMs": "600001"}  # another committer, as in a new driver
    pipe.run()
    assert values(topic) == sorted(str(number) for number in range(20))


def test_keys_go_where_the_partitioner_says_and_keep_their_order(
    spark: SparkSession, topic: Topic
) -> None:
    rows = [(f"k{number % 7}", f"k{number % 7}/{number:04}") for number in range(700)]
    df = spark.createDataFrame(rows, "key STRING, value STRING").coalesce(1)
    writer = df.write.format(FORMAT).option("partitioner", "modulo").mode("append")
    writer.save(topic.url)
    keys = [f"k{number}" for number in range(7)]
    home = dict(zip(keys, modulo(keys, topic.description.active), strict=True))
    wanted = defaultdict(list)
    for key, value in rows:
        wanted[topic.description.active[home[key]]].append(value)
    found = {name: [v for batch in item for v in batch] for name, item in delivered(topic).items()}
    assert {name: each for name, each in found.items() if each} == wanted
    assert not list((root(topic) / "_topic").glob("app=*/_commit.json")), "without an app id"
