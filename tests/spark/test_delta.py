"""A Delta table as the target: each record is in the table exactly once.

The tests run in their own session, with the released jars from Maven Central. Without a network, or
without a Delta release for this Spark, they are skipped with a message.
``OPENDATA_BUFFER_DELTA=required`` turns that into a failure. ``./run test --full`` sets it in the
environment with the lowest versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pyspark
import pytest

from tests.spark.queues import drain, orders, produce, queued, records

DELTA = "4.4.0"
SPARKS = ("4.2",)
"""Versions of Spark that both DELTA and the streaming source work with.

On Spark 4.3 the build for 4.2 writes the first commit of a table and then fails with
NoSuchMethodError: LogicalRDD.<init> got a parameter. Nothing can be read or appended.
"""

RECORDS = [[f"{n}{letter}".encode() for letter in "abc"] for n in range(4)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "foreach_batch_delta.py"
ROWS = [[n, i, f"{n}{letter}"] for n in range(4) for i, letter in enumerate("abc")]

# By default Spark would also ask the Spark Packages repository for every artifact.
IVY_SETTINGS = """
<ivysettings>
  <settings defaultResolver="central"/>
  <resolvers><ibiblio name="central" m2compatible="true"/></resolvers>
</ivysettings>
"""

SCRIPT = """
import importlib.util, json, pathlib, sys, time
from pyspark.sql import SparkSession
from tests.spark.jvm import starting

home, package, settings, path = sys.argv[1:]
builder = (
    SparkSession.builder.master("local[2]")
    .config("spark.jars.packages", package)
    .config("spark.jars.ivySettings", settings)
    .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
    .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    .config("spark.databricks.delta.snapshotPartitions", "1")
    .config("spark.sql.shuffle.partitions", "1")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.enabled", "false")
)
with starting():
    spark = builder.getOrCreate()
result = {}

def start(store, name):
    frame = (
        spark.readStream.format("opendata-buffer")
        .schema("sequence BIGINT, index INT, value STRING")
        .options(gcEnabled="false", maxBatchesPerTrigger="2")
        .load(f"{home}/{store}")
    )
    writer = frame.writeStream.option("checkpointLocation", f"{home}/checkpoint-{name}")
    return writer.trigger(availableNow=True)

def table(name):
    rows = spark.read.format("delta").load(f"{home}/{name}").orderBy("sequence", "index")
    return [list(row) for row in rows.collect()]

# The Delta sink stops between its commit of batch 1 and Spark's commit, like a crash.
def sink():
    return start("one", "sink").format("delta").start(f"{home}/sink")

query = sink()
taken = pathlib.Path(home, "checkpoint-sink", "commits", "1")
while query.isActive and not pathlib.Path(home, "checkpoint-sink", "offsets", "0").exists():
    time.sleep(0.01)
taken.parent.mkdir(exist_ok=True)
taken.write_text('v1\\n{"nextBatchWatermarkMs":0}')
try:
    query.awaitTermination()
except Exception as error:
    result["sink failed"] = str(error)
taken.unlink()
query = sink()
query.awaitTermination()
result["sink batches"] = [each["batchId"] for each in query.recentProgress]
result["sink"] = table("sink")

# foreachBatch with Delta's transaction identifiers. It fails once after the write of the table.
calls = []
def write(batch, batch_id):
    (
        batch.write.format("delta").mode("append")
        .option("txnAppId", "flights-v1").option("txnVersion", str(batch_id))
        .save(f"{home}/foreach")
    )
    calls.append(batch_id)
    if calls == [0, 1]:
        raise RuntimeError("after the write")

def foreach():
    query = start("two", "foreach").foreachBatch(write).start()
    query.awaitTermination()

try:
    foreach()
except Exception as error:
    result["foreach failed"] = str(error)
foreach()
result["calls"] = calls
result["foreach"] = table("foreach")

# The example with both targets. It fails once after both writes.
spec = importlib.util.spec_from_file_location("example", path)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
queue_writer = example.foreach_batch_writer

