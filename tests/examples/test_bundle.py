"""The Databricks bundle of ``examples/databricks`` is one, as far as can be seen from here."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import yaml

BUNDLE = Path(__file__).parents[2] / "examples" / "databricks"
FILES = sorted(BUNDLE.rglob("*.yml"))


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


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
