from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from opendata_buffer.config import (
    ConsumerConfig,
    GarbageCollectorConfig,
    ProducerConfig,
    QueueConfig,
    StoreOptions,
)
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats.batch import Compression


def test_defaults_are_the_rfcs() -> None:
    producer = ProducerConfig(store="/data")
    assert producer.data_path_prefix == "ingest"
    assert producer.manifest_path == "ingest/manifest"
    assert producer.flush_interval_ms == 100
    assert producer.flush_size_bytes == 64 * 1024 * 1024
    assert producer.max_buffered_inputs is None
    assert producer.compression is Compression.NONE
    assert producer.zstd_level == 3
    consumer = ConsumerConfig(store="/data")
    assert consumer.manifest_path == "ingest/manifest"
    assert consumer.ack_interval == 100
    assert consumer.gc.interval_ms == 5 * 60_000
    assert consumer.gc.grace_period_ms == 10 * 60_000


def test_the_manifest_follows_the_prefix_unless_given() -> None:
    assert QueueConfig(store="/d", data_path_prefix="a/b").manifest_path == "a/b/manifest"
    config = QueueConfig(store="/d", data_path_prefix="a", manifest_path="queues/a")
    assert config.manifest_path == "queues/a"


@pytest.mark.parametrize(
    ("cls", "settings", "words"),
    [
        (ProducerConfig, {"flush_interval_ms": 0}, ["flush_interval_ms", "0", "at least 1"]),
        (ProducerConfig, {"flush_size_bytes": "64m"}, ["flush_size_bytes", "'64m'"]),
        (ProducerConfig, {"upload_concurrency": True}, ["upload_concurrency"]),
        (ProducerConfig, {"zstd_level": 23}, ["zstd_level", "23", "1 to 22"]),
        (ProducerConfig, {"zstd_level": "3"}, ["zstd_level", "'3'"]),
        (ProducerConfig, {"compression": "zstd"}, ["'zstd'", "Compression.ZSTD"]),
        (ProducerConfig, {"flush_interval_ms": sys.maxsize}, ["flush_interval_ms", "at most"]),
        (QueueConfig, {"store": Path("/d")}, ["PosixPath('/d')", "str(path)"]),
        (ProducerConfig, {"data_path_prefix": "/abs"}, ["data_path_prefix", "'/abs'"]),
        (ProducerConfig, {"data_path_prefix": "a/../b"}, ["data_path_prefix"]),
        (QueueConfig, {"manifest_path": "a//b"}, ["manifest_path", "'a//b'"]),
        (QueueConfig, {"max_manifest_bytes": 21}, ["max_manifest_bytes", "22"]),
        (QueueConfig, {"max_manifest_bytes": 2**31}, ["max_manifest_bytes", "at most 1073741824"]),
        (ConsumerConfig, {"ack_interval": -1}, ["ack_interval", "-1"]),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    cls: type[Any], settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(InvalidInput) as caught:
        cls(**{"store": "/d", **settings})
    for word in words:
        assert word in str(caught.value)


def test_collector_and_store_settings_are_checked_too() -> None:
    with pytest.raises(InvalidInput, match="grace_period_ms"):
        GarbageCollectorConfig(grace_period_ms=-1)
    with pytest.raises(InvalidInput, match=r"gc interval_ms.*at most"):
        GarbageCollectorConfig(interval_ms=sys.maxsize)
    with pytest.raises(InvalidInput, match="max_attempts"):
        StoreOptions(max_attempts=0)


def test_configs_pickle() -> None:
    config = ConsumerConfig(store="s3://b", store_options=StoreOptions(region="eu-west-1"))
    assert pickle.loads(pickle.dumps(config)) == config
