"""The command line as a whole: help, usage, and stores that are none."""

from __future__ import annotations

import click
import pytest

from opendata_buffer.cli.commands import cli
from opendata_buffer.cli.repairs import rebuild
from tests.unit.cli.shell import fails, ok, run


def test_help_lists_every_command() -> None:
    out = ok("--help").stdout
    for command in ("manifest", "batch", "produce", "consume", "status", "gc", "fsck"):
        assert command in out


COMMANDS = [
    ("manifest", "dump"),
    ("batch", "dump"),
    ("produce",),
    ("consume",),
    ("status",),
    ("gc",),
    ("fsck",),
    ("skip",),
    ("quarantine", "list"),
    ("quarantine", "restore"),
    ("manifest", "rebuild"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_and_the_store_options(command: tuple[str, ...]) -> None:
    out = ok(*command, "--help").stdout
    options = ["--endpoint-url", "--region", "--profile"]
    if command[-1] != "dump":
        options += ["--data-path-prefix", "--manifest-path"]
    assert [option for option in options if option not in out] == []


def every(group: click.Group, *words: str) -> list[tuple[str, click.Command]]:
    """All commands below, with the words that name them."""
    found: list[tuple[str, click.Command]] = []
    for name, command in group.commands.items():
        found.append((" ".join([*words, name]), command))
        if isinstance(command, click.Group):
            found += every(command, *words, name)
    return found


def test_every_command_and_every_option_says_what_it_is() -> None:
    commands = every(cli)
    assert ("manifest rebuild", rebuild) in commands
    for words, command in commands:
        assert command.help, words
        for each in command.params:
            if isinstance(each, click.Option):
                assert each.help, f"{words} {each.opts[0]}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "a", "b"),
        ("nonsense",),
        ("produce", "memory://x", "--compression", "lz4"),
        ("produce", "memory://x", "--flush-interval-ms", "0"),
        ("consume", "memory://x", "--max-batches", "-1"),
        ("consume", "memory://x", "--last-acked-sequence", "x"),
        ("batch", "dump", "x", "--limit", "-1"),
    ],
)
def test_usage_errors_exit_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


def test_version() -> None:
    assert "opendata-buffer" in ok("--version").stdout


@pytest.mark.parametrize("command", ["produce", "consume", "status", "gc", "fsck"])
@pytest.mark.parametrize(
    ("store_url", "says"),
    [
        ("", "store is ''"),
        ("s4://bucket", "unknown scheme"),
        ("s3://key:secret@bucket", "carries credentials"),
        ("s3://", "names no bucket"),
    ],
)
def test_a_wrong_store_is_one_line(command: str, store_url: str, says: str) -> None:
    line = fails(command, store_url)
    assert says in line
    assert "secret" not in line


@pytest.mark.parametrize("prefix", ["", "/a", "a/../b"])
def test_a_wrong_prefix_is_one_line(url: str, prefix: str) -> None:
    assert "error: --data-path-prefix is " in fails("status", url, "--data-path-prefix", prefix)
