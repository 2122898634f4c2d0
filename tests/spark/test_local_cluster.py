"""Executors in processes of their own: what reaches them went through pickle, all of it.

``local-cluster`` starts a master, two workers and their executors from the installed pyspark.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.queues import produce, queued
from tests.spark.written import queued as written
from tests.spark.written import records

WATCH = Path(__file__).parents[2] / "docs" / "operations" / "watch.md"

SCRIPT = """
import json, os, sys
from pyspark.sql import SparkSession
from tests.spark.jvm import java_options, starting
from buffer_sink import foreach_batch_writer

home = sys.argv[1]
builder = (
    SparkSession.builder.master("local-cluster[2,1,1024]")
    .config("spark.executor.memory", "512m")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.enabled", "false")
    .config("spark.sql.shuffle.partitions", "2")
    .config("spark.sql.python.filterPushdown.enabled", "true")
    .config("spark.executor.extraJavaOptions", java_options())
)
with starting():
    spark = builder.getOrCreate()

def run(name, writer, *path):
    writer = writer.option("checkpointLocation", f"{home}/checkpoint-{name}")
    query = writer.trigger(availableNow=True).start(*path)
    query.awaitTermination()

source = f"{home}/in"

# A batch read, with filters, whose predicates stay with the plan.
read = spark.read.format("opendata-buffer").option("minPartitions", "4").load(source)
tasks = read.where("sequence >= 1").select("value").rdd.mapPartitions(
    lambda rows: [(os.environ["SPARK_EXECUTOR_DIRS"], [bytes(row[0]).decode() for row in rows])]
).collect()

# Buffer to buffer: source and sink in one query.
stream = (
    spark.readStream.format("opendata-buffer")
    .option("minPartitions", "4")
    .option("maxBatchesPerTrigger", "6")
    .load(source)
)
run("sink", stream.select("value", "metadata").writeStream.format("opendata-buffer")
    .option("txnAppId", "copy").option("compression", "zstd"), f"{home}/copy")

# And from there through foreachBatch, into a buffer again.
to_buffer = foreach_batch_writer(f"{home}/again", txn_app_id="again")
copied = spark.readStream.format("opendata-buffer").load(f"{home}/copy")
run("foreach", copied.select("value", "metadata").writeStream.foreachBatch(to_buffer))

print(json.dumps({
    "executors": len({where for where, _ in tasks}),
    "read": sorted(value for _, values in tasks for value in values),
    "master": spark.sparkContext.master,
}))
spark.stop()
"""


@pytest.mark.slow
def test_source_and_sinks_on_executors_of_their_own(tmp_path: Path) -> None:
    import pyspark

    produce(str(tmp_path / "in"), [[f"{n}-{i}".encode() for i in range(20)] for n in range(10)])
    expected = sorted(f"{n}-{i}" for n in range(10) for i in range(20))
    # Metrics of the processes beside the driver, as docs/operations/watch.md says.
    blocks = re.findall(r"```python\n(.*?)```", WATCH.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [each for each in blocks if "10_000" in each]
    (tmp_path / "site").mkdir()
    ours = Path(__file__).with_name("site") / "sitecustomize.py"
    (tmp_path / "site" / "sitecustomize.py").write_text(
        block.replace("10_000", "200") + ours.read_text()
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,  # Spark makes its work directories here where SPARK_WORKER_DIR is unset.
        env={
            **os.environ,
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
            "SPARK_WORKER_DIR": str(tmp_path / "work"),
            "PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{os.environ['PYTHONPATH']}",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["master"].startswith("local-cluster")
    assert result["executors"] == 2
    assert result["read"] == [each for each in expected if not each.startswith("0-")]
    again = written(str(tmp_path / "again"))
    assert sorted(each.decode() for each in records(again)) == expected
    assert {each.metadata[0].payload for each in again} == {b"m"}
    # Both queries emptied what they read.
    assert queued(str(tmp_path / "in")) == queued(str(tmp_path / "copy")) == []
    for metric in ("buffer.acks", "buffer.consumer_lag_seconds"):
        assert f'"name": "{metric}"' in done.stderr
