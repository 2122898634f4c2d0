"""How far a command is."""

from __future__ import annotations

import pytest

from opendata_buffer.cli.progress import counting, track


def test_progress_is_silent_when_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with track("checking") as bar:
        bar(1, 2)
    with counting("reading") as counter:
        counter(10, 2)
    assert capsys.readouterr() == ("", "")


def test_progress_shows_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with counting("reading") as counter:
        counter(1024, 1000)
        counter(1024, 234)
    with track("checking") as bar:
        bar(1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert "reading" in err
    assert "1,234 records" in err
    assert "checking" in err
    assert "1/2" in err
