"""What STORE names."""

from __future__ import annotations

from typing import Any

import click
import pytest

from opendata_buffer.cli.places import place_of
from opendata_buffer.config import ConsumerConfig
from opendata_buffer.errors import PermanentStorageError
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.memory import MemoryStore
from opendata_buffer.topic.topic import Topic

OPTIONS: dict[str, Any] = {
    "data_path_prefix": None, "manifest_path": None, "partition": None, "endpoint_url": None,
    "region": None, "profile": None, "timeout_ms": 1000,
}  # fmt: skip


def prefixes(url: str, **named: str) -> list[str]:
    with click.Context(click.Command("test")):
        place = place_of(SystemRuntime(), {**OPTIONS, "store": url, **named}, ConsumerConfig)
        return [each.data_path_prefix for each in place.configs()]


def test_a_store_without_a_topic_is_one_queue(url: str) -> None:
    assert prefixes(url) == ["ingest"]
    assert prefixes(url, data_path_prefix="a") == ["a"]


def test_a_topic_is_all_its_partitions_or_the_one_that_is_named(url: str) -> None:
    topic = Topic.create(url, 2)
    names = topic.description.names
    topic.drain(names[0])
    assert prefixes(url) == names
    assert prefixes(url, partition=names[1]) == names[1:]


def test_who_may_not_look_for_a_topic_has_a_queue(
    url: str, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(key: str, **options: object) -> object:
        raise PermanentStorageError(f"{key!r}: access denied")

    monkeypatch.setattr(store, "get", refused)
    assert prefixes(url) == ["ingest"]
