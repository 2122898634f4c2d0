"""Which tests each leg runs: every test is in exactly one leg, and CI runs all legs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import FULL as ALWAYS_FULL
from tests.conftest import is_always_full
from tools.project.legs import FULL, QUICK, Leg

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"
FILES = sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))
LEGS = [*QUICK, *FULL]


def legs_of(path: str, full: bool) -> list[str]:
    return [leg.name for leg in LEGS if leg.runs(path, full)]


@pytest.mark.parametrize("path", FILES)
def test_every_test_of_a_file_is_in_exactly_one_leg(path: str) -> None:
    """This includes the tests that core/failures.md names, so none of them leaves CI."""
    assert len(legs_of(path, full=True)) == 1
    if not is_always_full(path):
        (leg,) = legs_of(path, full=False)
        assert leg in [quick.name for quick in QUICK]


def test_every_leg_has_a_name_of_its_own_and_files() -> None:
    assert len({leg.name for leg in LEGS}) == len(LEGS)
    for leg in LEGS:
        assert any(leg.runs(path, leg.full) for path in FILES), leg.name


def test_ci_runs_the_quick_legs_and_the_full_legs() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    calls = [re.sub(r"\s*\|\|.*", "", line) for line in lines if line.startswith("./run test")]
    assert calls == ["./run test", "./run test --full"]


def test_every_place_whose_tests_are_all_full_exists() -> None:
    assert [place for place in ALWAYS_FULL if not (TESTS / place).exists()] == []


def collected(*arguments: str) -> list[str]:
    """Return the tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    # An option for two processes has no effect on the choice of tests.
    done = subprocess.run(
        [*command, *arguments, "-n", "0"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.full
def test_pytest_collects_every_test_for_exactly_one_leg() -> None:
    """The test above asks the legs which files they run. This one asks pytest."""
    everything = collected("-q")
    assert len(everything) > 9_000
    by_leg = {leg.name: collected(*leg.arguments) for leg in LEGS}
    assert all(by_leg.values())
    assert sorted(test for tests in by_leg.values() for test in tests) == sorted(everything)


@pytest.mark.parametrize(
    ("path", "full", "runs"),
    [
        ("spark/test_sink.py", False, True),
        ("spark/test_sink.py", True, False),
        ("spark/chaos/test_chain.py", False, False),
        ("sparkling/test_sink.py", False, False),
        ("unit/test_sink.py", False, False),
    ],
)
def test_a_leg_runs_the_files_in_its_folders(path: str, full: bool, runs: bool) -> None:
    leg = Leg("some", False, paths=("spark",), ignored=("spark/chaos",))
    assert leg.runs(path, full) is runs
    assert leg.arguments == ["-q", "-m", "not full", "tests/spark", "--ignore=tests/spark/chaos"]
