"""Buffer to Spark to buffer to Spark, also with topics, while drivers and writers are killed."""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import closing
from pathlib import Path

from opendata_buffer.messages import undecided
from opendata_buffer.topic.topic import Topic
from tests.spark.chaos.processes import (
    GRACE_MS,
    MOMENTS,
    Drivers,
    Job,
    Stream,
    await_first_commits,
    writer,
)
from tests.spark.chaos.worker_publish import RECORDS_EACH
from tests.spark.queues import manifest
from tests.support.killed import KILLS, Writer, seeded
from tests.support.worker_produce import values

LIVES = max(3, KILLS // 4)
TOPIC_KILLS = max(2, KILLS // 8)
PARTITIONS = 4 if TOPIC_KILLS < 8 else 16
"""Kills of drivers; 16 at night."""


def kill_all(jobs: list[Drivers], writer: Writer, kills: int, rng: random.Random) -> int:
    """Kill drivers in turn, when a micro-batch is half done or just done, and the writer as often.

    Returns:
        The number of transactions at the end.
    """
    for drivers in jobs:
        drivers.go()
    count = repeats = 0
    while True:
        drivers = jobs[count % len(jobs)]
        driver, queries = drivers.driver, drivers.job.queries
        await_first_commits(driver, queries)
        rng.choice(MOMENTS[1:7]).await_in(driver, queries[0], rng)
        driver.kill()
        writer.kill_again()
        count += 1
        repeats += queries[0].planned() > queries[0].committed()
        # A machine may be too fast or too slow for some kills, but one must hit.
        if count >= kills and repeats:
            break
        assert count < 10 * kills, "no kill came in the middle of a micro-batch"
        drivers.go()
    end = writer.kill_last(3)
    writer.wait()
    return end


def test_every_record_once_at_the_end_of_a_chain(java: str, tmp_path: Path) -> None:
    between = tmp_path / "queue-2"
    front = Stream.make(tmp_path, "front", "buffer", tmp_path / "queue-1", between)
    back = Stream.make(tmp_path, "back", "sqlite", between)
    with (
        closing(writer(front.store)) as writing,
        closing(Drivers(Job([front], java), tmp_path, "front", ahead=False)) as first,
        closing(Drivers(Job([back], java), tmp_path, "back", ahead=False)) as second,
        seeded("CHAOS_SEED") as rng,
    ):
        end = kill_all([first, second], writing, LIVES, rng)
        for drivers in (first, second):
            drivers.close()
        with closing(Drivers(Job([front, back], java), tmp_path, "last", ahead=False)) as last:
            last.go("drain").finish()
        # Two tasks write a micro-batch of the front, without an order between them.
        assert sorted(value for value, *_ in back.rows()) == sorted(values("writer", end))
        assert [manifest(query.store).entry_count for query in (front, back)] == [0, 0]


def undecided_in(store: str) -> int:
    count = 0
    for name in Topic.open(store).description.names:
        found = manifest(store, name)
        count += len(undecided(enumerate(found.locations(), found.first_sequence), name))
    return count


def test_every_transaction_is_whole_at_the_end_of_a_chain_of_topics(
    java: str, tmp_path: Path
) -> None:
    ends = tmp_path / "topic-1", tmp_path / "topic-2"
    front = Stream.make(tmp_path, "front", "topic", *ends)
    back = Stream.make(tmp_path, "back", "sqlite", ends[1])
    for query in (front, back):
        query.options["maxBatchesPerTrigger"] = str(10 * PARTITIONS)
        Topic.create(query.store, PARTITIONS)
    publisher = Writer(
        "chaos",
        front.store,
        module="tests.spark.chaos.worker_publish",
        grace_ms=GRACE_MS,
        pause_s=0.03,
        backlog=40 * PARTITIONS,
    )
    with (
        closing(publisher),
        closing(Drivers(Job([front, back], java), tmp_path)) as drivers,
        seeded("CHAOS_SEED") as rng,
    ):
        end = kill_all([drivers], publisher, TOPIC_KILLS, rng)
        drivers.go("drain").finish()
        delivered: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for value, *_ in back.rows():
            number, attempt, k = value.split("/")
            delivered[int(number), attempt].append(int(k))
        for transaction, records in delivered.items():
            assert sorted(records) == list(range(RECORDS_EACH)), transaction
        assert {number for number, _ in delivered} == set(range(end))
        assert [undecided_in(stream.store) for stream in (front, back)] == [0, 0]
