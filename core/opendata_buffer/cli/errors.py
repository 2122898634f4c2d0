"""How the command line fails: one line on stderr, a documented exit code, no traceback.

==== ===================================================================
0    done
1    an error
2    wrong usage
3    a probe found a limit exceeded: ``status --max-lag``, ``--max-backlog``
130  interrupted (SIGINT)
141  the reader of stdout closed it (SIGPIPE in a shell); nothing is printed
143  terminated (SIGTERM)
==== ===================================================================
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from io import TextIOWrapper
from typing import IO, Any, NoReturn

import click

from opendata_buffer.cli.signals import INTERRUPTED, handle_signals, ignore_signals, signalled
from opendata_buffer.redaction import redacted

READER_GONE = 141

log = logging.getLogger("opendata_buffer.cli")


def one_line(text: object) -> str:
    """The text without line breaks and secrets, which names and messages of others may contain."""
    return redacted(re.sub(r"\s*[\r\n\v\f\x85\u2028\u2029]\s*", " ", str(text)).strip())


class Failure(click.ClickException):
    """An error as the user sees it; exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it on stderr."""
        click.echo(f"error: {one_line(self.message)}", err=True)


class Exceeded(Failure):
    """A probe found a limit exceeded. Exit code 1 means that the probe could not find out."""

    exit_code = 3


class FailureGroup(click.Group):
    """A group of commands whose errors are all shown as :class:`Failure`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options before the command."""
        log_to_stderr(0)  # An option may ask for more.
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn every error into an exit code."""
        if sys.stdout is None:  # the output would be lost without an error
            raise Failure("standard output is closed: give the command one, such as >/dev/null")
        if isinstance(sys.stdout, TextIOWrapper):
            # Names of files need not be valid text: tables show them escaped.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            result = super().invoke(ctx)
            # Python would print a traceback if this failed at exit.
            sys.stdout.flush()
            return result
        except click.Abort:
            if (code := signalled()) is not None:
                ctx.exit(code)  # click reports Ctrl-C at a question as the answer "no".
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
            if (code := signalled()) is not None:
                ctx.exit(code)  # A class body turns Ctrl-C into another error.
            raise Failure(
                f"internal error, {type(error).__name__}: {error}. This is a bug; run with -vv "
                "for details"
            ) from error


def run_group(group: click.Group) -> NoReturn:
    """Run the command line in this process and exit."""
    handle_signals()
    threading.excepthook = _log_thread_failure
    try:
        group.main(prog_name="opendata-buffer")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # click writes help and version before it invokes a command.
        _flush_stdout()
        Failure(f"standard input or output: {error.strerror or error}").show()
        sys.exit(1)
    finally:
        ignore_signals()
    sys.exit(0)


def _flush_stdout() -> None:
    """Write what can be written, and discard the rest: it would fail again at exit."""
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
    log.error("%s failed: %s", name, failure.exc_value)
    log.debug(
        "failed",
        exc_info=failure.exc_value and (failure.exc_type, failure.exc_value, failure.exc_traceback),
    )


class _OneLine(logging.Formatter):
    """``warning: message``; with a traceback only in debug records (-vv)."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{record.levelname.lower()}: {one_line(record.getMessage())}"
        if record.exc_info and record.exc_info[1] is not None:
            if record.levelno <= logging.DEBUG:
                return f"{text}\n{redacted(self.formatException(record.exc_info))}"
            text += f": {one_line(record.exc_info[1])}"
        return text


_handler = logging.StreamHandler()
_handler.setFormatter(_OneLine())


def log_to_stderr(verbose: int) -> None:
    """Send log records to stderr: warnings, with 1 information, with 2 everything."""
    _handler.stream = sys.stderr
    root = logging.getLogger()
    if _handler not in root.handlers:
        root.addHandler(_handler)
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG)
    logging.getLogger("opendata_buffer").setLevel(level)
    # The command reports a batch that failed in its own line.
    delivery = logging.getLogger("opendata_buffer.producer.delivery")
    delivery.setLevel(logging.NOTSET if verbose else logging.CRITICAL)
