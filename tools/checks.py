"""Check what ruff and mypy do not read: spelling, shell, metadata, workflows, and commits.

::

    python -m tools.checks            # run all checks at the same time, in a second or two
    python -m tools.checks install    # build actionlint with Go, next to the servers of the tests

A check whose tool is missing is skipped, and a line says so and how to get the tool. If the
environment variable ``OPENDATA_BUFFER_CHECKS`` is ``required``, as in CI, it fails instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import servers

ROOT = Path(__file__).resolve().parents[1]
ACTIONLINT = "github.com/rhysd/actionlint/cmd/actionlint@v1.7.12"
"""The Go module; its Python package downloads the program from elsewhere while it is installed."""
FOLDER = servers.CACHE.parent / "tools" / ACTIONLINT.rpartition("/")[2]
"""The folder of the built actionlint, outside the checkout."""
PYTHON_PACKAGES = "activate .venv, or pip install -e '.[lint]'"
SCRIPTS = ("run", ".ci/run")
WITHOUT_PROSE = (".svg", ".manifest", ".batch", ".lock", ".sum", ".mod", ".ipynb", ".jsonl")
"""Suffixes of files in which codespell would only find names and data."""


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: The tool, which is also the name of its command.
        arguments: The arguments of the command.
        how_to_get: The advice if the tool is missing.
    """

    name: str
    arguments: tuple[str, ...]
    how_to_get: str = PYTHON_PACKAGES

    def command(self) -> list[str] | None:
        """Return the command; None if the tool is missing.

        Tools of the environment that runs this module come first, even if it is not activated.
        """
        places = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), str(FOLDER)]
        found = shutil.which(self.name, path=os.pathsep.join(places))
        return None if found is None else [found, *self.arguments]


def tracked(root: Path) -> list[str]:
    """Return the paths of all files that Git tracks and that have prose in them."""
    out = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True)
    paths = out.stdout.decode().split("\0")
    return [path for path in paths if path and not path.endswith(WITHOUT_PROSE)]


def checks(root: Path) -> tuple[Check, ...]:
    """Return all checks of a checkout."""
    return (
        Check("codespell", ("--toml", "pyproject.toml", *tracked(root))),
        Check("shellcheck", SCRIPTS),
        Check("validate-pyproject", ("pyproject.toml",)),
        Check("zizmor", ("--offline", "--no-progress", "--quiet", ".github")),
        # It would start the shellcheck of the PATH on each script of a workflow, and pyflakes.
        Check("actionlint", ("-pyflakes=",), "python -m tools.checks install (needs Go)"),
    )


def run(wanted: Sequence[Check], root: Path, *, required: bool) -> list[str]:
    """Run checks at the same time.

    Args:
        wanted: The checks.
        root: The checkout, in which they run.
        required: Whether a check whose tool is missing fails.

    Returns:
        The names of the checks that failed.
    """
    failed = []
    started = []
    for check in wanted:
        command = check.command()
        if command is None:
            print(f"not checked by {check.name}, which is missing: {check.how_to_get}")
            if required:
                failed.append(check.name)
            continue
        process = subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append((check.name, process))
    for name, process in started:
        said = process.communicate()[0]
        if process.returncode != 0:
            print(f"{name}:\n{said.rstrip()}", flush=True)
            failed.append(name)
    return failed


def install() -> int:
    """Build actionlint unless it is there. Returns the exit code."""
    if (FOLDER / "actionlint").exists():
        print(f"actionlint is there: {FOLDER}")
        return 0
    try:
        if servers.find("go") is None:
            servers.get("go")
        go = servers.find("go") or "go"
        environment = {**os.environ, "PATH": servers.search_path(), "GOBIN": str(FOLDER)}
        subprocess.run([go, "install", ACTIONLINT], check=True, env=environment)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"actionlint could not be built: {error}; it {servers.NO_GO}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    if list(arguments) == ["install"]:
        return install()
    if arguments:
        print("usage: python -m tools.checks [install]", file=sys.stderr)
        return 2
    required = os.environ.get("OPENDATA_BUFFER_CHECKS") == "required"
    failed = run(checks(ROOT), ROOT, required=required)
    if subprocess.run([sys.executable, "-m", "tools.commits"], cwd=ROOT).returncode:
        failed.append("commits")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
