"""Sizes, ages and tables as a person reads them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from opendata_buffer.cli.terminal import format_age, format_bytes, table


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (64 * 1024 * 1024, "64.0 MiB"),
        (5 * 1024**4, "5.0 TiB"),
        (5 * 1024**5, "5120.0 TiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-3.0, "0.0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.9, "59 s"),
        (93.2, "1 min 33 s"),
        (3_600, "1 h 0 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_age(seconds: float | None, text: str) -> None:
    assert format_age(seconds) == text


def test_a_table_shows_values_as_they_are_and_not_as_markup() -> None:
    out = io.StringIO()
    Console(file=out, width=60).print(table("[b]queue[/b]", [("prefix", "tenant[red]#1")]))
    assert "tenant[red]#1" in out.getvalue()
    assert "[b]queue[/b]" in out.getvalue()
