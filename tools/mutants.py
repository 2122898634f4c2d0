"""Mutation testing: change the code in thousands of small ways, and see which ones no test notices.

::

    python -m tools.mutants                          # every module in MODULES, in about two hours
    python -m tools.mutants formats/zstd gc          # these modules
    python -m tools.mutants --again formats/zstd     # only what survived, or was edited since

mutmut makes the mutants and runs the tests that reach them. It needs sources under ``src/``, so
this tool first copies the library and the tests to a folder in the user's cache. It then compares
the survivors with ``tests/mutants.toml``, which explains the ones that no test can or should
notice. A survivor that is missing there is printed in the form that the file has. Kill it with a
test, or add it with a reason.

The exit code is 0 when every survivor is explained and every explanation is still needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.servers import CACHE

ROOT = Path(__file__).parents[1]
EXPLAINED = ROOT / "tests" / "mutants.toml"
FOLDER = CACHE.parent / "mutants"
"""The copy and the results of each module. Two runs must not share it."""

_FORMATS = ("tests/unit/formats", "tests/golden")
_LOG = (
    "tests/unit/queue/test_log.py",
    "tests/unit/queue/test_log_moves.py",
    "tests/unit/queue/test_reader_admin.py",
    "tests/unit/queue/test_reader_positions.py",
    "tests/unit/queue/test_reader_queue.py",
    "tests/unit/queue/test_retention.py",
)
MODULES = {
    "formats/zstd": _FORMATS,
    "formats/batch": _FORMATS,
    "formats/manifest": _FORMATS,
    "formats/arrow": _FORMATS,
    "messages": ("tests/unit/test_messages.py", "tests/golden"),
    "consumer/isolation": (
        "tests/unit/consumer/test_isolation.py",
        "tests/unit/consumer/test_isolation_repeats.py",
        "tests/unit/consumer/test_batches.py",
    ),
    "gc": ("tests/unit/gc", "tests/unit/queue/test_unaccounted.py", *_LOG),
    "queue/log": ("tests/unit/queue/test_log_checks.py", *_LOG),
    "queue/log_index": ("tests/unit/queue/test_log_index.py", *_LOG),
    "queue/log_moves": _LOG,
    "queue/log_parts": (
        "tests/unit/queue/test_log_index.py",
        "tests/unit/queue/test_log_parts.py",
        *_LOG,
    ),
    "queue/log_segments": ("tests/unit/queue/test_log_segments.py", *_LOG),
    "queue/log_view": ("tests/unit/queue/test_log_view.py", *_LOG),
    "queue/retention": _LOG,
}
"""The modules to mutate, and the tests that must notice their mutants. The tests run once for every
mutant, so the few that start a process or take seconds are left out."""

_COPIED = ("tests", "tools", "buffer_source", "buffer_sink", "pyproject.toml")
_SETTINGS = """\
[mutmut]
source_paths = src
only_mutate = src/opendata_buffer/{module}.py
also_copy =
    {copied}
pytest_add_cli_args =
    -p
    no:cacheprovider
    -W
    ignore
    -k
    not new_process and not is_loaded_with and not over_weeks and not mover_that_dies
pytest_add_cli_args_test_selection =
    {tests}
