"""A standalone cluster: a master, two workers, and executors in separate processes.

Everything that reaches the executors is pickled. The interpreter of the cluster has Spark and all
dependencies of this package, but not this package itself. The package arrives as described in the
recipes of "Run it on a cluster". The first recipe always runs, and the tests check its results. All
recipes run at night.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
import textwrap
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.spark.jvm import java_options, starting
from tests.spark.queues import produce, queued, records, written
from tests.support.s3_server import Request, S3Server

ROOT = Path(__file__).parents[2]
SITE = Path(pytest.__file__).parents[1]
SPARK_HOME = SITE / "pyspark"
COMPILED = Path(__file__).parent / "site" / "sitecustomize.py"
WATCH = ROOT / "docs" / "operations" / "watch.md"

KEYS = {
    "accessKeyId": "AKIAOPTIONSONLY00001",
    "secretAccessKey": "only+in/options/0001",
    "sessionToken": "token==of//options+1",
}
"""Keys that only options contain."""

PROGRAM = """
import json, os, sys
from pyspark.sql import SparkSession

home, how = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
if how == "register":
    from pyspark_opendata_buffer import register
    register(spark)
name = "opendata-buffer"
reader = spark.read.format(name).option("minPartitions", "4")
read = reader.load(f"{home}/in").rdd.mapPartitions(
    lambda rows: [(os.getppid(), sum(1 for _ in rows))]).collect()
spark.range(0, 100, 1, 4).selectExpr("CAST(id AS STRING) AS value").write.format(name).mode(
    "append").save(f"{home}/written")
copied = None
if how != "register":
    stream = spark.readStream.format(name).option("acknowledge", "false").load(f"{home}/in")
    query = (stream.select("value").writeStream.format(name)
        .option("checkpointLocation", f"{home}/checkpoint").trigger(availableNow=True)
        .start(f"{home}/copied"))
    query.awaitTermination()
    copied = spark.read.format(name).load(f"{home}/copied").count()
print("RESULT", json.dumps({
    "executors": len({parent for parent, _ in read}),
    "read": sum(count for _, count in read),
    "written": spark.read.format(name).load(f"{home}/written").count(),
    "copied": copied,
}), flush=True)
spark.stop()
"""


SCRIPT = """
import contextlib, io, json, os, sys, urllib.request
from pyspark.sql import SparkSession
from buffer_sink import foreach_batch_writer

home, endpoint, secrets = sys.argv[1:]
keys = json.load(open(secrets))
spark = SparkSession.builder.getOrCreate()
name = "opendata-buffer"

def run(query, writer, *path):
    writer = writer.option("checkpointLocation", f"{home}/checkpoint-{query}")
    query = writer.trigger(availableNow=True).start(*path)
    query.awaitTermination()
    return query

source = f"{home}/in"

# A batch read with filters, whose predicates stay in the plan.
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

# And from there through foreachBatch into another buffer.
to_buffer = foreach_batch_writer(f"{home}/again", txn_app_id="again")
copied = spark.readStream.format(name).load(f"{home}/copy")
run("foreach", copied.select("value", "metadata").writeStream.foreachBatch(to_buffer))

# Keys as options: written, read, streamed, and refused.
shown = []
given = {"endpointUrl": endpoint, **keys}
# More bytes than a task sends to the driver.
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

# A key from a file, with a newline at its end, in a batch read and in a stream.
spoiled = {**given, "sessionToken": given["sessionToken"] + "\\n"}
for read in (spark.read, spark.readStream):
    try:
        frame = read.format(name).options(**spoiled).load("s3://bucket/keys").select("value")
        if frame.isStreaming:
            run("spoiled", frame.writeStream.format("noop"))
        else:
            frame.collect()
    except Exception as error:
        shown.append(f"spoiled: {error}")

# A service credential, by its name.
named = {"endpointUrl": endpoint, "serviceCredential": "team"}
rows.write.format(name).mode("append").options(**named).save("s3://bucket/team")
by_name = spark.read.format(name).options(**named).load("s3://bucket/team").count()

