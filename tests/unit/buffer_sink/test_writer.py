"""Spark's writers, the plan they share, and what a process remembers."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from buffer_sink import writer as module
from buffer_sink.messages import TaskUploads, UploadedBatch, WriteTask
from buffer_sink.options import SinkOptions
from buffer_sink.writer import (
    BufferBatchWriter,
    BufferStreamWriter,
    WritePlan,
    batch_writer,
    stream_writer,
)
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, QueueReset
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.runtime import Moment
from opendata_buffer.topic.topic import Topic

SCHEMA = StructType([StructField("value", StringType())])


def plan(tmp_path: Path) -> WritePlan:
    options = SinkOptions(queue=QueueConfig(store=str(tmp_path)))
    return pickle.loads(pickle.dumps(WritePlan.make(options, SCHEMA)))  # type: ignore[no-any-return]


def test_making_a_plan_touches_nothing(tmp_path: Path) -> None:
    plan(tmp_path / "not there")
    assert not (tmp_path / "not there").exists()


def test_a_write_is_visible_after_its_commit_only(tmp_path: Path) -> None:
    made = plan(tmp_path)
    rows = pa.record_batch([pa.array(["a", "b"])], names=["value"])
    message = made.upload(iter([rows]), Transaction("q", 0))
    assert message.task.planned == made.made
    assert len(list(tmp_path.rglob("*.batch"))) == 1
    assert not (tmp_path / "ingest" / "manifest").exists()
    plan(tmp_path).append([message, None])
    before = (tmp_path / "ingest" / "manifest").read_bytes()
    plan(tmp_path).append([message])
    assert (tmp_path / "ingest" / "manifest").read_bytes() == before


def records_in(root: Path) -> list[tuple[str, list[bytes]]]:
    """The queue's entries in order: location and records."""
    manifest = Manifest.parse((root / "ingest" / "manifest").read_bytes())
    return [
        (each.location, decode_batch((root / each.location).read_bytes()))
        for each in manifest.entries()
    ]


def test_two_hundred_tasks_with_a_row_each_make_one_batch_where_they_are_gathered(
    tmp_path: Path,
) -> None:
    queue = QueueConfig(store=str(tmp_path))
    made = WritePlan.make(SinkOptions(queue=queue, gather_bytes=1_000), SCHEMA)
    rows = [pa.record_batch([pa.array([str(number)])], names=["value"]) for number in range(200)]
    sent = [
        replace(message, task=replace(message.task, number=number))
        for number, each in enumerate(rows)
        for message in [made.upload(iter([each]), Transaction("q", 0))]
    ]
    assert list(tmp_path.rglob("*.batch")) == []
    made.append(sent[::-1])
    ((location, records),) = records_in(tmp_path)
    assert records == [str(number).encode() for number in range(200)], "in the tasks' order"
    assert "/app=q/batch=0/" in location
    made.append(sent)
    assert len(records_in(tmp_path)) == 1, "a repeat adds nothing"


def test_with_value_format_json_the_columns_are_the_record_and_metadata_has_an_underscore(
    tmp_path: Path,
) -> None:
    options = SinkOptions(queue=QueueConfig(store=str(tmp_path)), value_format="json")
    fields = [StructField("id", IntegerType()), StructField("_metadata", StringType())]
    made = pickle.loads(pickle.dumps(WritePlan.make(options, StructType(fields)))).locate()
    rows = pa.record_batch([pa.array([7, None]), pa.array(["m", "m"])], names=["id", "_metadata"])
    made.append([made.upload(iter([rows]), None)])
    ((_, records),) = records_in(tmp_path)
    assert records == [b'{"id":7}', b"{}"]
    manifest = Manifest.parse((tmp_path / "ingest" / "manifest").read_bytes())
    assert [each.payload for each in manifest.entries()[0].metadata] == [b"m"]


def test_a_queue_deleted_on_purpose_fails_one_commit_and_not_the_next(tmp_path: Path) -> None:
    rows = pa.record_batch([pa.array(["a"])], names=["value"])
    plan(tmp_path).append([plan(tmp_path).upload(iter([rows]), None)])
    shutil.rmtree(tmp_path / "ingest")
    message = plan(tmp_path).upload(iter([rows]), None)
    with pytest.raises(QueueReset, match="vanished while in use"):
        plan(tmp_path).append([message])
    plan(tmp_path).append([message])
    assert (tmp_path / "ingest" / "manifest").exists()


