"""The README's first command, shortened: interrupted, killed, restarted, and run once more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.spark.jvm import starting

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240.0
"""Seconds until the demo has written something, or counts as hanging."""


def start(output: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "notebooks.demo", "--output", str(output)),
            *("--seconds", "12", "--pause", "1"),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def start_until(output: Path, least_written: int) -> tuple[subprocess.Popen[str], str]:
    """Start the demo, and wait until ``least_written`` rows are in Parquet."""
    with starting():
        demo = start(output)
        # A hanging demo would block all other JVMs. Its logs show where it hangs.
        patience = threading.Timer(PATIENCE_S, demo.kill)
        patience.start()
        said = ""
        assert demo.stdout is not None
        try:
            for line in demo.stdout:
                said += line
                words = line.replace(",", "").split()
                if words[1:2] == ["durable"] and int(words[2]) >= least_written:
                    return demo, said
        finally:
            patience.cancel()
    logs = "".join(file.read_text()[-2_000:] for file in output.glob("*/*.log"))
    pytest.fail(f"the demo ended with {demo.wait()} before anything was written: {said}{logs}")


def test_the_demo_resumes_after_an_interruption_and_a_kill_with_every_record_once(
    tmp_path: Path,
) -> None:
    interrupted, _ = start_until(tmp_path, 1)
    interrupted.send_signal(signal.SIGINT)
    said, _ = interrupted.communicate(timeout=300)
    assert interrupted.returncode == 130, said
    assert "the same command resumes" in said

    killed, _ = start_until(tmp_path, 1)
    os.kill(killed.pid, signal.SIGKILL)
    said, _ = killed.communicate(timeout=300)
    assert "Traceback" not in said

    last, began = start_until(tmp_path, 1)
    rest, _ = last.communicate(timeout=900)
    said = began + rest
    assert last.returncode == 0, said
    assert "resuming: " in said
    assert "every record once: 336,776 of 336,776" in said
    assert said.index("Spark ready") < said.index("all durable") < said.index("all in Parquet")
    plot, report = tmp_path / "local" / "demo.png", tmp_path / "local" / "report.html"
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "Every record arrived once, unchanged" in report.read_text()

    made = [(file.read_bytes(), file.stat().st_mtime_ns) for file in (plot, report)]
    done, _ = (again := start(tmp_path)).communicate(timeout=300)
    assert again.returncode == 0, done
    assert "complete since" in done
    assert "starting Spark" not in done
    assert "every record once: 336,776 of 336,776" in done
    assert made == [(file.read_bytes(), file.stat().st_mtime_ns) for file in (plot, report)]
