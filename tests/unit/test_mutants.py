"""The list of mutants that no test needs to detect."""

from __future__ import annotations

import tomllib

import pytest

from tools.mutants import EXPLAINED, MODULES, ROOT, Mutant, explained

pytestmark = pytest.mark.checkout


def test_every_explained_mutant_is_in_a_tested_module_and_has_one_entry_with_a_reason() -> None:
    listed = tomllib.loads(EXPLAINED.read_text())["explained"]
    assert len(explained()) == len(listed)
    prefixes = tuple(module.replace("/", ".") + "." for module in MODULES)
    for mutant, reason in explained().items():
        assert mutant.function.startswith(prefixes)
        assert reason.endswith(".")


def test_every_listed_module_and_test_exists() -> None:
    for module, tests in MODULES.items():
        assert (ROOT / "core" / "opendata_buffer" / f"{module}.py").is_file()
        assert all((ROOT / test).exists() for test in tests)


def test_a_survivor_is_printed_in_the_format_of_the_list() -> None:
    mutant = Mutant("formats.zstd.compress", 'raise Error("a \\"b\\" é")', "")
    (entry,) = tomllib.loads(mutant.toml())["explained"]
    assert Mutant(entry["function"], entry["before"], entry["after"]) == mutant


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ('raise Error("it is empty")', 'raise Error("XXit is emptyXX")', True),
        ('raise Error("it is empty")', "raise Error(None)", False),
        ('state["tail"] = None', 'state["TAIL"] = None', False),
        ('use("a b", "c")', 'use("a b", "C")', False),
        ('log.info("read %d entries", count)', 'log.info("read %d entries", None)', True),
        ('log.warning("read %d entries", count)', 'log.warning("read %d entries", None)', False),
    ],
)
def test_only_changes_of_the_words_of_a_message_are_ignored(
    before: str, after: str, text: bool
) -> None:
    assert Mutant("messages.f", before, after).changes_only_text is text