# The content of Spark's web pages.
web = spark.sparkContext.uiWebUrl
store = spark._jsparkSession.sharedState().statusStore()
pages = ["/SQL/", "/environment/", "/StreamingQuery/", "/jobs/"]
pages += [f"/SQL/execution/?id={number}" for number in range(store.executionsCount())]
pages += [f"/api/v1/applications/{spark.sparkContext.applicationId}/sql?details=true&length=1000"]
for page in pages:
    with urllib.request.urlopen(web + page) as answer:
        shown.append(answer.read().decode())

print("RESULT", json.dumps({
    "executors": len({where for where, _ in tasks}),
    "read": sorted(value for _, values in tasks for value in values),
    "application": spark.sparkContext.applicationId,
    "read_with_keys": with_keys,
    "read_by_name": by_name,
    "pages": len(pages),
    "shown": shown,
}), flush=True)
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
"""Databricks' two modules, as its documentation describes them. Keys show their origin."""

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


@dataclass(frozen=True)
class Recipe:
    """A way to install the package on driver and executors; ``spark-submit`` runs in ``{here}``."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    how: str = "found"


RECIPES = [
    Recipe("installed", environment={"PYSPARK_PYTHON": "{here}/environment/bin/python"}),
    Recipe(
        "py-files",
        ("--py-files", "{here}/opendata_buffer.zip"),
        how="register",  # without a stream, because its planner ignores --py-files
    ),
    Recipe(
        "archive",
        ("--archives", "{here}/environment.tar.gz#environment"),
        {"PYSPARK_PYTHON": "./environment/bin/python"},
    ),
    Recipe(
        "shared folder",
        ("--conf", "spark.executorEnv.PYTHONPATH={here}/opendata_buffer.zip"),
        {"PYTHONPATH": "{here}/opendata_buffer.zip"},
    ),
]


def zip_package(target: Path) -> None:
    """Make the package of ``pip wheel . --no-deps``, with a name that Spark accepts."""
    with zipfile.ZipFile(target, "w") as made:
        for base, names in (
            (ROOT / "core", ("opendata_buffer",)),
            (ROOT, ("buffer_source", "buffer_sink", "pyspark_opendata_buffer.py")),
        ):
            for name in names:
                path = base / name
                for file in [path] if path.is_file() else path.rglob("*.py*"):
                    if file.is_file() and "__pycache__" not in file.parts:
                        made.write(file, file.relative_to(base))


def make_interpreter(here: Path) -> Path:
    """Make a Python with everything except this package, and with Databricks' two modules."""
    made = here / "clean"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (site,) = made.glob("lib/python3*/site-packages")
    # Python searches a path in this file, but not the paths in that path's own .pth files.
    (site / "rest.pth").write_text(f"{SITE}\n")
    # Metrics of the Python processes, as docs/operations/watch.md says. The second line is needed
    # in every process, which would otherwise compile the sources in Spark's zip of pyspark.
    blocks = re.findall(r"```python\n(.*?)```", WATCH.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "10_000" in block]
    custom = block.replace("10_000", "200") + LOGGING + COMPILED.read_text()
    (site / "sitecustomize.py").write_text(custom)
    for name, text in STAND_INS.items():
        path = site / "databricks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SESSION_OF + textwrap.dedent(text) if text else "")
    return made / "bin" / "python"


def make_environment(here: Path, python: Path) -> None:
    """Make a relocatable interpreter with the package, and an archive of it."""
    home = here / "environment"
    (home / "bin").mkdir(parents=True)
    with zipfile.ZipFile(here / "opendata_buffer.zip") as package:
        package.extractall(home / "lib")
    command = home / "bin" / "python"
    command.write_text(
        "#!/bin/sh\n"
        'here=$(CDPATH=\'\' cd -- "$(dirname -- "$0")/.." && pwd)\n'
        f'PYTHONPATH=$here/lib${{PYTHONPATH:+:$PYTHONPATH}} exec {python} "$@"\n'
    )
    command.chmod(0o755)
    with tarfile.open(here / "environment.tar.gz", "w:gz") as packed:
        for file in home.iterdir():
            packed.add(file, file.name)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