def test_a_thousand_micro_batches_of_foreach_batch_remember_one_manifest(tmp_path: Path) -> None:
    module._forget_committers()
    for version in range(3):
        options = SinkOptions(queue=QueueConfig(store=str(tmp_path)), app="job", version=version)
        made = WritePlan.make(options, SCHEMA)
        rows = pa.record_batch([pa.array(["a"])], names=["value"])
        made.append([made.upload(iter([rows]), options.transaction)])
    manifest = Manifest.parse((tmp_path / "ingest" / "manifest").read_bytes())
    assert manifest.next_sequence == 3
    assert len(module._committers) == 1


def test_a_store_with_a_queue_is_not_asked_for_a_topic_at_each_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    monkeypatch.setattr("buffer_sink.writer.find_topic", looks.append)
    for _ in range(3):
        assert plan(tmp_path).locate().topic is None
    assert len(looks) == 1
    plan(tmp_path / "other").locate()
    assert len(looks) == 2


def test_a_topic_that_is_made_because_a_write_wanted_one_is_found_at_once(tmp_path: Path) -> None:
    options = SinkOptions(queue=QueueConfig(store=str(tmp_path)), partitioner="modulo")
    schema = StructType([StructField("value", BinaryType()), StructField("key", BinaryType())])
    with pytest.raises(InvalidInput, match="key"):
        WritePlan.make(options, schema).locate()
    Topic.create(str(tmp_path), 2)
    topic = WritePlan.make(options, schema).locate().topic
    assert topic is not None
    assert len(topic.active) == 2


def rows(*values: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values)], names=["value"])


def made_batch(tmp_path: Path, **options: str) -> BufferBatchWriter:
    writer = batch_writer({"path": str(tmp_path), **options}, SCHEMA, False)
    return pickle.loads(pickle.dumps(writer))  # type: ignore[no-any-return]


def test_without_options_a_write_has_no_identity(tmp_path: Path) -> None:
    message = made_batch(tmp_path).write(iter([rows("a")]))
    assert isinstance(message, TaskUploads)
    assert message.task.transaction is None


def test_the_identity_comes_from_the_options(tmp_path: Path) -> None:
    message = made_batch(tmp_path, txnappid="mine", txnversion="4").write(iter([rows("a")]))
    assert isinstance(message, TaskUploads)
    assert message.task.transaction == Transaction("mine", 4)


def test_a_batch_is_written_and_committed_and_abort_deletes_nothing(tmp_path: Path) -> None:
    messages = [made_batch(tmp_path).write(iter([rows("a")]))]
    made_batch(tmp_path).commit([*messages])
    made_batch(tmp_path).abort([*messages, None])
    assert len(list(tmp_path.rglob("*.batch"))) == 1
    assert (tmp_path / "ingest" / "manifest").stat().st_size > 22


def test_overwrite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"overwrite.*mode\('append'\)"):
        batch_writer({"path": str(tmp_path)}, SCHEMA, True)


PROPERTIES = {"sql.streaming.queryId": "query-1", "streaming.sql.batchId": "7"}


def in_a_task(monkeypatch: pytest.MonkeyPatch, properties: dict[str, str]) -> None:
    monkeypatch.setattr(module, "task_property", properties.get)


def made_stream(tmp_path: Path, **options: str) -> BufferStreamWriter:
    # As Spark does: made_stream on the driver, pickled to the task.
    writer = stream_writer({"path": str(tmp_path), **options}, SCHEMA, False)
    return pickle.loads(pickle.dumps(writer))  # type: ignore[no-any-return]


def test_the_identity_is_the_query_and_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_task(monkeypatch, PROPERTIES)
    message = made_stream(tmp_path).write(iter([rows("a")]))
    assert isinstance(message, TaskUploads)
    assert message.task.transaction == Transaction("query-1", 7)


def test_an_app_id_takes_the_query_s_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_task(monkeypatch, PROPERTIES)
    message = made_stream(tmp_path, txnappid="mine").write(iter([rows("a")]))
    assert isinstance(message, TaskUploads)
    assert message.task.transaction == Transaction("mine", 7)


