"""The process that runs a foreachBatch function as the broker of what it writes to."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffer_sink import foreach_batch as hosting
from buffer_sink.foreach_batch import serve_broker
from buffer_sink.options import SinkOptions
from opendata_buffer.broker.lease import DiscoveryRecord, Lease
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic
from tests.unit.broker.local import eventually


@pytest.fixture(autouse=True)
def left() -> Iterator[None]:
    yield
    hosting._close_brokers()


def announced(config: QueueConfig) -> DiscoveryRecord | None:
    found = Lease(open_store(config.store), config, SystemRuntime()).read()
    return found if found is not None and found.serves else None


def test_it_serves_a_queue_until_the_process_ends(tmp_path: Path) -> None:
    config = QueueConfig(store=str(tmp_path))
    options = SinkOptions(queue=config, gc_grace_period_ms=900_000)
    serve_broker(options)
    eventually(lambda: announced(config))
    first = announced(config)
    assert first is not None
    serve_broker(options)
    (one,) = hosting._brokers.values()
    assert one._config.gc_grace_period_ms == 900_000
    hosting._close_brokers()
    assert announced(config) is None
    assert hosting._brokers == {}


def test_it_serves_each_partition_of_a_topic_and_those_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "REFRESH_S", 0.0)
    config = QueueConfig(store=str(tmp_path))
    topic = Topic.create(config, 2)
    options = SinkOptions(queue=config)
    serve_broker(options)
    topic.expand(3)

    def all_served() -> bool:
        serve_broker(options)
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
        serve_broker(options)
    assert hosting._brokers == {}
    serve_broker(options)
    assert len(hosting._brokers) == 1


def test_without_the_extra_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(InvalidInput, match=r"pip install 'opendata-buffer\[broker\]'"):
        serve_broker(SinkOptions(queue=QueueConfig(store=str(tmp_path))))
