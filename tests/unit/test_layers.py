"""Imports point one way, and every module has its unit test."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "opendata_buffer"
SPARK = (ROOT / "buffer_source", ROOT / "buffer_sink")

# A module may import modules of its own layer and of layers above it in this table. What is
# not named here is found by its package ("formats", "stores", "testing").
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"_public", "errors", "runtime", "metrics"}),
    frozenset({"formats"}),
    frozenset({"config", "option_reader", "retry"}),
    frozenset({"stores"}),
    frozenset({"queue"}),
    frozenset({"gc"}),
    frozenset({"commit", "producer", "consumer"}),
    frozenset({"cli"}),
)

MODULES = sorted(
    path for path in CORE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(CORE).with_suffix("").parts)


def layer_of(module: str) -> int:
    top = module.split(".")[0]
    for level, names in enumerate(LAYERS):
        if module in names or top in names:
            return level
    raise AssertionError(f"{module} has no layer: add it to LAYERS")


def imports_of(path: Path) -> Iterator[str]:
    """Absolute names of everything imported, also inside functions and for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def core_imports(path: Path) -> set[str]:
    found = set()
    for name in imports_of(path):
        if name.startswith("opendata_buffer."):
            module = name.removeprefix("opendata_buffer.")
            target = CORE.joinpath(*module.split("."))
            if target.with_suffix(".py").is_file() or target.is_dir():
                found.add(module)
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_core_imports_point_downwards(path: Path) -> None:
    module = name_of(path)
    if module.startswith("testing."):
        return  # shipped fakes may use any part
    level = layer_of(module)
    above = {each for each in core_imports(path) if layer_of(each) > level}
    assert not above, f"{module} is below {sorted(above)} and may not import them"


def test_nothing_of_the_library_needs_the_fakes() -> None:
    for path in MODULES:
        if not name_of(path).startswith("testing."):
            assert not [each for each in core_imports(path) if each.startswith("testing")], path


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_core_never_imports_spark(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports_of(path)}
    forbidden = {"pyspark", "buffer_source", "buffer_sink", "pyspark_opendata_buffer"}
    assert not tops & forbidden


def test_the_spark_halves_do_not_import_each_other() -> None:
    for half, other in (SPARK, SPARK[::-1]):
        for path in half.rglob("*.py"):
            tops = {name.split(".")[0] for name in imports_of(path)}
            assert other.name not in tops, f"{path} imports {other.name}"


def test_the_spark_halves_use_no_private_name_of_the_core() -> None:
    for path in [*SPARK[0].rglob("*.py"), *SPARK[1].rglob("*.py")]:
        private = [
            name
            for name in imports_of(path)
            if name.startswith("opendata_buffer")
            and any(p.startswith("_") for p in name.split("."))
        ]
        assert not private, f"{path} imports {private}"


def unit_tests_of(path: Path) -> list[Path]:
    """``core/opendata_buffer/a/b.py`` is tested by ``tests/unit/a/test_b*.py``."""
    folder = ROOT / "tests" / "unit" / path.relative_to(CORE).parent
    return sorted(folder.glob(f"test_{path.stem}*.py"))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_has_its_unit_test(path: Path) -> None:
    assert unit_tests_of(path), f"{name_of(path)} has no tests/unit/.../test_{path.stem}.py"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_exports(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert "__all__" in names
