"""A queue from producer to consumer on real servers, opened by its URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from opendata_buffer import Consumer, ConsumerConfig, Producer, ProducerConfig
from opendata_buffer.config import StoreOptions

QUEUES = [
    ("versitygw", "", "s3://bucket/{}"),
    ("fake-gcs-server", "", "gs://bucket/{}"),
    ("azurite", "/testing", "az://container/{}"),
    ("azurite", "/testing", "abfss://container@testing.dfs.core.windows.net/{}-files"),
]


@pytest.mark.parametrize(("server", "path", "url"), QUEUES)
def test_records_are_consumed_in_the_order_in_which_they_were_produced(
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
