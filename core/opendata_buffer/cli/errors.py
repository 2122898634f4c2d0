"""The end of a command: a documented exit code, one line on stderr, and no traceback.

SIGINT and SIGTERM raise an exception in the main thread, so that a command can acknowledge the
records it wrote and flush the records it read. If a store does not answer, that could take minutes.
So a second thread waits for :data:`ORDERLY_S`, prints the command's summary, and ends the process.
Python's C handler wakes this thread through a pipe (``set_wakeup_fd``), because a main thread that
hangs in a lock or in C code never runs a Python handler.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import IO, Any, NoReturn

import click

from opendata_buffer.config import redacted
from opendata_buffer.errors import OpenDataBufferError
from opendata_buffer.hints import Hint, Message, Surface
from opendata_buffer.runtime import Runtime, SystemRuntime

READER_GONE = 141
INTERRUPTED = 130
TERMINATED = 143
ORDERLY_S = 4.0  # Seconds for an orderly end; the process may take five in total.

log = logging.getLogger("opendata_buffer.cli")

_EXIT_CODES: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
_summaries: list[Callable[[], str]] = []
_received: list[int] = []  # Exit codes of the signals so far.


def shown(value: object) -> object:
    """Return a value as a command shows it: errors and hints in the words of the command line."""
    if isinstance(value, OpenDataBufferError | Hint | Message):
        return value.text(Surface.SHELL)
    return value


def one_line(text: object) -> str:
    """Return a text without line breaks and secrets, which other programs' texts may contain."""
    return redacted(re.sub(r"\s*[\r\n\v\f\x85\u2028\u2029]\s*", " ", str(text)).strip())


class Failure(click.ClickException):
    """An error as the user sees it; exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the error on stderr."""
        click.echo(f"error: {one_line(self.message)}", err=True)


class Exceeded(Failure):
    """A limit that a probe found exceeded. Exit code 1 means that the probe could not find out."""

    exit_code = 3


class FailureGroup(click.Group):
    """A group of commands that shows all their errors as :class:`Failure`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options before the command."""
        log_to_stderr(0)  # An option may ask for more.
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn every error into an exit code.

        Args:
            ctx: The context of the command.

        Returns:
            The result of the command.

        Raises:
            Failure: The command failed, or standard output is closed.
            click.exceptions.Exit: A signal ended the command, or its output has no reader any more.
        """
        if sys.stdout is None:  # Otherwise the output would be lost silently.
            raise Failure("standard output is closed: give the command one, such as >/dev/null")
        if isinstance(sys.stdout, TextIOWrapper):
            # File names may contain invalid text: tables show it escaped.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            result = super().invoke(ctx)
            # Python would print a traceback if this failed at exit.
            sys.stdout.flush()
            return result
        except click.Abort:
            if _received:
                ctx.exit(_received[0])  # click turns Ctrl-C at a question into "no".
            raise
        except (click.exceptions.Exit, click.ClickException):
            raise
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            _discard_stdout()
            ctx.exit(READER_GONE)
        except OSError as error:
            log.debug("failed", exc_info=True)
            _flush_stdout()
            where = "standard input or output" if error.filename is None else error.filename
            raise Failure(f"{where}: {error.strerror or error}") from error
        except MemoryError as error:
            raise Failure("out of memory: give it more, a batch has up to 256 MiB") from error
        except Exception as error:
            log.debug("failed", exc_info=True)
            if _received:
                ctx.exit(_received[0])  # A class body turns Ctrl-C into another error.
            raise Failure(
                f"internal error, {type(error).__name__}: {error}. This is a bug; run with -vv "
                "for details"
            ) from error


def run_group(group: click.Group) -> NoReturn:
    """Run the command line in this process and exit."""
    _handle_signals()
    threading.excepthook = _log_thread_failure
    try:
        sys.exit(group.main(prog_name="opendata-buffer"))  # main() itself exits.
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # click writes help and version before it invokes a command.
        _flush_stdout()
        Failure(f"standard input or output: {error.strerror or error}").show()
        sys.exit(1)
    finally:
        _ignore_signals()


def _flush_stdout() -> None:
    """Write the buffered output as far as possible, and discard the rest.

    The rest would fail again at exit.
    """
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _discard_stdout()


def _discard_stdout() -> None:
    """Send the interpreter's last flush to /dev/null."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
    except (OSError, ValueError):
        pass


def _log_thread_failure(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread else "a thread"
    log.error("%s failed", name, exc_info=failure.exc_value)


class _OneLine(logging.Formatter):
    """Formats ``warning: message``; adds a traceback only if everything is logged (-vv)."""

    def format(self, record: logging.LogRecord) -> str:
        message = str(record.msg)
        if isinstance(record.args, tuple):
            message = message % tuple(map(shown, record.args)) if record.args else message
        else:
            message = record.getMessage()
        text = f"{record.levelname.lower()}: {one_line(message)}"
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {one_line(shown(record.exc_info[1]))}"
            if log.isEnabledFor(logging.DEBUG):
                text += f"\n{redacted(self.formatException(record.exc_info))}"
        return text


_handler = logging.StreamHandler()
_handler.setFormatter(_OneLine())


def log_to_stderr(verbose: int) -> None:
    """Send log records to stderr.

    Args:
        verbose: 0 for warnings, 1 to add information, 2 for everything.
    """
    _handler.stream = sys.stderr
    root = logging.getLogger()
    if _handler not in root.handlers:
        root.addHandler(_handler)
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.getLogger("opendata_buffer").setLevel(level)
    # The command itself reports a batch that failed.
    delivery = logging.getLogger("opendata_buffer.producer.delivery")
    delivery.setLevel(logging.NOTSET if verbose else logging.CRITICAL)


@contextmanager
def print_summary(summary: Callable[[], str]) -> Iterator[None]:
    """Print a line on stderr when a signal ends the body, even if the body hangs.

    Args:
        summary: Returns the line. May be called from another thread than the body's.
    """
    _summaries.append(summary)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _print_summaries()
        raise
    finally:
        _summaries.clear()


class Interrupted(KeyboardInterrupt):
    """SIGINT as an exception.

    A subclass, because ``python -m`` ends with the signal when a plain ``KeyboardInterrupt`` leaves
    an ``exec()``, even if it is caught later. Every definition of a dataclass calls ``exec()``.
    """


def _handle_signals() -> None:
    """Handle SIGINT and SIGTERM until :func:`_ignore_signals`, in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # Background jobs ignore it.
        signal.signal(signal.SIGINT, _end)
    runtime = SystemRuntime()
    runtime.spawn(lambda: _end_after_signal(reader, runtime), "opendata-buffer-signals")


def _ignore_signals() -> None:
    """Keep the exit code of a command that has ended.

    An exit that takes longer than :data:`ORDERLY_S` after a signal is still cut short.
    """
    for number in _EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(_EXIT_CODES[number])
    if number == signal.SIGINT:
        raise Interrupted
    sys.exit(TERMINATED)


def _end_after_signal(reader: int, runtime: Runtime) -> None:
    code = None
    while code is None:
        (number,) = os.read(reader, 1)
        code = _EXIT_CODES.get(number)
    runtime.sleep(ORDERLY_S)
    _print_summaries()
    os._exit(code)


def _print_summaries() -> None:
    while _summaries:
        line = f"{_summaries.pop()()}\n"
        try:
            # Do not use sys.stderr: the main thread may hold its lock.
            os.write(2, line.encode(errors="replace"))
        except OSError:
            return
