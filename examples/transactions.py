"""Money moves between accounts: each transfer is two records in two partitions, or none.

Creates a topic if necessary, books some transfers, and adds up the messages that a reader of
committed messages gets. The sum over all accounts never changes. The word "crash" kills the process
in the middle of its last transfer. Run it again without the word, and the sum is right.

    pip install .
    python examples/transactions.py /tmp/bank
    python examples/transactions.py /tmp/bank crash
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter

from opendata_buffer import ConsumerConfig, InvalidInput, Publisher, Topic, TopicConsumer

ACCOUNTS = ["ada", "bob", "cleo", "dan"]
TRANSFERS = 20


def topic_at(url: str) -> Topic:
    """Return the topic; create it if it does not exist."""
    try:
        return Topic.open(url)
    except InvalidInput:
        return Topic.create(url, partitions=4)


def book(publisher: Publisher, amount: int, source: str, target: str) -> None:
    """Book one transfer: a record for each of the two accounts, in the open transaction."""
    for account, change in ((source, -amount), (target, amount)):
        record = json.dumps({"account": account, "change": change}).encode()
        publisher.publish_uncommitted([record], keys=[account])


def main(url: str, crash: bool) -> None:
    """Book transfers and add up a reader's records; ``crash`` ends before the last commit."""
    # A new publisher with this name commits or rolls back the transaction of the previous one.
    with Publisher(topic_at(url), "transfers") as publisher:
        for number in range(TRANSFERS):
            source, target = random.sample(ACCOUNTS, 2)
            book(publisher, random.randint(1, 100), source, target)
            if crash and number == TRANSFERS - 1:
                publisher.build_ack_intents()  # All of it is durable, but undecided.
                os._exit(1)
            publisher.commit()

    balances: Counter[str] = Counter()
    records = 0
    with TopicConsumer(ConsumerConfig(store=url)) as consumer:
        while (batch := consumer.next_batch()) is not None:
            for entry in map(json.loads, batch.values):
                balances[entry["account"]] += entry["change"]
                records += 1
            consumer.ack(batch)
    print(f"{records} records, sum {sum(balances.values())}")


if __name__ == "__main__":
    main(sys.argv[1], "crash" in sys.argv[2:])
