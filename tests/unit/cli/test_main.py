"""The command line as a whole: help, usage, exit codes, errors, and output."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import click
import pytest
from click.testing import Result

from opendata_buffer.cli import errors
from opendata_buffer.cli.errors import Failure, FailureGroup
from opendata_buffer.cli.main import COMMANDS
from opendata_buffer.cli.options import EXAMPLES, MOVED, Command, verbose
from opendata_buffer.cli.terminal import name_value_table, show
from opendata_buffer.config import StoreOptions
from opendata_buffer.errors import PermanentStorageError
from tests.unit.cli.shell import commands, fails, misused, ok, run, runner


def test_every_command_and_every_option_has_a_help_text() -> None:
    for words, command in commands():
        assert command.help, words
        for each in command.params:
            if isinstance(each, click.Option):
                assert each.help, f"{words} {each.opts[0]}"


def test_there_are_at_most_fifteen_commands_and_each_help_starts_with_an_example() -> None:
    assert len(COMMANDS) <= 15
    leaves = [(words, each) for words, each in commands() if not isinstance(each, click.Group)]
    for words, command in leaves:
        shown = ok(*words.split(), "--help").stdout
        example = shown.splitlines()[0].partition(f"opendata-buffer {words} s3://bucket/orders")
        assert shown.startswith("Example: ")
        assert example[1], words
        known = {option for each in command.params for option in each.opts}
        given = example[2].partition(" -- ")[0].split()
        assert {each for each in given if each.startswith("--")} <= known
        assert shown.count("--endpoint-url") == shown.count("Storage: --endpoint-url") == 1
    assert ok("--help").stdout.startswith(f"Example: {EXAMPLES['cli']}\n")
    assert ok("--help").stdout.count("--endpoint-url") == 1


@pytest.mark.parametrize("name", MOVED)
def test_the_error_about_a_former_name_names_its_replacement(name: str) -> None:
    command, _, option = name.partition(" ")
    result = run(command, "memory://x", *option.split())
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: '{name}' is no longer there: {MOVED[name]}"


def test_help_does_not_load_the_modules_of_commands() -> None:
    code = (
        "import sys\nfrom opendata_buffer.cli.main import COMMANDS, cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        "assert not [each for each in sys.modules if each in ('pyarrow', 'rich')], sys.modules\n"
        "assert 'opendata_buffer.cli.consume' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "a", "b"),
        ("nonsense",),
        ("produce", "memory://x", "--compression", "lz4"),
        ("produce", "memory://x", "--flush-interval-ms", "0"),
        ("consume", "memory://x", "--max-batches", "-1"),
        ("consume", "memory://x", "--max-batches", "x"),
        ("dump", "x", "--limit", "-1"),
        ("consume", "memory://x", "--ack", "--from", "1"),
        ("consume", "memory://x", "--yes"),
        ("consume", "memory://x", "--json", "--framing", "ndjson"),
        ("produce", "memory://x", "--json", "--framing", "ndjson"),
        ("produce", "memory://x", "--json", "--metadata", "m"),
    ],
)
def test_usage_errors_exit_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("consume memory://x --from yesterday", "invalid position 'yesterday'"),
        ("trim memory://x --to tomorrow", "invalid position 'tomorrow'"),
        ("readers enable memory://x --retention 7days", "invalid duration '7days'"),
        ("readers enable memory://x --retention 0s", "a retention of 0 keeps nothing"),
        ("readers reset memory://x r --by-duration long", "invalid duration 'long'"),
        ("readers delete memory://x a/b", "reader is 'a/b'"),
        ("readers describe memory://x a/b", "reader is 'a/b'"),
        ("topic create memory://x --partitions 1001", "1<=x<=1000"),
        ("dump memory://x ../secret", "key is '../secret'"),
        ("readers describe", "Missing argument 'STORE'"),
        ("status memory://x --data-path-prefix a//b", "--data-path-prefix"),
        ("status s3://b --endpoint-url 127.0.0.1:9000", "use http://127.0.0.1:9000 or https"),
        ("status s3://b,ucket", "only letters, digits, dots, hyphens and underscores"),
        ("consume s3://bucket --reader a/b", "--reader is 'a/b'"),
        ("broker memory://x --listen nonsense", "'nonsense' is not HOST:PORT"),
        ("statsu memory://x", "no such command 'statsu'. Did you mean 'status'?"),
        ("list memory://x", "no such command 'list'. Did you mean 'readers list'?"),
        ("readers lst memory://x", "no such command 'lst'. Did you mean 'list'?"),
        ("xyzzy", "no such command 'xyzzy'. Known are produce, consume, broker, "),
        ("--json status memory://x", "--json. Put the options of a command after its name."),
        ("--endpoint-ulr http://x status q", "after its name. Did you mean"),
    ],
)
def test_the_error_about_wrong_usage_names_the_fix(words: str, says: str) -> None:
    assert says in misused(*words.split())


def test_a_url_with_credentials_in_a_wrong_option_is_not_printed() -> None:
    line = misused("status", "s3://b", "--endpoint-url", "key:secret@host")
    assert "secret" not in line


ARN = "arn:aws:iam::123456789012:role/buffer"


@pytest.mark.parametrize(
    "words",
    [
        "--endpoint-url http://before readers list s3://bucket",
        "readers --endpoint-url http://before list s3://bucket",
        "readers list s3://bucket --endpoint-url http://before",
        "--endpoint-url http://other readers list s3://bucket --endpoint-url http://before",
        "--endpoint-url http://other readers --endpoint-url http://before list s3://bucket",
    ],
)
def test_a_storage_option_may_stand_before_or_after_the_command(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[StoreOptions] = []

    def store(url: str, store_options: StoreOptions) -> None:
        opened.append(store_options)
        raise PermanentStorageError("enough")

    monkeypatch.setattr("opendata_buffer.cli.target.open_store", store)
    monkeypatch.setenv("OPENDATA_BUFFER_ROLE_ARN", ARN)
    given = ("--timeout-ms", "77") if words.startswith("--") else ()
    assert "enough" in fails(*given, *words.split())
    assert opened[0].endpoint_url == "http://before"
    assert opened[0].role_arn == ARN
    assert opened[0].timeout_ms == (77 if given else 5_000)


def test_an_option_before_the_command_counts_more_than_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENDATA_BUFFER_EXTERNAL_ID", "environment")
    assert "--external-id is 'given'" in misused("--external-id", "given", "status", "s3://b")
    assert "--external-id is 'environment'" in misused("status", "s3://b")


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
def test_an_invalid_store_is_wrong_usage(command: str, store_url: str, says: str) -> None:
    line = misused(command, store_url)
    assert says in line
    assert "secret" not in line


# ---- errors


WARNING = "warning: closing failed: inner cause\n"


class Boom(Exception):
    """Raised by the command under test."""


def run_app(error: BaseException | None, *arguments: str, after: str = "") -> Result:
    @click.group(cls=FailureGroup, params=[verbose()])
    def app() -> None:
        pass

    @app.command(cls=Command)
    def work(**storage: object) -> None:
        cause = Boom("inner\ncause")
        logging.getLogger("opendata_buffer.any").warning("closing\nfailed", exc_info=cause)
        logging.getLogger("opendata_buffer.any").info("information")
        if error is not None:
            raise error
        click.echo("done")

    return runner().invoke(app, [*arguments, "work", *after.split()])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermanentStorageError("no access: fix it"), "error: no access: fix it"),
        (Failure("said by a command"), "error: said by a command"),
        (OSError(28, "No space left"), "error: standard input or output: No space left"),
        (OSError(28, "No space left", "/d/f"), "error: /d/f: No space left"),
        (MemoryError(), "error: out of memory: give it more, a batch has up to 256 MiB"),
        (PermanentStorageError("two\nlines\r\n and \u2028 more"), "error: two lines and more"),
        (PermanentStorageError("http://key:secret@host/b"), "error: http://***@host/b"),
        (Boom("bug"), "error: internal error, Boom: bug. This is a bug; run with -vv for details"),
    ],
)
def test_an_error_is_one_line_and_exit_1(error: Exception, line: str) -> None:
    result = run_app(error)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"{WARNING}{line}\n"


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 141)])
def test_an_interrupt_or_a_closed_pipe_prints_no_error(error: BaseException, code: int) -> None:
    result = run_app(error)
    assert result.exit_code == code
    assert result.stderr == WARNING


def test_ctrl_c_at_a_question_is_an_interrupt_and_the_answer_no_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_app(click.Abort()).exit_code == 1
    monkeypatch.setattr("opendata_buffer.cli.errors._received", [130])
    assert run_app(click.Abort()).exit_code == 130


@pytest.mark.parametrize("words", [("-vv", ""), ("", "-vv")])
def test_twice_verbose_shows_the_traceback_without_secrets(words: tuple[str, str]) -> None:
    before, after = words
    result = run_app(Boom("http://key:secret@host/"), *before.split(), after=after)
    assert "Traceback (most recent call last)" in result.stderr
    assert "Boom: http://***@host/" in result.stderr
    assert "secret" not in result.stderr


# ---- output


@pytest.mark.parametrize("columns", ["", "70"])
def test_output_to_a_pipe_is_neither_wrapped_nor_padded(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    title, value = "title " * 40, "word " * 40
    show(name_value_table(title, [("long", value), ("short", "x")]))
    assert capsys.readouterr().out == f"{title.strip()}\n long   {value.strip()}\n short  x\n"


# ---- the end of a process


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleQueue[int]]:
    """Use this process in place of a command's, and return the exit codes that ended it."""
    ended = SimpleQueue[int]()
    monkeypatch.setattr(os, "_exit", ended.put)
    monkeypatch.setattr(sys, "argv", ["opendata-buffer", "work"])
    monkeypatch.setattr(errors, "ORDERLY_S", 0.0)
    monkeypatch.setattr(errors, "_received", [])
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield ended
    writer = signal.set_wakeup_fd(-1)
    os.write(writer, bytes([signal.SIGTERM]))  # ends the thread that waits for a code
    for each in threading.enumerate():
        if each.name == "opendata-buffer-signals":
            each.join(60)
    os.close(writer)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_its_code_even_if_it_hangs(
    number: signal.Signals, code: int, process: SimpleQueue[int], capfd: pytest.CaptureFixture[str]
) -> None:
    given_up: list[int] = []

    @click.command()
    def work() -> None:
        with errors.print_summary(lambda: "so far: 3"):
            try:
                signal.raise_signal(number)
            finally:
                given_up.append(process.get(timeout=60))

    with pytest.raises(SystemExit) as ended:
        errors.run_group(FailureGroup(commands={"work": work}))
    assert (ended.value.code, given_up) == (code, [code])
    assert capfd.readouterr().err == "so far: 3\n"


