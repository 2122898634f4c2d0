from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buffer_sink import foreach_batch_writer
from opendata_buffer.formats.keys import Transaction
from tests.spark.written import Pipe, queued, records

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def test_it_is_a_function_for_foreach_batch(pipe: Pipe, store: str) -> None:
    pipe.feed("a", "b")
    pipe.run(each=foreach_batch_writer(store, txn_app_id="job"))
    pipe.feed("c")
    pipe.run(each=foreach_batch_writer(store, txn_app_id="job"))
    batches = queued(store)
    assert records(batches) == [b"a", b"b", b"c"]
    assert [each.transaction for each in batches] == [Transaction("job", 0), Transaction("job", 1)]


def test_a_function_that_failed_after_the_write_runs_again_without_a_repeat(
    pipe: Pipe, store: str, tmp_path: Path
) -> None:
    to_buffer = foreach_batch_writer(store, txn_app_id="job", compression="zstd")
    attempts: list[int] = []

    def both(frame: DataFrame, batch: int) -> None:
        to_buffer(frame.selectExpr("to_json(struct(*)) AS value"), batch)
        attempts.append(batch)
        if len(attempts) == 1:
            raise RuntimeError("the write after it failed")
        frame.write.mode("append").parquet(str(tmp_path / "out"))

    pipe.feed("a", "b")
    with pytest.raises(Exception, match="the write after it failed"):
        pipe.run(each=both)
    pipe.run(each=both)
    assert attempts[:2] == [0, 0]
    assert records(queued(store)) == [b'{"value":"a"}', b'{"value":"b"}']
    assert pipe.spark.read.parquet(str(tmp_path / "out")).count() == 2


def test_a_deleted_checkpoint_is_refused_under_the_same_app_id(pipe: Pipe, store: str) -> None:
    pipe.feed("a")
    pipe.run(each=foreach_batch_writer(store, txn_app_id="job"))
    shutil.rmtree(pipe.checkpoint)
    pipe.feed("b")
    with pytest.raises(Exception, match=r"txnAppId 'job' belongs to query"):
        pipe.run(each=foreach_batch_writer(store, txn_app_id="job"))
    assert records(queued(store)) == [b"a"]
    pipe.run(each=foreach_batch_writer(store, txn_app_id="job-2"))
    assert sorted(records(queued(store))) == [b"a", b"a", b"b"]
