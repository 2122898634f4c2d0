"""The Python part of Databricks' runtimes: pinned wheels, unpacked for the tests.

::

    python -m tests.databricks.runtimes            # download missing ones
    python -m tests.databricks.runtimes missing    # only list missing ones
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LONG_TERM, NEWEST = "17.3.15", "19.3.0"
"""Versions of the package ``databricks-connect``, which begin with the runtime's version."""

PYTHON = (3, 12)
FOLDER = Path(sys.prefix, "runtimes")


def why_not(version: str) -> str | None:
    """Return the reason why a runtime cannot be tested, or None."""
    if sys.version_info < PYTHON:
        return f"Databricks {version} needs Python 3.12 or later"
    if not (FOLDER / version).exists():
        needed = "./run setup --full, with a package index"
        return f"databricks-connect {version} is not installed: {needed}"
    return None


def get(version: str) -> None:
    """Download and unpack a wheel.

    Raises:
        CalledProcessError: pip could not download it.
    """
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
        options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--dest", folder]
        subprocess.run([*pip, *options, f"databricks-connect=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        made = Path(folder, "made")
        zipfile.ZipFile(wheel).extractall(made)
        made.rename(FOLDER / version)


def main(arguments: list[str]) -> None:
    """Download or list runtimes; see the module."""
    for version in (LONG_TERM, NEWEST):
        try:
            if arguments != ["missing"] and not (FOLDER / version).exists():
                get(version)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"databricks-connect {version} could not be downloaded: {error}", file=sys.stderr)
        reason = why_not(version)
        if reason is not None and arguments == ["missing"]:
            print(f"not tested on the Python of Databricks: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
