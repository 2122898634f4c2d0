"""Drivers killed with kill -9 at random moments: every record once in both sinks."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.chaos.processes import (
    MOMENTS,
    Fleet,
    Job,
    Stream,
    Writer,
    await_first_commits,
    seeded,
)
from tests.spark.chaos.worker_produce import values
from tests.spark.queues import manifest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("OPENDATA_BUFFER_KILLS", "16"))


def test_every_record_once_in_parquet_and_sqlite_after_many_kills(
    spark: SparkSession, java: str, home: Path
) -> None:
    parquet = Stream.make(home, "files", "parquet", home / "queue-1")
    sqlite = Stream.make(home, "database", "sqlite", home / "queue-2")
    streams = [parquet, sqlite]
    hit: Counter[str] = Counter()
    writer = Writer(parquet.store, sqlite.store)
    fleet = Fleet(Job(streams, java), home)
    try:
        with seeded("CHAOS_SEED") as rng:
            moments = [MOMENTS[kill % len(MOMENTS)] for kill in range(KILLS)]
            rng.shuffle(moments)
            for moment in moments:
                driver = fleet.go()
                if not hit:
                    await_first_commits(driver, streams)
                # One kill at least must come between the two commits: SQLite's leave time for it.
                between = hit["in the sink, not committed"] == 0 and moment.name == "sink commit"
                moment.await_in(driver, sqlite if between else rng.choice(streams), rng)
                driver.kill()
                hit["kill"] += 1
                for stream in streams:
                    hit["planned, not committed"] += stream.planned() > stream.committed()
                    hit["in the sink, not committed"] += stream.sunk() > stream.committed()
                if rng.random() < 0.4:
                    writer.kill()
            end = writer.finish()
            fleet.go("drain").finish()
            print(f"{dict(hit)}, {writer.kills} kills of the producer, {end} transactions")

            expected = [value for number in range(end) for value in values(number)]
            rows = sorted(sqlite.rows(), key=lambda row: row[1:])
            assert [value for value, *_ in rows] == expected
            files = spark.read.parquet(parquet.out).orderBy("sequence", "index")
            assert [row["value"] for row in files.select("value").collect()] == expected
            for stream in streams:
                assert manifest(stream.store).entry_count == 0
                assert stream.planned() == stream.committed() == stream.sunk()
            # It is no proof if the kills never came between the steps of a micro-batch.
            assert hit["planned, not committed"] >= KILLS // 6
            assert hit["in the sink, not committed"] >= max(1, KILLS // 30)
            assert writer.kills >= KILLS // 8
    finally:
        fleet.end()
        writer.end()
