"""End a command within five seconds after a signal, whatever the store does.

SIGINT and SIGTERM raise an exception in the main thread, so that a command acknowledges what it
wrote and flushes what it read. A store that does not answer could delay that for minutes: a second
thread waits for :data:`ORDERLY_S`, prints the command's summary, and ends the process. Python's C
handler wakes it through a pipe (``set_wakeup_fd``), because a main thread that hangs in a lock or
in C code never runs a handler of Python.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from opendata_buffer.runtime import Runtime, SystemRuntime

INTERRUPTED = 130
TERMINATED = 143
ORDERLY_S = 4.0
"""Seconds that an orderly end may take; the whole has five."""

_EXIT_CODES: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
_summaries: list[Callable[[], str]] = []
_received: list[int] = []


@contextmanager
def print_summary(summary: Callable[[], str]) -> Iterator[None]:
    """Print a line on stderr when a signal ends the body, also when the body hangs.

    Another thread than the body's may call ``summary``, which makes the line.
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
    """SIGINT.

    A subclass, because ``python -m`` ends by the signal when a plain ``KeyboardInterrupt`` leaves
    an ``exec()``, even if it is caught later. Every dataclass calls ``exec()`` while it is made.
    """


def handle_signals() -> None:
    """Handle SIGINT and SIGTERM until :func:`ignore_signals`. Call it in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # ignored in a background job
        signal.signal(signal.SIGINT, _interrupt)
    runtime = SystemRuntime()
    runtime.spawn(lambda: _end_after_signal(reader, runtime), "opendata-buffer-signals")


def ignore_signals() -> None:
    """Keep the exit code of a command that has ended.

    An exit that takes longer than :data:`ORDERLY_S` after a signal is still cut short.
    """
    for number in _EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def signalled() -> int | None:
    """The exit code of the first signal; None before one."""
    return _received[0] if _received else None


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(INTERRUPTED)
    raise Interrupted


def _terminate(number: int, frame: FrameType | None) -> None:
    _received.append(TERMINATED)
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
            # Not through sys.stderr: the main thread may hold its lock.
            os.write(2, line.encode(errors="replace"))
        except OSError:
            return
