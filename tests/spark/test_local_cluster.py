"""Executors in processes of their own: what reaches them went through pickle, all of it.

``local-cluster`` starts a master, two workers and their executors from the installed pyspark. One
such cluster runs all that is asked of it here; the tests look at what it left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.spark.queues import produce, queued, records, written
from tests.support.s3_server import Request, S3Server

WATCH = Path(__file__).parents[2] / "docs" / "operations" / "watch.md"

KEYS = {
    "accessKeyId": "AKIAOPTIONSONLY00001",
    "secretAccessKey": "only+in/options/0001",
    "sessionToken": "token==of//options+1",
}
"""Options, and nothing else knows them."""

SCRIPT = """
import contextlib, io, json, os, sys, urllib.request
from pyspark.sql import SparkSession
from tests.spark.jvm import java_options, starting
from buffer_sink import foreach_batch_writer

home, endpoint = sys.argv[1:]
keys = json.load(sys.stdin)
builder = (
    SparkSession.builder.master("local-cluster[2,1,1024]")
    .config("spark.executor.memory", "512m")
    # Tasks are for both executors: none is given before both are there.
    .config("spark.cores.max", "2")
    .config("spark.scheduler.minRegisteredResourcesRatio", "1.0")
    .config("spark.scheduler.maxRegisteredResourcesWaitingTime", "120s")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.port", "0")
    .config("spark.log.level", "INFO")
    .config("spark.eventLog.enabled", "true")
    .config("spark.eventLog.compress", "false")
    .config("spark.eventLog.dir", f"file://{home}/events")
    .config("spark.sql.shuffle.partitions", "2")
    .config("spark.sql.python.filterPushdown.enabled", "true")
    .config("spark.executor.extraJavaOptions", java_options())
)
with starting():
    spark = builder.getOrCreate()

name = "opendata-buffer"

def run(query, writer, *path):
    writer = writer.option("checkpointLocation", f"{home}/checkpoint-{query}")
    query = writer.trigger(availableNow=True).start(*path)
    query.awaitTermination()
    return query

source = f"{home}/in"

# A batch read, with filters, whose predicates stay with the plan.
read = spark.read.format(name).option("minPartitions", "4").load(source)
tasks = read.where("sequence >= 1").select("value").rdd.mapPartitions(
    lambda rows: [(os.environ["SPARK_EXECUTOR_DIRS"], [bytes(row[0]).decode() for row in rows])]
).collect()

# Buffer to buffer: source and sink in one query.
stream = (
    spark.readStream.format(name)
    .option("minPartitions", "4")
    .option("maxBatchesPerTrigger", "6")
    .load(source)
)
run("sink", stream.select("value", "metadata").writeStream.format(name)
    .option("txnAppId", "copy").option("compression", "zstd"), f"{home}/copy")

# And from there through foreachBatch, into a buffer again.
to_buffer = foreach_batch_writer(f"{home}/again", txn_app_id="again")
copied = spark.readStream.format(name).load(f"{home}/copy")
run("foreach", copied.select("value", "metadata").writeStream.foreachBatch(to_buffer))

# Keys as options: written, read, streamed, and refused.
shown = []
given = {"endpointUrl": endpoint, **keys}
# Of more than a task sends to the driver.
rows = spark.range(0, 40, 1, 2).selectExpr("repeat(CAST(id AS STRING), 5000) AS value")
rows.write.format(name).mode("append").options(**given).save("s3://bucket/keys")
frame = spark.read.format(name).options(**given).load("s3://bucket/keys")
with_keys = frame.count()
for mode in ("extended", "formatted", "cost"):
    with contextlib.redirect_stdout(io.StringIO()) as plan:
        frame.explain(mode=mode)
    shown.append(plan.getvalue())
keyed = spark.readStream.format(name).options(**given).load("s3://bucket/keys")
query = run("keys", keyed.select("value").writeStream.format(name).options(**given),
    "s3://bucket/keyed")
with contextlib.redirect_stdout(io.StringIO()) as plan:
    query.explain(True)
