"""Dashboard and alerts, compared with the exported metrics and run in a real Prometheus."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer import metrics
from opendata_buffer.stores.open import open_store
from tests.unit.cli.shell import fill, ok, topic_of
from tests.unit.cli.test_topic import pending
from tools import dashboard
from tools.servers import PROMETHEUS

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "docs/operations/monitoring"
ALERTS, TRIALS = PLACE / "alerts.yml", PLACE / "alerts.test.yml"
EXPORTING = [sys.executable, "-m", "tests.monitoring.exporting"]

needs_prometheus = pytest.mark.skipif(not PROMETHEUS.is_there, reason=PROMETHEUS.why_not)


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Return the names of all series that an application exports."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    done = subprocess.run([*EXPORTING, "0"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        re.split(r"[{ ]", line)[0]
        for line in done.stdout.splitlines()
        if line.startswith("buffer_")
    } | {row.name.replace(".", "_") for row in metrics.EXPORTED.values()}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard.dashboard()["panels"] if panel["type"] != "row"]


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alerts() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def names_in(expression: str) -> list[set[str]]:
    """Return the possible names of each metric that an expression reads."""
    found = []
    for name in re.findall(r"buffer_\w+(?:\(_\w+\)\?\w*)?", expression):
        stem, optional, rest = re.fullmatch(r"(\w+?)(?:\((_\w+)\)\?(\w*))?", name).groups()  # type: ignore[union-attr]
        found.append({stem + (rest or ""), stem + (optional or "") + (rest or "")})
    return found


def test_the_dashboard_file_is_current() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "python -m tools.dashboard"


def test_every_metric_of_dashboard_and_alerts_is_exported(exported: set[str]) -> None:
    expressions = [*dashboard_expressions(), *(alert["expr"] for alert in alerts())]
    assert len(expressions) >= 50
    for expression in expressions:
        read = names_in(expression)
        assert read, expression
        for names in read:
            assert names & exported, f"{names} in {expression}"


def test_every_metric_of_the_table_is_on_the_dashboard(exported: set[str]) -> None:
    shown = set().union(
        *(n for expression in dashboard_expressions() for n in names_in(expression))
    )
    for row in (*metrics.TABLE, *metrics.EXPORTED.values()):
        stem = row.name.replace(".", "_")
        assert any(name.startswith(stem) for name in shown & exported), row.name


def test_each_alert_has_a_severity_and_a_remedy_and_is_tested() -> None:
    yaml = pytest.importorskip("yaml")
    fired = {
        name
        for trial in yaml.safe_load(TRIALS.read_text())["tests"]
        for test in trial.get("promql_expr_test", ())
        for sample in test["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    names = [alert["alert"] for alert in alerts()]
    assert len(set(names)) == len(names)
    assert fired == set(names), "alerts.test.yml makes each alert fire"
    for alert in alerts():
        assert alert["labels"]["severity"] in ("page", "warn")
        assert len(alert["annotations"]["description"]) > 30
        assert "{{" in alert["annotations"]["summary"], "the summary names the object"


def check_with_promtool(*arguments: str) -> None:
    tool = PROMETHEUS.folder / "usr/bin/promtool"
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout


@needs_prometheus
def test_prometheus_accepts_the_rules_and_each_alert_fires_when_it_should() -> None:
    check_with_promtool("check", "rules", str(ALERTS))
    check_with_promtool("test", "rules", str(TRIALS))


class Prometheus:
    """A server that scrapes one application every second, and has the alerts."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def await_scrapes(self, least: int, metric: str = "buffer_acks_total") -> None:
        end = time.monotonic() + 240
        scrapes = f"count_over_time({metric}[5m])"
        found: list[Any] = []
        while not any(float(each["value"][1]) >= least for each in found):
            assert time.monotonic() < end, found
            time.sleep(0.3)  # it decides itself when it scrapes
            with suppress(urllib.error.HTTPError):  # 503 while it starts
                found = self.query(scrapes)


OLD_S = 7_200
"""The age of a batch that the exporter finds, in seconds."""


def abandoned(home: Path) -> tuple[str, str]:
    """Make a topic and a log that no consumer reads, and return their directories.

    The log has a reader of each kind.
    """
    log, topic = str(home / "log"), str(home / "topic")
    fill(log, [b"record"])
    ok("readers", "enable", log, "--yes")
    ok("readers", "reset", log, "billing", "--to-earliest")
    ok("readers", "add", log, "clickhouse", "--v1", "clickhouse")
    (name,) = topic_of(topic, 1)
    pending(open_store(topic), topic, name, OLD_S)
    return log, topic


@contextmanager
def exporter(*stores: str) -> Iterator[str]:
    """Run the exporter, and yield its address."""
    command = [sys.executable, "-m", "opendata_buffer", "exporter", *stores]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--interval", "1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        serving = re.match(r"serving http://(\S+)/metrics: ", process.stdout.readline())
        assert serving is not None
        yield serving[1]
    finally:
        process.terminate()
        assert process.wait(120) == 0


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    pytest.importorskip("opentelemetry.exporter.prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = tmp_path_factory.mktemp("prometheus")
    # Alerts that wait for minutes fire at once here.
    (home / "alerts.yml").write_text(re.sub(r"for: \w+", "for: 0s", ALERTS.read_text()))
    application = subprocess.Popen(
        [*EXPORTING, str(port)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert application.stdout is not None
        assert application.stdout.readline() == "ready\n"
        with exporter(*abandoned(home), str(home / "nothing")) as address:
            targets = f"['127.0.0.1:{port}', '{address}']"
            (home / "prometheus.yml").write_text(
                "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
                "rule_files: [alerts.yml]\n"
                "scrape_configs: [{job_name: orders, static_configs: "
                f"[{{targets: {targets}}}]}}]\n"
            )
            with PROMETHEUS.start(home) as url:
                yield Prometheus(url)
    finally:
        application.communicate(timeout=120)


@needs_prometheus
def test_alerts_fire_for_a_queue_without_a_consumer_because_of_the_exporter(
    prometheus: Prometheus,
) -> None:
    prometheus.await_scrapes(4, "buffer_exporter_up")
    found = prometheus.query('max by (queue) (buffer_consumer_lag_seconds{store=~".*/topic"})')
    assert OLD_S <= float(found[0]["value"][1]) < OLD_S + 600
    end = time.monotonic() + 240
    wanted = {"BufferLag", "BufferTransactionStuck", "BufferUnreadable"}
    firing: set[str] = set()
    while not wanted <= firing:
        assert time.monotonic() < end, firing
        time.sleep(0.3)
        firing = {each["labels"]["alertname"] for each in prometheus.ask("alerts")["alerts"]}
    keda = 'sum(buffer_queue_length{store=~".*/topic"})'
    assert [each["value"][1] for each in prometheus.query(keda)] == ["1"]


@needs_prometheus
def test_every_panel_shows_data_of_a_running_application(prometheus: Prometheus) -> None:
    prometheus.await_scrapes(4)
    prometheus.await_scrapes(4, "buffer_exporter_up")
    chosen = {"$job": "orders", "$queue": ".*", "$__rate_interval": "5m", "$__range": "5m"}
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in chosen.items():
                expression = expression.replace(variable, value)
            found = prometheus.query(expression)
            assert found, f"{panel['title']}: {expression}"
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels <= set(found[0]["metric"]), f"{panel['title']} names {labels}"
            assert not any(each["value"][1] == "NaN" for each in found), expression
