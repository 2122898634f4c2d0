"""The Databricks bundle in ``examples/databricks`` is valid, as far as we can check here."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from opendata_buffer import Consumer, Producer, admin
from opendata_buffer.config import DEFAULT_DATA_PATH_PREFIX

BUNDLE = Path(__file__).parents[2] / "examples" / "databricks"
FILES = sorted(BUNDLE.rglob("*.yml"))


ON_ARRIVAL = BUNDLE / "resources" / "on_arrival" / "load_on_arrival.job.yml"
"""A job that users include if their log is in an external location."""

SCHEMA = Path(__file__).parents[2] / ".venv" / "databricks-bundle-schema.json"
"""The output of ``databricks bundle schema`` of Databricks' command line."""


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def test_everything_that_the_bundle_names_exists() -> None:
    included = {
        path for glob in load(BUNDLE / "databricks.yml")["include"] for path in BUNDLE.glob(glob)
    }
    assert included == {path for path in FILES if path.name != "databricks.yml"} - {ON_ARRIVAL}
    programs = set()
    for path in (*included, ON_ARRIVAL):
        for name in re.findall(r"(?:python_file|path): (\S+\.py)", path.read_text()):
            programs.add((path.parent / name).resolve())
    assert programs == set((BUNDLE / "src").glob("*.py"))
    for program in programs:
        ast.parse(program.read_text())


def test_the_wheel_is_built_within_the_bundle_where_job_and_pipeline_look_for_it() -> None:
    (artifact,) = load(BUNDLE / "databricks.yml")["artifacts"].values()
    root = (BUNDLE / artifact["path"]).resolve()
    assert root == BUNDLE
    assert (root / "../../pyproject.toml").resolve().exists()
    assert " wheel ../.. " in artifact["build"]
    built = root / artifact["build"].rpartition(" -w ")[2]
    folders = r"(?:- |whl: )(\S+)/\*\.whl"
    found = [
        (path.parent / folder).resolve()
        for path in FILES
        for folder in re.findall(folders, path.read_text())
    ]
    assert found == [built] * 5, "two tasks on a cluster, two serverless jobs, and pipeline"


