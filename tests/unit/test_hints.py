"""Hints: every action has a text on each surface, and every command in it runs as printed."""

from __future__ import annotations

import ast
import pickle
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from opendata_buffer.config import ProducerConfig, StoreOptions
from opendata_buffer.hints import Action, Hint, Message, QueueName, Setting, Surface, render
from opendata_buffer.queue.hints import queue_name, topic_name
from opendata_buffer.topic.topic import Topic
from tests.support.s3_server import S3Server
from tests.unit.cli.shell import manifest_of, run
from tests.unit.cli.test_errors_suggestions import Place
from tests.unit.cli.test_topic import A, pending

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"'opendata-buffer ([^']*)'")
SNAKE_CASE = re.compile(r"(?<!_)\b(?!read_committed)[a-z]+_[a-z_]+\b|\w=True")
"""A name of a setting or an argument of Python. Not a column of Spark, or a value of an option."""

PARTITION = "p-00001-05mv"
READER = "billing"


def sample(action: Action, queue: QueueName, count: int = 3) -> Hint:
    """A hint with a value in each field."""
    return Hint(
        action,
        queue,
        sequence=0,
        partition=PARTITION,
        readers=(READER,),
        path="orders/manifest",
        prefix="orders",
        producer=A.hex(),
        count=count,
    )


def commands_of(action: Action) -> list[str]:
    """The commands that the texts of an action have on any surface."""
    hint = sample(action, QueueName("s3://bucket", "ingest/manifest"))
    found = (command for surface in Surface for command in COMMAND.findall(hint.text(surface)))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("surface", Surface)
@pytest.mark.parametrize("action", Action)
def test_every_action_has_a_text_in_the_words_of_each_surface(
    action: Action, surface: Surface
) -> None:
    hint = sample(action, QueueName("s3://bucket", "ingest/manifest"))
    text = hint.text(surface)
    assert text.endswith((".", ".)")), text
    assert not re.search(r"[{}]|\bNone\b|\bSTORE\b", text), text
    words = COMMAND.sub("", text)
    if surface is Surface.PYTHON:
        assert "--" not in words, text
    if surface is Surface.SHELL:
        assert not SNAKE_CASE.search(words), text
    if surface is Surface.SPARK:
        assert not SNAKE_CASE.search(words), text
        assert "--" not in words, text


# The command of a hint is run in a store where it has something to do.


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def place(server: S3Server, request: pytest.FixtureRequest) -> Place:
    return Place(server, re.sub(r"\W+", "-", request.node.name))


def prepare(place: Place, words: list[str]) -> tuple[QueueName, int]:
    """Make what a command works on; return its name and the number for the command."""
    config = ProducerConfig(store=place.url, store_options=place.options)
    name, count = queue_name(place.url, config), 3
    match words:
        case ["topic", "create", *_]:
            pass
        case ["topic" | "abort", *_]:
            Topic.create(config, 2)
            pending(place.store, place.url, PARTITION)
        case ["readers", "reset", *others] if "--partition" in others:
            Topic.create(config, 2)
            place.run("readers", "enable", "--yes")
        case ["readers", *_]:
            place.fill(b"a", b"b")
            enabled = place.run("readers", "enable", "--yes")
            assert "is a log" in enabled, enabled
            assert READER in place.run("readers", "reset", READER, "--to-latest")
        case ["skip", *_]:
            place.fill(b"a", b"b")
            place.lose(manifest_of(place.store).entries()[0].location)
        case ["produce", *_]:
            place.fill(b"a")
            place.lose("ingest/manifest")
        case _:
            place.fill(b"a", b"b")
            count = 700_000  # a grace period
    return name, count


CASES = [(action, number) for action in Action for number in range(len(commands_of(action)))]


