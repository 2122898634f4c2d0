"""Drivers are killed at random moments: each of three sinks gets every record once."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

from tests.spark.chaos.lines import Lines
from tests.spark.chaos.processes import (
    MOMENTS,
    Drivers,
    Job,
    Stream,
    await_first_commits,
    check_sinks,
    writer,
)
from tests.spark.queues import manifest
from tests.support.killed import KILLS, seeded

(SINK_COMMIT,) = (moment for moment in MOMENTS if moment.name == "sink commit")
LIVES = max(len(MOMENTS), KILLS // 2)


def test_every_record_once_in_parquet_sqlite_and_a_buffer_after_many_kills(
    java: str, tmp_path: Path
) -> None:
    parquet = Stream.make(tmp_path, "files", "parquet", tmp_path / "queue-1")
    sqlite = Stream.make(tmp_path, "database", "sqlite", tmp_path / "queue-2")
    buffer = Stream.make(tmp_path, "lines", "lines", tmp_path / "in", tmp_path / "queue-3")
    streams = [parquet, sqlite, buffer]
    hit: Counter[str] = Counter()
    with (
        closing(writer(parquet.store, sqlite.store)) as writing,
        closing(Lines(buffer)) as lines,
        closing(Drivers(Job(streams, java), tmp_path)) as drivers,
        seeded("CHAOS_SEED") as rng,
    ):
        moments = [MOMENTS[life % len(MOMENTS)] for life in range(LIVES)]
        rng.shuffle(moments)
        restarts = set(rng.sample(range(LIVES), LIVES * 2 // 5))
        while moments:
            moment = moments.pop()
            driver = drivers.go()
            if not hit:
                await_first_commits(driver, streams)
            # At least one kill must hit between the two commits. SQLite's commit leaves time for
            # it.
            between = hit["in the sink, not committed"] == 0 and moment is SINK_COMMIT
            moment.await_in(driver, sqlite if between else rng.choice(streams), rng)
            driver.kill()
            hit["kill"] += 1
            for stream in streams:
                hit["planned, not committed"] += stream.planned() > stream.committed()
                hit["in the sink, not committed"] += stream.sunk() > stream.committed()
            if hit["kill"] in restarts:
                writing.kill_again()
            if not moments and not hit["in the sink, not committed"]:
                # The machine was too slow for the important moment, so try it again.
                assert hit["kill"] < 2 * LIVES, "no kill came between the two commits"
                moments.append(SINK_COMMIT)
        end = writing.kill_last(3)
        writing.wait()
        lines.close()
        check_sinks(sqlite, drivers.go("drain").finish(), end)
        lines.check()
        for stream in streams:
            assert stream is buffer or manifest(stream.store).entry_count == 0
            assert stream.planned() == stream.committed() == stream.sunk()
        # The test proves nothing if no kill hit between the steps of a micro-batch.
        print(f"{dict(hit)}, {writing.kills} kills of the producer, {end} transactions")
        assert hit["planned, not committed"] >= max(1, LIVES // 6)
        assert hit["in the sink, not committed"] >= max(1, LIVES // 30)
        assert writing.kills >= LIVES // 4
