"""Topic to Spark to topic to Spark; drivers and publisher killed: each transaction whole or not."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest

from opendata_buffer.messages import undecided
from opendata_buffer.topic.topic import Topic
from tests.spark.chaos.processes import (
    MOMENTS,
    Fleet,
    Job,
    Stream,
    Writer,
    await_first_commits,
    seeded,
)
from tests.spark.chaos.worker_publish import RECORDS_EACH
from tests.spark.written import open_queue

pytestmark = pytest.mark.slow

KILLS = max(2, int(os.environ.get("OPENDATA_BUFFER_KILLS", "16")) // 8)
PARTITIONS = 4 if KILLS < 8 else 16
"""16 in the night, when there is time for more kills."""

BACKLOG = 40 * PARTITIONS
"""Batches that wait in the topic before the publisher takes a rest."""


def undecided_in(store: str) -> int:
    count = 0
    for name in Topic.open(store).description.names:
        manifest = open_queue(store, name).read()
        if manifest is not None:
            pairs = enumerate(manifest.locations(), manifest.first_sequence)
            count += len(undecided(pairs, name))
    return count


def test_every_transaction_is_whole_at_the_end_of_a_chain_of_topics(java: str, home: Path) -> None:
    ends = home / "topic-1", home / "topic-2"
    front = Stream.make(home, "front", "topic", *ends)
    back = Stream.make(home, "back", "sqlite", ends[1])
    for each in (front, back):
        each.options["maxBatchesPerTrigger"] = str(10 * PARTITIONS)
        Topic.create(each.store, PARTITIONS)
    publisher = Writer(front.store, script="worker_publish.py", backlog=BACKLOG)
    fleet = Fleet(Job([front, back], java), home, "both")
    kills = repeats = 0
    try:
        with seeded("CHAOS_SEED") as rng:
            while kills < KILLS or not repeats:
                # A machine may be too fast or too slow for each of a few: one must count.
                assert kills < 10 * KILLS, "no kill came in the middle of a micro-batch"
                driver = fleet.go()
                await_first_commits(driver, [front, back])
                rng.choice(MOMENTS[1:6]).await_in(driver, front, rng)
                driver.kill()
                kills += 1
                repeats += front.planned() > front.committed()
                publisher.kill()
            end = publisher.finish()
            fleet.go("drain").finish()

            delivered: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
            for value, *_ in back.rows():
                number, attempt, k = value.split("/")
                delivered[int(number), attempt].append(int(k))
            for transaction, records in delivered.items():
                assert sorted(records) == list(range(RECORDS_EACH)), transaction
            assert {number for number, _ in delivered} == set(range(end))
            assert [undecided_in(stream.store) for stream in (front, back)] == [0, 0]
    finally:
        fleet.end()
        publisher.end()
