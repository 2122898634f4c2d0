from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from buffer_sink.messages import TaskUploads
from buffer_sink.writer import BufferBatchWriter, batch_writer
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.keys import Transaction

SCHEMA = StructType([StructField("value", StringType())])


def rows(*values: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values)], names=["value"])


def made(tmp_path: Path, **options: str) -> BufferBatchWriter:
    writer = batch_writer({"path": str(tmp_path), **options}, SCHEMA, False)
    return pickle.loads(pickle.dumps(writer))  # type: ignore[no-any-return]


def test_without_options_a_write_has_no_identity(tmp_path: Path) -> None:
    message = made(tmp_path).write(iter([rows("a")]))
    assert isinstance(message, TaskUploads)
    assert message.task.transaction is None


def test_the_identity_comes_from_the_options(tmp_path: Path) -> None:
    message = made(tmp_path, txnappid="mine", txnversion="4").write(iter([rows("a")]))
    assert isinstance(message, TaskUploads)
    assert message.task.transaction == Transaction("mine", 4)


def test_write_and_commit_but_abort_deletes_nothing(tmp_path: Path) -> None:
    messages = [made(tmp_path).write(iter([rows("a")]))]
    made(tmp_path).commit([*messages])
    made(tmp_path).abort([*messages, None])
    assert len(list(tmp_path.rglob("*.batch"))) == 1
    assert (tmp_path / "ingest" / "manifest").stat().st_size > 22


def test_overwrite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"overwrite.*mode\('append'\)"):
        batch_writer({"path": str(tmp_path)}, SCHEMA, True)
