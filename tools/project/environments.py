"""Virtual environments in the checkout: ``.venv``, and ``.venv-...`` for ``./run test --full``.

An environment is complete when its file ``.complete`` says what it was made from: the extras, the
path of the checkout (the package is installed in editable mode), and the content of
``pyproject.toml``. An interrupted installation leaves no such file, and the next command starts it
again. A change of ``pyproject.toml`` installs what is missing into the existing environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.project import ROOT, debian
from tools.project.console import Failed, Log, say

COMPLETE = ".complete"
ALL = "dev"
"""The extra that contains what every command needs."""

NO_VENV = """could not make a virtual environment with {python}.
  Debian, Ubuntu:  sudo apt-get install python{version}-venv    then start again
  otherwise:       install a Python that has the modules venv and ensurepip"""


def base_python() -> str:
    """Return the Python that ``./run`` found. If it is that of an environment, return its base.

    The environment may be the one that is being replaced.
    """
    return str(getattr(sys, "_base_executable", "") or sys.executable)


@contextmanager
def installing(root: Path = ROOT) -> Iterator[None]:
    """Wait until no other ``./run`` installs into this checkout.

    The lock is on ``pyproject.toml``. The kernel holds it for this process and for the installers
    that it starts, so it cannot outlive them.
    """
    with (root / "pyproject.toml").open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another ./run to finish installing")
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)
        yield


@dataclass(frozen=True)
class Environment:
    """A virtual environment with this project.

    Attributes:
        folder: Where it is.
        extras: The extras of ``pyproject.toml``, separated by commas.
        options: Further arguments of ``uv pip install``, such as a version of a package.
        python: The Python to make it with.
        root: The checkout.
    """

    folder: Path
    extras: str = ALL
    options: tuple[str, ...] = ()
    python: str = ""
    root: Path = ROOT

    @property
    def executable(self) -> str:
        """The path of its Python."""
        return str(self.folder / "bin" / "python")

    @property
    def log(self) -> Log:
        """The log of its installation."""
        return Log(self.folder / "setup.log")

    def variables(self, given: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment variables of processes that run in it.

        Args:
            given: The variables to start from. Those of this process by default.
        """
        variables = dict(os.environ if given is None else given)
        path = variables.get("PATH", os.defpath)
        return {
            **variables,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{path}",
            "PYSPARK_PYTHON": self.executable,
            "PYSPARK_DRIVER_PYTHON": self.executable,
        }

    def identity(self, extras: str) -> str:
        """Return a text about everything that the environment is made from."""
        project = (self.root / "pyproject.toml").read_bytes()
        digest = hashlib.sha256(project).hexdigest()[:16]
        return " ".join([digest, str(self.root), extras, *self.options])

    @property
    def starts(self) -> bool:
        """Whether its Python starts. It does not if the Python it was made with is gone."""
        try:
            done = subprocess.run([self.executable, "-c", ""], capture_output=True)
        except OSError:
            return False
        return done.returncode == 0

    @property
    def is_complete(self) -> bool:
        """Whether it has these extras, or all, in the versions that pyproject.toml wants."""
        try:
            made = (self.folder / COMPLETE).read_text("utf-8")
        except FileNotFoundError:
            return False
        return made in (self.identity(self.extras), self.identity(ALL)) and self.starts

    def need(self) -> None:
        """Make the environment unless it is complete.

        Raises:
            Failed: An installer failed.
        """
        if self.is_complete:
            return
        with installing(self.root):
            if not self.is_complete:  # The command that we waited for may have made it.
                self._make()

    def _make(self) -> None:
        if not (self.folder / COMPLETE).exists() or not self.starts:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(exist_ok=True)
        (self.folder / COMPLETE).unlink(missing_ok=True)
        self.log.path.write_bytes(b"")
        self._create()
        name = self.folder.name
        log = self.log
        log.begin(
            f"installing [{self.extras}] into {name}; the first time this takes minutes (pyspark "
            "is 455 MB)"
        )
        if not self._install(log):
            log.show_end()
            raise Failed(f"no installer succeeded; the whole log is in {name}/setup.log")
        unfinished = self.folder / f"{COMPLETE}.new"
        unfinished.write_text(self.identity(self.extras), "utf-8")
        unfinished.replace(self.folder / COMPLETE)

    def _create(self) -> None:
        """Make an environment that has only pip."""
        if (self.folder / "bin" / "pip").exists():
            return
        python = self.python or base_python()
        command = [python, "-m", "venv", str(self.folder)]
        log = self.log
        if log.run(command):
            return
        # Debian and Ubuntu ship Python without ensurepip.
        version = version_of(python)
        if debian.install(f"python{version}-venv", log) and log.run(command):
            return
        log.show_end()
        raise Failed(NO_VENV.format(python=python, version=version))

    def _install(self, log: Log) -> bool:
        """Install with uv, which takes a fifth of pip's time, and with pip if uv fails.

        Like pip, uv is told to compile what it installs: otherwise, where PYTHONDONTWRITEBYTECODE
        is set, every process that Spark starts would compile pyspark and pandas.

        uv's cache is in the environment, on the file system where uv links to it. It is deleted,
        because it contains gigabytes after pyspark was built.
        """
        cache = self.folder / ".uv"
        what = [*self.options, "-e", f".[{self.extras}]"]
        uv = [str(self.folder / "bin" / "uv"), "pip", "install", "--cache-dir", str(cache)]
        uv += ["--compile-bytecode", "--python", self.executable]
        if log.run([*self._pip_install, "uv"]) and log.run(
            [*uv, *what], self.variables_for_uv(), self.root
        ):
            shutil.rmtree(cache, ignore_errors=True)
            return True
        # Only uv knows the options.
        return not self.options and log.run([*self._pip_install, *what], folder=self.root)

    @property
    def _pip_install(self) -> list[str]:
        pip = [self.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        return [*pip, "--no-input"]

    def variables_for_uv(self) -> dict[str, str]:
        """Return variables with pip's settings, which uv does not read."""
        variables = dict(os.environ)
        pip = [self.executable, "-m", "pip", "config", "list"]
        done = subprocess.run(pip, capture_output=True, text=True)
        for name, value in settings_for_uv(done.stdout, variables).items():
            variables[name] = value
        return variables


def settings_for_uv(listed: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Translate pip's index and certificates into uv's environment variables.

    Args:
        listed: The output of ``pip config list``, which knows all of pip's files. ``pip config
            get`` would read only the user's, and miss ``/etc/pip.conf``.
        variables: The environment variables. Those of pip come before its files.
    """
    settings = dict(re.findall(r"^global\.([\w-]+)='(.*)'$", listed, re.MULTILINE))
    found = {
        "UV_DEFAULT_INDEX": variables.get("PIP_INDEX_URL") or settings.get("index-url"),
        "SSL_CERT_FILE": variables.get("PIP_CERT") or settings.get("cert"),
    }
    return {name: value for name, value in found.items() if value}


def version_of(python: str) -> str:
    """Return the version of a Python, such as 3.12. An empty text if it does not start."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def first_of(versions: Sequence[str]) -> str | None:
    """Return a Python of one of these versions, which are in the order of preference.

    Versions of pyenv may be on no PATH, or on the PATH without being active.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for version in versions:
        paths = sorted(pyenv.glob(f"{version}.*/bin/python3"), reverse=True)
        for python in (f"python{version}", *map(str, paths), "python3", base_python()):
            if version_of(python) == version:
                return python
    return None