class Cluster:
    """A master and two workers of one core each, on the loopback interface."""

    def __init__(self, here: Path, python: Path) -> None:
        self.here = here
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYSPARK"))}
        self._environment = {
            **kept,
            "AWS_ACCESS_KEY_ID": "STRANGER",
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_WORKER_DIR": str(here / "work"),
            "SPARK_DAEMON_JAVA_OPTS": java_options(),
            "PYSPARK_PYTHON": str(python),
        }
        self.url = f"spark://127.0.0.1:{free_port()}"

    def start(self, running: ExitStack) -> None:
        deploy = "org.apache.spark.deploy"
        host, port = "127.0.0.1", self.url.rpartition(":")[2]
        web = ("--webui-port", str(free_port()))
        self._daemon(running, f"{deploy}.master.Master", "--host", host, "--port", port, *web)
        self._await("master", "I have been elected leader")
        for _ in range(2):
            size = ("--cores", "1", "--memory", "600m", "--webui-port", str(free_port()))
            self._daemon(running, f"{deploy}.worker.Worker", self.url, "--host", host, *size)
        self._await("master", "Registering worker", times=2)

    def submit(
        self, recipe: Recipe, program: str, *arguments: object
    ) -> subprocess.CompletedProcess[str]:
        path = self.here / "program.py"
        path.write_text(program)

        def filled(text: str) -> str:
            return text.format(here=self.here)

        conf = {
            "spark.executor.memory": "512m",
            # No task starts before both executors are registered, so that both get tasks.
            "spark.cores.max": "2",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.driver.host": "127.0.0.1",
            "spark.ui.port": "0",
            "spark.log.level": "INFO",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": f"file://{self.here}/events",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.python.filterPushdown.enabled": "true",
            "spark.driver.extraJavaOptions": java_options(),
            "spark.executor.extraJavaOptions": java_options(),
        }
        given = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
        done = subprocess.run(
            [
                *(str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.url, *given),
                *(*map(filled, recipe.arguments), str(path), *map(str, arguments)),
            ],
            capture_output=True,
            text=True,
            timeout=1800,
            cwd=self.here,
            env={**self._environment, **{k: filled(v) for k, v in recipe.environment.items()}},
        )
        assert done.returncode == 0, errors_of(done.stdout + done.stderr)
        return done

    def _daemon(self, running: ExitStack, *command: str) -> None:
        name = command[0].rpartition(".")[2].lower()
        log = running.enter_context((self.here / f"{name}.log").open("a"))
        process = subprocess.Popen(
            [str(SPARK_HOME / "bin" / "spark-class"), *command],
            env=self._environment,
            cwd=self.here,
            stdout=log,
            stderr=log,
        )
        running.callback(process.wait)
        running.callback(process.terminate)

    def _await(self, name: str, words: str, times: int = 1) -> None:
        until = time.monotonic() + 300
        while (text := (self.here / f"{name}.log").read_text()).count(words) < times:
            assert time.monotonic() < until, text[-2000:]
            time.sleep(0.1)  # it waits for another process


def errors_of(errors: str) -> str:
    """Return the error lines of the driver's output, and its end."""
    named = [line for line in errors.splitlines() if "Error" in line or "Exception" in line]
    return "\n".join([*named[-60:], errors[-4000:]])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    here = tmp_path_factory.mktemp("cluster")
    (here / "events").mkdir()
    zip_package(here / "opendata_buffer.zip")
    python = make_interpreter(here)
    make_environment(here, python)
    made = Cluster(here, python)
    with ExitStack() as running, starting():
        made.start(running)
        yield made


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


@pytest.mark.skipif("OPENDATA_BUFFER_CLUSTER" not in os.environ, reason="at night")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda each: each.name)
def test_a_recipe_reads_writes_and_streams_on_all_executors(
    cluster: Cluster, tmp_path: Path, recipe: Recipe
) -> None:
    batches = [[f"{n}-{i}".encode() for i in range(20)] for n in range(10)]
    produce(str(tmp_path / "in"), batches)
    assert result_of(cluster.submit(recipe, PROGRAM, tmp_path, recipe.how)) == {
        "executors": 2,
        "read": 200,
        "written": 100,
        "copied": None if recipe.how == "register" else 200,
    }


