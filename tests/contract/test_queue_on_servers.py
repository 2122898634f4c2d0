"""A queue from producer to consumer on real servers, opened by its URL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from opendata_buffer.admin.readers import enable_log, view_of
from opendata_buffer.admin.target import Target
from opendata_buffer.config import StoreOptions
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.ownership import claim_for_writing
from opendata_buffer.queue.readers import reset_reader
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from tests.support.logs import DAY_MS

QUEUES = [
    ("versitygw", "", "s3://bucket/{}"),
    ("fake-gcs-server", "", "gs://bucket/{}"),
    ("azurite", "/testing", "az://container/{}"),
    ("azurite", "/testing", "abfss://container@testing.dfs.core.windows.net/{}-files"),
]


@pytest.mark.parametrize(("server", "path", "url"), QUEUES)
def test_what_is_produced_is_consumed_in_order(
    real_server: Callable[[str], str], tmp_path: Path, server: str, path: str, url: str
) -> None:
    options = StoreOptions(endpoint_url=real_server(server) + path)
    store = url.format(tmp_path.name)
    records = [b"%d" % number for number in range(20)]
    producer = ProducerConfig(store=store, store_options=options, flush_interval_ms=1)
    with Producer(producer) as out:
        for record in records:
            out.produce([record]).result()
    found: list[bytes] = []
    with Consumer(ConsumerConfig(store=store, store_options=options)) as consumer:
        while (batch := consumer.next_batch()) is not None:
            found += batch.entries
            consumer.ack(batch.sequence)
    assert found == records


@pytest.mark.parametrize(("server", "path", "url"), QUEUES)
def test_each_named_reader_of_a_log_reads_everything_and_again(
    real_server: Callable[[str], str],
    tmp_path: Path,
    server: str,
    path: str,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Log, "most_entries", 8)
    monkeypatch.setattr(Log, "left_entries", 2)
    options = StoreOptions(endpoint_url=real_server(server) + path)
    config = ConsumerConfig(store=url.format(f"log-{tmp_path.name}"), store_options=options)
    runtime = SystemRuntime()
    opened = open_store(config.store, options)
    claim_for_writing(opened, config, runtime=runtime)
    enable_log(Target(opened, config, runtime), retention_ms=DAY_MS)
    records = [b"%d" % number for number in range(30)]
    settings = {"store": config.store, "store_options": options, "flush_interval_ms": 1}
    with Producer(ProducerConfig(**settings)) as out:
        for record in records:
            out.produce([record]).result()

    def read(name: str, most: int) -> list[bytes]:
        found: list[bytes] = []
        with Consumer(replace(config, reader=name)) as consumer:
            while len(found) < most and (batch := consumer.next_batch()) is not None:
                found += batch.entries
                consumer.ack(batch.sequence)
        return found

    assert read("billing", 10) + read("billing", 30) == records
    assert read("audit", 30) == records
    index = Log(opened, config, runtime).need()
    assert index.end > 8
    assert index.readers == ("audit", "billing")
    reset_reader(opened, config, "billing", 5, view_of(Target(opened, config, runtime)), runtime)
    assert read("billing", 30) == records[5:]