@pytest.mark.parametrize(("action", "number"), CASES)
def test_every_command_of_a_hint_runs_as_it_is_printed(
    action: Action, number: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setattr("opendata_buffer.cli.text.is_interactive", lambda: True)
    queue, count = prepare(place, shlex.split(commands_of(action)[number]))
    hint = sample(action, queue, count)
    found = (command for surface in Surface for command in COMMAND.findall(hint.text(surface)))
    command = list(dict.fromkeys(found))[number]
    assert " ".join(place.words) in command, "it leads to another store"
    result = run(*shlex.split(command), stdin=b"y\n")
    assert result.exit_code == 0, (command, result.output)


def test_the_commands_cover_most_of_the_command_line() -> None:
    found = {tuple(command.split()[:1]) for action in Action for command in commands_of(action)}
    assert len(CASES) > 40
    assert len(found) >= 9


def uses() -> Iterator[tuple[str, Action, set[str]]]:
    """Each place that makes a hint, with the fields that it gives."""
    fields = [name for name in Hint.__slots__ if name != "action"]
    for folder in ("core/opendata_buffer", "buffer_source", "buffer_sink"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Hint"):
                    continue
                given = set(fields[: len(node.args) - 1])
                given |= {keyword.arg for keyword in node.keywords if keyword.arg}
                for name in ast.walk(node.args[0]):
                    if isinstance(name, ast.Attribute):
                        yield f"{path}:{node.lineno}", Action[name.attr], given


@pytest.mark.checkout
def test_every_place_that_makes_a_hint_gives_the_values_that_its_texts_name() -> None:
    seen = set()
    for where, action, given in uses():
        seen.add(action)
        for surface in Surface:
            for _, name, _, _ in Formatter().parse(action.value.on(surface)):
                needed = (name or "").partition("[")[0]
                needed = {"resets": "readers", "one_load": ""}.get(needed, needed)
                assert not needed or needed == "queue" or needed in given, (where, needed)
    assert len(seen) > 60


@pytest.mark.checkout
def test_only_this_module_writes_commands_for_messages_of_the_library() -> None:
    for folder in ("core/opendata_buffer", "buffer_source", "buffer_sink"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "hints.py" and "cli" not in path.parts:
                assert "'opendata-buffer " not in path.read_text("utf-8"), path


# ---- Names and messages


@pytest.mark.parametrize(
    ("setting", "shell", "spark"),
    [
        ("timeout_ms", "--timeout-ms", "timeoutMs"),
        ("delivery_timeout_ms", "--timeout-ms", "deliveryTimeoutMs"),
        ("region", "--region", "region"),
        ("store", "--store", "path"),
    ],
)
def test_a_setting_has_a_name_on_each_surface(setting: str, shell: str, spark: str) -> None:
    texts = [Setting(setting).text(surface) for surface in Surface]
    assert texts == [setting, shell, spark]
    assert str(Setting(setting)) == setting


def test_the_name_of_a_queue_has_its_options_and_no_secret() -> None:
    options = StoreOptions(
        endpoint_url="http://here:9000", access_key_id="AKIAEXAMPLEKEY", secret_access_key="s" * 20
    )
    config = ProducerConfig(
        store="s3://b", data_path_prefix="my orders", manifest_path="m", store_options=options
    )
    name = queue_name("s3://b", config)
    assert name.place == "'m' in s3://b"
    assert shlex.split(name.words()) == [
        "s3://b", "--data-path-prefix", "my orders", "--manifest-path", "m",
        "--endpoint-url", "http://here:9000",
    ]  # fmt: skip


def test_a_partition_is_named_as_one_and_its_topic_without_it() -> None:
    config = ProducerConfig(store="s3://b", data_path_prefix=PARTITION)
    assert queue_name("s3://b", config).words() == f"s3://b --partition {PARTITION}"
    assert topic_name("s3://b", config).words() == "s3://b"
    topic = queue_name("s3://b", ProducerConfig(store="s3://b"))
    assert topic.within(PARTITION) == queue_name("s3://b", config)


def test_a_hint_without_a_queue_gets_the_first_one_that_is_known() -> None:
    hint, queue = Hint(Action.INSPECT), QueueName("s3://b", "ingest/manifest")
    assert "status STORE'" in str(hint)
    assert "status s3://b'" in str(hint.at(queue))
    assert hint.at(queue).at(QueueName("s3://other", "m")) == hint.at(queue)


def test_a_hint_begins_a_sentence_and_the_text_after_it_another_one() -> None:
    hint = Hint(Action.READ_FASTER)
    for before in ("it is full", "it is full. "):
        text = render([before, hint, "Nothing was appended."], Surface.PYTHON)
        assert text == "it is full. Start or speed up the consumer. Nothing was appended."
    parts = ["set ", Setting("timeout_ms"), " higher"]
    assert render(parts, Surface.SHELL) == "set --timeout-ms higher"


def test_a_message_is_text_and_keeps_its_parts() -> None:
    message = Message("it is full", Hint(Action.INSPECT))
    named = pickle.loads(pickle.dumps(message.at(QueueName("s3://b", "m"))))
    assert named == "it is full. Look at it with 'opendata-buffer status s3://b'."
    assert isinstance(named, Message)
    assert named.hints == (Hint(Action.INSPECT, QueueName("s3://b", "m")),)
    assert named.text(Surface.SPARK) == str(named)
