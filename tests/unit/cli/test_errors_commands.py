"""Commands that errors, notes and logs print: they are there, and need no word to be filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from opendata_buffer.cli.main import cli

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[3]
HOLE = "\0"
COMMAND = re.compile(r"'opendata-buffer ([^']*)'")
PLACEHOLDER = re.compile(r"\b(STORE|NAME|SEQUENCE|TIME|DURATION|N|ID)\b")


def sources() -> list[Path]:
    folders = ("core/opendata_buffer", "buffer_source", "buffer_sink")
    return sorted(each for folder in folders for each in (ROOT / folder).rglob("*.py"))


def text_of(node: ast.AST) -> str | None:
    """A literal of several lines as one text, with a hole for each value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each) or HOLE for each in node.values)
    return None


def commands(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        yield from COMMAND.findall(text_of(node) or "")


def resolved(words: list[str]) -> click.Command:
    """The command that the first words name."""
    found: click.Command = cli
    while isinstance(found, click.Group):
        assert words, "the command is not whole"
        name = words.pop(0)
        command = found.get_command(click.Context(found), name)
        assert command is not None, f"there is no command {name!r}"
        found = command
    return found


@pytest.mark.parametrize("source", sources(), ids=lambda each: str(each.relative_to(ROOT)))
def test_a_printed_command_exists_and_has_no_placeholder(source: Path) -> None:
    for text in commands(source):
        if not text[0].isalpha():  # a pattern that finds commands
            continue
        assert not PLACEHOLDER.search(text), text
        words = text.split()
        known = {option for each in resolved(words).params for option in each.opts}
        assert {each for each in words if each.startswith("--")} <= known, text


def test_commands_are_found() -> None:
    assert sum(1 for source in sources() for _ in commands(source)) > 30
