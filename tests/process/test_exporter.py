"""``exporter`` as a process: signals, and a store that hangs next to one that works."""

from __future__ import annotations

import re
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.test_cli import PATIENCE, end, ok, start


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_store_that_hangs_delays_neither_a_scrape_nor_the_end_and_hides_no_other_store(
    number: int,
    code: int,
    server: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    silent = f"http://127.0.0.1:{server.getsockname()[1]}"
    ok("produce", str(tmp_path), stdin=b"record\n")
    process = start(
        *("exporter", "s3://bucket", str(tmp_path), "--listen", "127.0.0.1:0"),
        *("--endpoint-url", silent, "--timeout-ms", "600000"),
    )
    assert process.stdout is not None
    serving = re.fullmatch(
        r"serving (http://\S+/metrics): 2 stores, read every 30 s\n",
        process.stdout.readline().decode(),
    )
    assert serving is not None
    server.settimeout(PATIENCE)
    connection, _ = server.accept()
    connection.recv(1)  # The request is on its way.
    deadline, text = time.monotonic() + PATIENCE, ""
    while "buffer_queue_length{" not in text:
        assert time.monotonic() < deadline, text
        with urllib.request.urlopen(serving[1], timeout=PATIENCE) as answer:
            text = answer.read().decode()
    assert f'buffer_exporter_up{{store="file://{tmp_path}"}} 1\n' in text
    assert re.search(r'buffer_exporter_up{store="s3://bucket"} 0\n', text)
    process.send_signal(number)
    ended, out, err = end(process)
    connection.close()
    assert (ended, out, err) == (code, b"", b"")
