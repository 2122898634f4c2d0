"""A driver that was replaced and does not know it: it acknowledges nothing and spoils nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.spark.chaos.processes import (
    KILLS,
    MOMENTS,
    Driver,
    Fleet,
    Job,
    Stream,
    Writer,
    await_first_commits,
    seeded,
    values_in,
    wait_for,
)
from tests.spark.chaos.worker_produce import values

pytestmark = pytest.mark.slow

FREEZES = min(max(2, KILLS // 8), 6)


def test_drivers_that_were_suspended_and_replaced_end_when_they_wake_up(
    java: str, home: Path
) -> None:
    """With the very checkpoint their successor uses, in the middle of anything."""
    parquet = Stream.make(home, "files", "parquet", home / "queue-1")
    sqlite = Stream.make(home, "database", "sqlite", home / "queue-2")
    streams = [parquet, sqlite]
    writer = Writer(parquet.store, sqlite.store)
    fleet = Fleet(Job(streams, java, shows=True), home)
    try:
        with seeded("CHAOS_SEED") as rng:
            zombie = fleet.go()
            await_first_commits(zombie, streams)
            for moment in rng.sample(MOMENTS[1:7], FREEZES):
                moment.await_in(zombie, rng.choice(streams), rng)
                with parquet.locked(), sqlite.locked():
                    zombie.stop()
                seen = {stream: stream.planned() for stream in streams}
                successor = fleet.go()
                try:
                    # Past the zombie for good: what it planned is finished, and the next begun.
                    wait_for(partial(is_past, successor, seen), "the successor's progress")
                    assert not successor.ended(), successor.errors()
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
                    assert any(reason in zombie.errors() for reason in reasons), zombie.errors()
                    assert not successor.ended(), successor.errors()
                finally:
                    zombie.kill()
                zombie = successor
            zombie.kill()
            end = writer.finish()
            shown = values_in(fleet.go("drain").finish())

            expected = [value for number in range(end) for value in values(number)]
            rows = sorted(sqlite.rows(), key=lambda row: row[1:])
            assert [value for value, *_ in rows] == expected
            assert shown == expected
    finally:
        fleet.end()
        writer.end()


def is_past(driver: Driver, planned: dict[Stream, int]) -> bool:
    """Whether a driver finished a micro-batch behind those; or ended."""
    return driver.ended() or all(stream.committed() > batch for stream, batch in planned.items())