def failing_writer(*arguments, **options):
    write = queue_writer(*arguments, **options)
    def fail_after(frame, batch_id):
        write(frame, batch_id)
        raise RuntimeError("after both writes")
    return fail_after

places = [f"{home}/{name}" for name in ("orders", "large", "example", "checkpoint-example")]
example.foreach_batch_writer = failing_writer
try:
    example.main(spark, *places)
except Exception as error:
    result["example failed"] = str(error)
example.foreach_batch_writer = queue_writer
example.main(spark, *places)
rows = spark.read.format("delta").load(places[2]).collect()
result["example"] = sorted([row.id, row.amount] for row in rows)
# A table and what waits in the log after it, read together at any step of the loader.
import random, threading
from buffer_source import fresh
from opendata_buffer import Producer, TopicProducer, admin
from opendata_buffer.topic.topic import Topic

class Loader:
    def __init__(self, name, seed, partitions):
        self.dice = random.Random(seed)
        self.log, self.path = f"{home}/log-{name}", f"{home}/table-{name}"
        self.table, self.checkpoint = f"delta.`{self.path}`", f"{home}/checkpoint-{name}"
        self.keys = ["sequence"] if partitions is None else ["partition", "sequence"]
        columns = "value STRING, sequence BIGINT" + (", partition STRING" if partitions else "")
        spark.sql(f"CREATE TABLE {self.table} ({columns}) USING delta")
        if partitions:
            Topic.create(self.log, partitions)
        self.kind = TopicProducer if partitions else Producer
        self.produced, self.reads, self.crash = [], 0, None
        self.produce()
        admin.enable_log(self.log)
        self.load(None)

    def produce(self):
        with self.kind(self.log) as producer:
            for _ in range(1 + self.dice.randrange(4)):
                values = [f"{len(self.produced) + n}" for n in range(1 + self.dice.randrange(3))]
                producer.produce([each.encode() for each in values]).result()
                self.produced += values

    def prepare(self, rows):
        chosen = rows.selectExpr("CAST(value AS STRING) AS value", *self.keys)
        return chosen.where("CAST(value AS INT) % 5 != 0")

    def append(self, batch, batch_id):
        if self.crash == "before":
            raise RuntimeError("before the write")
        writer = self.prepare(batch).write.format("delta").mode("append")
        writer.option("txnAppId", "loader").option("txnVersion", str(batch_id)).save(self.path)
        if self.crash == "after":
            self.check()
            raise RuntimeError("after the write")

    def start(self, **trigger):
        stream = spark.readStream.format("opendata-buffer").schema(self.schema())
        stream = stream.option("reader", "loader").option("maxBatchesPerTrigger", 2).load(self.log)
        writer = stream.writeStream.foreachBatch(self.append).trigger(**trigger)
        return writer.option("checkpointLocation", self.checkpoint).start()

    def schema(self):
        return "value STRING, sequence BIGINT, partition STRING"

    def load(self, crash):
        self.crash = crash
        query = self.start(availableNow=True)
        try:
            query.awaitTermination()
        except Exception as error:
            assert crash, error
        self.crash = None

    def values(self):
        found = fresh(spark, self.table, self.log, "loader", self.prepare, schema=self.schema())
        return sorted(int(row.value) for row in found.collect())

    def check(self):
        wanted = [n for n in range(len(self.produced)) if n % 5]
        assert self.values() == wanted, (self.values(), wanted)
        self.reads += 1

    def step(self, step):
        if step != "load":
            self.produce()
        if step != "produce":
            self.load(None if step == "load" else step)
        self.check()

result["fresh"] = {}
for name, seed, partitions in (("queue", 1, None), ("topic", 2, 3)):
    loader = Loader(name, seed, partitions)
    steps = ["produce", "load", "before", "after"] * (1 if partitions else 2)
    loader.dice.shuffle(steps)
    for step in steps:
        loader.step(step)
    stored = spark.read.format("delta").load(loader.path).count()
    result["fresh"][name] = {"steps": steps, "reads": loader.reads, "stored": stored}

