"""Queries with named readers of one log, in a real session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from opendata_buffer import Producer
from opendata_buffer.config import QueueConfig
from opendata_buffer.queue.log import Log
from opendata_buffer.queue.reader_positions import position_object
from opendata_buffer.runtime import SystemRuntime
from opendata_buffer.stores.open import open_store
from tests.spark.queues import Query, manifest, numbered, produce
from tests.support.logs import make_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def log(store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make a log with small segments of at least 12 batches."""
    monkeypatch.setattr(Log, "most_entries", 16)
    monkeypatch.setattr(Log, "left_entries", 4)
    with Producer(store) as producer:
        producer.produce([b"0"]).result(60)
    make_log(QueueConfig(store=store))
    return store


def at(log: str, reader: str) -> int:
    where = Log(open_store(log), QueueConfig(store=log), SystemRuntime())
    found = position_object(where, reader).read()
    return found.next  # type: ignore[union-attr]


def test_two_queries_fail_and_restart_and_each_has_everything_once(
    spark: SparkSession, log: str, tmp_path: Path
) -> None:
    queries = {
        name: Query(
            spark, log, str(tmp_path / name), options={"reader": name, "maxBatchesPerTrigger": "9"}
        )
        for name in ("billing", "audit")
    }
    produce(log, numbered(1, 40))
    assert manifest(log).first_sequence > 0, "entries moved into segments"
    queries["billing"].sink.fail_in = 2
    with queries["audit"].running() as audit:
        with pytest.raises(Exception, match="failing in batch 2"):
            queries["billing"].available_now()
        audit.processAllAvailable()
    produce(log, numbered(40, 60))
    for query in queries.values():
        query.available_now()
        once = dict(query.sink.batches)
        assert sorted(value for values in once.values() for value in values) == [*range(60)]
    billing = [batch for batch, _ in queries["billing"].sink.batches]
    assert billing.count(2) == 2, "the micro-batch was repeated"
    assert len({tuple(v) for b, v in queries["billing"].sink.batches if b == 2}) == 1
    produce(log, numbered(60, 61))
    queries["audit"].available_now()
    assert 40 < at(log, "billing") <= 60 <= at(log, "audit")
    found = spark.read.format("opendata-buffer").option("startingOffsets", "5").load(log)
    assert found.count() == 56, "a batch read also returns acknowledged batches"
