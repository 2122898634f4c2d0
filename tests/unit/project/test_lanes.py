"""Steps in two lanes: failures, output, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.project import ROOT
from tools.project.lanes import Ended, Lanes, Step, summary


def shell(name: str, script: str) -> Step:
    return Step(name, ("sh", "-c", script))


def test_a_failure_does_not_stop_the_later_steps(capfd: pytest.CaptureFixture[str]) -> None:
    ended = Lanes([shell("one", "exit 3"), shell("two", ":"), shell("three", "exit 1")]).run()
    assert {step.name: step.code for step in ended} == {"one": 3, "two": 0, "three": 1}
    printed = "".join(capfd.readouterr())
    assert "run: one failed after 0 s" in printed
    assert "run: two took 0 s" in printed


def test_two_steps_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the other, so neither would end if they ran one after the other."""
    wait = "touch {0}; while ! [ -e {1} ]; do sleep 0.01; done"
    a, b = tmp_path / "a", tmp_path / "b"
    steps = [shell("one", wait.format(a, b)), shell("two", wait.format(b, a))]
    assert [step.code for step in Lanes(steps).run()] == [0, 0]


def test_the_output_of_the_second_lane_is_not_mixed_with_that_of_the_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, seen = tmp_path / "begun", tmp_path / "seen"
    wait = "while ! [ -e {} ]; do sleep 0.01; done"
    second = shell("second", f"echo a; touch {begun}; {wait.format(seen)}; echo b >&2; exit 1")
    first = shell("first", f"{wait.format(begun)}; echo c; touch {seen}")
    Lanes([second, first]).run()
    assert capfd.readouterr().out == "c\na\nb\nrun: second failed after 0 s\n"


def test_a_step_gets_its_own_variables(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("sh", "-c", "echo $FLAVOUR")
    path = {"PATH": os.environ["PATH"]}
    steps = [Step("one", words, {**path, "FLAVOUR": "sweet"}), Step("two", words, path)]
    Lanes(steps).run()
    assert "sweet\n" in capfd.readouterr().out


def test_a_step_that_does_not_exist_fails() -> None:
    steps = [Step("one", ("/nonexistent/command",)), shell("two", ":")]
    assert {step.name: step.code for step in Lanes(steps).run()} == {"one": 127, "two": 0}


TWO_SLOW_STEPS = """
from tools.project.lanes import Lanes, Step
steps = [Step(name, ("sh", "-c", f"echo $$ > {folder}/{name}; exec sleep 600"))
         for folder in [__import__("sys").argv[1]] for name in ("one", "two")]
Lanes(steps + [Step("three", ("sh", "-c", f"touch {folder}/three"))]).run()
""".replace("{folder}/three", "{__import__('sys').argv[1]}/three")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_signal_ends_the_running_steps_and_starts_no_others(
    tmp_path: Path, number: int, code: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_SLOW_STEPS, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    files = [tmp_path / "one", tmp_path / "two"]
    while not all(path.exists() and path.read_text() for path in files):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == code
    for path in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
    assert not (tmp_path / "three").exists()


def test_the_summary_has_the_seconds_of_each_step() -> None:
    ended = [Ended("mypy", 12.4, 0), Ended("tests", 200.6, 1)]
    assert summary(ended, 213.2) == "seconds: mypy 12 s, tests 201 s; together 213 s"
