"""Spark's writers, the plan that they share, and the state of a process."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql import datasource
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from buffer_sink import writer as module
from buffer_sink.committer import UploadedBatch
from buffer_sink.options import SinkOptions
from buffer_sink.writer import (
    TaskUploads,
    WritePlan,
    WriteRefused,
    WriteTask,
    batch_writer,
    stream_writer,
)
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, QueueReset
from opendata_buffer.formats.batch import Transaction, decode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.runtime import Moment
from opendata_buffer.topic.topic import Topic

SCHEMA = StructType([StructField("value", StringType())])
KEYED = StructType([StructField("value", StringType()), StructField("key", StringType())])
PROPERTIES = {"sql.streaming.queryId": "query-1", "streaming.sql.batchId": "7"}


def pickled(sent: Any) -> Any:
    """Pickle and unpickle a writer, as Spark does between the driver and a task."""
    return pickle.loads(pickle.dumps(sent))


def plan(root: Path, schema: StructType = SCHEMA, **options: Any) -> WritePlan:
    given = {"gather_bytes": 0, **options}
    return WritePlan.make(SinkOptions(queue=QueueConfig(store=str(root)), **given), schema)


def rows(*values: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values)], names=["value"])


def keyed(*values: str) -> pa.RecordBatch:
    keys = pa.array([value[:1] for value in values])
    return pa.record_batch([pa.array(values), keys], names=["value", "key"])


def made_batch(root: Path, **options: str) -> Any:
    return pickled(batch_writer({"path": str(root), **options}, SCHEMA, False))


def made_stream(root: Path, **options: str) -> Any:
    return pickled(stream_writer({"path": str(root), **options}, SCHEMA, False))


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "task_property", PROPERTIES.get)


def queued_in(root: Path, name: str = "ingest") -> list[tuple[str, list[bytes]]]:
    """Return the location and the records of each entry, in order."""
    manifest = Manifest.parse((root / name / "manifest").read_bytes())
    return [
        (each.location, decode_batch((root / each.location).read_bytes()))
        for each in manifest.entries()
    ]


def test_a_write_becomes_visible_once_and_only_after_its_commit(tmp_path: Path) -> None:
    made = pickled(plan(tmp_path))
    message = made.upload(iter([rows("a", "b")]), Transaction("q", 0))
    assert message.task.planned == made.made
    assert len(list(tmp_path.rglob("*.batch"))) == 1
    assert not (tmp_path / "ingest" / "manifest").exists()
    plan(tmp_path).append([message, None])
    before = (tmp_path / "ingest" / "manifest").read_bytes()
    plan(tmp_path).append([message])
    assert (tmp_path / "ingest" / "manifest").read_bytes() == before


def test_with_value_format_json_the_columns_are_the_record_and_metadata_has_an_underscore(
    tmp_path: Path,
) -> None:
    fields = [StructField("id", IntegerType()), StructField("_metadata", StringType())]
    made = pickled(plan(tmp_path, StructType(fields), value_format="json")).locate()
    batch = pa.record_batch([pa.array([7, None]), pa.array(["m", "m"])], names=["id", "_metadata"])
    made.append([made.upload(iter([batch]), None)])
    ((_, records),) = queued_in(tmp_path)
    assert records == [b'{"id":7}', b"{}"]
    manifest = Manifest.parse((tmp_path / "ingest" / "manifest").read_bytes())
    assert [each.payload for each in manifest.entries()[0].metadata] == [b"m"]


def test_a_queue_deleted_on_purpose_fails_one_commit_and_not_the_next(tmp_path: Path) -> None:
    plan(tmp_path).append([plan(tmp_path).upload(iter([rows("a")]), None)])
    shutil.rmtree(tmp_path / "ingest")
    message = plan(tmp_path).upload(iter([rows("a")]), None)
    with pytest.raises(QueueReset, match="vanished while in use"):
        plan(tmp_path).append([message])
    plan(tmp_path).append([message])
    assert (tmp_path / "ingest" / "manifest").exists()


def test_a_writer_does_not_look_for_a_topic_again_at_each_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(Topic, "find", lambda *at, **how: asked.append(at))
    for _ in range(3):
        assert plan(tmp_path).locate().topic is None
    assert len(asked) == 1
    plan(tmp_path / "other").locate()
    assert len(asked) == 2


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize(
    ("made", "options", "identity"),
    [
        (made_batch, {}, None),
        (made_batch, {"txnappid": "mine", "txnversion": "4"}, Transaction("mine", 4)),
        (made_stream, {}, Transaction("query-1", 7)),
        (made_stream, {"txnappid": "mine"}, Transaction("mine", 7)),
    ],
)
def test_the_identity_of_a_write_comes_from_its_options_or_its_query(
    tmp_path: Path, made: Any, options: dict[str, str], identity: Transaction | None
) -> None:
    message = made(tmp_path, **options).write(iter([rows("a")]))
    assert message.task.transaction == identity


@pytest.mark.parametrize(
    ("known", "options", "missing"),
    [
        ({}, {}, "streaming.sql.batchId"),
        ({"streaming.sql.batchId": "7"}, {}, "sql.streaming.queryId"),
        ({"sql.streaming.queryId": "q"}, {"txnappid": "mine"}, "streaming.sql.batchId"),
    ],
)
def test_the_error_of_a_task_without_a_query_names_the_missing_property(
    known: dict[str, str],
    options: dict[str, str],
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "task_property", known.get)
    with pytest.raises(InvalidInput, match=rf"no local property {missing},.*foreach_batch_writer"):
        made_stream(tmp_path, **options).write(iter([rows("a")]))


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize(("made", "batch"), [(made_batch, ()), (made_stream, (7,))])
def test_abort_deletes_no_upload(tmp_path: Path, made: Any, batch: tuple[int, ...]) -> None:
    message = made(tmp_path).write(iter([rows("a")]))
    made(tmp_path).commit([message], *batch)
    # Spark also aborts when the answer to a commit was lost and the uploads are in the queue.
    made(tmp_path).abort([message, None], *batch)
    assert [records for _, records in queued_in(tmp_path)] == [[b"a"]]


def test_a_commit_of_another_batch_than_the_tasks_wrote_is_refused(tmp_path: Path) -> None:
    upload = UploadedBatch("ingest/x.batch", 1, ())
    message = TaskUploads(WriteTask(0, Moment(0, 0.0), Transaction("q", 7)), (upload,))
    with pytest.raises(InvalidInput, match="wrote batch 7 and Spark commits batch 8"):
        made_stream(tmp_path).commit([None, message], 8)


@pytest.mark.parametrize(
    ("make", "lacks", "instead"),
    [
        (batch_writer, "DataSourceArrowWriter", "opendata_buffer.Producer"),
        (stream_writer, "DataSourceArrowWriter", "opendata_buffer.Producer"),
        (stream_writer, "DataSourceStreamArrowWriter", r"foreach_batch_writer\(path, txn_app_id"),
    ],
)
def test_the_error_without_an_arrow_writer_in_spark_names_the_alternative(
    make: Callable[..., object], lacks: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(datasource, lacks)
    with pytest.raises(InvalidInput, match=rf"{lacks}.*{instead}"):
        make({"path": "memory://queue"}, StructType().add("value", "binary"), False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (batch_writer, r"overwrite.*mode\('append'\)"),
        (stream_writer, r"complete.*outputMode\('append'\)"),
    ],
)
def test_overwrite_mode_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make({"path": str(tmp_path)}, SCHEMA, True)


# A topic.


@pytest.mark.usefixtures("in_a_task")
def test_a_topic_is_read_before_the_tasks_and_not_again_by_the_commit(
    tmp_path: Path,
) -> None:
    options = {"path": str(tmp_path), "partitioner": "rendezvous"}
    Topic.create(str(tmp_path), 4)
    writer = stream_writer(options, KEYED, False)
    sent = [pickled(writer) for _ in range(2)]
    values = [f"{letter}{number}" for letter in "abcdefgh" for number in range(3)]
    messages = [each.write(iter([keyed(*values)])) for each in sent]
    assert messages[0].task == messages[1].task, "two pickled copies make one attempt"
    stream_writer(options, KEYED, False).commit(messages[:1], 7)
    found = [
        [
            record.decode()
            for _, records in queued_in(tmp_path, path.parent.name)
            for record in records
        ]
        for path in tmp_path.glob("p-*/manifest")
    ]
    assert sorted(record for each in found for record in each) == values
    assert len([each for each in found if each]) > 1
    assert all(each == sorted(each) for each in found), "the order of each key is kept"


@pytest.mark.parametrize(
    ("is_topic", "schema", "partitioner", "message"),
    [
        (False, KEYED, "modulo", "column 'key' cannot be written to a single queue"),
        (False, SCHEMA, "random", "there is no topic at"),
        (True, SCHEMA, "modulo", "column 'key' is missing"),
    ],
)
def test_columns_or_a_partitioner_that_do_not_fit_the_store_are_refused_before_the_tasks(
    tmp_path: Path,
    is_topic: bool,
    schema: StructType,
    partitioner: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_topic:
        Topic.create(str(tmp_path), 2)
    writer = stream_writer({"path": str(tmp_path), "partitioner": partitioner}, schema, False)
    with pytest.raises(WriteRefused, match=f"InvalidInput: .*{message}") as refused:
        CloudPickleSerializer().dumps(writer)
    assert isinstance(refused.value.__cause__, InvalidInput)
    assert capsys.readouterr().err == "", "PySpark prints no traceback on the driver"
