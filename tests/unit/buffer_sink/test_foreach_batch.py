"""Writes from inside foreachBatch, and the broker in its process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import buffer_sink
from buffer_sink import foreach_batch as hosting
from buffer_sink.foreach_batch import foreach_batch_writer, serve_broker
from buffer_sink.options import SinkOptions
from opendata_buffer.broker.discovery_record import DiscoveryRecord, Lease
from opendata_buffer.config import QueueConfig
from opendata_buffer.errors import InvalidInput, TransientStorageError
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from opendata_buffer.topic.topic import Topic
from tests.unit.broker.local import eventually


class Frame:
    """Records what is asked of ``df.write``."""

    def __init__(self) -> None:
        self.write: Any = self
        self.asked: dict[str, Any] = {}

    def format(self, name: str) -> Frame:
        return self.options(format=name)

    def options(self, **options: str) -> Frame:
        self.asked |= options
        return self

    def option(self, name: str, value: str) -> Frame:
        return self.options(**{name: value})

    def mode(self, mode: str) -> Frame:
        return self.options(mode=mode)

    def save(self, path: str) -> None:
        self.options(path=path)


def test_it_is_a_batch_write_with_the_batch_id_as_version() -> None:
    frame = Frame()
    foreach_batch_writer("s3://b/r", txn_app_id="job", compression="zstd")(frame, 12)
    assert frame.asked == {
        "format": "opendata-buffer",
        "compression": "zstd",
        "txnAppId": "job",
        "txnVersion": "12",
        "mode": "append",
        "path": "s3://b/r",
    }


def test_options_in_snake_or_camel_case() -> None:
    one = foreach_batch_writer("/s", txn_app_id="a", data_path_prefix="p", gc_grace_period_ms=9**9)
    two = foreach_batch_writer("/s", txn_app_id="a", dataPathPrefix="p", gcGracePeriodMs=str(9**9))
    assert one == two
    assert one.options == {"dataPathPrefix": "p", "gcGracePeriodMs": "387420489", "txnAppId": "a"}
    assert foreach_batch_writer("/s", txn_app_id="a", region=None).options == {"txnAppId": "a"}


def test_options_are_checked_at_once() -> None:
    with pytest.raises(InvalidInput, match="Did you mean 'dataPathPrefix'"):
        foreach_batch_writer("/s", txn_app_id="a", data_prefix="p")
    with pytest.raises(InvalidInput, match="A-Z a-z 0-9"):
        foreach_batch_writer("/s", txn_app_id="a/b")
    with pytest.raises(TypeError, match="txn_app_id"):
        foreach_batch_writer("/s")  # type: ignore[call-arg]


def test_with_host_the_calling_process_serves_and_the_write_finds_a_broker_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[SinkOptions] = []
    monkeypatch.setattr("buffer_sink.foreach_batch.serve_broker", served.append)
    made = foreach_batch_writer("/s", txn_app_id="job", host_broker=True, data_path_prefix="p")
    assert served == []
    for batch in range(2):
        frame = Frame()
        pickle.loads(pickle.dumps(made))(frame, batch)
    assert [each.queue.data_path_prefix for each in served] == ["p", "p"]
    frame = Frame()
    foreach_batch_writer("/s", txn_app_id="job")(frame, 0)
    assert len(served) == 2


def test_the_package_exports_it() -> None:
    assert buffer_sink.foreach_batch_writer is foreach_batch_writer
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = buffer_sink.nothing


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
