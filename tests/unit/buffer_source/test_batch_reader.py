from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from pickle import loads

import pytest
from pyspark.cloudpickle import dumps

from buffer_source.batch_reader import BufferBatchReader, select
from buffer_source.options import SourceOptions
from buffer_source.planner import TaskBatches
from buffer_source.schema import default_schema
from opendata_buffer import Consumer, Producer
from opendata_buffer.config import ConsumerConfig, ProducerConfig, QueueConfig
from opendata_buffer.consumer.isolation import Repeats
from opendata_buffer.errors import DataLoss, InvalidInput, QueueReset
from opendata_buffer.formats.batch import Transaction, batch_key
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.testing.runtime import ManualRuntime
from opendata_buffer.topic.topic import Topic
from tests.support.logs import make_log
from tests.unit.buffer_source.structs import struct


def options(**given: str) -> SourceOptions:
    return SourceOptions.from_spark({"path": "/unused", **given})


@pytest.fixture
def manifest(runtime: ManualRuntime) -> Manifest:
    """Return a manifest with sequences 2 to 5; 0 and 1 were consumed."""
    entries = [NewEntry(batch_key("ingest", runtime.ulid())) for _ in range(6)]
    return Manifest.empty().append(entries).drop_through(1)


def sequences(manifest: Manifest, **given: str) -> list[int]:
    wanted = options(**given)
    repeats = Repeats(MemoryStore(), wanted.queue, ManualRuntime(), "")
    return [entry.sequence for entry in select(manifest, wanted, repeats)]


def test_a_pickled_reader_reads_records_into_columns(tmp_path: Path) -> None:
    with Producer(ProducerConfig(store=str(tmp_path))) as producer:
        producer.produce([b'{"id":1,"at":"2020-01-01T00:00:00Z"}', b'{"id":"x"}', b'{"id":3}'])
    given = {"path": str(tmp_path), "valueFormat": "json", "mode": "DROPMALFORMED"}
    schema = struct("id bigint", "at timestamp", "_index int")
    reader = BufferBatchReader(SourceOptions.from_spark(given), schema)
    tasks = [loads(dumps((reader, each))) for each in reader.partitions()]
    rows = [row for own, task in tasks for part in own.read(task) for row in part.to_pylist()]
    assert [(row["id"], row["_index"]) for row in rows] == [(1, 0), (3, 2)]
    assert rows[0]["at"] == datetime(2020, 1, 1, tzinfo=UTC)


def test_a_batch_read_of_a_consumed_queue_warns_about_the_gap_and_names_the_fix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path)

    def read(**given: str) -> list[str]:
        caplog.clear()
        wanted = SourceOptions.from_spark({"path": url, **given})
        assert len(BufferBatchReader(wanted, default_schema()).partitions()) == 0
        return caplog.messages

    with Producer(url) as producer:
        producer.send(b"a").result()
    with Consumer(url) as consumer:
        batch = consumer.next_batch()
        assert batch is not None
        batch.ack()
    (message,) = read()
    assert "1 batch was read and removed before this query" in message
    assert f"'opendata-buffer readers enable file://{url} --retention 7d'" in message
    assert read(startingOffsets="1") == []


def test_a_range_includes_its_start_and_excludes_its_end(manifest: Manifest) -> None:
    assert sequences(manifest) == [2, 3, 4, 5]
    assert sequences(manifest, startingOffsets="3", endingOffsets="5") == [3, 4]
    assert sequences(manifest, endingOffsets="6") == [2, 3, 4, 5]
    assert sequences(manifest, startingOffsets="6") == []
    assert sequences(manifest, startingOffsets="3", endingOffsets="3") == []


def test_positions_outside_the_queue_are_an_error(manifest: Manifest) -> None:
    with pytest.raises(DataLoss, match=r"sequence 1 is needed but .* starts at 2"):
        sequences(manifest, startingOffsets="1")
    with pytest.raises(InvalidInput, match="ends at 5"):
        sequences(manifest, endingOffsets="7")
    with pytest.raises(InvalidInput, match="ends at 5"):
        sequences(manifest, startingOffsets="7")
    allowed = sequences(manifest, startingOffsets="0", endingOffsets="9", failOnDataLoss="false")
    assert allowed == [2, 3, 4, 5]


def test_repeats_of_a_transaction_are_left_out_for_every_range(runtime: ManualRuntime) -> None:
    txn = Transaction("a", 1)
    manifest = Manifest.empty()
    for group in ([txn, txn], [None], [txn, txn]):
        names = [NewEntry(batch_key("ingest", runtime.ulid(), each)) for each in group]
        manifest = manifest.append(names)
    assert sequences(manifest) == [0, 1, 2]
    assert sequences(manifest, startingOffsets="1") == [1, 2]
    assert sequences(manifest, startingOffsets="3") == []


