"""Imports point one way without a cycle, and test files are named after modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import opendata_buffer

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "opendata_buffer"
SOURCE, SINK = ROOT / "buffer_source", ROOT / "buffer_sink"
LIBRARY = "opendata_buffer"

# A module may import its own package and the packages of earlier lines. Two packages of one line do
# not import each other. A module directly in core counts as a package, and so does the root, which
# is the last line: it lists the public names, and nothing of the library imports it.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"hints"}),
    frozenset({"errors"}),
    frozenset({"arguments", "familiar_names", "internal_parts"}),
    frozenset({"lazy_names"}),
    frozenset({"runtime"}),
    frozenset({"metrics", "formats", "framing", "misfits", "outcomes"}),
    frozenset({"config", "messages", "values"}),
    frozenset({"option_reader", "stores"}),
    frozenset({"queue"}),
    frozenset({"gc", "quarantine", "transactions"}),
    frozenset({"consumer"}),
    frozenset({"producer"}),
    frozenset({"broker"}),
    frozenset({"topic"}),
    frozenset({"assembly", "admin", "testing"}),
    frozenset({"reading"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
    frozenset({LIBRARY}),
)


def modules() -> dict[str, Path]:
    """Return every module of the library and of its Spark halves by its dotted name."""
    found = {}
    for package in (CORE, SOURCE, SINK):
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()
CORE_MODULES = sorted(name for name in MODULES if name.split(".")[0] == LIBRARY)


@cache
def names_in(source: str) -> tuple[tuple[str, str | None], ...]:
    """Return the module and name of each import, even in functions and for types only."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            assert node.module is not None
            found += ((node.module, alias.name) for alias in node.names)
    return tuple(found)


def imports_of(source: str, known: Iterable[str]) -> set[str]:
    """Return the imported modules that are known. ``from package import module`` is ``module``."""
    found = set()
    for module, name in names_in(source):
        for imported in (f"{module}.{name}", module):
            if imported in known:
                found.add(imported)
                break
    return found


@cache
def text_of(module: str) -> str:
    return MODULES[module].read_text(encoding="utf-8")


@cache
def graph() -> dict[str, set[str]]:
    """Return what each module imports, the root included.

    This is not done at import: every process that collects tests would read all modules.
    """
    return {name: imports_of(text_of(name), MODULES) - {name} for name in MODULES}


def layer_of(module: str) -> tuple[str, int]:
    """Return the package that a module belongs to, and the number of its line in ``LAYERS``."""
    package = module.removeprefix(f"{LIBRARY}.").split(".")[0]
    levels = [level for level, packages in enumerate(LAYERS) if package in packages]
    assert levels, f"{package} has no layer: add it to LAYERS"
    return package, levels[0]


@pytest.mark.parametrize("module", CORE_MODULES)
def test_core_imports_point_downwards(module: str) -> None:
    own, level = layer_of(module)
    others = {layer_of(imported) for imported in graph()[module]}
    above = {package for package, other in others if package != own and other >= level}
    assert not above, f"{module} is not above {sorted(above)} and may not import from there"


def test_each_public_name_comes_from_the_module_that_the_root_imports_for_types() -> None:
    """So the import graph has every module that the root loads when a name is first used."""
    for_types = {
        (module, name) for module, name in names_in(text_of(LIBRARY)) if module in CORE_MODULES
    }
    loaded = {
        (f"{LIBRARY}.{module}", name) for name, module in vars(opendata_buffer)["_MODULES"].items()
    }
    assert loaded <= for_types


def test_only_the_assembly_joins_producers_and_consumers_to_the_broker() -> None:
    """A module below the broker could also load it by name at run time."""
    packages = ("broker", "assembly", "admin", "cli")
    users = {
        name
        for name, imported in graph().items()
        if any(each.startswith(f"{LIBRARY}.broker") for each in imported)
        and not name.removeprefix(f"{LIBRARY}.").startswith(packages)
    }
    assert users == {LIBRARY}
    below = tuple(f"{LIBRARY}.{package}" for package in ("queue", "consumer", "producer", "topic"))
    for name in CORE_MODULES:
        if name.startswith(below):
            assert "import_module" not in text_of(name), name


