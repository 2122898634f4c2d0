"""kill -9 of a publisher at random moments: each transaction is whole, once, or not there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from opendata_buffer import ConsumerConfig, Topic, TopicConsumer
from opendata_buffer.config import GarbageCollectorConfig
from opendata_buffer.topic.publisher import Publisher

KILLS = int(os.environ.get("OPENDATA_BUFFER_KILLS", "4"))
PARTITIONS = 4

# One transaction after the other over all partitions; says when one is committed.
WRITER = """
import sys
from opendata_buffer import ProducerConfig, Publisher

store, run = sys.argv[1:]
config = ProducerConfig(store=store, broker="off", flush_interval_ms=1)
publisher = Publisher(store, "billing", config=config)
number = 0
while True:
    for partition in range(4):
        for part in range(2):
            record = f"{run} {number} {partition} {part}".encode()
            publisher.publish_uncommitted([record], partition=str(partition))
    publisher.commit()
    print(number, flush=True)
    number += 1
"""


def test_f39_kill_9_leaves_no_transaction_by_half(tmp_path: Path) -> None:
    store = str(tmp_path)
    Topic.create(store, PARTITIONS)
    dice = random.Random(39)
    said: set[tuple[int, int]] = set()
    for run in range(KILLS):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, store, str(run)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        first = writer.stdout.readline()  # it is past its start
        time.sleep(dice.random() * 0.2)
        writer.send_signal(signal.SIGKILL)
        lines = [first, *writer.stdout.read().splitlines()]
        writer.wait()
        said |= {(run, int(line)) for line in lines}
    Publisher(store, "billing").close()  # ends what the last one left

    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    config = ConsumerConfig(store=store, gc=GarbageCollectorConfig(enabled=False))
    with TopicConsumer(config) as consumer:
        while (batch := consumer.next_batch()) is not None:
            for record in batch.entries:
                run, number, partition, part = map(int, record.split())
                found[run, number].append((partition, part))
            consumer.ack(batch)
    whole = [(partition, part) for partition in range(PARTITIONS) for part in range(2)]
    assert all(sorted(parts) == whole for parts in found.values())
    # What was said to be committed is there; and at most the one that was cut off besides.
    assert said <= set(found)
    assert len(said) >= KILLS
    assert len(set(found) - said) <= KILLS
