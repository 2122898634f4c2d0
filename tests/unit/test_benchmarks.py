"""Every suite of the benchmarks runs at a tiny size, without measuring speed.

Otherwise a suite could use a function that the library no longer has.
``tests/spark/test_benchmarks.py`` runs the suites that need Spark.
"""

from __future__ import annotations

import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.suites import DEFAULT, GROUPS, IN_SESSION, NAMES, OLD_NAMES, PLAIN
from benchmarks.tables import NOT_RUN
from tests.unit.test_layers import imports_of
from tools.servers import FAKE_GCS, VERSITYGW

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[2]
MODULES = {f"benchmarks.{path.stem}": path for path in (ROOT / "benchmarks").glob("*.py")}

IN_ONE_PROCESS = ("codec", "producers", "consumer", "read", "log", "commands", "growth", "idle")
BETWEEN_PROCESSES = (
    "topics/processes",
    "broker",
    "peers/python",
    "workloads/opendata",
    "workloads/openmessaging",
)
ON_SERVERS = {"pace": FAKE_GCS, "s3": VERSITYGW, "cost": VERSITYGW}
WITH_OWN_SPARK = (
    "spark_cores",
    "peers",
    "peers/spark",
    "workloads",
    "workloads/pipe",
    "workloads/nexmark",
)
"""These start Spark themselves. The tests of Spark call their functions in a shared session."""


def rows_of(*suites: str) -> list[str]:
    """Run ``./run bench --tiny`` in a process of its own, and return a line for each row."""
    command = [sys.executable, "-m", "benchmarks", "--tiny", *suites]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if ": " in line]


# The suites of a test share a process, because loading the library takes longer than most of them.


@pytest.mark.full
def test_suites_of_one_process_run_at_a_tiny_size() -> None:
    rows = rows_of(*IN_ONE_PROCESS)
    assert len(rows) > 50
    assert not [row for row in rows if NOT_RUN in row]


@pytest.mark.full
def test_suites_between_processes_run_at_a_tiny_size_without_kafka(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The nightly test of Spark's suites also starts a Kafka, which takes 20 seconds of CPU time.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = rows_of(*BETWEEN_PROCESSES)
    assert len(rows) > 10
    not_run = {row for row in rows if NOT_RUN in row}
    assert not_run
    assert all(row.startswith("Kafka: ") for row in not_run)


@pytest.mark.full
@pytest.mark.parametrize("suite", ON_SERVERS)
def test_a_suite_on_a_server_runs_at_a_tiny_size(suite: str) -> None:
    server = ON_SERVERS[suite]
    if not server.is_there:
        pytest.skip(server.why_not)
    rows = rows_of(suite)
    assert rows
    assert not [row for row in rows if NOT_RUN in row]


def test_every_suite_is_tested_somewhere() -> None:
    tested = [*IN_ONE_PROCESS, *BETWEEN_PROCESSES, *ON_SERVERS, *WITH_OWN_SPARK]
    assert sorted(tested) == sorted(PLAIN)
    parts = [part for group in GROUPS.values() for part in group]
    assert sorted([*PLAIN, *IN_SESSION]) == sorted({*PLAIN, *parts})


def test_names_of_suites_lead_to_suites() -> None:
    assert {*DEFAULT, *GROUPS, *OLD_NAMES.values()} <= {*NAMES}
    assert all(part in PLAIN or part in IN_SESSION for parts in GROUPS.values() for part in parts)


def test_a_suite_that_raises_an_error_fails_the_run() -> None:
    code = (
        "from benchmarks import __main__, suites; "
        "suites.PLAIN['codec'] = ('codec.missing',); __main__.main(['--tiny', 'codec'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "has no attribute 'missing'" in done.stdout


def test_modules_of_the_benchmarks_have_no_import_cycle() -> None:
    graph = {
        name: imports_of(path.read_text(encoding="utf-8"), MODULES) - {name}
        for name, path in MODULES.items()
    }
    assert graph["benchmarks.peers"] >= {"benchmarks.kafka", "benchmarks.latency"}
    assert [*TopologicalSorter(graph).static_order()]


def test_every_figure_names_its_commit_and_date() -> None:
    figures = (ROOT / "benchmarks" / "FIGURES.md").read_text(encoding="utf-8")
    rows = [line for line in figures.splitlines() if line.startswith("|")]
    headings = [line for line in rows if line.endswith("| commit, date |")]
    assert len(headings) >= 8
    rest = [line for line in rows if line not in headings and not line.startswith("|---")]
    assert len(rest) > 90
    assert [
        line for line in rest if not re.search(r"\| [0-9a-f]{8}, \d{4}-\d\d-\d\d \|$", line)
    ] == []


def test_suites_that_start_many_processes_load_neither_spark_nor_boto3() -> None:
    # Both would count as memory and start time of each process that is measured.
    code = (
        "import sys; import benchmarks.broker, benchmarks.consumer, benchmarks.producer, "
        "benchmarks.topics; print({'boto3', 'pyspark'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
