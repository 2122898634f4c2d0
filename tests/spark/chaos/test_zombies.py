"""A driver that was replaced and does not know it: it acknowledges nothing and spoils nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException

from tests.spark.chaos.processes import (
    MOMENTS,
    PATIENCE_S,
    Driver,
    Fleet,
    Job,
    Stream,
    Writer,
    await_first_commits,
    seeded,
    wait_for,
)
from tests.spark.chaos.worker_produce import values
from tests.spark.jvm import LATE
from tests.spark.queues import Query, Sink, manifest, numbered, produce, queued

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.slow

FREEZES = 2


@dataclass
class HeldSink(Sink):
    """Stands still in one micro-batch, after it wrote it."""

    hold_in: int = 1
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        super().__call__(frame, batch_id)
        if batch_id == self.hold_in:
            self.held.set()
            assert self.released.wait(2 * PATIENCE_S)


def until_held(run: StreamingQuery, query: Query) -> StreamingQuery:
    """Wait for the sink to stand still. A busy machine is no failure: see ``LATE``."""
    assert isinstance(query.sink, HeldSink)
    until = time.monotonic() + PATIENCE_S
    while not query.sink.held.wait(0.1):
        assert time.monotonic() < until
        error = run.exception()
        if error is not None:
            assert LATE in str(error)
            run = query.start()
    return run


def test_f8_a_query_fenced_in_the_middle_of_a_batch_acknowledges_nothing_more(
    spark: SparkSession, store: str, checkpoint: str, tmp_path: Path
) -> None:
    produce(store, numbered(0, 5))
    sink = HeldSink()
    first = Query(spark, store, checkpoint, sink, {"maxBatchesPerTrigger": "1"})
    run = first.start()
    try:
        run = until_held(run, first)
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
        # Whoever is restarted now is the owner again; nothing was lost on the way.
        second.available_now()
    finally:
        sink.released.set()
        run.stop()
    assert sink.values == [0, 1]
    assert second.sink.values == [1, 2, 3, 4, 5, 6]
    assert queued(store) == []


def test_drivers_that_were_suspended_and_replaced_end_when_they_wake_up(
    spark: SparkSession, java: str, home: Path
) -> None:
    """With the very checkpoint their successor uses, in the middle of anything."""
    parquet = Stream.make(home, "files", "parquet", home / "queue-1")
    sqlite = Stream.make(home, "database", "sqlite", home / "queue-2")
    streams = [parquet, sqlite]
    writer = Writer(parquet.store, sqlite.store)
    fleet = Fleet(Job(streams, java), home)
    try:
        with seeded("CHAOS_SEED") as rng:
            zombie = fleet.go()
            await_first_commits(zombie, streams)
            for moment in rng.sample(MOMENTS[1:7], FREEZES):
                moment.await_in(zombie, rng.choice(streams), rng)
                zombie.stop()
                seen = {stream: stream.planned() for stream in streams}
                successor = fleet.go()
                try:
                    # Past the zombie for good: what it planned is finished, and the next begun.
                    wait_for(partial(is_past, successor, seen), "the successor's progress")
                    assert not successor.ended(), successor.said()
                    zombie.resume()
                    wait_for(zombie.ended, "the zombie's end")
                    assert zombie.process.returncode == 1
                    # By the queue, by Spark's logs, by the file sink's, or because what it
                    # was reading was acknowledged by its successor and collected.
                    reasons = (
                        "was fenced by epoch",
                        "Multiple streaming",
                        "Race while writing batch",
                        "its object does not exist",
                    )
                    assert any(reason in zombie.said() for reason in reasons), zombie.said()
                    assert not successor.ended(), successor.said()
                finally:
                    zombie.kill()
                zombie = successor
            zombie.kill()
            end = writer.finish()
            fleet.go("drain").finish()

            expected = [value for number in range(end) for value in values(number)]
            rows = sorted(sqlite.rows(), key=lambda row: row[1:])
            assert [value for value, *_ in rows] == expected
            files = spark.read.parquet(parquet.out).orderBy("sequence", "index")
            assert [row["value"] for row in files.select("value").collect()] == expected
    finally:
        fleet.end()
        writer.end()


def is_past(driver: Driver, planned: dict[Stream, int]) -> bool:
    """Whether a driver finished a micro-batch behind those; or ended."""
    return driver.ended() or all(stream.committed() > batch for stream, batch in planned.items())
