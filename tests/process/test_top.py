"""``opendata-buffer top`` in a terminal: what it draws, and that the terminal is given back."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opendata_buffer import Producer, ProducerConfig

READY_S = 180.0
END_S = 60.0  # five seconds from a signal are promised, and a slow machine takes its time


class Terminal:
    """A process in a terminal of 100 by 30, and what it wrote."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, close_fds=True
        )
        os.close(slave)
        self.written = b""
        self._forgotten = 0
        self._patient_until = time.monotonic() + READY_S

    @property
    def lately(self) -> bytes:
        """What it wrote since :meth:`forget`."""
        return self.written[self._forgotten :]

    def forget(self) -> None:
        """Let only what comes from now on count for :meth:`read_until`."""
        self._forgotten = len(self.written)

    def read_until(self, text: bytes) -> None:
        while text not in self.lately:
            assert time.monotonic() < self._patient_until, self.written
            self._read(0.2)

    def wait(self) -> int:
        """The exit code."""
        end = time.monotonic() + END_S
        while self.process.poll() is None and time.monotonic() < end:
            self._read(0.1)
        code = self.process.wait(timeout=0.1)
        while self._read(0.1):
            pass
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            got = os.read(self._master, 65_536)
        except OSError:  # Linux, once the other end is closed
            return False
        self.written += got
        return bool(got)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_it_draws_what_comes_and_a_signal_gives_the_terminal_back(
    tmp_path: Path, number: int, code: int
) -> None:
    store = str(tmp_path)
    with Producer(ProducerConfig(store=store)) as producer:
        producer.produce([b"first"])
        producer.flush()
        command = [sys.executable, "-m", "opendata_buffer", "top", store, "--interval-ms", "50"]
        terminal = Terminal(*command)
        try:
            terminal.read_until(b"1 batch waits")
            producer.produce([b"second"])
            producer.flush()
            terminal.read_until(b"2 batches wait")
            manifest = tmp_path / "ingest" / "manifest"
            good = manifest.read_bytes()
            manifest.write_bytes(b"broken")
            terminal.read_until(b"the store fails since")
            manifest.write_bytes(good)
            terminal.forget()
            terminal.read_until(b"2 batches wait")
            while b"the store fails" in terminal.lately:
                terminal.forget()
                terminal.read_until(b"2 batches wait")
            terminal.process.send_signal(number)
            assert terminal.wait() == code
        finally:
            terminal.close()
    assert terminal.written.index(b"\x1b[?1049h") < terminal.written.index(b"batches wait")
    assert terminal.written.rstrip().endswith((b"\x1b[?1049l", b"\x1b[?25h"))
    assert b"Traceback" not in terminal.written
