"""The command line: ``opendata-buffer``. What knows of flags, terminals and pipes is here."""

from __future__ import annotations

import atexit
import os
import signal
from typing import Any, NoReturn

__all__ = ["cli", "main"]

_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line and exit."""
    # Loading the commands takes a tenth of a second. Nothing is begun by then, so Ctrl-C has
    # nothing to end in order: without this it shows a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
        # The first to be registered is the last to be called. What Python does after that takes
        # some time, too, and Ctrl-C would end it by the signal: its default is in force again.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from opendata_buffer.cli.commands import main as run

    run()


def __getattr__(name: str) -> Any:
    if name == "cli":
        from opendata_buffer.cli.commands import cli

        return cli
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
