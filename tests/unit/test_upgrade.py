"""The page about the upgrade, and the announcement, say what the code and the measurements say."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import click
import pytest

import opendata_buffer
from buffer_source.partition_stream import MOST_ENTRIES
from opendata_buffer import (
    ConsumerConfig,
    FetchHandle,
    Producer,
    ProducerConfig,
    Publisher,
    TransactionFilter,
    WorkerConfig,
    config,
    errors,
)
from opendata_buffer.cli import options
from opendata_buffer.cli.main import cli
from tests.unit.test_docs import section, text_of

pytestmark = pytest.mark.checkout

UPGRADE = "docs/operations/upgrade.md"
NEWS = "docs/explanation/release-0.2.md"


def table(title: str) -> list[list[str]]:
    """Return the rows of the tables below a heading, without their heads."""
    rows = re.findall(r"^\| (.*) \|$", section(UPGRADE, title), re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    return [row for row in cells if "in 0.1" not in row and "setting in 0.1" not in row[0]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_removed_setting_is_named_with_its_replacement() -> None:
    text = section(UPGRADE, "Python")
    constants = {"max_batch_bytes", "backoff_base_ms", "backoff_max_ms", "max_manifest_bytes"}
    constants |= {"zstd_level", "upload_concurrency"}
    removed = set(config._INSTEAD)
    replaced = {named(old)[0] for old, _ in table("Python") if re.fullmatch(r"`\w+`", old)}
    assert removed <= replaced
    settings = {field.name for made in (ProducerConfig, WorkerConfig) for field in fields(made)}
    for name in constants:
        assert f"`{name}`" in text
        assert isinstance(getattr(ProducerConfig, name), int)
    assert not settings & (constants | removed)


@pytest.mark.parametrize("name", sorted(config._INSTEAD))
def test_a_removed_setting_is_refused_with_its_replacement(name: str) -> None:
    made: Any = ConsumerConfig
    with pytest.raises(errors.InvalidInput, match=f"'{name}' was removed"):
        made(store="memory://upgrade", **{name: 1})


def test_classes_in_the_first_column_are_gone_and_those_in_the_second_exist() -> None:
    found = 0
    for old, new in table("Python"):
        for name in named(old):
            if re.fullmatch(r"[A-Z]\w+", name):
                assert name not in opendata_buffer.__all__
                found += 1
        for name in re.findall(r"\b[A-Z]\w+[a-z]\b", " ".join(named(new))):
            assert name in opendata_buffer.__all__ or name == "STORE", name
    assert found == 6


def test_methods_in_the_first_column_are_gone_and_those_in_the_second_exist() -> None:
    with Producer("memory://upgraded") as producer:
        handle = producer.produce([b"a"])
        gone: list[tuple[object, str]] = [
            *((handle, name) for name in ("watcher", "await_durable", "is_set")),
            *((producer, name) for name in ("commit_attempts", "commit_conflicts")),
            (FetchHandle, "fetch_raw"),
            (Publisher, "roll_back"),
            *((TransactionFilter, name) for name in ("to_json", "from_json")),
        ]
        there: list[tuple[object, str]] = [
            *((handle, name) for name in ("result", "done", "add_done_callback")),
            *((FetchHandle, name) for name in ("fetch", "fetch_arrow")),
            (Publisher, "abort"),
            *((TransactionFilter, name) for name in ("to_dict", "from_dict")),
        ]
    page = section(UPGRADE, "Python")
    for owner, name in gone:
        assert not hasattr(owner, name), name
        assert name in page
    for owner, name in there:
        assert hasattr(owner, name), name
        assert name in page


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("DurabilityWatcher", "WriteHandle"),
        ("TopicWatcher", "TopicHandle"),
        ("TopicBatch", "ConsumedBatch"),
        ("TopicArrowBatch", "ArrowBatch"),
        ("PartitionPosition", "Position"),
        ("RawBatch", "ConsumedBatch or ArrowBatch"),
    ],
)
def test_a_former_class_is_refused_with_the_one_that_took_its_place(old: str, new: str) -> None:
    with pytest.raises(AttributeError, match=f"'{old}': use {new}"):
        getattr(opendata_buffer, old)
    assert old in section(UPGRADE, "Python")


def test_a_former_method_is_refused_with_the_one_that_took_its_place() -> None:
    with Producer("memory://up") as producer:
        handle = producer.produce([b"a"])
        handle.result()
        for name in ("watcher", "await_durable"):
            with pytest.raises(
                AttributeError, match=r"use result\(timeout=5\), or await the handle"
            ):
                getattr(handle, name)
        with pytest.raises(AttributeError, match=r"use done\(\)"):
            handle.is_set  # type: ignore[attr-defined]  # noqa: B018
    with Publisher("memory://up") as publisher, pytest.raises(AttributeError, match=r"use abort\("):
        publisher.roll_back()  # type: ignore[attr-defined]


def command(words: str) -> click.Command | None:
    found: click.Command | None = cli
    for word in words.split():
        if not isinstance(found, click.Group):
            return None
        found = found.get_command(click.Context(found), word)
    return found


def test_every_removed_command_and_option_is_named() -> None:
    text = section(UPGRADE, "Command line")
    for name in options.MOVED:
        words = name.split()
        assert words[0] in text if len(words) == 1 else words[1] in text, name


def test_commands_in_the_second_column_exist_with_their_options() -> None:
    checked = 0
    for _, new in table("Command line"):
        for line in named(new):
            words = [word for word in line.split() if not word.isupper()]
            if words[0].startswith("--") or words == ["length"]:
                continue
            there = command(words[0])
            assert there is not None, line
            known = {option for parameter in there.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, line
            checked += 1
    assert checked > 10


def test_numbers_of_the_behavior_are_those_of_the_code() -> None:
    text = section(UPGRADE, "Behavior")
    assert f"up to {MOST_ENTRIES:,} batches" in text
    assert f"level {ProducerConfig.zstd_level}:" in text
    for name in re.findall(r"`([A-Z]\w+)`", text):
        assert name in errors.__all__, name


def test_the_figures_of_the_announcement_are_in_the_table_of_figures() -> None:
    figures = text_of("benchmarks/FIGURES.md")
    rows = re.findall(r"^\| (.*) \|$", section(NEWS, "Three figures"), re.MULTILINE)[1:]
    assert len(rows) == 3
    for row in rows:
        for number in re.findall(r"[\d.]+ (?:M|ms|s\b)|\d+ batches/s", row.split(" | ", 1)[1]):
            assert number in figures, number
    text = text_of(NEWS)
    for condition in ("two cores", "100 ms for a put, 60 ms for a read", "No cloud was measured"):
        assert condition in text.replace("\n", " ")
