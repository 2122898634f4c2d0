"""Source and sink over Spark Connect, which shared and serverless compute use.

The session runs in its own process, because a session is either classic or remote. All tests share
it, because its server listens on one port, 15002. Nothing is registered in the session, because the
format is found as in any other session.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.formats.batch import Transaction
from tests.spark.queues import TELLS, manifest, produce, queued, written

SOURCE = """
import json, os, sys
from pyspark.sql import SparkSession

from tests.spark.jvm import starting
from tests.spark.queues import until_done

home, store = sys.argv[1:]
with starting():
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
result = {"remote": type(spark).__module__}

def stream(name, **options):
    frame = spark.readStream.format("opendata-buffer").options(gcEnabled="false", **options)
    return frame.load(f"{home}/{name}")

def run(name, writer, *path):
    writer = writer.option("checkpointLocation", f"{home}/checkpoint-{name}")
    query = writer.trigger(availableNow=True).start(*path)
    query.awaitTermination()
    assert query.exception() is None, query.exception()
    return query

def rows(frame):
    ordered = frame.orderBy("sequence", "index").select("sequence", "index", "value", "metadata")
    return [[row[0], row[1], row[2].decode(), row[3].decode()] for row in ordered.collect()]

read = spark.read.format("opendata-buffer").load(f"{home}/one")
result["columns"] = read.schema.simpleString()
result["batch"] = rows(read)
result["filtered"] = rows(read.where("sequence = 1"))

run("parquet", stream("one").writeStream.format("parquet"), f"{home}/parquet")
result["parquet"] = rows(spark.read.parquet(f"{home}/parquet"))

run("memory", stream("two").writeStream.format("memory").queryName("seen"))
result["memory"] = rows(spark.table("seen"))

# In Connect the function runs in a process of the server, with its own session.
def keep(batch, batch_id):
    values = sorted(row[0].decode() for row in batch.select("value").collect())
    with open(f"{home}/foreach", "a") as file:
        file.write(json.dumps([batch_id, os.getpid(), values]) + "\\n")

writer = stream("three", maxBatchesPerTrigger="2").writeStream.foreachBatch(keep)
until_done(f"{home}/checkpoint-foreach", lambda: run("foreach", writer))
result["pid"] = os.getpid()
"""


SINK = """
from buffer_sink import foreach_batch_writer

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
print(json.dumps(result))
"""


EXPECTED = {
    name: [[n, i, f"{name}{n}{'ab'[i]}", "m"] for n in range(3) for i in range(2)]
    for name in ("one", "two", "three")
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with three queues to read, a file to write from, and an empty queue."""
    made = tmp_path_factory.mktemp("connect")
    for name in EXPECTED:
        records = [[f"{name}{n}{letter}".encode() for letter in "ab"] for n in range(3)]
        produce(str(made / name), records)
    (made / "in").mkdir()
    (made / "in" / "0.txt").write_text("a\nb\n")
    (made / "sink").mkdir()
    return made


@pytest.fixture(scope="module")
def got(home: Path) -> dict[str, Any]:
    """Return the results of both scripts, which run in one session."""
    done = subprocess.run(
        [sys.executable, "-c", SOURCE + SINK, str(home), str(home / "sink")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_source_works_in_streams_batch_reads_and_foreach_batch(
    home: Path, got: dict[str, Any]
) -> None:
    assert got["remote"] == "pyspark.sql.connect.session"
    assert got["columns"] == (
        "struct<value:binary,metadata:binary,sequence:bigint,index:int,ingestion_time:timestamp>"
    )
    assert got["batch"] == EXPECTED["one"]
    assert got["filtered"] == EXPECTED["one"][2:4]
    assert got["parquet"] == EXPECTED["one"]
    assert got["memory"] == EXPECTED["two"]
    calls = [json.loads(line) for line in (home / "foreach").read_text().splitlines()]
    assert [(batch, values) for batch, _, values in calls] == [
        (0, ["three0a", "three0b", "three1a", "three1b"]),
        (1, ["three2a", "three2b"]),
    ]
    assert all(pid != got["pid"] for _, pid, _ in calls)
    # The batch read fenced no consumer, and each query acknowledged its batches. If Spark does not
    # report the end of a run, the next run acknowledges the last micro-batch.
    for name in EXPECTED if TELLS else ["three"]:
        assert queued(str(home / name)) == []
        assert manifest(str(home / name)).epoch == 1 or not TELLS


def test_the_sink_works_in_batches_streams_and_foreach_batch(
    home: Path, got: dict[str, Any]
) -> None:
    assert got["remote"] == "pyspark.sql.connect.session"
    assert [(row.transaction, row.records) for row in written(str(home / "sink"))] == [
        (None, [b"0", b"1", b"2"]),
        (Transaction("stream", 0), [b"a", b"b"]),
        (Transaction("whole", 0), [b"a", b"b"]),
        (Transaction("part", 0), [b"A", b"B"]),
    ]
