"""Runs commands in this process, on stores in memory. Processes are in tests/process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from click.testing import CliRunner, Result

from opendata_buffer.cli.main import cli
from opendata_buffer.config import ProducerConfig
from opendata_buffer.formats.batch import decode_batch
from opendata_buffer.formats.manifest import Manifest
from opendata_buffer.producer.producer import Producer
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.base import Blob
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic

LATER = ("--flush-interval-ms", "60000")
"""What is produced by several calls makes one batch, however slow the machine."""


def commands(group: click.Group = cli, *words: str) -> Iterator[tuple[str, click.Command]]:
    """All commands below a group, with the words that name them."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join([*words, name]), command
        if isinstance(command, click.Group):
            yield from commands(command, *words, name)


def run(*arguments: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin)


def ok(*arguments: str, stdin: bytes = b"") -> Result:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def fails(*arguments: str, stdin: bytes = b"") -> str:
    """The one line of an error."""
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 1, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def fill(url: str, *batches: list[bytes], **settings: Any) -> None:
    with Producer(ProducerConfig(store=url, **settings)) as producer:
        for batch in batches:
            producer.produce(batch)
            producer.flush()


def topic_of(url: str, partitions: int) -> list[str]:
    """A new topic; the names of its partitions."""
    return Topic.create(url, partitions).description.names


def manifest_of(store: MemoryStore, key: str = "ingest/manifest") -> Manifest:
    got = store.get(key)
    assert isinstance(got, Blob)
    return Manifest.parse(got.data)


def records_of(store: MemoryStore, key: str = "ingest/manifest") -> list[bytes]:
    found = []
    for entry in manifest_of(store, key).entries():
        got = store.get(entry.location)
        assert isinstance(got, Blob)
        found += decode_batch(got.data)
    return found


class Ticks:
    """A runtime that is interrupted after some sleeps."""

    def __init__(self, ticks: int) -> None:
        self._real = SystemRuntime()
        self.left = ticks

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._real, attribute)

    def sleep(self, seconds: float) -> None:
        assert seconds == 0.25
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