def test_the_bundle_matches_the_schema_of_the_command_line() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    if not SCHEMA.exists():
        pytest.skip(f"needs Databricks' command line: databricks bundle schema > {SCHEMA}")
    # Go's regular expressions have Unicode classes that Python lacks.
    text = SCHEMA.read_text().replace(r"\\p{L}", r"\\w").replace(r"\\p{N}", r"\\d")
    schema = json.loads(text)
    for path in FILES:
        jsonschema.validate(load(path), schema)
    wrong = load(BUNDLE / "resources" / "load_orders.job.yml")
    wrong["resources"]["jobs"]["load_orders"]["job_cluster"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def job() -> dict[str, Any]:
    found: dict[str, Any] = load(BUNDLE / "resources" / "load_orders.job.yml")["resources"]["jobs"]
    return found["load_orders"]  # type: ignore[no-any-return]


def pipeline() -> dict[str, Any]:
    found = load(BUNDLE / "resources" / "orders.pipeline.yml")["resources"]["pipelines"]
    return found["orders"]  # type: ignore[no-any-return]


def arguments(task: dict[str, Any]) -> dict[str, str]:
    """Return the arguments of a task's program."""
    return dict(text.removeprefix("--").split("=", 1) for text in task["parameters"])


def test_programs_accept_the_arguments_and_settings_of_the_bundle() -> None:
    for task in job()["tasks"]:
        path = BUNDLE / "resources" / task["spark_python_task"]["python_file"]
        program = path.read_text()
        for flag in arguments(task["spark_python_task"]):
            assert f'"{flag}"' in program or f'"--{flag}"' in program, flag
    settings = set(pipeline()["configuration"])
    read = re.findall(r'conf\.get\("([\w.]+)"', (BUNDLE / "src" / "orders_pipeline.py").read_text())
    assert set(read) == settings


def test_the_job_that_runs_on_arrival_is_alone_with_its_reader_and_misses_no_batch() -> None:
    jobs = load(ON_ARRIVAL)["resources"]["jobs"]
    on_arrival, daily = jobs["load_on_arrival"], jobs["load_once_a_day"]
    assert set(on_arrival) <= KEYS["job"]
    (task,) = on_arrival["tasks"]
    assert set(task) <= KEYS["task"]
    given = arguments(task["spark_python_task"])
    program = (ON_ARRIVAL.parent / task["spark_python_task"]["python_file"]).read_text()
    for flag in given:
        assert f'"{flag}"' in program or f'"--{flag}"' in program, flag
    variables = load(BUNDLE / "databricks.yml")["variables"]
    others = {variables[name]["default"] for name in ("job_reader", "pipeline_reader")}
    assert given["reader"] not in others
    # Only the data prefix: the trigger also looks into subfolders.
    trigger = on_arrival["trigger"]["file_arrival"]
    assert trigger["url"] == f"{given['queue']}/{DEFAULT_DATA_PATH_PREFIX}/"
    assert trigger["min_time_between_triggers_seconds"] >= 60
    # A batch that arrives during a run starts the next one, and none is started twice at a time.
    assert on_arrival["max_concurrent_runs"] == 1
    assert on_arrival["queue"]["enabled"] is True
    (again,) = daily["tasks"]
    assert again["run_job_task"]["job_id"] == "${resources.jobs.load_on_arrival.id}"
    assert daily["schedule"]["quartz_cron_expression"]


def test_job_and_pipeline_read_one_log_by_different_names() -> None:
    variables = load(BUNDLE / "databricks.yml")["variables"]
    load_task, check_task = (arguments(task["spark_python_task"]) for task in job()["tasks"])
    settings = pipeline()["configuration"]
    assert load_task["queue"] == check_task["queue"] == settings["orders.queue"] == "${var.queue}"
    readers = [load_task["reader"], settings["orders.reader"]]
    assert readers == ["${var.job_reader}", "${var.pipeline_reader}"]
    assert variables["job_reader"]["default"] != variables["pipeline_reader"]["default"]
    assert load_task["checkpoint"].startswith("/Volumes/")


def test_all_variables_are_declared_and_used() -> None:
    declared = set(load(BUNDLE / "databricks.yml")["variables"])
    used = {
        name for path in FILES for name in re.findall(r"\$\{var\.(\w+)\}", path.read_text("utf-8"))
    }
    assert used == declared
    readme = (BUNDLE / "README.md").read_text("utf-8")
    required = {
        name
        for name, variable in load(BUNDLE / "databricks.yml")["variables"].items()
        if "default" not in variable
    }
    assert required == set(re.findall(r"--var (\w+)=[\w:/@.-]+(?: |\n)", readme))


KEYS = {
    "job": {
        "name", "max_concurrent_runs", "timeout_seconds", "schedule", "trigger", "tasks", "health",
        "email_notifications", "job_clusters", "environments", "queue", "notification_settings",
    },
    "task": {
        "task_key", "max_retries", "min_retry_interval_millis", "timeout_seconds", "depends_on",
        "retry_on_timeout", "run_if", "spark_python_task", "job_cluster_key", "environment_key",
        "libraries", "notification_settings",
    },
    "email_notifications": {
        "on_failure", "on_start", "on_success", "on_duration_warning_threshold_exceeded",
        "on_streaming_backlog_exceeded", "no_alert_for_skipped_runs",
    },
    "pipeline": {
        "name", "catalog", "schema", "serverless", "continuous", "configuration", "libraries",
        "environment", "notifications",
    },
}  # fmt: skip
"""Documented keys of Databricks' REST API, which the command line accepts, as far as used here."""


def test_resources_have_no_other_keys_than_the_documented_ones() -> None:
    """The command line only warns about a misspelled key, and deploys the rest."""
    assert set(job()) <= KEYS["job"]
    assert set(job()["email_notifications"]) <= KEYS["email_notifications"]
    assert set(pipeline()) <= KEYS["pipeline"]
    for target in load(BUNDLE / "databricks.yml")["targets"].values():
        for changed in target["resources"]["jobs"].values():
            assert set(changed) <= KEYS["job"]
            assert all(set(task) <= KEYS["task"] for task in changed["tasks"])
            assert [task["task_key"] for task in changed["tasks"]] == ["load", "check_lag"]
    assert all(set(task) <= KEYS["task"] for task in job()["tasks"])
    (rule,) = job()["health"]["rules"]
    assert set(rule) == {"metric", "op", "value"}
    alerts = {
        "on-update-success", "on-update-failure", "on-update-fatal-failure", "on-flow-failure",
    }  # fmt: skip
    assert all(set(each["alerts"]) <= alerts for each in pipeline()["notifications"])


def test_the_lag_alert_names_each_reader_that_is_behind(tmp_path: Path) -> None:
    check_lag = runpy.run_path(str(BUNDLE / "src" / "check_lag.py"))
    queue = str(tmp_path)
    with Producer(queue) as producer:
        producer.produce([b"x"]).result()
    admin.enable_log(queue)
    for name in ("load-orders", "orders-pipeline"):
        with Consumer(queue, reader=name, start="earliest", gc=False) as consumer:
            batch = consumer.next_batch()
            assert batch is not None
            if name == "load-orders":
                batch.ack()
    (behind,) = check_lag["readers_behind"](queue, -1)
    assert re.match(r"reader orders-pipeline of ingest is \d+ minutes behind: 1 batches w", behind)
    assert check_lag["readers_behind"](queue, 60) == []


def test_the_pipeline_of_the_bundle_is_the_tested_one() -> None:
    spec = load(BUNDLE.parent / "pipelines" / "spark-pipeline.yml")
    (library,) = spec["libraries"]
    run_here = BUNDLE.parent / "pipelines" / library["glob"]["include"]
    assert run_here.resolve() == BUNDLE / "src" / "orders_pipeline.py"