def consume(url: str, reader: str, count: int, prefix: str = "ingest") -> None:
    """Acknowledge batches as a reader of a log."""
    # Without a collector, which may raise the floor before the next reader starts.
    config = ConsumerConfig(store=url, data_path_prefix=prefix, reader=reader, gc=False)
    with Consumer(config) as consumer:
        for _ in range(count):
            batch = consumer.next_batch()
            assert batch is not None
            batch.ack()


def planned(url: str, **given: str) -> list[tuple[str, int]]:
    """Return the partition and the sequence of each batch of a batch read."""
    wanted = SourceOptions.from_spark({"path": url, **given})
    tasks = BufferBatchReader(wanted, default_schema()).partitions()
    return [(batch.partition, batch.sequence) for task in tasks for batch in task.batches]  # type: ignore[attr-defined]


def test_a_batch_read_with_a_reader_begins_where_this_reader_is_and_does_not_move_it(
    tmp_path: Path,
) -> None:
    url = str(tmp_path)
    with Producer(url) as producer:
        for number in range(5):
            producer.produce([b"%d" % number]).result()
    make_log(QueueConfig(store=url))
    consume(url, "billing", 2)
    consume(url, "search", 4)
    for _ in range(2):
        assert planned(url, reader="billing") == [("0", at) for at in (2, 3, 4)]
        assert planned(url, reader="search") == [("0", 4)]
    assert planned(url) == [("0", at) for at in range(5)]
    assert planned(url, reader="billing", endingOffsets="3") == [("0", 2)]
    for name in ("startingOffsets", "startingTimestamp"):
        with pytest.raises(InvalidInput, match=f"reader is 'billing' and {name} is .*leave one"):
            planned(url, reader="billing", **{name: "1"})
    with pytest.raises(InvalidInput, match=r"no reader 'bill'; readers of this log: billing, sear"):
        planned(url, reader="bill")


def test_a_batch_read_with_a_reader_of_a_topic_begins_in_each_partition_where_it_is(
    tmp_path: Path,
) -> None:
    url = str(tmp_path)
    names = Topic.create(url, 2).description.names
    for count, name in enumerate(names, 1):
        config = ProducerConfig(store=url, data_path_prefix=name)
        with Producer(config) as producer:
            for _ in range(3):
                producer.produce([b"x"]).result()
        make_log(QueueConfig(store=url, data_path_prefix=name))
        consume(url, "billing", count, name)
    assert planned(url, reader="billing") == [(names[0], 1), (names[0], 2), (names[1], 2)]


def test_a_batch_read_with_a_reader_of_a_plain_queue_is_refused(tmp_path: Path) -> None:
    url = str(tmp_path)
    with Producer(url) as producer:
        producer.produce([b"x"]).result()
    with pytest.raises(InvalidInput, match="is not a log, and has no named readers"):
        planned(url, reader="billing")


def test_the_error_about_a_missing_queue_names_it(tmp_path: Path) -> None:
    reader = BufferBatchReader(SourceOptions.from_spark({"path": str(tmp_path)}), default_schema())
    with pytest.raises(InvalidInput, match=r"no queue with manifest 'ingest/manifest' in file://"):
        reader.partitions()


@pytest.mark.parametrize("given", [{}, {"dataPathPrefix": "p-00001-05mv"}])
def test_f4_a_lost_manifest_is_not_reported_as_an_empty_partition_or_a_wrong_path(
    tmp_path: Path, given: dict[str, str]
) -> None:
    Topic.create(str(tmp_path), 2)
    for name in ("p-00000-04pn", "p-00001-05mv"):
        with Producer(ProducerConfig(store=str(tmp_path), data_path_prefix=name)) as producer:
            producer.produce([b"x"])
    (tmp_path / "p-00001-05mv" / "manifest").unlink()
    lost = {"path": str(tmp_path), **given}
    reader = BufferBatchReader(SourceOptions.from_spark(lost), default_schema())
    with pytest.raises(QueueReset, match="manifest 'p-00001-05mv/manifest' is gone from"):
        reader.partitions()


def test_the_rest_of_a_topic_is_read_if_data_loss_is_allowed(tmp_path: Path) -> None:
    Topic.create(str(tmp_path), 3)
    for name in ("p-00000-04pn", "p-00001-05mv"):
        with Producer(ProducerConfig(store=str(tmp_path), data_path_prefix=name)) as producer:
            producer.produce([b"x"])
    (tmp_path / "p-00001-05mv" / "manifest").unlink()
    allowed = SourceOptions.from_spark({"path": str(tmp_path), "failOnDataLoss": "false"})
    (task,) = BufferBatchReader(allowed, default_schema()).partitions()
    assert isinstance(task, TaskBatches)
    assert [each.partition for each in task.batches] == ["p-00000-04pn"]
