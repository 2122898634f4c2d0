"""The commands of ``./run``. Each first makes what it needs: ``.venv``, the package in it, Java."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.project import PACKAGES, ROOT, java, legs
from tools.project.console import Failed, say
from tools.project.environments import Environment, base_python, first_of
from tools.project.lanes import Ended, Lanes, Step, summary

USAGE = """\
usage: ./run COMMAND [ARGUMENT ...]

  demo [--s3|--topic] [--fresh]
                           replay 336,776 flights through a buffer into Spark
  test                     lint, types, documentation, and the tests that find most defects
  test --full              all other tests: more seeds, kills, and interrupts; the lowest versions,
                           Delta, the built wheel, the Python of Databricks, a browser
  test --nightly           both, with more kills, more seeds, and more examples
  test PYTEST ARGUMENT     only pytest, in the same environment
  setup [--full]           install what these tests need, and run none
  bench [SUITE ...]        measure against the goals: codec producers pace topics broker consumer
                           log commands s3 cost spark; --tiny only runs the code
  bench peers              compare with Kafka (needs mvn), its clients and Spark's own sources
  referees [OPTION ...]    play histories of real processes under faults, and have Porcupine and
                           adya judge them (with Go and Cargo); --histories N, --faults, --help
  spec [--whole] [--faults] [NAME ...]
                           check the TLA+ specification with TLC; --faults: seed faults into it;
                           --trace SEED: check a trace of the code against it
  servers                  get the servers that tests and demo start if they are there: versitygw
                           and fake-gcs-server (built with Go), Azurite (with npm), Prometheus (of
                           Debian, unpacked into a cache; it does not run as a service)
  lint                     ruff, pydoclint, mypy, and checks of spelling, shell, workflows and
                           commits
  release [--out FOLDER]   build and check a release into dist/, and publish nothing
  help                     this text

The first command installs what it needs into .venv, which takes some minutes. The tests of --full
also need .venv-lowest: the lowest versions that pyproject.toml declares, and the Spark that Delta
has. PYTHON=/path/to/python ./run ... chooses the Python.
"""

VENV = ROOT / ".venv"

LINT = {
    "ruff": ("ruff", "check", "."),
    "ruff-format": ("ruff", "format", "--check", "."),
    "pydoclint": ("pydoclint", "--quiet", *PACKAGES, "benchmarks", "examples"),
    "mypy": ("mypy",),
    "checks": ("python", "-m", "tools.checks"),
}
"""The commands of ``./run lint``, which are in ``.venv/bin``."""

CLASSES = "OPENDATA_BUFFER_CLASSES"


class Usage(Exception):
    """The command line is wrong."""


def main(arguments: Sequence[str]) -> int:
    """Run a command.

    Returns:
        The exit code: 0, 1 if something failed, 2 for a wrong command line, or that of the program
        that replaces this process.
    """
    os.chdir(ROOT)
    name, *rest = arguments or ["help"]
    try:
        if name not in COMMANDS:
            raise Usage
        return COMMANDS[name](rest)
    except Usage:
        print(USAGE, end="", file=sys.stderr)
        return 2
    except Failed as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def replace(python: str, arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """Let a Python replace this process."""
    sys.stdout.flush()
    os.execvpe(python, [python, *arguments], dict(variables))


# What the commands need.


def need_python(extras: str = "dev") -> tuple[Environment, dict[str, str]]:
    """Return the environment ``.venv`` with these extras, and the variables of its processes."""
    environment = Environment(VENV, extras)
    environment.need()
    return environment, environment.variables()


def need_java(environment: Environment, variables: Mapping[str, str]) -> dict[str, str]:
    """Add the variables of processes that start Spark.

    They include the archive of Spark's classes if the tests have made one. A JVM ignores the
    archive of another Java.
    """
    home = java.need(environment.log)
    added = {"JAVA_HOME": home, "SPARK_LOCAL_IP": "127.0.0.1"}
    for archive in sorted(VENV.glob("classes-*.jsa"))[:1]:
        added[CLASSES] = str(archive)
    return {**variables, **added}


def need_classes(environment: Environment, variables: Mapping[str, str]) -> dict[str, str]:
    """Archive Spark's classes, once for each Java and each set of packages.

    A JVM that maps the archive starts in half the time. Without an archive, tests take longer.
    """
    java_command = os.path.join(variables["JAVA_HOME"], "bin", "java")
    version = subprocess.run([java_command, "-version"], capture_output=True, text=True).stderr
    made_of = zlib.crc32(f"{version} {environment.identity('dev')}".encode())
    archive = VENV / f"classes-{made_of}.jsa"
    if not archive.exists():
        for old in VENV.glob("classes-*.jsa"):
            old.unlink()
        log = environment.log
        log.begin("archiving Spark's classes")
        python = [environment.executable, "-m", "tests.spark.classes", str(archive)]
        if not log.run(python, {**variables, CLASSES: str(archive)}):
            log.show_end()
            say("it goes on without them")
    return {**variables, CLASSES: str(archive)}


def need_quick() -> dict[str, str]:
    """Install what ``./run test`` needs, and return the variables of its processes."""
    environment, variables = need_python()
    return need_classes(environment, need_java(environment, variables))


class Others:
    """The environments next to ``.venv``. Tests that need one that cannot be made do not run.

    Attributes:
        failed: The names of the environments that could not be made.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.failed: list[str] = []

    def variables(
        self, name: str, extras: str, options: Sequence[str], pythons: Sequence[str]
    ) -> dict[str, str] | None:
        """Make an environment, and return the variables of its processes. None if that failed."""
        python = first_of(pythons) if pythons else base_python()
        try:
            if python is None:
                raise Failed(f".venv-{name} needs Python {' or '.join(pythons)}; none was found")
            environment = Environment(ROOT / f".venv-{name}", extras, tuple(options), python)
            environment.need()
        except Failed as error:
            say(str(error))
            self.failed.append(name)
            return None
        # Without the commands of .venv, and without its archive: this Spark has other classes.
        path = {"PATH": os.environ.get("PATH", os.defpath)}
        variables = environment.variables({**self._variables, **path})
        variables.pop(CLASSES, None)
        return variables


