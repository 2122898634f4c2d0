"""A signal ends a command within seconds, whatever the store does.

Ctrl-C and SIGTERM raise an exception in the main thread, so that what was written out is
acknowledged and what was read is flushed. A store that does not answer could hold that up for
minutes. So a second thread, woken by the same signal, waits for :data:`PATIENCE_S`, says what
the command has to report, and ends the process.

That thread is woken through a pipe that Python's C handler writes to (``set_wakeup_fd``): a main
thread that is stuck in a lock or in C code never runs a handler of Python.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from opendata_buffer.runtime import Runtime, SystemRuntime

__all__ = [
    "INTERRUPTED",
    "PATIENCE_S",
    "TERMINATED",
    "end_on_signals",
    "ignore_signals",
    "last_words",
    "signalled",
]

INTERRUPTED = 130
TERMINATED = 143
PATIENCE_S = 4.0
"""How long an orderly end may take; the promise is five seconds for the whole."""

_EXIT_CODES: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
_last_words: list[Callable[[], str]] = []
_came: list[int] = []


@contextmanager
def last_words(report: Callable[[], str]) -> Iterator[None]:
    """What to print on stderr when a signal ends the body, in order or not.

    Args:
        report: Makes the line. It may be called by another thread than the body's.
    """
    _last_words.append(report)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _say()
        raise
    finally:
        _last_words.clear()


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, by another name.

    When a plain ``KeyboardInterrupt`` leaves an ``exec()``, and each dataclass that is being made
    has one, ``python -m`` ends by the signal, whoever catches it.
    """


def end_on_signals() -> None:
    """Take over SIGINT and SIGTERM until :func:`ignore_signals`; from the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a job in the background
        signal.signal(signal.SIGINT, _interrupt)
    runtime = SystemRuntime()
    runtime.spawn(lambda: _watch(reader, runtime), "opendata-buffer-ending")


def ignore_signals() -> None:
    """The command has ended: a signal does not change any more how it did.

    An exit that takes longer than :data:`PATIENCE_S` after one is ended all the same.
    """
    for number in _EXIT_CODES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)


def signalled() -> int | None:
    """The exit code of the first signal that came; None while none did."""
    return _came[0] if _came else None


def _interrupt(number: int, frame: FrameType | None) -> None:
    _came.append(INTERRUPTED)
    raise Interrupted


def _terminate(number: int, frame: FrameType | None) -> None:
    _came.append(TERMINATED)
    sys.exit(TERMINATED)


def _watch(reader: int, runtime: Runtime) -> None:
    code = None
    while code is None:
        (number,) = os.read(reader, 1)
        code = _EXIT_CODES.get(number)
    runtime.sleep(PATIENCE_S)
    _say()
    os._exit(code)


def _say() -> None:
    while _last_words:
        line = f"{_last_words.pop()()}\n"
        try:
            # Not through sys.stderr: the main thread may hold its lock.
            os.write(2, line.encode(errors="replace"))
        except OSError:
            return