@dataclass(frozen=True)
class Ran:
    """The output and the results of the script.

    Attributes:
        home: Its folder, with queues and checkpoints.
        result: Its output.
        errors: Standard error of the driver and its Python processes.
        executors: Standard error of each executor and its Python workers.
        left: All written files: event logs, checkpoints, and objects of queues.
        asked: Requests that arrived at the S3 server.
    """

    home: Path
    result: dict[str, Any]
    errors: str
    executors: list[str]
    left: list[str]
    asked: list[Request]

    def signed(self, root: str) -> dict[str, set[str]]:
        """Return the access keys in requests for objects below a root, by object."""
        found: dict[str, set[str]] = {}
        for request in self.asked:
            if request.key.startswith(f"{root}/"):
                (key,) = re.findall(r"Credential=([^/]+)/", request.headers["authorization"])
                found.setdefault(request.key.removeprefix(f"{root}/"), set()).add(key)
        return found


@pytest.fixture(scope="module")
def ran(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    home, secrets = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("keys") / "keys.json"
    secrets.write_text(json.dumps(KEYS))
    produce(str(home / "in"), [[f"{n}-{i}".encode() for i in range(20)] for n in range(10)])
    with S3Server() as server:
        done = cluster.submit(RECIPES[0], SCRIPT, home, server.endpoint, secrets)
    result = result_of(done)
    work = cluster.here / "work" / result["application"]
    executors = [path.read_text(errors="replace") for path in work.glob("*/stderr")]
    # The Python output of the driver is part of the standard output of spark-submit.
    said = done.stderr + done.stdout.partition("RESULT")[0]
    folders = home, cluster.here / "events"
    left = [
        path.read_text(encoding="utf-8", errors="replace")
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file()
    ]
    return Ran(home, result, said, executors, left, server.requests)


def test_source_and_sinks_work_on_separate_executors(ran: Ran) -> None:
    expected = sorted(f"{n}-{i}" for n in range(10) for i in range(20))
    assert ran.result["executors"] == 2
    assert ran.result["read"] == [row for row in expected if not row.startswith("0-")]
    again = written(str(ran.home / "again"))
    assert sorted(record.decode() for record in records(again)) == expected
    assert {record.metadata[0].payload for record in again} == {b"m"}
    # Both queries emptied their queues.
    assert queued(str(ran.home / "in")) == queued(str(ran.home / "copy")) == []
    for metric in ("buffer.acks", "buffer.consumer_lag_seconds"):
        assert f'"name": "{metric}"' in ran.errors


def test_keys_given_as_options_are_used_and_shown_nowhere(ran: Ran) -> None:
    assert ran.result["read_with_keys"] == 40
    for root in ("keys", "keyed"):
        signed = ran.signed(root)
        assert any(name.endswith(".batch") for name in signed), "tasks wrote there"
        assert set().union(*signed.values()) == {KEYS["accessKeyId"]}
    assert KEYS["sessionToken"] in {e.headers.get("x-amz-security-token") for e in ran.asked}

    shown = ran.result["shown"]
    plans = [text for text in shown if "Physical Plan" in text]
    assert len(plans) >= 6, "the explained plans and the SQL tab"
    assert any('"sources"' in text for text in shown), "the progress of the query"
    assert any(text.startswith("refused: ") and "no-such-bucket" in text for text in shown)
    spoiled = [text for text in shown if text.startswith("spoiled: ")]
    assert len(spoiled) == 2
    assert all("option sessionToken ends with a newline: strip it" in text for text in spoiled)
    assert any("SparkListenerSQLExecutionStart" in left for left in ran.left)
    assert len(ran.executors) == 2
    for executor in ran.executors:
        assert "Running task" in executor
        assert "telemetry.sdk" in executor, "its Python workers also log there"
    everywhere = [*shown, ran.errors, *ran.executors, *ran.left]
    for name, value in KEYS.items():
        assert not any(value in text for text in everywhere), name


def test_a_service_credential_is_requested_by_name_where_it_is_used(ran: Ran) -> None:
    assert ran.result["read_by_name"] == 40
    signed = ran.signed("team/ingest")
    assert signed["manifest"] == {"DRIVER-team"}
    batches = [keys for name, keys in signed.items() if name.endswith(".batch")]
    assert len(batches) >= 2
    assert all(keys == {"EXECUTOR-team"} for keys in batches), "written and read by tasks"
