"""A question before something that cannot be undone."""

from __future__ import annotations

import click
import pytest

from opendata_buffer.cli import asking
from opendata_buffer.cli.asking import confirm
from opendata_buffer.cli.errors import Failure


def test_yes_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(click, "confirm", lambda *args, **options: pytest.fail("asked"))
    confirm("It is done", True)


def test_where_nobody_can_answer_it_takes_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "somebody_is_there", lambda: False)
    with pytest.raises(Failure, match=r"It is done. Nobody is there to be asked: give --yes"):
        confirm("It is done", False)


def test_a_closed_standard_input_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert not asking.somebody_is_there()
