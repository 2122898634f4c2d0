"""Buffer to Spark to buffer to Spark, the drivers of both ends killed: every record once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark.chaos.processes import KILLS, MOMENTS, Driver, Fleet, Job, Stream, Writer, seeded
from tests.spark.chaos.worker_produce import values
from tests.spark.queues import manifest

pytestmark = pytest.mark.slow

LIVES = max(4, KILLS // 4)


def test_every_record_once_at_the_end_of_a_chain(java: str, home: Path) -> None:
    between = home / "queue-2"
    front = Stream.make(home, "front", "buffer", home / "queue-1", between)
    back = Stream.make(home, "back", "sqlite", between)
    writer = Writer(front.store)
    ends = {
        front: Fleet(Job([front], java), home, "front", ahead=False),
        back: Fleet(Job([back], java), home, "back", ahead=False),
    }
    try:
        with seeded("CHAOS_SEED") as rng:
            for fleet in ends.values():
                fleet.go()
            kills = repeats = 0
            while True:
                # In turn, each at the points where a micro-batch is half done or just done.
                stream = (front, back)[kills % 2]
                driver = ends[stream].driver
                assert driver is not None
                rng.choice(MOMENTS[1:7]).await_in(driver, stream, rng)
                driver.kill()
                kills += 1
                repeats += stream.planned() > stream.committed()
                # A machine may be too fast or too slow for each of a few: one must count.
                if kills >= LIVES - 1 and repeats:
                    break
                assert kills < 10 * LIVES, "no kill came in the middle of a micro-batch"
                ends[stream].go()
            for fleet in ends.values():
                fleet.end()  # A kill, too, of the one that still runs.
            end = writer.finish()
            last = Driver(Job([front, back], java), home / "last.log")
            try:
                last.go("drain")
                last.finish()
            finally:
                last.kill()

            rows = sorted(back.rows(), key=lambda row: row[1:])
            expected = [value for number in range(end) for value in values(number)]
            # A micro-batch of the front is written by two tasks; between them there is no order.
            assert sorted(value for value, *_ in rows) == sorted(expected)
            assert [manifest(stream.store).entry_count for stream in ends] == [0, 0]
    finally:
        for fleet in ends.values():
            fleet.end()
        writer.end()
