"""The process that runs a foreachBatch function as the broker of what it writes to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_sink import hosting
from buffer_sink.hosting import host
from buffer_sink.options import SinkOptions
from opendata_buffer.broker.discovery_record import DiscoveryRecord, Lease
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import TransientStorageError
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic
from tests.unit.broker.local import eventually


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    hosting._leave()


def announced(config: QueueConfig) -> DiscoveryRecord | None:
    found = Lease(open_store(config.store), config, SystemRuntime()).read()
    return found if found is not None and found.serves else None


def test_it_serves_a_queue_until_the_process_ends(tmp_path: Path) -> None:
    config = QueueConfig(store=str(tmp_path))
    options = SinkOptions(queue=config, gc_grace_period_ms=900_000)
    host(options)
    eventually(lambda: announced(config))
    first = announced(config)
    assert first is not None
    host(options)
    (one,) = hosting._hosting.values()
    assert one._config.gc_grace_period_ms == 900_000
    hosting._leave()
    assert announced(config) is None
    assert hosting._hosting == {}


def test_it_serves_each_partition_of_a_topic_and_those_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "REFRESH_S", 0.0)
    config = QueueConfig(store=str(tmp_path))
    topic = Topic.create(config, 2)
    options = SinkOptions(queue=config)
    host(options)
    topic.expand(3)

    def all_served() -> bool:
        host(options)
        names = topic.read().active
        return len(names) == 3 and all(announced(Topic.config_of(n, config)) for n in names)

    eventually(all_served)


def test_a_store_that_does_not_answer_fails_no_write_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(store: Any) -> None:
        raise TransientStorageError("no answer")

    options = SinkOptions(queue=QueueConfig(store=str(tmp_path)))
    with monkeypatch.context() as patch:
        patch.setattr(hosting, "find_topic", silent)
        host(options)
    assert hosting._hosting == {}
    host(options)
    assert len(hosting._hosting) == 1
