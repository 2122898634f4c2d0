"""``broker``: serving, standby, and one-line errors."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import Result

from opendata_buffer.broker.client import Lease
from opendata_buffer.cli.main import cli
from opendata_buffer.config import QueueConfig
from opendata_buffer.stores.memory import MemoryStore
from tests.unit.broker.local import RUNTIME, eventually, host
from tests.unit.cli.shell import Until, fails, fill, run, runner, topic_of


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that the running command has printed."""
    lines: list[str] = []
    echo = click.echo

    def listened(line: str, **options: Any) -> None:
        echo(line, **options)
        if not options:
            lines.append(line)

    monkeypatch.setattr(click, "echo", listened)
    return lines


def serve(url: str, when: Callable[[], object], *more: str) -> Result:
    result = runner().invoke(cli, ["broker", url, *more], obj=Until(when))
    assert result.exit_code == 130, result.output
    return result


def announced(store: MemoryStore) -> Any:
    return Lease(store, QueueConfig(store=store.url), RUNTIME).read()


def serves(store: MemoryStore) -> bool:
    found = announced(store)
    return found is not None and found.serves


def test_the_command_prints_that_it_serves_and_stops_the_broker_at_its_end(
    url: str, store: MemoryStore, printed: list[str]
) -> None:
    fill(url, [b"a"])
    result = serve(url, lambda: printed)
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"serving {url} at 127.0.0.1:")
    assert "(term 1, broker 0" in line
    # It waits only a few seconds for its last message.
    eventually(lambda: not serves(store))
    assert announced(store).term == 1


def test_a_standby_prints_that_it_waits_and_takes_over_when_the_other_broker_stops(
    url: str, store: MemoryStore, printed: list[str]
) -> None:
    fill(url, [b"a"])
    other = host(store)
    eventually(lambda: other.serving)
    assert other.serving is not None
    address = other.serving.address

    def when() -> bool:
        if len(printed) == 1:
            other.stop(10)
        return len(printed) > 1

    lines = serve(url, when).stdout.splitlines()
    assert lines[0].startswith(f"standing by: {address} is announced (term 1, broker ")
    assert lines[1].startswith(f"serving {url} at ")
    assert len(lines) == 2


def test_the_broker_listens_and_is_announced_as_its_options_say(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"])
    seen: list[str] = []

    def when() -> bool:
        if serves(store):
            seen.append(announced(store).address)
        return bool(seen)

    serve(url, when, "--listen", "127.0.0.1:0", "--advertise", "[fd00::1]:7420")
    assert seen == ["[fd00::1]:7420"]


def test_the_broker_waits_for_a_queue_or_creates_one_on_request(
    url: str, store: MemoryStore, printed: list[str]
) -> None:
    (line,) = serve(url, lambda: printed).stdout.splitlines()
    assert line.startswith(f"waiting: there is no manifest 'ingest/manifest' in {url} yet")
    assert store.list("").objects == ()

    def when() -> bool:
        if len(printed) == 2 and not store.list("").objects:
            fill(url, [b"a"])
        return serves(store)

    serve(url, when)
    other = MemoryStore.named(f"{url}-new".removeprefix("memory://"))
    serve(other.url, lambda: serves(other), "--create-if-missing")
    topic_of(f"{url}-topic", 1)
    assert "one queue is needed" in fails("broker", f"{url}-topic")


def test_an_address_in_use_is_a_one_line_error_even_for_a_standby(
    url: str, store: MemoryStore
) -> None:
    fill(url, [b"a"])
    other = host(store)
    eventually(lambda: other.serving)
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            where = f"127.0.0.1:{taken.getsockname()[1]}"
            line = fails("broker", url, "--listen", where)
        assert f"cannot listen on {where}" in line
        assert "--listen" in line
    finally:
        other.stop(10)


def test_an_invalid_certificate_is_a_one_line_error(url: str) -> None:
    fill(url, [b"a"])
    line = fails("broker", url, "--tls-cert", "/nowhere.pem", "--tls-key", "/nowhere.key")
    assert "--tls-cert" in line
    assert run("broker", url, "--tls-cert", "a.pem").exit_code == 2


@pytest.mark.parametrize("text", ["", "h", "h:", ":1", "h:x", "h:65536", "::1:7", "h:1:2", "h:²"])
def test_an_invalid_address_is_a_usage_error(text: str, url: str) -> None:
    result = run("broker", url, "--listen", text)
    assert result.exit_code == 2
    assert "HOST:PORT" in result.stderr
