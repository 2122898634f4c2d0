"""The sink over Spark Connect: what shared and serverless compute run.

A process of its own, because a session is either classic or remote.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opendata_buffer.formats.keys import Transaction
from tests.spark.written import queued

SCRIPT = """
import sys
from pyspark.sql import SparkSession
from buffer_sink import foreach_batch_writer

store, home = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
frame = spark.range(0, 3, 1, 1).selectExpr("CAST(id AS STRING) AS value")
frame.write.format("opendata-buffer").mode("append").save(store)

stream = spark.readStream.schema("value STRING").text(home + "/in")
def run(writer, name, *path):
    writer = writer.option("checkpointLocation", home + "/" + name)
    query = writer.trigger(availableNow=True).start(*path)
    query.awaitTermination()
    assert query.exception() is None, query.exception()

run(stream.writeStream.format("opendata-buffer").option("txnAppId", "stream"), "one", store)
to_buffer = foreach_batch_writer(store, txn_app_id="whole")
run(stream.writeStream.foreachBatch(to_buffer), "two")

part = foreach_batch_writer(store, txn_app_id="part")
def beside(batch, batch_id):
    for _ in range(2):
        part(batch.selectExpr("upper(value) AS value"), batch_id)

run(stream.writeStream.foreachBatch(beside), "three")
"""


@pytest.mark.slow
def test_batch_stream_and_foreach_batch(store: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.txt").write_text("a\nb\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), store, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [(each.transaction, each.records) for each in queued(store)] == [
        (None, [b"0", b"1", b"2"]),
        (Transaction("stream", 0), [b"a", b"b"]),
        (Transaction("whole", 0), [b"a", b"b"]),
        (Transaction("part", 0), [b"A", b"B"]),
    ]
