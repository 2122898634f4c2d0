"""The recipes of "Run it on a cluster", each on a standalone cluster: a master and two workers.

Its interpreter has Spark and all that this package needs, and not this package: that comes as the
recipe says. The first recipe runs always, all of them at night.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.spark.jvm import java_options, starting
from tests.spark.queues import produce

ROOT = Path(__file__).parents[2]
SITE = Path(pytest.__file__).parents[1]
SPARK_HOME = SITE / "pyspark"
COMPILED = Path(__file__).parent / "site" / "sitecustomize.py"

PROGRAM = """
import json, os, sys
from pyspark.sql import SparkSession

home, how = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()
spark.sparkContext.setLogLevel("ERROR")
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


@dataclass(frozen=True)
class Recipe:
    """How the package comes to driver and executors. ``{here}`` is where ``spark-submit`` runs."""

    name: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    how: str = "found"


RECIPES = [
    Recipe("installed", environment={"PYSPARK_PYTHON": "{here}/environment/bin/python"}),
    Recipe(
        "py-files",
        ("--py-files", "{here}/opendata_buffer.zip"),
        how="register",  # and no stream: its planner does not look into --py-files
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
ALL = "OPENDATA_BUFFER_CLUSTER" in os.environ


def zip_package(target: Path) -> None:
    """What ``pip wheel . --no-deps`` makes, under the name that Spark takes it by."""
    with zipfile.ZipFile(target, "w") as made:
        for base, names in (
            (ROOT / "core", ("opendata_buffer",)),
            (ROOT, ("buffer_source", "buffer_sink", "pyspark_opendata_buffer.py")),
        ):
            for name in names:
                path = base / name
                for each in [path] if path.is_file() else path.rglob("*.py*"):
                    if each.is_file() and "__pycache__" not in each.parts:
                        made.write(each, each.relative_to(base))


def make_interpreter(here: Path) -> Path:
    """A Python with everything but this package."""
    made = here / "clean"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (site,) = made.glob("lib/python3*/site-packages")
    # A path in there is looked into, and what its own .pth files name is not.
    (site / "rest.pth").write_text(f"{SITE}\n")
    # In each process, or it would compile the sources in Spark's zip of pyspark.
    shutil.copy(COMPILED, site)
    return made / "bin" / "python"


def make_environment(here: Path, python: Path) -> None:
    """An interpreter with the package, that can be moved, and the same packed."""
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
        for each in home.iterdir():
            packed.add(each, each.name)


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

    def submit(self, recipe: Recipe, home: Path) -> subprocess.CompletedProcess[str]:
        program = self.here / "program.py"
        program.write_text(PROGRAM)

        def filled(text: str) -> str:
            return text.format(here=self.here)

        conf = {
            "spark.executor.memory": "512m",
            # Tasks are for both executors: none is given before both are there.
            "spark.cores.max": "2",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.extraJavaOptions": java_options(),
            "spark.executor.extraJavaOptions": java_options(),
        }
        given = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
        return subprocess.run(
            [
                *(str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.url, *given),
                *(*map(filled, recipe.arguments), str(program), str(home), recipe.how),
            ],
            capture_output=True,
            text=True,
            timeout=900,
            cwd=self.here,
            env={**self._environment, **{k: filled(v) for k, v in recipe.environment.items()}},
        )

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
            time.sleep(0.1)  # another process starts


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    here = tmp_path_factory.mktemp("cluster")
    zip_package(here / "opendata_buffer.zip")
    python = make_interpreter(here)
    make_environment(here, python)
    made = Cluster(here, python)
    with ExitStack() as running, starting():
        made.start(running)
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES if ALL else RECIPES[:1], ids=lambda each: each.name)
def test_a_recipe_reads_writes_and_streams_on_all_executors(
    cluster: Cluster, tmp_path: Path, recipe: Recipe
) -> None:
    batches = [[f"{n}-{i}".encode() for i in range(20)] for n in range(10)]
    produce(str(tmp_path / "in"), batches)
    done = cluster.submit(recipe, tmp_path)
    told = [line for line in done.stderr.splitlines() if "Error" in line or "Exception" in line]
    assert done.returncode == 0, "\n".join([*told[:40], done.stderr[-1500:]])
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert json.loads(line.removeprefix("RESULT ")) == {
        "executors": 2,
        "read": 200,
        "written": 100,
        "copied": None if recipe.how == "register" else 200,
    }