def test_outside_of_a_query_there_is_no_identity(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not know its query and batch"):
        made_stream(tmp_path).write(iter([rows("a")]))


def test_commit_of_another_batch_than_the_tasks_wrote(tmp_path: Path) -> None:
    upload = UploadedBatch("ingest/x.batch", 1, 1, ())
    message = TaskUploads(WriteTask(0, Moment(0, 0.0), Transaction("q", 7)), (upload,))
    with pytest.raises(InvalidInput, match="wrote batch 7 and Spark commits batch 8"):
        made_stream(tmp_path).commit([None, message], 8)


def test_write_and_commit_but_abort_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_task(monkeypatch, PROPERTIES)
    messages = [made_stream(tmp_path).write(iter([rows("a")]))]
    made_stream(tmp_path).commit([*messages], 7)
    # Spark aborts when the answer to a commit was lost; the uploads are in the queue.
    made_stream(tmp_path).abort([*messages, None], 7)
    assert len(list(tmp_path.rglob("*.batch"))) == 1
    assert (tmp_path / "ingest" / "manifest").stat().st_size > 22


def test_complete_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"complete.*outputMode\('append'\)"):
        stream_writer({"path": str(tmp_path)}, SCHEMA, True)


# A topic.

KEYED = StructType([StructField("value", StringType()), StructField("key", StringType())])


def keyed(*values: str) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(values), pa.array([value[:1] for value in values])], names=["value", "key"]
    )


def test_a_topic_is_found_on_the_way_to_the_tasks_and_the_commit_needs_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_task(monkeypatch, PROPERTIES)
    options = {"path": str(tmp_path), "partitioner": "rendezvous"}
    Topic.create(str(tmp_path), 4)
    writer = stream_writer(options, KEYED, False)
    sent = [pickle.loads(pickle.dumps(writer)) for _ in range(2)]
    values = [f"{letter}{number}" for letter in "abcdefgh" for number in range(3)]
    messages = [each.write(iter([keyed(*values)])) for each in sent]
    assert messages[0].task == messages[1].task, "pickled twice, and one attempt"
    stream_writer(options, KEYED, False).commit(messages[:1], 7)
    found = {
        path.parent.name: [
            record
            for entry in Manifest.parse(path.read_bytes()).entries()
            for record in decode_batch((tmp_path / entry.location).read_bytes())
        ]
        for path in tmp_path.glob("p-*/manifest")
    }
    assert sorted(record.decode() for each in found.values() for record in each) == values
    assert len([each for each in found.values() if each]) > 1
    for each in found.values():
        assert each == sorted(each), "the order of each key is kept"


def test_the_next_attempt_at_a_batch_is_another_producer(tmp_path: Path) -> None:
    Topic.create(str(tmp_path), 2)
    first, second = (
        pickle.loads(pickle.dumps(stream_writer({"path": str(tmp_path)}, SCHEMA, False)))
        for _ in range(2)
    )
    assert first._plan.topic.producer != second._plan.topic.producer


@pytest.mark.parametrize("name", ["dataPathPrefix", "manifestPath"])
def test_a_prefix_or_a_manifest_names_one_queue_also_in_a_topic(tmp_path: Path, name: str) -> None:
    Topic.create(str(tmp_path), 2)
    value = "p-00000-04pn" if name == "dataPathPrefix" else "p-00000-04pn/manifest"
    assert made_stream(tmp_path, **{name: value})._plan.topic is None


def test_a_partitioner_without_a_topic_is_refused(tmp_path: Path) -> None:
    writer = stream_writer({"path": str(tmp_path), "partitioner": "modulo"}, KEYED, False)
    with pytest.raises(InvalidInput, match="column 'key' cannot be written to a single queue"):
        pickle.dumps(writer)
    writer = stream_writer({"path": str(tmp_path), "partitioner": "random"}, SCHEMA, False)
    with pytest.raises(InvalidInput, match="there is no topic at"):
        pickle.dumps(writer)


def test_a_key_is_missing(tmp_path: Path) -> None:
    Topic.create(str(tmp_path), 2)
    writer = stream_writer({"path": str(tmp_path), "partitioner": "modulo"}, SCHEMA, False)
    with pytest.raises(InvalidInput, match="column 'key' is missing"):
        pickle.dumps(writer)
