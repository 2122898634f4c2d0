"""Drivers killed with kill -9 at random moments: every record once in each of three sinks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.spark.chaos.lines import Lines
from tests.spark.chaos.processes import (
    KILLS,
    MOMENTS,
    Fleet,
    Job,
    Stream,
    Writer,
    await_first_commits,
    seeded,
    values_in,
)
from tests.spark.chaos.worker_produce import values
from tests.spark.queues import manifest

pytestmark = pytest.mark.slow

(SINK_COMMIT,) = (moment for moment in MOMENTS if moment.name == "sink commit")
LIVES = max(len(MOMENTS), KILLS // 2)


def test_every_record_once_in_parquet_sqlite_and_a_buffer_after_many_kills(
    java: str, home: Path
) -> None:
    parquet = Stream.make(home, "files", "parquet", home / "queue-1")
    sqlite = Stream.make(home, "database", "sqlite", home / "queue-2")
    buffer = Stream.make(home, "lines", "lines", home / "in", home / "queue-3")
    streams = [parquet, sqlite, buffer]
    hit: Counter[str] = Counter()
    writer = Writer(parquet.store, sqlite.store)
    lines = Lines(buffer)
    fleet = Fleet(Job(streams, java, shows=True), home)
    try:
        with seeded("CHAOS_SEED") as rng:
            moments = [MOMENTS[life % len(MOMENTS)] for life in range(LIVES)]
            rng.shuffle(moments)
            restarts = set(rng.sample(range(LIVES), LIVES * 2 // 5))
            while moments:
                moment = moments.pop()
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
                if hit["kill"] in restarts:
                    writer.kill()
                if not moments and not hit["in the sink, not committed"]:
                    # The machine was too slow for the moment that counts: it is tried again.
                    assert hit["kill"] < 2 * LIVES, "no kill came between the two commits"
                    moments.append(SINK_COMMIT)
            end = writer.finish()
            lines.end()
            shown = values_in(fleet.go("drain").finish())
            print(f"{dict(hit)}, {writer.kills} kills of the producer, {end} transactions")

            expected = [value for number in range(end) for value in values(number)]
            rows = sorted(sqlite.rows(), key=lambda row: row[1:])
            assert [value for value, *_ in rows] == expected
            assert shown == expected
            lines.check()
            for stream in streams:
                assert stream is buffer or manifest(stream.store).entry_count == 0
                assert stream.planned() == stream.committed() == stream.sunk()
            # It is no proof if the kills never came between the steps of a micro-batch.
            assert hit["planned, not committed"] >= max(1, LIVES // 6)
            assert hit["in the sink, not committed"] >= max(1, LIVES // 30)
            assert writer.kills >= LIVES // 4
    finally:
        fleet.end()
        writer.end()
        lines.end()