# The same while the loader runs and a producer goes on: each row once, and none is missing.
query = loader.start(processingTime="0 seconds")
seen = []
for _ in range(4):
    before = [n for n in range(len(loader.produced)) if n % 5]
    thread = threading.Thread(target=loader.produce)
    thread.start()
    found = loader.values()
    thread.join()
    after = [n for n in range(len(loader.produced)) if n % 5]
    assert len(set(found)) == len(found) and set(before) <= set(found) <= set(after), found
    seen.append(len(found) - spark.read.format("delta").load(loader.path).count())
query.stop()
result["fresh"]["running"] = seen
print(json.dumps(result))
spark.stop()
"""


def skip_or_fail(reason: str) -> NoReturn:
    if os.environ.get("OPENDATA_BUFFER_DELTA") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the script, and its folder."""
    spark = ".".join(pyspark.__version__.split(".")[:2])
    if spark not in SPARKS:
        skip_or_fail(
            f"no released Delta runs on Spark {spark}: {DELTA} is built for up to {SPARKS[-1]}"
        )
    home = tmp_path_factory.mktemp("delta")
    for store in ("one", "two"):
        produce(str(home / store), RECORDS)
    produce(str(home / "orders"), [orders(range(20))])
    settings = os.environ.get("OPENDATA_BUFFER_IVY_SETTINGS")
    if settings is None:
        settings = str(home / "ivysettings.xml")
        Path(settings).write_text(IVY_SETTINGS)
    package = f"io.delta:delta-spark_{spark}_2.13:{DELTA}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(home), package, settings, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    if "unresolved dependency" in done.stderr:
        skip_or_fail(f"{package} cannot be downloaded from Maven Central here")
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "home": str(home)}


def transactions(result: dict[str, Any], table: str) -> list[tuple[str, int]]:
    """Return application and version of every commit of a table."""
    found = []
    for path in sorted(Path(result["home"], table, "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in path.read_text().splitlines()]
        found += [
            (action["txn"]["appId"], action["txn"]["version"])
            for action in actions
            if "txn" in action
        ]
    return found


def test_the_delta_sink_writes_a_repeated_batch_once(result: dict[str, Any]) -> None:
    assert "CONCURRENT_STREAM_LOG_UPDATE" in result["sink failed"]
    assert result["sink batches"][0] == 1  # again
    assert result["sink"] == ROWS
    checkpoint = Path(result["home"], "checkpoint-sink", "metadata").read_text()
    query = json.loads(checkpoint)["id"]
    assert transactions(result, "sink") == [(query, 0), (query, 1)]
    assert queued(result["home"] + "/one") == []


def test_foreach_batch_with_transaction_ids_writes_a_repeated_batch_once(
    result: dict[str, Any],
) -> None:
    assert "after the write" in result["foreach failed"]
    assert result["calls"] == [0, 1, 1]
    assert result["foreach"] == ROWS
    assert transactions(result, "foreach") == [("flights-v1", 0), ("flights-v1", 1)]
    assert queued(result["home"] + "/two") == []


def test_the_example_of_two_targets_writes_a_repeated_batch_once_to_both(
    result: dict[str, Any],
) -> None:
    assert "after both writes" in result["example failed"]
    assert result["example"] == [[number, number * 10.0] for number in range(20)]
    assert transactions(result, "example") == [("orders-v1", 0)]
    large = [json.loads(record)["id"] for record in records(drain(result["home"] + "/large"))]
    assert sorted(large) == list(range(10, 20))
    assert queued(result["home"] + "/orders") == []


def test_a_table_and_the_log_after_it_have_each_row_once_at_any_step(
    result: dict[str, Any],
) -> None:
    """The script compares the rows with what was produced, after each step and in crashes."""
    for kind in ("queue", "topic"):
        found = result["fresh"][kind]
        assert found["reads"] > len(found["steps"]), "it also reads between two writes"
        assert found["stored"] > 0
    assert len(result["fresh"]["running"]) == 4
