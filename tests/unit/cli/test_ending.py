"""What a command says when a signal ends it. Signals themselves are in tests/process."""

from __future__ import annotations

import pytest

from opendata_buffer.cli.ending import last_words


@pytest.mark.parametrize("signal", [KeyboardInterrupt(), SystemExit(143)])
def test_a_command_that_is_ended_says_its_last_words_once(
    signal: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(signal)), last_words(lambda: "3 lines are durable"):
        raise signal
    assert capfd.readouterr().err == "3 lines are durable\n"


def test_a_command_that_ends_by_itself_says_none(capfd: pytest.CaptureFixture[str]) -> None:
    with last_words(lambda: "3 lines are durable"):
        pass
    with pytest.raises(ValueError, match="an error"), last_words(lambda: "3 lines are durable"):
        raise ValueError("an error")
    assert capfd.readouterr().err == ""
