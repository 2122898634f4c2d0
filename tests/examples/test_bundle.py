"""The Databricks bundle of ``examples/databricks`` is one, as far as can be seen from here."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

BUNDLE = Path(__file__).parents[2] / "examples" / "databricks"
FILES = sorted(BUNDLE.rglob("*.yml"))
TEXT = {"type": "string", "minLength": 1}


def closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "minProperties": 1, "additionalProperties": schema}


def some(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": schema}


CLUSTER = closed(
    ["spark_version", "node_type_id", "num_workers"],
    spark_version=TEXT,
    node_type_id=TEXT,
    num_workers={"type": "integer"},
    data_security_mode={"enum": ["SINGLE_USER", "USER_ISOLATION"]},
)
TASK = closed(
    ["task_key", "spark_python_task"],
    task_key=TEXT,
    job_cluster_key=TEXT,
    spark_python_task=closed(["python_file"], python_file=TEXT, parameters=some(TEXT)),
    libraries=some(closed(["whl"], whl=TEXT)),
)
JOB = closed(
    ["name", "tasks"],
    name=TEXT,
    max_concurrent_runs={"type": "integer"},
    schedule=closed(
        ["quartz_cron_expression", "timezone_id"], quartz_cron_expression=TEXT, timezone_id=TEXT
    ),
    job_clusters=some(
        closed(["job_cluster_key", "new_cluster"], job_cluster_key=TEXT, new_cluster=CLUSTER)
    ),
    tasks=some(TASK),
)
PIPELINE = closed(
    ["name", "catalog", "schema", "libraries"],
    name=TEXT,
    catalog=TEXT,
    schema=TEXT,
    serverless={"type": "boolean"},
    continuous={"type": "boolean"},
    configuration=named(TEXT),
    libraries=some(closed(["file"], file=closed(["path"], path=TEXT))),
    environment=closed(["dependencies"], dependencies=some(TEXT)),
)
VOLUME = closed(
    ["catalog_name", "schema_name", "name", "volume_type"],
    catalog_name=TEXT,
    schema_name=TEXT,
    name=TEXT,
    volume_type={"enum": ["MANAGED", "EXTERNAL"]},
    comment=TEXT,
)
# What this bundle uses of the schema that `databricks bundle schema` prints, and nothing besides.
SCHEMA = closed(
    [],
    bundle=closed(["name"], name=TEXT),
    include=some(TEXT),
    variables=named(closed([], description=TEXT, default=TEXT)),
    artifacts=named(
        closed(
            ["type", "path"],
            type={"const": "whl"},
            path=TEXT,
            build=TEXT,
            files=some(closed(["source"], source=TEXT)),
        )
    ),
    targets=named(
        closed(["mode"], mode={"enum": ["development", "production"]}, default={"type": "boolean"})
    ),
    resources=closed([], jobs=named(JOB), pipelines=named(PIPELINE), volumes=named(VOLUME)),
)


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(BUNDLE)))
def test_its_files_have_the_fields_that_databricks_knows(path: Path) -> None:
    jsonschema.validate(load(path), SCHEMA)


def test_what_it_names_is_there() -> None:
    included = {
        path for glob in load(BUNDLE / "databricks.yml")["include"] for path in BUNDLE.glob(glob)
    }
    assert included == {path for path in FILES if path.name != "databricks.yml"}
    programs = set()
    for path in included:
        for name in re.findall(r"(?:python_file|path): (\S+\.py)", path.read_text()):
            programs.add((path.parent / name).resolve())
    assert programs == set((BUNDLE / "src").glob("*.py"))
    for program in programs:
        ast.parse(program.read_text())


def test_every_variable_is_declared_and_used() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    used = set(re.findall(r"\$\{var\.(\w+)\}", texts))
    assert used == set(load(BUNDLE / "databricks.yml")["variables"])


def test_the_wheel_is_built_where_job_and_pipeline_look_for_it() -> None:
    (artifact,) = load(BUNDLE / "databricks.yml")["artifacts"].values()
    root = (BUNDLE / artifact["path"]).resolve()
    assert (root / "pyproject.toml").exists()
    built = root / artifact["build"].rpartition(" -w ")[2]
    wheels = re.findall(r"(\S+)/\*\.whl", "\n".join(path.read_text() for path in FILES))
    assert len(wheels) == 3
    for path in FILES:
        for folder in re.findall(r"(\.\./\S+)/\*\.whl", path.read_text()):
            assert (path.parent / folder).resolve() == built


def test_programs_take_the_arguments_and_settings_that_they_are_given() -> None:
    job = (BUNDLE / "resources" / "load_orders.job.yml").read_text()
    program = (BUNDLE / "src" / "load_orders.py").read_text()
    for flag in re.findall(r"- --([\w-]+)=", job):
        assert f'"{flag}"' in program or f'"--{flag}"' in program, flag
    pipeline = load(BUNDLE / "resources" / "orders.pipeline.yml")["resources"]["pipelines"]
    settings = set(pipeline["orders"]["configuration"])
    read = re.findall(r'conf\.get\("([\w.]+)"', (BUNDLE / "src" / "orders_pipeline.py").read_text())
    assert set(read) == settings


def test_its_pipeline_is_the_one_that_is_run_here() -> None:
    spec = load(BUNDLE.parent / "pipelines" / "spark-pipeline.yml")
    (library,) = spec["libraries"]
    run_here = BUNDLE.parent / "pipelines" / library["glob"]["include"]
    assert run_here.resolve() == BUNDLE / "src" / "orders_pipeline.py"