shown += [plan.getvalue(), *(progress.json for progress in query.recentProgress)]
try:
    spark.read.format(name).options(**given).load("s3://no-such-bucket/keys").count()
except Exception as error:
    shown.append(f"refused: {error}")

# A service credential, by its name.
named = {"endpointUrl": endpoint, "serviceCredential": "team"}
rows.write.format(name).mode("append").options(**named).save("s3://bucket/team")
by_name = spark.read.format(name).options(**named).load("s3://bucket/team").count()

# What the web pages of Spark show.
web = spark.sparkContext.uiWebUrl
store = spark._jsparkSession.sharedState().statusStore()
pages = ["/SQL/", "/environment/", "/StreamingQuery/", "/jobs/"]
pages += [f"/SQL/execution/?id={number}" for number in range(store.executionsCount())]
pages += [f"/api/v1/applications/{spark.sparkContext.applicationId}/sql?details=true&length=1000"]
for page in pages:
    with urllib.request.urlopen(web + page) as answer:
        shown.append(answer.read().decode())

print(json.dumps({
    "executors": len({where for where, _ in tasks}),
    "read": sorted(value for _, values in tasks for value in values),
    "master": spark.sparkContext.master,
    "application": spark.sparkContext.applicationId,
    "read_with_keys": with_keys,
    "read_by_name": by_name,
    "pages": len(pages),
    "shown": shown,
}))
spark.stop()
"""

STAND_INS = {
    "service_credentials.py": """
        from pyspark import TaskContext

        def getServiceCredentialsProvider(name):
            if TaskContext.get() is None:
                raise RuntimeError("only in tasks")
            return session_of(f"EXECUTOR-{name}")
        """,
    "sdk/runtime/__init__.py": """
        from types import SimpleNamespace

        credentials = SimpleNamespace(
            getServiceCredentialsProvider=lambda name: session_of(f"DRIVER-{name}"))
        dbutils = SimpleNamespace(credentials=credentials)
        """,
    "sdk/__init__.py": "",
    "__init__.py": "",
}
"""The two modules that Databricks has, as its documentation tells. Keys say where they are from."""

SESSION_OF = """
import botocore.session

def session_of(key):
    session = botocore.session.Session()
    session.set_credentials(key, "secret")
    return session
"""

LOGGING = """
import logging
logging.basicConfig(format="%(name)s %(message)s")
for each in ("opendata_buffer", "buffer_source", "buffer_sink"):
    logging.getLogger(each).setLevel(logging.DEBUG)
