"""Messages of ``./run``, and a log for commands whose output only matters if they fail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LAST_LINES = 25


class Failed(Exception):
    """``./run`` cannot go on. The text says why, and how to fix it."""


def say(text: str) -> None:
    """Print a message to standard error."""
    print(f"run: {text}", file=sys.stderr, flush=True)


class Log:
    """A file with the output of commands.

    Args:
        path: The file. Output is appended to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = time.monotonic()

    def begin(self, message: str) -> None:
        """Say what the next commands do. On a terminal, their seconds are counted from here."""
        say(message)
        self._began = time.monotonic()

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> bool:
        """Run a command with its output in the log.

        A command inherits open files, such as the lock of an installation.

        Args:
            command: The command and its arguments.
            environment: Its environment variables. Those of this process by default.
            folder: Its working directory. That of this process by default.

        Returns:
            Whether it succeeded. False if the command does not exist.
        """
        ticking = sys.stderr.isatty()
        with self.path.open("ab") as output:
            try:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    cwd=folder,
                    close_fds=False,
                )
            except OSError as error:
                output.write(f"{error}\n".encode())
                return False
            with process:
                while True:
                    try:
                        return process.wait(1.0) == 0
                    except subprocess.TimeoutExpired:
                        if ticking:
                            seconds = time.monotonic() - self._began
                            print(f"\r  {seconds:.0f} s ", end="", file=sys.stderr, flush=True)
                    except BaseException:
                        process.terminate()
                        raise
                    finally:
                        if ticking and process.returncode is not None:
                            print("\r          \r", end="", file=sys.stderr, flush=True)

    def show_end(self) -> None:
        """Print the last lines."""
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        print(*lines[-LAST_LINES:], sep="\n", file=sys.stderr, flush=True)
