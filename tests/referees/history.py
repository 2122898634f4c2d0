"""Histories: the calls of each process and their answers, one line of JSON each.

::

    {"t": 81, "p": "producer-1", "i": 7, "type": "invoke", "f": "append", "queue": "ingest", ...}
    {"t": 94, "p": "producer-1", "i": 7, "type": "ok", "sequence": 12}

``t`` is the machine's monotonic clock, which all processes share and no test can set. A call that
ends with ``fail`` changed nothing. A call that ends with ``unknown``, or without an end, may have.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opendata_buffer.errors import CommitStateUnknown, DataLoss, Fenced, OpenDataBufferError

SURE = {"append"}
"""Calls whose errors, except ``CommitStateUnknown``, promise that nothing was changed."""


class Recorder:
    """Writes the history of one process. It is thread-safe: each line is one write."""

    def __init__(self, folder: Path, process: str) -> None:
        self._file = (folder / f"{process}.jsonl").open("ab", buffering=0)
        self._process = process
        self._lock = threading.Lock()
        self._calls = 0
        self._muted = False

    def mute(self) -> None:
        """Write nothing more and refuse new calls, for a thread that imitates a killed process."""
        with self._lock:
            self._muted = True

    def invoke(self, f: str, queue: str, **fields: Any) -> int:
        with self._lock:
            self._calls += 1
            number = self._calls
        self._write(number, "invoke", {"f": f, "queue": queue, **fields})
        return number

    def end(self, number: int, how: str, **fields: Any) -> None:
        self._write(number, how, fields)

    def end_by(self, number: int, error: BaseException, *, sure: bool) -> None:
        """Record the end of a call that raised an error."""
        if isinstance(error, Fenced):
            self.end(number, "fail", fenced=error.current_epoch, error=repr(error)[:200])
        elif isinstance(error, CommitStateUnknown) or not sure:
            self.end(number, "unknown", error=repr(error)[:200])
        else:
            self.end(number, "fail", error=repr(error)[:200])

    @contextmanager
    def call(self, f: str, queue: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Record a call. The block puts the answer into the yielded dictionary."""
        answer: dict[str, Any] = {}
        number = self.invoke(f, queue, **fields)
        try:
            yield answer
        except DataLoss as error:
            # An owner that misses entries: recorded as a read that no order of calls allows.
            self.end(number, "ok" if f == "read" else "fail", entries=[(-1, str(error), True)])
            raise
        except OpenDataBufferError as error:
            self.end_by(number, error, sure=f in SURE)
            raise
        self.end(number, "ok", **answer)

    def past(self, since: int, f: str, queue: str, **fields: Any) -> None:
        """Record a call that has just succeeded and that began at ``since``."""
        with self._lock:
            self._calls += 1
            number = self._calls
        self._write(number, "invoke", {"f": f, "queue": queue, **fields}, since)
        self._write(number, "ok", {})

    def _write(self, number: int, how: str, fields: dict[str, Any], t: int = 0) -> None:
        with self._lock:
            line = {"t": t or time.monotonic_ns(), "p": self._process, "i": number, "type": how}
            if self._muted and how == "invoke":
                raise SystemExit
            if not self._muted:
                self._file.write(json.dumps(line | fields).encode() + b"\n")


def merged(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all processes in order of time, without a truncated last line."""
    lines = [
        line
        for file in sorted(folder.glob("*.jsonl"))
        for line in file.read_bytes().split(b"\n")[:-1]
    ]
    return sorted(map(json.loads, lines), key=lambda event: (event["t"], event["type"] != "invoke"))


class Saved:
    """A value in a program's own database that only its last instance may change."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, default: Any) -> tuple[int, Any]:
        """Fence earlier instances. Return the generation of this one, and the value."""
        with self._locked():
            generation, value = self._read(default)
            self._put(generation + 1, value)
            return generation + 1, value

    def put(self, generation: int, value: Any) -> bool:
        """Save a value unless a later instance has begun. Return whether it was saved."""
        with self._locked():
            if self._read(None)[0] != generation:
                return False
            self._put(generation, value)
            return True

    def _read(self, default: Any) -> Any:
        return json.loads(self._path.read_text()) if self._path.exists() else (0, default)

    def _put(self, generation: int, value: Any) -> None:
        new = self._path.with_suffix(f".{threading.get_ident()}.new")
        new.write_text(json.dumps([generation, value]))
        new.replace(self._path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._path.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
