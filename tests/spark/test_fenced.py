"""A query that was replaced and does not know it: it acknowledges nothing more."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from tests.spark.queues import Query, Sink, manifest, numbered, produce, queued
from tests.support.killed import PATIENCE_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass
class HeldSink(Sink):
    """Blocks in one micro-batch, after it wrote it."""

    hold_in: int = 1
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        super().__call__(frame, batch_id)
        if batch_id == self.hold_in:
            self.held.set()
            assert self.released.wait(2 * PATIENCE_S)


def until_held(run: StreamingQuery, sink: HeldSink) -> None:
    """Wait for the sink to block; raises what the query failed with."""
    until = time.monotonic() + PATIENCE_S
    while not sink.held.wait(0.1):
        assert time.monotonic() < until
        if (error := run.exception()) is not None:
            raise error


def test_f8_a_query_fenced_in_the_middle_of_a_batch_acknowledges_nothing_more(
    spark: SparkSession, store: str, checkpoint: str, tmp_path: Path
) -> None:
    produce(store, numbered(0, 5))
    sink = HeldSink()
    first = Query(spark, store, checkpoint, sink, {"maxBatchesPerTrigger": "1"})
    run = first.start()
    try:
        until_held(run, sink)
        assert queued(store) == [1, 2, 3, 4]
        # Another query, which knows nothing of the first one's checkpoint.
        second = Query(spark, store, str(tmp_path / "other"))
        second.available_now()
        produce(store, numbered(5, 7))
        before = manifest(store)
        sink.released.set()
        with pytest.raises(StreamingQueryException, match="fenced by epoch 2"):
            run.awaitTermination(PATIENCE_S)
        assert manifest(store).raw == before.raw
        assert queued(store) == [5, 6]
        # A restarted query is the owner again; nothing was lost.
        second.available_now()
    finally:
        sink.released.set()
        run.stop()
    assert sink.values == [0, 1]
    assert second.sink.values == [1, 2, 3, 4, 5, 6]
    assert queued(store) == []
