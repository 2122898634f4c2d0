"""Build the package as for a release, and test the wheel: ``python -m tools.project.wheel``.

1. Build a wheel and a source distribution from the checkout, and another wheel from the source
   distribution. Both wheels must have the same bytes.
2. Check the metadata as a release does.
3. Install the wheel with its dependencies into ``.venv-wheel``. Without any extra, every module of
   the library must load and the command line must run.
4. Run tests against it, in a folder that has the tests but no source. pytest and pyspark come from
   ``.venv``, by a path that is searched after the packages of ``.venv-wheel``.

The other environments install the project in editable mode. They do not notice a file that the
wheel lacks, or a package that only an extra requires.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools import release
from tools.project import PACKAGES, ROOT, legs
from tools.project.console import Failed, say
from tools.project.environments import Environment, base_python, installing

EPOCH = 1_767_225_600
"""The time of all files in the wheel: 2026-01-01."""

SCRIPTS = Path(sysconfig.get_path("scripts"))

LOAD_ALL = """
import importlib, pkgutil, sys
import opendata_buffer
for module in pkgutil.walk_packages(opendata_buffer.__path__, "opendata_buffer."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""

PLACES = """
import buffer_sink, buffer_source, opendata_buffer, pyspark_opendata_buffer
for module in (buffer_sink, buffer_source, opendata_buffer, pyspark_opendata_buffer):
    print(module.__file__)
"""


def call(
    command: Sequence[str | Path], folder: Path, variables: Mapping[str, str] | None = None
) -> None:
    """Run a command.

    Raises:
        Failed: It failed.
    """
    code = subprocess.run(command, cwd=folder, env=variables).returncode
    if code != 0:
        raise Failed(f"{' '.join(map(str, command))} failed with exit code {code}")


def only(folder: Path, pattern: str) -> Path:
    """Return the only file in a folder that matches a pattern."""
    (path,) = folder.glob(pattern)
    return path


def build_twice(home: Path) -> Path:
    """Build everything from the checkout, and the wheel again from the source distribution.

    Returns:
        The folder with the wheel and the source distribution.

    Raises:
        Failed: The wheels differ.
        NotReady: A build failed.
    """
    first, second = home / "dist", home / "again"
    release.build(ROOT, first, EPOCH)
    with tarfile.open(only(first, "*.tar.gz")) as archive:
        archive.extractall(home / "unpacked", filter="data")
    release.build(only(home / "unpacked", "*"), second, EPOCH)
    differing = differences(only(first, "*.whl"), only(second, "*.whl"))
    if differing:
        raise Failed(f"a second build gives another wheel: {', '.join(differing)}")
    return first


def differences(one: Path, other: Path) -> list[str]:
    """Return what differs between two wheels: names of files, or of the wheel itself."""
    if one.read_bytes() == other.read_bytes():
        return []
    with zipfile.ZipFile(one) as first, zipfile.ZipFile(other) as second:
        ours, theirs = (
            {name: archive.read(name) for name in archive.namelist()} for archive in (first, second)
        )
    names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    return names or [f"{one.name} (names, order, times, or modes of its files)"]


def install(wheel: Path) -> Environment:
    """Install the wheel with its dependencies, and no extra, into a new environment.

    Raises:
        Failed: An installer failed.
    """
    made = Environment(ROOT / ".venv-wheel")
    with installing():
        shutil.rmtree(made.folder, ignore_errors=True)
        call([base_python(), "-m", "venv", "--without-pip", made.folder], ROOT)
        cache = made.folder / ".uv"
        uv: list[str | Path] = [SCRIPTS / "uv", "pip", "install", "--quiet", "--cache-dir", cache]
        own = Environment(Path(sys.prefix))
        call([*uv, "--python", made.executable, wheel], ROOT, own.variables_for_uv())
        shutil.rmtree(cache, ignore_errors=True)
    return made


def check_alone(made: Environment) -> None:
    """Load every module of the library, and run the command line, without any extra.

    Raises:
        Failed: Something is missing.
    """
    call([made.executable, "-I", "-c", LOAD_ALL], made.folder)
    call([made.folder / "bin" / "opendata-buffer", "--version"], made.folder)


def add_tools(made: Environment) -> None:
    """Let the environment find pytest and pyspark in ours, after its own packages.

    Python does not read the files ``*.pth`` in a folder that such a file adds. So the editable
    installation of this project in our environment does not count.
    """
    ours = sysconfig.get_path("purelib")
    theirs = only(made.folder, "lib/python*/site-packages")
    (theirs / "tools-of-the-tests.pth").write_text(f"{ours}\n")


def copy_tests(home: Path) -> Path:
    """Copy the checkout without the package and without hidden files, and return the copy."""
    packages = {ROOT / package for package in PACKAGES}

    def ignored(folder: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if name.startswith(".") or name == "__pycache__" or Path(folder, name) in packages
        }

    return Path(shutil.copytree(ROOT, home / "tested", ignore=ignored))


def without_checkout(made: Environment) -> dict[str, str]:
    """Return the variables of processes that must find the package in the environment."""
    variables = made.variables()
    variables.pop("PYTHONPATH", None)
    return variables


def check_places(made: Environment, folder: Path) -> None:
    """Check that the packages come from the wheel.

    Raises:
        Failed: One comes from elsewhere.
    """
    command = [made.executable, "-c", PLACES]
    done = subprocess.run(
        command, cwd=folder, env=without_checkout(made), capture_output=True, text=True
    )
    paths = done.stdout.split()
    if len(paths) != 4 or not all(Path(path).is_relative_to(made.folder) for path in paths):
        raise Failed(f"the tests would not test the wheel: {done.stdout}{done.stderr}")


def run_tests(made: Environment, folder: Path) -> None:
    """Run tests against the wheel.

    Raises:
        Failed: A test failed.
    """
    for arguments in (legs.WHEEL, legs.WHEEL_SPARK):
        call([made.executable, "-m", "pytest", *arguments], folder, without_checkout(made))


def main() -> int:
    """Build and test the wheel.

    Returns:
        The exit code.
    """
    with tempfile.TemporaryDirectory(prefix="wheel-") as scratch:
        home = Path(scratch)
        try:
            dist = build_twice(home)
            release.check_packages(ROOT, sorted(dist.iterdir()))
            made = install(only(dist, "*.whl"))
            check_alone(made)
            add_tools(made)
            folder = copy_tests(home)
            check_places(made, folder)
            run_tests(made, folder)
        except (Failed, release.NotReady) as error:
            say(str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
