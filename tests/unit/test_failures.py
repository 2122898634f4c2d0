"""The catalog of failures: citations of it and the names in it exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[2]
CATALOGUE = (ROOT / "core" / "failures.md").read_text(encoding="utf-8")
ENTRIES = dict(re.findall(r"^### (F\d+) (.*?)(?=^##|\Z)", CATALOGUE, re.MULTILINE | re.DOTALL))

# All handwritten Markdown and Python files.
WRITTEN = sorted(
    path
    for root in ("core", "buffer_source", "buffer_sink", "benchmarks", "docs", "examples", "tests")
    for path in (ROOT / root).rglob("*.*")
    if path.suffix in (".py", ".pyi", ".md")
    and path.name != "failures.md"
    and path != Path(__file__)
) + sorted(ROOT.glob("*.md"))

CITATION = re.compile(r"\b[Ff]ailures? (F\d+(?:(?:, | and |, and )F\d+)*)")


def prose_of(path: Path) -> str:
    """Return the text in one line, without comment signs."""
    return re.sub(r"\s*\n[ \t]*#?[ \t]*", " ", path.read_text(encoding="utf-8"))


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_each_code_is_described_once() -> None:
    codes = re.findall(r"^### (F\d+) ", CATALOGUE, re.MULTILINE)
    assert sorted(set(codes)) == sorted(codes)
    assert set(codes) == {f"F{number}" for number in range(1, len(codes) + 1)}


def test_citations_have_one_spelling_and_exist_in_the_catalog() -> None:
    cited = 0
    for path in WRITTEN:
        if not re.search(r"F\d", path.read_text(encoding="utf-8")):
            continue
        text = prose_of(path)
        for match in CITATION.finditer(text):
            codes = re.findall(r"F\d+", match[1])
            assert set(codes) <= set(ENTRIES), f"{path}: {match[0]}: not in core/failures.md"
            cited += len(codes)
        rest = re.findall(r".{0,30}\bF\d{1,2}\b.{0,10}", CITATION.sub("", text))
        assert not rest, f"{path}: {rest[0]!r}: write 'failure F5' or 'failures F1, F2'"
    assert cited > 80


def test_codes_in_names_of_tests_exist_in_the_catalog() -> None:
    named = 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if not re.search(r"def test_\w*f\d", path.read_text(encoding="utf-8")):
            continue
        for test in functions_of(str(path.relative_to(ROOT))):
            codes = re.findall(r"(?<=_)f(\d+)(?=_|$)", test) if test.startswith("test_") else []
            if codes:
                assert test.startswith("test_f"), f"{path}::{test}: the code comes first"
                assert {f"F{code}" for code in codes} <= set(ENTRIES), f"{path}::{test}"
                named += 1
    assert named > 100


@pytest.mark.parametrize("code", ENTRIES)
def test_an_entry_names_a_defence_and_a_test_that_exist(code: str) -> None:
    entry = ENTRIES[code]
    defence, tests = entry.split("* Defence:")[1].split("* Test:")
    modules = re.findall(r"`([a-z_/0-9]+\.py)`", defence)
    assert modules
    for module in modules:
        assert (ROOT / module).is_file(), module
        text = prose_of(ROOT / module)
        cited = {each for match in CITATION.finditer(text) for each in match[1].split()}
        assert code in {each.strip(",") for each in cited}, f"{module} does not cite failure {code}"
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert any(f"_{code.lower()}_" in test for _, test in named), "no test has the code in its name"
    for path, test in named:
        assert test in functions_of(path), f"{path}::{test}"