def test_a_program_without_a_broker_loads_no_module_of_the_broker() -> None:
    code = (
        "import sys, tempfile, opendata_buffer as o\n"
        "at = tempfile.mkdtemp()\n"
        "with o.Producer(o.ProducerConfig(store=at, broker='off')) as p: p.produce([b'x'])\n"
        "with o.Consumer(o.ConsumerConfig(store=at)) as c: c.ack(c.next_batch().sequence)\n"
        "print([m for m in sys.modules if 'broker' in m or 'websockets' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_there_is_no_import_cycle() -> None:
    order = [*TopologicalSorter(graph()).static_order()]  # its CycleError names the modules
    assert set(order) >= graph().keys()


def test_the_library_does_not_import_its_test_doubles() -> None:
    fakes = f"{LIBRARY}.testing"
    for name, imported in graph().items():
        assert name.startswith(fakes) or not any(each.startswith(fakes) for each in imported), name


@pytest.mark.parametrize("module", CORE_MODULES)
def test_core_never_imports_spark(module: str) -> None:
    tops = {name.split(".")[0] for name, _ in names_in(text_of(module))}
    assert not tops & {"pyspark", "buffer_source", "buffer_sink", "pyspark_opendata_buffer"}


def test_the_spark_halves_do_not_import_each_other() -> None:
    for name, imported in graph().items():
        tops = {each.split(".")[0] for each in (name, *imported)}
        assert not {SOURCE.name, SINK.name} <= tops, name


def test_the_spark_halves_use_no_private_name_of_the_core() -> None:
    for name in MODULES:
        if name not in CORE_MODULES:
            private = [
                (module, imported)
                for module, imported in names_in(text_of(name))
                if module.split(".")[0] == LIBRARY
                and any(part.startswith("_") for part in [*module.split("."), imported or ""])
            ]
            assert not private, f"{name} imports {private}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_one_module_does_compare_and_swap(module: str) -> None:
    """Stores implement it and test doubles forward it. Other modules use a ``CasObject``."""
    allowed = ("opendata_buffer.queue.cas", "opendata_buffer.stores", "opendata_buffer.testing")
    if not module.startswith(allowed):
        assert ".put_if(" not in text_of(module), f"{module}: use queue/cas.py"


UNIT_TESTS = ROOT / "tests" / "unit"
ABOUT_THE_REPOSITORY = {
    "test_typing.py": "the annotations of the public API, for type checkers",
    "test_docstrings.py": "compares the docstrings of all modules with the errors raised there",
    "test_exports.py": "checks the public names of the root package",
    "test_failures.py": "checks core/failures.md",
    "test_layers.py": "checks the imports of all modules",
    "test_packaging.py": "checks the packages that pyproject.toml builds",
    "test_references.py": "checks the references in the docstrings of all modules",
    "test_repository_files.py": "checks .github, the version, and what newcomers read first",
    "test_file_arrival.py": "simulates the trigger of a job, and what runs start",
    "test_idle.py": "counts the requests of programs that wait",
    "test_starting.py": "counts the requests of processes that start",
    "test_upgrade.py": "compares the pages about the release with the code and the figures",
    "test_site.py": "checks docs/hooks.py and the site that it helps to build",
}
"""Test files that are not about one module or package, with the thing that each one is about."""


def subjects_of(folder: Path) -> set[str]:
    """Return the modules and packages that tests in one folder of ``tests/unit`` may be about.

    A folder is named after a package, or after a module that has several test files.
    """
    if folder == UNIT_TESTS:
        parents = [CORE, ROOT, ROOT / "tools"]
        return {path.stem for parent in parents for path in parent.iterdir()}
    below = folder.relative_to(UNIT_TESTS)
    parent = {SOURCE.name: ROOT, SINK.name: ROOT, "project": ROOT / "tools"}.get(
        below.parts[0], CORE
    )
    if (parent / below).with_suffix(".py").is_file():
        return set()
    return {path.stem for path in (parent / below).iterdir()}


@pytest.mark.parametrize("path", sorted(UNIT_TESTS.rglob("test_*.py")), ids=lambda path: path.name)
def test_a_file_of_tests_is_named_after_its_module(path: Path) -> None:
    """``test_isolation.py`` and ``test_isolation_repeats.py`` test ``isolation.py``."""
    if path.name in ABOUT_THE_REPOSITORY:
        assert path.parent == UNIT_TESTS
        return
    subjects = subjects_of(path.parent)
    name = path.stem.removeprefix("test_")
    starts = {name, *(name[:index] for index, letter in enumerate(name) if letter == "_")}
    assert not subjects or starts & subjects, f"{path.parent.name} has no module {name}"


def test_every_exception_to_the_names_of_test_files_is_needed() -> None:
    assert {path.name for path in UNIT_TESTS.glob("test_*.py")} >= ABOUT_THE_REPOSITORY.keys()
    names = {name.removeprefix("test_").removesuffix(".py") for name in ABOUT_THE_REPOSITORY}
    assert not names & subjects_of(UNIT_TESTS)