"""


def write_stand_ins(site: Path) -> None:
    for name, text in STAND_INS.items():
        path = site / "databricks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SESSION_OF + textwrap.dedent(text) if text else "")


@dataclass(frozen=True)
class Ran:
    """What the script printed, and what it left.

    Attributes:
        home: Where it worked: queues, checkpoints, event logs.
        result: Its last line.
        errors: Standard error of the driver and the Python processes beside it.
        executors: Standard error of each executor and its Python workers.
        asked: What arrived at the S3 server.
    """

    home: Path
    result: dict[str, Any]
    errors: str
    executors: list[str]
    asked: list[Request]

    def signed(self, root: str) -> dict[str, set[str]]:
        """The access keys that requests for objects below a root were signed with, by object."""
        found: dict[str, set[str]] = {}
        for each in self.asked:
            if each.key.startswith(f"{root}/"):
                (key,) = re.findall(r"Credential=([^/]+)/", each.headers["authorization"])
                found.setdefault(each.key.removeprefix(f"{root}/"), set()).add(key)
        return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    import pyspark

    spark_home = Path(pyspark.__file__).parent
    home, site = tmp_path_factory.mktemp("cluster"), tmp_path_factory.mktemp("site")
    produce(str(home / "in"), [[f"{n}-{i}".encode() for i in range(20)] for n in range(10)])
    # Metrics of the processes beside the driver, as docs/operations/watch.md says.
    blocks = re.findall(r"```python\n(.*?)```", WATCH.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [each for each in blocks if "10_000" in each]
    ours = Path(__file__).with_name("site") / "sitecustomize.py"
    (site / "sitecustomize.py").write_text(
        block.replace("10_000", "200") + LOGGING + ours.read_text()
    )
    write_stand_ins(site)
    (home / "events").mkdir()
    with S3Server() as server:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(home), server.endpoint],
            input=json.dumps(KEYS),
            capture_output=True,
            text=True,
            timeout=1800,
            cwd=home,
            env={
                **os.environ,
                "AWS_ACCESS_KEY_ID": "STRANGER",
                "SPARK_HOME": str(spark_home),
                "PYTHONPATH": f"{site}{os.pathsep}{os.environ['PYTHONPATH']}",
            },
        )
    assert done.returncode == 0, told(done.stderr)
    result = json.loads(done.stdout.splitlines()[-1])
    # local-cluster has no other place for it, and leaves it there.
    work = spark_home / "work" / result["application"]
    executors = [path.read_text(errors="replace") for path in work.glob("*/stderr")]
    shutil.rmtree(work, ignore_errors=True)  # an executor may still be ending
    return Ran(home, result, done.stderr, executors, server.requests)


def told(errors: str) -> str:
    """What the driver said of errors, and the end of what it said."""
    named = [line for line in errors.splitlines() if "Error" in line or "Exception" in line]
    return "\n".join([*named[-60:], errors[-4000:]])


@pytest.mark.slow
def test_source_and_sinks_on_executors_of_their_own(ran: Ran) -> None:
    expected = sorted(f"{n}-{i}" for n in range(10) for i in range(20))
    assert ran.result["master"].startswith("local-cluster")
    assert ran.result["executors"] == 2
    assert ran.result["read"] == [each for each in expected if not each.startswith("0-")]
    again = written(str(ran.home / "again"))
    assert sorted(each.decode() for each in records(again)) == expected
    assert {each.metadata[0].payload for each in again} == {b"m"}
    # Both queries emptied what they read.
    assert queued(str(ran.home / "in")) == queued(str(ran.home / "copy")) == []
    for metric in ("buffer.acks", "buffer.consumer_lag_seconds"):
        assert f'"name": "{metric}"' in ran.errors


@pytest.mark.slow
def test_keys_given_as_options_are_used_and_shown_nowhere(ran: Ran) -> None:
    assert ran.result["read_with_keys"] == 40
    for root in ("keys", "keyed"):
        signed = ran.signed(root)
        assert any(name.endswith(".batch") for name in signed), "tasks wrote there"
        assert set().union(*signed.values()) == {KEYS["accessKeyId"]}
    assert KEYS["sessionToken"] in {e.headers.get("x-amz-security-token") for e in ran.asked}

    shown = ran.result["shown"]
    plans = [each for each in shown if "Physical Plan" in each]
    assert len(plans) >= 6, "explained, and in the SQL tab"
    assert any('"sources"' in each for each in shown), "the progress of the query"
    assert any(each.startswith("refused: ") and "no-such-bucket" in each for each in shown)
    events = files(ran.home / "events")
    assert "SparkListenerSQLExecutionStart" in "".join(events)
    assert "opendata-buffer" in "".join(events)
    assert len(ran.executors) == 2
    for each in ran.executors:
        assert "Running task" in each
        assert "telemetry.sdk" in each, "its Python workers speak there, too"
    everywhere = [*shown, ran.errors, *ran.executors, *files(ran.home)]
    for name, value in KEYS.items():
        assert not any(value in text for text in everywhere), name


def files(folder: Path) -> list[str]:
    """Whatever was written below a folder: event logs, checkpoints, objects of queues."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


@pytest.mark.slow
def test_a_service_credential_is_asked_for_by_its_name_where_it_is_used(ran: Ran) -> None:
    assert ran.result["read_by_name"] == 40
    signed = ran.signed("team/ingest")
    assert signed["manifest"] == {"DRIVER-team"}
    batches = [keys for name, keys in signed.items() if name.endswith(".batch")]
    assert len(batches) >= 2
    assert all(keys == {"EXECUTOR-team"} for keys in batches), "written and read by tasks"
