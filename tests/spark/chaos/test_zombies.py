"""A zombie driver, which does not know that it was replaced, acknowledges and damages nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tests.spark.chaos.processes import (
    MOMENTS,
    Driver,
    Drivers,
    Job,
    Stream,
    await_first_commits,
    check_sinks,
    wait_for,
    writer,
)
from tests.support.killed import KILLS, seeded

FREEZES = min(max(2, KILLS // 8), 6)

REASONS = (
    "was fenced by epoch",
    "Multiple streaming",
    "Race while writing batch",
    "its object does not exist",
)
"""A zombie ends because of the queue, Spark's logs, the file sink's log, or because its successor
has acknowledged the batches that it was reading and the collector has deleted them."""


def test_drivers_that_were_suspended_and_replaced_end_when_they_wake_up(
    java: str, tmp_path: Path
) -> None:
    """They use the same checkpoint as their successor, and are suspended at any moment."""
    parquet = Stream.make(tmp_path, "files", "parquet", tmp_path / "queue-1")
    sqlite = Stream.make(tmp_path, "database", "sqlite", tmp_path / "queue-2")
    streams = [parquet, sqlite]
    with (
        closing(writer(parquet.store, sqlite.store)) as writing,
        closing(Drivers(Job(streams, java), tmp_path)) as drivers,
        seeded("CHAOS_SEED") as rng,
    ):
        zombie = drivers.go()
        await_first_commits(zombie, streams)
        for moment in rng.sample(MOMENTS[1:7], FREEZES):
            moment.await_in(zombie, rng.choice(streams), rng)
            with parquet.locked(), sqlite.locked():
                zombie.stop()
            planned = {stream: stream.planned() for stream in streams}
            successor = drivers.go()
            # Definitely past the zombie: its planned micro-batch is finished, and the next has
            # begun.
            wait_for(lambda: is_past(successor, planned), "the successor's progress")  # noqa: B023
            assert not successor.ended(), successor.errors()
            zombie.resume()
            wait_for(zombie.ended, "the zombie's end")
            assert zombie.process.returncode == 1
            assert any(reason in zombie.errors() for reason in REASONS), zombie.errors()
            assert not successor.ended(), successor.errors()
            zombie = successor
        zombie.kill()
        end = writing.kill_last(3)
        writing.wait()
        check_sinks(sqlite, drivers.go("drain").finish(), end)


def is_past(driver: Driver, planned: dict[Stream, int]) -> bool:
    """Return whether a driver has finished a micro-batch after those, or has ended."""
    return driver.ended() or all(stream.committed() > batch for stream, batch in planned.items())
