from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from buffer_sink import writer as plan
from buffer_sink.messages import TaskUploads, UploadedBatch, WriteTask
from buffer_sink.writer import BufferStreamWriter, stream_writer
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.runtime import Moment
from opendata_buffer.topic.topic import Topic

SCHEMA = StructType([StructField("value", StringType())])
PROPERTIES = {"sql.streaming.queryId": "query-1", "streaming.sql.batchId": "7"}


def rows(*values: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values)], names=["value"])


def in_a_task(monkeypatch: pytest.MonkeyPatch, properties: dict[str, str]) -> None:
    monkeypatch.setattr(plan, "task_property", properties.get)


def made(tmp_path: Path, **options: str) -> BufferStreamWriter:
    # As Spark does: made on the driver, pickled to the task.
    writer = stream_writer({"path": str(tmp_path), **options}, SCHEMA, False)
    return pickle.loads(pickle.dumps(writer))  # type: ignore[no-any-return]


def test_the_identity_is_the_query_and_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_task(monkeypatch, PROPERTIES)
    message = made(tmp_path).write(iter([rows("a")]))
    assert isinstance(message, TaskUploads)
    assert message.task.transaction == Transaction("query-1", 7)


def test_an_app_id_takes_the_query_s_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_task(monkeypatch, PROPERTIES)
    message = made(tmp_path, txnappid="mine").write(iter([rows("a")]))
    assert isinstance(message, TaskUploads)
    assert message.task.transaction == Transaction("mine", 7)


def test_outside_of_a_query_there_is_no_identity(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not know its query and batch"):
        made(tmp_path).write(iter([rows("a")]))


def test_commit_of_another_batch_than_the_tasks_wrote(tmp_path: Path) -> None:
    upload = UploadedBatch("ingest/x.batch", 1, 1, ())
    message = TaskUploads(WriteTask(0, Moment(0, 0.0), Transaction("q", 7)), (upload,))
    with pytest.raises(InvalidInput, match="wrote batch 7 and Spark commits batch 8"):
        made(tmp_path).commit([None, message], 8)


def test_write_and_commit_but_abort_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_task(monkeypatch, PROPERTIES)
    messages = [made(tmp_path).write(iter([rows("a")]))]
    made(tmp_path).commit([*messages], 7)
    # Spark aborts when the answer to a commit was lost; the uploads are in the queue.
    made(tmp_path).abort([*messages, None], 7)
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
    assert made(tmp_path, **{name: value})._plan.topic is None


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
