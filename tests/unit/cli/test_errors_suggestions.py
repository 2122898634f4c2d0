"""Every command that a message suggests is complete, and is run here as it is printed.

Only the options name the S3 server, so a command without them uses another store.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import opendata_buffer
from opendata_buffer import Producer
from opendata_buffer.config import ProducerConfig, StoreOptions
from opendata_buffer.formats.manifest import Manifest, NewEntry
from opendata_buffer.stores.s3 import S3Store
from opendata_buffer.topic.topic import Topic
from tests.support.s3_server import S3Server
from tests.unit.cli.shell import manifest_of, run
from tests.unit.cli.test_topic import pending

SUGGESTED = re.compile(r"'opendata-buffer ([^']*)'")


class Place:
    """A store that only the options in ``words`` name."""

    def __init__(self, server: S3Server, root: str) -> None:
        self.options = StoreOptions(
            endpoint_url=server.endpoint, region="eu-test-1", anonymous=True
        )
        self.words = ["--endpoint-url", server.endpoint, "--region", "eu-test-1", "--anonymous"]
        self.store = S3Store(server.bucket, root, self.options)
        self.url = self.store.url

    def fill(self, *records: bytes, **settings: str) -> None:
        config = ProducerConfig(store=self.url, store_options=self.options, **settings)  # type: ignore[arg-type]
        with Producer(config) as producer:
            for record in records:
                producer.produce([record])
                producer.flush()

    def run(self, *words: str) -> str:
        """Run a command with the options, and return its output."""
        at = 2 if words[0] in ("readers", "topic") else 1
        result = run(*words[:at], self.url, *words[at:], *self.words)
        return result.stdout + result.stderr

    def lose(self, key: str) -> None:
        self.store.delete_many([key])


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def place(server: S3Server, name: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    return Place(server, name)


# Each function damages something and yields the output of commands, whose suggestions are run
# at once.


def lost_manifest(place: Place) -> Iterator[str]:
    place.fill(b"a", data_path_prefix="orders")
    place.lose("orders/manifest")
    yield "".join(place.run(each, "--data-path-prefix", "orders") for each in ("status", "gc"))
    place.lose("orders/manifest")
    yield place.run("fsck", "--data-path-prefix", "orders")


def damaged_manifest(place: Place) -> Iterator[str]:
    place.fill(b"a")
    place.store.put("ingest/manifest", b"<html>")
    yield place.run("status") + place.run("fsck")


def missing_batch(place: Place) -> Iterator[str]:
    for command in (("consume", "--ack"), ("fsck",)):
        place.fill(b"a")
        place.lose(manifest_of(place.store).entries()[-1].location)
        yield place.run(*command)


def location_that_may_be_sound(place: Place) -> Iterator[str]:
    place.fill(b"a")
    for options in ((), ("--repair",), ("--repair", "--dry-run")):
        manifest = manifest_of(place.store).append([NewEntry("elsewhere/x")])
        place.store.put("ingest/manifest", manifest.raw)
        yield place.run("fsck", *options)


def oldest_batch_has_no_time(place: Place) -> Iterator[str]:
    run_name = "ingest/01J5T4R3KXBMZ7QV9N2WG8YDHP/0000000000000001"
    place.store.put("ingest/manifest", Manifest.empty().append([NewEntry(run_name)]).raw)
    yield place.run("gc")


def another_start(place: Place) -> Iterator[str]:
    place.fill(b"a", b"b")
    yield place.run("trim", "--to", "2", "--yes")
    yield place.run("trim", "--to", "0")


def too_much_waits(place: Place) -> Iterator[str]:
    place.fill(b"a")
    yield place.run("status", "--max-backlog", "0")


def undecided(place: Place) -> Iterator[str]:
    Topic.create(ProducerConfig(store=place.url, store_options=place.options), 1)
    for command in (
        ("status", "--partition", "0", "--json"),
        ("trim", "--to", "latest", "--partition", "0"),
        ("abort", "000000000000"),
    ):
        pending(place.store, place.url, "p-00000-04pn")
        yield place.run(*command)


def topics(place: Place) -> Iterator[str]:
    yield place.run("topic", "drain", "0")  # creates one
    yield place.run("topic", "create", "--partitions", "2")
    yield place.run("skip", "0")
    yield place.run("skip", "0", "--partition", "0")
    yield place.run("topic", "expand", "--partitions", "1")
    for number in range(5):
        output = place.run("topic", "drain", str(number))
    yield output


@pytest.mark.parametrize(
    ("break_it", "suggests"),
    [
        (lost_manifest, ["fsck", "produce", "fsck"]),
        (damaged_manifest, ["fsck"]),
        (missing_batch, ["skip", "fsck"]),
        (location_that_may_be_sound, ["skip"] * 3),
        (oldest_batch_has_no_time, ["skip"]),
        (another_start, ["restore", "status"]),
        (too_much_waits, ["status"]),
        (undecided, ["abort", "abort", "status"]),
        (topics, ["topic create", "topic expand", "status", "status", "topic drain"]),
    ],
)
def test_every_suggested_command_runs_as_it_is_printed(
    place: Place,
    break_it: Callable[[Place], Iterator[str]],
    suggests: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed = []
    for output in break_it(place):
        for line in dict.fromkeys(SUGGESTED.findall(output)):
            followed.append(line)
            assert " ".join(place.words) in line
            with monkeypatch.context() as patch:
                patch.setattr("opendata_buffer.cli.text.is_interactive", lambda: True)
                result = run(*shlex.split(line), stdin=b"y\n")
            assert result.exit_code == 0, (line, result.output)
    assert [line[: line.index(" s3://")] for line in followed] == suggests


def texts(path: Path) -> list[str]:
    """Return the strings of a module, with braces in place of values."""
    tree, found = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else "{}" for each in node.values]
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


@pytest.mark.checkout
def test_no_message_suggests_a_command_without_its_store() -> None:
    core = Path(opendata_buffer.__file__).parent
    root = core.parents[1]
    seen = 0
    for folder in (core, root / "buffer_source", root / "buffer_sink"):
        for path in folder.rglob("*.py"):
            for command in (each for text in texts(path) for each in SUGGESTED.findall(text)):
                seen += 1
                assert re.search(r"\{\}|\{queue\}|\{hint\}|%s|STORE", command), f"{path}: {command}"
    assert seen > 20
