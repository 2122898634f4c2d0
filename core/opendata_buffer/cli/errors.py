"""How the command line fails: one line on stderr, a documented exit code, no traceback.

==== ===================================================================
0    done
1    an error, told in one line
2    wrong usage
3    a probe found that too much waits: ``status --max-lag``, ``--max-backlog``
130  interrupted (Ctrl-C)
141  the reader of stdout went away (as a shell reports SIGPIPE); silent
143  terminated (SIGTERM)
==== ===================================================================

What a signal ends, it ends within five seconds: see :mod:`opendata_buffer.cli.ending`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from io import TextIOWrapper
from typing import IO, Any, NoReturn

import click

from opendata_buffer.cli.ending import INTERRUPTED, end_on_signals, ignore_signals, signalled
from opendata_buffer.cli.options import spelled
from opendata_buffer.errors import OpenDataBufferError

__all__ = ["Application", "Exceeded", "Failure", "main_of"]

READER_GONE = 141

log = logging.getLogger("opendata_buffer.cli.commands")


def one_line(text: object) -> str:
    """The text without line breaks and secrets: names and messages of others may have some."""
    return redacted(re.sub(r"\s*[\r\n\v\f\x85\u2028\u2029]\s*", " ", str(text)).strip())


def redacted(text: str) -> str:
    """The text with user information of all URLs, and queries of web addresses, starred out."""
    text = re.sub(r"(?<=://)[^\s/@'\"]+@", "***@", text)
    return re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1?***", text)


class Failure(click.ClickException):
    """An error as the user sees it; exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it on stderr."""
        click.echo(f"error: {one_line(self.message)}", err=True)


class Exceeded(Failure):
    """What a probe is there to report; its own exit code, for 1 means that nobody knows."""

    exit_code = 3


class Application(click.Group):
    """A group of commands whose errors are all shown as :class:`Failure`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; every way it can end badly becomes an exit code."""
        _log_to_stderr(ctx.params.get("verbose", 0))
        if sys.stdout is None:  # not written to is not the same as written out
            raise Failure("standard output is closed: give the command one, such as >/dev/null")
        if isinstance(sys.stdout, TextIOWrapper):
            # Names that an operating system gives need not be text: tables show them escaped.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            result = super().invoke(ctx)
            # Here, where it can still be reported: at exit Python would print a traceback.
            sys.stdout.flush()
            return result
        except click.Abort:
            if (code := signalled()) is not None:
                ctx.exit(code)  # Ctrl-C at a question is not its answer "no".
            raise
        except (click.exceptions.Exit, click.ClickException):
            raise
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            _forget_stdout()
            ctx.exit(READER_GONE)
        except OpenDataBufferError as error:
            log.debug("failed", exc_info=True)
            raise Failure(spelled(ctx, str(error))) from error
        except OSError as error:
            log.debug("failed", exc_info=True)
            _give_up_stdout()
            where = "standard input or output" if error.filename is None else error.filename
            raise Failure(f"{where}: {error.strerror or error}") from error
        except MemoryError as error:
            raise Failure("out of memory: lower --max-batch-bytes") from error
        except Exception as error:
            log.debug("failed", exc_info=True)
            if (code := signalled()) is not None:
                ctx.exit(code)  # A class that is being made tells Ctrl-C as an error of its own.
            raise Failure(
                f"internal error, {type(error).__name__}: {error}. This is a bug; run with -vv "
                "for details"
            ) from error


def main_of(cli: click.Group) -> Callable[[], NoReturn]:
    """The function that a console script calls."""

    def main() -> NoReturn:
        """Run the command line and exit."""
        end_on_signals()
        threading.excepthook = _log_thread_failure
        try:
            cli.main(prog_name="opendata-buffer")
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)
        except OSError as error:  # Help and version are written before a command is invoked.
            _give_up_stdout()
            Failure(f"standard input or output: {error.strerror or error}").show()
            sys.exit(1)
        finally:
            ignore_signals()
        sys.exit(0)

    return main


def _give_up_stdout() -> None:
    """Write what can be written. What cannot would fail again at exit, with a code of its own."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        _forget_stdout()


def _forget_stdout() -> None:
    """Let the interpreter's last flush go nowhere."""
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.close(sink)
    except (OSError, ValueError):
        pass


def _log_thread_failure(failure: threading.ExceptHookArgs) -> None:
    name = failure.thread.name if failure.thread else "a thread"
    log.error("%s failed: %s", name, failure.exc_value)
    log.debug(
        "failed",
        exc_info=failure.exc_value and (failure.exc_type, failure.exc_value, failure.exc_traceback),
    )


class _StderrHandler(logging.Handler):
    verbose = False

    def shows(self, record: logging.LogRecord) -> bool:
        # The command itself tells of a batch that failed, in its one line.
        return self.verbose or record.name != "opendata_buffer.producer.sender"

    def emit(self, record: logging.LogRecord) -> None:
        try:
            click.echo(self.format(record), err=True)
        except Exception:
            self.handleError(record)


class _OneLine(logging.Formatter):
    """``warning: message``; a traceback only in a debug record, which -vv asks for."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{record.levelname.lower()}: {one_line(record.getMessage())}"
        if record.exc_info and record.exc_info[1] is not None:
            if record.levelno <= logging.DEBUG:
                return f"{text}\n{redacted(self.formatException(record.exc_info))}"
            text += f": {one_line(record.exc_info[1])}"
        return text


_handler = _StderrHandler()
_handler.setFormatter(_OneLine())
_handler.addFilter(_handler.shows)


def _log_to_stderr(verbose: int) -> None:
    root = logging.getLogger()
    if _handler not in root.handlers:
        root.addHandler(_handler)
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.getLogger("opendata_buffer").setLevel(level)
    _handler.verbose = bool(verbose)
