"""Running commands in this process on stores in memory. tests/process starts real processes."""

from __future__ import annotations

import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import click
from click.testing import CliRunner, Result

from opendata_buffer import Producer, outcomes
from opendata_buffer.cli.main import cli
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Get, PutOutcome, read_bytes
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic

LATER = ("--flush-interval-ms", "60000")
"""Settings with which several calls make one batch, even on a slow machine."""


def commands(group: click.Group = cli, *words: str) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands below a group, with the words that name them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join([*words, name]), command
        if isinstance(command, click.Group):
            yield from commands(command, *words, name)


def runner() -> CliRunner:
    """Return a runner with a separate stderr, which click before 8.2 must be asked for."""
    apart = "mix_stderr" in inspect.signature(CliRunner).parameters
    return CliRunner(mix_stderr=False) if apart else CliRunner()  # type: ignore[call-arg]


def run(*arguments: str, stdin: bytes | BytesIO = b"") -> Result:
    return runner().invoke(cli, arguments, input=stdin)


def ok(*arguments: str, stdin: bytes = b"") -> Result:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def fails(*arguments: str, stdin: bytes = b"") -> str:
    """Run a command that fails, and return the one line of its error."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def misused(*arguments: str) -> str:
    """Run a command with wrong usage, and return the last line of its error."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    usage, *_, line = result.stderr.splitlines()
    assert usage.startswith("Usage: ")
    assert line.startswith("Error: ")
    assert not result.stdout
    return line


def fill(url: str, *batches: list[bytes], **settings: Any) -> None:
    with Producer(ProducerConfig(store=url, **settings)) as producer:
        for batch in batches:
            producer.produce(batch)
            producer.flush()


def topic_of(url: str, partitions: int) -> list[str]:
    """Create a topic, and return the names of its partitions."""
    return Topic.create(url, partitions).description.names


def bytes_of(store: Get, key: str) -> bytes:
    return read_bytes(store, key)


def copy_into(store: MemoryStore, source: MemoryStore) -> None:
    for each in source.list("").objects:
        store.put(each.key, bytes_of(source, each.key))


def manifest_of(store: Get, key: str = "ingest/manifest") -> Manifest:
    return Manifest.parse(bytes_of(store, key))


def records_of(store: MemoryStore, key: str = "ingest/manifest") -> list[bytes]:
    locations = manifest_of(store, key).locations()
    return [record for each in locations for record in decode_batch(bytes_of(store, each))]


def flat(*arguments: str) -> str:
    """Return the output of a command without line breaks."""
    return " ".join(ok(*arguments).stdout.split())


def json_of(*arguments: str) -> Any:
    """Return the JSON that a command prints with --json in one line."""
    return json.loads(ok(*arguments, "--json").stdout)


class Lossy(MemoryStore):
    """Loses the answer of the next manifest write if ``armed``, after applying the write."""

    armed = False

    def put_if(self, key: str, data: bytes, condition: str | None) -> PutOutcome:
        outcome = super().put_if(key, data, condition)
        if self.armed and key == "ingest/manifest":
            self.armed = False
            return outcomes.Unknown("lost")
        return outcome


class Until:
    """A runtime that interrupts its main thread once, when a condition is true."""

    def __init__(self, when: Callable[[], object]) -> None:
        self._real = SystemRuntime()
        self._when = when
        self._main = threading.get_ident()
        self._end = time.monotonic() + 120

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._real, attribute)

    def sleep(self, seconds: float) -> None:
        assert time.monotonic() < self._end
        if threading.get_ident() == self._main and self._when():
            self._when = lambda: False
            raise KeyboardInterrupt
        time.sleep(min(seconds, 0.05))


class Ticks(Until):
    """A runtime that is interrupted after a number of sleeps."""

    def __init__(self, ticks: int) -> None:
        super().__init__(lambda: False)
        self.left = ticks

    def sleep(self, seconds: float) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