def test_a_finished_command_keeps_its_code_and_errors_of_threads_are_one_line(
    process: SimpleQueue[int], caplog: pytest.LogCaptureFixture
) -> None:
    @click.command()
    def work() -> None:
        thread = threading.Thread(target=lambda: 1 // 0, name="a-thread")
        thread.start()
        thread.join()

    with pytest.raises(SystemExit) as ended:
        errors.run_group(FailureGroup(commands={"work": work}))
    signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 0
    assert process.get(timeout=60) == errors.INTERRUPTED  # where the shutdown of Python hangs
    assert caplog.messages == ["a-thread failed"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, ""),
        (OSError(28, "No space left"), 1, "error: standard input or output: No space left\n"),
    ],
)
def test_an_error_while_click_writes_ends_the_command_too(
    error: BaseException, code: int, line: str, process: object, capsys: pytest.CaptureFixture[str]
) -> None:
    class Group(FailureGroup):
        def main(self, *_: Any, **settings: Any) -> None:  # type: ignore[override]
            raise error

    with pytest.raises(SystemExit) as ended:
        errors.run_group(Group())
    assert (ended.value.code, capsys.readouterr().err) == (code, line)


def test_output_that_cannot_be_written_at_the_end_is_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        stdout.write("lost")
        errors._flush_stdout()  # or closing it would raise
        assert os.fstat(stdout.fileno()).st_rdev == os.stat(os.devnull).st_rdev
    errors._flush_stdout()


def test_a_command_does_not_start_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FailureGroup(callback=lambda: None, invoke_without_command=True)
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(Failure, match="standard output is closed"):
        group.main([], standalone_mode=False)
