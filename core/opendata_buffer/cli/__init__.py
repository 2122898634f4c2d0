"""The command line: ``opendata-buffer``, also ``python -m opendata_buffer``."""

from __future__ import annotations

import atexit
import os
import signal
from typing import NoReturn

_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line and exit."""
    # Loading the command line takes a tenth of a second. Without a handler Ctrl-C would show a
    # traceback until the command's own handlers are installed; nothing needs an orderly end yet.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
        # Registered first, so called last: after it Python restores the default action, which
        # would end a slow interpreter shutdown by the signal.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from opendata_buffer.cli.errors import run_group  # a tenth of a second: see above
    from opendata_buffer.cli.main import cli

    run_group(cli)