timeout_constant = 3.0
timeout_multiplier = 4.0
"""
_CHECKED = re.compile(r"^ *@checked\n", re.MULTILINE)
"""Removed from the mutated module, because mutmut skips functions with decorators."""
_ALIVE = (0, 33, None)
"""Exit codes: the tests passed, no test reaches the function, or the mutant was not tested yet."""
_LITERAL = re.compile(r'"[^"]*"')


class Mutant(NamedTuple):
    """One mutant, identified by its change, because mutmut's numbers change with every edit.

    Attributes:
        function: Dotted path of the function below ``opendata_buffer``.
        before: The lines that the mutation changes, without indentation.
        after: The same lines of the mutant. Empty where a line was removed.
    """

    function: str
    before: str
    after: str

    @property
    def changes_only_text(self) -> bool:
        """Whether only the wording of an error or a line of the debug or info log differs.

        Tests quote the part of a message that its reader acts on, not every word. A literal without
        a space may be a key, so it counts.
        """
        if self.before.startswith(("log.debug(", "log.info(")) and "\n" not in self.before:
            return True
        pairs = list(zip(_LITERAL.findall(self.before), _LITERAL.findall(self.after), strict=False))
        same_code = _LITERAL.sub('""', self.before) == _LITERAL.sub('""', self.after)
        return same_code and all(" " in before for before, after in pairs if before != after)

    def toml(self) -> str:
        """The entry of ``tests/mutants.toml`` that explains this mutant, with an empty reason."""
        fields = {**self._asdict(), "reason": ""}
        lines = (
            f"{name} = {json.dumps(text, ensure_ascii=False)}" for name, text in fields.items()
        )
        return "\n".join(["[[explained]]", *lines])


class Results(NamedTuple):
    """The results of the mutants of one module."""

    total: int
    killed: int
    texts: int
    survivors: list[Mutant]


def prepare(module: str, again: bool) -> Path:
    """Copy the library and the tests to the layout that mutmut expects.

    Args:
        module: A key of :data:`MODULES`.
        again: Keep the results of mutants that the last run killed.

    Returns:
        The folder to run mutmut in.
    """
    folder = FOLDER / module.replace("/", "-")
    if not again:
        shutil.rmtree(folder, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("src", *_COPIED):
        source, target = ROOT / name, folder / name
        if name == "src":
            source, target = ROOT / "core" / "opendata_buffer", folder / "src" / "opendata_buffer"
        if source.is_file():
            shutil.copy2(source, target)
        else:
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=ignore)
    mutated = folder / "src" / "opendata_buffer" / f"{module}.py"
    mutated.write_text(_CHECKED.sub("", mutated.read_text()))
    settings = _SETTINGS.format(
        module=module,
        copied="\n    ".join(_COPIED),
        tests="\n    ".join(MODULES[module]),
    )
    (folder / "setup.cfg").write_text(settings)
    # After an edit, a test may reach other functions than before.
    (folder / "mutants" / "mutmut-stats.json").unlink(missing_ok=True)
    recorded = _recorded(folder, module)
    if recorded.exists():
        # mutmut runs mutants without a result, and forgets the results of edited functions.
        results = json.loads(recorded.read_text())
        codes = results["exit_code_by_key"]
        codes.update({name: None for name, code in codes.items() if code in _ALIVE})
        recorded.write_text(json.dumps(results))
    return folder


def run(module: str, children: int, again: bool) -> Results:
    """Run mutmut on one module.

    Args:
        module: A key of :data:`MODULES`.
        children: Mutants to test at the same time.
        again: Test only the mutants that survived the last run, or whose functions were edited.

    Returns:
        The numbers, and the mutants that no test noticed.
    """
    folder = prepare(module, again)
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children)]
    # Each mutant has a process, which would compile the tests again.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, cwd=folder, env=env, check=True)
    codes = json.loads(_recorded(folder, module).read_text())["exit_code_by_key"]
    alive = [name for name, code in codes.items() if code in _ALIVE]
    mutants = [_mutant(folder, module, name) for name in alive]
    survivors = [mutant for mutant in mutants if not mutant.changes_only_text]
    texts = len(mutants) - len(survivors)
    return Results(len(codes), len(codes) - len(alive), texts, survivors)


def _recorded(folder: Path, module: str) -> Path:
    """Return the path where mutmut records pytest's exit code for each mutant."""
    return folder / "mutants" / "src" / "opendata_buffer" / f"{module}.py.meta"


def _mutant(folder: Path, module: str, name: str) -> Mutant:
    """Return the change that a mutant of mutmut makes."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    here = Path.cwd()
    os.chdir(folder)
    try:
        diff = get_diff_for_mutant(name, path=Path("src", "opendata_buffer", f"{module}.py"))
    finally:
        os.chdir(here)
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    before = "\n".join(line[1:].strip() for line in lines if line.startswith("-"))
    after = "\n".join(line[1:].strip() for line in lines if line.startswith("+"))
    function = name.removeprefix("opendata_buffer.").rpartition("__mutmut_")[0]
    # mutmut calls a function x_name, and a method xǁClassǁname.
    function = function.replace(".x_", ".").replace(".xǁ", ".").replace("ǁ", ".")
    return Mutant(function, before, after)


def explained() -> dict[Mutant, str]:
    """Return the mutants that need no test, and the reasons."""
    entries = tomllib.loads(EXPLAINED.read_text())["explained"]
    return {
        Mutant(entry["function"], entry["before"], entry["after"]): entry["reason"]
        for entry in entries
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(MODULES))
    parser.add_argument("--again", action="store_true", help="only survivors and edited functions")
    parser.add_argument("--max-children", type=int, default=1, help="mutants tested at once (1)")
    options = parser.parse_args(arguments)
    if unknown := set(options.modules) - set(MODULES):
        parser.error(f"unknown module {min(unknown)!r}. Use {', '.join(MODULES)}")
    try:
        import mutmut  # noqa: F401
    except ImportError:
        parser.error("mutmut is not installed. Run: pip install -e '.[mutation]'")
    known = explained()
    failed = False
    for module in options.modules or MODULES:
        results = run(module, options.max_children, options.again)
        new = [mutant for mutant in results.survivors if mutant not in known]
        prefix = module.replace("/", ".") + "."
        stale = [
            mutant
            for mutant in known
            if mutant.function.startswith(prefix) and mutant not in results.survivors
        ]
        for mutant in new:
            print(f"\n{mutant.toml()}")
        for mutant in stale:
            print(f"\nexplained, but a test kills it, or it is not made any more:\n{mutant.toml()}")
        print(
            f"\n{module}: {results.total} mutants, {results.killed} killed, {results.texts} change "
            f"only a text, {len(results.survivors)} survived, of them {len(new)} "
            f"without an explanation. {len(stale)} explanations are no longer needed."
        )
        failed = failed or bool(new or stale)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
