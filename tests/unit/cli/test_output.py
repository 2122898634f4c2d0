"""What a person sees: numbers, tables and questions."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from opendata_buffer.cli import text
from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.terminal import name_value_table, open_console
from opendata_buffer.cli.text import confirm, plural


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "batch", "1 batch"),
        (0, "batch", "0 batches"),
        (2_000, "batch", "2,000 batches"),
        (2, "copy", "2 copies"),
        (2, "day", "2 days"),
        (3, "record", "3 records"),
    ],
)
def test_a_noun_has_the_form_of_its_number(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


def test_a_table_shows_values_as_they_are_and_not_as_markup() -> None:
    out = io.StringIO()
    Console(file=out, width=60).print(
        name_value_table("[b]queue[/b]", [("prefix", "tenant[red]#1")])
    )
    assert "tenant[red]#1" in out.getvalue()
    assert "[b]queue[/b]" in out.getvalue()


def test_a_pipe_cuts_no_columns_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert open_console().width == 160
    monkeypatch.setenv("COLUMNS", "70")
    assert open_console().width == 70


# ---- questions


def test_without_a_terminal_it_takes_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "is_interactive", lambda: False)
    with pytest.raises(Failure, match=r"It is done. .* no terminal to ask on: give --yes"):
        confirm("It is done", False)
