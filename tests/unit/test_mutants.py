"""The list of mutants that no test has to notice."""

from __future__ import annotations

import tomllib

import pytest

from tools.mutants import EXPLAINED, MODULES, ROOT, Mutant, explained


def test_every_explained_mutant_is_of_a_tested_module_is_listed_once_and_has_a_reason() -> None:
    listed = tomllib.loads(EXPLAINED.read_text())["explained"]
    assert len(explained()) == len(listed)
    prefixes = tuple(module.replace("/", ".") + "." for module in MODULES)
    for mutant, reason in explained().items():
        assert mutant.function.startswith(prefixes)
        assert reason.endswith(".")


def test_every_module_and_every_test_of_it_is_there() -> None:
    for module, tests in MODULES.items():
        assert (ROOT / "core" / "opendata_buffer" / f"{module}.py").is_file()
        assert all((ROOT / test).exists() for test in tests)


def test_a_survivor_is_printed_as_the_list_has_it() -> None:
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
def test_only_the_words_of_a_message_are_not_tested(before: str, after: str, text: bool) -> None:
    assert Mutant("messages.f", before, after).changes_only_text is text
