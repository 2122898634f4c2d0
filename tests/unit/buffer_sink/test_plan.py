from __future__ import annotations

import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from buffer_sink import writer as module
from buffer_sink.options import SinkOptions
from buffer_sink.writer import WritePlan, task_property
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, QueueReset
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.keys import Transaction
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.topic.topic import Topic

SCHEMA = StructType([StructField("value", StringType())])


def plan(tmp_path: Path) -> WritePlan:
    options = SinkOptions(queue=QueueConfig(store=str(tmp_path)))
    return pickle.loads(pickle.dumps(WritePlan.make(options, SCHEMA)))  # type: ignore[no-any-return]


def test_making_a_plan_touches_nothing(tmp_path: Path) -> None:
    plan(tmp_path / "not there")
    assert not (tmp_path / "not there").exists()


def test_a_plan_with_a_wrong_column() -> None:
    options = SinkOptions(queue=QueueConfig(store="/x"))
    with pytest.raises(InvalidInput, match="column 'n'"):
        WritePlan.make(options, StructType([StructField("n", IntegerType())]))


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


def test_there_is_no_task_here() -> None:
    assert task_property("sql.streaming.queryId") is None
