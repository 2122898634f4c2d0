"""Checkpoints, sidecars, and queues of version 0.1 can be read, and queries continue with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from buffer_sink.committer import Group, QueueCommitter, TopicCommitter, TopicWrite, UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_source.micro_batch_stream import MicroBatchStream
from buffer_source.options import SourceOptions
from buffer_source.partitions import SourceOffset
from opendata_buffer.config import QueueConfig
from opendata_buffer.formats.batch import Transaction, batch_key, decode_batch
from opendata_buffer.queue.consumer_note import read_consumer_info
from opendata_buffer.runtime import Moment, SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic

OLD = Path(__file__).parent / "v0.1"
RUNTIME = SystemRuntime()


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "old"))


def offset(old: Path, query: str, batch: int) -> SourceOffset | None:
    text = (old / "checkpoints" / query / "offsets" / str(batch)).read_text()
    return SourceOffset.from_json(json.loads(text.splitlines()[2]))


def query_id(old: Path, query: str) -> str:
    metadata = json.loads((old / "checkpoints" / query / "metadata").read_text())
    return str(metadata["id"])


def stream(path: Path) -> MicroBatchStream:
    options = SourceOptions.from_spark({"path": str(path), "gcEnabled": "false"})
    return MicroBatchStream(options, open_store(str(path)), RUNTIME)


def test_a_query_over_a_queue_continues_after_its_checkpoint(old: Path) -> None:
    driver, start = stream(old / "queue"), offset(old, "to_topic", 1)
    end = driver.latest_offset(start)
    (task,) = driver.plan_input_partitions(start, end)
    (batch,) = task.batches
    assert decode_batch((old / "queue" / batch.location).read_bytes()) == [b"left"]
    driver.commit(end)
    assert driver.latest_offset(end) == end
    driver.stop()


def test_a_query_over_a_topic_continues_after_its_checkpoint(old: Path) -> None:
    driver, start = stream(old / "topic"), offset(old, "to_queue", 1)
    assert start is not None
    assert driver.latest_offset(start) == start, "everything was read"
    report = driver.report()
    assert report is not None
    assert report["next"] == dict.fromkeys(start.partitions, 3)
    driver.stop()


@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_that_was_committed_to_a_queue_is_not_appended_again(old: Path, batch: int) -> None:
    options = SinkOptions(queue=QueueConfig(store=str(old / "target")))
    store, query = open_store(options.queue.store), query_id(old, "to_queue")
    before = (old / "target" / "ingest" / "manifest").read_bytes()
    txn = Transaction(query, batch)
    key = batch_key("ingest", RUNTIME.ulid(), txn)
    store.put(key, b"again")
    upload = UploadedBatch(key, 1, ())
    group = Group(Moment.now(RUNTIME), (upload,), txn, query)
    assert not QueueCommitter(store, options, RUNTIME).append(group)
    assert (old / "target" / "ingest" / "manifest").read_bytes() == before


@pytest.mark.parametrize("batch", [0, 1])
def test_a_batch_that_was_committed_to_a_topic_is_not_appended_again(old: Path, batch: int) -> None:
    config = QueueConfig(store=str(old / "topic"))
    store, query = open_store(config.store), query_id(old, "to_topic")
    topic = TopicWrite.planned(Topic.open(config).read(), RUNTIME)
    name = topic.active[0]
    before = (old / "topic" / name / "manifest").read_bytes()
    txn = Transaction(query, batch)
    key = topic.location(name, RUNTIME.ulid(), txn, topic.clock(0, 0))
    store.put(key, b"again")
    upload = UploadedBatch(key, 1, (), name, topic.clock(0, 0))
    group = Group(Moment.now(RUNTIME), (upload,), txn, query, topic)
    assert not TopicCommitter(store, SinkOptions(queue=config), RUNTIME).append(group)
    assert (old / "topic" / name / "manifest").read_bytes() == before


def test_the_note_of_a_consumer_is_read(old: Path) -> None:
    config = QueueConfig(store=str(old / "queue"))
    holder = read_consumer_info(open_store(config.store), config, RUNTIME)
    assert holder is not None
    assert (holder.epoch, holder.program, holder.host) == (2, "Spark", "vm")