def need_full(variables: Mapping[str, str]) -> tuple[dict[str, str] | None, Others]:
    """Install what ``./run test --full`` needs.

    The lowest versions have no builds for a Python that came out after them. Delta's Spark is 4.2.
    """
    download = [executable(variables), "-m", "tests.databricks.runtimes"]
    subprocess.run(
        download, env=dict(variables), stdout=sys.stderr
    )  # finish() lists what is missing
    others = Others(variables)
    options = ("--resolution", "lowest-direct", "pyspark>=4.2")
    return others.variables("lowest", "spark,test", options, ("3.11", "3.12")), others


def executable(variables: Mapping[str, str]) -> str:
    """Return the Python of the environment that has these variables."""
    return variables["PYSPARK_PYTHON"]


# Steps.


def pytest(name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Step:
    """Return a step that runs pytest."""
    return python_step(name, ("-m", "pytest", *arguments), variables)


def python_step(name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> Step:
    """Return a step that runs Python."""
    return Step(name, (executable(variables), *arguments), variables)


def lint_steps(variables: Mapping[str, str]) -> list[Step]:
    """Return the steps of ``./run lint``."""
    scripts = Path(executable(variables)).parent
    return [
        Step(name, (str(scripts / words[0]), *words[1:]), variables) for name, words in LINT.items()
    ]


def quick_steps(variables: Mapping[str, str]) -> list[list[Step]]:
    """Return the steps of ``./run test``, in groups that run one after the other.

    A session of Spark needs 1.5 GB, and the other tests 1.8 GB. So they do not run together.
    """
    spark, *others = (pytest(leg.name, leg.arguments, variables) for leg in legs.QUICK)
    docs = python_step("docs", ("-m", "tools.project.docs"), variables)
    return [[spark, *lint_steps(variables), docs], others]


def full_steps(variables: Mapping[str, str], lowest: Mapping[str, str] | None) -> list[Step]:
    """Return the steps of ``./run test --full``."""
    steps = []
    for leg in legs.FULL:
        if not leg.lowest:
            steps.append(pytest(leg.name, leg.arguments, variables))
        elif lowest is not None:
            required = {**lowest, "OPENDATA_BUFFER_DELTA": "required"}
            steps.append(pytest(leg.name, leg.arguments, required))
    steps.append(python_step("wheel-tests", ("-m", "tools.project.wheel"), variables))
    if lowest is not None:
        steps.append(pytest("lowest-tests", legs.LOWEST, lowest))
    return steps


def night_steps(variables: Mapping[str, str], others: Others) -> list[Step]:
    """Return the further steps of ``./run test --nightly``."""
    steps = []
    for version in legs.OLDER_SPARKS:
        older = others.variables(f"spark-{version}", "spark,test", (f"pyspark=={version}.*",), ())
        if older is not None:
            fewer = {**older, "OPENDATA_BUFFER_KILLS": "40"}
            steps.append(pytest(f"spark-{version}-tests", legs.OLDER_SPARK, fewer))
    histories = variables.get("OPENDATA_BUFFER_HISTORIES", "1000")
    commands = {
        "referees": ("-m", "tests.referees", "--histories", histories),
        "seeded-faults": ("-m", "tests.referees", "--faults"),
        "specification": ("-m", "tools.specification", "--whole"),
        "specification-faults": ("-m", "tools.specification", "--faults"),
    }
    return steps + [python_step(name, words, variables) for name, words in commands.items()]


def run(groups: Sequence[Sequence[Step]], failed: Sequence[str] = ()) -> list[str]:
    """Run steps in two lanes, and print their seconds.

    Args:
        groups: The steps. Those of a group start when all of the group before have ended.
        failed: What failed before.

    Returns:
        The names of everything that failed.
    """
    began = time.monotonic()
    ended: list[Ended] = []
    for steps in groups:
        ended += Lanes(steps).run()
    say(summary(ended, time.monotonic() - began))
    return [*failed, *(step.name for step in ended if step.code != 0)]


def finish(failed: Sequence[str]) -> int:
    """Return the exit code, after a line that lists the failures."""
    if failed:
        say(f"failed: {' '.join(failed)}")
    return 1 if failed else 0


def print_missing(variables: Mapping[str, str], *modules: str) -> None:
    """List the servers or runtimes that the tests did without."""
    for module in modules:
        command = [executable(variables), "-m", module, "missing"]
        subprocess.run(command, env=dict(variables), stdout=sys.stderr)


# The commands.


def demo(arguments: Sequence[str]) -> int:
    """Run the demo."""
    environment, variables = need_python("spark,demo")
    variables = need_java(environment, variables)
    return replace(environment.executable, ["-m", "notebooks.demo", *arguments], variables)


def setup(arguments: Sequence[str]) -> int:
    """Install what the tests need."""
    if list(arguments) not in ([], ["--full"]):
        raise Usage
    variables = need_quick()
    return finish(need_full(variables)[1].failed if arguments else [])


def test(arguments: Sequence[str]) -> int:
    """Run a part of the tests, or pytest with arguments."""
    # Hundreds of Python processes load these sources, and each pytest rewrites all tests.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    scope, rest = (arguments[0] if arguments else ""), list(arguments[1:])
    if scope == "--nightly":
        for name, value in legs.NIGHT.items():
            os.environ.setdefault(name, value)
    if scope in ("", "--full", "--nightly") and not rest:
        return test_in_legs(scope)
    if scope == "--full":
        raise Usage
    environment, variables = need_python()
    variables = need_java(environment, variables)
    given = rest if scope == "--nightly" else arguments
    return replace(environment.executable, ["-m", "pytest", *given], variables)


def test_in_legs(scope: str) -> int:
    """Run ``./run test``, ``./run test --full``, or ``./run test --nightly``."""
    variables = need_quick()
    groups: list[list[Step]] = []
    failed: list[str] = []
    missing = ["tools.servers"]
    if scope != "--full":
        groups += quick_steps(variables)
    if scope:
        if scope == "--nightly":
            subprocess.run([executable(variables), "-m", "tools.servers"], stdout=sys.stderr)
        lowest, others = need_full(variables)
        groups.append(full_steps(variables, lowest))
        if scope == "--nightly":
            groups.append(night_steps(variables, others))
        failed = others.failed
        missing.append("tests.databricks.runtimes")
    failed = run(groups, failed)
    print_missing(variables, *missing)
    return finish(failed)


def lint(arguments: Sequence[str]) -> int:
    """Run the linters, mypy, and the checks of other files."""
    if arguments:
        raise Usage
    return finish(run([lint_steps(need_python()[1])]))


def bench(arguments: Sequence[str]) -> int:
    """Run benchmarks."""
    environment, variables = need_python()
    variables = need_java(environment, variables)
    return replace(environment.executable, ["-m", "benchmarks", *arguments], variables)


def referees(arguments: Sequence[str]) -> int:
    """Run the referees."""
    environment, variables = need_python()
    return replace(environment.executable, ["-m", "tests.referees", *arguments], variables)


def release(arguments: Sequence[str]) -> int:
    """Build and check a release."""
    environment, variables = need_python()
    return replace(environment.executable, ["-m", "tools.release", *arguments], variables)


def spec(arguments: Sequence[str]) -> int:
    """Check the specification, which needs Java and no environment. It says if Java is missing."""
    home = java.find()
    variables = {**os.environ, **({} if home is None else {"JAVA_HOME": home})}
    return replace(base_python(), ["-m", "tools.specification", *arguments], variables)


def servers(arguments: Sequence[str]) -> int:
    """Get the servers, without an environment."""
    if arguments:
        raise Usage
    return replace(base_python(), ["-m", "tools.servers"], os.environ)


def print_help(arguments: Sequence[str]) -> int:
    """Print the usage."""
    print(USAGE, end="")
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo,
    "setup": setup,
    "test": test,
    "bench": bench,
    "referees": referees,
    "spec": spec,
    "servers": servers,
    "lint": lint,
    "release": release,
    "help": print_help,
    "-h": print_help,
    "--help": print_help,
}
