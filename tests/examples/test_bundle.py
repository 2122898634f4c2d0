"""The Databricks bundle in ``examples/databricks`` is valid, as far as we can check here."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

BUNDLE = Path(__file__).parents[2] / "examples" / "databricks"
FILES = sorted(BUNDLE.rglob("*.yml"))


SCHEMA = Path(__file__).parents[2] / ".venv" / "databricks-bundle-schema.json"
"""The output of ``databricks bundle schema`` of Databricks' command line."""


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def test_everything_that_the_bundle_names_exists() -> None:
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
    assert found == [built] * 3, "cluster, serverless job, and pipeline"


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


def test_programs_accept_the_arguments_and_settings_of_the_bundle() -> None:
    job = (BUNDLE / "resources" / "load_orders.job.yml").read_text()
    program = (BUNDLE / "src" / "load_orders.py").read_text()
    for flag in re.findall(r"- --([\w-]+)=", job):
        assert f'"{flag}"' in program or f'"--{flag}"' in program, flag
    pipeline = load(BUNDLE / "resources" / "orders.pipeline.yml")["resources"]["pipelines"]
    settings = set(pipeline["orders"]["configuration"])
    read = re.findall(r'conf\.get\("([\w.]+)"', (BUNDLE / "src" / "orders_pipeline.py").read_text())
    assert set(read) == settings


def test_the_pipeline_of_the_bundle_is_the_tested_one() -> None:
    spec = load(BUNDLE.parent / "pipelines" / "spark-pipeline.yml")
    (library,) = spec["libraries"]
    run_here = BUNDLE.parent / "pipelines" / library["glob"]["include"]
    assert run_here.resolve() == BUNDLE / "src" / "orders_pipeline.py"
