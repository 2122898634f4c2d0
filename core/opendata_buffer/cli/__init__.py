"""The command line: ``opendata-buffer``, also ``python -m opendata_buffer``."""

from __future__ import annotations

import atexit
import os
import signal
from typing import NoReturn

_INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line and exit."""
    # Loading the command line takes 100 ms. Until the command's own handlers are installed, Ctrl-C
    # would show a traceback. Nothing needs an orderly end yet.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_INTERRUPTED))
        # Registered first, so called last: after it Python restores the default action, which
        # would end a slow interpreter shutdown by the signal.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    from opendata_buffer.cli.errors import run_group  # Takes 100 ms: see above.
    from opendata_buffer.cli.main import cli

    run_group(cli)
