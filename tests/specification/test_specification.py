"""The specification holds, TLC reaches its actions, and each action names existing code."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tools import specification
from tools.specification import FOLDER, NAMES, actions_of, check, faults_of, module_of

ROOT = Path(__file__).parents[2]
ONLY_SEEDED = {"ReadBeforeListing", "ListAfterReading"}
"""Actions that a seeded fault adds."""
ELSEWHERE = {
    "Queue": {"UploadAgain", "CheckLateUploads", "ListObjects", "ReadAfterListing", "DeleteObject"}
    | {"EndPage", "Tick"},
    "Collector": {"CheckLateUploads"},
    "Broker": {"StepDown"},
    "Log": {"Steal"},
    "V1Reader": {"Seal", "DropPosition", "DropName", "AppendForeign"},
}
"""Actions that need the other configuration of their module or a larger one."""


@cache
def defined_in(path: str) -> frozenset[str]:
    """Return the functions, classes, and methods (with their class) of a source file."""
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (
                statement for statement in node.body if isinstance(statement, ast.FunctionDef)
            )
            found.update(f"{node.name}.{method.name}" for method in methods)
    return frozenset(found)


@pytest.mark.parametrize("module", sorted({module_of(name) for name in NAMES}))
def test_every_action_names_existing_code(module: str) -> None:
    actions = actions_of(module)
    assert len(actions) > 10
    for action, lines in actions.items():
        if action in ONLY_SEEDED:
            continue
        assert lines, f"{module}.{action} names no code"
        for path, symbol in lines:
            assert symbol in defined_in(path), f"{module}.{action}: {path} has no {symbol}"


def test_a_configuration_seeds_every_fault_of_a_module() -> None:
    seeded = {(module_of(name), fault) for name in NAMES for fault, _ in faults_of(name)}
    known = {
        (path.stem, fault)
        for path in FOLDER.glob("*.tla")
        for fault in re.findall(r'Faulty\("([^"]+)"\)', path.read_text())
        if path.stem != "Store"
    }
    assert known <= seeded
    # The remaining fault belongs to the environment of the store.
    assert {fault for _, fault in seeded - known} == {"a proxy repeats writes"}


SLOW = ("Log", "V1Reader")
"""Modules that take TLC minutes. ``./run spec`` checks them."""


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in NAMES if name not in SLOW])
def test_the_specification_holds_and_each_action_is_reached(name: str) -> None:
    try:
        specification.java()
        specification.jar(get=False)
    except specification.NotThere as missing:
        pytest.skip(str(missing))
    found = check(name, coverage=True)
    assert not found.violated, found.trace
    unreached = {action for action, count in found.taken.items() if not count}
    assert unreached <= ELSEWHERE.get(name, set()) | ONLY_SEEDED
    assert set(found.taken) > set(actions_of(module_of(name))) - ONLY_SEEDED - {"Init"}


PROGRESS = """Finished computing initial states: 1 distinct state generated at 2026-11-23 21:40:48.
Progress(9) at 2026-11-23 21:41:48: 4,815,113 states generated (515,361 s/min), 232,497 distinct \
states found (146,587 ds/min), 54,787 states left on queue.
"""


def test_a_check_that_runs_out_of_time_reports_its_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "java"
    slow.write_text(f"#!/bin/sh\ncat <<'END'\n{PROGRESS}END\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(specification, "java", lambda: str(slow))
    monkeypatch.setenv(specification.OWN_JAR, "tla2tools.jar")
    found = check("Queue", minutes=1 / 60)
    assert (found.states, found.distinct, found.left) == (4_815_113, 232_497, 54_787)
    assert (found.violated, found.seconds < 30) == ("", True)
