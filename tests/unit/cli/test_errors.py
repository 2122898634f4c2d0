"""How commands fail: exit codes and what stderr shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner, Result

from opendata_buffer.cli.errors import Application, Failure, one_line
from opendata_buffer.errors import Conflict, InvalidInput


class Boom(Exception):
    """Raised by the command under test."""


def run(error: BaseException | None, *arguments: str) -> Result:
    @click.group(cls=Application)
    @click.option("-v", "--verbose", count=True)
    def app(verbose: int) -> None:
        pass

    @app.command()
    def work() -> None:
        logging.getLogger("opendata_buffer.any").warning("a\nwarning")
        logging.getLogger("opendata_buffer.any").info("information")
        if error is not None:
            raise error
        click.echo("done")

    return CliRunner().invoke(app, [*arguments, "work"])


@pytest.fixture(autouse=True)
def _quiet_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), logging.getLogger("opendata_buffer").level
    yield
    root.handlers[:] = handlers
    logging.getLogger("opendata_buffer").setLevel(level)


def test_success_exits_0() -> None:
    result = run(None)
    assert (result.exit_code, result.stdout) == (0, "done\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InvalidInput("store is '': fix it"), "error: store is '': fix it"),
        (Failure("said by a command"), "error: said by a command"),
        (OSError(28, "No space left"), "error: standard input or output: No space left"),
        (OSError(28, "No space left", "/d/f"), "error: /d/f: No space left"),
        (MemoryError(), "error: out of memory: lower --max-batch-bytes"),
        (InvalidInput("two\nlines\r\n and \u2028 more"), "error: two lines and more"),
    ],
)
def test_an_error_is_one_line_and_exit_1(error: Exception, line: str) -> None:
    result = run(error)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines() == ["warning: a warning", line]


def test_the_message_of_a_structured_error_is_shown_whole() -> None:
    error = Conflict("ingest/manifest", 3, 1.5)
    assert run(error).stderr.splitlines()[-1] == f"error: {error}"


def test_a_bug_is_one_line_too_and_says_what_to_do() -> None:
    result = run(Boom("unforeseen"))
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: internal error, Boom: unforeseen. This is a bug")


def test_twice_verbose_shows_the_traceback_that_a_bug_report_needs() -> None:
    result = run(Boom("unforeseen"), "-vv")
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: internal error")


def test_verbose_logs_information() -> None:
    assert "information" not in run(None).stderr
    assert "info: information" in run(None, "-v").stderr


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_an_interrupt_or_a_gone_reader_is_silent(error: BaseException, code: int) -> None:
    result = run(error)
    assert result.exit_code == code
    assert result.stderr == "warning: a warning\n"


def test_ctrl_c_at_a_question_is_an_interrupt_and_its_answer_no_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run(click.Abort()).exit_code == 1
    monkeypatch.setattr("opendata_buffer.cli.errors.signalled", lambda: 130)
    assert run(click.Abort()).exit_code == 130


def test_usage_errors_exit_2() -> None:
    result = run(None, "--unknown")
    assert result.exit_code == 2
    assert "No such option" in result.stderr


def test_a_logged_exception_is_one_line_without_traceback() -> None:
    @click.group(cls=Application)
    def app() -> None:
        pass

    @app.command()
    def work() -> None:
        try:
            raise Boom("inner\ncause")
        except Boom:
            logging.getLogger("opendata_buffer.any").exception("closing failed")

    result = CliRunner().invoke(app, ["work"])
    assert result.stderr == "error: closing failed: inner cause\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("cannot reach http://key:secret@host:9000/b", "cannot reach http://***@host:9000/b"),
        ("'https://host/b?token=secret&x=1': down", "'https://host/b?***': down"),
        ("s3://bucket/what?.batch is no URL with a query", None),
    ],
)
def test_secrets_of_urls_are_not_shown(text: str, line: str | None) -> None:
    assert one_line(text) == (text if line is None else line)


def test_secrets_of_urls_are_not_shown_in_a_traceback_either() -> None:
    result = run(Boom("http://key:secret@host/"), "-vv")
    assert "Boom: http://***@host/" in result.stderr
    assert "secret" not in result.stderr


@pytest.mark.parametrize(
    ("text", "line"),
    [("a", "a"), ("a\n  b", "a b"), ("\n a \n", "a"), ("a  b", "a  b"), ("a\x85b", "a b")],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line
